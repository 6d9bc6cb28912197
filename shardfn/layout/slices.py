"""Which slices of a parameter go from whom to whom when it gets another layout, on the same ranks or on others.

Integers: nothing is sent, and no process group is asked. `comm/slice_messages.py` sends what is planned here.

A rank receives what it lacks and nothing else; what it has itself it copies. Of ranks that have the same slice, those
that want it ask in turns. What a rank receives, or sends, is found without a look at what others do: of each dim it
takes the pieces that meet its own, so that it costs as much as there are ranks, and what comes out.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple
from zlib import crc32

from shardfn.layout.layout import Along, Axes, Box, Layout, Leaf, Run, along, runs
from shardfn.layout.mesh import Ranks, index_along, nested_chunk

Common = tuple[int, int, int, int]  # (start, length, start in one part, start in another) of what both have of a dim
Split = tuple[tuple[int, int, tuple[str, ...]], ...]  # (stored size, true size, axes) of each factor of a dim
Piece = tuple[int, int, dict[str, int], list[Run]]  # (begin, end, place along the axes, runs) of one part of a dim


class Held(NamedTuple):
    """A parameter as ranks have it."""

    layout: Layout
    ranks: Ranks

    def holder(self, leaf: Leaf, coords: Axes, target: int, turn: int) -> int:
        """Who has the part of a leaf at `coords`, along the axes that split it, for a rank; several have turns."""
        own, sizes = self.ranks.coords_of.get(target), self.ranks.sizes
        if own is not None and all(own[axis] == coords[axis] for axis in coords):
            return target
        return self.ranks.ranks[index_along(sizes, sizes, in_turn(leaf.name, sizes, coords, turn))]


class Slice(NamedTuple):
    """What `source` has for `target`: a box of the model's tensor, and of the merged parts of the leaves that hold it.

    Where both are one rank, it is copied.
    """

    box: Box
    source: int
    leaf: Leaf
    there: Box
    target: int
    into: Leaf
    here: Box


def in_turn(name: str, sizes: Axes, coords: Axes, turn: int = 0) -> dict[str, int]:
    """Of the ranks at `coords` along some axes, the one that has this turn of what all of them have of a leaf."""
    free = [axis for axis in sizes if axis not in coords]
    number, count, places = crc32(name.encode(errors="surrogatepass")), prod(sizes[axis] for axis in free), dict(coords)
    while turn and count > 1:  # turns that are `count` apart are not all the same rank's
        turn, digit = divmod(turn, count)
        number += digit
    for axis in free:
        number, places[axis] = divmod(number, sizes[axis])
    return places


def received(old: Held, new: Held, rank: int) -> Iterator[Slice]:
    """All that a rank has in a new layout, and who has it in the old one. Padding is in no slice.

    >>> from shardfn.layout import Policy, Ranks, decide, describe
    >>> from shardfn.layout.slices import Held, received
    >>> import torch
    >>> axes, info = {"fsdp": 2}, describe({"w": torch.empty(4, 2, device="meta")})
    >>> rows, whole = (
    ...     Held(decide(info, axes, Policy(default=how)).layouts["w"], Ranks(sizes=axes, ranks=(0, 1)))
    ...     for how in ("auto", "replicate")
    ... )
    >>> [(x.source, x.box) for x in received(rows, whole, 0)]
    [(0, ((0, 2), (0, 2))), (1, ((2, 2), (0, 2)))]
    """
    sizes, own = new.ranks.sizes, new.ranks.coords_of[rank]
    turn = index_along(sizes, sizes, own)
    for leaf, into in product(old.layout.leaves, new.layout.leaves):
        for coords, common in _meeting(along(new.layout, into, sizes, own), old, leaf):
            source = old.holder(leaf, coords, rank, turn)
            yield from (Slice(box, source, leaf, there, rank, into, here) for box, here, there in _boxes(common))


def sent(old: Held, new: Held, rank: int) -> Iterator[Slice]:
    """What a rank has in the old layout that others get from it; for each of them as `received` says it there."""
    own, sizes = old.ranks.coords_of[rank], new.ranks.sizes
    for leaf, into in product(old.layout.leaves, new.layout.leaves):
        mine = {axis: own[axis] for axis in leaf.axes}
        for coords, common in _meeting(along(old.layout, leaf, old.ranks.sizes, own), new, into):
            boxes = list(_boxes(common))
            for places in product(*([coords[axis]] if axis in coords else range(n) for axis, n in sizes.items())):
                turn = index_along(sizes, sizes, dict(zip(sizes, places, strict=True)))
                target = new.ranks.ranks[turn]
                if old.holder(leaf, mine, target, turn) == rank != target:
                    yield from (Slice(box, rank, leaf, there, target, into, here) for box, there, here in boxes)


def as_runs(box: Box) -> Along:
    """A box, dim by dim."""
    return [[(start, length, 0)] for start, length in box]


def overlaps(a: Along, b: Along) -> Iterator[tuple[Box, Box, Box]]:
    """(box, the same in the one part, in the other) of all that two parts of a tensor have in common.

    >>> from shardfn.layout.slices import as_runs, overlaps
    >>> list(overlaps(as_runs(((0, 4),)), as_runs(((3, 3),))))
    [(((3, 1),), ((3, 1),), ((0, 1),))]
    """
    return _boxes([_common(x, y) for x, y in zip(a, b, strict=True)])


def _boxes(common: Sequence[Sequence[Common]]) -> Iterator[tuple[Box, Box, Box]]:
    for some in product(*common):
        box, one, other = (tuple((x[i], x[1]) for x in some) for i in (0, 2, 3))
        yield box, one, other


def _common(a: Sequence[Run], b: Sequence[Run]) -> list[Common]:
    out, i, j = list[Common](), 0, 0
    while i < len(a) and j < len(b):
        (s, n, at), (t, m, to) = a[i], b[j]
        start, end = max(s, t), min(s + n, t + m)
        if start < end:
            out.append((start, end - start, at + start - s, to + start - t))
        i, j = (i + 1, j) if s + n < t + m else (i, j + 1)
    return out


def _meeting(mine: Along, held: Held, leaf: Leaf) -> Iterator[tuple[dict[str, int], list[list[Common]]]]:
    """Which parts of a leaf have some of mine, by places along the axes that split it, and what of each dim."""
    meeting = list[list[tuple[dict[str, int], list[Common]]]]()
    for dim, own in enumerate(mine):
        factors = leaf.factors(dim)
        split: Split = tuple(zip(leaf.shape[factors], leaf.extent[factors], leaf.splits[factors], strict=True))
        before = held.layout.block(leaf)[0] if dim == held.layout.block_dim else 0
        pieces = _pieces(split, tuple((axis, held.ranks.sizes[axis]) for _, _, axes in split for axis in axes), before)
        low, high = (own[0][0], own[-1][0] + own[-1][1]) if own else (0, 0)
        common = ((coords, _common(own, theirs)) for begin, end, coords, theirs in pieces if begin < high and low < end)
        meeting.append([(coords, some) for coords, some in common if some])
    for chosen in product(*meeting):
        yield {axis: at for coords, _ in chosen for axis, at in coords.items()}, [common for _, common in chosen]


@lru_cache(maxsize=64)
def _pieces(split: Split, sizes: tuple[tuple[str, int], ...], before: int) -> list[Piece]:
    """The parts of a dim that are not empty; the same for like layers."""
    out, counts = list[Piece](), dict(sizes)
    for places in product(*map(range, counts.values())):
        coords = dict(zip(counts, places, strict=True))
        ranges = [nested_chunk(size, [(counts[axis], coords[axis]) for axis in axes]) for size, _, axes in split]
        if some := [(start + before, n, at) for start, n, at in runs([true for _, true, _ in split], ranges)]:
            out.append((some[0][0], some[-1][0] + some[-1][1], coords, some))
    return out
