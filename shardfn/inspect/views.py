"""`typeof`, and what is known of a layout: which rank has which part of a tensor, as plain data."""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, islice, product
from math import prod
from operator import attrgetter, mul
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfn.layout import Leaf, Plan, nested_chunk, nested_index, runs
from shardfn.notation import Factor, ShardError, Spec, did_you_mean
from shardfn.params import Params

_MAX_SEGMENTS = 10_000  # an inner factor that is split can make any number of them

At = tuple[tuple[str, int], ...]  # (axis, coordinate) of the ranks that hold something; axes left out do not matter


# ---------------------------------------------------------------------------------------------------------------------
# Ownership: integers only


@dataclass(frozen=True)
class Segment:
    """Indices `start` to `stop` of a side, held by the ranks at `at`."""

    start: int
    stop: int
    at: At


def segments(
    shape: Sequence[int], extent: Sequence[int], splits: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> Iterator[Segment]:
    """Who holds what along one dim of a model that is stored as the dims `shape`, outermost first.

        >>> from shardfn.inspect.views import segments
        >>> for segment in segments((2, 4), (2, 4), ((), ("tp",)), {"tp": 2}):
        ...     print(segment.start, segment.stop, segment.at)
        0 2 (('tp', 0),)
        2 4 (('tp', 1),)
        4 6 (('tp', 0),)
        6 8 (('tp', 1),)

    Args:
        shape: stored sizes, padding included; they are what is split.
        extent: true sizes.
        splits: the axes that split each stored dim, outermost first.
        sizes: axis -> number of ranks.

    Returns:
        segments in order, without gaps; empty ones are left out, and neighbours with the same owners are one.
    """
    axes = [axis for split in splits for axis in split]

    def of_rank(coords: Sequence[int]) -> Iterator[Segment]:
        index = dict(zip(axes, coords, strict=True))
        cuts = ([(sizes[axis], index[axis]) for axis in split] for split in splits)
        ranges = [nested_chunk(size, cut) for size, cut in zip(shape, cuts, strict=True)]
        return (Segment(start, start + n, tuple(index.items())) for start, n, _ in runs(extent, ranges))

    every = map(of_rank, product(*(range(sizes[axis]) for axis in axes)))
    for at, run in groupby(heapq.merge(*every, key=attrgetter("start")), key=attrgetter("at")):
        held = list(run)
        yield Segment(held[0].start, held[-1].stop, at)


def owners(sizes: Mapping[str, int], ranks: Sequence[int], at: At) -> list[int]:
    """The global ranks at `at`; `ranks` are those of the mesh in row-major order of `sizes`.

    >>> from shardfn.inspect.views import owners
    >>> owners({"fsdp": 2, "tp": 2}, range(4), (("tp", 1),))
    [1, 3]
    """
    wanted = dict(at)
    places = product(*([wanted[axis]] if axis in wanted else range(size) for axis, size in sizes.items()))
    return [ranks[nested_index(zip(place, sizes.values(), strict=True))] for place in places]


# ---------------------------------------------------------------------------------------------------------------------
# Views: what is known about one tensor


@dataclass(frozen=True)
class SideBlock:
    """A block of a side: the text of the rule, and the stored dims that make it up."""

    label: str
    shape: tuple[int, ...]
    extent: tuple[int, ...]
    splits: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class TensorView:
    """One tensor: its type, its dims, and the mesh it lives on (`ranks` is empty for a plain tensor)."""

    type: str  # what `typeof` prints
    sides: tuple[tuple[SideBlock, ...], ...]
    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    pending: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """True sizes, as in the model."""
        return tuple(sum(prod(part.extent) for part in side) for side in self.sides)

    @property
    def mesh(self) -> str:
        """Axes and sizes."""
        return ", ".join(f"{axis}={size}" for axis, size in self.axes)

    @cached_property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each side; at most `_MAX_SEGMENTS`."""
        return tuple(tuple(islice(self._segments(side), _MAX_SEGMENTS)) for side in self.sides)

    def _segments(self, side: tuple[SideBlock, ...]) -> Iterator[Segment]:
        start = 0
        for part in side:
            for segment in segments(part.shape, part.extent, part.splits, dict(self.axes)):
                yield Segment(start + segment.start, start + segment.stop, segment.at)
            start += prod(part.extent)

    def owners(self, at: At) -> list[int]:
        """The ranks at `at`; none for a tensor without a mesh."""
        return owners(dict(self.axes), self.ranks, at) if self.ranks else []

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """At most two dims to draw: those that are split, then those larger than 1."""
        split = [dim for dim, side in enumerate(self.sides) if _is_split(side)]
        rest = [dim for dim, size in enumerate(self.shape) if size != 1 and dim not in split]
        return tuple(sorted((split + rest)[:2]))

    @property
    def notes(self) -> list[str]:
        """What the picture does not show."""
        notes = []
        for dim, side in enumerate(self.sides):
            if _is_split(side) and dim not in self.drawn:
                label = " + ".join(part.label for part in side)
                label = f"({label})" if len(side) > 1 else label
                notes.append(f"dim {dim} ({label}) is split too: the ranks of a cell hold its slices, in order")
        if self.pending:
            notes.append(f"+{','.join(self.pending)}: the ranks of a cell hold terms of a pending sum")
        return notes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def _is_split(side: tuple[SideBlock, ...]) -> bool:
    return any(axes for part in side for axes in part.splits)


def dtype_text(dtype: torch.dtype) -> str:
    """The short name of a dtype.

    >>> import torch
    >>> from shardfn.inspect.views import dtype_text
    >>> [dtype_text(d) for d in (torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn)]
    ['bf16', 'u8', 'bool', 'f8e4m3fn']
    """
    return re.sub(r"^(bf|f|u|i|c)(?:loat|int|nt|omplex)(\d+)_?", r"\1\2", str(dtype).removeprefix("torch."))


def _type_text(dtype: torch.dtype, rule: str, pending: Sequence[str]) -> str:
    rule = f"{rule} +{','.join(pending)}".lstrip() if pending else rule
    return f"{dtype_text(dtype)}[{rule}]"


def views_of(verb: str, x: Any, name: str | None) -> dict[str, TensorView]:
    """Name -> view: of one tensor (under the empty name), of one leaf of a tree, or of all of them."""
    if isinstance(x, Tensor):
        if name is not None:
            raise TypeError(f"{verb}: a tensor has no parameter {name!r}; leave the name out")
        return {"": _tensor_view(x)}
    if not isinstance(x, Plan | Mapping):
        raise TypeError(f"{verb}: expected a tree made by shard, a plan or a tensor, got {type(x).__name__}")
    known = every = list(x) if isinstance(x, Mapping) else []
    if isinstance(x, Plan | Params):
        plan = x if isinstance(x, Plan) else x.plan
        stored = [leaf for leaf in plan.leaves if isinstance(x, Plan) or leaf in x]
        every = list(dict.fromkeys(plan.leaves[leaf][0].name for leaf in stored))
        known = [alias for alias, first in plan.canonical.items() if first in every] + stored
    if name is not None and name not in known:
        raise KeyError(f"{verb}: there is no parameter '{name}'{did_you_mean(name, known)}")
    return {n: _leaf_view(verb, x, n) for n in ([name] if name is not None else every)}


def _leaf_view(verb: str, x: Any, name: str) -> TensorView:
    if not isinstance(x, Plan | Params):
        if not isinstance(x[name], Tensor):
            raise TypeError(f"{verb}: {name!r} is a {type(x[name]).__name__}, not a tensor")
        return _tensor_view(x[name])
    plan = x if isinstance(x, Plan) else x.plan
    layout = plan.layouts[plan.canonical[name]] if name in plan.canonical else plan.leaves[name][0]
    leaves = layout.leaves if name in plan.canonical else (plan.leaves[name][1],)
    rule = layout.rule if name in plan.canonical else leaves[0].rule
    left, pending, dtype, ranks = leaves, (), layout.dtype, range(prod(plan.axes.values()))
    if isinstance(x, Params):
        tensors = [x[leaf.name] for leaf in leaves if leaf.name in x]
        agreed = _as_planned(leaves, tensors) if len(tensors) == len(leaves) else None
        if agreed is None:
            if len(leaves) > 1:
                stored = ", ".join(leaf.name for leaf in leaves if leaf.name in x)
                raise ShardError(f"{verb}: the parts of '{name}' differ from their plan; name one of {stored}")
            return _tensor_view(tensors[0])
        (left, pending), dtype, ranks = agreed, tensors[0].dtype, x.mesh.mesh.flatten().tolist()
    kept = {axis for leaf in left for axis in leaf.axes}
    rule = rule.without([axis for factor in rule.factors for axis in factor.axes if axis not in kept])
    sides = _sides(rule, left, layout.block_dim)
    waiting = tuple(axis for axis in plan.axes if axis in pending)
    return TensorView(_type_text(dtype, str(rule), waiting), sides, tuple(plan.axes.items()), tuple(ranks), waiting)


def _as_planned(leaves: Sequence[Leaf], tensors: Sequence[Tensor]) -> tuple[list[Leaf], tuple[str, ...]] | None:
    """The leaves of a parameter with the axes that still split them, and the axes that are pending on all of them.

    None when a leaf is laid out in some other way, or the leaves differ from their rule in different ways.
    """
    if not all(isinstance(x, DTensor) and x.device_mesh.mesh_dim_names for x in tensors):
        return None
    placed = [_placed(x) for x in tensors]
    kept = {axis for _, splits, _ in placed for split in splits for axis in split}
    pending = {tuple(partial) for _, _, partial in placed}
    sums = all(placement.is_partial("sum") for _, _, partial in placed for placement in partial.values())
    left = [leaf.without([axis for axis in leaf.axes if axis not in kept]) for leaf in leaves]
    rows = zip(left, tensors, placed, strict=True)
    as_planned = all(x.shape == leaf.shape and tuple(splits) == leaf.splits for leaf, x, (_, splits, _) in rows)
    return (left, pending.pop()) if sums and as_planned and len(pending) == 1 else None


def _sides(rule: Spec, leaves: Sequence[Leaf], block_dim: int) -> tuple[tuple[SideBlock, ...], ...]:
    """The dims of a parameter that is stored as these leaves."""
    sides = []
    for dim, written in enumerate(rule.dims):
        parts = []
        for block, leaf in zip(written.blocks, leaves, strict=True) if dim == block_dim else [(None, leaves[0])]:
            factors = leaf.factors(dim)
            label = str(written) if block is None or len(leaves) == 1 else str(block)
            parts.append(SideBlock(label, leaf.shape[factors], leaf.extent[factors], leaf.splits[factors]))
        sides.append(tuple(parts))
    return tuple(sides)


def _tensor_view(x: Tensor) -> TensorView:
    """The view of a tensor outside a tree: sizes for names."""
    axes, splits, partial = _placed(x)
    labels = [str(Factor(str(size), split)) for size, split in zip(x.shape, splits, strict=True)]
    rows = zip(labels, x.shape, splits, strict=True)
    sides = tuple((SideBlock(label, (size,), (size,), (split,)),) for label, size, split in rows)
    kinds = dict.fromkeys(str(getattr(p, "reduce_op", "sum")) for p in partial.values() if not p.is_partial("sum"))
    text = "".join([_type_text(x.dtype, " ".join(labels), [*partial]), *(f" ({kind})" for kind in kinds)])
    ranks = x.device_mesh.mesh.flatten().tolist() if isinstance(x, DTensor) else ()
    return TensorView(text, sides, tuple(axes.items()), tuple(ranks), tuple(partial))


def _placed(x: Tensor) -> tuple[dict[str, int], list[tuple[str, ...]], dict[str, Any]]:
    """A tensor's axes (numbers when its mesh has no names for them), which split each dim, and what is pending."""
    if not isinstance(x, DTensor):
        return {}, [()] * x.dim(), {}
    mesh = x.device_mesh
    axes = {name: mesh.size(i) for i, name in enumerate(mesh.mesh_dim_names or map(str, range(mesh.ndim)))}
    return axes, _splits(x, axes), {name: p for name, p in zip(axes, x.placements, strict=True) if p.is_partial()}


def _splits(x: DTensor, axes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The axes that split each dim, outermost first: in mesh order, but for FSDP2's strided shards.

    A strided shard of factor f cuts each of f equal parts, so it nests inside the axes that make those parts.
    """
    splits: list[list[str]] = [[] for _ in x.shape]
    for axis, placement in reversed(list(zip(axes, x.placements, strict=True))):
        dim, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
        if placement.is_replicate() or placement.is_partial() or dim is None:
            continue
        parts = list(accumulate((axes[inner] for inner in splits[dim]), mul, initial=1))  # made by the first 0, 1, ...
        if factor not in parts:
            raise ShardError(f"{placement} on axis '{axis}' cuts dim {dim} into parts that no other axis makes")
        splits[dim].insert(parts.index(factor), axis)
    return [tuple(split) for split in splits]


def typeof(x: Any, name: str | None = None) -> str:
    """How a tensor is laid out: `dtype[rule]`, in the notation in which rules are written.

    A pending gradient has no data axes but `+axis`; a `DTensor` outside a tree shows sizes for names, its axes in the
    order of its mesh (as numbers when the mesh has no names for them).

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> policy = sf.Policy(rules={"weight": "(heads@tp d) c@fsdp"}, sizes={"heads": 2})
        >>> params = sf.shard(nn.Linear(4, 8, bias=False), sf.make_mesh("cpu", fsdp=1, tp=1), policy)
        >>> sf.typeof(params, "weight")
        'f32[(heads@tp d) c@fsdp]'
        >>> sf.typeof(params["weight"]), sf.typeof(torch.zeros(2, 3, dtype=torch.bfloat16))
        ('f32[8@tp 4@fsdp]', 'bf16[2 3]')

    Args:
        x: a tree made by `shard` (or with its layouts: gradients, averages), a plan, a mapping of tensors, or a tensor.
        name: which parameter of a tree: any name that the model has for it, also a tied one, or the name of a stored
            part such as `"wqkv.weight[q]"`.

    Returns:
        the text; what stands in the brackets is a rule.

    Raises:
        TypeError: a tree without a name, a tensor with one, or something else.
        KeyError: the tree has no such parameter.
        ShardError: the parts of a fused parameter are laid out differently.
    """
    if name is None and isinstance(x, Plan | Mapping):
        known = list(x.layouts if isinstance(x, Plan) else x)
        example = f", for example typeof(x, {known[0]!r})" if known else ""
        raise TypeError(f"typeof: {type(x).__name__} is a tree; pass the name of a parameter{example}")
    return next(iter(views_of("typeof", x, name).values())).type


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a few characters.

    >>> from shardfn.inspect.views import ranks_text
    >>> ranks_text([3]), ranks_text([0, 2]), ranks_text([*range(8), 12]), ranks_text(range(0, 64, 8))
    ('3', '0,2', '0-7,12', '0,8,…,56')
    """
    neighbours = groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in pairs] for _, pairs in neighbours]
    if len(runs) > 3 and len(ranks) > 4:
        return f"{ranks[0]},{ranks[1]},…,{ranks[-1]}"
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(texts) or "local"
