"""`reshard`: a tree in the layout of another plan, also inside of transforms."""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from shardfn import layout
from shardfn._torch import has_no_memory, innermost_value, outside_transforms, simulated, unwrap_local, wrap_local
from shardfn.comm import agree, collectives, empty_shards, gather_flat, in_layout, leaf_spec
from shardfn.layout import Layout, Plan, Policy, axes_of, compute_view, decide, grid_of, is_batch_axis
from shardfn.notation import Dim, ShardError, Spec, parse, unknown_axes
from shardfn.params import sharding
from shardfn.params.initialize import NewTree
from shardfn.params.moving import move
from shardfn.params.tree import Params

Step = tuple[Any, ...]  # a collective, the axis, and the dims that it takes


def reshard(x: Any, to: Policy | Plan | DeviceMesh | str, mesh: DeviceMesh | None = None) -> Any:
    """The same values in another layout: another policy, another mesh of the same ranks, or both.

    `reshard(params, policy)`, `reshard(params, mesh)`, `reshard(params, policy, mesh)`, `reshard(params, plan, mesh)`
    return new trees. With a string, one local tensor goes from the layout left of `->` to the one right of it by the
    collectives that the two imply: all-gather, slice, all-to-all, reduce-scatter or all-reduce. Both differentiable.
    Parts may be uneven, as DTensor's chunks are: 2, 2, 1 and 0 of 5 over 4 ranks.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> mesh = sf.make_mesh("cpu", fsdp=1, tp=1)
        >>> params = sf.shard(nn.Linear(4, 6), mesh, sf.Policy())
        >>> sf.typeof(sf.reshard(params, sf.Policy(rules={"weight": "o@tp c@fsdp"})), "weight")
        'f32[o@tp c@fsdp]'
        >>> sf.reshard(torch.ones(2, 3), "b s@tp -> b@tp s", mesh).shape
        torch.Size([2, 3])

    Args:
        x: a tree made by `shard`, or (with a string) one tensor, this rank's part.
        to: the new layout.
        mesh: the new mesh; for a string, the mesh that its axes belong to.

    Returns:
        a new tree, or this rank's part of the tensor in the new layout.

    Raises:
        ShardError: the layout does not fit, the meshes have other ranks, or ranks ask for different ones, on every rank
            before anything is sent; a tree that belongs to a transform.

    Communication: for a tree one small exchange, then messages from rank to rank: each receives the slices that it
    lacks, and holds its old shards, its new ones and at most 16 MiB besides. In a backward its gradients travel so. In
    `sf.jit`, parameters whose layout changes are gathered in buckets of at most 64 MiB and cut again. With a string,
    what the layouts imply, and before a gather or an all-to-all a small one of the lengths of the parts; not where code
    is compiled, recorded or simulated, and parts have to be equal.
    """
    if isinstance(to, str):
        return _relayout(x, to, mesh)
    tree = sharding.require_params("reshard", x)
    if any(innermost_value(leaf) is not leaf for leaf in tree.values()):
        raise _reshards_in_transform()
    if isinstance(to, DeviceMesh):
        to, mesh = tree.plan.policy, to
    mesh = mesh if mesh is not None else tree.mesh
    plan = _agreed(tree, to, mesh).with_reduction(tree.plan.reduction or "mean")
    layouts = (plan.layouts[old.name] for old in sharding.selected_layouts(tree, None))
    before = _Stored(tuple(tree), tree.plan, tree.mesh)
    after = _Stored(tuple(leaf.name for one in layouts for leaf in one.leaves), plan, mesh)
    leaves = _Resharded.apply(before, after, *tree.values())
    return Params(zip(after.names, leaves, strict=True), plan, mesh, tree.buffers)


def _reshards_in_transform() -> ShardError:
    instead = "reshard it before, and pass the result to the transform"
    return ShardError(f"reshard: a transform goes on, in which a tree cannot change its layout; {instead}")


def _agreed(tree: Params, to: Policy | Plan, mesh: DeviceMesh) -> Plan:
    """The plan to go by, which all ranks have made, of trees that are alike."""
    facts = list[str]()
    try:
        plan: Plan | Exception = _target_plan(tree, to, mesh)
        if mesh is not tree.mesh:
            a, b = (sorted(each.mesh.flatten().tolist()) for each in (tree.mesh, mesh))
            if a != b:
                why = f"the meshes have other ranks: {a} and {b}"
                raise ShardError(f"reshard: {why}; save and load a checkpoint instead")
        facts = [f"to {axes_of(mesh)} over ranks {grid_of(mesh, plan.roles.storage).ranks}"]
        facts += sharding.facts_of("reshard", tree, tree)
    except Exception as error:  # the other ranks must hear of it before it is raised
        plan = error
    if not has_no_memory() or isinstance(plan, Exception):
        agree(tree.mesh, plan, facts, "reshard")
    assert isinstance(plan, Plan)
    return plan


