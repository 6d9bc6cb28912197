"""The verbs: `shard`, `gather`, `reduce_grads`, `reshard`.

Each looks up a plan and moves data; the thinking is in `plan`, the moving in `buckets`, the values
that `shard` begins with in `initialize`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from shardfn._torch import in_transform, innermost_value, materialized, unwrap_local, wrap_local
from shardfn.comm import (
    BucketOnGrid,
    FreshBuffers,
    GatherBucket,
    all_gather,
    all_gather_invariant,
    all_to_all,
    empty_shards,
    gather_leaves,
    in_front,
    in_layout,
    leaf_spec,
    portions,
    psum,
    psum_scatter,
    shard_slice,
)
from shardfn.context import is_differentiated, note_tree
from shardfn.layout import (
    Bucket,
    Grid,
    Layout,
    Plan,
    Policy,
    axes_of,
    compute_view,
    compute_view_shape,
    decide,
    first_match,
    from_compute_view,
    grid,
    is_batch_axis,
    own_parts,
    replace_units,
)
from shardfn.notation import ShardError, Spec, did_you_mean, parse, unknown_axes
from shardfn.params.initialize import NewTree, Origin, shard_own
from shardfn.params.tree import Params, watch_optimizers

_MAX_BUCKET_BYTES = 64 * 2**20

Step = tuple[Any, ...]  # a collective, the axis, and the dims that it takes


def shard(
    model: nn.Module | Mapping[str, Tensor],
    mesh: DeviceMesh,
    policy: Policy | Plan,
    *,
    init: Callable[[Any], Any] | None = None,
    src: int | None = None,
) -> Params:
    """Split the parameters of a model over a mesh: the tree that every other function takes.

    The model is read, never changed, and keeps its own tensors; drop them, or make the model on the meta device, when
    memory matters. Each rank keeps copies of its own parts only.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> mesh = sf.make_mesh("cpu", fsdp=1, tp=1)
        >>> params = sf.shard(nn.Linear(4, 6), mesh, sf.Policy(rules={"weight": "o@tp c@fsdp"}))
        >>> sf.typeof(params, "weight")
        'f32[o@tp c@fsdp]'

    Args:
        model: a module, or a mapping of names to tensors of any dtype. Parameters that torch's `parallelize_module`
            has made DTensors stay split so, and its modules get them as such.
        mesh: a `DeviceMesh` with named axes; all of them, when it is one of several that `model` is split over.
        policy: the layout, or a `Plan` already made for this model and mesh.
        init: fills meta tensors: called once for every module that owns some, with that module's own tensors on the
            mesh's device, under a seed of its own (drawn from torch's seed on the first rank and the module's name), so
            that the values do not depend on the mesh. Tensors of one module at a time are whole.
        src: the global rank whose values count; others may hold meta tensors. Default: every rank has the same values
            (some of each tensor are compared): make the model under the same `torch.manual_seed` everywhere.

    Returns:
        the tree; `params.plan`, `params.mesh`, `params.buffers` go with it.

    Raises:
        ShardError: everything `plan` raises; meta tensors without `init` or `src`; ranks whose models, values, policies
            or meshes differ. On every rank, before any tensor is sent.

    Communication: one small object exchange over the mesh; with `src`, one broadcast a parameter.
    """
    if isinstance(model, Mapping):
        given = (x for x in model.values() if isinstance(x, Tensor))
        instead = "Shard a tree outside, and put what is made of it into sf.tree.map(fn, params)"
        _refuse_differentiated("shard", given, instead)
    watch_optimizers()
    return shard_own(Origin(model, init, src), mesh, policy, alike=True)


def _refuse_differentiated(what: str, tensors: Iterable[Tensor], instead: str) -> None:
    if is_differentiated(tensors):
        asks = "the loss or transform around it asks for one of these tensors"
        raise ShardError(f"{what} has no derivative, and {asks}. {instead}")


def gather(
    params: Mapping[str, Tensor],
    names: str | Sequence[str] | None = None,
    *,
    to: Literal["all", "rank0", "cpu"] = "all",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Shards to ordinary full tensors under the model's names and in the model's shapes: an ordinary state dict.

    Differentiable with `to="all"`: over data axes the gradient is reduce-scattered (each rank's loss counts), over
    compute axes each rank takes its own part (all of them compute the same).

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 6)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> torch.equal(sf.gather(params)["weight"], model.weight)
        True

    Args:
        params: a tree made by `shard`, or any tree with its layouts (gradients, averages, optimizer state).
        names: patterns of parameters (`"layers.0.**"`); default all. Tied parameters appear under each name.
        to: `"all"`: every rank, on the mesh's device; `"rank0"`: the first rank of the mesh, `{}` elsewhere; `"cpu"`:
            every rank in host memory, one leaf at a time.
        dtype: dtype of floating results.

    Returns:
        name -> tensor of the model's shape.

    Raises:
        TypeError: not a tree made by `shard`.
        KeyError: a pattern matches nothing.
        ShardError: a leaf is a pending sum; `reduce_grads` comes first. `"rank0"` or `"cpu"` of what is differentiated.

    Communication: one all-gather a bucket (at most 64 MiB) and axis; leaf by leaf for `"rank0"` and `"cpu"`.
    """
    tree = _require_params("gather", params)
    if to not in ("all", "rank0", "cpu"):
        raise ValueError(f"gather(to={to!r}): one of 'all', 'rank0', 'cpu'")
    layouts = _selected(tree, names)
    note_tree(tree)
    leaves = {leaf.name: tree[leaf.name] for layout in layouts for leaf in layout.leaves}
    if to != "all":
        instead = "Write sf.gather(params), and .cpu() of what it returns; or torch.no_grad() around it, to have values"
        _refuse_differentiated(f"gather(to={to!r})", leaves.values(), f"{instead} alone")
    for name, leaf in leaves.items():
        require_reduced("gather", name, leaf)
    keep = to != "rank0" or dist.get_rank() == grid(tree.mesh, tree.plan.roles.storage).ranks()[0]
    out: dict[str, Tensor] = {}
    for layout, wholes in _gathered(tree, layouts, 0 if to != "all" else _MAX_BUCKET_BYTES):
        if keep:
            full = compute_view(layout, wholes)
            full = full.to(dtype) if dtype is not None and full.is_floating_point() else full
            out[layout.name] = full if to == "all" else full.detach().cpu()
    first = tree.plan.canonical
    order = (name for param in tree.plan.info.params for name in param.names)
    return {name: out[first[name]] for name in order if first.get(name) in out}


