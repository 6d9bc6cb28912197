"""Two sizes in one run: what one rank has, and what one process has.

[Note: paired sizes]
A forward with split weights has other sizes on a rank than in one process. It runs once, without data, and every tensor
whose sizes differ holds two, `Paired`; each size of it is two numbers, `Size`. An operation is done on both, each with
plain numbers, so that there is nothing to align afterwards: the same operation of the user's line, on both sides.

    side | what operations take of a pair      | where
    ------|-------------------------------------|---------------------------------------------
    both  | each of them by itself              | the model's own forwards
    rank  | what a rank has                     | parallel forwards, collectives
    one   | what one process has                | the module's own forward, in place of those

Python decides by a size that differs (`if`, `range`, `float`): it goes the way of one process, and the line is noted.
Whether a rank, which goes its own way, makes the same values is seen in a run of its own; see `values_of_a_rank` in
shape_trace.py. torch itself decides by one: the function that is running is done on each side by itself.

A number of two sides, and one that remembers what it was asked (`guards.py`), are numbers for Python: what a sum, a
comparison or `int()` of one is, `methods` defines once for all methods of such a kind.
"""

import linecache
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from inspect import currentframe
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import OF_MEMORY, PLAIN, Node, plainly, wrapper
from shardfn.context import having, holding
from shardfn.trace.meta_values import leaves_of

_Function = Callable[..., Any]
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_OF_ONE = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne")  # or comparisons
_COMPUTING: dict[str, _Function] = {f"__{name}__": getattr(operator, f"__{name}__") for name in (*_OF_TWO, *_OF_ONE)}
_COMPUTING |= {f"__r{name}__": lambda a, b, name=name: _COMPUTING[f"__{name}__"](b, a) for name in _OF_TWO}
_COMPUTING |= {f"__{function.__name__}__": function for function in (round, math.trunc, math.floor, math.ceil)}
_CONVERTING = (bool, int, float, complex, operator.index, repr, str, format)

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
Side = Literal["both", "rank", "one"]
ALONE: tuple[Side, Side] = ("rank", "one")


