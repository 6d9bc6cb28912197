"""`torch.func` with trees of shards: `jvp`, `vjp`, `hvp`, and `vmap`.

Trees are lowered (see local_trees.py) and given to `torch.func`. Inside, `apply` gathers a unit when it is used, and
every collective has a derivative in both directions.

What `vmap` maps over lies on mesh axes: samples on the data axes, members of an ensemble on the axis that splits their
dim. Those axes have no part in the mapped function, which sees one sample or one member: nothing is gathered or reduced
over them. A tree that comes out has the mapped dim in front again, split over them. Its plans (`layout/plan.py`):

    outside   w [out@tp, in@fsdp]        x [b@fsdp, c]
    inside    w [out@tp, in]             x [c]            `without(fsdp)`
    outside   d w [b@fsdp, out@tp, in]                    `stacked(b, fsdp)`

    mapped argument                                 axes                    what it is
    a plain tensor                                  all data axes           samples of this data rank
    a tree of shards whose first dim is split       those that split it     members of an ensemble, `e@dp ...`
    a tree of shards whose first dim is whole       none                    directions that all ranks share

Trees that are not mapped are made whole over those axes before: through a gather inside, gradients of sample i of every
rank would be added to each other.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfn import _torch
from shardfn.comm import BucketOnGrid, FreshBuffers, GatherBucket, require_same, weighed
from shardfn.context import in_forward_mode, is_asked_for, is_under_way, mapped_over
from shardfn.layout import grid_of
from shardfn.notation import ShardError, raise_problems, see
from shardfn.params import Params, entered, is_tree, left, lower, over_params, trees_in
from shardfn.random import lane, part_over, stream
from shardfn.transforms.autodiff import explained, grad, plain_gradient, unused
from shardfn.transforms.forward_mode import FORWARD_MODE, FORWARD_MODE_DIFFERENTIATED, MAPPED, ByFormulas
from shardfn.transforms.unsupported_calls import ours_only

_Pairs = Sequence[tuple[Any, Any]]  # leaves with their entries of `in_dims`


def jvp(func: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False) -> Any:
    """The value of a function and its derivative in one direction: `torch.func.jvp` with trees of shards.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 1)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> direction = sf.tree.map(torch.ones_like, params)
        >>> out, slope = sf.jvp(lambda p: sf.apply(model, p, torch.ones(1, 4)), (params,), (direction,))
        >>> slope
        tensor([[5.]])

    Args:
        func: a function of the primals; its results are tensors, or trees of them.
        primals: a tuple of its arguments: trees made by `shard`, tensors, or pytrees of them, all floating.
        tangents: the direction, of the same structure, shapes and layouts.
        has_aux: whether `func` also returns something that is not differentiated.

    Returns:
        `(value, tangent)`, or `(value, tangent, aux)`, of this data rank and not averaged.

    Raises:
        ShardError: tangents of other names, shapes or layouts.
        TypeError: primals or tangents are no tuples.

    Communication: that of `func`, each collective twice: for the values and for the tangents.
    """
    _require_tuples("jvp", primals, tangents)
    inner = _entered_alike("jvp", primals, tangents)
    checked = _using("jvp", func, primals, has_aux)
    with _by_formulas(), explained("jvp", "Pass the tree to sf.jvp as an argument too, with zeros as its tangent"):
        return left(torch.func.jvp(checked, *inner, has_aux=has_aux))


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of a function, and the function that pulls cotangents back: `torch.func.vjp` with trees of shards.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 1)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> out, pull = sf.vjp(lambda p: sf.apply(model, p, torch.ones(1, 4)), params)
        >>> (grads,) = pull(torch.ones(1, 1))
        >>> grads["bias"].full_tensor()
        tensor([1.])

    Args:
        func: a function of the primals; its results are tensors, or trees of them.
        *primals: trees made by `shard`, tensors, or pytrees of them, all floating.
        has_aux: whether `func` also returns something that is not differentiated.

    Returns:
        `(value, pull)`, or `(value, pull, aux)`. The value is that of this data rank. `pull(cotangent)` gives what
        `grad` would with the cotangent in place of 1, a tuple with an entry for each primal: trees of shards have the
        placements of the parameters and are averaged over the data ranks, each with its own cotangent.

    Raises:
        ShardError: as in `grad`.

    Communication: the gathers of `func`; in `pull` its reductions.
    """
    checked = _using("vjp", func, primals, has_aux)
    inner = entered("vjp", primals)
    with explained("vjp"):
        value, pull, *aux = torch.func.vjp(checked, *inner, has_aux=has_aux)

    def pulled(cotangents: Any) -> Any:
        with explained("vjp"):
            flat, structure = _torch.pytree.tree_flatten(left(pull(entered("vjp", cotangents))))
        pairs = zip(_torch.pytree.tree_leaves(primals), flat, strict=True)
        return _torch.pytree.tree_unflatten([plain_gradient(leaf, gradient) for leaf, gradient in pairs], structure)

    return (left(value), pulled, *left(aux))


