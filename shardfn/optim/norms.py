"""The norm of a whole tree, clipping by it, and inner products: the only collectives of optimizers."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from shardfn import _torch
from shardfn.comm import into_losses, map_runs, merged, psum_of_trees, pvary, sum_flat_
from shardfn.layout import grid_of, may_be_differentiated
from shardfn.notation import ShardError
from shardfn.optim import base
from shardfn.optim.base import Optimizer, Tree
from shardfn.params import Params, left, lower
from shardfn.params import map as map_tree

_PIECE = 2**17  # elements that are squared and added in one go


def global_norm(tree: Tree) -> Tensor:
    """The 2-norm of all floating tensors of a tree together, as if they were one vector.

        >>> import torch, shardfn as sf
        >>> sf.optim.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
        tensor(5.)

    Args:
        tree: any pytree of `DTensor`s on one mesh, in any mix of layouts, or of plain tensors. A replicated leaf counts
            once. Integer leaves do not count.

    Returns:
        a plain scalar, the same on all ranks, in float32, or in float64 when a leaf is.

    Raises:
        ShardError: a leaf is a pending sum; leaves on several meshes; DTensors and plain tensors mixed.

    Communication: one all-reduce of a scalar when the mesh covers all ranks, else one an axis; none for plain tensors.
    """
    if isinstance(tree, Params) and _differentiated(tree):
        lowered = lower(tree, _torch.vmap_depth())
        return into_losses(_norm_of_parts(lowered), lowered.mesh, lowered.plan.roles.data)
    return _norm("global_norm", [leaf for leaf in _torch.pytree.tree_leaves(tree) if may_be_differentiated(leaf)])


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product of all floating tensors of two trees, as if each tree were one vector.

        >>> import torch, shardfn as sf
        >>> sf.tree.dot({"a": torch.tensor([3.0, 1.0])}, {"a": torch.tensor([2.0, 4.0])})
        tensor(10.)

    Args:
        a: a tree of shards, or any pytree of plain tensors.
        b: one of the same names, shapes and layouts.

    Returns:
        a plain scalar, the same on all ranks, in float32, or in float64 when a leaf is; of complex leaves the real part
        of `conj(a) b`. Differentiable.

    Raises:
        ShardError: the trees have other names or layouts; a leaf is a pending sum.

    Communication: as `global_norm`.
    """
    if not isinstance(a, Params):
        pairs: list[tuple[Tensor, Tensor]] = []
        map_tree(lambda x, y: pairs.append((x, y)) if may_be_differentiated(x) else None, a, b)
        return _products([x for x, _ in pairs], [y for _, y in pairs], _wide([x for pair in pairs for x in pair]))
    base.require_match("tree.dot", "the second tree", a, list(a), b)
    if _differentiated(a) or _differentiated(b):
        x, y = lower(a, _torch.vmap_depth()), lower(b, _torch.vmap_depth())
        wide = _wide([*x.values(), *y.values()])
        total = _sum_of_parts(x, lambda names: _products([x[n] for n in names], [y[n] for n in names], wide))
        return into_losses(total, x.mesh, x.plan.roles.data)
    names = [name for name, leaf in a.items() if may_be_differentiated(leaf)]
    xs, ys = (_torch.unwrap_locals([tree[name] for name in names]) for tree in (a, b))
    leaves, wide = [a[name] for name in names], _wide([*xs, *ys])  # of all: a rank may have nothing to add
    return _summed("tree.dot", leaves, lambda mine: _products([xs[i] for i in mine], [ys[i] for i in mine], wide))


def _products(xs: Sequence[Tensor], ys: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """The sum of all products of elements, in a wide dtype."""
    parts = [(x.conj() * y).real if x.is_complex() else x.to(wide) * y.to(wide) for x, y in zip(xs, ys, strict=True)]
    return torch.stack([part.sum(dtype=wide) for part in parts]).sum() if parts else torch.zeros((), dtype=wide)


def _differentiated(tree: Params) -> bool:
    """Whether a derivative may flow through the leaves: arithmetic on their local parts would lose it."""
    return _torch.in_transform() or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tree.values()))


def _norm_of_parts(tree: Params) -> Tensor:
    """Of a lowered tree, the same on all ranks."""
    return _sum_of_parts(tree, lambda names: _square_sum([tree[n] for n in names], _wide(list(tree.values())))).sqrt()