class _Stored(NamedTuple):
    """The names of leaves, in order, as a plan stores them on a mesh."""

    names: tuple[str, ...]
    plan: Plan
    mesh: DeviceMesh


class _Resharded(torch.autograd.Function):
    """
    forward   leaves [as the old plan stores them] -> the same values [as the new plan stores them]
    backward  the same the other way
    """

    @staticmethod
    def forward(before: _Stored, after: _Stored, *leaves: Tensor) -> tuple[Tensor, ...]:
        tree = Params(zip(before.names, leaves, strict=True), before.plan, before.mesh)
        return tuple(map(_moved(tree, after.plan, after.mesh).__getitem__, after.names))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.before, ctx.after, *_ = inputs
        ctx.dtypes = [x.dtype for x in output]
        ctx.set_materialize_grads(False)  # torch's zeros would be plain tensors of the global shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        names, plan_, mesh = ctx.after
        grid = grid_of(mesh, plan_.roles.storage)
        unused = {name: dtype for name, dtype, grad in zip(names, ctx.dtypes, grads, strict=True) if grad is None}
        zeros = empty_shards(plan_, grid, unused)
        cotangents: list[Tensor] = []
        for name, dtype, grad in zip(names, ctx.dtypes, grads, strict=True):
            spec = leaf_spec(plan_, grid, name, dtype)
            cotangents.append(wrap_local(zeros[name].zero_(), spec) if grad is None else in_layout(grad, spec))
        return None, None, *_Resharded.apply(ctx.after, ctx.before, *cotangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        raise _reshards_in_transform()


def _moved(tree: Params, plan: Plan, mesh: DeviceMesh) -> Params:
    """The same values as a plan stores them on a mesh, in new memory."""
    grid = grid_of(mesh, plan.roles.storage)
    stays = grid_of(tree.mesh, tree.plan.roles.storage).storage == grid.storage
    pairs = [(old, plan.layouts[old.name]) for old in sharding.selected_layouts(tree, None)]
    dtypes = {leaf.name: tree[old.leaves[0].name].dtype for old, new in pairs for leaf in new.leaves}
    moved = NewTree(plan, mesh, grid, empty_shards(plan, grid, dtypes), tree.buffers)
    changed: dict[str, Layout] = {}
    for old, new in pairs:
        if stays and old.stored_as(new):
            for leaf in old.leaves:
                moved.shards[leaf.name].copy_(unwrap_local(tree[leaf.name]))
        else:
            changed[old.name] = new
    if has_no_memory():
        old_layouts = [tree.plan.layouts[name] for name in changed]
        for one, wholes in sharding.gather_groups(tree, old_layouts, sharding.MAX_BUCKET_BYTES):
            moved.cut(changed[one.name], compute_view(one, wholes))
    else:
        move(tree, changed, grid, moved.shards)
    return moved.wrapped()


def _target_plan(tree: Params, to: Policy | Plan, mesh: DeviceMesh) -> Plan:
    if isinstance(to, Plan):
        if to.axes != axes_of(mesh):
            raise ShardError(f"reshard: the plan is for a mesh {to.axes}, the mesh is {axes_of(mesh)}")
        if to.info.params != tree.plan.info.params:
            raise ShardError(f"reshard: the plan is for another model\n{tree.plan.diff(to)}")
        return to
    if not isinstance(to, Policy):
        raise TypeError(f"reshard: expected a Policy, a Plan, a DeviceMesh or a string, got {type(to).__name__}")
    if callable(to.units) and not isinstance(to.units, type):
        raise TypeError("reshard: Policy(units=callable) needs the model; pass plan(model, mesh, policy) instead")
    plan = decide(tree.plan.info, axes_of(mesh), layout.replace_units(to, {}))
    if (count := tree.plan.members) is None:
        return plan
    if not tree.plan.has_members:
        why = f"the leaves have a first dim of {count} that is split over ranks"
        raise ShardError(f"reshard: {why}; sf.gather(tree) makes it whole")
    return plan.stacked(count, ())


# -- one tensor: the collectives that two rules imply ------------------------------------------------------------------
#
# "b s@tp c -> b s c@tp"    all-to-all          "b s c +tp -> b s c"     psum
# "b s@tp c -> b s c"       all-gather          "b s c +tp -> b s@tp c"  psum_scatter
# "b s c -> b s@tp c"       slice


def _relayout(x: Any, rule: str, mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of `x` after the change that `"left -> right"` names."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        raise TypeError(f"reshard: with a string, x is one plain local tensor, not {type(x).__name__}")
    if mesh is None:
        raise TypeError("reshard: with a string, pass the mesh too: reshard(x, 'b s@tp -> b s', mesh)")
    left, right = _sides(rule, mesh, x.dim())
    even = x.is_meta or simulated() or has_no_memory() or torch.compiler.is_compiling()  # ranks cannot ask others
    for collective, axis, *dims in steps(left, right):
        trimmed = dict[int, int]()
        for dim in dims if not even else ():
            cuts = dim == dims[0] and collective in _CUT
            parts = _parts(x.shape[dim], left.dims[dim], mesh, axis, cuts)
            if len(set(parts)) > 1:
                trimmed[dim] = parts[mesh.get_local_rank(axis)] if cuts else sum(parts)
                missing = parts[0] * (len(parts) if cuts else 1) - x.shape[dim]
                x = pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])
        x = collective(x, mesh, axis, *dims)
        for dim, length in trimmed.items():
            x = x.narrow(dim, 0, length)
    return x


