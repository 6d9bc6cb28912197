"""What a shape-only trace was decided by is compared at each call: sizes, numbers, attributes, what lists hold."""

import array
import ctypes
import datetime
import math
import queue
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import assert_close, assert_parity, on_meshes
from shardfn.trace.shape_trace import ShapeTrace

RULES = sf.Policy(rules={"up.weight": "f@tp c", "down.weight": "c f@tp"})


class Between(nn.Module):
    """What `way` makes of split features, and what it may look at."""

    way: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.flag, self.calls, self.tau, self.name = False, 0, 1.0, ""
        self.seen, self.table = list[Any](), dict[str, Any]()
        self.config = SimpleNamespace(mixed=False, steps=0, outs=[])
        self.kept: Any = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.down(type(self).way(self, torch.tanh(self.up(x)), *args, **kwargs))


def mixed(h: Tensor) -> Tensor:
    """Positions and features in each other's places: no rank has what one process has."""
    return h.transpose(1, 2).reshape(h.shape)


def of(way: Callable[..., Tensor]) -> Any:
    return type("Way", (Between,), {"way": way})().double()


def inputs(positions: int = 4) -> Tensor:
    return torch.linspace(-1, 1, 2 * positions * 8, dtype=torch.float64).reshape(2, positions, 8)


def by_flag(m: Any, h: Tensor) -> Tensor:
    return mixed(h) if m.flag else h


def by_absent(m: Any, h: Tensor) -> Tensor:
    return mixed(h) if hasattr(m, "absent") else h


def by_object(m: Any, h: Tensor) -> Tensor:
    return mixed(h) if m.config.mixed else h


def by_list(m: Any, h: Tensor) -> Tensor:
    m.seen.append(1)
    return mixed(h) if len(m.seen) > 2 else h


def by_dict(m: Any, h: Tensor) -> Tensor:
    return mixed(h) if m.table.get("mixed") else h


def by_count(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return mixed(h) if m.calls > 2 else h


def by_child(m: Any, h: Tensor) -> Tensor:
    return mixed(h) if isinstance(m.flag, nn.Module) else h


def by_date(m: Any, h: Tensor) -> Tensor:
    return mixed(h) if getattr(m.name, "day", 1) == 2 else h


CHANGED: list[tuple[Callable[..., Tensor], Callable[[Any], Any]]] = [
    (by_flag, lambda m: setattr(m, "flag", True)),
    (by_absent, lambda m: setattr(m, "absent", 1)),
    (by_object, lambda m: setattr(m.config, "mixed", True)),
    (by_list, lambda m: None),
    (by_dict, lambda m: m.table.update(mixed=1)),
    (by_count, lambda m: None),
    (by_child, lambda m: setattr(m, "flag", nn.Identity())),
    (by_date, lambda m: setattr(m, "name", datetime.date(2026, 1, 2))),
]


@on_meshes({"fsdp": 1, "tp": 2})
def test_attributes_that_choose_another_way(mesh: DeviceMesh) -> None:
    for way, change in CHANGED:
        model, own, x = of(way), of(way), inputs()
        model.name = own.name = datetime.date(2026, 1, 1)
        params = sf.shard(model, mesh, RULES)
        for _ in range(2):
            assert_parity({"y": sf.apply(model, params, x)}, {"y": own(x).detach()})
        change(model)
        for _ in range(2):
            with pytest.raises(sf.ShardError):
                sf.apply(model, params, x)


_MIXES, _MIXING = False, {"now": False}
_UNDER, _KEPT = {"now": False}, [False]
_SEEN = MappingProxyType(_UNDER)
_CONTEXT = ContextVar("mixes", default=False)


class Settings:
    mixes = False


_SETTINGS = Settings()


def _told_by_a_cell() -> tuple[Callable[[], bool], Callable[[bool], None]]:
    mixes = False

    def told() -> bool:
        return mixes

    def tell(value: bool) -> None:
        nonlocal mixes
        mixes = value

    return told, tell


_TOLD, _TELL = _told_by_a_cell()


_ARRAYS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.zeros(2),
    "array": lambda: array.array("d", [0.0, 0.0]),
    "bytearray": lambda: bytearray(2),
    "ctypes": lambda: (ctypes.c_double * 2)(),
}


