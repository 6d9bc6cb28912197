"""A run of a forward that counts operations module call by module call, and what is remembered of them. Layer 3."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import (
    HOOKING,
    TorchDispatchMode,
    argument_names,
    base_name,
    base_of,
    holds_data,
    is_mutable,
    pytree,
)
from shardfn.core.collectives import Moved
from shardfn.core.engine.einsums import einsum
from shardfn.core.engine.origins import Origin, Origins, hash_of, passed_on
from shardfn.core.engine.values import Values, leaves_of


@dataclass(frozen=True)
class Record:
    """One operation of a run."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()  # of its results
    numbers: tuple[Any, ...] = ()  # among its arguments, but for sizes
    start: int | None = None  # where it begins to cut
    counts: bool = False  # whether it makes other values than it is given, of weights or inputs
    repeats: int | None = None  # the dim of which it makes copies
    given: tuple[Origin, ...] = ()  # of the values that it is given, see [Note: origins]
    places: tuple[Hashable, ...] = ()  # which arguments these are
    made: tuple[Origin, ...] = ()  # of its results
    given_shapes: tuple[tuple[int, ...], ...] = ()  # the shapes of the values that it is given
    differentiated: bool = True  # whether it may be in a graph

    def may_be_part_of(self, whole: "Record", padded: Collection[tuple[int, int]] = ()) -> bool:
        """Whether the same operation on whole values may have that result: each dim is as long, or a multiple.

        `padded`: (true size, stored size) of what is padded here.
        """
        if self.name != whole.name or len(self.shapes) != len(whole.shapes):
            return False

        def fits(mine: int, other: int) -> bool:
            stored = (other * size // true for true, size in padded if true and other * size % true == 0)
            return mine == other or (mine > 0 and any(n % mine == 0 for n in (other, *stored)))

        pairs = zip(self.shapes, whole.shapes, strict=True)
        return all(len(mine) == len(other) and all(map(fits, mine, other)) for mine, other in pairs)

    def falls_apart_unlike(self, whole: "Record") -> bool:
        """Whether the same operation on whole values has another number of results."""
        return self.name == whole.name and len(self.shapes) != len(whole.shapes)


_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class Comparable(TorchFunctionMode):
    """Has what is made of numbers begin on the CPU, so that a run without data sees of which; and `einsum` be alike.

    `hooked` is told of what gets a hook.
    """

    def __init__(self, hooked: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._hooked = hooked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in HOOKING:
            self._hooked(args[0])
        if func is torch.einsum:
            return einsum(*args)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], tuple | list):
            return func(args[0], _of_tensors(args[1]), *args[2:])
        where = args[0].device if func is Tensor.new_tensor else given.get("device")
        numbers = func in _OF_NUMBERS and not (func is not Tensor.new_tensor and args and isinstance(args[0], Tensor))
        if not numbers or where is None or torch.device(where).type != "meta":
            return func(*args, **given)
        wants = given.pop("requires_grad", False)
        return func(*args, **given | {"device": "cpu"}).to("meta").requires_grad_(wants)


def _of_tensors(index: Any) -> Any:
    """An index with tensors for the lists of numbers in it, of which a run without data sees what is in them."""
    if isinstance(index, tuple):
        return tuple(_of_tensors(at) if isinstance(at, list) else at for at in index)
    plain = bool(index) and all(type(at) is int for at in index)
    return torch.tensor(index).to("meta") if plain else index


