"""What each operation of torch makes of parts: the rules by which a run without data follows them. Layer 1.

A rule looks at one mesh axis. It is given an operation whose inputs may be parts, and says which parts its results are,
or raises `Lost` when the operation, done rank by rank, is not the operation on the whole values. An operation without a
rule loses the part.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardfn.core.parts import SAME, SUM, Lost, Part, even, in_two_dims, reshaped, sliced

Parts = list["Part | None"]

# What moves elements, and does not change them.
MOVES = set(
    "expand unsqueeze squeeze transpose permute t slice select narrow split split_with_sizes unsafe_split unbind "
    "repeat alias detach lift_fresh cat stack empty empty_like zeros ones full arange scalar_tensor copy_ _to_copy "
    "clone contiguous view _unsafe_view _reshape_alias reshape".split()
)


@dataclass(frozen=True)
class Operation:
    """One call of an operation on one rank, seen from an axis of `size` ranks.

    `whole` has the shapes of its results in the run with whole values, when the same call was found there. `zero` says
    whether a tensor is known to hold nothing but zeros. `padded` has sizes of factors there, and as they are stored;
    `weight` says whether a tensor is a weight, moved at most, which is zero in padding.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]
    part: Callable[[Tensor], Part | None]
    size: int
    pointwise: bool = False
    whole: tuple[tuple[int, ...], ...] | None = None
    zero: Callable[[Tensor], bool] = lambda x: False
    padded: Collection[tuple[int, int]] = ()
    weight: Callable[[Tensor], bool] = lambda x: False

    def given(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by its place or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments, also those in lists."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            found += [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Tensor)]
        return found

    def split(self, x: Tensor) -> Part | None:
        """The part of a tensor of which each rank has a piece; None of any other."""
        part = self.part(x)
        return part if part is not None and part.split else None

    def sums_up(self, value: Any) -> bool:
        """Whether a value is a pending sum, or nothing but zeros, which are one of zeros."""
        return (self.part(value) == SUM or self.zero(value)) if isinstance(value, Tensor) else value == 0

    def adds_padding(self, x: Tensor, dim: int, part: Part) -> bool:
        """Whether a dim that ranks split may be padded, with anything there by now: a sum over it would count that."""
        size = x.shape[dim] * self.size // part.share
        return not self.weight(x) and any(
            size and (size % stored == 0 or (stored % size == 0 and true % (stored // size) == 0))
            for true, stored in self.padded
        )

    def differs(self, dim: int) -> bool:
        """Whether the first result is larger at `dim` in the run with whole values, as far as that is known."""
        if self.whole is None or len(self.whole[0]) != self.results[0].dim():
            return True
        return self.whole[0][dim] != self.results[0].shape[dim] or self.results[0].shape[dim] == 0


def is_stored(here: int, whole: int, padded: Collection[tuple[int, int]]) -> bool:
    """Whether a size is one that one process has, or that as it is stored with padding."""
    return here == whole or any(here * true == whole * stored for true, stored in padded)


Rule = Callable[[Operation], "Part | Parts | None"]
_RULES: dict[str, Rule] = {}


def parts_after(op: Operation) -> Parts:
    """The parts of the results of an operation."""
    known = [op.part(x) for x in op.inputs]
    gone = next((part for part in known if part is not None and part.kind == "lost"), None)
    if gone is not None:
        return [gone] * len(op.results)
    try:
        rule = _RULES.get(op.name.rstrip("_") if op.name not in _RULES else op.name)
        if _takes_back_a_sum(op):
            return [SUM] * len(op.results)
        if rule is None and op.pointwise:
            rule = _pointwise
        if rule is None:
            raise Lost(f"nothing is known of {op.name} on split values")
        if rule not in _FOR_TWO_DIMS and any(part is not None and part.second is not None for part in known):
            raise Lost(f"nothing is known of {op.name} on values of which two dims are split")
        found = rule(op)
    except Lost as lost:
        if all(part in (None, SAME) for part in known):
            return [SAME] * len(op.results)  # every rank does the same to the same values
        return [Part("lost", why=str(lost), cure="sums" if SUM in known else "whole")] * len(op.results)
    return found if isinstance(found, list) else [found] * len(op.results)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def keep(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return keep


# -- what is made of nothing, or of values that all ranks share -------------------------------------------------------

_NEW = ("new_zeros", "new_ones", "new_full", "new_empty")
_FILLS = {"zeros", "ones", "full", "empty", "empty_strided", "expand", "repeat", *_NEW}


def made_here(operations: Mapping[str, Operation]) -> dict[str, Parts]:
    """Shared values make shared ones, unless sizes of this rank are in it; by the axis that sizes fit."""
    for axis, op in operations.items():
        assert op.whole is not None
        fits = [_filled_part(op, tuple(x.shape), whole) for x, whole in zip(op.results, op.whole, strict=True)]
        if any(fits):
            return {axis: fits}
    return {}


def _copies_one(op: Operation, dim: int) -> bool:
    """Whether `repeat` makes a dim of its result of copies of one element."""
    before = dim - op.results[0].dim() + op.args[0].dim()
    return before < 0 or op.args[0].shape[before] == 1


def _filled_part(op: Operation, shape: tuple[int, ...], whole: tuple[int, ...]) -> Part | None:
    """A part of a value that is alike everywhere along the dim that differs."""
    if len(shape) != len(whole) or op.name not in _FILLS:
        return None
    other = [dim for dim in range(len(shape)) if shape[dim] != whole[dim]]
    if len(other) != 1 or not shape[other[0]] or (op.name == "repeat" and not _copies_one(op, other[0])):
        return None
    size = shape[other[0]]
    for stored in (whole[other[0]], *(stored for true, stored in op.padded if true == whole[other[0]])):
        share, rest = divmod(op.size, max(stored // size, 1))  # neighbours may have the same head
        if stored % size == 0 and share and not rest:
            return replace(even(other[0], size), share=share)
    return None


# -- element by element -----------------------------------------------------------------------------------------------

_LINEAR = {"mul", "div", "neg", "_to_copy", "clone", "detach", "alias", "positive", "lift_fresh", "copy"}


def _pointwise(op: Operation) -> Part | None:
    ndim = max((x.dim() for x in op.results), default=0)
    varied = [(x, part) for x in op.inputs if (part := op.part(x)) is not None]
    if any(part.kind == "sum" for _, part in varied):
        return _of_sums(op, [part for _, part in varied])
    splits = _one_copy({part.shifted(ndim - x.dim()) for x, part in varied if part.split})
    if not splits:
        return SAME
    if len(splits) > 1:
        raise Lost(f"{op.name} joins values that are split over different dims, or in different pieces")
    (found,) = splits
    for x in op.inputs:
        for dim in (found.dim, found.second):
            at = -1 if dim is None else dim - (ndim - x.dim())
            if at >= 0 and x.shape[at] != 1 and op.split(x) is None:
                raise Lost(
                    f"{op.name} joins a value whose dim {dim} is split with one of shape {tuple(x.shape)}, which is not"
                )
    return found


def _one_copy(parts: set[Part]) -> set[Part]:
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
    raise Lost(f"{op.name} of a sum that is still pending")


def _takes_back_a_sum(op: Operation) -> bool:
    """Whether it is the backward of an operation, which is linear in its first argument, on a pending sum."""
    back = op.name.endswith(("_backward", "_backward_data"))
    return back and op.part(op.args[0]) == SUM and all(op.part(x) in (None, SAME) for x in op.inputs[1:])


_rule(  # written in place they do not have torch's tag
    *(
        "_prelu_kernel masked_fill where add sub mul div addcmul addcdiv hardswish log_sigmoid_forward "
        "log_sigmoid_backward floor_divide lerp pow clamp"
    ).split()
)(_pointwise)


@_rule("detach", "alias", "clone", "lift_fresh", "contiguous", "_conj")
def _identity(op: Operation) -> Part | None:
    return op.part(op.args[0])


@_rule("_to_copy", "bernoulli", "native_dropout")
def _but_for_sums(op: Operation) -> Part | None:
    part, made = op.part(op.args[0]), op.results[0].dtype
    linear = op.name == "_to_copy" and (made.is_floating_point or made.is_complex)
    if part == SUM and not linear:
        raise Lost(f"{op.name} of a sum that is still pending")
    return part


@_rule("fill", "zero", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
def _filled(op: Operation) -> Part | None:
    if any(op.part(x) is not None for x in op.inputs[1:]):
        raise Lost("a tensor is filled with a value that differs between ranks")
    return op.split(op.args[0])


@_rule(*_NEW)
def _new(op: Operation) -> Part | None:
    return _filled_part(op, tuple(op.results[0].shape), op.whole[0]) if op.whole is not None else None


@_rule("copy_")
def _copied(op: Operation) -> Part | None:
    source = op.part(op.args[1])
    if source == SUM and not (op.results[0].is_floating_point() or op.results[0].is_complex()):
        raise Lost("whole numbers are made of a sum that is still pending")
    if source is None:
        if op.split(op.args[0]) is not None and op.args[1].dim():
            raise Lost("a shared value is written into a split one")
        return op.part(op.args[0])
    if not source.split:
        return source
    return source.at(source.dim + op.results[0].dim() - op.args[1].dim())


# -- views ------------------------------------------------------------------------------------------------------------


def _one(op: Operation) -> Part:
    """The part of the first argument, when that alone varies and is split; others pass through linear operations."""
    part = op.part(op.args[0])
    if part is None or any(op.part(x) is not None for x in op.inputs if x is not op.args[0]):
        raise Lost(f"{op.name} by values that differ between ranks")
    return part


def _moving(move: Callable[[Operation, Part], "Part | Parts"]) -> Rule:
    """A rule for operations that are linear and move elements of their first argument."""

    def rule(op: Operation) -> "Part | Parts | None":
        part = _one(op)
        return move(op, part) if part.split else part

    return rule


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten")
def _view(op: Operation) -> "Part | Parts | None":
    if op.results[0].dtype != op.args[0].dtype:
        raise Lost("the bits of values are taken for another dtype")
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
    way = next((way for way in ways if op.differs(way.dim)), ways[0])
    # Padded queries meet the keys of others when these are for some ranks only.
    wholes = list(_stored(whole, op.padded if part.share in (1, op.size) else ()))
    if part.second is None and (op.whole is None or way.whole_shape(new, op.size) in wholes):
        return way
    tried = (in_two_dims(part, shape, new, stored, op.size) for stored in wholes)
    found = next((two for two in tried if two is not None), None)
    if found is None and part.second is not None:
        raise Lost(f"a view of {tuple(shape)} as {tuple(new)} cuts between the parts of two dims")
    return found or way


@_rule("t", "transpose", "permute", "numpy_T")
@_moving
def _permuted(op: Operation, part: Part) -> Part:
    ndim = op.args[0].dim()
    order = list(range(ndim))
    if op.name == "permute":
        order = [dim % ndim for dim in op.args[1]]
    elif op.name == "transpose":
        a, b = op.args[1] % ndim, op.args[2] % ndim
        order[a], order[b] = b, a
    else:
        order.reverse()
    second = None if part.second is None else order.index(part.second)
    if second is not None and second < order.index(part.dim):
        raise Lost(f"{op.name} of two dims that are split")
    return replace(part, dim=order.index(part.dim), second=second)


def _copies(op: Operation) -> Part | None:
    """The part of copies of a shared value: as many as this rank has of what they are for."""
    if op.whole is None or _one(op) != SAME:
        return None
    return _filled_part(op, tuple(op.results[0].shape), op.whole[0])


@_rule("expand", "broadcast_to")
def _expanded(op: Operation) -> Part:
    part = _one(op)
    if not part.split:
        return _copies(op) or part
    found = part.shifted(op.results[0].dim() - op.args[0].dim())
    dim = found.dim
    for before, after in ((part.dim, dim), (part.second, found.second)):
        if before is not None and after is not None and op.results[0].shape[after] != op.args[0].shape[before]:
            raise Lost("expand of a dim that is split")
    if part.share > 1 and part.second is None and op.whole is not None:
        # Keys of grouped queries, once for each query of this rank.
        shape, whole = op.results[0].shape, op.whole[0]
        later = range(dim + 1, len(shape))
        more = [d for d in later if shape[d] != whole[d] and is_stored(shape[d] * part.share, whole[d], op.padded)]
        if len(more) == 1:
            return replace(found, second=more[0])
    return found


@_rule("repeat", "tile")
def _repeated(op: Operation) -> "Part | Parts | None":
    copies = _copies(op) if op.name == "repeat" else None
    return copies if copies is not None else _tiled(op)


@_moving
def _tiled(op: Operation, part: Part) -> Part:
    dim = part.dim + op.results[0].dim() - op.args[0].dim()
    times = op.args[1][dim]
    if times != 1 and len(part.runs) > 1:
        raise Lost("repeat of a fused dim")
    return replace(part, dim=dim, runs=tuple((outer * times, inner) for outer, inner in part.runs))


@_rule("slice", "narrow")
@_moving
def _slice(op: Operation, part: Part) -> Part:
    x = op.args[0]
    dim = op.given(1, "dim", 0) % x.dim()
    if dim != part.dim or op.results[0].shape == x.shape:
        return part
    if op.given(4, "step", 1) != 1:
        raise Lost("a slice with steps of a dim that is split")
    start = op.given(2, "start") or 0
    start = start + x.shape[dim] if start < 0 else start
    return sliced(part, start, op.results[0].shape[dim])


@_rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split")
@_moving
def _pieces(op: Operation, part: Part) -> Parts:
    x = op.args[0]
    dim = op.given(2, "dim", 0) % x.dim()
    if dim != part.dim:
        return [part] * len(op.results)
    out: Parts = []
    start = 0
    for piece in op.results:
        out.append(sliced(part, start, piece.shape[dim]))
        start += piece.shape[dim]
    return out


@_rule("cat", "stack")
def _joined(op: Operation) -> Part | None:
    tensors = [x for x in op.args[0] if x.numel() or x.dim() == op.results[0].dim()]
    known = [part for x in tensors if (part := op.part(x)) is not None]
    dim = op.given(1, "dim", 0) % op.results[0].dim()
    kinds = {part.kind for part in known}
    if len(known) < len(tensors):
        if kinds <= {"same"}:
            return SAME
        raise Lost(f"{op.name} of split values and values that all ranks share")
    if kinds != {"split"}:
        if len(kinds) == 1:
            return known[0]
        raise Lost(f"{op.name} of values that are split and values that are not")
    if len({part.dim for part in known}) > 1:
        raise Lost(f"{op.name} of values that are split over different dims")
    at = known[0].dim
    if op.name == "stack":
        if len({part.pieces for part in known}) > 1:
            raise Lost("stack of values that are split in different pieces")
        return known[0].at(at + (dim <= at))
    if at == dim and len({part.share for part in known}) == 1:
        return replace(known[0], runs=tuple(run for part in known for run in part.runs))
    if len({part.pieces for part in known}) > 1:
        raise Lost("cat of values that are split in different pieces")
    return known[0]


# -- products ---------------------------------------------------------------------------------------------------------

# The dims of two factors, and of their product.
PRODUCTS = {"mm": "mk,kn->mn", "bmm": "bmk,bkn->bmn", "mv": "mk,k->m", "dot": "k,k->", "_grouped_mm": "sk,ekn->sn"}
_ADDED_TO = {"addmm": "mm", "baddbmm": "bmm"}  # a summand and a product


def _contracted(op: Operation, labels: str, *operands: Tensor) -> Part | None:
    """A product such as "mk,kn->mn"."""
    inputs, out = labels.split("->")
    factors = [*zip(inputs.split(","), operands, strict=True)]
    kinds = [part.kind for x in operands if (part := op.part(x)) is not None]
    if not kinds:
        return None
    if "sum" in kinds:
        if kinds in (["sum"], ["sum", "same"], ["same", "sum"]):
            return SUM
        raise Lost(f"{op.name} of a sum that is still pending and of another value that differs between ranks")
    splits = [(term, x, part) for term, x in factors if (part := op.split(x)) is not None]
    found = {(term[part.dim], replace(part, dim=0, second=None)) for term, _, part in splits}
    found = {(label, part.pieces) for label in dict(found) for part in _one_copy({p for o, p in found if o == label})}
    if not found:
        return SAME
    if len(found) > 1:
        raise Lost(f"{op.name} of values that are split over different dims, or in different pieces")
    ((label, (runs, share)),) = found
    if any(label in term and op.split(x) is None for term, x in factors):
        raise Lost(f"{op.name} of a value that is split and one that is not, along the same dim")
    if label not in out and share > 1:
        raise Lost(f"{op.name} adds up a dim of which several ranks have the same part")
    if label not in out and all(op.adds_padding(x, term.index(label), part) for term, x, part in splits):
        raise Lost(f"{op.name} adds up a dim that may be padded, as Policy.pad says")
    second = _second(op, factors, label, out)
    return Part("split", out.index(label), runs, share, second) if label in out else SUM


def _second(op: Operation, factors: Sequence[tuple[str, Tensor]], label: str, out: str) -> int | None:
    """The second dim of a product that is split, if one of a factor is.

    Raises:
        Lost: it is added up, or of one factor only that both have.
    """
    both = [(term, op.part(x)) for term, x in factors]
    labels = {term[part.second] for term, part in both if part and part.second is not None}
    if not labels:
        return None
    other, *more = labels
    have = [part for term, part in both if other in term]
    ordered = other in out and label in out and out.index(label) < out.index(other)
    if more or not ordered or any(part is None or part.second is None for part in have):
        raise Lost(f"{op.name} of values that are split over two dims, of which it keeps one")
    return out.index(other)


@_rule(*PRODUCTS)
def _product(op: Operation) -> Part | None:
    return _contracted(op, PRODUCTS[op.name], *op.args[:2])


def _added(op: Operation, bias: Tensor, product: Part | None) -> Part | None:
    """A product and what is added to it, which is broadcast to its shape."""
    part, ndim = op.part(bias), op.results[0].dim()
    if part is None and product is None:
        return None
    if op.kwargs.get("beta") == 0:
        return product
    if SUM in (part, product):
        if product == part:
            return SUM
        raise Lost(f"{op.name} adds to a sum that is still pending: that would count once a rank")
    if product is None or not product.split:
        if op.split(bias) is not None:
            raise Lost(f"{op.name} adds a split value to one that is not")
        return product or part
    at = product.dim - (ndim - bias.dim())
    matches = part == product.at(at)
    if at >= 0 and bias.shape[at] != 1 and not matches:
        raise Lost(f"{op.name} adds a value of shape {tuple(bias.shape)} to one that is split otherwise")
    if op.split(bias) is not None and not matches:
        raise Lost(f"{op.name} adds a value that is split otherwise")
    return product


@_rule(*_ADDED_TO)
def _added_product(op: Operation) -> Part | None:
    labels = PRODUCTS[_ADDED_TO[op.name.rstrip("_")]]
    return _added(op, op.args[0], _contracted(op, labels, *op.args[1:3]))


@_rule("convolution", "_convolution")
def _convolution(op: Operation) -> Part | None:
    """x [b, c, ...], w [out, c/groups, ...], or [c, out/groups, ...] of a transposed one."""
    x, weight, bias = op.args[:3]
    groups = op.given(8, "groups", 1)
    out, into = (1, 0) if op.given(6, "transposed", False) else (0, 1)
    differing = [part for part in (op.part(x), op.part(weight)) if part is not None]
    if out and groups > 1 and differing:
        raise Lost("a transposed convolution in groups of values that differ")
    if SUM in differing:
        raise Lost("a convolution of a sum that is still pending")
    of_x, of_w = op.split(x), op.split(weight)
    if of_x is None and of_w is None:
        product = SAME
    elif of_x is not None and of_x.dim == 0:
        product = of_x
        if of_w is not None:
            raise Lost("a convolution of values that are split over different dims")
    elif of_x is not None and of_x.dim == 1 and of_w is not None:
        if of_w.dim == 0 and weight.shape[1] == 1 and groups == x.shape[1] and of_w.pieces == of_x.pieces:
            product = of_x  # channel by channel
        elif not out and of_w.dim == 0 and of_w.is_even and of_x.is_even:
            product = of_w.at(1)  # group by group: the channels of the groups here, or shapes would not fit
        elif of_w.dim == into and groups == 1 and of_w.pieces == of_x.pieces:
            product = SUM
        else:
            raise Lost("a convolution in groups of a part of the channels")
    elif of_x is None and of_w is not None and of_w.dim == out and groups == 1:
        product = of_w.at(1)
    else:
        raise Lost("a convolution of values that are split otherwise than its channels")
    if bias is None:
        return product
    if product is SUM:
        raise Lost("a convolution adds its bias to a sum that is still pending")
    own = op.split(bias)
    if product.split and product.dim == 1 and (own is None or own.pieces != product.pieces):
        raise Lost("a convolution adds a bias that is not split as its outputs are")
    return product


# -- along some dims, of which none may be split ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Along:
    """An operation whose every result depends on all of some dims of its first argument, and else on one place.

    `linear`: a pending sum stays one. `means`: what it does to these dims, in an error.
    """

    dims: Callable[[Operation], Sequence[int]]
    linear: bool = False
    means: str = "along"


def _dims(at: int, name: str = "dim", default: int | None = None) -> Callable[[Operation], Sequence[int]]:
    """The dims of an argument of a name, or at its place; without any the default, or all."""

    def dims(op: Operation) -> Sequence[int]:
        given = op.given(at, name)
        if given is None or isinstance(given, bool) or given == []:
            given = range(op.args[0].dim()) if default is None else default
        return [given] if isinstance(given, int) else given

    return dims


def _dim(at: int, default: int = -1) -> Callable[[Operation], Sequence[int]]:
    return _dims(at, "dim", default)


def _last(count: int) -> Callable[[Operation], Sequence[int]]:
    return lambda op: range(-count, 0)


def _padded_dims(op: Operation) -> Sequence[int]:
    return [-1 - at // 2 for at, width in enumerate(op.args[1]) if width]


_ALONG: dict[str, _Along] = {}
for _names, _row in (
    ("cumsum", _Along(_dim(1), linear=True)),
    ("diff", _Along(_dim(2), linear=True)),
    ("_softmax _log_softmax _safe_softmax softmax log_softmax logcumsumexp cumprod cummax cummin", _Along(_dim(1))),
    ("sort argsort", _Along(_dim(1))),
    ("topk kthvalue", _Along(_dim(2))),
    ("sum mean", _Along(_dims(1), linear=True, means="over")),
    ("amax amin max min prod any all argmax argmin var std var_mean", _Along(_dims(1), means="over")),
    ("logsumexp count_nonzero nansum", _Along(_dims(1), means="over")),
    ("linalg_vector_norm norm", _Along(_dims(2), means="over")),
    ("flip", _Along(_dims(1, "dims"), linear=True)),
    ("roll", _Along(_dims(2, "dims"), linear=True)),
    ("tril triu", _Along(_last(2), linear=True)),
    ("view_as_complex", _Along(_last(1), linear=True)),
    ("view_as_real", _Along(_last(0), linear=True)),
    ("constant_pad_nd", _Along(_padded_dims, linear=True)),
    ("unfold", _Along(_dim(1), linear=True)),
    ("select unbind", _Along(_dim(1, 0), linear=True, means="an element of")),
    ("index_select", _Along(_dim(1), linear=True, means="elements of")),
    ("max_pool1d adaptive_max_pool1d", _Along(_last(1))),
    ("max_pool2d max_pool2d_with_indices adaptive_max_pool2d", _Along(_last(2))),
    ("max_pool3d max_pool3d_with_indices adaptive_max_pool3d", _Along(_last(3))),
    ("avg_pool1d adaptive_avg_pool1d reflection_pad1d replication_pad1d", _Along(_last(1), linear=True)),
    ("upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d", _Along(_last(1), linear=True)),
    ("avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d", _Along(_last(2), linear=True)),
    ("reflection_pad2d replication_pad2d", _Along(_last(2), linear=True)),
    ("upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d", _Along(_last(2), linear=True)),
    ("_upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa", _Along(_last(2), linear=True)),
    ("avg_pool3d _adaptive_avg_pool3d adaptive_avg_pool3d", _Along(_last(3), linear=True)),
    ("reflection_pad3d replication_pad3d", _Along(_last(3), linear=True)),
    ("upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d", _Along(_last(3), linear=True)),
):
    _ALONG.update(dict.fromkeys(_names.split(), _row))


def _along(op: Operation) -> Part | None:
    part, row, x = _one(op), _ALONG[op.name.rstrip("_")], op.args[0]
    if part.kind == "sum" and not row.linear:
        raise Lost(f"{op.name} of a sum that is still pending")
    if not part.split:
        return part
    dims = {dim % x.dim() for dim in row.dims(op)}
    if found := dims & {part.dim, part.second}:
        raise Lost(f"{op.name} {row.means} dim {min(found)}, of which each rank has a part")
    if op.results[0].dim() >= x.dim():
        return part
    at, second = (None if dim is None else dim - sum(one < dim for one in dims) for dim in (part.dim, part.second))
    return replace(part, dim=at, second=second)


for _name in _ALONG:
    _RULES[_name] = _along


@_rule("sum")
def _summed(op: Operation) -> Part | None:
    part, x = op.part(op.args[0]), op.args[0]
    dims = {dim % max(x.dim(), 1) for dim in _ALONG["sum"].dims(op)}
    if part is None or not part.split or part.dim not in dims or part.share > 1 or part.second is not None:
        return _along(op)
    if op.adds_padding(x, part.dim, part):
        raise Lost(f"sum over dim {part.dim}, of which each rank has a part, and that may be padded (Policy.pad)")
    return SUM


@_rule("constant_pad_nd")
def _padded(op: Operation) -> Part | None:
    if op.part(op.args[0]) == SUM and op.given(2, "value", 0):
        raise Lost("a number is written around a sum that is still pending: it would count once a rank")
    return _along(op)


# -- attention and norms ----------------------------------------------------------------------------------------------


@_rule(
    *(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    ).split()
)
def _attention(op: Operation) -> Parts:
    """q, k, v [b, heads, s, d]: each sample and head by itself."""
    q, *others = (op.part(x) for x in op.args[:3])
    if any(part != q for part in others) or q is None or not q.split or q.dim > 1:
        raise Lost(f"{op.name} of values that are not split by samples or heads alike")
    for x in op.inputs[3:]:
        part, at = op.part(x), q.dim - (4 - x.dim())
        if at >= 0 and x.shape[at] != 1 and (part is None or part != q.at(at)):
            raise Lost(f"{op.name} with a mask that is not split as its queries are")
    return [q if x.dim() > q.dim else None for x in op.results]


@_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def _layer_norm(op: Operation) -> Part | None:
    part = op.split(op.args[0])
    if part is not None and part.dim >= op.args[0].dim() - len(op.args[1]):
        raise Lost(f"{op.name} over dim {part.dim}, of which each rank has a part")
    _by_whole_values(op)
    return part or SAME


def _by_whole_values(op: Operation) -> None:
    """A norm whose scale and shift are not split.

    Raises:
        Lost: one is, or what is normed is a pending sum.
    """
    if op.part(op.args[0]) == SUM or any(op.split(x) is not None for x in op.inputs[1:]):
        raise Lost(f"{op.name} by values that are split otherwise")


@_rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(op: Operation) -> Parts:
    """x [b, c, ...]; all else [c]."""
    part = op.split(op.args[0])
    if part is None or part.dim != 1:
        raise Lost("batch_norm of values that are not split by channels")
    if not _are_split_alike(op.inputs[1:], part, op):
        raise Lost(
            "batch_norm of split channels with statistics or weights that are not: split its weight by a rule, too"
        )
    return [part, *[part.at(0)] * (len(op.results) - 1)]


def _are_split_alike(values: Sequence[Tensor], part: Part, op: Operation) -> bool:
    """Whether values of one dim are split as a part is."""
    return all((own := op.split(x)) is not None and own.pieces == part.pieces for x in values)


@_rule("native_group_norm")
def _group_norm(op: Operation) -> Parts:
    """x [b, c, ...], weight and bias [c]; mean and deviation [b, groups] besides."""
    part = op.split(op.args[0])
    if part is None or part.dim == 0:
        _by_whole_values(op)
        return [part or SAME] * len(op.results)
    if part.dim > 1:
        raise Lost(f"group_norm over dim {part.dim}, of which each rank has a part")
    if not part.is_even:
        raise Lost("group_norm of channels of which a rank has several pieces")
    if not _are_split_alike(op.inputs[1:], part, op):
        raise Lost("group_norm of split channels by a weight or bias that is not: split them by a rule, too")
    groups = op.results[1].shape[1]
    if op.whole is None or op.whole[1][1] != groups * op.size:
        raise Lost(f"group_norm of {groups} groups in the channels of one rank, which are not whole groups")
    return [part, *[even(1, groups)] * (len(op.results) - 1)]


@_rule("pixel_shuffle")
@_moving
def _shuffled(op: Operation, part: Part) -> Part:
    """[.., ch * r * r, h, w] -> [.., ch, h * r, w * r]"""
    channels, times = op.args[0].dim() - 3, op.args[1] ** 2
    if part.dim > channels:
        raise Lost("pixel_shuffle along a dim that is split")
    if part.dim < channels:
        return part
    if any(inner % times for _, inner in part.runs):
        raise Lost("pixel_shuffle of parts of channels")
    return replace(part, runs=tuple((outer, inner // times) for outer, inner in part.runs))


@_rule("glu")
def _glu(op: Operation) -> Part | None:
    """Each element of the first half with one of the second."""
    x, part = op.args[0], _one(op)
    if part == SUM:
        raise Lost("glu of a sum that is still pending")
    dim = op.given(1, "dim", -1) % x.dim()
    if not part.split or part.dim != dim:
        return part
    half = x.shape[dim] // 2
    first, second = sliced(part, 0, half), sliced(part, half, half)
    if first != second:
        raise Lost("glu of halves that are not split alike")
    return first


# -- by indices -------------------------------------------------------------------------------------------------------


@_rule("embedding")
def _embedding(op: Operation) -> Part | None:
    table, ids = op.split(op.args[0]), op.split(op.args[1])
    if table is None:
        return ids or op.part(op.args[0]) or op.part(op.args[1])
    if table.dim == 0:
        raise Lost("a lookup in a table of which each rank has some rows")
    if ids is not None:
        raise Lost("a lookup of split ids in a split table")
    return table.at(op.results[0].dim() - 1)


def _indexed_dims(indices: Sequence[Tensor | None]) -> list[int]:
    return [dim for dim, index in enumerate(indices) if index is not None]


def _are_neighbours(dims: Sequence[int]) -> bool:
    return list(dims) == [*range(dims[0], dims[-1] + 1)]


def _beside_indices(dim: int, indices: Sequence[Any]) -> int:
    """Where a dim without an index is in what is picked."""
    used = _indexed_dims(indices)
    width = max(indices[at].dim() for at in used)
    before = sum(at < dim for at in used)
    return dim - before + (width if before or not _are_neighbours(used) else 0)


@_rule("index")
@_moving
def _index(op: Operation, part: Part) -> Part:
    indices = op.args[1]
    masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if part.dim in _indexed_dims(indices) or masks:
        raise Lost("elements are picked of a dim that is split, or by a mask")
    return part.at(_beside_indices(part.dim, indices))


@_rule("gather", "take_along_dim")
def _gather(op: Operation) -> Part | None:
    part, index = op.part(op.args[0]), op.part(op.args[2])
    dim = op.args[1] % max(op.args[0].dim(), 1)
    if part is not None and part.split and part.dim != dim and index == part:
        return part
    if (part == SAME and index is None) or (part is None and index == SAME):
        return SAME
    raise Lost("gather of values that are split otherwise than the indices")


@_rule("index_copy", "index_add", "scatter", "scatter_add")
def _written(op: Operation) -> Part | None:
    x, dim, index = op.args[:3]
    part, by = op.part(x), op.part(index)
    source = op.given(3, "src" if "scatter" in op.name else "source")
    of_source = op.part(source) if isinstance(source, Tensor) else None
    inside = index.dim() == x.dim()  # one index for each element
    if op.name.rstrip("_") in ("index_add", "scatter_add") and of_source == SUM and by in (None, SAME):
        if part == SUM or (part is None and op.zero(x)):
            return SUM
    if part is not None and part.split and part.dim != dim % x.dim():
        if of_source == part or not isinstance(source, Tensor):
            if by == part or not inside:
                return part
    raise Lost(f"{op.name} of values that are split otherwise")


@_rule("index_put", "_index_put_impl")
def _index_put(op: Operation) -> Part | None:
    x, indices, values = op.args[:3]
    part, own = op.part(x), op.part(values)
    if part == SUM and op.sums_up(values) and all(op.part(i) in (None, SAME) for i in indices if i is not None):
        return SUM
    used = _indexed_dims(indices)
    if part is not None and part.split and part.dim not in used and _are_neighbours(used):
        if own == part.at(_beside_indices(part.dim, indices)) or (own is None and values.numel() == 1):
            return part
    raise Lost("values are written into a tensor that is split otherwise")


@_rule("nll_loss_forward")
def _nll(op: Operation) -> Part | None:
    raise Lost("a loss over values of which each rank has a part")


# The rules that follow `Part.second`.
_FOR_TWO_DIMS = {_pointwise, _identity, _but_for_sums, _view, _permuted, _expanded, _product, _along, _summed}