def methods(compute: _Function, decided: Callable[[Any], Any], kinds: Collection[type]) -> dict[str, _Function]:
    """The methods of what Python takes for a number, in terms of plain numbers.

    Args:
        compute: `compute(function, *numbers)` is the function's result for them and plain numbers: a sum, a comparison.
        decided: the plain number that counts, where something else is made of one: by `int`, `if`, `range`, as text.
        kinds: their classes.
    """

    def computing(function: _Function) -> _Function:
        def method(*numbers: Any) -> Any:
            known = all(type(x) in (int, float, bool, *kinds) for x in numbers)
            return compute(function, *numbers) if known else NotImplemented

        return method

    def converting(function: _Function) -> _Function:
        return lambda number, *args: function(decided(number), *args)

    table = {name: computing(function) for name, function in _COMPUTING.items()}
    table |= {f"__{function.__name__}__": converting(function) for function in _CONVERTING}
    return table | {"__divmod__": lambda a, b: (a // b, a % b), "__rdivmod__": lambda a, b: (b // a, b % a)}


class SizesDiffer(BaseException):
    """torch decides by a size that differs: the function that is running has to be done on each side by itself."""


class Decision(NamedTuple):
    """A size by which Python decided, which is one here and another one in one process; `line` is the user's."""

    rank: Any
    one: Any
    line: str
    path: str


class Sides:
    """On which sides a run is, and what was decided in both by sizes that differ."""

    def __init__(self, at: Side = "both") -> None:
        self.at: Side = at
        self.decided: list[Decision] = []
        self.in_torch = ""  # the function of torch that is running
        self.path: Callable[[], str] = str  # of the module that is running
        # Told of what `Policy.acts` splits at some modules and the module at a path needs whole.
        self.needs_whole: Callable[[Collection[str], str], None] = lambda sources, path: None

    def only(self, side: Side) -> AbstractContextManager[None]:
        """Within it, one of them."""
        return having(self, at=side)

    def run(self) -> AbstractContextManager[None]:
        """Within it, sizes ask these sides."""
        return holding(_SIDES, self)

    def decide(self, rank: Any, one: Any, sources: frozenset[str] = frozenset(), in_general: Any = None) -> Any:
        """Which of two values counts; within torch there may be one that is right in general.

        Raises:
            SizesDiffer: on both sides, within a function of torch.
        """
        if rank == one or self.at == "rank":
            return rank
        if self.at == "one":
            return one
        if self.in_torch and in_general is not None:
            return in_general
        if self.in_torch:
            raise SizesDiffer
        decision = Decision(rank, one, _line(), self.path())
        if decision not in self.decided:
            self.decided.append(decision)
        if sources:
            self.needs_whole(sources, decision.path)
        return one

    def as_many(self, rank: Any, one: Any) -> Any:
        """What an operation gives a rank, in as many pieces as it gives one process, which Python may count."""
        if not (isinstance(rank, list | tuple) and isinstance(one, list | tuple)) or len(rank) == len(one):
            return rank
        with having(self, in_torch=""):
            self.decide(len(rank), len(one))
        return [*rank, *(rank[-1].detach() for _ in range(len(rank), len(one)))][: len(one)]


_SIDES: ContextVar[Sides] = ContextVar("sides")


def _decide(rank: Any, one: Any, sources: frozenset[str] = frozenset(), in_general: Any = None) -> Any:
    return _SIDES.get().decide(rank, one, sources, in_general)


def _line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame = currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "shardfn"):
        frame = frame.f_back
    code, at = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, at, frame.f_globals).strip()
    place = f"{os.path.relpath(code.co_filename)}:{at}"
    return f"`{text}` ({place})" if text else place


class Size(torch.SymInt):
    """A size that is one number on a rank and another one in one process; for Python it is an `int`."""

    node: Any
    __class__: Any = property(lambda self: int)  # for `isinstance`

    def __init__(self, rank: int, one: int, sources: frozenset[str] = frozenset()) -> None:
        super().__init__(Node(rank, one, _decide, sources))

    def __hash__(self) -> int:
        raise TypeError(  # einops does without its caches then, which would mix what ranks and one process have
            f"a size of this rank, {self.node.rank}, which is {self.node.one} on one rank, is no key: write int(n)"
        )


def both(rank: Any, one: Any, sources: frozenset[str] = frozenset()) -> Any:
    """A number that is `rank` and `one`; one that is no integer is decided by."""
    if type(rank) is type(one) and rank == one:
        return rank
    return Size(rank, one, sources) if type(rank) is type(one) is int else _decide(rank, one, sources)


def of_side(x: Any, side: Side) -> Any:
    """What one side has of a number."""
    if isinstance(x, _SYMBOLS) and isinstance(x.node, Node):
        return x.node.one if side == "one" else x.node.rank
    return x


def _computed(function: Callable[..., Any], *numbers: Any) -> Any:
    rank, one = (function(*(of_side(x, side) for x in numbers)) for side in ALONE)
    return both(rank, one, sources_of(numbers))


for _name, _method in methods(_computed, lambda size: size.node.decided(), (Size, torch.SymInt)).items():
    setattr(Size, _name, _method)