@on_meshes({"fsdp": 1, "tp": 2})
def test_elements_of_arrays(mesh: DeviceMesh) -> None:
    for make in _ARRAYS.values():
        model, own = (of(lambda m, h: mixed(h) if m.name[0] else h) for _ in range(2))
        model.name, own.name = make(), make()
        params, x = sf.shard(model, mesh, RULES), inputs()
        for _ in range(2):
            assert_parity({"y": sf.apply(model, params, x)}, {"y": own(x).detach()})
        model.name[1] = 1  # decides nothing
        assert_parity({"y": sf.apply(model, params, x)}, {"y": own(x).detach()})
        model.name[0] = 1
        for _ in range(2):
            with pytest.raises(sf.ShardError, match="part by part"):
                sf.apply(model, params, x)


def _set(name: str, value: Any) -> Callable[[], Any]:
    return lambda: globals().update({name: value})


OUTSIDE: dict[str, tuple[Callable[[Any], bool], Callable[[], Any]]] = {
    "a global": (lambda m: _MIXES, _set("_MIXES", True)),
    "a global dict": (lambda m: _MIXING["now"], lambda: _MIXING.update(now=True)),
    "a view of a dict": (lambda m: _SEEN["now"], lambda: _UNDER.update(now=True)),
    "a default": (lambda m, kept=_KEPT: kept[0], lambda: _KEPT.append(_KEPT.pop() or True)),
    "a ContextVar": (lambda m: _CONTEXT.get(), lambda: _CONTEXT.set(True)),
    "a class": (lambda m: Settings.mixes, lambda: setattr(Settings, "mixes", True)),
    "an instance's class": (lambda m: _SETTINGS.mixes, lambda: setattr(Settings, "mixes", True)),
    "a cell": (lambda m: _TOLD(), lambda: _TELL(True)),
}


@pytest.mark.everyday(4)
@on_meshes({"fsdp": 1, "tp": 2})
@pytest.mark.parametrize("where", OUTSIDE)
def test_what_functions_read_from_outside(mesh: DeviceMesh, where: str) -> None:
    asks, change = OUTSIDE[where]
    Settings.mixes = False
    _TELL(False)
    model, own = (of(lambda m, h: mixed(h) if asks(m) else h) for _ in range(2))
    params, x = sf.shard(model, mesh, RULES), inputs()
    for _ in range(2):
        assert_parity({"y": sf.apply(model, params, x)}, {"y": own(x).detach()})
    change()
    for _ in range(2):
        with pytest.raises(sf.ShardError, match="part by part"):
            sf.apply(model, params, x)


@on_meshes({"fsdp": 1, "tp": 2})
@pytest.mark.parametrize("kind", ["random", "numpy"])
def test_what_is_drawn_decides_in_each_call(mesh: DeviceMesh, kind: str) -> None:
    draw: Callable[[], float] = random.random if kind == "random" else np.random.rand
    model, own = (
        of(lambda m, h: (h + 1) if draw() < 0.5 else h.tanh() if draw() < 0.5 else mixed(h)) for _ in range(2)
    )
    params, x, refused = sf.shard(model, mesh, RULES), inputs(), 0
    for seed in range(8):
        random.seed(seed)
        np.random.seed(seed)
        wanted = own(x).detach()
        drawn = draw()
        random.seed(seed)
        np.random.seed(seed)
        try:
            assert_close(sf.apply(model, params, x).detach(), wanted)
            assert draw() == drawn, "as often as in one process"
        except sf.ShardError:
            refused += 1
    assert 0 < refused < 8


class Slotted:
    __slots__ = ("turn",)


def _of_a_queue(q: Any) -> float:
    q.put(turn := q.get())
    return turn


def _of_a_deque(q: Any) -> float:
    q.rotate(1)
    return q[0]


def _of_slots(q: Any) -> float:
    q.turn = getattr(q, "turn", 0.0) + 1
    return q.turn


def _queue() -> Any:
    q = queue.Queue[float]()
    for turn in range(3):
        q.put(turn)
    return q


TURNS: list[tuple[Callable[[], Any], Callable[[Any], float]]] = [
    (_queue, _of_a_queue),
    (lambda: deque([1.0, 2.0, 3.0]), _of_a_deque),
    (lambda: type("Own", (deque,), {})([1.0, 2.0, 3.0]), _of_a_deque),
    (Slotted, _of_slots),
    (type("Own", (Slotted,), {}), _of_slots),
]


