"""What has to be done with the parts that leave a forward, by its outputs or in its modules. Layer 3."""

from collections.abc import Collection, Iterator
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import pytree
from shardfn.core.compute_axes import Adjustments
from shardfn.core.engine.blanks import tensors_in
from shardfn.core.engine.numbering import Numbers
from shardfn.core.engine.paired import Size, local_of, of_world, whole_of
from shardfn.core.engine.tags import Problem, Tag
from shardfn.core.engine.variance import Variance
from shardfn.core.parts import Part

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
