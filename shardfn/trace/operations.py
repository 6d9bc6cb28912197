"""What a rule is given and returns, the table of rules, and what most operations share.

A rule looks at one mesh axis. It is given an operation whose inputs may be parts, and says which parts its results are,
or raises `NotRankByRank` when the operation, done rank by rank, is not the operation on the whole values. An operation
without a rule loses the part.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from shardfn import _torch
from shardfn.layout import SAME, SUM, NotRankByRank, Part, Tag, even
from shardfn.trace.meta_values import leaves_of

Parts = list["Part | None"]
Shapes = tuple[tuple[int, ...], ...]

# What moves elements, and does not change them.
MOVES = set(
    "expand unsqueeze squeeze transpose permute t slice select narrow split split_with_sizes unsafe_split unbind "
    "repeat alias detach lift_fresh cat stack empty empty_like zeros ones full arange scalar_tensor copy_ _to_copy "
    "clone contiguous view _unsafe_view _reshape_alias reshape".split()
)

_CUTS = {"slice", "narrow"}
# Arguments that are sizes, or cut along a dim: the shapes of results tell whether they fit.
_SIZES = set(
    "size shape sizes split_size split_sizes repeats storage_offset output_size group N C HxW length "
    "normalized_shape num_classes self_size input_sizes".split()
)


class Operation(NamedTuple):
    """One call of an operation on one rank, seen from an axis of `size` ranks.

    `tags` has what is known of its inputs, `zeros` those that hold nothing but zeros, both by their identity. `whole`
    has the shapes of its results in the run with whole values, when the same call was found there. `padded` has sizes
    of factors there, and as they are stored.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[Tensor]
    inputs: Sequence[Tensor]  # the tensors among the arguments, also those in lists
    tags: Mapping[int, Tag]
    zeros: Collection[int]
    pointwise: bool
    whole: Shapes | None
    padded: Collection[tuple[int, int]]
    axis: str
    size: int

    def given(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by its place or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    def part(self, x: Tensor) -> Part | None:
        """What a tensor is over the axis."""
        return self.tags[id(x)].parts.get(self.axis)

    def split(self, x: Tensor) -> Part | None:
        """The part of a tensor of which each rank has a piece; None of any other."""
        part = self.part(x)
        return part if part is not None and part.split else None

    def sums_up(self, value: Any) -> bool:
        """Whether a value is a pending sum, or nothing but zeros, which are one of zeros."""
        return (self.part(value) == SUM or id(value) in self.zeros) if isinstance(value, Tensor) else value == 0

    def adds_padding(self, x: Tensor, dim: int, part: Part) -> bool:
        """Whether a dim that ranks split may be padded, with anything there by now: a sum over it would count that.

        A weight, moved at most, is zero in padding.
        """
        size = x.shape[dim] * self.size // part.share
        return not self.tags[id(x)].weight and any(
            size and (size % stored == 0 or (stored % size == 0 and true % (stored // size) == 0))
            for true, stored in self.padded
        )


def is_stored(here: int, whole: int, padded: Collection[tuple[int, int]]) -> bool:
    """Whether a size is one that one process has, or that as it is stored with padding."""
    return here == whole or any(here * true == whole * stored for true, stored in padded)


OpRule = Callable[[Operation], "Part | Parts | None"]
RULES: dict[str, OpRule] = {}


def lose_if(wrong: object, why: str) -> None:
    """End a rule: what ranks do is not the operation on the whole values.

    Raises:
        NotRankByRank: something is wrong.
    """
    if wrong:
        raise NotRankByRank(why)


def rule_for(*names: str) -> Callable[[OpRule], OpRule]:
    """Of operations of these names, each of which may be several."""

    def keep(rule: OpRule) -> OpRule:
        RULES.update(dict.fromkeys(" ".join(names).split(), rule))
        return rule

    return keep


# -- what is made of nothing, or of values that all ranks share -------------------------------------------------------

_NEW = "new_zeros new_ones new_full new_empty"
_FILLS = set(f"zeros ones full empty empty_strided expand repeat {_NEW}".split())


def made_here(operations: Mapping[str, Operation]) -> dict[str, Parts]:
    """Shared values make shared ones, unless sizes of this rank are in it; by the axis that sizes fit."""
    parts = {axis: [filled_part(op, at) for at in range(len(op.results))] for axis, op in operations.items()}
    return next(({axis: fits} for axis, fits in parts.items() if any(fits)), {})


def _copies_one(op: Operation, dim: int) -> bool:
    """Whether `repeat` makes a dim of its result of copies of one element."""
    before = dim - op.results[0].dim() + op.args[0].dim()
    return before < 0 or op.args[0].shape[before] == 1


def filled_part(op: Operation, at: int = 0) -> Part | None:
    """A part of a value that is alike everywhere along the dim that differs."""
    if op.whole is None or op.name not in _FILLS or len(op.whole[at]) != op.results[at].dim():
        return None
    shape, whole = op.results[at].shape, op.whole[at]
    other = [dim for dim in range(len(shape)) if shape[dim] != whole[dim]]
    if len(other) != 1 or not shape[other[0]] or (op.name == "repeat" and not _copies_one(op, other[0])):
        return None
    size = shape[other[0]]
    for stored in (whole[other[0]], *(stored for true, stored in op.padded if true == whole[other[0]])):
        share, rest = divmod(op.size, max(stored // size, 1))  # neighbours may have the same head
        if stored % size == 0 and share and not rest:
            return replace(even(other[0], size), share=share)
    return None


rule_for(_NEW)(filled_part)


# -- element by element -----------------------------------------------------------------------------------------------

_LINEAR = {"mul", "div", "neg", "_to_copy", "clone", "detach", "alias", "positive", "lift_fresh", "copy"}


def pointwise(op: Operation) -> Part | None:
    ndim = max((x.dim() for x in op.results), default=0)
    varied = [(x, part) for x in op.inputs if (part := op.part(x)) is not None]
    if any(part.kind == "sum" for _, part in varied):
        return _of_sums(op, [part for _, part in varied])
    splits = one_copy({part.shifted(ndim - x.dim()) for x, part in varied if part.split})
    lose_if(len(splits) != 1, f"{op.name} joins values that are split over different dims, or in different pieces")
    (split,) = splits
    for x in op.inputs:
        for dim in (split.dim, split.second):
            at = -1 if dim is None else dim - (ndim - x.dim())
            if at >= 0 and x.shape[at] != 1 and op.split(x) is None:
                why = f"joins a value whose dim {dim} is split with one of shape {tuple(x.shape)}, which is not"
                raise NotRankByRank(f"{op.name} {why}")
    return split


def one_copy(parts: set[Part]) -> set[Part]:
    """Parts of the same pieces, of which some are shared by neighbours, as not shared.

    Keys of grouped queries are repeated for the queries of a group, but not on a rank that has one of these. Whether
    that holds here, the shape of the whole result tells.
    """
    alike = {replace(part, share=1, dim=0, second=None) for part in parts}
    return {replace(part, share=1, second=None) for part in parts} if len(parts) > 1 and len(alike) == 1 else parts


def _of_sums(op: Operation, parts: Sequence[Part]) -> Part:
    sums = [part for part in parts if part.kind == "sum"]
    name = op.name.rstrip("_")
    if name in ("add", "sub") and len(sums) == len(op.inputs) == 2:
        return SUM
    if name in ("where", "masked_fill"):
        mask, *values = op.args if name == "where" else (op.args[1], op.args[0], op.args[2])
        if op.part(mask) in (None, SAME) and all(map(op.sums_up, values)):
            return SUM
    if name in _LINEAR and len(sums) == 1 and not any(part.split for part in parts):
        if name != "div" or (op.part(op.args[0]) == SUM and op.kwargs.get("rounding_mode") is None):
            return SUM
    raise NotRankByRank(f"{op.name} of a sum that is still pending")


def takes_back_a_sum(op: Operation) -> bool:
    """Whether it is the backward of an operation, which is linear in its first argument, on a pending sum."""
    back = op.name.endswith(("_backward", "_backward_data"))
    return back and op.part(op.args[0]) == SUM and all(op.part(x) in (None, SAME) for x in op.inputs[1:])


rule_for(  # written in place they do not have torch's tag
    "_prelu_kernel masked_fill where add sub mul div addcmul addcdiv hardswish log_sigmoid_forward "
    "log_sigmoid_backward floor_divide lerp pow clamp"
)(pointwise)


# -- products ---------------------------------------------------------------------------------------------------------

# The dims of two factors, and of their product.
PRODUCTS = {"mm": "mk,kn->mn", "bmm": "bmk,bkn->bmn", "mv": "mk,k->m", "dot": "k,k->", "_grouped_mm": "sk,ekn->sn"}
# What adds a tensor to one, and which.
ADDED_TO = {"addmm": PRODUCTS["mm"], "baddbmm": PRODUCTS["bmm"], "addmv": PRODUCTS["mv"]}


@rule_for("nll_loss_forward")
def _nll(op: Operation) -> Part | None:
    raise NotRankByRank("a loss over values of which each rank has a part")


class CallInOneProcess(NamedTuple):
    """An operation in one process: its name, what it was given, and the shapes of its results."""

    name: str
    given: tuple[Any, Any]
    shapes: Shapes

    @staticmethod
    def name_of(func: Any) -> str | None:
        """What an operation is called where those of two sides are compared; None for a copy, which some views need."""
        name = _torch.base_name(func).removeprefix("_unsafe_")
        return None if name == "clone" else name


def numbers_agree(func: Any, mine: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether the numbers among the arguments, but for sizes, are alike on both sides."""
    name = _torch.base_name(func)
    sizes = _SIZES | {"start", "end"} if name in _CUTS else _SIZES if name != "as_strided" else set[str]()
    named, whole = _torch.named_arguments(func, *mine), _torch.named_arguments(func, *other)
    more = {"stride"} if "size" in named else {"groups"} if "weight" in named else set[str]()
    for key in named.keys() - sizes - more:
        pairs = zip(leaves_of(named[key]), leaves_of(whole[key]), strict=False)
        if any(not isinstance(a, Tensor) and a is not b and a != b and repr(a) != repr(b) for a, b in pairs):
            return False
    if name not in _CUTS:
        return True
    (start, size), (expected, of_whole) = _start(named), _start(whole)
    return start == expected if named.get("step", 1) != 1 else start * of_whole == expected * size


def _start(cut: Mapping[str, Any]) -> tuple[int, int]:
    """Where a cut with these arguments begins, and the size of the dim along which it is made."""
    size, begin = cut["self"].shape[cut.get("dim", 0)], cut.get("start") or 0
    return min(max(begin + (size if begin < 0 else 0), 0), size), size
