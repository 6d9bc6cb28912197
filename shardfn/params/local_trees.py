"""Trees inside a transform: this rank's plain parts in place of DTensors.

A transform of `torch.func` wraps tensors. A wrapped DTensor has lost its methods, and forward mode takes none at all.
So trees are lowered before a transform and lifted after it. In between, the plan says what a part is part of.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import DTensorSpec, in_transform, pytree, unwrap_local, vmap_depth, wrap_local
from shardfn.comm import in_layout, leaf_spec
from shardfn.layout import Plan, grid_of
from shardfn.notation import ShardError
from shardfn.params.tree import Params, data_axes_of, is_tree


def over_params(fn: Callable[[Params], Any], tree: Any) -> Any:
    """`fn` on every tree of shards in a pytree."""
    return pytree.tree_map(lambda x: fn(x) if is_tree(x) else x, tree, is_leaf=is_tree)


def lower(params: Params, vmaps: int | None) -> Params:
    """The same tree with plain leaves, differentiable; its plan says that it is inside `vmaps` mapped dims.

    With None the other way round: with DTensors as leaves.
    """
    plan, leaves = params.plan.in_vmaps(vmaps), params.values()
    if (plan.vmaps is None) != (params.plan.vmaps is None):
        leaves = Across.apply(vmaps is None, specs_of_leaves(params.plan.in_vmaps(None), params), *leaves)
    return Params(zip(params, leaves, strict=True), plan, params.mesh, params.buffers)


def entered(verb: str, tree: Any) -> Any:
    """What a transform gets: every tree of shards in it lowered.

    Raises:
        ShardError: a `vmap` goes on around the transform, and the tree did not come in through it.
    """

    def enter(params: Params) -> Params:
        depth = vmap_depth()
        if depth != (params.plan.vmaps or 0) and data_axes_of(params):
            why = f"{verb}: a vmap goes on around it, and the tree comes from outside: gradients of samples would be"
            raise ShardError(f"{why} added up over ranks. Pass the tree to sf.vmap too, with None in in_dims.")
        return lower(params, depth)

    return over_params(enter, tree)


def left(tree: Any) -> Any:
    """What comes out of the outermost transform: every tree of shards in it lifted."""
    return tree if in_transform() else over_params(lambda x: x if x.plan.vmaps is None else lower(x, None), tree)


def specs_of_leaves(plan: Plan, params: Params) -> list[DTensorSpec]:
    """The DTensor metadata of every leaf, also of one that is stacked, of which the plan knows nothing."""
    grid = grid_of(params.mesh, plan.roles.storage)
    more = {name: max(x.dim() - len(plan.leaves[name][1].shape), 0) for name, x in params.items()}
    return [leaf_spec(plan, grid, name, x.dtype, batch=tuple(x.shape[: more[name]])) for name, x in params.items()]


class Across(torch.autograd.Function):
    """
    forward   leaf [shard], a DTensor -> the same, plain; one that `lifts` has it the other way
    backward  the same the other way
    """

    @staticmethod
    def forward(lifts: bool, specs: Sequence[DTensorSpec], *leaves: Tensor) -> tuple[Tensor, ...]:
        if lifts:
            return tuple(wrap_local(x.detach(), spec) for x, spec in zip(leaves, specs, strict=True))
        return tuple(unwrap_local(leaf).detach() for leaf in leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.lifts, ctx.specs, *_ = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(x, spec) for x, spec in zip(grads, ctx.specs, strict=True) if x is not None]
        placed = (in_layout(x, spec) for x, spec in pairs)
        crossed = iter(Across.apply(not ctx.lifts, [spec for _, spec in pairs], *placed) if pairs else ())
        return None, None, *(None if x is None else next(crossed) for x in grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """Of a tree that a mapped function closes over; what is mapped was lowered before."""
        assert not any(isinstance(dim, int) for dim in in_dims[2:])
        return Across.apply(*args), (None,) * (len(args) - 2)