@pytest.mark.parametrize("where", ["attribute", "argument"])
@on_meshes({"fsdp": 1, "tp": 2})
def test_what_is_no_list_and_has_no_table_changes(mesh: DeviceMesh, where: str) -> None:
    for make, turn in TURNS:
        sharded, own = (of(lambda m, h, q=None, turn=turn: h * turn(m.kept if q is None else q)) for _ in range(2))
        sharded.kept, own.kept = make(), make()
        given = ([make()], [make()]) if where == "argument" else ([], [])
        params, x = sf.shard(sharded, mesh, RULES), inputs()
        for _ in range(4):
            assert_parity({"y": sf.apply(sharded, params, x, *given[0])}, {"y": own(x, *given[1]).detach()})


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_list_in_the_place_of_an_equal_one_is_looked_at(mesh: DeviceMesh) -> None:
    model = of(lambda m, h: mixed(h) if sum(m.seen) > 2 else h)
    model.seen = [1]
    params, x = sf.shard(model, mesh, RULES), inputs()
    whole = sf.apply(model, params, x)
    model.seen = [1]
    assert_parity(sf.apply(model, params, x), whole)
    model.seen.append(2)
    with pytest.raises(sf.ShardError):
        sf.apply(model, params, x)


@on_meshes({"fsdp": 1, "tp": 4})
def test_sizes_that_choose_another_way(mesh: DeviceMesh) -> None:
    model, own = of(lambda m, h: mixed(h)), of(lambda m, h: mixed(h))
    params = sf.shard(model, mesh, RULES)
    for positions in (1, 4, 1, 3):
        x = inputs(positions)
        if positions == 1:
            assert_parity({"y": sf.apply(model, params, x)}, {"y": own(x).detach()})
        else:
            with pytest.raises(sf.ShardError):
                sf.apply(model, params, x)


@dataclass
class Given:
    a: Any


@on_meshes({"fsdp": 1, "tp": 2})
def test_numbers_that_choose_another_way(mesh: DeviceMesh) -> None:
    def way(m: Any, h: Tensor, given: Any) -> Tensor:
        number = given[0]["a"] if isinstance(given, list) else given.a if isinstance(given, Given) else given
        return mixed(h) if math.sqrt(number) > 5 or number == 18 else h * number

    makes: list[Callable[[float], Any]] = [float, int, lambda n: [{"a": n}], Given]
    for make in makes:
        model, own, x = of(way), of(way), inputs()
        params = sf.shard(model, mesh, RULES)
        for number in (17.0, 19.0, 26.0, 18.0, 20.0):
            if number in (18, 26):
                with pytest.raises(sf.ShardError):
                    sf.apply(model, params, x, make(number))
            else:
                assert_parity({"y": sf.apply(model, params, x, make(number))}, {"y": own(x, make(number)).detach()})


def test_a_number_that_chooses_another_way_through_a_tensor_of_the_forwards_own() -> None:
    def way(m: Any, h: Tensor) -> Tensor:
        m.calls += 1
        return mixed(h) if (m.kept * m.calls).sum() > 10 else h

    model, x = of(way), inputs()
    model.kept = torch.ones(3)
    with sf.simulate(fsdp=1, tp=2) as mesh:
        params = sf.shard(model, mesh, RULES)
        for _ in range(3):
            sf.apply(model, params, x)
        with pytest.raises(sf.ShardError):
            sf.apply(model, params, x)


@contextmanager
def counted() -> Iterator[list[int]]:
    """How often shape-only traces look for what to add, and what is asked of numbers."""
    found, finds, watches = [0, 0], ShapeTrace.adjustments, ShapeTrace.watched

    def adjustments(self: ShapeTrace, *args: Any) -> Any:
        found[0] += 1
        return finds(self, *args)

    def watched(self: ShapeTrace, *args: Any) -> Any:
        found[1] += 1
        return watches(self, *args)

    kind: Any = ShapeTrace
    kind.adjustments, kind.watched = adjustments, watched
    try:
        yield found
    finally:
        kind.adjustments, kind.watched = finds, watches


def counts(m: Any, h: Tensor, step: Any) -> Tensor:
    m.calls += 1
    m.config.steps += 1
    m.config.outs.append(m.calls)
    m.seen.append(h.detach().sum() * 0)
    return h * (1 - 0.9**m.calls) / (m.config.steps + 1)


def annealed(m: Any, h: Tensor, step: Any) -> Tensor:
    h = torch.lerp(h, h * 2, step / 10) * math.exp(-step)
    return h.mul_(step + m.tau)


def in_two_ways(m: Any, h: Tensor, step: Any) -> Tensor:
    m.calls += 1
    return h * min(1.0, step / 3) if m.calls % 2 else h + 1


