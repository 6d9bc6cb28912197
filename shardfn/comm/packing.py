"""How the leaves of a bucket cross one mesh axis: pack, communicate, unpack, in steps that wait for nothing.

A rank holds the shards of all leaves side by side in one flat tensor:

    flat     [n]       this rank's shards, each padded to the chunk of the first rank
    parts    [W, n]    the flat tensors of all ranks
    whole    [m]       the whole leaves, each beginning at a multiple of 64 bytes

Two ways lead to the whole leaves:

    together    one collective moves `[n]` of every rank to `[W, n]`; one call copies the parts to their places
    in place    large leaves split on their first dim travel rank to rank, straight from the flat shards into the whole
                leaf, and gradients straight out of it; what is small travels together, in one message a rank

The second is for gloo, where it saves the copies, and a reduce-scatter that gloo emulates; `transfer_of` chooses, by
measurements that are in docs/performance.md. NCCL takes the first. `PureAxisCollective` does the same for tensors
without memory of their own.

With `Policy(offload="cpu")` shards live on the host, and cross from there to the device and back; see `Host`.

Steps are generators: each `yield` hands over the communication that the next step has to wait for, so that the caller
decides what to do in between (see `AsyncCollective` in raw_collectives.py).

[Note: copies beside the computation]
Copies in both directions, and the collectives that send what was copied, are queued on a stream of their own: behind
all work that was queued before, which may still use the memory that they fill, and beside all that is queued later.
Memory is taken outside of that stream, so that the allocator knows it as the computation's. Who uses a result on the
device waits for its collective, or for `arrived`; who uses one on the host waits on the host. Host memory is pinned:
only then does a copy not stop the host.

The streams and events of the CPU do nothing: there everything happens at once. A mesh of CPUs is never offloaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache, partial
from itertools import accumulate
from math import prod
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from shardfn._torch import all_gather_single, chunk_cat, copy_each, foreach, gathering, set_storage, tensor_over, waited
from shardfn.comm import raw_collectives
from shardfn.comm.flat_memory import Buffer, Buffers, FlatView, FreshBuffers, view_of
from shardfn.comm.raw_collectives import Steps, Works, accumulation_dtype, backend_of
from shardfn.layout import Axes, Grid, Leaf, Policy, per_rank

IN_PLACE_TOTAL = 2**20  # bytes of a whole bucket from which rank-to-rank transfers pay
_SENT_AS_THEY_ARE = (torch.float32, torch.float64)  # by every backend; other dtypes are sent as bytes
IN_PLACE_MESSAGE = 2**19  # bytes of one message from which it pays to send it alone
_IN_PLACE_RANKS = 8  # every rank sends to every other one, so that messages grow with the ranks
_ALIGNMENT = 64  # bytes: where whole leaves begin, for vector instructions
_dtype_of = attrgetter("dtype")
_is_there = partial(is_not, None)


class Host:
    """The host memory of one device, and the stream of its copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, on_cuda = device, device.type == "cuda"
        self._streams: Any = torch.cuda if on_cuda else torch.cpu
        self._stream = self._streams.Stream(device)
        self.buffers = FreshBuffers(torch.device("cpu"), pinned=on_cuda)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Within it, work is queued on the stream of the copies."""
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            yield

    def arrived(self) -> Any:
        """What the computation waits for before it reads copies that were queued so far; the host goes on."""
        event = self._streams.Event()
        event.record(self._stream)
        return event

    def fetch(self, flat: Tensor) -> Steps:
        """A flat tensor of the device, on the host."""
        out = self.buffers.tensor(flat.numel(), flat.dtype)
        with self.beside():
            out.copy_(flat, non_blocking=True)
        copied = self.arrived()
        yield []
        copied.synchronize()
        return [out]

    def settle(self) -> None:
        """Wait on the host until nothing is copied any more: from here on shards may be changed."""
        self.arrived().synchronize()


def host_of(policy: Policy, device: torch.device) -> Host | None:
    """Where shards live, when they do not live on the device that computes."""
    return _host(device) if policy.offload == "cpu" and device.type != "cpu" else None


_host = cache(Host)


class LeafSplit(NamedTuple):
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


def leaf_splits(leaves: Sequence[Leaf], grid: Grid, coords: Axes, axis: str, keep: Sequence[str]) -> list[LeafSplit]:
    """How leaves that are split over `axis` innermost, and over those in `keep`, take part in undoing it."""
    splits = []
    for leaf in leaves:
        dim = leaf.split_dim(axis)
        assert dim is not None, f"{leaf.name} is not split over {axis}"
        whole = leaf.local_shape(grid.sizes, coords, keep)
        shard = leaf.local_shape(grid.sizes, coords, (*keep, axis))
        step = -(-whole[dim] // grid.sizes[axis])
        splits.append(LeafSplit(dim, shard, (*whole[:dim], step, *whole[dim + 1 :]), whole))
    return splits


class Transfer(NamedTuple):
    """How the leaves travel in a dtype: worked out once, so that a step only looks it up."""

    one_by_one: bool  # whether the first leaves travel rank to rank; else one collective moves all together
    alone: int  # how many do
    shards: list[int]  # where each shard begins in the flat tensor [n], in bytes
    wholes: list[int]  # where each whole leaf begins, and the size m of all, in elements
    staging: int  # elements that travel together, of all ranks
    even: bool  # whether the leaves that do are cut into equal parts on their first dim
    # Copies of these between the parts of all ranks and the whole leaves, as parallel lists.
    leaves: list[int]
    parts: list[FlatView]
    in_leaf: list[FlatView]
    in_whole: list[FlatView]


class FlatLayout:
    """How some leaves lie, worked out once for all buckets that are alike; see `flat_layout`."""

    def __init__(self, splits: tuple[LeafSplit, ...], ranks: int) -> None:
        self.splits, self.ranks = splits, ranks
        self.whole_shapes = [split.whole for split in splits]
        self.starts = list(accumulate((split.numel for split in splits), initial=0))  # of each shard in the flat tensor
        self.numel = self.starts[-1]  # n
        self.contiguous = all(prod(split.shard[: split.dim]) <= 1 or split.shard == split.chunk for split in splits)
        # Whether no shard is padded, and none empty.
        self.full = all(split.shard == split.chunk and split.numel for split in splits)
        chunks = apart_again(torch.empty(self.numel, device="meta"), [split.chunk for split in splits])
        pairs = zip(splits, chunks, strict=True)
        self.shards = [view_of(chunk.narrow(split.dim, 0, split.shard[split.dim])) for split, chunk in pairs]


# The same objects for buckets that are alike, such as those of the layers of a model: buffers keep their views.
flat_layout: Callable[[tuple[LeafSplit, ...], int], FlatLayout] = lru_cache(maxsize=2**10)(FlatLayout)


@lru_cache(maxsize=2**10)
def transfer_of(
    layout: FlatLayout, itemsize: int, sends_well: bool, total: int = IN_PLACE_TOTAL, message: int = IN_PLACE_MESSAGE
) -> Transfer:
    """How leaves travel in a dtype of so many bytes, where messages may or may not pay."""
    ranks, numel, starts = layout.ranks, layout.numel, layout.starts
    one_by_one = sends_well and numel * ranks * itemsize >= total and ranks <= _IN_PLACE_RANKS
    # The first leaves, of which every rank's part is one piece of memory and worth a message of its own.
    pays = [prod(x.whole[: x.dim]) == 1 and x.numel * itemsize >= message for x in layout.splits]
    first, unit = [*pays, False].index(False) if one_by_one else 0, max(1, _ALIGNMENT // itemsize)
    wholes = list(accumulate((-(-prod(whole) // unit) * unit for whole in layout.whole_shapes), initial=0))
    parts = torch.empty(ranks, numel - starts[first], device="meta")
    shards, together = [start * itemsize for start in starts[:-1]], layout.splits[first:]
    even = all(x.numel and not x.dim and x.whole[0] == x.chunk[0] * ranks for x in together)
    transfer = Transfer(one_by_one, first, shards, wholes, parts.numel(), even and bool(together), [], [], [], [])
    for index, split in enumerate(together, first):
        part = parts.narrow(1, starts[index] - starts[first], split.numel).view(ranks, *split.chunk)
        for from_, to in split.pairs(part, torch.empty(split.whole, device="meta")):
            place, start = view_of(to), wholes[index]
            transfer.leaves.append(index)
            transfer.parts.append(view_of(from_))
            transfer.in_leaf.append(place)
            transfer.in_whole.append(place._replace(offset=place.offset + start, end=place.end + start))
    return transfer


class AxisCollective:
    """The leaves of a bucket and one axis; where they lie is in `layout`."""

    def __init__(
        self, leaves: Sequence[Leaf], grid: Grid, axis: str, keep: tuple[str, ...], host: Host | None = None
    ) -> None:
        """The leaves are split over `axis` innermost, and over the axes in `keep`; shards may live on a `host`."""
        self.host = host
        self.group, self.ranks, self.rank = grid.groups[axis], grid.sizes[axis], grid.coords[axis]
        self.sends_well = grid.device.type == "cpu" and backend_of(self.group, grid.device) == "gloo"
        self.splits = tuple(leaf_splits(leaves, grid, grid.coords, axis, keep))
        self.layout = flat_layout(self.splits, self.ranks)
        self.starts, self.numel = self.layout.starts, self.layout.numel
        self._over: tuple[Any, Any, Any] = None, None, None  # address, dtype, and the flat tensor there

    # -- shards -> whole leaves ---------------------------------------------------------------------------------------

    def gather(self, shards: Sequence[Tensor], dtype: torch.dtype, buffers: Buffers) -> Steps:
        """One flat tensor in `dtype` that holds the whole leaves, see `wholes_of`."""
        transfer = transfer_of(self.layout, dtype.itemsize, self.sends_well)
        flat, taken = self.packed(shards, dtype, buffers)  # [n]
        whole = buffers.take(transfer.wholes[-1], dtype)
        staging = buffers.take(transfer.staging, dtype)  # [W, n] of what travels together
        try:
            if transfer.one_by_one:
                splits = zip(transfer.wholes, self.splits[: transfer.alone], strict=False)
                alone = [whole.flat.narrow(0, start, prod(split.whole)) for start, split in splits]
                yield self._exchange_shards(flat, alone, staging.flat.view(self.ranks, -1))
            elif self.numel and not flat.is_meta:
                yield self._all_gather(flat, staging.flat)
            if transfer.parts:
                copy_each(whole.views(transfer.in_whole), staging.views(transfer.parts))
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
        storage, transfer = flat.untyped_storage(), transfer_of(self.layout, flat.element_size(), self.sends_well)
        pairs = zip(transfer.wholes, self.layout.whole_shapes, strict=False)
        return [set_storage(flat.new_empty(0), storage, start, shape) for start, shape in pairs]

    def _exchange_shards(self, flat: Tensor, wholes: Sequence[Tensor], staging: Tensor) -> Works:
        """Every shard to every other rank: those of the first leaves into `wholes`, the others into `staging`."""
        peers, sent = self._peers(), self._messages(flat, len(wholes))
        received = [(peer, self._parts(wholes, staging, peer)) for peer in peers]
        works = [self.group.recv([place], peer, tag) for peer, into in received for tag, place in into.items()]
        works += [self.group.send([mine], peer, tag) for tag, mine in sent.items() for peer in peers]
        if sent:
            copy_each([*self._parts(wholes, staging, self.rank).values()], [*sent.values()])
        return works

    def _messages(self, flat: Tensor, alone: int) -> dict[int, Tensor]:
        """Of a flat tensor [n] what travels in each message: the first `alone` leaves by themselves, then the rest."""
        lengths = [split.lengths(self.ranks)[self.rank] for split in self.splits[:alone]]
        messages = {tag: flat.narrow(0, self.starts[tag], length) for tag, length in enumerate(lengths) if length}
        rest = self.numel - self.starts[alone]
        return messages | {alone: flat.narrow(0, self.starts[alone], rest)} if rest else messages

    def _parts(self, wholes: Sequence[Tensor], staging: Tensor, rank: int) -> dict[int, Tensor]:
        """The same of another rank, or of this one, where whole leaves are, and the parts [W, n] of all others."""
        parts: dict[int, Tensor] = {}
        for tag, (whole, split) in enumerate(zip(wholes, self.splits, strict=False)):
            if length := split.lengths(self.ranks)[rank]:
                parts[tag] = whole.view(-1).narrow(0, rank * split.numel, length)
        return parts | {len(wholes): staging[rank]} if staging.numel() else parts

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with another one."""
        return [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]

    def packed(self, shards: Sequence[Tensor], dtype: torch.dtype, buffers: Buffers) -> tuple[Tensor, list[Buffer]]:
        """The shards as one flat tensor [n], and the buffers it takes: none when they lie side by side.

        Those of the host are copied as they are, then cast on the device.
        """
        flat = self.side_by_side(shards)
        if flat is not None and flat.dtype == dtype and self.host is None:
            return flat, []
        dtypes = [dtype] if self.host is None else dict.fromkeys([shards[0].dtype, dtype])
        taken = [buffers.take(self.numel, kind) for kind in dtypes]
        first, last = taken[0], taken[-1]
        with nullcontext() if self.host is None else self.host.beside():
            if flat is not None:
                first.flat.copy_(flat, non_blocking=True)
            elif self.numel:
                copy_each(first.views(self.layout.shards), list(shards), non_blocking=True)
            if last is not first:
                last.flat.copy_(first.flat)
        return last.flat, taken

    def side_by_side(self, shards: Sequence[Tensor]) -> Tensor | None:
        """[n] over shards that fill one stretch of memory in order, as `shards_of` makes them; None when they do not.

        The tensor does not own that memory: the shards must live as long as it is used.
        """
        first = shards[0]
        base, transfer = first.data_ptr(), transfer_of(self.layout, first.element_size(), self.sends_well)
        if not self.layout.full or [*map(Tensor.data_ptr, shards)] != [*map(base.__add__, transfer.shards)]:
            return None
        if not all(map(Tensor.is_contiguous, shards)) or len(set(map(_dtype_of, shards))) > 1:
            return None
        if self._over[:2] != (base, first.dtype):  # a step after the other has its shards in one place
            self._over = base, first.dtype, tensor_over(base, self.numel, first)
        return self._over[2]

    # -- gradients of whole leaves -> their sum, of which every rank keeps its shards ---------------------------------

    def reduce(self, wholes: Sequence[Tensor | None], dtype: torch.dtype, buffers: Buffers, results: Buffers) -> Steps:
        """The sum over ranks as one flat tensor [n] of `results`; wholes travel in `dtype`, missing ones are zeros.

        The sum of 16-bit floats is a float32 tensor where it is added up here.
        """
        transfer = transfer_of(self.layout, dtype.itemsize, self.sends_well and dtype.is_floating_point)
        staging = buffers.take(transfer.staging, dtype)  # [W, n] of what travels together
        try:
            self._fill(staging, wholes, transfer)
            rows = staging.flat.view(self.ranks, -1)  # row i is for rank i
            if not self.numel:
                return [results.tensor(0, dtype)]
            if self.ranks == 1:
                return [results.tensor(self.numel, dtype).copy_(staging.flat)]
            if not transfer.one_by_one:
                return (yield from raw_collectives.scatter_sum_steps(rows, self.group, buffers, results))
            zeros = partial(torch.zeros, dtype=dtype, device=buffers.device)
            pairs = zip(self.splits, wholes[: transfer.alone], strict=False)
            sent = [zeros(split.whole) if x is None else x.to(dtype).contiguous() for split, x in pairs]
            return (yield from self._exchange_gradients(sent, rows, dtype, buffers, results))
        finally:
            staging.held = False

    def parts_for_ranks(self, wholes: Sequence[Tensor | None], dtype: torch.dtype, buffers: Buffers) -> Tensor:
        """Gradients as one flat tensor [W * n], part i for rank i: what a reduction of the user's own begins with."""
        staging = buffers.take(self.ranks * self.numel, dtype)
        self._fill(staging, wholes, transfer_of(self.layout, dtype.itemsize, False))
        return staging.flat

    def _fill(self, staging: Buffer, wholes: Sequence[Tensor | None], transfer: Transfer) -> None:
        """Copy what travels together into the parts."""
        gradients = [*filter(_is_there, wholes[transfer.alone :])]
        if transfer.even and len(gradients) == len(self.splits) - transfer.alone:
            chunk_cat(gradients, 0, self.ranks, out=staging.flat.view(self.ranks, -1))
            return
        into, from_ = [], []
        for index, place, view in zip(transfer.leaves, staging.views(transfer.parts), transfer.in_leaf, strict=True):
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
        received = [(peer, self._messages(row, alone)) for row, peer in zip(rows, peers, strict=True)]
        parts = [(peer, self._parts(wholes, staging, peer)) for peer in peers]
        works = [self.group.recv([place], peer, tag) for peer, into in received for tag, place in into.items()]
        works += [self.group.send([part], peer, tag) for peer, sent in parts for tag, part in sent.items()]
        yield works
        if mine := self._parts(wholes, staging, self.rank):
            foreach("add_" if begins == 0 else "copy_")([*self._messages(out, alone).values()], [*mine.values()])
        for row in extra:
            out.add_(row)
        return [out]

    def shards_of(self, flat: Tensor) -> list[Tensor]:
        """This rank's shards in a flat tensor [n], contiguous, each with a version counter of its own."""
        storage, item = flat.untyped_storage(), flat.element_size()
        blank, views = flat.new_empty, self.layout.shards  # see [Note: parts of one memory] in flat_memory.py
        out = [set_storage(blank(0), storage[at * item : end * item], 0, size, step) for size, step, at, end in views]
        return out if self.layout.contiguous else [shard.contiguous() for shard in out]


