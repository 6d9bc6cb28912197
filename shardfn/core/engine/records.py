"""A run of a forward that counts operations module call by module call, and what is remembered of them. Layer 3."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import TorchDispatchMode, argument_names, base_name, base_of, holds_data, is_mutable, pytree
from shardfn.core.engine.values import Values


@dataclass(frozen=True)
class Record:
    """One operation of a run."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()  # of its results
    numbers: tuple[Any, ...] = ()  # among its arguments, but for sizes
    start: int | None = None  # where it begins to cut
    counts: bool = False  # whether it makes other values than it is given, of weights or inputs
    repeats: int | None = None  # the dim of which it makes copies

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


class Literals(TorchFunctionMode):
    """Has what is made of numbers begin on the CPU, so that a run without data sees of which."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        where = args[0].device if func is Tensor.new_tensor else given.get("device")
        numbers = func in _OF_NUMBERS and not (func is not Tensor.new_tensor and args and isinstance(args[0], Tensor))
        if not numbers or where is None or torch.device(where).type != "meta":
            return func(*args, **given)
        wants = given.pop("requires_grad", False)
        return func(*args, **given | {"device": "cpu"}).to("meta").requires_grad_(wants)


class Framed(TorchDispatchMode):
    """A run whose operations are counted module call by module call."""

    def __init__(self) -> None:
        super().__init__()
        self._path: list[tuple[str, int]] = [("", 0)]
        self._calls: dict[str, int] = {}
        self._hidden = 0
        self.values = Values()
        self._failed_at: str | None = None
        self._made = WeakIdKeyDictionary()  # tensors made of weights or floating inputs

    def begins_with(self, x: Tensor) -> None:
        """x is a weight or an input, and what is made of it counts."""
        self._made[x] = True

    def counts(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether an operation is on what is made of weights or inputs; its results are, too."""
        found = any(x in self._made for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        for x in pytree.tree_leaves(out) if found else ():
            if isinstance(x, Tensor):
                self._made[x] = True
                base = base_of(x) if is_mutable(func) else None
                if base is not None:
                    self._made[base] = True
        return found

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Within the forward of a module; remembers the deepest one that raised."""
        self._calls[path] = self._calls.get(path, 0) + 1
        self._path.append((path, self._calls[path]))
        try:
            yield
        except Exception:
            self._failed_at = self._failed_at or path
            raise
        finally:
            self._path.pop()

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

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Within the forward of a module, which is one operation of the module that calls it."""
        self.records.setdefault(self._path[-1], []).append(called(path))
        with super().inside(path):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.values.run(func, args, kwargs or {})
        counts = self.counts(func, args, kwargs or {}, out)
        if not self._hidden and base_name(func) not in COPIES:
            self.records.setdefault(self._path[-1], []).append(record_of(func, args, kwargs or {}, out, counts))
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


def record_of(func: Any, args: Any, kwargs: Any, out: Any, counts: bool = False) -> Record:
    """What is remembered of an operation."""
    results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    name = base_name(func)
    shapes = tuple(tuple(leaf.shape) for leaf in results)
    if name == "slice" and shapes[0] == tuple(args[0].shape):
        return Record("alias", shapes)
    start = None
    if name in ("slice", "narrow"):
        size, given = args[0].shape[dim_of_cut(args, kwargs)], args[2] if len(args) > 2 else kwargs.get("start")
        start = min(max((given or 0) + (size if (given or 0) < 0 else 0), 0), size)
    repeats = None
    if name == "expand" and counts:
        more = len(shapes[0]) - args[0].dim()
        grown = [d for d, n in enumerate(shapes[0]) if d < more or n != args[0].shape[d - more]]
        repeats = grown[0] if grown else None
    if name == "_to_copy" and args[0].dtype != out.dtype:
        name = CAST
    name = "view" if name in _VIEWS else name
    return Record(name, shapes, _numbers(func, args, kwargs, out), start, counts and name not in REPEATING, repeats)


def called(path: str) -> Record:
    """The call of a module."""
    return Record(f"the call of {path!r}", counts=True)


def dim_of_cut(args: Any, kwargs: Any) -> int:
    return (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(args[0].dim(), 1)


def _numbers(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, ...]:
    """The numbers among the arguments; what a tensor is made of; whether a value that is asked for is 0."""
    name = base_name(func)
    if name == "_local_scalar_dense":
        return (bool(out),)
    if name == "lift_fresh":
        return tuple(out.flatten().tolist()) if holds_data(out) and not out.is_meta and out.numel() <= _FEW else ()
    sizes = _SIZES | {"start", "end"} if name in _CUTS else _SIZES
    named = dict(zip(argument_names(func), args, strict=False)) | kwargs
    given = [value for key, value in named.items() if key not in sizes]
    return tuple(
        leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, int | float | complex | str | torch.dtype)
    )
