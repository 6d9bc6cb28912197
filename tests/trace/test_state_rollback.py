"""What a run without data changes is as it was: sources of random numbers, arrays, files; iterators are refused."""

import array
import io
import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import on_meshes

RULES = {"up.weight": "f@tp c", "down.weight": "c f@tp"}
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


class Net(nn.Module):
    def __init__(self, forward: Callable[[Callable[[Tensor], Tensor], Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16, dtype=torch.float64), nn.Linear(16, 6, dtype=torch.float64)
        self.given = forward

    def forward(self, x: Tensor, source: Any) -> Tensor:
        return self.given(lambda x: self.down(self.up(x).tanh()), x, source)


def _drawn(f: Callable[[Tensor], Tensor], x: Tensor, draw: Callable[[], Any]) -> Tensor:
    return f(x) * float(draw())


def _noisy(f: Callable[[Tensor], Tensor], x: Tensor, generator: torch.Generator) -> Tensor:
    return f(x + torch.randn(x.shape, generator=generator, dtype=x.dtype))


def _counted(f: Callable[[Tensor], Tensor], x: Tensor, seen: Any) -> Tensor:
    seen += 1
    return f(x) * float(seen[0])


def _counted_in_one(f: Callable[[Tensor], Tensor], x: Tensor, seen: Any) -> Tensor:
    seen[0] += 1
    return f(x) * float(seen[0])


def _looped(f: Callable[[Tensor], Tensor], x: Tensor, items: Any) -> Tensor:
    for item in items:
        x = x + f(x) * item
    return x


def _unused(f: Callable[[Tensor], Tensor], x: Tensor, items: Any) -> Tensor:
    return f(x)


def _of_numpy() -> Callable[[], Any]:
    np.random.seed(0)
    return np.random.rand


def _endless() -> Iterator[float]:
    number = 1.0
    while True:
        number += 1
        yield number


def _begun() -> Iterator[float]:
    numbers = _endless()
    next(numbers)
    return itertools.islice(numbers, 2)


SOURCES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "Random": (_drawn, lambda: random.Random(0).random),
    "numpy": (_drawn, _of_numpy),
    "a Generator of numpy": (_drawn, lambda: np.random.default_rng(0).random),
    "a file": (_drawn, lambda: io.StringIO("2\n3\n").readline),
    "a Generator of torch": (_noisy, lambda: torch.Generator().manual_seed(0)),
    "an array": (_counted, lambda: np.zeros(3)),
    "a strided array": (_counted, lambda: np.zeros((3, 2))[:, 1]),
    "an array of Python": (_counted_in_one, lambda: array.array("d", [0.0, 0.0])),
    "a bytearray": (_counted_in_one, lambda: bytearray(2)),
    "keys": (_looped, lambda: {1.0: 0, 2.0: 0}.keys()),
    "an iterator that nobody asks": (_unused, lambda: iter([1.0, 2.0])),
}

ITERATORS: dict[str, Callable[[], Iterator[float]]] = {
    "list_iterator": lambda: iter([1.0, 2.0]),
    "dict_keyiterator": lambda: iter({1.0: 0, 2.0: 0}),
    "generator": lambda: (item for item in (1.0, 2.0)),
    "map": lambda: map(float, ("1", "2")),
    "chain": lambda: itertools.chain([1.0], [2.0]),
    "islice": _begun,
}


def _both(mesh: DeviceMesh, forward: Any, make: Callable[[], Any], kind: Any = None) -> None:
    model = (kind or Net)(forward)
    for one in model.parameters():
        nn.init.constant_(one, 0.1)
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    source = make()
    ours = [sf.apply(model, params, X, source) for _ in range(2)]
    source = make()
    torch.testing.assert_close(ours, [model(X, source) for _ in range(2)])


@on_meshes({"fsdp": 1, "tp": 2})
@pytest.mark.parametrize("name", SOURCES)
def test_sources_go_on_from_where_they_were(mesh: DeviceMesh, name: str) -> None:
    _both(mesh, *SOURCES[name])


@on_meshes({"fsdp": 1, "tp": 2})
def test_what_is_taken_from_an_iterator_is_refused(mesh: DeviceMesh) -> None:
    for name, make in ITERATORS.items():
        with pytest.raises(sf.ShardError, match=rf"takes items from a {name}, .* Hand over a list"):
            _both(mesh, _looped, make)
        _both(mesh, _looped, lambda make=make: [*make()])
    kept = Net(lambda f, x, _: f(x) * next(numbers))
    numbers = itertools.count(1)
    with pytest.raises(sf.ShardError, match=r"takes items from a count"):
        sf.apply(kept, sf.shard(kept, mesh, sf.Policy(rules=RULES)), X, None)


class _Holder:
    last: Any = None


def _shelf() -> None:
    pass


_CONTEXT: ContextVar[Any] = ContextVar("kept")
_THREADS, _QUEUE, _ARRAY = threading.local(), queue.SimpleQueue[Tensor](), np.empty(1, dtype=object)


@cache
def _remembered() -> list[Tensor]:
    return []


PLACES: dict[str, Callable[[Tensor], Any]] = {
    "a class": lambda h: setattr(_Holder, "last", h),
    "a function": lambda h: vars(_shelf).update(last=h),
    "a thread's storage": lambda h: setattr(_THREADS, "last", h),
    "a queue": _QUEUE.put,
    "an array": lambda h: _ARRAY.fill(h),
    "a cached list": lambda h: _remembered().append(h),
}


@on_meshes({"tp": 2})
@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_is_kept_where_it_is_not_found(mesh: DeviceMesh, place: str) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor, keep: bool) -> Tensor:
            h = self.up(x)
            if keep:
                PLACES[place](h)
            else:
                self.kept.append(h)
                _CONTEXT.set(h)
            return self.down(h.tanh())

    model = Keeps()
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    says = r"keeps a value of 'module up' .* Return it, or keep it in an attribute"
    found = {"a class": vars(_Holder), "a function": vars(_shelf)}
    with nullcontext() if place in found else pytest.raises(sf.ShardError, match=says):
        sf.apply(model, params, X.float(), True)
        assert found[place]["last"].shape == (4, 16)
    sf.apply(model, params, X.float(), False)
    assert [x.shape for x in model.kept] == [(4, 16)], "whole, in what the error names"
    assert _CONTEXT.get().shape == (4, 16)