class Paired(Tensor):
    """A tensor without data that has other sizes, or known values, on a rank than in one process."""

    local: Tensor
    whole: Tensor

    def __new__(cls: type["Paired"], local: Tensor, whole: Tensor) -> "Paired":
        """`local` is what a rank has, `whole` what one process has in its place."""
        shapes, strides = zip(local.shape, whole.shape, strict=True), zip(local.stride(), whole.stride(), strict=True)
        pair = wrapper(cls, [_symbol(*n) for n in shapes], [_symbol(*n) for n in strides], local)
        pair.local, pair.whole = local, whole
        return pair

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where no run sees it, as in a thread of its own, which has no sides."""
        raise LookupError(_SIDES)

    __torch_function__: Any = plainly


def of_memory(func: Any, args: Any) -> Any:
    """How a pair lies in memory; who asks for plain numbers decides by them."""
    rank, one = (OF_MEMORY[func](*taken(args, side)) for side in ALONE)
    if isinstance(rank, list):
        join = _decide if func in PLAIN else _symbol
        return [join(*n) for n in zip(rank, one, strict=True)]
    return _decide(rank, one, in_general=False)


def _symbol(rank: int, one: int) -> Any:
    return rank if rank == one else torch.SymInt(Node(rank, one, _decide))


def local_of(x: Tensor) -> Tensor:
    """What a rank has of a tensor."""
    return x.local if type(x) is Paired else x


def whole_of(x: Tensor) -> Tensor:
    """What one process has in the place of a tensor."""
    return x.whole if type(x) is Paired else x


def taken(tree: Any, side: Side) -> Any:
    """What one side has of the arguments of an operation."""
    if type(tree) is Paired:
        return tree.whole if side == "one" else tree.local
    if isinstance(tree, list | tuple):
        items = [taken(x, side) for x in tree]
        return items if isinstance(tree, list) else tuple(items)
    return {key: taken(x, side) for key, x in tree.items()} if isinstance(tree, dict) else of_side(tree, side)


def is_paired(tree: Any) -> bool:
    """Whether the sides have different arguments."""
    return any(type(x) is Paired or isinstance(x, _SYMBOLS) for x in leaves_of(tree))


def sources_of(values: Iterable[Any]) -> frozenset[str]:
    """The modules at which `Policy.acts` splits what sizes among values, or their nodes, are of."""
    nodes = (x.node if type(x) in (Size, torch.SymInt) else x for x in values)
    return frozenset[str]().union(*(node.sources for node in nodes if isinstance(node, Node)))


def lie_alike(local: Tensor, whole: Tensor) -> bool:
    """Whether there may be one tensor on both sides, if its values are the same."""
    return (local.shape, local.stride(), local.dtype) == (whole.shape, whole.stride(), whole.dtype)


def paired(local: Any, whole: Any, arguments: dict[int, Tensor], same: Callable[[Tensor, Tensor], bool]) -> Any:
    """The results of an operation on both sides as one; those that are `arguments`, by id, are returned as they are.

    `same`: whether two tensors have the same known values.
    """
    if isinstance(local, list | tuple):
        items = [paired(a, b, arguments, same) for a, b in zip(local, whole, strict=True)]
        return items if isinstance(local, list) else tuple(items)
    if not isinstance(local, Tensor):
        return local if type(local) is type(whole) and local == whole else _number(local, whole)
    if id(local) in arguments:
        return arguments[id(local)]
    alike = local is whole or (lie_alike(local, whole) and same(local, whole))
    return local if alike else Paired(local, whole)


def _number(rank: Any, one: Any) -> Any:
    """A number that an operation gives to torch."""
    if type(rank) is int and type(one) is int:
        return _symbol(rank, one)
    if rank != rank and one != one:  # neither is a number
        return rank
    raise SizesDiffer


def sizes_of(x: Any, sources: Collection[str] = ()) -> Any:
    """What a function of torch returned, with sizes that Python takes for integers."""
    if isinstance(x, tuple) and any(type(n) is torch.SymInt for n in x):
        return type(x)(sizes_of(n, sources) if type(n) is torch.SymInt else n for n in x)
    if type(x) is torch.SymInt:
        node, at = x.node, _SIDES.get().at
        return of_side(x, at) if at != "both" else both(node.rank, node.one, node.sources | frozenset(sources))
    return both(*(of_side(x, at) for at in ALONE)) if type(x) in (torch.SymBool, torch.SymFloat) else x
