"""The verbs: `shard`, `gather`, `reduce_grads`.

Each looks up a plan and moves data: decisions are in `layout/planning.py`, the moving in `comm/buckets.py`, the values
that `shard` begins with in `initialize.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn import comm, layout
from shardfn._torch import holds_data, in_transform, unwrap_local, watch_backward, wrap_local
from shardfn.comm import BucketOnGrid, FreshBuffers, GatherBucket, called_by_all, leaf_spec
from shardfn.context import is_differentiated, note_tree
from shardfn.layout import Grid, Layout, Plan, Policy, compute_view_shape, first_match, from_compute_view, grid_of
from shardfn.notation import ShardError, did_you_mean, see
from shardfn.params.initialize import Origin, shard_own
from shardfn.params.moving import collect
from shardfn.params.tree import Params, is_sum, watch_optimizers

MAX_BUCKET_BYTES = 64 * 2**20


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
        policy: the layout, or a `Plan` already made for this model and mesh; a mapping may then leave out further
            names of tied tensors.
        init: fills meta tensors: called once for every module that owns some, with that module's own tensors on the
            mesh's device, under a seed of its own (drawn from torch's seed on the first rank and the module's name), so
            that the values do not depend on the mesh. Tensors of one module at a time are whole. It fills all of them,
            and nothing else. A method of a module (`model._init_weights`) is called with every module. Of a tied
            weight the values are those that the module of its first name is given.
        src: the global rank whose values count; others may hold meta tensors. Default: every rank has the same values
            (some of each tensor are compared): make the model under the same `torch.manual_seed` everywhere.

    Returns:
        the tree; `params.plan`, `params.mesh`, `params.buffers` go with it.

    Raises:
        ShardError: everything `plan` raises; meta tensors without `init` or `src`; an `init` that leaves a tensor out,
            fills others, or differs between ranks; ranks whose models, values, policies or meshes differ. On every
            rank, before any tensor is sent.

    Communication: one small object exchange over the mesh; with `src`, one broadcast a parameter.
    """
    if isinstance(model, Mapping):
        tensors = (x for x in model.values() if isinstance(x, Tensor))
        instead = "Shard a tree outside, and put what is made of it into sf.tree.map(fn, params)"
        _refuse_differentiated("shard", tensors, instead)
    watch_optimizers()
    _watch_backwards()
    return shard_own(Origin(model, init, src), mesh, policy, alike=True)


def _no_gradients() -> ShardError:
    why = "loss.backward(): nothing asks for a gradient; the leaves of a tree of shards do not. Write loss, grads ="
    instead = "or make an sf.Trainer, whose outputs ask, unless they are detached or made under no_grad"
    return see(ShardError(f"{why} sf.value_and_grad(loss_fn)(params, x), {instead}"), "losses")


