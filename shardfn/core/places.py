"""Where the leaves of a bucket lie: in the flat tensor of shards, in the parts of all ranks, as whole leaves. Layer 1.

flat     [n]       this rank's shards side by side, each padded to the chunk of the first rank
parts    [W, n]    the flat tensors of all ranks
whole    [m]       the whole leaves, each beginning at a multiple of 64 bytes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.core.pool import View, view_of

_ALIGNMENT = 64  # bytes: where whole leaves begin, for vector instructions


@dataclass(frozen=True)
class Move:
    """How one leaf takes part in undoing or redoing its split over one axis of W ranks.

    `shard` is its shape here, `chunk` the same with the split dim padded to what the first rank has, `whole` the shape
    without the split.
    """

    dim: int
    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of a chunk."""
        return prod(self.chunk)

    @property
    def rows_first(self) -> bool:
        """Whether every rank's part of the whole leaf is one piece of memory."""
        return prod(self.whole[: self.dim]) == 1

    def lengths(self, ranks: int) -> list[int]:
        """Elements of each rank's part."""
        rest = prod(self.whole) // max(self.whole[self.dim], 1)
        step, size = self.chunk[self.dim], self.whole[self.dim]
        return [rest * max(0, min(step, size - rank * step)) for rank in range(ranks)]

    def pairs(self, parts: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """([W, *chunk], whole) -> (view of the parts, view of the whole leaf) that hold the same elements."""
        joined = parts.movedim(0, self.dim)  # [..., W, chunk, ...]
        step, size = self.chunk[self.dim], self.whole[self.dim]
        full, rest = divmod(size, step) if step else (0, 0)
        out = []
        if full:
            place = whole.narrow(self.dim, 0, full * step).unflatten(self.dim, (full, step))
            out.append((joined.narrow(self.dim, 0, full), place))
        if rest:
            last = joined.select(self.dim, full).narrow(self.dim, 0, rest)
            out.append((last, whole.narrow(self.dim, full * step, rest)))
        return out


class Copies(NamedTuple):
    """Copies between the parts of all ranks and the whole leaves, as parallel lists."""

    leaves: list[int]
    parts: list[View]
    in_leaf: list[View]
    in_whole: list[View]


class Places:
    """How some leaves lie, worked out once for all buckets that are alike; see `places_of`."""

    def __init__(self, moves: Sequence[Move], ranks: int) -> None:
        self.moves, self.ranks = moves, ranks
        self.starts = list(accumulate((move.numel for move in moves), initial=0))  # of each shard in the flat tensor
        self.numel = self.starts[-1]  # n
        self.contiguous = all(prod(move.shard[: move.dim]) <= 1 or move.shard == move.chunk for move in moves)
        self.full = all(move.shard == move.chunk and move.numel for move in moves)  # no shard is padded, none empty
        self.shards = [self._shard(move, start) for move, start in zip(moves, self.starts, strict=False)]
        self._copies: dict[tuple[int, int], Copies] = {}

    def _shard(self, move: Move, start: int) -> View:
        chunk = torch.empty(self.numel, device="meta").narrow(0, start, move.numel).view(move.chunk)
        return view_of(chunk.narrow(move.dim, 0, move.shard[move.dim]))

    def even(self, first: int) -> bool:
        """Whether all leaves from `first` on are cut into equal parts on their first dim."""
        return first >= self._even_from

    @cached_property
    def _even_from(self) -> int:
        odd = (i for i, x in enumerate(self.moves) if x.dim or not x.numel or x.whole[0] != x.chunk[0] * self.ranks)
        return max(odd, default=-1) + 1

    def whole_starts(self, itemsize: int) -> list[int]:
        """Where each whole leaf begins, and the size m of all, in elements."""
        unit = max(1, _ALIGNMENT // itemsize)
        return list(accumulate((-(-prod(move.whole) // unit) * unit for move in self.moves), initial=0))

    def copies(self, first: int, itemsize: int) -> Copies:
        """How the leaves from `first` on lie in their parts [W, n - start of `first`], and in the whole leaves."""
        key = (first, itemsize)
        if key not in self._copies:
            self._copies[key] = self._made_copies(first, itemsize)
        return self._copies[key]

    def _made_copies(self, first: int, itemsize: int) -> Copies:
        made = Copies([], [], [], [])
        starts = self.whole_starts(itemsize)
        parts = torch.empty(self.ranks, self.numel - self.starts[first], device="meta")
        for index in range(first, len(self.moves)):
            move, start = self.moves[index], self.starts[index] - self.starts[first]
            part = parts.narrow(1, start, move.numel).view(self.ranks, *move.chunk)
            for from_, to in move.pairs(part, torch.empty(move.whole, device="meta")):
                place = view_of(to)
                made.leaves.append(index)
                made.parts.append(view_of(from_))
                made.in_leaf.append(place)
                made.in_whole.append(place._replace(offset=starts[index] + place.offset, end=starts[index] + place.end))
        return made


@lru_cache(maxsize=2**10)
def places_of(moves: tuple[Move, ...], ranks: int) -> Places:
    """The same object for buckets that are alike, such as those of the layers of a model: buffers keep its views."""
    return Places(moves, ranks)