def hvp(func: Callable[..., Any], primals: Any, tangent: Any) -> Any:
    """The Hessian of a loss times a direction, `jvp(grad(func))`, with respect to the first argument.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(2, 1, bias=False)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> direction = sf.tree.map(torch.ones_like, params)
        >>> loss_fn = lambda p, x: sf.apply(model, p, x).square().sum()
        >>> sf.hvp(loss_fn, (params, torch.tensor([[1.0, 2.0]])), direction)["weight"].full_tensor()
        tensor([[ 6., 12.]])

    Args:
        func: a loss as `grad` takes it, `func(params, *batch)`.
        primals: `(params, *batch)`.
        tangent: the direction, like `params`.

    Returns:
        a tree like `params`, the product with the Hessian of the loss averaged over the data axes.

    Raises:
        ShardError: a tangent of other names, shapes or layouts.
        TypeError: `primals` is no tuple.

    Communication: the gathers and reductions of a gradient, each twice.
    """
    _require_tuples("hvp", primals)
    params, *batch = primals
    inner, direction = _entered_alike("hvp", params, tangent)
    gradient = grad(_using("hvp", func, params, False))
    with _by_formulas():
        _, product, *_ = torch.func.jvp(lambda p: gradient(p, *batch), (inner,), (direction,))
    return left(product)


def _by_formulas() -> ByFormulas:
    return ByFormulas(FORWARD_MODE_DIFFERENTIATED if in_forward_mode() else FORWARD_MODE)


def _using(verb: str, func: Callable[..., Any], primals: Any, has_aux: bool) -> Callable[..., Any]:
    """The function, with collectives of ours only; of the outermost transform a result depends on what it is given.

    Raises:
        ShardError: none does, as with `model(x)` where `apply` is meant.
    """
    checked = ours_only(verb, func)
    leaves = sum(map(len, trees_in(primals)))
    if _torch.in_transform() or is_under_way() or not leaves:
        return checked

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = checked(*args, **kwargs)
        results = _torch.pytree.tree_leaves(out[0] if has_aux else out)
        tensors = [x for x in results if isinstance(x, Tensor)]  # of split logits something else is said
        if all(type(x) is Tensor and not _torch.differentiated_in_transform(x) for x in tensors):
            raise unused(verb, leaves)
        return out

    return call


def _no_forward_mode() -> ShardError:
    why = "torch.func.jvp cannot take DTensors, nor can what is made of it (jacfwd, hessian, linearize)"
    return ShardError(f"{why}: use sf.jvp or sf.hvp, which take trees of shards")


_torch.refuse_of_dtensors([_torch.JVP], _no_forward_mode)


def _require_tuples(verb: str, *values: Any) -> None:
    if kinds := [type(value).__name__ for value in values if not isinstance(value, tuple)]:
        what = "primals are the tuple (params, *batch)" if verb == "hvp" else "primals and tangents are tuples"
        raise see(TypeError(f"{verb}: {what}, one entry an argument, not {kinds[0]}"), "transforms")


def _entered_alike(verb: str, primals: Any, tangents: Any) -> Any:
    """What forward mode gets of primals and their tangents, which are alike."""
    if not _torch.in_transform():
        _require_alike(verb, primals, tangents)
    inner = entered(verb, (primals, tangents))
    if _torch.in_transform():  # where a tree may come from outside, and another one not
        _require_alike(verb, *inner)
    return inner