def _gathered(tree: Params, layouts: Sequence[Layout], limit: int) -> Iterator[tuple[Layout, list[Tensor]]]:
    """Parameters with their whole leaves, gathered in groups of at most `limit` bytes."""
    for group in portions(layouts, lambda x: x.numel * tree[x.leaves[0].name].element_size(), limit):
        names = [leaf.name for layout in group for leaf in layout.leaves]
        wholes = dict(zip(names, _gather_whole(tree, names), strict=True))
        yield from ((layout, [wholes[leaf.name] for leaf in layout.leaves]) for layout in group)


def _gather_whole(tree: Params, names: Sequence[str]) -> list[Tensor]:
    """Leaves whole over all axes: first the data axes, then the compute axes; differentiable."""
    plan_, places = tree.plan, grid(tree.mesh, tree.plan.roles.storage)
    alike: dict[tuple[tuple[str, ...], torch.dtype], list[str]] = {}
    for name in names:
        _, leaf = plan_.leaves[name]
        if tuple(tree[name].shape) != leaf.shape and not in_transform():
            raise ShardError(
                f"gather: '{name}' has shape {tuple(tree[name].shape)}, its layout {leaf.rule} has {leaf.shape}; a "
                "function that changes shapes leaves the layouts behind: gather first, then apply it to what comes out"
            )
        axes = tuple(axis for axis in plan_.roles.storage if axis in leaf.axes)
        alike.setdefault((axes, tree[name].dtype), []).append(name)
    out: dict[str, Tensor] = {}
    for (axes, dtype), members in alike.items():
        data = tuple(axis for axis in plan_.roles.data if axis in axes)
        spot = BucketOnGrid(plan_, places, Bucket("", tuple(members), data, dtype), FreshBuffers(places.device))
        gathered = GatherBucket.apply(spot, *(tree[name] for name in members))
        compute = tuple(axis for axis in plan_.roles.compute if axis in axes)
        wholes = _OverCompute.apply(True, spot, compute, *gathered) if compute else gathered
        if all(places.sizes[axis] == 1 for axis in axes):
            wholes = [whole.clone() for whole in wholes]  # nothing moved: these are the shards' own memory
        out |= dict(zip(members, wholes, strict=True))
    return [out[name] for name in names]


