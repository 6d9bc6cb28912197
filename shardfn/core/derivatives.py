"""Forward-mode, reverse-mode and second derivatives with respect to trees of shards. Layer 4.

Trees are lowered (see lowering.py) and given to `torch.func`. Inside, `apply` gathers a unit when it is used, and every
collective has a derivative in both directions.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import (
    differentiated_in_transform,
    in_transform,
    prepare_forward_mode,
    pytree,
    refuse_forward_mode,
)
from shardfn.core.errors import ShardError, raise_problems
from shardfn.core.foreign import ours_only
from shardfn.core.forward_mode import FORWARD_MODE, FORWARD_MODE_DIFFERENTIATED, ByFormulas
from shardfn.core.lowering import entered, is_tree, left
from shardfn.core.transforms import grad, of_dtensors, plain_gradient, unused
from shardfn.core.underway import in_forward_mode, is_under_way


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
        `(value, tangent)`, or `(value, tangent, aux)`: of this data rank, not averaged.

    Raises:
        ShardError: tangents of other names, shapes or layouts.
        TypeError: primals or tangents are no tuples.

    Communication: that of `func`, each collective twice: for the values and for the tangents.
    """
    _require_tuples("jvp", primals, tangents)
    inner = _entered_alike("jvp", primals, tangents)
    checked = _using("jvp", func, primals, has_aux)
    with (
        _by_formulas(),
        of_dtensors("jvp", "Pass the tree to sf.jvp as an argument too, with zeros as its tangent"),
    ):
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
    with of_dtensors("vjp"):
        value, pull, *aux = torch.func.vjp(checked, *inner, has_aux=has_aux)

    def pulled(cotangents: Any) -> Any:
        with of_dtensors("vjp"):
            flat, structure = pytree.tree_flatten(left(pull(entered("vjp", cotangents))))
        pairs = zip(pytree.tree_leaves(primals), flat, strict=True)
        return pytree.tree_unflatten([plain_gradient(leaf, found) for leaf, found in pairs], structure)

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
        a tree like `params`: the product with the Hessian of the loss averaged over the data axes.

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
    leaves = sum(len(x) for x in pytree.tree_leaves(primals, is_leaf=is_tree) if is_tree(x))
    if in_transform() or is_under_way() or not leaves:
        return checked

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = checked(*args, **kwargs)
        results = pytree.tree_leaves(out[0] if has_aux else out)
        tensors = [x for x in results if isinstance(x, Tensor)]  # of split logits something else is said
        if all(type(x) is Tensor and not differentiated_in_transform(x) for x in tensors):
            raise unused(verb, leaves)
        return out

    return call


@refuse_forward_mode
def _no_forward_mode() -> ShardError:
    return ShardError(
        "torch.func.jvp cannot take DTensors, nor can what is made of it (jacfwd, hessian, linearize): use sf.jvp or "
        "sf.hvp, which take trees of shards"
    )


def _require_tuples(verb: str, *values: Any) -> None:
    for value in values:
        if not isinstance(value, tuple):
            raise TypeError(
                f"{verb}: primals and tangents are tuples, one entry an argument, not {type(value).__name__}"
            )


def _entered_alike(verb: str, primals: Any, tangents: Any) -> Any:
    """What forward mode gets of primals and their tangents, which are alike."""
    prepare_forward_mode()
    if not in_transform():
        _require_alike(verb, primals, tangents)
    inner = entered(verb, (primals, tangents))
    if in_transform():  # where a tree may come from outside, and another one not
        _require_alike(verb, *inner)
    return inner


def _require_alike(verb: str, primals: Any, tangents: Any) -> None:
    """Check that a direction has the structure, the shapes and the layouts of what it is a direction of."""
    trees, others = ([x for x in pytree.tree_leaves(t, is_leaf=is_tree) if is_tree(x)] for t in (primals, tangents))
    for tree, other in zip(trees, others, strict=False):
        problems = [f"the tangent has no leaf {name!r}" for name in tree if name not in other]
        problems += [f"the tangent has a leaf {name!r}, which the primal has not" for name in other if name not in tree]
        problems += [
            f"the tangent of {name!r} has shape {tuple(other[name].shape)}, the primal {tuple(leaf.shape)}"
            for name, leaf in tree.items()
            if name in other and other[name].shape != leaf.shape
        ]
        raise_problems(verb, [] if in_transform() and tree.plan != other.plan else problems[:5])
        if tree.plan != other.plan:
            raise ShardError(
                f"{verb}: the tangent has another layout than the primal; sf.reshard it"
                f"{', or pass it to sf.vmap as the primal is' * in_transform()}\n{tree.plan.diff(other.plan)}"
            )
    flat, structure = pytree.tree_flatten(primals)
    others, other_structure = pytree.tree_flatten(tangents)
    if structure != other_structure:
        seen, wanted = (pytree.tree_map(lambda x: type(x).__name__, t, is_leaf=is_tree) for t in (tangents, primals))
        raise ShardError(f"{verb}: tangents have another structure than primals: {seen} and {wanted}")
    for x, tangent in zip(flat, others, strict=True):
        if isinstance(x, Tensor) and isinstance(tangent, Tensor) and x.shape != tangent.shape:
            raise ShardError(f"{verb}: a tangent has shape {tuple(tangent.shape)}, its primal {tuple(x.shape)}")
