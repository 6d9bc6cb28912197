"""Trees inside a transform: this rank's plain parts in place of DTensors. Layer 4.

A transform of `torch.func` wraps tensors. A wrapped DTensor has lost its methods, and forward mode takes none at all.
So trees are lowered before a transform and lifted after it. In between, the plan says what a part is part of.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import DTensorSpec, in_transform, pytree, unwrap_local, vmap_depth, wrap_local
from shardfn.core.buckets import in_layout, leaf_spec
from shardfn.core.errors import ShardError
from shardfn.core.mesh import grid
from shardfn.core.plan import Plan
from shardfn.core.tree import Params, is_tree


def over_params(fn: Callable[[Params], Any], tree: Any) -> Any:
    """`fn` on every tree of shards in a pytree."""
    return pytree.tree_map(lambda x: fn(x) if is_tree(x) else x, tree, is_leaf=is_tree)


def lower(params: Params, vmaps: int) -> Params:
    """The same tree with plain leaves, differentiable; its plan says that it is inside `vmaps` mapped dims."""
    if params.plan.vmaps is not None:
        return Params(params, params.plan.in_vmaps(vmaps), params.mesh, params.buffers)
    specs = specs_of_leaves(params.plan, params)
    parts = Lower.apply(specs, *params.values())
    return Params(zip(params, parts, strict=True), params.plan.in_vmaps(vmaps), params.mesh, params.buffers)


def lift(params: Params) -> Params:
    """The same tree with DTensors as leaves, differentiable."""
    plan = params.plan.in_vmaps(None)
    lifted = Lift.apply(specs_of_leaves(plan, params), *params.values())
    return Params(zip(params, lifted, strict=True), plan, params.mesh, params.buffers)


def entered(verb: str, tree: Any) -> Any:
    """What a transform gets: every tree of shards in it lowered.

    Raises:
        ShardError: a `vmap` goes on around the transform, and the tree did not come in through it.
    """

    def enter(params: Params) -> Params:
        depth = vmap_depth()
        several = any(params.plan.axes[axis] > 1 for axis in params.plan.roles.data)
        if depth != (params.plan.vmaps or 0) and several:
            raise ShardError(
                f"{verb}: a vmap goes on around it, and the tree comes from outside: gradients of one sample would be "
                f"added to those of other samples on other ranks. Pass the tree to sf.vmap too, with None in in_dims."
            )
        return lower(params, depth)

    return over_params(enter, tree)


def left(tree: Any) -> Any:
    """What comes out of the outermost transform: every tree of shards in it lifted."""
    return tree if in_transform() else over_params(lambda x: x if x.plan.vmaps is None else lift(x), tree)


def specs_of_leaves(plan: Plan, params: Params) -> list[DTensorSpec]:
    """The DTensor metadata of every leaf, also of one that is stacked, of which the plan knows nothing."""
    places = grid(params.mesh, plan.roles.storage)

    def spec(name: str, x: Tensor) -> DTensorSpec:
        stacked = max(x.dim() - len(plan.leaves[name][1].shape), 0)
        return leaf_spec(plan, places, name, x.dtype, batch=tuple(x.shape[:stacked]))

    return [spec(name, leaf) for name, leaf in params.items()]


class _OfLeaves(torch.autograd.Function):
    """A function of the metadata of leaves, which it keeps, and of the leaves."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.specs = inputs[0]
        ctx.set_materialize_grads(False)


class Lower(_OfLeaves):
    """
    forward   leaf [shard], a DTensor -> the same, plain
    backward  the same the other way
    """

    @staticmethod
    def forward(specs: Sequence[DTensorSpec], *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(unwrap_local(leaf).detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_each(Lift, ctx.specs, grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """Of a tree that a mapped function closes over; what is mapped was lowered before."""
        assert not any(isinstance(dim, int) for dim in in_dims[1:])
        return Lower.apply(*args), (None,) * (len(args) - 1)


class Lift(_OfLeaves):
    """
    forward   leaf [shard], plain -> the same as a DTensor
    backward  the same the other way
    """

    @staticmethod
    def forward(specs: Sequence[DTensorSpec], *locals_: Tensor) -> tuple[Tensor, ...]:
        return tuple(wrap_local(x.detach(), spec) for x, spec in zip(locals_, specs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        placed = [x if x is None else in_layout(x, spec) for x, spec in zip(grads, ctx.specs, strict=True)]
        return None, *_each(Lower, ctx.specs, placed)


def _each(
    function: type[torch.autograd.Function], specs: Sequence[DTensorSpec], values: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The function of those values that there are."""
    given = [(value, spec) for value, spec in zip(values, specs, strict=True) if value is not None]
    made = iter(function.apply([spec for _, spec in given], *(value for value, _ in given)) if given else ())
    return [None if value is None else next(made) for value in values]