class _OverCompute(torch.autograd.Function):
    """Leaves that compute axes split, whole for a computation that all their ranks do alike; or the transpose of that.

    forward   [split over compute]  -> all_gather(compute) -> [whole], or this rank's part of it
    backward  d [whole]  -> this rank's part -> d [split over compute], or all_gather(compute)
    """

    @staticmethod
    def forward(gathers: bool, spot: BucketOnGrid, axes: Sequence[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        if gathers:
            wholes = gather_leaves(spot.leaves, tensors, axes, spot.grid, undone=spot.bucket.axes)
            return tuple(w.detach() if w is t else w for w, t in zip(wholes, tensors, strict=True))
        parts = own_parts(spot.leaves, tensors, spot.grid, axes)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.gathers, *ctx.where = inputs[:3]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (None, None, None, *_OverCompute.apply(not ctx.gathers, *ctx.where, *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        return _OverCompute.apply(ctx.gathers, *ctx.where, *map(materialized, tangents[3:]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """The same of leaves with one more dim in front."""
        gathers, spot, axes, *tensors = args
        given = in_front(info.batch_size, in_dims[3:], tensors)
        return _OverCompute.apply(gathers, spot.batched(info.batch_size), axes, *given), (0,) * len(tensors)


def _selected(tree: Params, names: str | Sequence[str] | None) -> list[Layout]:
    held = [layout for layout in tree.plan.layouts.values() if all(leaf.name in tree for leaf in layout.leaves)]
    if names is None:
        return held
    wanted = (names,) if isinstance(names, str) else tuple(names)
    named = [name for layout in held for name in layout.names]
    for pattern in wanted:
        if first_match([pattern], named) is None:
            some = ", ".join(layout.name for layout in held[:4])
            raise KeyError(f"gather: {pattern!r} matches no parameter; there are {some}, ...")
    return [layout for layout in held if first_match(wanted, layout.names) is not None]


def _require_params(verb: str, tree: object) -> Params:
    if not isinstance(tree, Params):
        raise TypeError(f"{verb}: expected the tree that shard() makes, got {type(tree).__name__}")
    return tree


def require_reduced(verb: str, name: str, leaf: Tensor) -> None:
    """A leaf is no pending sum.

    Raises:
        ShardError: it is.
    """
    if isinstance(leaf, DTensor) and any(isinstance(placement, Partial) for placement in leaf.placements):
        raise ShardError(
            f"{verb}: '{name}' is a sum that is still pending. Gradients of value_and_grad(reduce=None) go through "
            "sf.reduce_grads(tree); a function in sf.tree.map that adds up a leaf ends with "
            "value.redistribute(placements=leaf.placements)"
        )


def reduce_grads(
    grads: Mapping[str, Tensor], *, op: Literal["mean", "sum"] = "mean", like: Params | None = None
) -> Params:
    """Pending gradients, partial sums over the data axes, to gradients with exactly their parameters' placements.

    Leaves that are reduced already pass through, so calling it twice changes nothing.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> params = sf.shard(nn.Linear(4, 6), sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> pending = {name: torch.ones(leaf.shape) for name, leaf in params.items()}
        >>> grads = sf.reduce_grads(pending, like=params)
        >>> grads["weight"].placements == params["weight"].placements
        True

    Args:
        grads: leaves typed `+fsdp` (from `value_and_grad(..., reduce=None)`), or plain local tensors of the shapes that
            a module computes with: whole over the data axes, this rank's part over the compute axes.
        op: `"mean"` over the data ranks, or `"sum"`.
        like: the parameters; required for plain tensors.

    Returns:
        a tree like the parameters'.

    Raises:
        TypeError: plain tensors without `like`; the mean of integers; something else than a tensor.
        ShardError: names, shapes or placements that are not the parameters'; pending gradients that are differentiated.

    Communication: one reduce-scatter a bucket over the axes that split it and one all-reduce over the other data axes,
    in `reduce_dtype`.
    """
    if op not in ("mean", "sum"):
        raise ValueError(f"reduce_grads(op={op!r}): 'mean' or 'sum'")
    if like is None and not isinstance(grads, Params):
        missing = "like=params, the tree they are gradients of"
        raise TypeError(f"reduce_grads: a plain mapping of local tensors needs {missing}")
    owner = like if like is not None else _require_params("reduce_grads", grads)
    plan_, places = owner.plan, grid(owner.mesh, owner.plan.roles.storage)
    pending, done = _sorted(grads, owner, places)
    if pending:
        instead = "Have gradients reduced as they are made, which has one: sf.grad(loss_fn), without reduce=None"
        _refuse_differentiated("reduce_grads", grads.values(), instead)
    for name, grad in pending.items():
        if op == "mean" and not (grad.is_floating_point() or grad.is_complex()):
            raise TypeError(f"reduce_grads: '{name}' holds {grad.dtype}, of which there is no mean; use op='sum'")
        if grad.dtype == torch.bool:
            raise TypeError(f"reduce_grads: '{name}' holds {grad.dtype}, which cannot be added")
    for bucket in plan_.buckets_in({name: grad.dtype for name, grad in pending.items()}):
        names, spot = bucket.leaves, BucketOnGrid(plan_, places, bucket, FreshBuffers(places.device))
        reduced = spot.reduce([pending[name] for name in names], [owner[name].dtype for name in names], op)
        done |= {n: wrap_local(x, leaf_spec(plan_, places, n, x.dtype)) for n, x in zip(names, reduced, strict=True)}
    leaves = {name: done[name] for name in plan_.leaves if name in done}
    return Params(leaves, plan_.with_reduction("mean"), owner.mesh, owner.buffers)


def _sorted(grads: Mapping[str, Tensor], owner: Params, places: Grid) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(stored name -> pending local tensor, stored name -> reduced DTensor)."""
    plan_ = owner.plan
    was_pending = isinstance(grads, Params) and grads.plan.reduction is None
    pending: dict[str, Tensor] = {}
    done: dict[str, Tensor] = {}
    for name, grad in grads.items():
        if not isinstance(grad, Tensor):
            why = f"'{name}' holds {type(grad).__name__}, not a tensor"
            raise TypeError(f"reduce_grads: {why}; leave parameters without a gradient out")
        if name not in (plan_.leaves if isinstance(grad, DTensor) else plan_.canonical):
            raise ShardError(f"reduce_grads: there is no parameter '{name}'{did_you_mean(name, plan_.canonical)}")
        if isinstance(grad, DTensor):
            partial = _is_pending(name, grad, owner, places, was_pending)
            (pending if partial else done)[name] = unwrap_local(grad) if partial else grad
            continue
        layout = plan_.layout_of(name)
        if layout.leaves[0].name in pending:
            why = f"'{name}' and another name of the same parameter are both given"
            raise ShardError(f"reduce_grads: {why}; add them under one")
        wanted = compute_view_shape(layout, plan_.gathered_axes(layout), places.sizes)
        if grad.shape != wanted:
            have = f"'{layout.name}' has a gradient of shape {tuple(grad.shape)}"
            need = f"whole over the data axes and split over the compute axes by '{layout.rule}': {wanted}"
            raise ShardError(f"reduce_grads: {have}; a pending gradient is {need}")
        parts = from_compute_view(layout, grad, plan_.gathered_axes(layout), places.sizes)
        pending |= {leaf.name: part for leaf, part in zip(layout.leaves, parts, strict=True)}
    return pending, done


def _is_pending(name: str, grad: DTensor, owner: Params, places: Grid, was_pending: bool) -> bool:
    """Whether a leaf is the pending gradient of parameter `name`; False when it is the reduced one.

    Raises:
        ShardError: it is neither; or it `was_pending`, and is reduced by now, which nobody who adds gradients meant.
    """
    reduced, pending = (leaf_spec(owner.plan, places, name, grad.dtype, pending=p) for p in (False, True))
    split = any(places.sizes[axis] > 1 for axis in owner.plan.roles.data)
    is_reduced, is_pending = (grad.placements == x.placements and grad.shape == x.shape for x in (reduced, pending))
    if is_reduced and not (split and was_pending and owner.plan.leaves[name][0].trainable):
        return False
    if is_pending and not is_reduced:
        return True
    if was_pending:
        raise ShardError(
            f"reduce_grads: '{name}' is no pending sum any more, its placements are {grad.placements}: torch reduces "
            "one that is added to a number, as sum(grads) does with 0. Add gradients to each other: "
            "sf.tree.map(torch.add, a, b)"
        )
    raise ShardError(
        f"reduce_grads: '{name}' has shape {tuple(grad.shape)} and placements {grad.placements}; the parameter has "
        f"{tuple(reduced.shape)} and {reduced.placements}, its pending gradient {pending.placements}"
        + ". Write g.sum(0) for the mean over samples, and divide by their number"
        * (Partial("avg") in grad.placements)
    )


def reshard(x: Any, to: Policy | Plan | DeviceMesh | str, mesh: DeviceMesh | None = None) -> Any:
    """The same values in another layout: another policy, another mesh of the same ranks, or both.

    `reshard(params, policy)`, `reshard(params, mesh)`, `reshard(params, policy, mesh)`, `reshard(params, plan, mesh)`
    return new trees. With a string, one local tensor goes from the layout left of `->` to the one right of it by the
    collectives that the two imply: all-gather, slice, all-to-all, reduce-scatter or all-reduce. Both differentiable.

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
        ShardError: the layout does not fit, or the meshes have other ranks; a tree that belongs to a transform.

    Communication: parameters whose layout changes are gathered in buckets of at most 64 MiB and cut again; in a
    backward so are their gradients.
    """
    if isinstance(to, str):
        return _relayout(x, to, mesh)
    tree = _require_params("reshard", x)
    if any(innermost_value(leaf) is not leaf for leaf in tree.values()):
        raise _reshards_in_transform()
    if isinstance(to, DeviceMesh):
        to, mesh = tree.plan.policy, to
    mesh = mesh if mesh is not None else tree.mesh
    made = _target_plan(tree, to, mesh)
    if mesh is not tree.mesh:
        a, b = (sorted(each.mesh.flatten().tolist()) for each in (tree.mesh, mesh))
        if a != b:
            raise ShardError(f"reshard: the meshes have other ranks: {a} and {b}; save and load a checkpoint instead")
    for name, leaf in tree.items():
        require_reduced("reshard", name, leaf)
    asks = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tree.values())
    return (_resharded if asks else _moved)(tree, made, mesh)


def _resharded(tree: Params, made: Plan, mesh: DeviceMesh) -> Params:
    """`_moved`, differentiable."""
    made = made.with_reduction(tree.plan.reduction or "mean")
    floating = {name: leaf for name, leaf in tree.items() if leaf.is_floating_point() or leaf.is_complex()}
    held = (made.layouts[layout.name] for layout in _selected(tree, None) if layout.leaves[0].name in floating)
    before = _Stored(tuple(floating), tree.plan, tree.mesh)
    after = _Stored(tuple(leaf.name for layout in held for leaf in layout.leaves), made, mesh)
    found = dict(zip(after.names, _Resharded.apply(before, after, *floating.values()), strict=True))
    found |= _moved(tree.like((name, leaf) for name, leaf in tree.items() if name not in floating), made, mesh)
    return Params(((name, found[name]) for name in made.leaves if name in found), made, mesh, tree.buffers)


def _reshards_in_transform() -> ShardError:
    instead = "reshard it before, and pass the result to the transform"
    return ShardError(f"reshard: a transform goes on, in which a tree cannot change its layout; {instead}")


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
        moved = _moved(tree, after.plan, after.mesh)
        return tuple(moved[name] for name in after.names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.before, ctx.after, *_ = inputs
        ctx.dtypes = [x.dtype for x in output]
        ctx.set_materialize_grads(False)  # torch's zeros would be plain tensors of the global shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        names, plan_, mesh = ctx.after
        places = grid(mesh, plan_.roles.storage)
        unused = {name: dtype for name, dtype, grad in zip(names, ctx.dtypes, grads, strict=True) if grad is None}
        zeros = empty_shards(plan_, places, unused)
        given: list[Tensor] = []
        for name, dtype, grad in zip(names, ctx.dtypes, grads, strict=True):
            spec = leaf_spec(plan_, places, name, dtype)
            given.append(wrap_local(zeros[name].zero_(), spec) if grad is None else in_layout(grad, spec))
        return None, None, *_Resharded.apply(ctx.after, ctx.before, *given)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        raise _reshards_in_transform()


def _moved(tree: Params, made: Plan, mesh: DeviceMesh) -> Params:
    """The same values as the plan `made` stores them on a mesh, in new memory."""
    places = grid(mesh, made.roles.storage)
    stays = grid(tree.mesh, tree.plan.roles.storage).storage == places.storage
    pairs = [(layout, made.layouts[layout.name]) for layout in _selected(tree, None)]
    dtypes = {leaf.name: tree[old.leaves[0].name].dtype for old, new in pairs for leaf in new.leaves}
    moved = NewTree(made, mesh, places, empty_shards(made, places, dtypes), tree.buffers)
    changed: list[Layout] = []
    for old, new in pairs:
        if stays and old.stored_as(new):
            for leaf in old.leaves:
                moved.shards[leaf.name].copy_(unwrap_local(tree[leaf.name]))
        else:
            changed.append(old)
    for layout, wholes in _gathered(tree, changed, _MAX_BUCKET_BYTES):
        moved.cut(made.layouts[layout.name], compute_view(layout, wholes))
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
    made = decide(tree.plan.info, axes_of(mesh), replace_units(to, {}))
    if (count := tree.plan.members) is None:
        return made
    if not tree.plan.has_members:
        why = f"the leaves have a first dim of {count} that is split over ranks"
        raise ShardError(f"reshard: {why}; sf.gather(tree) makes it whole")
    return made.stacked(count, ())


# -- one tensor: the collectives that two rules imply ------------------------------------------------------------------
#
# "b s@tp c -> b s c@tp"    all-to-all          "b s c +tp -> b s c"     psum
# "b s@tp c -> b s c"       all-gather          "b s c +tp -> b s@tp c"  psum_scatter
# "b s c -> b s@tp c"       slice


def _relayout(x: object, rule: str, mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of `x` after the change that `"left -> right"` names."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        raise TypeError(f"reshard: with a string, x is one plain local tensor, not {type(x).__name__}")
    if mesh is None:
        raise TypeError("reshard: with a string, pass the mesh too: reshard(x, 'b s@tp -> b s', mesh)")
    left, right = _sides(rule, mesh, x.dim())
    out = x
    for collective, axis, *dims in steps(left, right):
        out: Tensor = collective(out, mesh, axis, *dims)
    return out


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
            out.append((psum_scatter, axis, dim))
            have[dim].append(axis)
        else:
            out.append((psum, axis))
    out += _exchanges(have, want)
    for dim, axes in enumerate(have):
        while axes != want[dim][: len(axes)]:
            axis = axes.pop()
            # Ranks of a data axis go on with losses of their own, so cotangents are summed.
            out.append((all_gather if is_batch_axis(axis) else all_gather_invariant, axis, dim))
    return [*out, *((shard_slice, axis, dim) for dim, axes in enumerate(have) for axis in want[dim][len(axes) :])]


def _exchanges(have: list[list[str]], want: list[list[str]]) -> list[Step]:
    """All-to-alls for axes that leave the end of one dim for the end of another; `have` follows."""
    out = []
    for i, axes in enumerate(have):
        for j, target in enumerate(want):
            if i != j and axes and target == [*have[j], axes[-1]]:
                axis = axes.pop()
                have[j].append(axis)
                out.append((all_to_all, axis, j, i))
    return out
