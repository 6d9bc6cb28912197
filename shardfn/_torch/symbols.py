"""Numbers that an operator takes for sizes and that hold two, and tensors that have such sizes."""

import math
import operator
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

# Numbers that an operator takes for sizes and that hold two; torch asks their nodes, in C++ and in `torch.SymInt`.


class Node:
    """What torch asks of the node of a `SymInt`, `SymFloat` or `SymBool`, for a number that is two.

    A result of what torch computes with is another node, of the sources of all that it is made of.
    """

    def __init__(self, rank: Any, one: Any, decide: Callable[..., Any], sources: frozenset[str] = frozenset()) -> None:
        """`decide`: says which of two numbers of some sources counts, where one may be right in general."""
        self.rank, self.one, self.decide, self.sources = rank, one, decide, sources

    def decided(self, in_general: Any = None) -> Any:
        """The number that counts; there may be one that is right in general."""
        return self.decide(self.rank, self.one, self.sources, in_general)

    def made(self, rank: Any, one: Any, *others: Any) -> "Node":
        """What is made of this and other nodes."""
        sources = self.sources
        for x in others:
            sources = sources | x.sources if isinstance(x, Node) and x.sources else sources
        return Node(rank, one, self.decide, sources)

    in_general: bool | None = None  # of a comparison, what holds but in special cases

    def wrap_int(self, number: Any) -> "Node":
        return self.made(number, number)

    def is_contiguous(self, sizes: Any, strides: Any) -> "Node":
        def row_major(side: str) -> bool:
            lengths, steps = ([_of(n, side) for n in numbers] for numbers in (sizes, strides))
            pairs = enumerate(zip(lengths, steps, strict=True))
            return 0 in lengths or all(n == 1 or step == math.prod(lengths[i + 1 :]) for i, (n, step) in pairs)

        return self.made(row_major("rank"), row_major("one"))

    def sym_sum(self, terms: Any) -> "Node":
        return self.made(*(sum(_of(getattr(x, "node", x), side) for x in terms) for side in ("rank", "one")))

    wrap_float = wrap_bool = wrap_int
    is_non_overlapping_and_dense = is_contiguous

    hint = property(attrgetter("rank"))


# What other methods answer, whatever else they are given.
_ANSWERS: dict[str, Callable[[Node], Any]] = {
    "is_int": lambda node: type(node.rank) is int,
    "is_float": lambda node: type(node.rank) is float,
    "is_bool": lambda node: type(node.rank) is bool,
    "is_constant": lambda node: node.rank == node.one,
    "maybe_as_int maybe_as_float maybe_as_bool constant_int constant_bool": lambda node: (
        node.rank if node.rank == node.one else None
    ),
    "guard_int guard_float expect_true require_hint bool_ int_": lambda node: node.decided(),
    "guard_bool": lambda node: node.decided(node.in_general),
    "guard_or_false statically_known_true": lambda node: node.decided(False),
    "guard_or_true": lambda node: node.decided(True),
    "guard_size_oblivious": lambda node: node.decided(node.one),  # as if neither 0 nor 1, which one process tells
    "clone sym_int trunc floor ceil round": lambda node: node,
    "is_non_overlapping_and_dense_indicator": lambda node: node.made(1, 1),
    "is_channels_last_contiguous_2d is_channels_last_contiguous_3d": lambda node: node.made(False, False),
    "is_channels_last_strides_2d is_channels_last_strides_3d": lambda node: node.made(False, False),
    "is_symbolic has_hint expect_size": lambda node: True,
    "is_nested_int": lambda node: False,
    "nested_int singleton_int nested_int_coeff": lambda node: None,
    "str _graph_repr": lambda node: repr(node.rank),
}


for _names, _answer in _ANSWERS.items():
    for _name in _names.split():
        setattr(Node, _name, lambda node, *_, answer=_answer: answer(node))


def _of(number: Any, side: str) -> Any:
    return getattr(number, side) if isinstance(number, Node) else number


def _in_both(function: Callable[..., Any]) -> Any:
    in_general = {operator.eq: False, operator.ne: True}.get(function)

    def method(self: Node, *others: Any) -> Node:
        ranks = [x.rank if isinstance(x, Node) else x for x in others]
        ones = [x.one if isinstance(x, Node) else x for x in others]
        node = self.made(function(self.rank, *ranks), function(self.one, *ones), *others)
        node.in_general = in_general
        return node

    return method


_SAME_NAMES = "add sub mul mod floordiv truediv pow neg eq ne lt le gt ge and_ or_"
_ON_NUMBERS = {name: getattr(operator, name) for name in _SAME_NAMES.split()}
_ON_NUMBERS |= {"int_floordiv": operator.floordiv, "int_truediv": operator.truediv, "float_truediv": operator.truediv}
_ON_NUMBERS |= {"pow_by_natural": operator.pow, "float_pow": operator.pow, "sym_min": min, "sym_max": max, "abs": abs}
_ON_NUMBERS |= {"sym_and": operator.and_, "sym_or": operator.or_, "sym_not": operator.not_, "sym_float": float}
_ON_NUMBERS |= {"sym_sqrt": math.sqrt, "is_integer": lambda a: float(a).is_integer()}
for _name, _function in _ON_NUMBERS.items():
    setattr(Node, _name, _in_both(_function))


# Of a tensor subclass: functions of torch take it as they take others.
plainly: Any = torch._C._disabled_torch_function_impl


def wrapper(cls: Any, sizes: Sequence[Any], strides: Sequence[Any], like: Tensor) -> Any:
    """A tensor of a class around others, with these sizes and strides, on the device and in the dtype of `like`."""
    policy = "strides"  # or torch keeps what it was told once of its memory
    return Tensor._make_wrapper_subclass(
        cls, sizes, strides=strides, dtype=like.dtype, device=like.device, dispatch_sizes_strides_policy=policy
    )


_aten = torch.ops.aten
PLAIN = {_aten.size.default, _aten.stride.default}  # of which C++ wants numbers
# How a tensor lies in memory, as torch asks a wrapper.
OF_MEMORY: dict[Any, Callable[..., Any]] = {
    _aten.is_contiguous.default: Tensor.is_contiguous,
    _aten.is_contiguous.memory_format: lambda x, layout: x.is_contiguous(memory_format=layout),
    _aten.sym_is_contiguous.default: lambda x, layout=torch.contiguous_format: x.is_contiguous(memory_format=layout),
    _aten.is_non_overlapping_and_dense.default: lambda x: x.is_contiguous() or x.t().is_contiguous(),
    _aten.is_strides_like_format.default: _aten.is_strides_like_format.default,
    _aten.size.default: lambda x: list(x.shape),
    _aten.stride.default: lambda x: list(x.stride()),
    _aten.sym_stride.default: lambda x: list(x.stride()),
}

# Products that ask symbolic sizes for a plain number where no gradient is asked for, unless they get two dims.
FOLDED_BY_VALUE = () if torch.__version__ >= "2.13" else (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