_CUT = (collectives.psum_scatter, collectives.shard_slice, collectives.all_to_all)  # the first dim that they take


def _parts(length: int, dim: Dim, mesh: DeviceMesh, axis: str, cuts: bool) -> list[int]:
    """What the ranks of an axis have of a dim, of which this one has `length`, or will have when it `cuts` that.

    Raises:
        ShardError: they have no chunks of one whole.
    """
    unit, size = prod(int(x.name) if x.name.isdigit() else 0 for x in dim.factors[1:]), axes_of(mesh)[axis]
    if not unit or (cuts and length % unit):
        return []  # equal ones: it is not known what stays together
    have = [length]
    if not cuts:
        with outside_transforms():
            have = gather_flat(torch.tensor(have, device=mesh.device_type), mesh.get_group(axis)).tolist()
    parts = [unit * layout.chunk(sum(have) // unit, size, place)[1] for place in range(size)]
    if not cuts and parts != have:
        why = f"the ranks of {axis}={size} have {have} of it, and chunks of {sum(have)} are {parts}"
        raise ShardError(f"reshard: '{dim}' is not split as DTensor would: {why}")
    return parts


def _sides(rule: str, mesh: DeviceMesh, ndim: int) -> tuple[Spec, Spec]:
    if rule.count("->") != 1:
        raise ShardError(f"reshard: {rule!r} needs one '->' between the two layouts")
    cut = rule.index("->")
    left, right = (parse(rule, span).expand(ndim) for span in ((0, cut), (cut + 2, len(rule))))
    names = [[[factor.name for factor in dim.factors] for dim in side.dims] for side in (left, right)]
    if names[0] != names[1]:
        raise ShardError(f"reshard: {rule!r} changes names; both sides name the same dims in the same order")
    axes = axes_of(mesh)
    for side in (left, right):
        numbered = ((dim, i, factor) for dim in side.dims for i, factor in enumerate(dim.factors))
        for factor in (factor for dim, i, factor in numbered if factor.axes and (i or len(dim.blocks) > 1)):
            why = "only the outermost factor of a dim can be split here"
            raise ShardError(f"reshard: {why}\n{side.caret(factor.span)}")
        if unknown := unknown_axes(side, axes):
            raise ShardError(f"reshard: {unknown[0]}")
    return left, right


def steps(left: Spec, right: Spec) -> list[Step]:
    """The collectives from one layout to another: sums first, then moves, gathers (innermost first) and slices."""
    have, want = ([[axis for factor in dim.factors for axis in factor.axes] for dim in x.dims] for x in (left, right))
    new_sums = [axis for axis in right.partial if axis not in left.partial]
    if new_sums:
        why = f"a value cannot become a pending sum (+{new_sums[0]})"
        raise ShardError(f"reshard: {why}\n{right.caret(right.partial_span)}")
    out: list[Step] = []
    for axis in (axis for axis in left.partial if axis not in right.partial):
        dim = next((d for d, axes in enumerate(want) if axis in axes), None)
        if dim is not None and want[dim] == [*have[dim], axis]:
            out.append((collectives.psum_scatter, axis, dim))
            have[dim].append(axis)
        else:
            out.append((collectives.psum, axis))
    out += _exchanges(have, want)
    for dim, axes in enumerate(have):
        while axes != want[dim][: len(axes)]:
            axis = axes.pop()
            # Ranks of a data axis go on with losses of their own, so cotangents are summed.
            out.append((collectives.all_gather if is_batch_axis(axis) else collectives.all_gather_invariant, axis, dim))
    slices = ((axis, dim) for dim, axes in enumerate(have) for axis in want[dim][len(axes) :])
    return [*out, *((collectives.shard_slice, axis, dim) for axis, dim in slices)]


def _exchanges(have: list[list[str]], want: list[list[str]]) -> list[Step]:
    """All-to-alls for axes that leave the end of one dim for the end of another; `have` follows."""
    out = []
    for i, axes in enumerate(have):
        for j, target in enumerate(want):
            if i != j and axes and target == [*have[j], axes[-1]]:
                axis = axes.pop()
                have[j].append(axis)
                out.append((collectives.all_to_all, axis, j, i))
    return out