def _require_alike(verb: str, primals: Any, tangents: Any) -> None:
    """Check that a direction has the structure, the shapes and the layouts of what it is a direction of."""
    for tree, other in zip(trees_in(primals), trees_in(tangents), strict=False):
        problems = [f"the tangent has no leaf {name!r}" for name in tree if name not in other]
        problems += [f"the tangent has a leaf {name!r}, which the primal has not" for name in other if name not in tree]
        both = [(f"the tangent of {n!r} has shape", other[n].shape, x.shape) for n, x in tree.items() if n in other]
        problems += [f"{what} {tuple(had)}, the primal {tuple(wanted)}" for what, had, wanted in both if had != wanted]
        told = [] if _torch.in_transform() and tree.plan != other.plan else problems[:5]
        raise_problems(verb, told, entry="transforms")
        if tree.plan != other.plan:
            raise ShardError(
                f"{verb}: the tangent has another layout than the primal; sf.reshard it"
                f"{', or pass it to sf.vmap as the primal is' * _torch.in_transform()}\n{tree.plan.diff(other.plan)}"
            )
    flat, structure = _torch.pytree.tree_flatten(primals)
    others, other_structure = _torch.pytree.tree_flatten(tangents)
    if structure != other_structure:
        kinds = partial(_torch.pytree.tree_map, lambda x: type(x).__name__, is_leaf=is_tree)
        seen, wanted = map(kinds, (tangents, primals))
        raise ShardError(f"{verb}: tangents have another structure than primals: {seen} and {wanted}")
    for x, tangent in zip(flat, others, strict=True):
        if isinstance(x, Tensor) and isinstance(tangent, Tensor) and x.shape != tangent.shape:
            raise ShardError(f"{verb}: a tangent has shape {tuple(tangent.shape)}, its primal {tuple(x.shape)}")


