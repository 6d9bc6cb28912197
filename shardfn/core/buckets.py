"""Moving many leaves in one collective: pack, communicate, unpack. Layer 3.

    gather_leaves     undo the split over some axes        one all-gather an axis
    scatter_leaves    its transpose, summing over ranks    one reduce-scatter an axis
    sum_leaves        sum over axes that split nothing     one all-reduce an axis

Uneven dims are padded here, inside the collective, and nowhere else. `GatherBucket` and `ReduceBucket` are the
differentiable pair over a plan's bucket; the functions below them are outside autograd.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardfn._torch import DTensorSpec, dtensor_spec, unwrap_local, wrap_local
from shardfn.core.collectives import gather_flat, scatter_sum_flat, sum_flat_
from shardfn.core.layout import Leaf, clear_padding
from shardfn.core.mesh import Grid
from shardfn.core.plan import Bucket, Plan


def placements(leaf: Leaf, order: Sequence[str], pending: Sequence[str] = ()) -> list[Placement]:
    """DTensor placements of a leaf on the storage mesh; `pending` axes hold partial sums of the gathered value."""
    out: list[Placement] = []
    for axis in order:
        dim = leaf.split_dim(axis)
        out.append(Partial() if axis in pending else Replicate() if dim is None else Shard(dim))
    return out


def leaf_spec(
    plan: Plan, grid: Grid, name: str, dtype: torch.dtype | None = None, pending: bool = False
) -> DTensorSpec:
    """The DTensor metadata of a stored leaf, or of its unreduced gradient; made once and kept with the plan."""
    kept: dict[Any, tuple[Grid, DTensorSpec]] = plan.__dict__.setdefault("_leaf_specs", {})
    key = (id(grid), name, dtype, pending)
    if key not in kept:  # the values hold the grid, so its id is not given to another one
        layout, leaf = plan.leaves[name]
        placed = placements(leaf, plan.roles.storage, plan.roles.data if pending else ())
        kept[key] = grid, dtensor_spec(grid.storage, placed, leaf.shape, dtype or layout.dtype)
    return kept[key][1]


@dataclass(frozen=True)
class _Move:
    """How one leaf takes part in undoing or redoing its split over one axis of W ranks.

    `shard` is its shape here, `chunk` the same with the split dim padded to what the first rank has, `whole` the shape
    without the split.
    """

    dim: int
    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.chunk)

    def pack(self, shard: Tensor, out: Tensor) -> None:
        """shard -> [numel]"""
        if self.shard == self.chunk:
            out.copy_(shard.reshape(-1))
        else:
            out.zero_().view(self.chunk).narrow(self.dim, 0, self.shard[self.dim]).copy_(shard)

    def unpack(self, parts: Tensor, out: Tensor) -> None:
        """[W, numel] -> whole"""
        joined = parts.view(parts.shape[0], *self.chunk).movedim(0, self.dim)  # [..., W, chunk, ...]
        step, size = self.chunk[self.dim], self.whole[self.dim]
        full, rest = divmod(size, step) if step else (0, 0)
        if full:
            target = out.narrow(self.dim, 0, full * step).unflatten(self.dim, (full, step))
            target.copy_(joined.narrow(self.dim, 0, full))
        if rest:
            out.narrow(self.dim, full * step, rest).copy_(joined.select(self.dim, full).narrow(self.dim, 0, rest))

    def split(self, whole: Tensor, out: Tensor) -> None:
        """whole -> [W, numel]; the transpose of `unpack`. What nobody keeps stays unset."""
        parts = out.view(out.shape[0], *self.chunk)  # [W, ..., chunk, ...]
        step, size = self.chunk[self.dim], self.whole[self.dim]
        full, rest = divmod(size, step) if step else (0, 0)
        if full:
            source = whole.narrow(self.dim, 0, full * step).unflatten(self.dim, (full, step))
            parts.narrow(0, 0, full).movedim(0, self.dim).copy_(source)
        if rest:
            parts[full].narrow(self.dim, 0, rest).copy_(whole.narrow(self.dim, full * step, rest))


Memo = dict[tuple[str, tuple[str, ...]], list[_Move]]


def _moves(leaves: Sequence[Leaf], grid: Grid, axis: str, keep: tuple[str, ...], memo: Memo) -> list[_Move]:
    """The moves over `axis` of leaves that are still split over `keep` (without `axis`); remembered in `memo`."""
    if (axis, keep) in memo:
        return memo[axis, keep]
    moves = memo[axis, keep] = []
    for leaf in leaves:
        dim = leaf.split_dim(axis)
        assert dim is not None, f"{leaf.name} is not split over {axis}"
        whole = leaf.local_shape(grid.sizes, grid.coords, keep)
        shard = leaf.local_shape(grid.sizes, grid.coords, (*keep, axis))
        step = -(-whole[dim] // grid.sizes[axis])
        moves.append(_Move(dim, shard, (*whole[:dim], step, *whole[dim + 1 :]), whole))
    return moves


def gather_leaves(
    leaves: Sequence[Leaf],
    shards: Sequence[Tensor],
    axes: Sequence[str],
    grid: Grid,
    undone: Sequence[str] = (),
    memo: Memo | None = None,
) -> list[Tensor]:
    """Whole tensors over `axes` (outermost first), all in one new storage.

    `axes` are the innermost splits of every leaf, once those over the `undone` axes are undone. `memo` remembers the
    arithmetic between calls with the same leaves, grid and `undone`.

    One all-gather an axis larger than one. Axes of one rank cost nothing: the shards themselves come back.
    """
    tensors = list(shards)
    kept = tuple(dict.fromkeys(axis for leaf in leaves for axis in leaf.axes if axis not in undone))
    for axis in reversed(axes):
        kept = tuple(other for other in kept if other != axis)
        if grid.sizes[axis] > 1:
            moves = _moves(leaves, grid, axis, kept, {} if memo is None else memo)
            tensors = _gather_axis(moves, tensors, axis, grid)
    return tensors


def _gather_axis(moves: Sequence[_Move], shards: Sequence[Tensor], axis: str, grid: Grid) -> list[Tensor]:
    numels = [move.numel for move in moves]
    if not sum(numels):
        return [shard.new_empty(move.whole) for move, shard in zip(moves, shards, strict=True)]
    flat = shards[0].new_empty(sum(numels))
    for move, shard, part in zip(moves, shards, flat.split(numels), strict=True):
        move.pack(shard, part)
    gathered = gather_flat(flat, grid.groups[axis]).view(grid.sizes[axis], -1)  # [W, sum(numels)]
    wholes = empty_in_one([move.whole for move in moves], flat)
    for move, parts, whole in zip(moves, gathered.split(numels, dim=1), wholes, strict=True):
        move.unpack(parts, whole)
    return wholes


def empty_in_one(shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
    """Uninitialised tensors that share one storage, each with a version counter of its own."""
    storage = like.new_empty(sum(prod(shape) for shape in shapes)).untyped_storage()
    out, offset = [], 0
    for shape in shapes:
        blank: Any = like.new_empty(0)
        out.append(blank.set_(storage, offset, torch.Size(shape)))
        offset += prod(shape)
    return out


def scatter_leaves(
    leaves: Sequence[Leaf], wholes: Sequence[Tensor], axes: Sequence[str], grid: Grid, memo: Memo | None = None
) -> list[Tensor]:
    """The sum over ranks of whole tensors, of which every rank keeps its shard; the transpose of `gather_leaves`.

    One reduce-scatter an axis larger than one.
    """
    tensors = list(wholes)
    kept = list(dict.fromkeys(axis for leaf in leaves for axis in leaf.axes if axis not in axes))
    for axis in axes:
        if grid.sizes[axis] > 1:
            moves = _moves(leaves, grid, axis, tuple(kept), {} if memo is None else memo)
            tensors = _scatter_axis(moves, tensors, axis, grid)
        kept.append(axis)
    return tensors


def _scatter_axis(moves: Sequence[_Move], wholes: Sequence[Tensor], axis: str, grid: Grid) -> list[Tensor]:
    numels = [move.numel for move in moves]
    if not sum(numels):
        return [whole.new_empty(move.shard) for move, whole in zip(moves, wholes, strict=True)]
    parts = wholes[0].new_empty(grid.sizes[axis], sum(numels))  # [W, sum(numels)]
    for move, whole, part in zip(moves, wholes, parts.split(numels, dim=1), strict=True):
        move.split(whole, part)
    flat = scatter_sum_flat(parts.view(-1), grid.groups[axis])  # [sum(numels)]
    out = []
    for move, mine in zip(moves, flat.split(numels), strict=True):
        shard = mine.view(move.chunk)
        out.append(shard if move.chunk == move.shard else shard.narrow(move.dim, 0, move.shard[move.dim]).contiguous())
    return out


def sum_leaves(tensors: Sequence[Tensor], axes: Sequence[str], grid: Grid) -> list[Tensor]:
    """The sum over all ranks of `axes`, in new tensors. One all-reduce an axis larger than one."""
    wide = [axis for axis in axes if grid.sizes[axis] > 1]
    if not wide:
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for axis in wide:
        sum_flat_(flat, grid.groups[axis])
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@dataclass(frozen=True, eq=False)
class BucketOnGrid:
    """A bucket of a plan on this rank's grid: everything that its collectives look up."""

    plan: Plan
    grid: Grid
    bucket: Bucket
    _memo: Memo = field(default_factory=dict)
    _parts: "dict[tuple[bool, ...], BucketOnGrid]" = field(default_factory=dict)

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The stored leaves, in bucket order."""
        return [self.plan.leaves[name][1] for name in self.bucket.leaves]

    def part(self, wanted: Sequence[bool]) -> "BucketOnGrid":
        """The same bucket with some of its leaves only."""
        if all(wanted):
            return self
        key = tuple(wanted)
        if key not in self._parts:
            names = tuple(name for name, want in zip(self.bucket.leaves, wanted, strict=True) if want)
            self._parts[key] = BucketOnGrid(self.plan, self.grid, replace(self.bucket, leaves=names))
        return self._parts[key]

    @cached_property
    def communicates(self) -> bool:
        """Whether gathering needs a collective here; otherwise the gathered tensors are the shards themselves."""
        return any(self.grid.sizes[axis] > 1 for axis in self.bucket.axes)

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Local shards -> tensors whole over the data axes, in the bucket's dtype."""
        cast = [shard.to(self.bucket.dtype) for shard in shards]
        return gather_leaves(self.leaves, cast, self.bucket.axes, self.grid, memo=self._memo)

    def reduce(
        self, wholes: Sequence[Tensor | None], shards_like: Sequence[torch.dtype], op: Literal["mean", "sum"]
    ) -> list[Tensor]:
        """Pending gradients, whole over the data axes -> this rank's shards of their sum or mean.

        A missing gradient counts as zeros. One reduce-scatter over the axes that split the bucket, one all-reduce over
        the other data axes.
        """
        grid, axes = self.grid, self.bucket.axes
        dtype = self.bucket.dtype
        if dtype.is_floating_point:
            dtype = self.plan.policy.reduce_dtype or dtype
        filled = []
        for leaf, whole in zip(self.leaves, wholes, strict=True):
            shape = leaf.local_shape(grid.sizes, grid.coords, self.plan.roles.compute)
            filled.append(torch.zeros(shape, dtype=dtype, device=grid.device) if whole is None else whole.to(dtype))
        shards = scatter_leaves(self.leaves, filled, axes, grid, self._memo)
        shards = sum_leaves(shards, [axis for axis in self.plan.roles.data if axis not in axes], grid)
        ranks = prod(grid.sizes[axis] for axis in self.plan.roles.data)
        if op == "mean" and ranks > 1:
            shards = [shard / ranks for shard in shards]
        shards = [shard.to(want) for shard, want in zip(shards, shards_like, strict=True)]
        return [
            clear_padding(leaf, shard, grid.sizes, grid.coords) for leaf, shard in zip(self.leaves, shards, strict=True)
        ]