class PureAxisCollective:
    """`AxisCollective` for tensors that have no memory of their own: recorded ones, and those of simulated ranks.

    Leaves are put together, sent and taken apart by operations that return new tensors: a graph can hold them. Nothing
    is written in place, and a part that depends on the rank is made by `per_rank`.
    """

    def __init__(self, leaves: Sequence[Leaf], grid: Grid, axis: str, keep: tuple[str, ...]) -> None:
        """The leaves are split over `axis` innermost, and over the axes in `keep`."""
        self._leaves, self._grid, self._axis, self._keep = leaves, grid, axis, keep
        self.group, self.ranks = grid.groups[axis], grid.sizes[axis]

    def _splits_at(self, coords: Axes) -> list[LeafSplit]:
        return leaf_splits(self._leaves, self._grid, coords, self._axis, self._keep)

    # -- shards -> whole leaves ---------------------------------------------------------------------------------------

    def gather(self, shards: Sequence[Tensor], dtype: torch.dtype, buffers: Buffers) -> Steps:
        """One flat tensor in `dtype` that holds the whole leaves, see `wholes_of`."""
        (rows,) = per_rank(self._grid, partial(self._packed, dtype, 1), shards)  # [1, n]
        if self.ranks > 1:
            parts = gathering(rows.view(-1), self.group)  # [W * n]
            yield []  # a graph may have something else in between
            rows = waited(parts)
        return per_rank(self._grid, self._joined, [rows])

    def _packed(self, dtype: torch.dtype, chunks: int, coords: Axes, leaves: Sequence[Tensor | None]) -> list[Tensor]:
        """[chunks, n]: shards in one chunk, whole leaves in one for each rank; split dims in front, padded."""
        zeros, pairs = partial(torch.zeros, device=self._grid.device), zip(self._splits_at(coords), leaves, strict=True)
        values = [(zeros(split.whole, dtype=dtype) if x is None else x.to(dtype), split) for split, x in pairs]
        return [torch.cat([_rows(x, split, chunks).reshape(chunks, split.numel) for x, split in values], dim=1)]

    def _joined(self, coords: Axes, flats: Sequence[Tensor]) -> list[Tensor]:
        """[W * n], the flat tensors of all ranks -> the whole leaves side by side."""
        splits = self._splits_at(coords)
        parts = flats[0].view(self.ranks, -1).split([split.numel for split in splits], dim=1)
        pairs = zip(parts, splits, strict=True)
        return [together([_of_rows(part, split, self.ranks, split.whole) for part, split in pairs])]

    def wholes_of(self, flat: Tensor) -> list[Tensor]:
        """The whole leaves in what `gather` made."""

        def cut(coords: Axes, flats: Sequence[Tensor]) -> list[Tensor]:
            return apart_again(flats[0], [split.whole for split in self._splits_at(coords)])

        return per_rank(self._grid, cut, [flat])

    # -- gradients of whole leaves -> their sum, of which every rank keeps its shards ---------------------------------

    def reduce(self, wholes: Sequence[Tensor | None], dtype: torch.dtype, buffers: Buffers, results: Buffers) -> Steps:
        """The sum over ranks as one flat tensor [n]; wholes travel in `dtype`, missing ones are zeros."""
        (parts,) = per_rank(self._grid, partial(self._packed, dtype, self.ranks), wholes)  # [W, n]: row i is for rank i
        if self.ranks == 1 or not parts.numel():
            return [parts.view(-1)]
        return (yield from raw_collectives.pure_scatter_steps(parts, self.group))

    def shards_of(self, flat: Tensor) -> list[Tensor]:
        """This rank's shards in a flat tensor [n]."""

        def cut(coords: Axes, flats: Sequence[Tensor]) -> list[Tensor]:
            splits = self._splits_at(coords)
            chunks = flats[0].split([split.numel for split in splits])
            return [_of_rows(chunk, split, 1, split.shard) for chunk, split in zip(chunks, splits, strict=True)]

        return per_rank(self._grid, cut, [flat])


