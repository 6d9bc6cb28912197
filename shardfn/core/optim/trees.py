"""Trees that optimizers work on: which leaves take part, and whether two trees go together. Layer 4."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfn._torch import in_transform, same_layouts, unwrap_local, unwrap_locals, with_local
from shardfn.core.errors import ShardError, did_you_mean, raise_problems
from shardfn.core.pattern import first_match, matches
from shardfn.core.tree import Params, leaves
from shardfn.core.underway import is_differentiated

Tree: TypeAlias = Any  # Params, or a plain dict of tensors


def trainable(params: Tree) -> list[str]:
    """Names of the leaves that an optimizer updates."""
    dtypes = list(map(attrgetter("dtype"), unwrap_locals(list(params.values()))))
    names = list(params)
    if not all(map(_trains, set(dtypes))):
        names = list(compress(names, map(_trains, dtypes)))
    known = params.plan.leaves if isinstance(params, Params) else {}
    return [name for name in names if name not in known or known[name][0].trainable] if known else names


def _trains(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def leaves_of(tree: Tree, names: Sequence[str]) -> list[Any]:
    """The leaves of these names, None for one that is missing."""
    return list(tree.values()) if list(tree) == names else [tree.get(name) for name in names]


def model_names(params: Tree, name: str) -> tuple[str, ...]:
    """What the model calls a stored leaf: `wqkv.weight[q]` is part of `wqkv.weight`; tied names are all of them."""
    if isinstance(params, Params) and name in params.plan.leaves:
        layout = params.plan.leaves[name][0]
        return layout.names
    return (name,)


pattern_of = lru_cache(maxsize=2**16)(first_match)


def like(params: Tree, leaves: Mapping[str, Tensor]) -> Tree:
    """Other leaves in a tree of the same kind."""
    return params.like(leaves) if isinstance(params, Params) else dict(leaves)


def slot_like(params: Tree, leaves: Mapping[str, Tensor]) -> Tree:
    """A tree of state: like the parameters', without the model's buffers."""
    return Params(leaves, params.plan, params.mesh) if isinstance(params, Params) else dict(leaves)


def require_tree(verb: str, what: str, tree: object) -> Mapping[str, Tensor]:
    if not isinstance(tree, Mapping):
        raise TypeError(
            f"{verb}: {what} is a {type(tree).__name__}; expected what sf.shard makes, or a dict of tensors"
        )
    return tree


def require_tensors(verb: str, params: Tree) -> None:
    for name, leaf in require_tree(verb, "params", params).items():
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{verb}: params[{name!r}] is a {type(leaf).__name__}; a tree is flat, name -> tensor; trees of "
                "several models have an optimizer each"
            )


def require_some(verb: str, params: Tree) -> None:
    """An optimizer without anything to do is a mistake: most often a mapping of plain tensors was sharded."""
    if len(params) and not trainable(params):
        raise ShardError(
            f"{verb}: none of {len(params)} parameters trains: integers, or requires_grad=False in the model. "
            f"sf.shard takes a mapping's word for it too: write nn.Parameter(tensor) there."
        )


def other_state(verb: str, state: object, init: str) -> TypeError:
    return TypeError(f"{verb}: the state is a {type(state).__name__}, not what {init} returns")


def dead_patterns(patterns: Iterable[str], params: Tree) -> Iterator[str]:
    """What is wrong with patterns that match no parameter."""
    names = [model_name for name in params for model_name in model_names(params, name)]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            yield f"{pattern!r} matches no parameter{did_you_mean(pattern, names) or '.'}"


def require_outside(verb: str, params: Tree, grads: Tree) -> None:
    """A step in place has no derivative."""
    if is_differentiated(leaf for tree in (params, grads) for leaf in leaves(tree)):
        raise ShardError(
            f"{verb} works in place and has no derivative, and the loss or transform around it asks for one. Write "
            "updates, state = optimizer.update(grads, state, params) and sf.optim.apply_updates(params, updates)"
        )


def require_match(verb: str, what: str, params: Tree, names: Sequence[str], other: Tree) -> None:
    """Check that `other` has a leaf of the parameter's layout for every name, and none that is no parameter."""
    require_tree(verb, "params", params)
    have = require_tree(verb, what, other)
    if isinstance(have, Params) and have.plan.reduction is None and what == "grads":
        if any(have.plan.axes[axis] > 1 for axis in have.plan.roles.data):
            raise ShardError(f"{verb}: grads come from reduce=None and were not reduced; call sf.reduce_grads first")
    if not in_transform() and _fits(params, names, have):
        return
    problems = [f"{what} has no leaf {name!r}{did_you_mean(name, have)}" for name in names if name not in have]
    unknown = [name for name in have if name not in params]
    problems += [f"{what} has {name!r}, which is no parameter{did_you_mean(name, params)}" for name in unknown]
    if not in_transform():  # where DTensors are wrapped, so that nothing of them can be read
        pairs = [(name, params[name], have[name]) for name in names if name in have and name in params]
        problems += [f"{what}[{name!r}] {why}" for name, param, leaf in pairs if (why := _mismatch(param, leaf))]
    elif isinstance(params, Params) and isinstance(have, Params):
        known = [name for name in names if name in have and name in params.plan.leaves and name in have.plan.leaves]
        layouts = [(name, *(tree.plan.leaves[name][1] for tree in (params, have))) for name in known]
        problems += [
            f"{what}[{name!r}] has layout {other.rule}, the first {own.rule}; sf.reshard one of the trees before, and "
            "pass trees from outside of a vmap to sf.vmap too, with None in in_dims"
            for name, own, other in layouts
            if own != other
        ]
    shown = problems[:5] + [f"and {len(problems) - 5} more"] * (len(problems) > 5)
    raise_problems(verb, shown)


def _fits(params: Tree, names: Sequence[str], have: Mapping[str, Tensor]) -> bool:
    """Whether there is nothing to complain about, as far as can be told fast."""
    known = len(have) == len(names) or have.keys() <= params.keys()
    return known and same_layouts(leaves_of(params, names), leaves_of(have, names))


def _mismatch(param: Tensor, leaf: object) -> str | None:
    """Why a leaf cannot be combined with its parameter."""
    if not isinstance(leaf, Tensor):
        return f"is {leaf!r}, not a tensor; write zeros for a parameter that was not used"
    if leaf.shape != param.shape:
        return f"has shape {tuple(leaf.shape)}, the parameter {tuple(param.shape)}"
    if not isinstance(param, DTensor) or not isinstance(leaf, DTensor):
        if isinstance(param, DTensor) == isinstance(leaf, DTensor):
            return None
        return (
            f"is {kind_of(leaf)}, the parameter is {kind_of(param)}; sf.reduce_grads(grads, like=params) makes DTensors"
        )
    if leaf.placements == param.placements and (
        leaf.device_mesh is param.device_mesh or leaf.device_mesh == param.device_mesh
    ):
        return None
    if any(placement.is_partial() for placement in leaf.placements):
        return "is a sum that is still pending; call sf.reduce_grads first"
    return f"has the layout {leaf.placements}, the parameter {param.placements}; sf.reshard one of the trees"


def kind_of(leaf: Tensor) -> str:
    return "a DTensor" if isinstance(leaf, DTensor) else "a plain tensor"


def views(*trees: Tree, names: Sequence[str]) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """How to compute on leaves, and to wrap a result like a parameter; see [Note: where a derivative flows]."""
    leaves = [tree[name] for tree in trees for name in names if name in tree]
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    flows = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    if flows or len(sharded) < len(leaves):
        return lambda leaf: leaf, lambda param, result: result
    return unwrap_local, with_local