_COUNT: ContextVar[int] = ContextVar("count", default=3)


@on_meshes({"tp": 2})
def test_a_variable_of_the_context_goes_on_from_its_default(mesh: DeviceMesh) -> None:
    def counted(f: Callable[[Tensor], Tensor], x: Tensor, _: Any) -> Tensor:
        _COUNT.set(_COUNT.get() + 1)
        return f(x)

    model = Net(counted)
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    for calls in (1, 2):
        sf.apply(model, params, X, None)
        assert _COUNT.get() == 3 + calls


SETTINGS: Any = ModuleType("settings_of_a_rollback")
vars(SETTINGS).update(steps=0, draws=random.Random(0))


class _Counting(Net):
    steps, seen, made = 0, list[int](), 0  # of the class
    first: int
    waits: int


def _in_a_class(f: Callable[[Tensor], Tensor], x: Tensor, _: Any) -> Tensor:
    _Counting.steps += 1
    _Counting.seen.append(len(x))
    if "first" not in vars(_Counting):
        _Counting.first = len(x)
        _Counting.made += 1
    return f(x) * _Counting.steps


def _in_a_module(f: Callable[[Tensor], Tensor], x: Tensor, _: Any) -> Tensor:
    SETTINGS.steps = SETTINGS.steps + 1
    return f(x) * SETTINGS.steps * SETTINGS.draws.random()


def _taking_away(f: Callable[[Tensor], Tensor], x: Tensor, _: Any) -> Tensor:
    global MADE, WAITS
    if "waits" in vars(_Counting) and "WAITS" in globals() and hasattr(SETTINGS, "waits"):
        del _Counting.waits, WAITS, SETTINGS.waits
        _Counting.made += 1
    if "MADE" not in globals():
        MADE = SETTINGS.made = 1
        _Counting.made += 1
    return f(x) * (1 + _Counting.made)


@on_meshes({"fsdp": 1, "tp": 2})
def test_what_a_forward_takes_away_or_makes_is_so_once(mesh: DeviceMesh) -> None:
    def reset() -> None:
        global WAITS
        _Counting.made, _Counting.waits = 0, 0
        WAITS = SETTINGS.waits = [0]
        globals().pop("MADE", None)

    reset()
    _both(mesh, _taking_away, reset, _Counting)
    assert _Counting.made == 2


@on_meshes({"fsdp": 1, "tp": 2})
def test_what_classes_and_modules_of_the_user_hold_counts_each_call_once(mesh: DeviceMesh) -> None:
    def reset() -> None:
        _Counting.steps, _Counting.seen, _Counting.made = 0, [], 0
        if "first" in vars(_Counting):
            del _Counting.first
        vars(SETTINGS).update(steps=0, draws=random.Random(0))

    for forward in (_in_a_class, _in_a_module):
        reset()
        _both(mesh, forward, reset, _Counting)
        counted = _Counting.steps, len(_Counting.seen), _Counting.made, SETTINGS.steps
        assert counted in ((2, 2, 1, 0), (0, 0, 0, 2))