_watch_backwards = cache(partial(watch_backward, _no_gradients))


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

    Communication: one all-gather a bucket (at most 64 MiB) and axis, leaf by leaf for `"cpu"`. For `"rank0"` one small
    exchange, then messages: the first rank receives what it lacks, and no rank holds more than 16 MiB besides.
    """
    tree = require_params("gather", params)
    if to not in ("all", "rank0", "cpu"):
        raise ValueError(f"gather(to={to!r}): one of 'all', 'rank0', 'cpu'")
    layouts = selected_layouts(tree, names)
    note_tree(tree)
    leaves = {leaf.name: tree[leaf.name] for layout in layouts for leaf in layout.leaves}
    if to != "all":
        instead = "Write sf.gather(params), and .cpu() of what it returns; or torch.no_grad() around it, to have values"
        _refuse_differentiated(f"gather(to={to!r})", leaves.values(), f"{instead} alone")
    for name, leaf in leaves.items():
        require_reduced("gather", name, leaf)
    grid, out = grid_of(tree.mesh, tree.plan.roles.storage), dict[str, Tensor]()
    keep = to != "rank0" or dist.get_rank() == grid.ranks[0]
    with called_by_all("gather(params)"):
        if to == "rank0" and grid.exchanges and not in_transform():
            out, layouts = _on_first(tree, layouts, dtype), []
        for one, wholes in gather_groups(tree, layouts, 0 if to != "all" else MAX_BUCKET_BYTES):
            if keep:
                full = layout.compute_view(one, wholes)
                full = full.to(dtype) if dtype is not None and full.is_floating_point() else full
                out[one.name] = owning(full if to == "all" else full.detach().cpu())
    first = tree.plan.canonical
    order = (name for param in tree.plan.info.params for name in param.names)
    return {name: out[first[name]] for name in order if first.get(name) in out}


def _on_first(tree: Params, layouts: Sequence[Layout], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Whole parameters in the memory of the first rank, and none elsewhere."""
    have = {one: tree[one.leaves[0].name].dtype for one in layouts}
    wanted = {one.name: dtype if dtype is not None and x.is_floating_point else x for one, x in have.items()}
    facts = facts_of("gather", tree, [leaf.name for one in layouts for leaf in one.leaves])
    comm.agree_on(tree.mesh, "gather", [f"dtype={dtype}", *facts])
    first = grid_of(tree.mesh, tree.plan.roles.storage).ranks[0]
    here = layouts if dist.get_rank() == first else ()
    out = {one.name: torch.empty(one.shape, dtype=wanted[one.name]) for one in here}
    collect(tree, wanted, first, out)
    return out


def facts_of(verb: str, tree: Params, names: Iterable[str]) -> list[str]:
    """What must be the same on all ranks of leaves that are moved.

    Raises:
        ShardError: one is not as its layout says.
    """
    grid, facts = grid_of(tree.mesh, tree.plan.roles.storage), list[str]()
    for name in names:
        x, (_, leaf) = tree[name], tree.plan.leaves[name]
        require_reduced(verb, name, x)
        require_shape(verb, tree, name)
        if not grid.pure and tuple(unwrap_local(x).shape) != leaf.local_shape(grid.sizes, grid.coords):
            placed = x.placements if isinstance(x, DTensor) else tuple(x.shape)
            raise ShardError(f"{verb}: '{name}' is placed as {placed}, which is not its layout '{leaf.rule}'")
        facts.append(f"leaf '{name}' {leaf.shape} {x.dtype}, '{leaf.rule}'")
    return facts


def owning(full: Tensor) -> Tensor:
    """The same in memory of its own: `torch.save` writes all the memory of a view, such as of a bucket."""
    return full if not holds_data(full) or full.untyped_storage().nbytes() == full.nbytes else full.clone()


def gather_groups(tree: Params, layouts: Sequence[Layout], limit: int) -> Iterator[tuple[Layout, list[Tensor]]]:
    """Parameters with their whole leaves, gathered in groups of at most `limit` bytes."""
    for group in comm.portions(layouts, lambda x: x.numel * tree[x.leaves[0].name].element_size(), limit):
        names = [leaf.name for layout in group for leaf in layout.leaves]
        wholes = dict(zip(names, _gather_whole(tree, names), strict=True))
        yield from ((layout, [wholes[leaf.name] for leaf in layout.leaves]) for layout in group)


def _gather_whole(tree: Params, names: Sequence[str]) -> list[Tensor]:
    """Leaves whole over all axes: first the data axes, then the compute axes; differentiable."""
    plan_, grid = tree.plan, grid_of(tree.mesh, tree.plan.roles.storage)
    alike: dict[tuple[tuple[str, ...], torch.dtype], list[str]] = {}
    for name in names:
        _, leaf = plan_.leaves[name]
        require_shape("gather", tree, name)
        axes = tuple(axis for axis in plan_.roles.storage if axis in leaf.axes)
        alike.setdefault((axes, tree[name].dtype), []).append(name)
    out: dict[str, Tensor] = {}
    for (axes, dtype), members in alike.items():
        data = tuple(axis for axis in plan_.roles.data if axis in axes)
        on_grid = BucketOnGrid(plan_, grid, layout.Bucket("", tuple(members), data, dtype), FreshBuffers(grid.device))
        wholes = list(GatherBucket.apply(on_grid, *(tree[name] for name in members)))
        for axis in reversed([axis for axis in plan_.roles.compute if axis in axes and grid.sizes[axis] > 1]):
            wholes = _whole_over(axis, tree, members, wholes)
        if all(grid.sizes[axis] == 1 for axis in axes):
            wholes = [whole.clone() for whole in wholes]  # nothing moved: these are the shards' own memory
        out |= dict(zip(members, wholes, strict=True))
    return [out[name] for name in names]