def assigns(m: Any, h: Tensor, step: Any) -> Tensor:
    m.aux = h.shape[0] * 1.0
    m.note = f"{m.aux}"
    return h


def by_items(m: Any, h: Tensor, step: Any) -> Tensor:
    m.kept = step if m.kept is None else m.kept + step
    return h / m.kept.item() if m.kept.item() < 1000 else h


ECONOMICAL = [
    (by_items, lambda step: torch.tensor(step + 1), 2, 1),
    (counts, int, 1, 1),
    (annealed, float, 1, 1),
    (assigns, lambda _: 0, 1, 0),
    (in_two_ways, float, 3, 9),
]


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2})
def test_what_is_only_counted_or_multiplied_is_no_guard(mesh: DeviceMesh) -> None:
    for way, number, finds, watches in ECONOMICAL:
        model, own, x = of(way), of(way), inputs()
        params = sf.shard(model, mesh, RULES)
        by_then: list[int] = []
        with counted() as found:
            for step in range(10):
                y = sf.apply(model, params, x, number(step))
                assert_parity({"y": y}, {"y": own(x, number(step)).detach()})
                by_then = list(found) if step == 6 else by_then
        assert found[0] <= finds and found[1] <= watches and found == by_then, (way, found, by_then)


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_tensor_that_a_call_keeps_is_served(mesh: DeviceMesh) -> None:
    def way(m: Any, h: Tensor) -> Tensor:
        h = h if m.kept is None else h + m.kept
        m.kept = torch.full_like(h[..., :1].detach(), 0.5)
        return h

    model, own, x = of(way), of(way), inputs()
    params = sf.shard(model, mesh, RULES)
    for _ in range(3):
        assert_parity({"y": sf.apply(model, params, x)}, {"y": own(x).detach()})


@on_meshes({"fsdp": 1, "tp": 2})
def test_in_a_loop_one_position_is_another_kind_than_several(mesh: DeviceMesh) -> None:
    model, own = of(lambda m, h: mixed(h)), of(lambda m, h: mixed(h))
    type(model).generate = lambda self, x: self(x)
    params = sf.shard(model, mesh, RULES)
    assert_parity({"y": sf.apply(model, params, inputs(1), method="generate")}, {"y": own(inputs(1)).detach()})
    with pytest.raises(sf.ShardError):
        sf.apply(model, params, inputs(4), method="generate")


TOLD: dict[str, Callable[[Any, Tensor], Any]] = {
    "a truth": lambda m, ids: ids.sum() > 5,
    "a mask that picks nothing": lambda m, ids: len(ids[ids > 2]),
    "an item": lambda m, ids: ids[0].item() > 2,
    "an item that is multiplied": lambda m, ids: 2 * ids.float().mean().item() > 5,
    "a whole number": lambda m, ids: int(ids.max()) > 2,
    "a list": lambda m, ids: 3 in ids.tolist(),
    "a comparison": lambda m, ids: torch.equal(ids, torch.full((3,), 3)),
    "a tensor that is written": lambda m, ids: ids.clone().add_(1).max() > 2,
    "a view that is written": lambda m, ids: _with_last_row_added(ids).sum() != 1,
    "a buffer": lambda m, ids: m.steps.add_(1).item() % 2 == 1,
    "an attribute": lambda m, ids: m.kept.add_(1).item() % 2 == 1,
    "an attribute that is assigned": lambda m, ids: _assigned(m).item() % 2 == 1,
    "what a list holds": lambda m, ids: _assigned_in_list(m.seen).item() % 2 == 1,
    "a tensor beside": lambda m, ids: m.kept.add_(ids.max()) % 2 == 1,
}


