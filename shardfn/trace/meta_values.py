"""What a shape-only trace computes with: blanks in the places of tensors, and values where they are known.

[Note: known values]
Of small integer and boolean tensors, and of what is made of them alone, the values are known.

Of an unknown mask a shape-only trace believes that it picks everything.

Forwards ask masks and positions for values ("does any sample have padding?") and go one way or the other. These are
made of sizes and of integer inputs, which is cheap to do for real beside the meta tensors; what depends on weights is
not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import count
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardfn import _torch
from shardfn.layout import has_derivatives

EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}
_OF_MASKS = _BY_MASK | {"nonzero", "masked_select"}
_NESTED = (tuple, list, dict)
_LARGEST = 2**20  # elements; a mask over long sequences is not worth its time


def leaves_of(tree: Any) -> list[Any]:
    """What is in the tuples, lists and dicts that an operator takes or makes, in order: a third of a pytree's time."""
    leaves: list[Any] = []
    for x in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, _NESTED) else (tree,):
        leaves += leaves_of(x) if isinstance(x, _NESTED) else (x,)
    return leaves


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors that an operator takes or makes, in their order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


class _Numbered(int):
    """Stands for a tensor in what is remembered of a run."""


class _Step(NamedTuple):
    func: Any
    inputs: Any  # (args, kwargs)
    made: list[int]  # the numbers of tensors
    told: list[Any]  # what Python was told


