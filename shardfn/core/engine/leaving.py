"""What has to be done with the parts that leave a forward, by its outputs or in its modules. Layer 3."""

from collections.abc import Collection
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import pytree
from shardfn.core.engine.blanks import tensors_in
from shardfn.core.engine.tags import Problem, Tag
from shardfn.core.engine.variance import Variance
from shardfn.core.parts import Part

_PLAIN = (Number, str, range, torch.dtype)


def check_kept(variance: Variance, values: Any, whole: Any) -> None:
    """Note what has to be done with the parts in values that modules keep after `apply`.

    `whole`: the same of a run with whole values.
    """
    _compare_numbers(variance, values, whole)
    _compare_origins(variance, values, whole, "is kept")
    if whole is not None and pytree.tree_structure(values) != pytree.tree_structure(whole):
        what = "the forward keeps something else than on one rank: control flow depends on sizes of this one"
        variance.findings.mixed.append(Problem(what, "sizes"))
    for tensor in tensors_in(values, depth=4):
        tag = variance.tag(tensor)
        for axis, part in tag.parts.items():
            if part.kind != "same":
                _check_output(variance, tag, axis, part, None, tuple(tensor.shape), ())
            elif tag.wants or tensor.requires_grad:
                what = (
                    f"a value of shape {tuple(tensor.shape)} that ranks of '{axis}' use in shares is kept, "
                    "where its gradient would be a part of a sum: return it, or detach it"
                )
                variance.findings.mixed.append(Problem(what, "gradient"))


def check_outputs(variance: Variance, output: Any, whole: Any, kept: Collection[str] = ()) -> None:
    """Note what has to be done with the parts that leave `apply`; modules in `kept` may leave theirs split.

    `whole`: what leaves a run with whole values.
    """
    _compare_numbers(variance, output, whole)
    _compare_origins(variance, output, whole, "leaves the forward")
    leaves, others = pytree.tree_leaves(output), pytree.tree_leaves(whole)
    if whole is not None and pytree.tree_structure(output) != pytree.tree_structure(whole):
        what = (
            "it returns something of another structure than on one rank: its control flow depends on sizes of this one"
        )
        variance.findings.mixed.append(Problem(what, "sizes"))
    for at, leaf in enumerate(leaves):
        other = others[at] if len(leaves) == len(others) else None
        expected = tuple(other.shape) if isinstance(other, Tensor) else None
        for inner, tensor in enumerate(tensors_in(leaf, depth=4)):
            tag = variance.tag(tensor)
            for axis, part in tag.parts.items():
                direct = isinstance(leaf, Tensor) and not inner
                shape = tuple(tensor.shape)
                if direct and tag.split_by and not tag.split_by <= set(kept) and _is_even_part(tag, axis):
                    if tag.source is None and tag.whole_shape(shape, variance.sizes) == expected:
                        variance.findings.joined.add((at, axis, part.dim))
                        continue
                _check_output(variance, tag, axis, part, at if direct else None, shape, kept)


def _compare_numbers(variance: Variance, values: Any, whole: Any) -> None:
    """Refuse numbers that outlive the forward, and are others than those of a run with whole values."""
    mine, others = pytree.tree_leaves(values), pytree.tree_leaves(whole)
    for value, other in zip(mine, others, strict=True) if len(mine) == len(others) else ():
        plain = isinstance(value, _PLAIN) and isinstance(other, _PLAIN)
        if plain and value != other and repr(value) != repr(other):  # NaN is not itself, and is as it should be
            what = f"{value!r} leaves the forward, which is {other!r} on one rank: it is made of this rank's sizes"
            variance.findings.mixed.append(Problem(what, "sizes"))


def _compare_origins(variance: Variance, values: Any, whole: Any, what: str) -> None:
    """Refuse tensors that outlive the forward, and are others than those of a run with whole values."""
    pairs = zip(pytree.tree_leaves(values), pytree.tree_leaves(whole), strict=False)
    for leaf, other in pairs if pytree.tree_structure(values) == pytree.tree_structure(whole) else ():
        if _kind(leaf) != _kind(other):
            why = f"{_kind(leaf)} {what}, which is {_kind(other)} on one rank: sizes of this one decide which"
            variance.findings.mixed.append(Problem(why, "sizes"))
            continue
        mine = [list(tensors_in(tree, depth=4)) for tree in (leaf, other)]
        if variance.differ(*mine):
            shapes = ", ".join(str(tuple(x.shape)) for x in mine[0])
            why = f"another value of shape {shapes} {what} than on one rank: sizes of this one decide which"
            variance.findings.mixed.append(Problem(why, "sizes"))


def _kind(leaf: Any) -> str:
    """What something is but for its values."""
    return f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"


def _is_even_part(tag: Tag, axis: str) -> bool:
    """Whether ranks have one piece each of a dim, in order, so that these can be joined."""
    part = tag.parts[axis]
    alone = all(other is part or not other.split or other.dim != part.dim for other in tag.parts.values())
    return alone and part.alone and len(part.runs) == 1 and part.runs[0][0] == 1


def _check_output(
    variance: Variance, tag: Tag, axis: str, part: Part, at: int | None, shape: tuple[int, ...], kept: Collection[str]
) -> None:
    found = variance.findings
    asked = bool(tag.split_by) and tag.split_by <= set(kept)
    if asked and part.alone and at is not None:
        found.kept.add((at, axis, part.dim))
    elif asked:
        modules = ", ".join(sorted(tag.split_by))
        what = (
            f"{modules}: Policy.acts leaves its output split over '{axis}', and what is made of it within the model "
            f"is not the same as of the whole output ({part.why or part.kind})"
        )
        found.mixed.append(Problem(what, "acts", tag.split_by))
    elif tag.by_acts and part.alone and at is not None:
        found.joined.add((at, axis, part.dim))
    elif tag.by_acts:
        found.whole |= tag.by_acts
    elif part.kind == "same" and at is not None:
        found.shared.add((at, axis))
    elif tag.split_by:
        found.gather |= tag.split_by
    else:
        why = f": {part.why}" if part.why else ""
        why += f" (in {part.where!r})" if part.where else ""
        kind = part.cure if part.kind == "lost" else "sums" if part.kind == "sum" else "rules"
        what = f"an output of shape {shape} differs over '{axis}' ({part.kind}){why}"
        found.mixed.append(Problem(what, kind, at=part.where or ""))
