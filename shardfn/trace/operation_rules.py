"""A rule for each operation of torch, by its name as it is dispatched: what it makes of parts.

Operations along dims (softmax, sorts, reductions, shifts, pools) are rows of `_ALONG`. What torch tags pointwise needs
nothing here (`operations.pointwise`); every other operation has a function.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import le
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.layout import SAME, SUM, NotRankByRank, Part, even, has_derivatives, in_two_dims, reshaped, sliced
from shardfn.trace import operations
from shardfn.trace.operations import RULES, Operation, OpRule, Parts, is_stored, lose_if, one_copy, pointwise, rule_for


def parts_after(op: Operation) -> Parts:
    """The parts of the results of an operation; where nothing but shared values is given, rules need not tell."""
    known = [op.part(x) for x in op.inputs]
    if (gone := next((part for part in known if part is not None and part.kind == "lost"), None)) is not None:
        return [gone] * len(op.results)
    try:
        if operations.takes_back_a_sum(op):
            return [SUM] * len(op.results)
        rule = RULES.get(op.name) or RULES.get(op.name.rstrip("_")) or (pointwise if op.pointwise else None)
        if rule is None:
            raise NotRankByRank(f"nothing is known of {op.name} on split values")
        in_two = any(part is not None and part.second is not None for part in known)
        why = f"nothing is known of {op.name} on values of which two dims are split"
        lose_if(in_two and rule not in _FOR_TWO_DIMS, why)
        made = rule(op)
        parts = made if isinstance(made, list) else [made] * len(op.results)
        sums = {x.dtype for x, part in zip(op.results, parts, strict=True) if part == SUM}
        rounds = any(op.part(x) == SUM and has_derivatives(x.dtype) for x in op.inputs)
        whole = torch.bool in sums or (rounds and not all(map(has_derivatives, sums)))
        lose_if(whole, "whole numbers or truth values are made of a sum that is still pending")
    except NotRankByRank as lost:
        if all(part in (None, SAME) for part in known):
            return [SAME] * len(op.results)  # every rank does the same to the same values
        return [Part("lost", why=str(lost), cure="sums" if SUM in known else "whole")] * len(op.results)
    return parts


@rule_for("detach", "alias", "clone", "lift_fresh", "contiguous", "_conj", "_to_copy", "bernoulli", "native_dropout")
def _identity(op: Operation) -> Part | None:
    part, nonlinear = op.part(op.args[0]), op.name.rstrip("_") in ("bernoulli", "native_dropout")
    lose_if(part == SUM and nonlinear, f"{op.name} of a sum that is still pending")
    return part


@rule_for("fill zero zeros_like ones_like full_like empty_like rand_like randn_like randint_like")
def _filled(op: Operation) -> Part | None:
    varies = any(op.part(x) is not None for x in op.inputs[1:])
    lose_if(varies, "a tensor is filled with a value that differs between ranks")
    return op.split(op.args[0])


@rule_for("copy_")
def _copied(op: Operation) -> Part | None:
    old, source = map(op.part, op.args[:2])
    if source is None:
        lose_if(old is not None and old.split and op.args[1].dim(), "a shared value is written into a split one")
        return None if old == SUM else old
    return source if not source.split else source.at(source.dim + op.results[0].dim() - op.args[1].dim())


# -- views ------------------------------------------------------------------------------------------------------------


def _one(op: Operation) -> Part:
    """The part of the first argument, when it varies, and all have the same others."""
    part = op.part(op.args[0])
    if part is None or any(op.part(x) not in (None, SAME) for x in op.inputs if x is not op.args[0]):
        raise NotRankByRank(f"{op.name} by values that differ between ranks")
    return part


def _moving(move: Callable[[Operation, Part], "Part | Parts"]) -> OpRule:
    """A rule for operations that are linear and move elements of their first argument.

    Of a shared value there may be as many copies as a rank has of what they are for.
    """

    def rule(op: Operation) -> "Part | Parts | None":
        part = _one(op)
        return move(op, part) if part.split else (operations.filled_part(op) if part == SAME else None) or part

    return rule


@rule_for("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten")
def _view(op: Operation) -> "Part | Parts | None":
    lose_if(op.results[0].dtype != op.args[0].dtype, "the bits of values are taken for another dtype")
    return _viewed(op)


def _stored(whole: tuple[int, ...], padded: Collection[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """A shape on one rank, and what it is where one of its dims is padded."""
    yield whole
    for true, stored in padded:
        for dim, size in enumerate(whole):
            if true and size * stored % true == 0:
                yield (*whole[:dim], size * stored // true, *whole[dim + 1 :])


@_moving
def _viewed(op: Operation, part: Part) -> Part:
    shape, new, whole = op.args[0].shape, op.results[0].shape, op.whole[0] if op.whole is not None else ()
    ways = reshaped(replace(part, second=None), shape, new)
    # Padded queries meet the keys of others when these are for some ranks only.
    wholes = list(_stored(whole, op.padded if part.share in (1, op.size) else ()))
    fits = [way for way in ways if op.whole is None or way.whole_shape(new, op.size) in wholes]
    if part.second is None and fits:
        return fits[0]
    # Another axis may split another dim.
    whole_of = [(way, way.whole_shape(new, op.size)) for way in ways]
    ways = [way for way, shape in whole_of if any(all(map(le, shape, one)) for one in wholes)] or ways
    tried = (in_two_dims(part, shape, new, stored, op.size) for stored in wholes)
    in_two = next((two for two in tried if two is not None), None)
    if in_two is None and part.second is not None:
        raise NotRankByRank(f"a view of {tuple(shape)} as {tuple(new)} cuts between the parts of two dims")
    return in_two or ways[0]


@rule_for("t", "transpose", "permute", "numpy_T")
@_moving
def _permuted(op: Operation, part: Part) -> Part:
    numbered = torch.empty([*range(op.args[0].dim())], device="meta")  # each dim is as long as its number
    order = list(getattr(torch.ops.aten, op.name)(numbered, *op.args[1:]).shape)
    second = None if part.second is None else order.index(part.second)
    lose_if(second is not None and second < order.index(part.dim), f"{op.name} of two dims that are split")
    return replace(part, dim=order.index(part.dim), second=second)


@rule_for("expand", "broadcast_to")
@_moving
def _expanded(op: Operation, part: Part) -> Part:
    moved = part.shifted(op.results[0].dim() - op.args[0].dim())
    dim = moved.dim
    for before, after in ((part.dim, dim), (part.second, moved.second)):
        if before is not None and after is not None:
            lose_if(op.results[0].shape[after] != op.args[0].shape[before], "expand of a dim that is split")
    if part.share > 1 and part.second is None and op.whole is not None:
        # Keys of grouped queries, once for each query of this rank.
        shape, whole = op.results[0].shape, op.whole[0]
        later = range(dim + 1, len(shape))
        more = [d for d in later if shape[d] != whole[d] and is_stored(shape[d] * part.share, whole[d], op.padded)]
        if len(more) == 1:
            return replace(moved, second=more[0])
    return moved


@rule_for("repeat", "tile")
@_moving
def _repeated(op: Operation, part: Part) -> Part:
    dim = part.dim + op.results[0].dim() - op.args[0].dim()
    times = op.args[1][dim]
    lose_if(times != 1 and len(part.runs) > 1, "repeat of a fused dim")
    return replace(part, dim=dim, runs=tuple((outer * times, inner) for outer, inner in part.runs))


@rule_for("slice", "narrow")
@_moving
def _slice(op: Operation, part: Part) -> Part:
    x = op.args[0]
    dim = op.given(1, "dim", 0) % x.dim()
    if dim != part.dim or op.results[0].shape == x.shape:
        return part
    start, step, length = op.given(2, "start") or 0, op.given(4, "step", 1), op.results[0].shape[dim]
    start = max(start + x.shape[dim], 0) if start < 0 else start
    if step == 1:
        return sliced(part, start, length)
    # Every step-th of the whole is every step-th of each block, when it begins with one of the first.
    in_blocks = all(inner % step == 0 for _, inner in part.runs) and length * step == x.shape[dim]
    lose_if(not in_blocks, "a slice with steps of a dim that is split")
    return replace(part, runs=tuple((outer, inner // step) for outer, inner in part.runs))


@rule_for("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split")
@_moving
def _pieces(op: Operation, part: Part) -> Parts:
    dim = op.given(2, "dim", 0) % op.args[0].dim()
    if dim != part.dim:
        return [part] * len(op.results)
    lengths = [piece.shape[dim] for piece in op.results]
    return [sliced(part, start, length) for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False)]


@rule_for("cat", "stack")
def _joined(op: Operation) -> Part | None:
    tensors = [x for x in op.args[0] if x.numel() or x.dim() == op.results[0].dim()]
    known = [part for x in tensors if (part := op.part(x)) is not None]
    dim = op.given(1, "dim", 0) % op.results[0].dim()
    kinds = {part.kind for part in known}
    lose_if(len(known) < len(tensors), f"{op.name} of split values and values that all ranks share")
    if kinds != {"split"}:
        lose_if(len(kinds) != 1, f"{op.name} of values that are split and values that are not")
        return known[0]
    lose_if(len({part.dim for part in known}) > 1, f"{op.name} of values that are split over different dims")
    at, stacks = known[0].dim, op.name == "stack"
    if at == dim and not stacks and len({part.share for part in known}) == 1:
        return replace(known[0], runs=tuple(run for part in known for run in part.runs))
    lose_if(len({part.pieces for part in known}) > 1, f"{op.name} of values that are split in different pieces")
    return known[0].at(at + 1 if stacks and dim <= at else at)


def _contracted(op: Operation, labels: str, *operands: Tensor) -> Part | None:
    """A product such as "mk,kn->mn"."""
    inputs, out = labels.split("->")
    factors = [*zip(inputs.split(","), operands, strict=True)]
    kinds = [part.kind for x in operands if (part := op.part(x)) is not None]
    if not kinds:
        return None
    if "sum" in kinds:
        others = kinds not in (["sum"], ["sum", "same"], ["same", "sum"])
        lose_if(others, f"{op.name} of a sum that is still pending and of another value that differs between ranks")
        return SUM
    splits = [(term, x, part) for term, x in factors if (part := op.split(x)) is not None]
    cuts = {(term[part.dim], replace(part, dim=0, second=None)) for term, _, part in splits}
    cuts = {(label, part.pieces) for label in dict(cuts) for part in one_copy({p for o, p in cuts if o == label})}
    if not cuts:
        return SAME
    lose_if(len(cuts) > 1, f"{op.name} of values that are split over different dims, or in different pieces")
    ((label, (runs, share)),) = cuts
    if any(label in term and op.split(x) is None for term, x in factors):
        raise NotRankByRank(f"{op.name} of a value that is split and one that is not, along the same dim")
    lose_if(label not in out and share > 1, f"{op.name} adds up a dim of which several ranks have the same part")
    if label not in out and all(op.adds_padding(x, term.index(label), part) for term, x, part in splits):
        raise NotRankByRank(f"{op.name} adds up a dim that may be padded, as Policy.pad says")
    second = _second(op, factors, label, out)
    return Part("split", out.index(label), runs, share, second) if label in out else SUM


def _second(op: Operation, factors: Sequence[tuple[str, Tensor]], label: str, out: str) -> int | None:
    """The second dim of a product that is split, if one of a factor is.

    Raises:
        NotRankByRank: it is added up, or of one factor only that both have.
    """
    both = [(term, op.part(x)) for term, x in factors]
    labels = {term[part.second] for term, part in both if part and part.second is not None}
    if not labels:
        return None
    other, *more = labels
    have = [part for term, part in both if other in term]
    ordered = other in out and label in out and out.index(label) < out.index(other)
    if more or not ordered or any(part is None or part.second is None for part in have):
        raise NotRankByRank(f"{op.name} of values that are split over two dims, of which it keeps one")
    return out.index(other)


@rule_for(*operations.PRODUCTS)
def _product(op: Operation) -> Part | None:
    product, groups = _contracted(op, operations.PRODUCTS[op.name], *op.args[:2]), op.inputs[2:]
    differ = any(op.part(x) not in (None, SAME) for x in groups) or (product and product.split and product.dim == 0)
    lose_if(groups and differ, f"{op.name} of groups of rows that differ between ranks")
    return product


def _runs_along(op: Operation, x: Tensor, part: Part, ndim: int) -> bool:
    """Whether x, broadcast to `ndim` dims, is split as a part is, or is whole with one element at the dim of that."""
    at, own = part.dim - (ndim - x.dim()), op.part(x)
    return at < 0 or x.shape[at] == 1 if own in (None, SAME) else own == part.at(at)


@rule_for(*operations.ADDED_TO)
def _added_product(op: Operation) -> Part | None:
    """A product and what is added to it, which is broadcast to its shape."""
    bias, product = op.args[0], _contracted(op, operations.ADDED_TO[op.name.rstrip("_")], *op.args[1:3])
    part = op.part(bias)
    if op.kwargs.get("beta") == 0:
        return product
    if SUM in (part, product):
        lose_if(product != part, f"{op.name} adds to a pending sum, once a rank; with your own weights: x @ w.T + bias")
        return SUM
    if product is None or not product.split:
        lose_if(op.split(bias) is not None, f"{op.name} adds a split value to one that is not")
        return product or part
    fits = _runs_along(op, bias, product, op.results[0].dim())
    lose_if(not fits, f"{op.name} adds a value of shape {tuple(bias.shape)} to one that is split otherwise")
    return product


@rule_for("convolution", "_convolution")
def _convolution(op: Operation) -> Part | None:
    """x [b, c, ...], w [out, c/groups, ...], or [c, out/groups, ...] of a transposed one."""
    x, weight, bias = op.args[:3]
    groups, transposed = op.given(8, "groups", 1), op.given(6, "transposed", False)
    of_x, of_w = op.split(x), op.split(weight)
    dims = tuple(None if part is None else part.dim for part in (of_x, of_w))
    if of_x and of_w and dims == (1, 0) and not transposed:
        # Channel by channel, or group by group: the channels of the groups here, or shapes would not fit.
        alone = weight.shape[1] == 1 and groups == x.shape[1] and of_w.pieces == of_x.pieces
        even_parts = of_w.is_even and of_x.is_even
        lose_if(not (alone or even_parts), "a convolution in groups of a part of the channels")
        product = of_w.at(1)
    elif groups == 1 and {*dims} <= {None, 0, 1}:
        product = _contracted(op, "bc,co->bo" if transposed else "bc,oc->bo", x, weight)
    else:
        known = SUM not in (op.part(x), op.part(weight)) and not transposed and dims in ((None, None), (0, None))
        lose_if(not known, "a convolution of values that are split otherwise than its channels")
        product = of_x
    if bias is None:
        return product or SAME
    lose_if(SUM in (product, op.part(bias)), "a convolution adds its bias to a sum that is still pending")
    wanted = product.pieces if product and product.split and product.dim == 1 else None
    of_bias = op.split(bias)
    lose_if((of_bias and of_bias.pieces) != wanted, "a convolution adds a bias that is not split as its outputs are")
    return product or SAME


# -- along some dims, of which none may be split ----------------------------------------------------------------------


class _Along(NamedTuple):
    """An operation whose every result depends on all of some dims of its first argument, and else on one place.

    `linear`: a pending sum stays one. `means`: what it does to these dims, in an error.
    """

    dims: Callable[[Operation], Sequence[int]]
    linear: bool = False
    means: str = "along"


def _dims(at: int, name: str = "dim", default: int | None = None) -> Callable[[Operation], Sequence[int]]:
    """The dims of an argument of a name, or at its place; without any the default, or all."""

    def dims(op: Operation) -> Sequence[int]:
        asked = op.given(at, name)
        if asked is None or isinstance(asked, bool) or asked == []:
            asked = range(op.args[0].dim()) if default is None else default
        return [asked] if isinstance(asked, int) else asked

    return dims


def _last(count: int) -> Callable[[Operation], Sequence[int]]:
    return lambda op: range(-count, 0)


# For 1, 2 and 3 dims, if there is one for so many.
_IN_PLACES = (
    "avg_pool{0}d adaptive_avg_pool{0}d _adaptive_avg_pool{0}d reflection_pad{0}d replication_pad{0}d "
    "upsample_nearest{0}d _upsample_nearest_exact{0}d upsample_linear{0}d upsample_bilinear{0}d upsample_trilinear{0}d "
    "upsample_bicubic{0}d _upsample_bilinear{0}d_aa _upsample_bicubic{0}d_aa"
)
_NORMS = "native_layer_norm layer_norm _fused_rms_norm rms_norm"
_ALONG: dict[str, _Along] = {}
for _names, _row in (
    ("cumsum unfold", _Along(_dims(1, default=-1), linear=True)),
    ("diff", _Along(_dims(2, default=-1), linear=True)),
    ("_softmax _log_softmax _safe_softmax softmax log_softmax", _Along(_dims(1, default=-1))),
    ("logcumsumexp cumprod cummax cummin sort argsort", _Along(_dims(1, default=-1))),
    ("topk kthvalue", _Along(_dims(2, default=-1))),
    ("sum mean", _Along(_dims(1), linear=True, means="over")),
    ("amax amin max min prod any all argmax argmin var std var_mean", _Along(_dims(1), means="over")),
    ("logsumexp count_nonzero nansum", _Along(_dims(1), means="over")),
    ("linalg_vector_norm norm", _Along(_dims(2), means="over")),
    (_NORMS, _Along(lambda op: range(-len(op.args[1]), 0), means="over")),
    ("flip", _Along(_dims(1, "dims"), linear=True)),
    ("roll", _Along(_dims(2, "dims"), linear=True)),
    ("tril triu", _Along(_last(2), linear=True)),
    ("view_as_complex", _Along(_last(1), linear=True)),
    ("view_as_real", _Along(_last(0), linear=True)),
    ("constant_pad_nd", _Along(lambda op: [-1 - n // 2 for n, width in enumerate(op.args[1]) if width], linear=True)),
    ("select unbind", _Along(_dims(1, default=0), linear=True, means="an element of")),
    ("index_select", _Along(_dims(1, default=-1), linear=True, means="elements of")),
    *((f"max_pool{n}d max_pool{n}d_with_indices adaptive_max_pool{n}d", _Along(_last(n))) for n in (1, 2, 3)),
    *((_IN_PLACES.format(n), _Along(_last(n), linear=True)) for n in (1, 2, 3)),
):
    _ALONG.update(dict.fromkeys(_names.split(), _row))


def _along(op: Operation) -> Part | None:
    part, row, x = _one(op), _ALONG[op.name.rstrip("_")], op.args[0]
    rounds = op.name.startswith("avg_pool") and not has_derivatives(x.dtype)
    lose_if(part.kind == "sum" and (rounds or not row.linear), f"{op.name} of a sum that is still pending")
    if not part.split:
        return part
    dims = {dim % x.dim() for dim in row.dims(op)}
    if split_dims := dims & {part.dim, part.second}:
        raise NotRankByRank(f"{op.name} {row.means} dim {min(split_dims)}, of which each rank has a part")
    if op.results[0].dim() >= x.dim():
        return part
    at, second = (None if dim is None else dim - sum(one < dim for one in dims) for dim in (part.dim, part.second))
    return replace(part, dim=at, second=second)


rule_for(*_ALONG)(_along)


@rule_for("sum")
def _summed(op: Operation) -> Part | None:
    part, x = op.part(op.args[0]), op.args[0]
    dims = {dim % max(x.dim(), 1) for dim in _ALONG["sum"].dims(op)}
    if part is None or not part.split or part.dim not in dims or part.share > 1 or part.second is not None:
        return _along(op)
    why = f"sum over dim {part.dim}, of which each rank has a part, and that may be padded (Policy.pad)"
    lose_if(op.adds_padding(x, part.dim, part), why)
    return SUM


@rule_for("constant_pad_nd")
def _padded(op: Operation) -> Part | None:
    counts = op.part(op.args[0]) == SUM and op.given(2, "value", 0)
    lose_if(counts, "a number is written around a sum that is still pending: it would count once a rank")
    return _along(op)


# -- attention and norms ----------------------------------------------------------------------------------------------


@rule_for(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
)
def _attention(op: Operation) -> Parts:
    """q, k, v [b, heads, s, d]: each sample and head by itself."""
    q, *others = (op.part(x) for x in op.args[:3])
    if any(part != q for part in others) or q is None or not q.split or q.dim > 1:
        raise NotRankByRank(f"{op.name} of values that are not split by samples or heads alike")
    for x in op.inputs[3:]:
        lose_if(not _runs_along(op, x, q, 4), f"{op.name} with a mask that is not split as its queries are")
    return [q if x.dim() > q.dim else None for x in op.results]


@rule_for("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(op: Operation) -> Parts:
    """x [b, c, ...]; all else [c]."""
    part = op.split(op.args[0])
    if part is None or part.dim != 1:
        raise NotRankByRank("batch_norm of values that are not split by channels")
    why = "batch_norm of split channels with statistics or weights that are not: split its weight by a rule, too"
    _require_alike(op, part, why)
    return [part, *[part.at(0)] * (len(op.results) - 1)]


def _require_alike(op: Operation, part: Part, why: str) -> None:
    """Lose what an operation makes, unless its other inputs, of one dim, are split as a part of the first one is."""
    lose_if(any((split := op.split(x)) is None or split.pieces != part.pieces for x in op.inputs[1:]), why)


@rule_for("native_group_norm")
def _group_norm(op: Operation) -> Parts:
    """x [b, c, ...], weight and bias [c]; mean and deviation [b, groups] besides."""
    part = op.split(op.args[0])
    if part is None or part.dim == 0:
        lose_if(op.part(op.args[0]) == SUM, "group_norm of a sum that is still pending")
        return [_one(op)] * len(op.results)
    lose_if(part.dim > 1, f"group_norm over dim {part.dim}, of which each rank has a part")
    lose_if(not part.is_even, "group_norm of channels of which a rank has several pieces")
    _require_alike(op, part, "group_norm of split channels by a weight or bias that is not: split them by a rule, too")
    groups = op.results[1].shape[1]
    if op.whole is None or op.whole[1][1] != groups * op.size:
        raise NotRankByRank(f"group_norm of {groups} groups in the channels of one rank, which are not whole groups")
    return [part, *[even(1, groups)] * (len(op.results) - 1)]


@rule_for("glu")
def _glu(op: Operation) -> Part | None:
    """Each element of the first half with one of the second."""
    x, part = op.args[0], _one(op)
    lose_if(part == SUM, "glu of a sum that is still pending")
    dim = op.given(1, "dim", -1) % x.dim()
    if not part.split or part.dim != dim:
        return part
    half = x.shape[dim] // 2
    first, second = sliced(part, 0, half), sliced(part, half, half)
    lose_if(first != second, "glu of halves that are not split alike")
    return first


# -- by indices -------------------------------------------------------------------------------------------------------


@rule_for("embedding")
def _embedding(op: Operation) -> Part | None:
    table, ids = map(op.part, op.args[:2])
    lose_if(ids == SUM, "a lookup of ids that are a sum that is still pending")
    lose_if(op.split(op.args[1]) and op.given(3, "scale_grad_by_freq"), "gradients are divided by counts of split ids")
    if table in (None, SAME):
        return ids or table
    lose_if(table.split and table.dim == 0, "a lookup in a table of which each rank has some rows")
    lose_if(ids not in (None, SAME), "a lookup of split ids in a split table")
    return table.at(op.results[0].dim() - 1) if table.split else table


def _indexed_dims(indices: Sequence[Tensor | None]) -> list[int]:
    return [dim for dim, index in enumerate(indices) if index is not None]


def _have_masks(indices: Sequence[Tensor | None]) -> bool:
    """Whether an index is a mask, which may be one of several dims."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _are_neighbours(dims: Sequence[int]) -> bool:
    return list(dims) == [*range(dims[0], dims[-1] + 1)]