class ValueReads:
    """The operations on known values in a run, and what Python was told of them, which may decide how it goes on."""

    def __init__(self) -> None:
        self.sources: dict[int, Tensor] = {}  # tensors from outside, by number
        self._were = list[tuple[Tensor, int, Tensor]]()  # the same, their versions and values at first
        self._numbers, self._next, self._steps = WeakIdKeyDictionary(), count(), list[_Step]()

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation was done."""
        inputs = _torch.pytree.tree_map_only(Tensor, self._number_of, (args, kwargs))
        made = [self._numbers[x] if x in self._numbers else self._new(x) for x in tensors_of(out)]
        self._steps.append(_Step(func, inputs, made, _told(func, out)))

    def begin(self, given: Sequence[Tensor]) -> None:
        """An operation on tensors with data is done next."""
        for x in given:
            if x not in self._numbers and x.numel() <= _LARGEST:
                self._were.append((x, _torch.version_of(x), x.detach().clone()))
            self._number_of(x)

    def put_back(self) -> None:
        """Give tensors with data, which a forward has written in place, the values that they had."""
        for x, version, was in self._were:
            if _torch.version_of(x) != version:
                with torch.no_grad():
                    x.copy_(was)
        self._were.clear()

    def _number_of(self, x: Tensor) -> int:
        if x not in self._numbers:
            self.sources[self._new(x)] = x
        return self._numbers[x]

    def _new(self, x: Tensor) -> int:
        self._numbers[x] = number = _Numbered(next(self._next))
        return number

    def end(self) -> dict[int, Tensor]:
        """Keep what is needed to ask again but the sources, which are returned."""
        steps, wanted = list[_Step](), set[int]()
        for step in reversed(self._steps):
            if step.told or wanted.intersection(step.made) or _writes(step.func):
                steps.append(step)
                wanted.update(x for x in leaves_of(step.inputs) if type(x) is _Numbered)
        self._steps = steps[::-1] if any(step.told for step in steps) else []
        sources, self.sources = self.sources, {}
        return {number: x for number, x in sources.items() if number in wanted and self._steps}

    @property
    def told(self) -> list[list[Any]]:
        """What Python was told, in its order."""
        return [step.told for step in self._steps if step.told]

    def told_of(self, sources: Mapping[int, Tensor]) -> list[list[Any]]:
        """What Python would be told of these in the places of the sources."""
        known = {number: x.detach().to("cpu", copy=True) for number, x in sources.items()}
        all_told: list[list[Any]] = []
        for func, inputs, made, told in self._steps:
            args, kwargs = _torch.pytree.tree_map_only(_Numbered, known.__getitem__, inputs)
            out = func(*args, **kwargs)
            all_told += [_told(func, out)] * bool(told)
            known |= zip(made, tensors_of(out), strict=True)
        return all_told


def _writes(func: Any) -> bool:
    return func not in (Tensor.clone, Tensor.tolist) and _torch.is_mutable(func)


def _told(func: Any, out: Any) -> list[Any]:
    """What Python is told of an operation: numbers, and whether there is anything where the shape is by values."""
    told = [x for x in leaves_of(out) if not isinstance(x, Tensor | None)]
    if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()):
        told += [x.numel() == 0 for x in tensors_of(out)]
    return told


class MetaValues:
    """What is known of the values of meta tensors."""

    def __init__(self, on_cpu: bool = True) -> None:
        """`on_cpu`: the forward computes there, so that tensors of its own, made without a device, meet the others."""
        self._known, self._on_cpu = WeakIdKeyDictionary(), on_cpu
        self.reads = ValueReads()
        self._moved = WeakIdKeyDictionary()  # tensor with data -> how often it was written, what stands for it

    def note(self, blank: Tensor, real: Tensor, made: bool = False) -> None:
        """A meta tensor stands for a real one; `made`: of numbers, so that it counts whatever its dtype."""
        if (made or not (real.is_floating_point() or real.is_complex())) and real.numel() <= _LARGEST:
            self._known[blank] = known = real.detach().to("cpu", copy=True)  # which operations in place may change
            self.reads.note(Tensor.clone, (real,), {}, known)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, without data, and where its inputs are known with values beside it."""
        name = _torch.base_name(func)
        if name in _BY_MASK:
            args = self._by_numbers(args)
        if name == "_grouped_mm" and args[0].dim() == 2 and args[1].dim() == 3:
            return args[0].new_empty(args[0].shape[0], args[1].shape[2])  # torch 2.13 wants bfloat16 there
        tensors = tensors_of((args, kwargs))
        if self._on_cpu and len({x.is_meta for x in tensors}) == 2:
            args, kwargs = _torch.without_writing(func, self._meeting, args, kwargs)  # or what is written would be lost
            tensors = tensors_of((args, kwargs))
        unknown = [x for x in tensors if x not in self._known]
        known = not unknown if tensors else _makes_small_integers(name, args, kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not known or name in EMPTY or random:
            here = self._on_cpu or not any(x.is_meta for x in tensors)
            held = here and not random and not any(x.is_meta or self.of(x) is None for x in unknown)
            return (self._with_data if held else self._without_values)(func, args, kwargs)
        real_args, real_kwargs = _torch.pytree.tree_map(self._real, (args, kwargs))
        try:
            real = func(*real_args, **real_kwargs)
        except (NotImplementedError, RuntimeError):  # not for this dtype on the CPU, or nowhere
            return self._without_values(func, args, kwargs)
        self.reads.note(func, real_args, real_kwargs, real)
        if name == "_local_scalar_dense":
            return real
        out = self._blank(func, args, kwargs, real)
        for blank, value in zip(leaves_of(out), leaves_of(real), strict=True):
            if isinstance(blank, Tensor):
                self._known.pop(blank, None)
                if value.numel() <= _LARGEST:  # also numbers made of integers, such as weights of a mean
                    self._known[blank] = value
        return out

    def same(self, x: Tensor, as_: Tensor) -> None:
        """A tensor has the values of another one."""
        if as_ in self._known:
            self._known[x] = self._known[as_]

    def agree(self, x: Tensor, other: Tensor, held: bool = False) -> bool:
        """Whether two tensors have the same values, as far as they are known; `held`: also of those with data."""
        if x is other:
            return True
        known = self.of if held else self._known.get
        mine, theirs = known(x), known(other)
        return mine is theirs or (mine is not None and theirs is not None and _equal(mine, theirs))

    def of(self, x: Tensor) -> Tensor | None:
        """The values of a tensor, if they are known."""
        return self._known.get(x) if x.is_meta or not _torch.holds_data(x) else x

    def as_list(self, x: Tensor) -> Any:
        """The values of a tensor, which Python is told; None when they are not known."""
        known = self.of(x)
        if known is not None:
            self.reads.note(Tensor.tolist, (known,), {}, known.tolist())
        return None if known is None else known.tolist()

    def _meeting(self, x: Any) -> Any:
        """What stands for a tensor with data where it meets others; scalars may be anywhere."""
        if not isinstance(x, Tensor) or x.is_meta or not x.dim() or x.device.type != "cpu":
            return x
        version, blank = self._moved.get(x) or (None, x)
        if version != _torch.version_of(x):
            blank = _blank(x, None)
            if _torch.holds_data(x):
                self.note(blank, x, made=True)
            self._moved[x] = _torch.version_of(x), blank
        return blank

    def _by_numbers(self, args: Any) -> Any:
        """Arguments of an indexing operation with the numbers of rows instead of a known mask."""
        indices: list[Any] = []
        for index in args[1]:
            if not (isinstance(index, Tensor) and index.dtype == torch.bool and index in self._known):
                indices.append(index)
                continue
            rows = self.run(torch.ops.aten.nonzero.default, (index,), {})
            indices += self.run(torch.ops.aten.unbind.int, (rows, 1), {})
        return args[0], indices, *args[2:]

    def _blank(self, func: Any, args: Any, kwargs: Any, real: Any) -> Any:
        """The result on meta tensors; the shape of some depends on values."""
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            return _torch.pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), real)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._known[value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _with_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation on tensors with data, or one that writes into such."""
        args, kwargs = _torch.pytree.tree_map_only(Tensor, self.of, (args, kwargs))
        self.reads.begin(tensors_of((args, kwargs)))
        out = self._without_values(func, args, kwargs)
        self.reads.note(func, args, kwargs, out)
        return out

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation; what it writes is not known any more."""
        with _torch.masks_pick_all() if _torch.base_name(func) in _OF_MASKS else nullcontext():
            out = func(*args, **kwargs)
        for x in tensors_of(out) if _torch.is_mutable(func) else ():
            self._known.pop(x, None)
            if (base := _torch.base_of(x)) is not None:
                self._known.pop(base, None)
        return out


def _equal(x: Tensor, other: Tensor) -> bool:
    """Whether values are equal, or no numbers in the same places."""
    with _torch.outside_dispatch(), _torch.outside_functions():
        alike = x.shape == other.shape and x.dtype == other.dtype
        return alike and bool(((x == other) | ((x != x) & (other != other))).all())


def _makes_small_integers(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a factory makes something whose values are worth keeping."""
    makes = name in ("arange", "ones", "zeros", "full", "scalar_tensor", "tril_indices", "triu_indices")
    dtype = kwargs.get("dtype")
    integers = makes and (dtype is None or not has_derivatives(dtype))
    return integers and prod(max(n, 1) for n in leaves_of(args) if isinstance(n, int)) <= _LARGEST


def tensors_in(tree: Any, depth: int) -> Iterator[Tensor]:
    """Every tensor of a cache, and of the objects in it that torch does not know as containers."""
    for leaf in _torch.pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type | Callable):
            yield from tensors_in(dict(vars(leaf)), depth - 1)


def to_meta(tree: Any, values: MetaValues | None = None) -> Any:
    """A tree with every tensor on the meta device, without data; gradients are asked for as before.

    Integers and booleans are noted in `values`. Caches, which a forward fills, are copied; two that are one stay one.
    """
    caches: dict[int, Any] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _blank(leaf, values)
        return _copied(leaf, lambda x: _blank(x, values), caches) if is_cache(leaf) else leaf

    return _torch.pytree.tree_map(move, tree)


def _blank(x: Tensor, values: MetaValues | None) -> Tensor:
    # Not `empty_like`, whose result would belong to the transform that `x` belongs to.
    blank = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if values is not None and not x.is_meta and _torch.holds_data(x):
        values.note(blank, x)
    return blank.requires_grad_(x.requires_grad)


def snapshot(cache: Any) -> Any:
    """A cache as it is now, for a later shape-only trace: its integers, which are lengths, keep their values."""
    return _copied(cache, lambda x: _blank(x, None) if x.is_floating_point() else x.clone(), {})


def _copied(value: Any, of_tensor: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    with _Copying(of_tensor):
        return deepcopy(value, known)


class _Copying(TorchFunctionMode):
    """Within it `deepcopy` makes something else of every tensor."""

    def __init__(self, of_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._of_tensor = of_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._of_tensor(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def is_cache(value: object) -> bool:
    """Whether a value is for later calls of the same model and may hold parts: a cache of keys and values."""
    return any(f"{c.__module__}.{c.__qualname__}" == "transformers.cache_utils.Cache" for c in type(value).__mro__)


def is_filled(cache: Any) -> bool:
    """Whether a cache holds keys and values."""
    return any(x.is_floating_point() and x.numel() for x in tensors_in(cache, 4))