def vmap(
    func: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """A function that maps `func` over a dim of its arguments: `torch.func.vmap` with trees of shards.

    Plain tensors that are mapped are this data rank's samples. Per-sample gradients are
    `sf.vmap(sf.grad(loss_fn), in_dims=(None, 0))(params, x)`: no two samples meet, and the result is typed
    `b@fsdp ...`: each rank has those of its own samples, and `gather` concatenates them.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 1)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> loss_fn = lambda p, x: sf.apply(model, p, x).square().sum()
        >>> grads = sf.vmap(sf.grad(loss_fn), in_dims=(None, 0))(params, torch.ones(8, 4))
        >>> sf.typeof(grads, "weight"), sf.gather(grads)["weight"].shape
        ('f32[b@fsdp 1 4]', torch.Size([8, 1, 4]))

    Args:
        func: a function of tensors and trees of shards; keyword arguments are passed on as they are.
        in_dims: as in torch; for a tree of shards None, or 0: it is stacked along a first dim, like an ensemble
            (`e@dp ...`). Tensors that are mapped with it belong to its members.
        out_dims: as in torch; 0 for trees of shards.
        randomness: as in torch.
        chunk_size: as in torch: how many to compute at a time.

    Returns:
        the function. Trees of shards that it returns have a new first dim, split over the axes of what was mapped.

    Raises:
        ShardError: `in_dims` of a tree that is neither None nor 0, `out_dims` of one that is not 0, trees on several
            meshes, a number of samples that differs between data ranks.
        ValueError: as in torch.

    Communication: what `func` needs, for the whole batch at once; an all-gather a bucket for trees that are not mapped,
    before; one of a number when trees come out.
    """
    checked = ours_only("vmap", func)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = _torch.pytree.tree_flatten(args, is_leaf=is_tree)
        dims = _flat_dims(in_dims, len(args), structure)
        both = zip(leaves, dims, strict=True)
        pairs = [(_as_stacked(leaf) if dim == 0 and is_tree(leaf) else leaf, dim) for leaf, dim in both]
        axes = _mapped_axes(pairs)
        ready = [_enters_vmap(leaf, dim, axes) if is_tree(leaf) else leaf for leaf, dim in pairs]
        rng = stream()
        lanes, count, of_part = _lanes(pairs, ready, axes) if rng and randomness != "same" else (0, 1, False)
        start = dict(rng.calls) if rng is not None else {}

        def run(number: Any, *flat: Any) -> Any:
            if rng is not None:
                rng.calls = dict(start)  # every chunk makes the same calls
            with mapped_over(axes), lane(number, count, of_part):
                return checked(*_torch.pytree.tree_unflatten(list(flat), structure), **kwargs)

        lane_dim = 0 if isinstance(lanes, Tensor) else None
        with ByFormulas(MAPPED) if is_asked_for() else nullcontext():
            out = torch.func.vmap(run, (lane_dim, *dims), out_dims, randomness, chunk_size=chunk_size)(lanes, *ready)
        _require_in_front(out, out_dims)
        return left(over_params(lambda tree: _leaves_vmap(tree, axes), out))

    return mapped


def _lanes(pairs: _Pairs, ready: Sequence[Any], axes: Sequence[str]) -> tuple[Tensor | int, int, bool]:
    """The numbers of this rank's samples or members among those of all ranks, and how many these are.

    When no argument is a tree (one that is closed over keeps its axes), only this rank's are counted; then True.
    """
    mapped = [(x, dim) for x, (_, dim) in zip(ready, pairs, strict=True) if dim is not None]
    if not mapped:
        return 0, 1, False
    x, dim = mapped[0]
    size = next(iter(x.values())).shape[0] if is_tree(x) else x.shape[dim]
    numbers = torch.arange(size)
    tree = next((leaf for leaf, _ in pairs if is_tree(leaf)), None)
    if tree is None:
        return numbers, size, True
    index, ranks = part_over(grid_of(tree.mesh, tree.plan.roles.storage), axes)
    return index * size + numbers, ranks * size, False


def _flat_dims(dims: Any, count: int, structure: Any) -> list[Any]:
    """One entry of `in_dims` for every tensor and tree of shards."""
    per_argument = tuple(dims) if isinstance(dims, tuple | list) else (dims,) * count
    flat = _torch.one_for_each(per_argument, structure)
    if flat is None:
        raise ValueError(f"vmap: in_dims={dims!r} does not fit the arguments, {structure}")
    return flat


def _require_in_front(out: Any, out_dims: Any) -> None:
    """Check that the mapped dim of trees that come out is their first."""
    leaves, structure = _torch.pytree.tree_flatten(out, is_leaf=is_tree)
    for leaf, dim in zip(leaves, _torch.one_for_each(out_dims, structure) or (), strict=False):
        if is_tree(leaf) and dim != 0:
            raise ShardError(f"vmap: out_dims={dim!r} for a tree of shards; its mapped dim comes first, out_dims=0")


def _as_stacked(tree: Params) -> Params:
    """A tree that is mapped, with a plan of what it holds: many trees along a first dim.

    Raises:
        ShardError: the leaves have several numbers of entries, or are split differently there.
    """
    first_dims = {_first_dim(tree, name, leaf) for name, leaf in tree.items()}
    if len(first_dims) != 1:
        shown = ", ".join(f"{size}{''.join(f'@{axis}' for axis in axes)}" for size, axes, _ in sorted(first_dims))
        why = f"vmap: a tree that is mapped over its first dim has leaves with several of them: {shown}"
        why = f"{why}; write in_dims=(None, 0), with a 0 for each further argument that is mapped"
        raise see(ShardError(why), "transforms")
    ((size, axes, planned),) = first_dims
    return tree if planned else Params(tree, tree.plan.stacked(size, axes), tree.mesh, tree.buffers)


def _first_dim(tree: Params, name: str, leaf: Tensor) -> tuple[int, tuple[str, ...], bool]:
    """Size of the first dim, the axes that split it, and whether the plan knows of it."""
    planned = tree.plan.leaves[name][1]
    if leaf.dim() == len(planned.shape) and planned.shape and planned.merges[0] == 1:
        return planned.shape[0], planned.splits[0], True
    if leaf.dim() != len(planned.shape) + 1:
        raise ShardError(f"vmap: '{name}' has shape {tuple(leaf.shape)}, which has no first dim to map over")
    if not isinstance(leaf, DTensor):  # stacked inside a transform, where every rank has its part of each entry
        return leaf.shape[0], (), False
    pairs = zip(tree.plan.roles.storage, leaf.placements, strict=True)
    return leaf.shape[0], tuple(axis for axis, placement in pairs if placement.is_shard(0)), False


def _mapped_axes(pairs: _Pairs) -> tuple[str, ...]:
    """The mesh axes over which the mapped dim lies, outermost first."""
    trees = [(leaf, dim) for leaf, dim in pairs if is_tree(leaf)]
    for tree, dim in trees:
        if dim not in (None, 0):
            raise ShardError(f"vmap: in_dims={dim!r} for a tree of shards; it is mapped over its first dim (0), or not")
        if tree.mesh is not trees[0][0].mesh and tree.mesh != trees[0][0].mesh:
            raise ShardError("vmap: trees on several meshes; sf.reshard them to one")
    splits = {next(iter(tree.plan.leaves.values()))[1].splits[0] for tree, dim in trees if dim == 0}
    if len(splits) > 1:
        raise ShardError(f"vmap: trees whose first dims lie on different axes: {sorted(splits)}")
    return splits.pop() if splits else tuple(dict.fromkeys(axis for tree, _ in trees for axis in tree.plan.roles.data))


def _enters_vmap(tree: Params, dim: int | None, axes: Sequence[str]) -> Params:
    """What the function that is mapped gets of a tree: plain leaves, whole over the axes that have no part in it."""
    depth = _torch.vmap_depth() + 1
    if dim == 0:  # each member counts in the loss of its own rank only
        own = lower(tree, depth)
        leaves = {name: weighed(leaf, 1 / _ranks(tree, axes)) for name, leaf in own.items()}
        return Params(leaves, tree.plan.member(axes).in_vmaps(depth), tree.mesh, tree.buffers)
    own = [axis for axis in axes if axis in tree.plan.roles.data]
    rest = [axis for axis in tree.plan.roles.data if axis not in axes and tree.plan.axes[axis] > 1]
    if rest and _ranks(tree, own) > 1:
        raise ShardError(
            f"vmap: a tree that is not mapped has the data axes {', '.join(tree.plan.roles.data)}; what is mapped "
            f"lies on {', '.join(own)} only. Stack it too, or reshard it to a mesh without {', '.join(rest)}."
        )
    leaves = _whole(tree) if own else lower(tree, depth)
    return Params(leaves, tree.plan.without(own).in_vmaps(depth), tree.mesh, tree.buffers)


def _ranks(tree: Params, axes: Sequence[str]) -> int:
    """How many data ranks the axes have."""
    return prod(tree.plan.axes[axis] for axis in axes if axis in tree.plan.roles.data)


def _whole(tree: Params) -> dict[str, Tensor]:
    """The leaves, plain and whole over the data axes: one gather a bucket, differentiable."""
    grid = grid_of(tree.mesh, tree.plan.roles.storage)
    out: dict[str, Tensor] = {}
    for bucket in tree.plan.buckets_in({name: leaf.dtype for name, leaf in tree.items()}):
        axes = tuple(axis for axis in tree.plan.roles.data if axis in (*bucket.axes, *bucket.kept))
        on_grid = BucketOnGrid(tree.plan, grid, replace(bucket, axes=axes, kept=()), FreshBuffers(grid.device))
        wholes = GatherBucket.apply(on_grid, *(tree[name] for name in bucket.leaves))
        out |= zip(bucket.leaves, wholes, strict=True)
    return {name: out[name] for name in tree}


def _leaves_vmap(tree: Params, axes: Sequence[str]) -> Params:
    """A tree that comes out of the mapped function, with the mapped dim in front of its leaves."""
    if tree.plan.vmaps is None:
        return tree
    local = next(iter(tree.values())).shape[0]
    if not _torch.in_transform():
        require_same("vmap: the number of samples", local, grid_of(tree.mesh, tree.plan.roles.storage), axes)
    total = local * prod(tree.plan.axes[axis] for axis in axes)
    plan = tree.plan.stacked(total, axes).in_vmaps(tree.plan.vmaps - 1)
    stacked = Params(tree, plan, tree.mesh, tree.buffers)
    return stacked.like((name, weighed(leaf, _ranks(stacked, axes))) for name, leaf in tree.items())