def _whole_over(axis: str, tree: Params, names: Sequence[str], parts: Sequence[Tensor]) -> list[Tensor]:
    """Leaves whole over a compute axis, for a computation that all its ranks do alike; one collective."""
    with comm.watched(None):  # who follows a function's collectives does not mean this one
        flat = comm.all_gather_invariant(torch.cat([x.reshape(-1) for x in parts]), tree.mesh, axis, 0)  # [W*n]
    ranks = tree.plan.axes[axis]
    rows = flat.view(ranks, -1).split([x.numel() for x in parts], dim=1)
    wholes: list[Tensor] = []
    for name, row, x in zip(names, rows, parts, strict=True):
        dim = tree.plan.leaves[name][1].split_dim(axis)
        assert dim is not None
        # [W, .., n, ..] -> [.., W*n, ..]
        wholes.append(row.view(ranks, *x.shape).movedim(0, dim).flatten(dim, dim + 1).contiguous())
    return wholes


def selected_layouts(tree: Params, names: str | Sequence[str] | None) -> list[Layout]:
    layouts = [layout for layout in tree.plan.layouts.values() if all(leaf.name in tree for leaf in layout.leaves)]
    if names is None:
        return layouts
    wanted = (names,) if isinstance(names, str) else tuple(names)
    named = [name for layout in layouts for name in layout.names]
    for pattern in wanted:
        if first_match([pattern], named) is None:
            some = ", ".join(layout.name for layout in layouts[:4])
            raise KeyError(f"gather: {pattern!r} matches no parameter; there are {some}, ...")
    return [layout for layout in layouts if first_match(wanted, layout.names) is not None]


def require_params(verb: str, tree: object) -> Params:
    if not isinstance(tree, Params):
        write = f"{verb}(params)[name]" if isinstance(tree, Tensor) else f"{verb}(sf.shard(model, mesh, policy))"
        why = f"{verb}: expected the tree that shard() makes, got {type(tree).__name__}; write {write}"
        raise see(TypeError(why), "trees")
    return tree


def require_reduced(verb: str, name: str, leaf: Tensor) -> None:
    """A leaf is no pending sum, and no plain tensor.

    Raises:
        ShardError: it is.
    """
    if not isinstance(leaf, DTensor) and not in_transform():
        raise plain_leaf(verb, name)
    if is_sum(leaf):
        why = f"{verb}: '{name}' is a sum that is still pending. Gradients of value_and_grad(reduce=None) go through"
        instead = "a function in sf.tree.map that adds up leaves ends in value.redistribute(placements=leaf.placements)"
        raise see(ShardError(f"{why} sf.reduce_grads(tree); {instead}"), "gradients")


def require_shape(verb: str, tree: Params, name: str) -> None:
    """A leaf is as its layout says.

    Raises:
        ShardError: a function has made another shape of it.
    """
    _, leaf = tree.plan.leaves[name]
    if tuple(tree[name].shape) != leaf.shape and not in_transform():
        why = f"{verb}: '{name}' has shape {tuple(tree[name].shape)}, its layout {leaf.rule} has {leaf.shape}"
        raise ShardError(f"{why}; gather first, then apply a function that changes shapes to what comes out")