def _sum_of_parts(tree: Params, of_leaves: Callable[[Sequence[str]], Tensor]) -> Tensor:
    """A sum over floating leaves of a lowered tree: that of leaves split over the same axes goes over those axes."""
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name, leaf in tree.items():
        if may_be_differentiated(leaf):
            by_axes.setdefault(tree.plan.leaves[name][1].axes, []).append(name)
    device = grid_of(tree.mesh, tree.plan.roles.storage).device
    total = torch.zeros((), dtype=_wide(list(tree.values())), device=device)
    for axes, names in by_axes.items():
        part = of_leaves(names)
        for axis in axes:
            part = psum_of_trees(part, tree.mesh, axis)
        total = total + part
    return total


def _wide(leaves: Sequence[Tensor]) -> torch.dtype:
    double = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
    return torch.float64 if double else torch.float32


def _norm(verb: str, leaves: Sequence[Tensor]) -> Tensor:
    locals_ = _torch.unwrap_locals(leaves)
    wide = _wide(locals_)
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    if not sharded or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in sharded)):
        return _square_sum(leaves, wide).sqrt()
    if len(sharded) < len(leaves):
        raise ShardError(f"{verb}: the tree mixes DTensors and plain tensors, which may be parts or whole; shard all")
    return _summed(verb, sharded, lambda mine: _square_sum(_pieces([locals_[i] for i in mine]), wide)).sqrt()


def _summed(verb: str, leaves: Sequence[DTensor], of_leaves: Callable[[Sequence[int]], Tensor]) -> Tensor:
    """A sum over leaves, of which every rank adds those, by index, that count there; outside autograd."""
    if not leaves:
        return of_leaves(())
    specs = list(map(_torch.spec_of, leaves))
    mesh = specs[0].mesh
    if any(spec.mesh is not mesh and spec.mesh != mesh for spec in specs):
        raise ShardError(f"{verb}: the leaves live on several meshes; sf.reshard them to one")
    if (at := mesh.get_coordinate()) is None:
        raise ShardError(f"{verb}: rank {dist.get_rank()} is not part of the leaves' mesh")
    kinds = [(verb, spec.shape, spec.placements) for spec in specs]
    with torch.no_grad():
        if _torch.simulated():
            places = mesh.mesh

            def own(rank: int, each: list[Tensor]) -> list[Tensor]:
                there = tuple((places == rank).nonzero()[0].tolist())
                counted = [x for x, kind in zip(each, kinds, strict=True) if _counts_on(*kind, there)]
                return [torch.stack(counted).sum() if counted else torch.zeros_like(each[0])]

            total = _torch.on_each_rank(own, [of_leaves([i]) for i in range(len(specs))])[0]
        else:
            total = of_leaves([i for i, kind in enumerate(kinds) if _counts_on(*kind, tuple(at))])
        moved = total.to(mesh.device_type)  # from the host, when gradients live there
        for group in _groups_of(leaves[0]):
            sum_flat_(moved, group)
    return moved.to(leaves[0].device)  # a rank that adds nothing has a total on the host


@lru_cache(maxsize=2**12)
def _counts_on(verb: str, shape: torch.Size, placements: tuple[Placement, ...], at: tuple[int, ...]) -> bool:
    """Whether the rank at a coordinate adds a leaf to the sum: it is the first of those that hold the same part."""
    if any(placement.is_partial() for placement in placements):
        raise ShardError(f"{verb}: a leaf of shape {tuple(shape)} is a sum that is still pending: sf.reduce_grads")
    return all(index == 0 or not placement.is_replicate() for index, placement in zip(at, placements, strict=True))


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same elements in few tensors, but not in long ones.

    A CPU adds float32 one after the other (torch 2.13): the norm of 2**26 elements is off by 0.5 percent.
    """
    pieces: list[Tensor] = []
    for flat in merged([tensors])[0]:
        pieces += flat.view(-1).split(_PIECE) if flat.numel() > _PIECE and flat.is_contiguous() else [flat]
    return pieces


def _groups_of(leaf: DTensor) -> list[dist.ProcessGroup]:
    """Process groups over which a sum reaches every rank of the leaf's mesh."""
    mesh = leaf.device_mesh
    axes = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    world = dist.group.WORLD
    if len(axes) > 1 and world is not None and mesh.size() == world.size():
        return [world]
    return [mesh.get_group(dim) for dim in axes]


def _square_sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of all squares; one that is differentiated depends on every tensor, also where a rank's part is empty."""
    if _torch.in_transform() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return _products(tensors, tensors, dtype)
    real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors if x.numel()]
    real = [x if x.itemsize > 1 else x.to(dtype) for x in real]  # torch (2.13) has no norm of float8
    if not real:
        return torch.zeros((), dtype=dtype)
    return torch.stack(list(_torch.foreach("norm")(real, 2, dtype=dtype))).square().sum()


