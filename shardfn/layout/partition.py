"""Which part of a tensor the ranks of one axis have, as plain data, and what views make of it.

Besides, what a shape-only trace knows of a tensor, and what it cannot go on with.

A dim that W ranks split is a sequence of *runs*. A run (outer, inner) is `outer` blocks of `inner` elements here, and
of `W * inner` elements in the whole tensor, of which each rank has one part in order:

    "ff@tp"             one run       ((1, ff/W),)
    "(3 heads@tp d)"    one run       ((3, heads/W * d),)
    "(q: h@tp + k: g@tp)" two runs    ((1, h/W), (1, g/W)), one when h = g
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Literal

Runs = tuple[tuple[int, int], ...]
Shape = Sequence[int]
Cure = Literal["whole", "sizes", "pads", "rules", "sums", "draws"]


@dataclass(frozen=True)
class Part:
    """What the ranks of an axis have of one tensor; None in its place means that all have the same, whole.

    kind     | each rank has
    ---------|--------------------------------------------------------------------------------
    split    | its part of dim `dim`, which lies there as `runs` say; `share` ranks have the same
    same     | the same values, of which it uses its own share: gradients are parts of a sum
    sum      | a summand; the sum over ranks is the value
    lost     | something that cannot be told, because of `why`, since an operation in the module `where`; `cure`
             | says what may be done about it: the value whole, local sizes, other padding, other rules, a sum added up
    """

    kind: Literal["split", "same", "sum", "lost"]
    dim: int = 0
    runs: Runs = ()
    share: int = 1  # how many neighbouring ranks have the same part
    second: int | None = None  # a later dim, which these ranks have a part each of, in order
    why: str = ""
    cure: Cure = field(default="whole", repr=False)
    where: str | None = field(default=None, repr=False)

    @property
    def split(self) -> bool:
        """Whether it is a part of one dim."""
        return self.kind == "split"

    def at(self, dim: int) -> "Part":
        """The same at another dim."""
        return replace(self, dim=dim)

    def shifted(self, by: int) -> "Part":
        """The same where there are `by` more dims before."""
        return replace(self, dim=self.dim + by, second=None if self.second is None else self.second + by)

    @property
    def alone(self) -> bool:
        """Whether it is a part of one dim, which no other rank has."""
        return self.split and self.share == 1

    @property
    def is_even(self) -> bool:
        """Whether each rank has one piece of a dim, in order, so that these side by side are the whole."""
        return self.alone and len(self.runs) == 1 and self.runs[0][0] == 1

    @property
    def in_shares(self) -> bool:
        """Whether ranks have the same values, and each a part of their gradient."""
        return self.kind == "same" or (self.split and self.share > 1)

    def whole_shape(self, shape: Shape, size: int) -> tuple[int, ...]:
        """The shape of the whole tensor, of which a rank has `shape`."""
        if not self.split:
            return tuple(shape)
        whole = [n * size // self.share if dim == self.dim else n for dim, n in enumerate(shape)]
        if self.second is not None:
            whole[self.second] *= self.share
        return tuple(whole)

    def __post_init__(self) -> None:
        """Neighbours of one inner size are one run."""
        runs = tuple((sum(outer for outer, _ in alike), inner) for inner, alike in groupby(self.runs, itemgetter(1)))
        object.__setattr__(self, "runs", runs)

    @property
    def pieces(self) -> tuple[Runs, int]:
        """How the split dim lies: what two values have to have in common to be joined."""
        return self.runs, self.share


SAME = Part("same")
SUM = Part("sum")


class NotRankByRank(Exception):
    """An operation on split values that is not, rank by rank, the operation on whole values."""


def even(dim: int, size: int) -> Part:
    """A dim of which each rank has one piece of `size` elements."""
    return Part("split", dim, ((1, size),))


def reshaped(part: Part, shape: Shape, new: Shape) -> list[Part]:
    """Where a split dim is after a view of `shape` as `new`, both of one rank; several ways when sizes repeat.

    The elements of the tensor lie as [outer, W, inner], and a dim of `new` has W when the dims before it divide outer
    and those after it inner.

        >>> from shardfn.layout.partition import even, reshaped
        >>> reshaped(even(1, 8), (5, 8), (5, 2, 4))[0]
        Part(kind='split', dim=1, runs=((1, 2),), share=1, second=None, why='')

    Raises:
        NotRankByRank: the view cuts between the parts, or joins several runs with dims around them.
    """
    if 0 in shape and len(new) == len(shape):
        return [part]
    before, after = prod(shape[: part.dim]), prod(shape[part.dim + 1 :])
    ways = []
    for dim, size in enumerate(new) if 0 not in shape else ():
        front, back = prod(new[:dim]), prod(new[dim + 1 :])
        runs = tuple((outer * before // front, inner * after // back) for outer, inner in part.runs)
        # What does not divide was rounded down, and leaves less than the dim has.
        if sum(outer * inner for outer, inner in runs) == size and (len(runs) == 1 or front == before):
            ways.append(replace(part, dim=dim, runs=runs))
    if not ways:
        raise NotRankByRank(f"a view of {tuple(shape)} as {tuple(new)} cuts between the parts of dim {part.dim}")
    # Fewest pieces first; where the dims before it stay as they are, it is not one of them, though one may have size 1.
    stays = tuple(shape[: part.dim]) == tuple(new[: part.dim])
    return sorted(ways, key=lambda way: (way.runs[0][0], stays and way.dim < part.dim))


def in_two_dims(part: Part, shape: Shape, new: Shape, whole: Shape, size: int) -> Part | None:
    """After a view, a part of two dims, or of one that the view cuts in two or makes of two; its whole has a shape.

    The ranks lie as [outer, W, inner] in one dim, and as [outer, W / n, n, inner] in two: queries of 8 heads over 4
    ranks, as [2 groups, 4], are 2 of the 4 of one group on each.

        >>> from shardfn.layout.partition import even, in_two_dims
        >>> in_two_dims(even(1, 2), (5, 2), (5, 1, 2), whole=(5, 2, 4), size=4)
        Part(kind='split', dim=1, runs=((1, 1),), share=2, second=2, why='')
    """
    runs = part.runs
    if len(runs) != 1 or 0 in shape or len(new) != len(whole) or (part.share > 1 and part.second is None):
        return None
    after = runs[0][1] * prod(shape[part.dim + 1 :])  # elements of this rank behind those that it has of W / n
    behind = after if part.second is None else prod(shape[part.second :])  # and of n
    ways = []
    for way in reshaped(replace(part, second=None), shape, new):
        if after == behind:
            ways.append(replace(way, share=1))
        for dim in range(way.dim + 1, len(new)):
            share, rest = divmod(whole[dim], new[dim])
            if prod(new[dim:]) == behind and not rest and not size % share and part.share in (1, share):
                ways.append(replace(way, share=share, second=dim))
    return next((way for way in ways if way.whole_shape(new, size) == tuple(whole)), None)


def sliced(part: Part, start: int, length: int) -> Part:
    """The runs in `length` elements of the split dim from `start` on, both on one rank.

    Raises:
        NotRankByRank: the slice does not end where runs or their blocks do.
    """
    runs, at = [], 0
    for outer, inner in part.runs:
        first, last = max(start - at, 0), min(start + length - at, outer * inner)
        at += outer * inner
        if first >= last:
            continue
        if first % inner or last % inner:
            raise NotRankByRank("a slice cuts through the part of a split dim")
        runs.append(((last - first) // inner, inner))
    return replace(part, runs=tuple(runs))


def after_collective(kind: str, shape: Shape, dims: Sequence[int]) -> Part | None:
    """What a collective over the axis makes; `shape` is that of its result."""
    if kind in ("psum", "pmean", "all_gather_invariant"):
        return None
    if kind in ("pvary", "into_losses", "all_gather"):
        return SAME
    if kind in ("psum_scatter", "shard_slice"):
        return even(dims[0], shape[dims[0]])
    return Part("lost", why=f"{kind} was done by hand", cure="rules")


# -- in a shape-only trace ---------------------------------------------------------------------------------------------

BY_ACTS = "acts "  # begins what `Tag.split_by` has of an entry of `Policy.acts`


@dataclass(frozen=True)
class Tag:
    """What is known about one tensor.

    `parts`: what it is over each axis it varies over. `wants`: whether it depends on what is differentiated, which its
    `requires_grad` does not say inside an autograd.Function or a checkpoint that will recompute. `sources`: the
    parameters, and inputs and outputs of modules, that its gradient goes to; none when they are not known. `split_by`:
    the column-parallel modules whose split it carries, or the modules that `Policy.acts` splits. `weight`: whether it
    is a weight, moved at most. `empty`: the axes that split it with padding in which there are only zeros.
    """

    parts: Mapping[str, Part] = field(default_factory=dict)
    wants: bool = False
    sources: frozenset[str] = frozenset()
    split_by: frozenset[str] = frozenset()
    weight: bool = False
    empty: frozenset[str] = frozenset()

    @property
    def source(self) -> str | None:
        """The one parameter, or input or output of a module, that it is made of."""
        return next(iter(self.sources)) if len(self.sources) == 1 else None

    @property
    def by_acts(self) -> set[str]:
        """The modules at which `Policy.acts` splits it."""
        return {source.removeprefix(BY_ACTS) for source in self.split_by if source.startswith(BY_ACTS)}

    def can_join(self, axis: str) -> bool:
        """Whether ranks have one piece each of a dim, in order, which no other axis splits."""
        part, parts = self.parts[axis], self.parts.values()
        return part.is_even and all(other is part or not other.split or other.dim != part.dim for other in parts)

    def whole_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole value, of which a rank has `shape`."""
        for axis, part in self.parts.items():
            shape = part.whole_shape(shape, sizes[axis])
        return shape


Kind = Cure | Literal["gradient", "acts", "twice", "random", "backward", "zeros"]


@dataclass(frozen=True)
class Problem:
    """Something that no collective can mend: what it is, and by its kind what may be done about it.

    `sources`: the modules whose split the value carries. `at`: the module in which it went wrong.
    """

    what: str
    kind: Kind
    sources: frozenset[str] = frozenset()
    at: str = ""


@dataclass(frozen=True)
class FailedOperation:
    """An operation that raised, and what was known of the tensors that it was given."""

    name: str
    inputs: tuple[tuple[tuple[int, ...], Tag], ...]
