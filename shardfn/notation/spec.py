"""The rule notation: text to a `Spec` and back, and the sizes that its names stand for.

    rule    := dim* partial?                          one dim per tensor dim, in stored order
    dim     := factor | "(" factor+ ")" | "(" block ("+" block)+ ")" | "..."
    block   := [label ":"] factor+
    factor  := (NAME | INT | "_") ("@" AXIS)* "?"?
    partial := "+" AXIS ("," AXIS)*

An AXIS is a name, or the number of an axis of a mesh without names.
Left is outermost, always. Names only label; `Sizes` makes each of them one number over a whole model.
Nothing here knows about meshes or torch.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from math import prod
from typing import NamedTuple, NoReturn, TypeVar

from shardfn.notation.errors import ShardError, caret, did_you_mean

_TOKEN = re.compile(r"(?P<name>[^\W\d]\w*)|(?P<int>\d+)|(?P<dots>\.\.\.)|(?P<mark>[()@?+:,])|(?P<odd>\S)")

Span = tuple[int, int]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Factor:
    """One named, numbered or anonymous (`_`) factor of a dim, and the mesh axes that split it."""

    name: str
    axes: tuple[str, ...] = ()
    optional: bool = False
    span: Span = field(default=(0, 0), compare=False, repr=False)

    def __str__(self) -> str:
        return self.name + "".join(f"@{axis}" for axis in self.axes) + ("?" if self.optional else "")


@dataclass(frozen=True)
class Block:
    """One part of a fused dim: its factors, outermost first, and its label (`q` in `q: heads d`)."""

    factors: tuple[Factor, ...]
    label: str | None = None

    def __str__(self) -> str:
        return (f"{self.label}: " if self.label else "") + " ".join(map(str, self.factors))


@dataclass(frozen=True)
class Dim:
    """One tensor dim: one block of factors, several for a fused dim, none for `...`."""

    blocks: tuple[Block, ...]
    span: Span = field(default=(0, 0), compare=False, repr=False)

    @property
    def ellipsis(self) -> bool:
        """Whether this stands for any number of unsplit dims."""
        return not self.blocks

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All factors, block after block."""
        return tuple(factor for block in self.blocks for factor in block.factors)

    def __str__(self) -> str:
        if self.ellipsis:
            return "..."
        if len(self.blocks) == 1 and len(self.blocks[0].factors) == 1 and not self.blocks[0].label:
            return str(self.blocks[0].factors[0])
        return "(" + " + ".join(map(str, self.blocks)) + ")"