def buckets_on_grid(plan: Plan, grid: Grid) -> dict[Bucket, BucketOnGrid]:
    """Every bucket of a plan on a grid; made once and kept with the plan."""
    kept: dict[int, dict[Bucket, BucketOnGrid]] = plan.__dict__.setdefault("_buckets_on_grid", {})
    if id(grid) not in kept:  # the values hold the grid, so its id is not given to another one
        buckets = (bucket for unit in plan.units for bucket in unit.buckets)
        kept[id(grid)] = {bucket: BucketOnGrid(plan, grid, bucket) for bucket in buckets}
    return kept[id(grid)]


class GatherBucket(torch.autograd.Function):
    """The leaves of a bucket, made whole over the data axes.

        forward   leaf [shard]            -> all_gather(data)     -> [whole over data, split over compute]
        backward  d    [whole over data]  -> reduce_scatter(data) -> d leaf [shard]

    `on_backward` is called when the gradients arrive, before they are reduced: whoever keeps the gathered tensors for
    the backward can let go of them.
    """

    @staticmethod
    def forward(spot: BucketOnGrid, on_backward: Callable[[], None] | None, *leaves: Tensor) -> tuple[Tensor, ...]:
        shards = [unwrap_local(leaf) for leaf in leaves]
        wholes = spot.gather(shards)
        return tuple(w.detach() if w is s else w for w, s in zip(wholes, shards, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.spot, ctx.on_backward, *leaves = inputs
        ctx.dtypes = [leaf.dtype for leaf in leaves]
        ctx.needed = [leaf.requires_grad for leaf in leaves]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.on_backward is not None:
            ctx.on_backward()
        spot, needed = ctx.spot, ctx.needed
        dtypes = [dtype for dtype, need in zip(ctx.dtypes, needed, strict=True) if need]
        pending = [grad for grad, need in zip(grads, needed, strict=True) if need]
        reduced = iter(ReduceBucket.apply(spot.part(needed), spot.plan.reduction, dtypes, *pending))
        return (None, None, *(next(reduced) if need else None for need in needed))


class ReduceBucket(torch.autograd.Function):
    """Pending gradients of a bucket, reduced into their parameters' layout, as DTensors.

    forward   d [whole over data]  -> reduce_scatter(data) -> [shard]        (op None: kept, typed `+data`)
    backward  e [shard]            -> all_gather(data)     -> [whole over data]
    """

    @staticmethod
    def forward(
        spot: BucketOnGrid, op: Literal["mean", "sum"] | None, dtypes: Sequence[torch.dtype], *grads: Tensor | None
    ) -> tuple[Tensor, ...]:
        names = spot.bucket.leaves
        if op is None:
            kept = [
                None if grad is None else grad.detach().to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)
            ]
            locals_ = [
                _or_zeros(spot, i, grad, dtype, op) for i, (grad, dtype) in enumerate(zip(kept, dtypes, strict=True))
            ]
        else:
            locals_ = spot.reduce(grads, dtypes, op)
        specs = [leaf_spec(spot.plan, spot.grid, n, d, pending=op is None) for n, d in zip(names, dtypes, strict=True)]
        return tuple(wrap_local(local, spec) for local, spec in zip(locals_, specs, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.spot, ctx.op = inputs[0], inputs[1]
        ctx.dtypes = [None if grad is None else grad.dtype for grad in inputs[3:]]
        ctx.shards = inputs[2]
        ctx.set_materialize_grads(False)  # torch's zeros would be plain tensors of the global shape

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        spot = ctx.spot
        given = [
            _or_zeros(spot, i, x, dtype, ctx.op)
            for i, (x, dtype) in enumerate(zip(cotangents, ctx.shards, strict=True))
        ]
        wholes = given if ctx.op is None else GatherBucket.apply(spot, None, *given)
        ranks = prod(spot.grid.sizes[axis] for axis in spot.plan.roles.data) if ctx.op == "mean" else 1
        out = [None if d is None else unwrap_local(w).to(d) / ranks for w, d in zip(wholes, ctx.dtypes, strict=True)]
        return (None, None, None, *out)


def _or_zeros(spot: BucketOnGrid, index: int, tensor: Tensor | None, dtype: torch.dtype, op: str | None) -> Tensor:
    """The tensor, or zeros of the shape that it has here: a shard, or with `op` None a pending gradient."""
    if tensor is not None:
        return tensor
    keep = spot.plan.roles.compute if op is None else None
    shape = spot.leaves[index].local_shape(spot.grid.sizes, spot.grid.coords, keep)
    return torch.zeros(shape, dtype=dtype, device=spot.grid.device)