def clip(grads: Tree, max_norm: float) -> tuple[Tree, Tensor]:
    """Gradients scaled down so that their global norm is at most `max_norm`, and the norm that they had.

        >>> import torch, shardfn as sf
        >>> grads, norm = sf.optim.clip({"a": torch.tensor([3.0, 4.0])}, max_norm=1.0)
        >>> norm, grads["a"]
        (tensor(5.), tensor([0.6000, 0.8000]))

    As in `torch.nn.utils.clip_grad_norm_`, the factor is `min(1, max_norm / (norm + 1e-6))`: with an infinite gradient
    it is 0 (and the infinite elements become nan), with a nan all gradients become nan. Test the norm to skip a step.

    Args:
        grads: gradients; not changed. Leaves of parameters that do not train neither count nor change.
        max_norm: the largest norm; `math.inf` only measures.

    Returns:
        gradients in their own dtypes, and the norm before clipping as a plain scalar.

    Raises:
        ValueError: `max_norm` is not positive.
        ShardError: what `global_norm` raises.

    Communication: that of one `global_norm`.
    """
    require_positive("clip", max_norm)
    if isinstance(grads, Params):
        names = base.trainable(grads)
        if _differentiated(grads):
            return _clip_parts(grads, names, max_norm)
        wanted = base.leaves_of(grads, names)
        norm = _norm("clip", wanted)
        return grads.like({**grads, **dict(zip(names, _clipped(wanted, norm, max_norm), strict=True))}), norm
    leaves, structure = _torch.pytree.tree_flatten(grads)
    chosen = [i for i, leaf in enumerate(leaves) if may_be_differentiated(leaf)]
    norm = _norm("clip", [leaves[i] for i in chosen])
    for i, leaf in zip(chosen, _clipped([leaves[i] for i in chosen], norm, max_norm), strict=True):
        leaves[i] = leaf
    return _torch.pytree.tree_unflatten(leaves, structure), norm


def _clip_parts(grads: Params, names: Sequence[str], max_norm: float) -> tuple[Params, Tensor]:
    """`clip` of a tree through which a derivative flows."""
    lowered = lower(grads, _torch.vmap_depth())
    norm = _norm_of_parts(lowered.like((name, lowered[name]) for name in names))

    @cache
    def factor_for(axes: tuple[str, ...]) -> Tensor:
        return pvary(factor_for(axes[:-1]), lowered.mesh, axes[-1]) if axes else _factor(norm, max_norm)

    axes = {name: lowered.plan.leaves[name][1].axes for name in names}
    scaled = {name: lowered[name] * factor_for(axes[name]).to(lowered[name].dtype) for name in names}
    return left(lowered.like({**lowered, **scaled})), into_losses(norm, lowered.mesh, lowered.plan.roles.data)


def require_positive(verb: str, max_norm: float) -> None:
    if not isinstance(max_norm, int | float) or not max_norm > 0:
        raise ValueError(f"{verb}: max_norm={max_norm!r} is not a positive number; math.inf only measures")


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale gradients down so that their global norm is at most `max_norm`; goes before the optimizer in a `chain`.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.sgd(1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> params, state = opt.step(params, {"w": torch.tensor([3.0, 4.0])}, opt.init(params))
        >>> params["w"]
        tensor([-0.6000, -0.8000])

    The same as `clip`, which also returns the norm.

    Args:
        max_norm: the largest norm.

    Returns:
        a transform without state.

    Raises:
        ValueError: `max_norm` is not positive.

    Communication: that of one `global_norm` an update.
    """
    require_positive("clip_by_global_norm", max_norm)
    return base.transform("clip_by_global_norm", tuple, lambda grads, state, _: (clip(grads, max_norm)[0], state))


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _clipped(leaves: Sequence[Tensor], norm: Tensor, max_norm: float) -> list[Tensor]:
    factor = _factor(norm, max_norm)
    if not leaves or _torch.in_transform() or any(leaf.grad_fn is not None for leaf in leaves):
        return [leaf * factor.to(leaf.dtype) for leaf in leaves]
    if not all(isinstance(leaf, DTensor) for leaf in leaves):  # plain ones may carry a derivative
        return list(_torch.foreach("mul")(leaves, factor))
    scaled = map_runs(lambda tensors: _torch.foreach("mul")(tensors, factor), _torch.unwrap_locals(leaves))
    return _torch.with_locals(leaves, scaled)
