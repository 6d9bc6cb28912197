"""Moving many leaves together: gather, reduce, and the differentiable pair over a plan's bucket.

    gather    undo the split over the data axes         one all-gather an axis
    reduce    its transpose, the sum or mean of ranks   one reduce-scatter an axis that splits, one all-reduce another

Uneven dims are padded inside the collective, and nowhere else; how the bytes travel is in packing.py. An
`AsyncCollective` is a communication that goes on while something else is done. `whole` gathers one `DTensor` of any
layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import compress
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardfn._torch import DTensorSpec, dtensor_spec, has_no_memory, simulated, unwrap_local, wrap_local
from shardfn.comm.flat_memory import Buffers, FreshBuffers, split_flat
from shardfn.comm.packing import AxisCollective, Host, PureAxisCollective, apart_again, host_of, together, undone
from shardfn.comm.raw_collectives import AsyncCollective, Steps, accumulation_dtype, backend_of, sum_steps
from shardfn.layout import Bucket, Grid, Leaf, Plan, Reduction, clear_padding_, local_slice, nested_chunk, per_rank
from shardfn.notation import ShardError

Pending = Literal["sum", "avg"] | None  # a gradient that is not reduced yet, and what it is of those of the ranks
Batch = tuple[int, ...]  # dims in front of a leaf, by `vmap`, outermost first


def leaf_spec(
    plan: Plan, grid: Grid, name: str, dtype: torch.dtype | None = None, pending: Pending = None, batch: Batch = ()
) -> DTensorSpec:
    """The DTensor metadata of a stored leaf, or of its unreduced gradient; made once and kept with the plan."""

    def make() -> DTensorSpec:
        layout, leaf = plan.leaves[name]
        leaf = reduce(Leaf.stacked, reversed(batch), leaf)
        sums = plan.gathered_axes(layout) if pending else ()  # over these axes they are still to be added up
        dims = ((axis, leaf.split_dim(axis)) for axis in plan.roles.storage)
        total = Partial(pending or "sum")
        placed = [total if axis in sums else Replicate() if dim is None else Shard(dim) for axis, dim in dims]
        return dtensor_spec(grid.storage, placed, leaf.shape, dtype or layout.dtype)

    return plan.home.once((grid, name, dtype, pending, batch), make)


AnyAxisCollective = AxisCollective | PureAxisCollective
Cut = Callable[[Tensor], list[Tensor]]  # how shards are taken out of a flat tensor


def whole(tensor: DTensor) -> Tensor:
    """A `DTensor` of any layout as an ordinary tensor on every rank of its mesh, outside autograd.

    `full_tensor()` would do it through torch's functional collectives. In them processes of torch 2.13 were seen to
    die on gloo, once in thousands of calls on small tensors, of a block of memory that two threads had freed.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> from shardfn.comm.buckets import whole
        >>> params = sf.shard(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> type(whole(params["weight"])).__name__
        'Tensor'

    Args:
        tensor: split evenly or not, in plain `Shard`s, or a pending sum.

    Raises:
        ShardError: it is the part of another rank, which a pickled one may be.

    Communication: one all-gather an axis that splits it, one all-reduce an axis over which it is a sum.
    """
    placements, mesh = tensor.placements, tensor.device_mesh
    if mesh.get_coordinate() is not None:
        require_own_part("a tensor", tensor, range(dist.get_world_size()))
    simple = all(type(p) is Shard or p.is_replicate() or p.is_partial("sum") for p in placements)
    if not simple or has_no_memory() or simulated() or mesh.get_coordinate() is None:
        return tensor.full_tensor().detach()
    local = shard = unwrap_local(tensor).detach()
    for axis, placement in reversed(list(enumerate(placements))):
        if mesh.size(axis) == 1:
            continue
        if placement.is_partial():
            local = local.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(local, group=mesh.get_group(axis))
        elif type(placement) is Shard:
            outer = [other for other in range(axis) if placements[other] == placement]  # which split the dim before
            splits = [(mesh.size(other), mesh.get_local_rank(other)) for other in outer]
            _, length = nested_chunk(tensor.shape[placement.dim], splits)
            local = undone(local, placement.dim, length, mesh.get_group(axis))
    return shard.clone() if local is shard else local


def require_own_part(what: str, value: DTensor, ranks: Sequence[int]) -> None:
    """Refuse a DTensor whose part is not this rank's, see `rank_of_part`.

    Raises:
        ShardError: it is another rank's.
    """
    if foreign := rank_of_part(value, ranks):
        why = f"{what} is {foreign}: torch.save of sharded parameters writes one part a rank. Save whole checkpoints:"
        raise ShardError(f"{why} trainer.save, sf.checkpoint.save, torch.distributed.checkpoint, or a full state dict.")


def rank_of_part(value: DTensor, ranks: Sequence[int]) -> str | None:
    """Whose part a DTensor is, in words, when it is not this rank's of a mesh over some of `ranks`.

    The local part of a pickled DTensor is that of the rank which pickled it, whoever reads the file.
    """
    mesh = value.device_mesh
    if has_no_memory() or simulated():
        return None
    at, of = mesh.get_coordinate(), sorted(mesh.mesh.flatten().tolist())
    rank = None if at is None else int(mesh.mesh[tuple(at)])
    here = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    split = [axis for axis, placement in enumerate(value.placements) if not placement.is_replicate()]
    same = at is not None and bool(here) and all(at[axis] == here[0][axis] for axis in split)
    if same and set(of) <= set(ranks) and (len(of) == len(ranks) or _is_alive(mesh)):
        return None
    return f"the part of rank {rank} of ranks {of}, and this is rank {dist.get_rank()} of {sorted(ranks)}"


def _is_alive(mesh: DeviceMesh) -> bool:
    """Whether a mesh has process groups: one that was read from a file has none."""
    try:
        return None not in mesh.get_all_groups()
    except (RuntimeError, KeyError, ValueError):
        return False


@dataclass(frozen=True, eq=False)
class BucketOnGrid:
    """A bucket of a plan on this rank's grid: everything that its collectives look up."""

    plan: Plan
    grid: Grid
    bucket: Bucket
    buffers: Buffers
    batch: Batch = ()
    _parts: "dict[tuple[bool, ...] | int, BucketOnGrid]" = field(default_factory=dict)

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The stored leaves, in bucket order."""
        return [reduce(Leaf.stacked, reversed(self.batch), self.plan.leaves[name][1]) for name in self.bucket.leaves]

    def batched(self, size: int) -> "BucketOnGrid":
        """The same bucket with one more dim in front of every leaf."""
        if size not in self._parts:
            self._parts[size] = replace(self, batch=(size, *self.batch), _parts={})
        return self._parts[size]

    def spec(self, index: int, dtype: torch.dtype, pending: Pending) -> DTensorSpec:
        """The DTensor metadata of a leaf, or of its unreduced gradient."""
        return leaf_spec(self.plan, self.grid, self.bucket.leaves[index], dtype, pending, self.batch)

    @cached_property
    def host(self) -> Host | None:
        """Where the shards live, when that is not the device that computes."""
        return host_of(self.plan.policy, self.grid.device)

    @cached_property
    def collectives(self) -> list[AnyAxisCollective]:
        """One for each axis larger than one to gather over, innermost first; from a `host` at least one.

        Without any the gathered tensors are the shards themselves, or copies of them.
        """
        leaves, grid, axes = self.leaves, self.grid, self.bucket.axes
        kept = tuple(dict.fromkeys(axis for leaf in leaves for axis in leaf.axes))
        collectives: list[AnyAxisCollective] = []
        for axis in reversed(axes):
            kept = tuple(other for other in kept if other != axis)
            host = None if collectives else self.host
            if grid.sizes[axis] > 1 or (host is not None and axis == axes[0]):
                kind = PureAxisCollective if grid.pure else partial(AxisCollective, host=host)
                collectives.append(kind(leaves, grid, axis, kept))
        return collectives

    @cached_property
    def idle(self) -> bool:
        """Whether no axis has a part in either direction: leaves are used, and gradients passed on, as they are."""
        return not (self.collectives or self._sum_axes or self._padded or self.host is not None)

    def unmoved(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """What gathering gives when it moves nothing: the shards, in the bucket's dtype and on the device."""
        return [shard.to(self.grid.device, self.bucket.dtype) for shard in shards]

    @cached_property
    def _results(self) -> Buffers:
        """Reduced gradients are not pooled: they are most of what a step makes, and needed at its end only."""
        return FreshBuffers(self.grid.device)

    @cached_property
    def _shard_shapes(self) -> list[tuple[int, ...]]:
        return [leaf.local_shape(self.grid.sizes, self.grid.coords) for leaf in self.leaves]

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """The axes over which modules compute with parts of these leaves."""
        return (*self.plan.roles.compute, *self.bucket.kept)

    @cached_property
    def _padded(self) -> list[int]:
        """Leaves with padding that is stored."""
        return [index for index, leaf in enumerate(self.leaves) if leaf.shape != leaf.extent]

    @cached_property
    def _sum_axes(self) -> list[str]:
        """Data axes that split nothing here: gradients are added up over them."""
        moved = (*self.bucket.axes, *self.bucket.kept)
        return [axis for axis in self.plan.roles.data if axis not in moved and self.grid.sizes[axis] > 1]

    @cached_property
    def _ranks(self) -> int:
        """How many have losses of their own."""
        return prod(self.grid.sizes[axis] for axis in self.plan.roles.data)

    @cached_property
    def reduces_twice(self) -> bool:
        """Whether a reduce-scatter is followed by an all-reduce."""
        return bool(self.collectives and self._sum_axes)

    def part(self, wanted: Sequence[bool]) -> "BucketOnGrid":
        """The same bucket with some of its leaves only."""
        if all(wanted):
            return self
        key = tuple(wanted)
        if key not in self._parts:
            names = tuple(compress(self.bucket.leaves, wanted))
            self._parts[key] = replace(self, bucket=replace(self.bucket, leaves=names), _parts={})
        return self._parts[key]

    def empty_shards(self, dtype: torch.dtype) -> list[Tensor]:
        """Uninitialised shards side by side, so that a gather need not copy them together."""
        if self.grid.pure:
            return self.new_shards(torch.empty, dtype, None)
        memory = self.host.buffers if self.host is not None else FreshBuffers(self.grid.device)
        if self.collectives:
            collective = self.collectives[0]
            assert isinstance(collective, AxisCollective)
            return collective.shards_of(memory.tensor(collective.numel, dtype))
        return split_flat(memory.tensor(sum(map(prod, self._shard_shapes)), dtype), self._shard_shapes)

    def gather_steps(self, shards: Sequence[Tensor]) -> Steps:
        """Local shards -> one flat tensor, whole over the data axes, in the bucket's dtype.

        `wholes_of` of the last of the collectives takes it apart.
        """
        if len(self.collectives) == 1:
            return self.collectives[0].gather(shards, self.bucket.dtype, self.buffers)
        return self._gather_over_axes(shards)

    def _gather_over_axes(self, shards: Sequence[Tensor]) -> Steps:
        """The first collective undoes the innermost split."""
        *inner, last = self.collectives
        for collective in inner:
            (flat,) = yield from collective.gather(shards, self.bucket.dtype, self.buffers)
            shards = collective.wholes_of(flat)
        return (yield from last.gather(shards, self.bucket.dtype, self.buffers))

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Local shards -> tensors whole over the data axes, in the bucket's dtype; without a collective, the shards."""
        if not self.collectives:
            return self.unmoved(shards)
        name = partial(self.profiler_name, "all_gather")
        return self.collectives[-1].wholes_of(*AsyncCollective(self.gather_steps(shards), None, name).finish())

    def reduce_steps(self, wholes: Sequence[Tensor | None], dtypes: Sequence[torch.dtype], op: Reduction) -> Steps:
        """Pending gradients, whole over the data axes -> this rank's shards of their sum or mean, in `dtypes`.

        A missing gradient counts as zeros. One reduce-scatter over the axes that split the bucket, one all-reduce over
        the other data axes.
        """
        dtype = self.bucket.dtype
        dtype = (self.bucket.reduce_dtype or dtype) if dtype.is_floating_point else dtype
        if callable(op):
            flat, shards = self._reduced_by(op, wholes, dtype)
            return (yield from self._finished_shards(flat, shards, dtypes))
        if self.collectives:
            *outer, last = reversed(self.collectives)
            for collective in outer:
                (flat,) = yield from collective.reduce(wholes, dtype, self.buffers, self.buffers)
                wholes, dtype = collective.shards_of(flat), flat.dtype
            (flat,) = yield from last.reduce(wholes, dtype, self.buffers, self._results)
            shards = last.shards_of
        else:
            flat, shards = self._unmoved_gradients(wholes, dtype)
        for axis in self._sum_axes:
            group = self.grid.groups[axis]
            if backend_of(group, self.grid.device) == "gloo":
                flat = flat.to(accumulation_dtype(flat.dtype))
            (flat,) = yield from sum_steps(flat, group)
        if op == "mean" and self._ranks > 1:
            flat = flat.div(self._ranks) if self.grid.pure else flat.div_(self._ranks)
        return (yield from self._finished_shards(flat, shards, dtypes))

    def _reduced_by(
        self, reduce: Callable[[Tensor, Tensor | None], None], wholes: Sequence[Tensor | None], dtype: torch.dtype
    ) -> tuple[Tensor, Cut]:
        """Shards in one flat tensor, by a function of the user's own (a communication hook of a compatible class)."""
        if self.grid.pure or len(self.collectives) > 1 or (self.collectives and self._sum_axes):
            raise ShardError("a reduction of your own works over one data axis, on real ranks")
        if not self.collectives:
            flat, shards = self._unmoved_gradients(wholes, dtype)
            reduce(flat, None)
            return flat, shards
        collective = self.collectives[0]
        assert isinstance(collective, AxisCollective)
        flat = self._results.tensor(collective.numel, dtype)
        reduce(collective.parts_for_ranks(wholes, dtype, self._results), flat)
        return flat, collective.shards_of

    def _finished_shards(self, flat: Tensor, shards: Cut, dtypes: Sequence[torch.dtype]) -> Steps:
        """The shards in a flat tensor, in their dtypes, where they live and without values in padding."""
        kinds = set(dtypes)
        if len(kinds) == 1 and dtypes[0] != flat.dtype:
            flat = flat.to(dtypes[0]) if self.grid.pure else self._results.tensor(flat.numel(), dtypes[0]).copy_(flat)
        if self.host is not None:
            (flat,) = yield from self.host.fetch(flat)
        out = shards(flat)
        if kinds - {flat.dtype}:
            out = [shard.to(want) for shard, want in zip(out, dtypes, strict=True)]
        if self._padded:
            per_rank(self.grid, self._clear_padding_, out)
        return out

    def _clear_padding_(self, coords: Mapping[str, int], shards: list[Tensor]) -> list[Tensor]:
        for index in self._padded:
            clear_padding_(self.leaves[index], shards[index], self.grid.sizes, coords)
        return shards

    def new_shards(self, make: Callable[..., Tensor], dtype: torch.dtype, keep: Sequence[str] | None) -> list[Tensor]:
        """`make(shape, dtype=..., device=...)` for the shard of every leaf, split only over `keep` (None: all)."""
        stored = self.grid.device if self.host is None else self.host.buffers.device  # where shards live
        device = self.grid.device if keep is not None else stored

        def made(coords: Mapping[str, int], _: list[Any]) -> list[Tensor]:
            shapes = [leaf.local_shape(self.grid.sizes, coords, keep) for leaf in self.leaves]
            return [make(shape, dtype=dtype, device=device) for shape in shapes]

        return per_rank(self.grid, made, [])

    def _unmoved_gradients(self, wholes: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Tensor, Cut]:
        """Gradients that nothing splits over data axes, one after another; how to take them apart."""
        gradients = _or_zeros(self, wholes, [dtype] * len(wholes), None)
        if self.grid.pure:
            return together(gradients).to(dtype), partial(apart_again, shapes=self._shard_shapes)
        flat = self._results.tensor(sum(map(prod, self._shard_shapes)), dtype)
        return together(gradients, flat), partial(split_flat, shapes=self._shard_shapes)

    def reduce(self, wholes: Sequence[Tensor | None], dtypes: Sequence[torch.dtype], op: Reduction) -> list[Tensor]:
        """`reduce_steps`, waited for."""
        name = partial(self.profiler_name, "reduce")
        return AsyncCollective(self.reduce_steps(wholes, dtypes, op), None, name).finish()

    def profiler_name(self, verb: str) -> str:
        """What torch's profiler calls a collective of this bucket: its unit, its axes, the bytes that are whole."""
        units = dict.fromkeys(self.plan.leaves[name][0].unit or "(root)" for name in self.bucket.leaves)
        axes = dict.fromkeys((*self.bucket.axes, *(self._sum_axes if verb == "reduce" else ())))
        sizes = (prod(leaf.local_shape(self.grid.sizes, self.grid.coords, self.computed)) for leaf in self.leaves)
        what = f"{len(units)} units" if len(units) > 1 else next(iter(units))
        return f"shardfn::{verb} {what} over {' and '.join(axes)}, {sum(sizes) * self.bucket.dtype.itemsize:,} bytes"


def empty_shards(plan: Plan, grid: Grid, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
    """Uninitialised memory for this rank's part of leaves (default: all); those of one bucket lie side by side."""
    wanted = {name: layout.dtype for name, (layout, _) in plan.leaves.items()} if dtypes is None else dtypes
    out: dict[str, Tensor] = {}
    for bucket in plan.buckets_in(wanted):
        on_grid = BucketOnGrid(plan, grid, bucket, FreshBuffers(grid.device))
        out |= dict(zip(bucket.leaves, on_grid.empty_shards(bucket.dtype), strict=True))
    return out


# [Note: cotangents of trees]
# Every data rank has a loss of its own, and what is differentiated is their mean. So the cotangent of a shard is the
# mean over ranks of what their losses say, and shards that a loss does not reach through a gather count as if all ranks
# said the same. `GatherBucket` therefore transposes to a mean, and the transpose of that mean is a gather: all ranks
# get the cotangent as it is. Second derivatives follow from these two, and so does arithmetic on trees in between.


class GatherBucket(torch.autograd.Function):
    """The leaves of a bucket, made whole over the data axes.

        forward   leaf [shard]            -> all_gather(data)     -> [whole over data, split over compute]
        backward  d    [whole over data]  -> reduce_scatter(data) -> d leaf [shard]

    At once, and under every transform; the engine has a pair of its own that overlaps.
    """

    @staticmethod
    def forward(on_grid: BucketOnGrid, *leaves: Tensor) -> tuple[Tensor, ...]:
        shards = [unwrap_local(leaf) for leaf in leaves]
        wholes = on_grid.gather(shards)
        return tuple(w.detach() if w is s else w for w, s in zip(wholes, shards, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.on_grid, *leaves = inputs
        ctx.dtypes = [leaf.dtype for leaf in leaves]
        ctx.needed = [leaf.requires_grad for leaf in leaves]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        on_grid, needed = ctx.on_grid.part(ctx.needed), ctx.needed
        dtypes = [*compress(ctx.dtypes, needed)]
        # As the collectives take them: that of an embedding may be sparse.
        pending = [x if x is None or x.layout is torch.strided else x.to_dense() for x in compress(grads, needed)]
        reduced = iter(ReduceBucket.apply(on_grid, on_grid.plan.reduction, dtypes, *pending))
        return (None, *(next(reduced) if need else None for need in needed))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        shapes = [] if ctx.on_grid.grid.pure else ctx.on_grid._shard_shapes
        for leaf, tangent, shape in zip(ctx.on_grid.leaves, tangents[1:], shapes, strict=False):
            if tangent is not None and not isinstance(tangent, DTensor) and tuple(tangent.shape) != shape:
                why = f"'{leaf.name}' has a tangent of shape {tuple(tangent.shape)}, its shard {shape}"
                raise ShardError(f"{why}: torch.func.jacfwd and hessian take no DTensors; use sf.jvp or sf.hvp")
        return GatherBucket.apply(ctx.on_grid, *_or_zeros(ctx.on_grid, tangents[1:], ctx.dtypes, "sum"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, tuple[int, ...]]:
        on_grid, *leaves = args
        wholes = GatherBucket.apply(on_grid.batched(info.batch_size), *in_front(info.batch_size, in_dims[1:], leaves))
        return wholes, (0,) * len(leaves)


class ReduceBucket(torch.autograd.Function):
    """Gradients of a bucket that each rank has of its own batch, reduced into the layout of their parameters; see
    [Note: cotangents of trees].

    forward   d [whole over data]  -> reduce_scatter(data) -> [shard]        (op None: kept, typed `+data`)
    backward  e [shard]            -> all_gather(data)     -> [whole over data], for "sum" times the ranks
    """

    @staticmethod
    def forward(
        on_grid: BucketOnGrid, op: Literal["mean", "sum"] | None, dtypes: Sequence[torch.dtype], *grads: Tensor | None
    ) -> tuple[Tensor, ...]:
        if op is None:
            kept = [None if grad is None else grad.detach().to(want) for grad, want in zip(grads, dtypes, strict=True)]
            locals_ = _or_zeros(on_grid, kept, dtypes, op)
        else:
            locals_ = on_grid.reduce(grads, dtypes, op)
        if on_grid.plan.vmaps is not None:
            return tuple(locals_)
        specs = [on_grid.spec(i, dtype, None if op else "sum") for i, dtype in enumerate(dtypes)]
        return tuple(wrap_local(local, spec) for local, spec in zip(locals_, specs, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.on_grid, ctx.op, ctx.shards, *grads = inputs
        ctx.dtypes = [None if grad is None else grad.dtype for grad in grads]
        ctx.set_materialize_grads(False)  # torch's zeros would be plain tensors of the global shape

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        on_grid = ctx.on_grid
        pairs = enumerate(zip(cotangents, ctx.shards, strict=True))
        kind: Pending = None if ctx.op else "sum"
        laid = [None if x is None else in_layout(x, on_grid.spec(i, dtype, kind)) for i, (x, dtype) in pairs]
        gradients = _or_zeros(on_grid, laid, ctx.shards, ctx.op)
        if ctx.op is not None and on_grid.plan.vmaps is None and not on_grid.grid.pure:
            gradients = list(map(partial(_own_part, on_grid.grid), on_grid.leaves, gradients))
        wholes = gradients if ctx.op is None else GatherBucket.apply(on_grid, *gradients)
        ranks = on_grid._ranks if ctx.op == "sum" else 1
        out = [None if d is None else w.to(d) for w, d in zip(wholes, ctx.dtypes, strict=True)]
        return (None, None, None, *(x if x is None or ranks == 1 else x * ranks for x in out))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        return ReduceBucket.apply(ctx.on_grid, ctx.op, ctx.shards, *tangents[3:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, tuple[int, ...]]:
        on_grid, op, dtypes, *grads = args
        batched = in_front(info.batch_size, in_dims[3:], grads)
        return ReduceBucket.apply(on_grid.batched(info.batch_size), op, dtypes, *batched), (0,) * len(grads)


def in_layout(x: Tensor, spec: DTensorSpec) -> Tensor:
    """A cotangent in the layout of its leaf: that of a sum is replicated."""
    if not isinstance(x, DTensor) or x.placements == spec.placements:
        return x
    return x.redistribute(spec.mesh, list(spec.placements))


def _own_part(grid: Grid, leaf: Leaf, x: Tensor) -> Tensor:
    """This rank's part of a plain cotangent of a whole leaf: those of unused shards, `torch.func` fills in so."""
    whole = not isinstance(x, DTensor) and tuple(x.shape) == tuple(leaf.shape)
    return local_slice(leaf, x, grid.sizes, grid.coords) if whole else x


def in_front(size: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The mapped dim of each in front; those without one repeat."""
    return [
        x if x is None else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for dim, x in zip(dims, tensors, strict=True)
    ]


def _or_zeros(
    on_grid: BucketOnGrid, tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype], op: str | None
) -> list[Tensor]:
    """The tensors, or zeros of the shapes that they have here: shards, or with `op` None pending gradients."""

    def zeros(index: int, dtype: torch.dtype) -> Tensor:
        only = on_grid.part([i == index for i in range(len(on_grid.leaves))])
        return only.new_shards(torch.zeros, dtype, on_grid.computed if op is None else None)[0]

    rows = enumerate(zip(tensors, dtypes, strict=True))
    return [zeros(i, dtype) if tensor is None else tensor for i, (tensor, dtype) in rows]