def _beside_indices(dim: int, indices: Sequence[Any]) -> int:
    """Where a dim without an index is in what is picked."""
    used = _indexed_dims(indices)
    width = max(indices[at].dim() for at in used)
    before = sum(at < dim for at in used)
    return dim - before + (width if before or not _are_neighbours(used) else 0)


@rule_for("index")
@_moving
def _index(op: Operation, part: Part) -> Part:
    indices = op.args[1]
    by_mask = part.dim in _indexed_dims(indices) or _have_masks(indices)
    lose_if(by_mask, "elements are picked of a dim that is split, or by a mask")
    return part.at(_beside_indices(part.dim, indices))


@rule_for("gather", "take_along_dim")
def _gather(op: Operation) -> Part | None:
    part, index = op.part(op.args[0]), op.part(op.args[2])
    dim = op.args[1] % max(op.args[0].dim(), 1)
    if part is not None and part.split and part.dim != dim and index == part:
        return part
    raise NotRankByRank("gather of values that are split otherwise than the indices")


@rule_for("index_copy", "index_add", "scatter", "scatter_add")
def _written(op: Operation) -> Part | None:
    x, dim, index = op.args[:3]
    part, by = op.part(x), op.part(index)
    source = op.given(3, "src" if "scatter" in op.name else "source")
    of_source = op.part(source) if isinstance(source, Tensor) else None
    inside = index.dim() == x.dim()  # one index for each element
    adds = op.name.rstrip("_") in ("index_add", "scatter_add") and of_source == SUM and by in (None, SAME)
    if adds and (part == SUM or (part is None and id(x) in op.zeros)):
        return SUM
    alike = (of_source == part or not isinstance(source, Tensor)) and by in ((part,) if inside else (None, SAME))
    if alike and part is not None and part.split and part.dim != dim % x.dim():
        return part
    raise NotRankByRank(f"{op.name} of values that are split otherwise")


@rule_for("index_put", "_index_put_impl")
def _index_put(op: Operation) -> Part | None:
    x, indices, values = op.args[:3]
    part, of_values = op.part(x), op.part(values)
    used = _indexed_dims(indices)
    lose_if(any(op.part(indices[at]) not in (None, SAME) for at in used), "values are written by ids that differ")
    if part == SUM and op.sums_up(values):
        return SUM
    alone = len(used) == 1 or not _have_masks(indices)
    if alone and part is not None and part.split and part.dim not in used and _are_neighbours(used):
        if of_values == part.at(_beside_indices(part.dim, indices)) or (of_values is None and values.numel() == 1):
            return part
    raise NotRankByRank("values are written into a tensor that is split otherwise")


# The rules that follow `Part.second`.
_FOR_TWO_DIMS = {pointwise, _identity, _view, _permuted, _expanded, _product, _along, _summed}