class Framed(TorchDispatchMode):
    """A run whose operations are counted module call by module call."""

    def __init__(self, origins: Origins | None = None) -> None:
        super().__init__()
        self.origins = Origins(origins)
        self._path: list[tuple[str, int]] = [("", 0)]
        self._calls: dict[str, int] = {}
        self._hidden = 0
        self.values = Values()
        self._failed_at: str | None = None
        self._made = WeakIdKeyDictionary()  # tensors made of weights or floating inputs

    def begins_with(self, x: Tensor) -> None:
        """x is a weight or an input, and what is made of it counts."""
        self._made[x] = True

    def hooked(self, x: Tensor) -> None:
        """Something will be called with the gradient of x."""

    def counts(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether an operation is on what is made of weights or inputs; its results are, too."""
        found = any(x in self._made for x in tensors_of((args, kwargs)))
        for x in leaves_of(out) if found else ():
            if isinstance(x, Tensor):
                self._made[x] = True
                base = base_of(x) if is_mutable(func) else None
                if base is not None:
                    self._made[base] = True
        return found

    def passed_on(self, record: Record) -> Origin:
        """The origin of what is a view or a copy, or repeats values in their places."""
        origin = passed_on(record.given)
        return self.origins.cut(origin) if record.name == "detach" else origin

    @contextmanager
    def inside(self, path: str, given: Sequence[Tensor] = (), places: tuple[Hashable, ...] = ()) -> Iterator[None]:
        """Within the forward of a module, which is given tensors; remembers the deepest one that raised."""
        self._calls[path] = self._calls.get(path, 0) + 1
        self._path.append((path, self._calls[path]))
        try:
            yield
        except Exception:
            self._failed_at = self._failed_at or path
            raise
        finally:
            self._path.pop()

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a module's forward."""
        given = tensors_of(pytree.tree_leaves((args, kwargs)))
        places = tuple(key for key, x in (*enumerate(args), *kwargs.items()) if isinstance(x, Tensor))
        with self.inside(path, given, places):
            frame, out = self._path[-1], forward(*args, **kwargs)
        self._left(frame, given, tensors_of(pytree.tree_leaves(out)))
        return out

    def _left(self, frame: tuple[str, int], given: list[Tensor], results: list[Tensor]) -> None:
        """A call of a module has ended, which was given tensors and returns others."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Within it operations are not those of the model's own forward."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    @property
    def failed_at(self) -> str:
        """The path of the module in which the run failed; empty for the model itself."""
        return self._failed_at or ""


class Whole(Framed):
    """Notes the operations of a run with whole weights."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[tuple[str, int], list[Record]] = {}
        self.output: Any = None
        self.assigned: Any = None  # to attributes of modules
        self.contents: Any = None  # of lists that modules have
        self.collected: Any = None  # into what else a forward can reach
        self.left: dict[tuple[str, int], list[tuple[Origin, torch.Size]]] = {}  # of the outputs of a call

    @contextmanager
    def inside(self, path: str, given: Sequence[Tensor] = (), places: tuple[Hashable, ...] = ()) -> Iterator[None]:
        """Within the forward of a module, which is one operation of the module that calls it."""
        record = called(path, self.origins.of(given), places)
        self.records.setdefault(self._path[-1], []).append(record)
        with super().inside(path, given, places):
            yield

    def _left(self, frame: tuple[str, int], given: list[Tensor], results: list[Tensor]) -> None:
        self.left[frame] = [(o, x.shape) for o, x in zip(self.origins.of(results), results, strict=True)]

    def note_collective(self, moved: Moved, x: Tensor, out: Tensor) -> None:
        """A collective that the model does itself made `out` of x."""
        self.origins.put([out], self.origins.of([x]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.values.run(func, args, kwargs)
        counts = self.counts(func, args, kwargs, out)
        if self._hidden:
            return out
        inputs, results = tensors_of((args, kwargs)), tensors_of(out)
        given = self.origins.of(inputs)
        if base_name(func) in COPIES:
            self.origins.put(results, given[:1])
            return out
        records = self.records.setdefault(self._path[-1], [])
        record = record_of(func, args, kwargs, out, counts, given)
        if record.name == "lift_fresh":
            made = self.origins.constants(record)
        elif record.name in REPEATING:
            made = (self.passed_on(record),) * len(results)
        elif counts:
            made = self.origins.numbers(len(results), self._path[-1], len(records))
        else:
            made = self.origins.constants(record)
        records.append(replace(record, made=made, given_shapes=tuple(tuple(x.shape) for x in inputs)))
        self.origins.put(results, made, is_mutable(func))
        return out

    def after(self, frame: tuple[str, int], start: int, end: int | None = None) -> list[Record]:
        """Records of a call."""
        return self.records.get(frame, [])[start:end]


# Whether a reshape copies depends on strides, and so on sizes.
COPIES = {"clone", "contiguous"}
_VIEWS = {"view", "_unsafe_view", "_reshape_alias"}
EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
# What repeats values in their places, or not when that is once.
REPEATING = {"expand", "unsqueeze", "squeeze", "alias", "detach", "lift_fresh", "_to_copy"} | COPIES | _VIEWS
ARRANGING = {"repeat", "cat", "stack"}
CAST = "cast"  # `_to_copy` to another dtype
MOVES = set(
    "expand unsqueeze squeeze transpose permute t slice select narrow split split_with_sizes unsafe_split unbind "
    "repeat alias detach lift_fresh cat stack empty empty_like zeros ones full arange scalar_tensor copy_ "
    "_to_copy".split()
)
MOVES |= COPIES | _VIEWS
_CUTS = {"slice", "select", "narrow"}
# Arguments that are sizes, or cut along a dim: the shapes of results tell whether they fit.
_SIZES = set(
    "size stride shape sizes split_size split_sizes repeats storage_offset output_size groups group N C HxW length "
    "normalized_shape num_classes".split()
)
_FEW = 2**12


def record_of(
    func: Any, args: Any, kwargs: Any, out: Any, counts: bool = False, given: tuple[Origin, ...] = ()
) -> Record:
    """What is remembered of an operation."""
    results = tensors_of(out)
    name = base_name(func)
    shapes = tuple(tuple(leaf.shape) for leaf in results)
    if name == "slice" and shapes[0] == tuple(args[0].shape):
        return Record("alias", shapes, given=given, places=_places(func, args, kwargs))
    start = None
    if name in ("slice", "narrow"):
        size, begin = args[0].shape[dim_of_cut(args, kwargs)], args[2] if len(args) > 2 else kwargs.get("start")
        start = min(max((begin or 0) + (size if (begin or 0) < 0 else 0), 0), size)
    repeats = None
    if name == "expand" and counts:
        more = len(shapes[0]) - args[0].dim()
        grown = [d for d, n in enumerate(shapes[0]) if d < more or n != args[0].shape[d - more]]
        repeats = grown[0] if grown else None
    if name == "_to_copy" and args[0].dtype != out.dtype:
        name = CAST
    name = "view" if name in _VIEWS else name
    counts = counts and name not in REPEATING
    places = _places(func, args, kwargs)
    graph = torch.is_grad_enabled()
    return Record(
        name, shapes, _numbers(func, args, kwargs, out), start, counts, repeats, given, places, differentiated=graph
    )


def called(path: str, given: tuple[Origin, ...] = (), places: tuple[Hashable, ...] = ()) -> Record:
    """The call of a module."""
    return Record(f"the call of {path!r}", counts=True, given=given, places=places)


def _places(func: Any, args: Any, kwargs: Any) -> tuple[Hashable, ...]:
    """The arguments of an operation that are tensors, by name and place in a list."""
    named = dict(zip(argument_names(func), args, strict=False)) | kwargs
    lists = ((key, value if isinstance(value, list | tuple) else (value,)) for key, value in named.items())
    return tuple((key, at) for key, values in lists for at, x in enumerate(values) if isinstance(x, Tensor))


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors that an operator takes or makes, in their order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def dim_of_cut(args: Any, kwargs: Any) -> int:
    return (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(args[0].dim(), 1)


def _held(x: Tensor) -> tuple[Any, ...]:
    """The numbers in a tensor, or one for all of many."""
    if x.numel() <= _FEW:
        return tuple(x.flatten().tolist())
    return (hash_of(x),)


def _numbers(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, ...]:
    """The numbers among the arguments; what a tensor is made of; whether a value that is asked for is 0."""
    name = base_name(func)
    if name == "_local_scalar_dense":
        return (bool(out),)
    if name == "lift_fresh":
        return _held(out) if holds_data(out) and not out.is_meta else ()
    sizes = _SIZES | {"start", "end"} if name in _CUTS else _SIZES
    if name == "as_strided":  # no dim of its input
        sizes = set[str]()
    named = dict(zip(argument_names(func), args, strict=False)) | kwargs
    return tuple(
        (key, str(leaf) if isinstance(leaf, float) and isnan(leaf) else leaf)  # which is not itself
        for key, value in named.items()
        for leaf in (leaves_of(value) if key not in sizes else ())
        if isinstance(leaf, int | float | complex | str | torch.dtype)
    )