def together(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """[n]: the elements of all, one after another."""
    return torch.cat([x.reshape(-1) for x in tensors], out=out)


def apart_again(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes, which lie one after another in `flat`."""
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _rows(x: Tensor, split: LeafSplit, chunks: int) -> Tensor:
    """A shard, or a whole leaf, with its split dim in front and padded to so many chunks."""
    rows = x.movedim(split.dim, 0)
    missing = chunks * split.chunk[split.dim] - len(rows)
    return pad(rows, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else rows


def _of_rows(rows: Tensor, split: LeafSplit, chunks: int, shape: tuple[int, ...]) -> Tensor:
    """The other way round: the shard, or the whole leaf, of this shape."""
    rest = (*split.chunk[: split.dim], *split.chunk[split.dim + 1 :])
    padded = rows.reshape(chunks * split.chunk[split.dim], *rest)
    return padded.narrow(0, 0, shape[split.dim]).movedim(0, split.dim).contiguous()


def undone(local: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks side by side on `dim`, of which together `length` are there."""
    shape, ranks = tuple(local.shape), group.size()
    chunk, joined = ((*shape[:dim], size, *shape[dim + 1 :]) for size in (-(-length // ranks), length))
    split = LeafSplit(dim, shape, chunk, joined)
    if not split.numel:
        return local.new_empty(joined)
    return _of_rows(raw_collectives.gather_flat(_rows(local, split, 1).reshape(-1), group), split, ranks, joined)
