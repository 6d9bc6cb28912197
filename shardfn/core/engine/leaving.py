"""How a run without data ends: parts that leave it, by outputs or in modules; what users' backwards get. Layer 3.

[Note: backwards of users]
Where ranks use a shared value in shares, the gradient of each is a part of a sum, which is added up where the value
comes from. What torch's own operations do with it on the way there is linear, so that the sum is the same. The backward
of an `autograd.Function` may be anything. So it runs without data, on a gradient that is a pending sum, by the rules
that forwards follow: a clamp of it is lost.
"""

from collections.abc import Collection, Iterator
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import blank_gradients, has_hooks, outside_dispatch, pytree, ran_backward, users_backward
from shardfn.core.collectives import watched
from shardfn.core.compute_axes import Adjustments
from shardfn.core.engine.numbering import Numbers
from shardfn.core.engine.paired import Size, local_of, of_world, whole_of
from shardfn.core.engine.tags import Problem, Tag
from shardfn.core.engine.values import tensors_in, tensors_of
from shardfn.core.engine.variance import Variance
from shardfn.core.parts import SUM, Part

_AXIS = ""  # any
_PLAIN = (Number, str, range, torch.dtype)


def check_kept(variance: Variance, values: Any) -> None:
    """Note what has to be done with the parts in values that modules keep after `apply`."""
    _check_numbers(variance, values)
    for tensor in tensors_in(values, depth=4):
        tag, shape = variance.tag(tensor), tuple(local_of(tensor).shape)
        for axis, part in tag.parts.items():
            if part.kind != "same":
                _check_output(variance, tag, axis, part, None, shape, ())
            elif tag.wants or tensor.requires_grad:
                what = (
                    f"a value of shape {shape} that ranks of '{axis}' use in shares is kept, "
                    "where its gradient would be a part of a sum: return it, or detach it"
                )
                variance.problems.append(Problem(what, "gradient"))


def check_outputs(variance: Variance, output: Any, kept: Collection[str] = ()) -> None:
    """Note what has to be done with the parts that leave `apply`; modules in `kept` may leave theirs split."""
    _check_numbers(variance, output)
    for at, leaf in enumerate(pytree.tree_leaves(output)):
        for inner, tensor in enumerate(tensors_in(leaf, depth=4)):
            tag, shape, expected = variance.tag(tensor), tuple(local_of(tensor).shape), tuple(whole_of(tensor).shape)
            for axis, part in tag.parts.items():
                direct = isinstance(leaf, Tensor) and not inner
                if direct and tag.split_by and not tag.split_by <= set(kept) and _is_even_part(tag, axis):
                    if tag.source is None and tag.whole_shape(shape, variance.sizes) == expected:
                        variance.found |= Adjustments(joined={(at, axis, part.dim)})
                        continue
                _check_output(variance, tag, axis, part, at if direct else None, shape, kept)


def _check_numbers(variance: Variance, values: Any) -> None:
    """Refuse sizes of this rank that outlive the forward."""
    for leaf in pytree.tree_leaves(values):
        for size in leaf if isinstance(leaf, tuple) else (leaf,):
            if type(size) is Size:
                rank, one = size.node.rank, size.node.one
                what = f"{rank!r} leaves the forward, which is {one!r} on one rank: it is made of this rank's sizes"
                variance.problems.append(Problem(what, "sizes"))


def same_values(mine: tuple[Numbers, Any], other: tuple[Numbers, Any]) -> bool:
    """Whether two runs leave the same values of a rank."""
    leaves, others = ([*_described(numbers, tree)] for numbers, tree in (mine, other))
    return leaves == others


def _described(numbers: Numbers, tree: Any) -> Iterator[Any]:
    leaves, structure = pytree.tree_flatten(tree)
    yield structure
    for leaf in leaves:
        tensors = [*tensors_in(leaf, depth=4)]
        yield [(numbers.of(x), tuple(local_of(x).shape), x.dtype, x.requires_grad) for x in tensors]
        if not tensors:
            yield type(leaf), repr(of_world(leaf, "rank")) if isinstance(leaf, _PLAIN) else None


def _is_even_part(tag: Tag, axis: str) -> bool:
    """Whether ranks have one piece each of a dim, in order, so that these can be joined."""
    part = tag.parts[axis]
    return part.is_even and all(
        other is part or not other.split or other.dim != part.dim for other in tag.parts.values()
    )


def _check_output(
    variance: Variance, tag: Tag, axis: str, part: Part, at: int | None, shape: tuple[int, ...], kept: Collection[str]
) -> None:
    asked = bool(tag.split_by) and tag.split_by <= set(kept)
    if asked and part.alone and at is not None:
        variance.found |= Adjustments(kept={(at, axis, part.dim)})
    elif asked:
        modules = ", ".join(sorted(tag.split_by))
        what = (
            f"{modules}: Policy.acts leaves its output split over '{axis}', and what is made of it within the model "
            f"is not the same as of the whole output ({part.why or part.kind})"
        )
        variance.problems.append(Problem(what, "acts", tag.split_by))
    elif tag.by_acts and part.alone and at is not None:
        variance.found |= Adjustments(joined={(at, axis, part.dim)})
    elif tag.by_acts:
        variance.found |= Adjustments(whole=tag.by_acts)
    elif part.kind == "same" and at is not None:
        variance.found |= Adjustments(shared={(at, axis)})
    elif tag.split_by:
        variance.found |= Adjustments(gather=tag.split_by)
    else:
        why = f": {part.why}" if part.why else ""
        why += f" (in {part.where!r})" if part.where else ""
        kind = part.cure if part.kind == "lost" else "sums" if part.kind == "sum" else "rules"
        what = f"an output of shape {shape} differs over '{axis}' ({part.kind}){why}"
        variance.problems.append(Problem(what, kind, at=part.where or ""))


def check_backwards(variance: Variance, output: Any) -> None:
    """Note what users' backwards make of parts of gradients; the forward has ended, see [Note: backwards of users]."""
    variance.note_backwards(tensors_of(pytree.tree_leaves(output)))
    for x, path in variance.with_backwards.values():
        axes = ", ".join(axis for axis, part in variance.tag(x).parts.items() if part.in_shares)
        if why := why_not_linear(x):
            with variance.inside(path):
                variance.refuse(f"each rank of '{axes}' has a part of a gradient, and {why}", "backward")


def acts_on_gradient(x: Tensor) -> bool:
    """Whether something of the user's is given the gradient of x that may not be given a part of it."""
    return has_hooks(x) or bool(why_not_linear(x))


def why_not_linear(x: Tensor) -> str:
    """Why what a user wrote may not be given parts of the gradient of x; empty when it may, or there is nothing."""
    function = users_backward(x)
    if function is None:
        return ""
    name, run = function.__qualname__, Variance({_AXIS: 2}, "rank")
    grads = blank_gradients(x)
    for grad in grads:
        run.mark(grad, Tag({_AXIS: SUM}))
    try:
        with outside_dispatch(), torch.no_grad(), watched(run.note_collective), run.worlds.run(), run:
            found = tensors_of(ran_backward(x, grads))
    except Exception as error:
        return f"the backward of {name} cannot be run without data ({error})"
    parts = [run.tag(grad).parts.get(_AXIS) for grad in found if not run.is_zero(grad)]
    why = next((part.why if part is not None else "it adds numbers to it" for part in parts if part != SUM), None)
    return "" if why is None else f"the backward of {name} is not linear in it ({why})"