def _with_last_row_added(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[-1:].add_(ids[:1] == 0)
    return ids


def _assigned(m: Any) -> Tensor:
    m.kept = m.kept + 1
    return m.kept


def _assigned_in_list(seen: list[Tensor]) -> Tensor:
    seen[0] = seen[0] + 1
    return seen[0]


@on_meshes({"fsdp": 1, "tp": 2})
def test_values_of_tensors_that_choose_another_way(mesh: DeviceMesh) -> None:
    for name, told in TOLD.items():
        models = [of(lambda m, h, ids, told=told: h if told(m, ids) else h * (1 + h.sum())) for _ in range(2)]
        for model in models:
            model.register_buffer("steps", torch.tensor(0))
            model.kept, model.seen = torch.tensor(0), [torch.tensor(0)]
        params = sf.shard(models[0], mesh, RULES)
        for call in range(4):
            x, ids = inputs(), torch.full((3,), 3 * (1 - call % 2))
            found, expected = sf.apply(models[0], params, x, ids), models[1](x, ids).detach()
            assert_close(found, expected, name=f"{name}, call {call}")


SETTINGS = ModuleType("settings_of_this_test")
vars(SETTINGS).update(mode="apart", table={"mode": "apart"})


class Registry:
    acts: ClassVar[dict[str, Any]] = {"act": torch.tanh}


def act(h: Tensor) -> Tensor:
    return h.tanh()


def softmax_over(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda h: h.softmax(dim)


def _by_default(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda h, dim=dim: h.softmax(dim)


class _Method(Between):
    def act(self, h: Tensor) -> Tensor:
        return h.tanh()

    def way(self, h: Tensor) -> Tensor:
        return self.act(h)


def _bind_anew(model: Any) -> Callable[[], None]:
    globals()["act"] = softmax_over(-1)
    return lambda: globals().update(act=torch.tanh)


Changing = Callable[[Any], Any]
ELSEWHERE: dict[str, tuple[Callable[..., Tensor] | type, Changing]] = {
    "a module of the user's": (
        lambda m, h: mixed(h) if SETTINGS.mode == "mixed" else h,
        lambda m: (vars(SETTINGS).update(mode="mixed"), lambda: vars(SETTINGS).update(mode="apart"))[1],
    ),
    "a dict in one": (
        lambda m, h: mixed(h) if SETTINGS.table["mode"] == "mixed" else h,
        lambda m: (SETTINGS.table.update(mode="mixed"), lambda: SETTINGS.table.update(mode="apart"))[1],
    ),
    "a dict in a class": (
        lambda m, h: Registry.acts["act"](h),
        lambda m: (Registry.acts.update(act=softmax_over(-1)), lambda: Registry.acts.update(act=torch.tanh))[1],
    ),
    "a global function": (lambda m, h: act(h), _bind_anew),
    "an attribute of a function": (
        lambda m, h: mixed(h) if vars(_bind_anew)["on"] else h,
        lambda m: (vars(_bind_anew).update(on=True), lambda: vars(_bind_anew).update(on=False))[1],
    ),
    "a method": (_Method, lambda m: setattr(m, "act", softmax_over(-1))),
}
vars(_bind_anew).update(on=False)


@on_meshes({"fsdp": 1, "tp": 2})
@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_a_forward_finds_elsewhere_chooses_another_way(mesh: DeviceMesh, what: str) -> None:
    way, change = ELSEWHERE[what]
    model = way().double() if isinstance(way, type) else of(way)
    params, x = sf.shard(model, mesh, RULES), inputs()
    whole = [sf.apply(model, params, x) for _ in range(2)]
    assert_parity({"y": whole[0]}, {"y": model(x).detach()})
    back = change(model)
    try:
        with pytest.raises(sf.ShardError):
            sf.apply(model, params, x)
    finally:
        if callable(back):
            back()


ARGUMENTS: dict[str, Callable[[int], Any]] = {
    "closure": softmax_over,
    "default": _by_default,
    "partial": lambda dim: partial(torch.softmax, dim=dim),
    "module": nn.Softmax,
    "composed": lambda dim: (lambda f: lambda h: f(h))(softmax_over(dim)),
}


@on_meshes({"fsdp": 1, "tp": 2})
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_functions_that_are_given_are_compared_by_what_they_hold(mesh: DeviceMesh, kind: str) -> None:
    model, make, x = of(lambda m, h, act: act(h)), ARGUMENTS[kind], inputs()
    params = sf.shard(model, mesh, RULES)
    for _ in range(2):
        assert_parity({"y": sf.apply(model, params, x, make(1))}, {"y": model(x, make(1)).detach()})
    with pytest.raises(sf.ShardError):
        sf.apply(model, params, x, make(2))


@on_meshes({"fsdp": 1, "tp": 2})
def test_an_input_that_lies_otherwise_chooses_another_way(mesh: DeviceMesh) -> None:
    class ByStrides(Between):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(mixed(h) if x.is_contiguous() else h)

    model = ByStrides().double()
    params, x = sf.shard(model, mesh, RULES), inputs()
    sf.apply(model, params, x.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(sf.ShardError):
        sf.apply(model, params, x)
