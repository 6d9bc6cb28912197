"""How the leaves of a bucket cross one mesh axis: pack, communicate, unpack, in steps that wait for nothing. Layer 3.

A rank holds the shards of all leaves side by side in one flat tensor:

    flat     [n]       this rank's shards, each padded to the chunk of the first rank
    parts    [W, n]    the flat tensors of all ranks
    whole    [m]       the whole leaves, each beginning at a multiple of 64 bytes

Two ways lead to the whole leaves:

    together    one collective moves `[n]` of every rank to `[W, n]`; one call copies the parts to their places
    in place    large leaves split on their first dim travel rank to rank, straight from the flat shards into the whole
                leaf, and gradients straight out of it; what is small travels together, in one message a rank

The second is for gloo, where it saves the copies, and a reduce-scatter that gloo emulates; `Crossing.in_place` chooses,
by measurements that are in docs/performance.md. NCCL takes the first. `PureCrossing` does the same for tensors without
memory of their own.

Steps are generators: each `yield` hands over the communication that the next step has to wait for, so that the caller
decides what to do in between (see `Flight` in buckets.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardfn._torch import all_gather_single, chunk_cat, copy_each, foreach, tensor_over
from shardfn.core.collectives import Steps, Works, accumulation_dtype, backend_of, gather_flat_steps, scatter_sum_steps
from shardfn.core.layout import Leaf
from shardfn.core.mesh import Grid, per_rank
from shardfn.core.offload import Host
from shardfn.core.storage import Buffer, Buffers, View, view_of

_IN_PLACE_TOTAL = 2**20  # bytes of a whole bucket from which rank-to-rank transfers pay
_SENT_AS_THEY_ARE = (torch.float32, torch.float64)  # by every backend; other dtypes are sent as bytes
_IN_PLACE_MESSAGE = 2**19  # bytes of one message from which it pays to send it alone
_IN_PLACE_RANKS = 8  # every rank sends to every other one, so that messages grow with the ranks
_ALIGNMENT = 64  # bytes: where whole leaves begin, for vector instructions
_dtype_of = attrgetter("dtype")
_is_there = partial(is_not, None)


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


class Way(NamedTuple):
    """How the leaves travel in a dtype: worked out once, so that a step only looks it up."""

    one_by_one: bool  # whether the first leaves travel rank to rank; else one collective moves all together
    alone: int  # how many do
    shards: list[int]  # where each shard begins in the flat tensor [n], in bytes
    wholes: list[int]  # where each whole leaf begins, and the size m of all, in elements
    staging: int  # elements that travel together, of all ranks
    even: bool  # whether the leaves that do are cut into equal parts on their first dim
    # Copies of these between the parts of all ranks and the whole leaves, as parallel lists.
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
        self._ways: dict[tuple[int, int | None], Way] = {}

    def _shard(self, move: Move, start: int) -> View:
        chunk = torch.empty(self.numel, device="meta").narrow(0, start, move.numel).view(move.chunk)
        return view_of(chunk.narrow(move.dim, 0, move.shard[move.dim]))

    def way(self, itemsize: int, alone: int | None = None) -> Way:
        """How they travel when so many, the first ones, do so alone; with None one collective moves all together."""
        if (itemsize, alone) not in self._ways:
            self._ways[itemsize, alone] = self._new_way(itemsize, alone)
        return self._ways[itemsize, alone]

    def _new_way(self, itemsize: int, alone: int | None) -> Way:
        first, unit = alone or 0, max(1, _ALIGNMENT // itemsize)
        wholes = list(accumulate((-(-prod(move.whole) // unit) * unit for move in self.moves), initial=0))
        parts = torch.empty(self.ranks, self.numel - self.starts[first], device="meta")
        shards, together = [start * itemsize for start in self.starts[:-1]], self.moves[first:]
        even = all(x.numel and not x.dim and x.whole[0] == x.chunk[0] * self.ranks for x in together)
        made = Way(alone is not None, first, shards, wholes, parts.numel(), even, [], [], [], [])
        for index, move in enumerate(together, first):
            part = parts.narrow(1, self.starts[index] - self.starts[first], move.numel).view(self.ranks, *move.chunk)
            for from_, to in move.pairs(part, torch.empty(move.whole, device="meta")):
                place = view_of(to)
                made.leaves.append(index)
                made.parts.append(view_of(from_))
                made.in_leaf.append(place)
                made.in_whole.append(place._replace(offset=wholes[index] + place.offset, end=wholes[index] + place.end))
        return made


@lru_cache(maxsize=2**10)
def places_of(moves: tuple[Move, ...], ranks: int) -> Places:
    """The same object for buckets that are alike, such as those of the layers of a model: buffers keep its views."""
    return Places(moves, ranks)


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
        made = self._ways[dtype] = self.places.way(dtype.itemsize, self._in_place(dtype.itemsize))
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
            if way.parts:
                copy_each(whole.views(way.in_whole), staging.views(way.parts))
            return [whole.tensor()]
        finally:
            for buffer in (whole, staging, *taken):
                buffer.held = False

    def _all_gather(self, flat: Tensor, parts: Tensor) -> Works:
        """[n] of every rank -> [W * n]."""
        source, target = flat, parts
        if flat.dtype not in _SENT_AS_THEY_ARE:
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
            way = self.places.way(dtype.itemsize)
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
        self._fill(staging, wholes, self.places.way(dtype.itemsize))
        return staging.flat

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
        into, from_ = [], []
        for index, place, view in zip(way.leaves, staging.views(way.parts), way.in_leaf, strict=True):
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


class PureCrossing:
    """`Crossing` for tensors that have no memory of their own: recorded ones, and those of simulated ranks.

    Leaves are put together, sent and taken apart by operations that return new tensors: a graph can hold them. Nothing
    is written in place, and a part that depends on the rank is made by `per_rank`.
    """

    def __init__(self, leaves: Sequence[Leaf], grid: Grid, axis: str, keep: tuple[str, ...]) -> None:
        """The leaves are split over `axis` innermost, and over the axes in `keep`."""
        self._leaves, self._grid, self._axis, self._keep = leaves, grid, axis, keep
        self.group, self.ranks = grid.groups[axis], grid.sizes[axis]
        self._moves: dict[tuple[int, ...], list[Move]] = {}

    def _moves_at(self, coords: Mapping[str, int]) -> list[Move]:
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

    def _packed(self, dtype: torch.dtype, coords: Mapping[str, int], shards: Sequence[Tensor]) -> list[Tensor]:
        """[n]: every shard padded to the chunk of the first rank."""
        moves = self._moves_at(coords)
        padded = [_padded(shard.to(dtype), move.dim, move.chunk) for move, shard in zip(moves, shards, strict=True)]
        return [together(padded)]

    def _joined(self, coords: Mapping[str, int], given: Sequence[Tensor]) -> list[Tensor]:
        """[W * n], the flat tensors of all ranks -> the whole leaves side by side."""
        moves = self._moves_at(coords)
        parts = given[0].view(self.ranks, -1).split([move.numel for move in moves], dim=1)
        return [together([_whole(part, move) for part, move in zip(parts, moves, strict=True)])]

    def wholes_of(self, flat: Tensor) -> list[Tensor]:
        """The whole leaves in what `gather` made."""

        def cut(coords: Mapping[str, int], given: Sequence[Tensor]) -> list[Tensor]:
            return apart_again(given[0], [move.whole for move in self._moves_at(coords)])

        return per_rank(self._grid, cut, [flat])

    # -- gradients of whole leaves -> their sum, of which every rank keeps its shards ---------------------------------

    def reduce(self, wholes: Sequence[Tensor | None], dtype: torch.dtype, buffers: Buffers, results: Buffers) -> Steps:
        """The sum over ranks as one flat tensor [n]; wholes travel in `dtype`, missing ones are zeros."""
        (parts,) = per_rank(self._grid, partial(self._spread, dtype), wholes)  # [W, n]
        if self.ranks == 1 or not parts.numel():
            return [parts.view(-1)]
        return (yield from scatter_sum_steps(parts, self.group, buffers, results))

    def _spread(self, dtype: torch.dtype, coords: Mapping[str, int], wholes: Sequence[Tensor | None]) -> list[Tensor]:
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

        def cut(coords: Mapping[str, int], given: Sequence[Tensor]) -> list[Tensor]:
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
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _padded(x: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    missing = shape[dim] - x.shape[dim]
    return pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x


def _whole(parts: Tensor, move: Move) -> Tensor:
    """[W, chunk] -> whole."""
    joined = parts.reshape(-1, *move.chunk).movedim(0, move.dim).flatten(move.dim, move.dim + 1)
    return joined.narrow(move.dim, 0, move.whole[move.dim])