@dataclass(frozen=True)
class Spec:
    """A parsed rule. `str(spec)` is the canonical text, and `parse(str(spec)) == spec`."""

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    source: str = field(default="", compare=False, repr=False)
    partial_span: Span = field(default=(0, 0), compare=False, repr=False)

    def __str__(self) -> str:
        words = [str(dim) for dim in self.dims]
        if self.partial:
            words.append("+" + ",".join(self.partial))
        return " ".join(words)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All factors of all dims, left to right."""
        return tuple(factor for dim in self.dims for factor in dim.factors)

    def caret(self, span: Span) -> str:
        """The rule as written, with `^^^` under `span`."""
        return caret(self.source or str(self), span)

    def with_factors(self, fn: Callable[[Factor], Factor]) -> "Spec":
        """The same rule with what `fn` makes of each factor, left to right."""

        def each(dim: Dim) -> Dim:
            blocks = (replace(block, factors=tuple(map(fn, block.factors))) for block in dim.blocks)
            return replace(dim, blocks=tuple(blocks))

        return replace(self, dims=tuple(map(each, self.dims)))

    def grouped(self, values: Iterable[_Value]) -> list[list[list[_Value]]]:
        """What there is for each factor, left to right, by dim and block."""
        rest = iter(values)
        return [[list(islice(rest, len(block.factors))) for block in dim.blocks] for dim in self.dims]

    def without(self, axes: Collection[str]) -> "Spec":
        """The same rule without some mesh axes; a factor that none is left for has no `?` either."""

        def whole(factor: Factor) -> Factor:
            left = tuple(axis for axis in factor.axes if axis not in axes)
            return replace(factor, axes=left, optional=factor.optional and bool(left))

        return self.with_factors(whole)

    def stacked(self, axes: Sequence[str]) -> "Spec":
        """With a new first dim, split over `axes`."""
        return replace(self, dims=(Dim((Block((Factor("b", tuple(axes)),)),)), *self.dims))

    def member(self) -> "Spec":
        """Without the first dim."""
        return replace(self, dims=self.dims[1:])

    def expand(self, ndim: int) -> "Spec":
        """The same rule for a tensor of `ndim` dims: `...` becomes anonymous dims.

        Raises:
            ShardError: the rule has another number of dims.
        """
        dots = [i for i, dim in enumerate(self.dims) if dim.ellipsis]
        fixed = len(self.dims) - len(dots)
        missing = ndim - fixed
        if missing < 0 or (missing and not dots):
            count = f"at least {fixed}" if dots else fixed
            spans = [*(dim.span for dim in self.dims), *([self.partial_span] if self.partial else [])] or [(0, 1)]
            marked = self.caret((spans[0][0], spans[-1][1]))
            raise ShardError(f"the rule has {count} dims, the tensor has {ndim}\n{marked}")
        if not dots:
            return self
        at, span = dots[0], self.dims[dots[0]].span
        anonymous = Dim((Block((Factor("_", span=span),)),), span=span)
        return replace(self, dims=self.dims[:at] + (anonymous,) * missing + self.dims[at + 1 :])


class _Parser:
    """Recursive descent over the tokens of one rule; every error shows the rule with a caret."""

    def __init__(self, source: str, span: Span | None = None) -> None:
        self.source, self.at = source, 0
        self.tokens = list(self._tokens(*(span or (0, len(source)))))

    def _tokens(self, start: int, end: int) -> Iterator[tuple[str, str, Span]]:
        for match in _TOKEN.finditer(self.source, start, end):
            kind = match.lastgroup or ""
            if kind == "odd":
                self.fail(f"unexpected character {match[0]!r}", match.span())
            yield (match[0] if kind == "mark" else kind), match[0], match.span()
        yield "end", "", (end, end + 1)

    def fail(self, why: str, span: Span | None = None) -> NoReturn:
        raise ShardError(f"bad rule: {why}\n{caret(self.source, span or self.tokens[self.at][2])}")

    def peek(self, *kinds: str) -> bool:
        return self.tokens[self.at][0] in kinds

    def take(self, what: str, *kinds: str) -> str:
        if not self.peek(*kinds):
            self.fail(f"expected {what}")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def since(self, first: int) -> Span:
        """Where the tokens from number `first` on stand that were taken."""
        return self.tokens[first][2][0], self.tokens[self.at - 1][2][1]

    def skip(self, kind: str) -> bool:
        is_next = self.peek(kind)
        self.at += is_next
        return is_next

    def spec(self) -> Spec:
        dims: list[Dim] = []
        while not self.peek("+", "end"):
            dims.append(self.dim())
        plus = self.at
        partial = self.axes("+", ",")
        sums = self.since(plus) if partial else (0, 0)
        if not self.peek("end"):
            self.fail("nothing may follow the pending sum")
        if sum(dim.ellipsis for dim in dims) > 1:
            self.fail("'...' may stand only once", [dim.span for dim in dims if dim.ellipsis][1])
        if sum(len(dim.blocks) > 1 for dim in dims) > 1:
            self.fail("only one dim of a tensor may be fused of blocks", [d.span for d in dims if len(d.blocks) > 1][1])
        return Spec(tuple(dims), partial, self.source, sums)

    def dim(self) -> Dim:
        first = self.at
        if self.skip("dots"):
            return Dim((), self.since(first))
        if not self.skip("("):
            factor = self.factor()
            return Dim((Block((factor,)),), factor.span)
        blocks = [self.block()]
        while self.skip("+"):
            blocks.append(self.block())
        self.take("')'", ")")
        labels = [block.label for block in blocks if block.label]
        if len(labels) != len(set(labels)):
            self.fail("two blocks have the same label", self.since(first))
        return Dim(tuple(blocks), self.since(first))

    def block(self) -> Block:
        label = None
        if self.peek("name") and self.tokens[self.at + 1][0] == ":":
            label = self.take("a label", "name")
            self.at += 1
        factors = []
        while self.peek("name", "int"):
            factors.append(self.factor())
        if not factors:
            self.fail("expected a name, a number or '_'")
        return Block(tuple(factors), label)

    def factor(self) -> Factor:
        first = self.at
        name = self.take("a name, a number, '_', '(' or '...'", "name", "int")
        axes, optional = self.axes("@", "@"), self.skip("?")
        return Factor(name, axes, optional, self.since(first))

    def axes(self, mark: str, more: str) -> tuple[str, ...]:
        """The axes behind a mark, and those behind further ones."""
        axes: list[str] = []
        while self.skip(mark):
            axes.append(self.take(f"a mesh axis after '{mark}'", "name", "int"))
            mark = more
        return tuple(axes)


@lru_cache(maxsize=4096)
def parse(rule: str, span: Span | None = None) -> Spec:
    """The `Spec` that `rule` spells, or the part of it at `span`; errors show all of it.

        >>> from shardfn.notation.spec import parse
        >>> str(parse("( heads@tp   d )  c@fsdp"))
        '(heads@tp d) c@fsdp'

    Raises:
        ShardError: with the rule and a caret under what is wrong.
    """
    if not isinstance(rule, str):
        raise TypeError(f"a rule is a string such as 'ff@tp c@fsdp', not {type(rule).__name__}")
    spec = _Parser(rule, span).spec()
    for problem in repeated_axes(spec):
        raise ShardError(f"bad rule: {problem}")
    return spec


def unknown_axes(spec: Spec, axes: Mapping[str, int]) -> list[str]:
    """Problems of axes that a mesh lacks, and of dims that have the name of one, as in a JAX `PartitionSpec`."""
    have = ", ".join(f"{name}={size}" for name, size in axes.items())
    used = [(axis, factor.span) for factor in spec.factors for axis in factor.axes]
    used += [(axis, spec.partial_span) for axis in spec.partial]
    bare = [factor for factor in spec.factors if factor.name in axes and not factor.axes]
    other = {a: f"; write '{a}@{x.name}'" for x in spec.factors for a in x.axes if x.name in axes}
    return [f"a dim is split by an @: write '_@{x.name}'\n{spec.caret(x.span)}" for x in bare] + [
        f"unknown mesh axis '{axis}'; the mesh has {have}"
        f"{other.get(axis) or did_you_mean(axis.lower(), axes) or f'; to split nothing over it: {have}, {axis}=1'}\n"
        f"{spec.caret(span)}"
        for axis, span in used
        if axis not in axes
    ]


def repeated_axes(spec: Spec) -> list[str]:
    """Problems of mesh axes that split more than one factor; the blocks of a fused dim count one by one."""
    times: Counter[str] = Counter()
    second: dict[str, Span] = {}
    for dim in spec.dims:
        before = times.copy()
        for block in dim.blocks:
            inside = before.copy()
            for axis, span in ((axis, factor.span) for factor in block.factors for axis in factor.axes):
                inside[axis] += 1
                if inside[axis] > 1:
                    second.setdefault(axis, span)
            times |= inside
    times += Counter(spec.partial)
    second = {axis: spec.partial_span for axis in spec.partial if times[axis] > 1} | second
    return [
        f"mesh axis '{axis}' is used {times[axis]} times; an axis can split at most one factor\n{spec.caret(span)}"
        for axis, span in second.items()
    ]


class _Equation(NamedTuple):
    """A dim of a tensor that follows a rule: the product of the factors of each block, added up, is its size.

    `keys` are the names under which the sizes of these factors are known.
    """

    tensor: str
    spec: Spec
    at: int
    size: int
    keys: Sequence[Sequence[str]]

    @property
    def dim(self) -> Dim:
        return self.spec.dims[self.at]

    def problem(self, why: str) -> tuple[str, str]:
        return self.tensor, f"{self.tensor}: {why}\n{self.spec.caret(self.dim.span)}"


class Sizes:
    """What each name stands for, solved over all parameters of a model.

    `add` collects the dims of one tensor, `solve` infers what follows from them and returns the problems.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.known: dict[str, int] = dict(sizes)
        self._origin: dict[str, str] = dict.fromkeys(sizes, "Policy.sizes")
        self._equations: list[_Equation] = []

    def add(self, tensor: str, spec: Spec, shape: tuple[int, ...]) -> None:
        """Note that `tensor` of `shape` follows `spec` (already expanded to its dims)."""
        for at, (size, keys) in enumerate(zip(shape, spec.grouped(_keys(tensor, spec)), strict=True)):
            self._equations.append(_Equation(tensor, spec, at, size, keys))

    def get(self, name: str) -> int | None:
        """The size of a name or of a number; None when it is not known."""
        return int(name) if name.isdecimal() else self.known.get(name)

    def of(self, tensor: str, spec: Spec) -> list[int]:
        """The sizes of all factors of the rule of a tensor, left to right, after `solve`."""
        return [int(key) if key.isdecimal() else self.known[key] for key in _keys(tensor, spec)]

    def solve(self) -> list[tuple[str, str]]:
        """Infer names one unknown at a time until nothing changes; the problems that remain, as (tensor, message)."""
        problems: list[tuple[str, str]] = []
        todo = sorted(self._equations, key=lambda equation: len(equation.dim.factors))
        while left := [equation for equation in todo if not self._settle(equation, problems)]:
            if len(left) == len(todo):
                return problems + [equation.problem(self._cannot_infer(equation)) for equation in left]
            todo = left
        return problems

    def _settle(self, equation: _Equation, problems: list[tuple[str, str]]) -> bool:
        """Check an equation without unknowns, or solve one with a single unknown. False: too early."""
        size, unknowns = equation.size, self._unknowns(equation)
        if len(unknowns) > 1:
            return False
        constant, with_one, with_two = (self._total(equation, value) for value in range(3))
        if not unknowns:
            if constant != size:
                origins = self._origins(equation.dim)
                remedy = "; a name has one size, so write another one here, or '_'" * bool(origins)
                why = f"dim {equation.at} of size {size} does not match {constant}{origins}{remedy}"
                problems.append(equation.problem(why))
            return True
        coefficient = with_one - constant
        if coefficient == 0 or with_two - with_one != coefficient:  # it is not linear
            return False
        value, rest = divmod(size - constant, coefficient)
        if rest or value < 0:
            unknown = unknowns[0].split(" ")[0]
            why = f"a dim of size {size} is not {coefficient} x {unknown}{f' + {constant}' if constant else ''}"
            rest_of = f"({size} - {constant})" if constant else f"{size}"
            arithmetic = f"{rest_of} % {coefficient} = {rest}" if value >= 0 else f"{size} < {constant}"
            problems.append(equation.problem(f"{why}: {arithmetic}{self._origins(equation.dim)}"))
            return True
        self.known[unknowns[0]] = value
        self._origin[unknowns[0]] = equation.tensor
        return True

    def _unknowns(self, equation: _Equation) -> list[str]:
        return list(dict.fromkeys(key for keys in equation.keys for key in keys if self.get(key) is None))

    def _total(self, equation: _Equation, value: int) -> int:
        """The size of a dim if `value` is that of what is unknown."""
        known = ([self.get(key) for key in keys] for keys in equation.keys)
        return sum(prod(value if size is None else size for size in sizes) for sizes in known)

    def _origins(self, dim: Dim) -> str:
        """Where the sizes known in a dim come from: `": c=8 (from 'up.weight')"`."""
        names = dict.fromkeys(f.name for f in dim.factors if f.name in self.known)
        known = ", ".join(f"{name}={self.known[name]} (from {self._origin[name]})" for name in names)
        return f": {known}" if known else ""

    def _cannot_infer(self, equation: _Equation) -> str:
        names = list(dict.fromkeys(key.split(" ")[0] for key in self._unknowns(equation)))
        ask = ", ".join(f"'{name}': ..." for name in [name for name in names if name != "_"][: len(names) - 1 or 1])
        remedy = f"pass sizes={{{ask}}}" if ask else "write a number or a name for it"
        return f"cannot infer {', '.join(names)} from a dim of size {equation.size}; {remedy}"


def _keys(tensor: str, spec: Spec) -> list[str]:
    """The names under which the sizes of the factors of a rule are known; every `_` is its own."""
    return [f"_ {tensor} {i}" if factor.name == "_" else factor.name for i, factor in enumerate(spec.factors)]
