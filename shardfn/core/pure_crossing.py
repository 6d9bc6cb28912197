"""`Crossing` for tensors that have no memory of their own: recorded ones, and those of simulated ranks. Layer 3.

Leaves are put together, sent and taken apart by operations that return new tensors: a graph can hold them. Nothing is
written in place, and a part that depends on the rank is made by `per_rank`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardfn.core.collectives import Steps, gather_flat_steps, scatter_sum_steps
from shardfn.core.crossing import moves_of
from shardfn.core.layout import Leaf
from shardfn.core.mesh import Grid, per_rank
from shardfn.core.places import Move
from shardfn.core.pool import Buffers

Coords = Mapping[str, int]


class PureCrossing:
    """The leaves of a bucket and one axis. Flat tensors hold whole leaves, or padded shards, side by side."""

    def __init__(self, leaves: Sequence[Leaf], grid: Grid, axis: str, keep: tuple[str, ...]) -> None:
        """The leaves are split over `axis` innermost, and over the axes in `keep`."""
        self._leaves, self._grid, self._axis, self._keep = leaves, grid, axis, keep
        self.group, self.ranks = grid.groups[axis], grid.sizes[axis]
        self._moves: dict[tuple[int, ...], list[Move]] = {}

    def _moves_at(self, coords: Coords) -> list[Move]:
        key = tuple(coords.values())
        if key not in self._moves:
            self._moves[key] = moves_of(self._leaves, self._grid, coords, self._axis, self._keep)
        return self._moves[key]

    # -- shards -> whole leaves ---------------------------------------------------------------------------------------

    def gather(self, shards: Sequence[Tensor], dtype: torch.dtype, buffers: Buffers) -> Steps:
        """One flat tensor in `dtype` that holds the whole leaves, see `wholes_of`."""
        (flat,) = per_rank(self._grid, partial(self._packed, dtype), shards)  # [n]
        (parts,) = yield from gather_flat_steps(flat, self.group)  # [W * n]
        return per_rank(self._grid, self._joined, [parts])

    def _packed(self, dtype: torch.dtype, coords: Coords, shards: Sequence[Tensor]) -> list[Tensor]:
        """[n]: every shard padded to the chunk of the first rank."""
        moves = self._moves_at(coords)
        padded = [_padded(shard.to(dtype), move.dim, move.chunk) for move, shard in zip(moves, shards, strict=True)]
        return [together(padded)]

    def _joined(self, coords: Coords, given: Sequence[Tensor]) -> list[Tensor]:
        """[W * n], the flat tensors of all ranks -> the whole leaves side by side."""
        moves = self._moves_at(coords)
        parts = given[0].view(self.ranks, -1).split([move.numel for move in moves], dim=1)
        return [together([_whole(part, move) for part, move in zip(parts, moves, strict=True)])]

    def wholes_of(self, flat: Tensor) -> list[Tensor]:
        """The whole leaves in what `gather` made."""

        def cut(coords: Coords, given: Sequence[Tensor]) -> list[Tensor]:
            return apart_again(given[0], [move.whole for move in self._moves_at(coords)])

        return per_rank(self._grid, cut, [flat])

    # -- gradients of whole leaves -> their sum, of which every rank keeps its shards ---------------------------------

    def reduce(self, wholes: Sequence[Tensor | None], dtype: torch.dtype, buffers: Buffers, results: Buffers) -> Steps:
        """The sum over ranks as one flat tensor [n]; wholes travel in `dtype`, missing ones are zeros."""
        (parts,) = per_rank(self._grid, partial(self._spread, dtype), wholes)  # [W, n]
        if self.ranks == 1 or not parts.numel():
            return [parts.view(-1)]
        return (yield from scatter_sum_steps(parts, self.group, buffers, results))

    def _spread(self, dtype: torch.dtype, coords: Coords, wholes: Sequence[Tensor | None]) -> list[Tensor]:
        """[W, n]: row i is for rank i."""
        device, rows = self._grid.device, []
        for move, whole in zip(self._moves_at(coords), wholes, strict=True):
            given = torch.zeros(move.whole, dtype=dtype, device=device) if whole is None else whole.to(dtype)
            length = move.chunk[move.dim]
            shape = (*move.whole[: move.dim], self.ranks * length, *move.whole[move.dim + 1 :])
            apart = _padded(given, move.dim, shape).unflatten(move.dim, (self.ranks, length))
            rows.append(apart.movedim(move.dim, 0).reshape(self.ranks, -1))
        return [torch.cat(rows, dim=1)]

    def shards_of(self, flat: Tensor) -> list[Tensor]:
        """This rank's shards in a flat tensor [n]."""

        def cut(coords: Coords, given: Sequence[Tensor]) -> list[Tensor]:
            moves = self._moves_at(coords)
            chunks = apart_again(given[0], [move.chunk for move in moves])
            return [
                chunk.narrow(move.dim, 0, move.shard[move.dim]).contiguous()
                for chunk, move in zip(chunks, moves, strict=True)
            ]

        return per_rank(self._grid, cut, [flat])


def together(tensors: Sequence[Tensor]) -> Tensor:
    """[n]: the elements of all, one after another."""
    return torch.cat([x.reshape(-1) for x in tensors])


def apart_again(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes, which lie one after another in `flat`."""
    sizes = [prod(shape) for shape in shapes]
    starts = accumulate(sizes, initial=0)
    return [flat.narrow(0, at, size).view(shape) for at, size, shape in zip(starts, sizes, shapes, strict=False)]


def _padded(x: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    missing = shape[dim] - x.shape[dim]
    return pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x


def _whole(parts: Tensor, move: Move) -> Tensor:
    """[W, chunk] -> whole."""
    joined = parts.reshape(-1, *move.chunk).movedim(0, move.dim).flatten(move.dim, move.dim + 1)
    return joined.narrow(move.dim, 0, move.whole[move.dim])
