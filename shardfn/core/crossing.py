"""How the leaves of a bucket cross one mesh axis: pack, communicate, unpack, in steps that wait for nothing. Layer 3.

A rank holds the shards of all leaves side by side in one flat tensor, `[n]`, each padded to the chunk of the first
rank. Two ways lead to the whole leaves:

    together    one collective moves `[n]` of every rank to `[W, n]`; one call copies the parts to their places
    in place    large leaves split on their first dim travel rank to rank, straight from the flat shards into the whole
                leaf, and gradients straight out of it; what is small travels together, in one message a rank

The second is for gloo, where it saves the copies, and a reduce-scatter that gloo emulates; `Crossing.in_place` chooses,
by measurements that are in docs/performance.md. NCCL takes the first.

Steps are generators: each `yield` hands over the communication that the next step has to wait for, so that the caller
decides what to do in between (see `Flight` in buckets.py).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import (
    all_gather_single,
    chunk_cat,
    copy_each,
    foreach,
    tensor_over,
)
from shardfn.core.collectives import Steps, Works, accumulation_dtype, backend_of, scatter_sum_steps
from shardfn.core.layout import Leaf
from shardfn.core.mesh import Grid
from shardfn.core.offload import Host
from shardfn.core.places import Copies, Move, places_of
from shardfn.core.pool import Buffer, Buffers, View

_IN_PLACE_TOTAL = 2**20  # bytes of a whole bucket from which rank-to-rank transfers pay
_IN_PLACE_MESSAGE = 2**19  # bytes of one message from which it pays to send it alone
_IN_PLACE_RANKS = 8  # every rank sends to every other one, so that messages grow with the ranks


def moves_of(
    leaves: Sequence[Leaf], grid: Grid, coords: Mapping[str, int], axis: str, keep: Sequence[str]
) -> list[Move]:
    """How leaves that are split over `axis` innermost, and over those in `keep`, take part in undoing it."""
    moves = []
    for leaf in leaves:
        dim = leaf.split_dim(axis)
        assert dim is not None, f"{leaf.name} is not split over {axis}"
        whole = leaf.local_shape(grid.sizes, coords, keep)
        shard = leaf.local_shape(grid.sizes, coords, (*keep, axis))
        step = -(-whole[dim] // grid.sizes[axis])
        moves.append(Move(dim, shard, (*whole[:dim], step, *whole[dim + 1 :]), whole))
    return moves


_dtype_of = attrgetter("dtype")
_is_there = partial(is_not, None)


class Way(NamedTuple):
    """How the leaves travel in a dtype: worked out once, so that a step only looks it up."""

    one_by_one: bool  # whether the first leaves travel rank to rank; else one collective moves all together
    alone: int  # how many do
    shards: list[int]  # where each shard begins in the flat tensor [n], in bytes
    wholes: list[int]  # where each whole leaf begins, and the size m of all, in elements
    staging: int  # elements that travel together, of all ranks
    copies: Copies  # of these, between the parts of ranks and whole leaves
    even: bool  # whether these are cut into equal parts on their first dim


class Crossing:
    """The leaves of a bucket and one axis; where they lie is in `places`."""

    def __init__(
        self, leaves: Sequence[Leaf], grid: Grid, axis: str, keep: tuple[str, ...], host: Host | None = None
    ) -> None:
        """The leaves are split over `axis` innermost, and over the axes in `keep`; shards may live on a `host`."""
        self.host = host
        self.group, self.ranks, self.rank = grid.groups[axis], grid.sizes[axis], grid.coords[axis]
        self.sends_well = grid.device.type == "cpu" and backend_of(self.group, grid.device) == "gloo"
        self.moves = tuple(moves_of(leaves, grid, grid.coords, axis, keep))
        self.places, self._shapes = places_of(self.moves, self.ranks), [move.whole for move in self.moves]
        self.starts, self.numel = self.places.starts, self.places.numel
        self._ways: dict[torch.dtype, Way] = {}
        self._over: tuple[Any, Any, Any] = None, None, None  # address, dtype, and the flat tensor there

    def _way(self, dtype: torch.dtype) -> Way:
        item, places = dtype.itemsize, self.places
        one_by_one = self._in_place(item)
        alone = one_by_one or 0
        shards = [start * item for start in places.starts[:-1]]
        staging = self.ranks * (places.numel - places.starts[alone])
        copies = places.copies(alone, item)
        made = Way(
            one_by_one is not None, alone, shards, places.whole_starts(item), staging, copies, places.even(alone)
        )
        self._ways[dtype] = made
        return made

    def _in_place(self, itemsize: int) -> int | None:
        """How many of the leaves, the first ones, travel alone; None when one collective moves all together."""
        pays = self.numel * self.ranks * itemsize >= _IN_PLACE_TOTAL and self.ranks <= _IN_PLACE_RANKS
        if not self.sends_well or not pays:
            return None
        alone = [move.rows_first and move.numel * itemsize >= _IN_PLACE_MESSAGE for move in self.moves]
        return alone.index(False) if False in alone else len(alone)

    # -- shards -> whole leaves ---------------------------------------------------------------------------------------

    def gather(self, shards: Sequence[Tensor], dtype: torch.dtype, buffers: Buffers) -> Steps:
        """One flat tensor in `dtype` that holds the whole leaves, see `wholes_of`."""
        way = self._ways.get(dtype) or self._way(dtype)
        flat, taken = self.packed(shards, dtype, buffers)  # [n]
        whole = buffers.take(way.wholes[-1], dtype)
        staging = buffers.take(way.staging, dtype)  # [W, n] of what travels together
        try:
            if way.one_by_one:
                moves = zip(way.wholes, self.moves[: way.alone], strict=False)
                alone = [whole.flat.narrow(0, start, prod(move.whole)) for start, move in moves]
                yield self._exchange_shards(flat, alone, staging.flat.view(self.ranks, -1))
            elif self.numel and not flat.is_meta:
                yield self._all_gather(flat, staging.flat)
            if way.copies.parts:
                copy_each(whole.views(way.copies.in_whole), staging.views(way.copies.parts))
            return [whole.tensor()]
        finally:
            for buffer in (whole, staging, *taken):
                buffer.held = False

    def _all_gather(self, flat: Tensor, parts: Tensor) -> Works:
        """[n] of every rank -> [W * n]."""
        source, target = flat.view(torch.uint8), parts.view(torch.uint8)
        if self.host is None:
            return [all_gather_single(target, source, group=self.group, async_op=True)]
        with self.host.beside():  # behind the copy from the host
            if self.ranks > 1:
                return [all_gather_single(target, source, group=self.group, async_op=True)]
            target.copy_(source)
        return [self.host.arrived()]

    def wholes_of(self, flat: Tensor) -> list[Tensor]:
        """The whole leaves in what `gather` made, each with a version counter of its own."""
        storage, way = flat.untyped_storage(), self._ways.get(flat.dtype) or self._way(flat.dtype)
        new: Any = flat.new_empty
        return [new(0).set_(storage, start, shape) for start, shape in zip(way.wholes, self._shapes, strict=False)]

    def _exchange_shards(self, flat: Tensor, wholes: Sequence[Tensor], staging: Tensor) -> Works:
        """Every shard to every other rank: those of the first leaves into `wholes`, the others into `staging`."""
        peers, sent = self._peers(), self._messages(flat, len(wholes))
        places = [(peer, self._parts(wholes, staging, peer)) for peer in peers]
        works = [self.group.recv([place], peer, tag) for peer, into in places for tag, place in into.items()]
        works += [self.group.send([mine], peer, tag) for tag, mine in sent.items() for peer in peers]
        if sent:
            copy_each([*self._parts(wholes, staging, self.rank).values()], [*sent.values()])
        return works

    def _messages(self, flat: Tensor, alone: int) -> dict[int, Tensor]:
        """Of a flat tensor [n] what travels in each message: the first `alone` leaves by themselves, then the rest."""
        lengths = [move.lengths(self.ranks)[self.rank] for move in self.moves[:alone]]
        found = {tag: flat.narrow(0, self.starts[tag], length) for tag, length in enumerate(lengths) if length}
        rest = self.numel - self.starts[alone]
        return found | {alone: flat.narrow(0, self.starts[alone], rest)} if rest else found

    def _parts(self, wholes: Sequence[Tensor], staging: Tensor, rank: int) -> dict[int, Tensor]:
        """The same of another rank, or of this one, where whole leaves are, and the parts [W, n] of all others."""
        found: dict[int, Tensor] = {}
        for tag, (whole, move) in enumerate(zip(wholes, self.moves, strict=False)):
            if length := move.lengths(self.ranks)[rank]:
                found[tag] = whole.view(-1).narrow(0, rank * move.numel, length)
        return found | {len(wholes): staging[rank]} if staging.numel() else found

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with another one."""
        return [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]

    def packed(self, shards: Sequence[Tensor], dtype: torch.dtype, buffers: Buffers) -> tuple[Tensor, list[Buffer]]:
        """The shards as one flat tensor [n], and the buffers it takes: none when they lie side by side."""
        flat = self.side_by_side(shards)
        if self.host is not None:
            return self._from_host(self.host, shards, flat, dtype, buffers)
        if flat is not None and flat.dtype == dtype:
            return flat, []
        buffer = buffers.take(self.numel, dtype)
        if flat is not None:
            buffer.flat.copy_(flat)
        elif self.numel:
            copy_each(buffer.views(self.places.shards), list(shards))
        return buffer.flat, [buffer]

    def _from_host(
        self, host: Host, shards: Sequence[Tensor], flat: Tensor | None, dtype: torch.dtype, buffers: Buffers
    ) -> tuple[Tensor, list[Buffer]]:
        """Shards of the host, or one flat tensor over them: copied as they are, then cast on the device."""
        taken = [buffers.take(self.numel, kind) for kind in dict.fromkeys([shards[0].dtype, dtype])]
        first, last = taken[0], taken[-1]
        with host.beside():
            if flat is not None:
                first.flat.copy_(flat, non_blocking=True)
            else:
                for place, shard in zip(first.views(self.places.shards), shards, strict=True):
                    place.copy_(shard, non_blocking=True)
            if last is not first:
                last.flat.copy_(first.flat)
        return last.flat, taken

    def side_by_side(self, shards: Sequence[Tensor]) -> Tensor | None:
        """[n] over shards that fill one stretch of memory in order, as `shards_of` makes them; None when they do not.

        The tensor does not own that memory: the shards must live as long as it is used.
        """
        first = shards[0]
        base, way = first.data_ptr(), self._ways.get(first.dtype) or self._way(first.dtype)
        fits = (
            self.places.full
            and [*map(Tensor.data_ptr, shards)] == [*map(base.__add__, way.shards)]
            and all(map(Tensor.is_contiguous, shards))
            and len(set(map(_dtype_of, shards))) == 1
        )
        if not fits:
            return None
        if self._over[:2] != (base, first.dtype):  # a step after the other has its shards in one place
            self._over = base, first.dtype, tensor_over(base, self.numel, first)
        return self._over[2]

    # -- gradients of whole leaves -> their sum, of which every rank keeps its shards ---------------------------------

    def reduce(self, wholes: Sequence[Tensor | None], dtype: torch.dtype, buffers: Buffers, results: Buffers) -> Steps:
        """The sum over ranks as one flat tensor [n] of `results`; wholes travel in `dtype`, missing ones are zeros.

        The sum of 16-bit floats is a float32 tensor where it is added up here.
        """
        way = self._ways.get(dtype) or self._way(dtype)
        if way.one_by_one and not dtype.is_floating_point:
            way = self._together(way, dtype.itemsize)
        staging = buffers.take(way.staging, dtype)  # [W, n] of what travels together
        try:
            self._fill(staging, wholes, way)
            rows = staging.flat.view(self.ranks, -1)  # row i is for rank i
            if not self.numel:
                return [results.tensor(0, dtype)]
            if self.ranks == 1:
                return [results.tensor(self.numel, dtype).copy_(staging.flat)]
            if not way.one_by_one:
                return (yield from scatter_sum_steps(rows, self.group, buffers, results))
            sent = [self._sendable(index, wholes[index], dtype, buffers.device) for index in range(way.alone)]
            return (yield from self._exchange_gradients(sent, rows, dtype, buffers, results))
        finally:
            staging.held = False

    def parts_for_ranks(self, wholes: Sequence[Tensor | None], dtype: torch.dtype, buffers: Buffers) -> Tensor:
        """Gradients as one flat tensor [W * n], part i for rank i: what a reduction of the user's own begins with."""
        staging = buffers.take(self.ranks * self.numel, dtype)
        self._fill(staging, wholes, self._together(self._ways.get(dtype) or self._way(dtype), dtype.itemsize))
        return staging.flat

    def _together(self, way: Way, itemsize: int) -> Way:
        """The same with one collective for all leaves."""
        copies, even = self.places.copies(0, itemsize), self.places.even(0)
        return way._replace(one_by_one=False, alone=0, staging=self.ranks * self.numel, copies=copies, even=even)

    def _sendable(self, index: int, whole: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A gradient that can be sent from where it is."""
        if whole is None:
            return torch.zeros(self.moves[index].whole, dtype=dtype, device=device)
        return whole.to(dtype).contiguous()

    def _fill(self, staging: Buffer, wholes: Sequence[Tensor | None], way: Way) -> None:
        """Copy what travels together into the parts."""
        if way.alone == len(self.moves):
            return
        given = [*filter(_is_there, wholes[way.alone :])]
        if way.even and len(given) == len(self.moves) - way.alone:
            chunk_cat(given, 0, self.ranks, out=staging.flat.view(self.ranks, -1))
            return
        copies = way.copies
        into, from_ = [], []
        for index, place, view in zip(copies.leaves, staging.views(copies.parts), copies.in_leaf, strict=True):
            whole = wholes[index]
            if whole is None:
                place.zero_()
            else:
                into.append(place)
                whole = whole if whole.is_contiguous() else whole.contiguous()
                offset = int(whole.storage_offset()) + view.offset
                from_.append(whole.as_strided(view.size, view.stride, offset))
        if into:
            copy_each(into, from_)

    def _exchange_gradients(
        self, wholes: Sequence[Tensor], staging: Tensor, dtype: torch.dtype, buffers: Buffers, results: Buffers
    ) -> Steps:
        """Every rank's part of every gradient to that rank, and the sum of what arrives here."""
        wide, peers, alone = accumulation_dtype(dtype), self._peers(), len(wholes)
        out = results.tensor(self.numel, wide)  # [n]
        begins = 0 if wide == dtype else -1  # what the first peer sends arrives in `out` itself, if it has the dtype
        extra = buffers.tensor((self.ranks - 2 - begins) * self.numel, dtype).view(-1, self.numel)
        rows = [out, *extra] if begins == 0 else list(extra)
        places = [(peer, self._messages(row, alone)) for row, peer in zip(rows, peers, strict=True)]
        parts = [(peer, self._parts(wholes, staging, peer)) for peer in peers]
        works = [self.group.recv([place], peer, tag) for peer, into in places for tag, place in into.items()]
        works += [self.group.send([part], peer, tag) for peer, sent in parts for tag, part in sent.items()]
        yield works
        own = self._parts(wholes, staging, self.rank)
        if own:
            foreach("add_" if begins == 0 else "copy_")([*self._messages(out, alone).values()], [*own.values()])
        for row in extra:
            out.add_(row)
        return [out]

    def shards_of(self, flat: Tensor) -> list[Tensor]:
        """This rank's shards in a flat tensor [n], contiguous, each with a version counter of its own."""
        out = part_of(flat, self.places.shards)
        return out if self.places.contiguous else [shard.contiguous() for shard in out]


def part_of(flat: Tensor, views: Sequence[View]) -> list[Tensor]:
    """Tensors in the memory of `flat`; see [Note: parts of one memory] in storage.py."""
    storage, item = flat.untyped_storage(), flat.element_size()
    new: Any = flat.new_empty
    return [new(0).set_(storage[offset * item : end * item], 0, size, stride) for size, stride, offset, end in views]