def plain_leaf(verb: str, name: str) -> ShardError:
    """The error of a plain tensor, such as a whole one, that stands in a tree in place of a leaf."""
    write = f"sf.shard(sf.gather(params) | {{{name!r}: value}}, params.mesh, params.plan)"
    why = f"{verb}: {name!r} is a plain tensor, and leaves are DTensors. Write parameter.copy_(value) in a Trainer"
    return ShardError(f"{why}, or {write} of a whole one")


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
    owner = like if like is not None else require_params("reduce_grads", grads)
    plan_, grid = owner.plan, grid_of(owner.mesh, owner.plan.roles.storage)
    pending, done = _sorted(grads, owner, grid)
    if pending:
        instead = "Have gradients reduced as they are made, which has one: sf.grad(loss_fn), without reduce=None"
        _refuse_differentiated("reduce_grads", grads.values(), instead)
    for name, grad in pending.items():
        if op == "mean" and not (grad.is_floating_point() or grad.is_complex()):
            raise TypeError(f"reduce_grads: '{name}' holds {grad.dtype}, of which there is no mean; use op='sum'")
        if grad.dtype == torch.bool:
            raise TypeError(f"reduce_grads: '{name}' holds {grad.dtype}, which cannot be added")
    for bucket in plan_.buckets_in({name: grad.dtype for name, grad in pending.items()}):
        names, on_grid = bucket.leaves, BucketOnGrid(plan_, grid, bucket, FreshBuffers(grid.device))
        reduced = on_grid.reduce([pending[name] for name in names], [owner[name].dtype for name in names], op)
        done |= {n: wrap_local(x, leaf_spec(plan_, grid, n, x.dtype)) for n, x in zip(names, reduced, strict=True)}
    leaves = {name: done[name] for name in plan_.leaves if name in done}
    return Params(leaves, plan_.with_reduction("mean"), owner.mesh, owner.buffers)


def _sorted(grads: Mapping[str, Tensor], owner: Params, grid: Grid) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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
            partial = _is_pending(name, grad, owner, grid, was_pending)
            (pending if partial else done)[name] = unwrap_local(grad) if partial else grad
            continue
        layout = plan_.layout_of(name)
        if layout.leaves[0].name in pending:
            why = f"'{name}' and another name of the same parameter are both given"
            raise ShardError(f"reduce_grads: {why}; add them under one")
        wanted = compute_view_shape(layout, plan_.gathered_axes(layout), grid.sizes)
        if grad.shape != wanted:
            have = f"'{layout.name}' has a gradient of shape {tuple(grad.shape)}"
            need = f"whole over the data axes and split over the compute axes by '{layout.rule}': {wanted}"
            raise ShardError(f"reduce_grads: {have}; a pending gradient is {need}")
        parts = from_compute_view(layout, grad, plan_.gathered_axes(layout), grid.sizes)
        pending |= {leaf.name: part for leaf, part in zip(layout.leaves, parts, strict=True)}
    return pending, done


def _is_pending(name: str, grad: DTensor, owner: Params, grid: Grid, was_pending: bool) -> bool:
    """Whether a leaf is the pending gradient of parameter `name`; False when it is the reduced one.

    Raises:
        ShardError: it is neither; or it `was_pending`, and is reduced by now, which nobody who adds gradients meant.
    """
    reduced, pending, held_back = (leaf_spec(owner.plan, grid, name, grad.dtype, kind) for kind in (None, "sum", "avg"))
    split = any(grid.sizes[axis] > 1 for axis in owner.plan.roles.data)
    is_reduced = grad.placements == reduced.placements and grad.shape == reduced.shape
    is_pending = grad.placements in (pending.placements, held_back.placements) and grad.shape == pending.shape
    if is_reduced and not (split and was_pending and owner.plan.leaves[name][0].trainable):
        return False
    if is_pending and not is_reduced:
        return True
    if was_pending:
        raise ShardError(
            f"reduce_grads: '{name}' is no pending sum any more, its placements are {grad.placements}: torch reduces "
            "one that is clamped, or added to a number, as sum(grads) does with 0. Add gradients to each other, "
            "sf.tree.map(torch.add, a, b), or scale them; the rest comes after reduce_grads"
        )
    raise ShardError(
        f"reduce_grads: '{name}' has shape {tuple(grad.shape)} and placements {grad.placements}; the parameter has "
        f"{tuple(reduced.shape)} and {reduced.placements}, its pending gradient {pending.placements} (like=params?)"
    )
