"""Slices of tensors from rank to rank, in messages of bytes: what `layout/slices.py` plans, sent.

    step      1            2            3
    rank 0    to 1, of 3   to 2, of 2   to 3, of 1
    rank 1    to 2, of 0   to 3, of 3   to 0, of 2

In step s each rank sends to the one that is s further on, and receives from the one s before. What a rank has for
another goes in parcels, and all ranks take their parcels in the order of step, then number: a rank waits for those that
are not as far as it, and the rearmost waits for nobody. Two parcels each way are under way at once: with them a rank
holds 16 MiB besides what it was given.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.comm.flat_memory import portions
from shardfn.comm.raw_collectives import AsyncCollective, Steps, backend_of
from shardfn.layout import blocks, narrowed

PARCEL = 4 * 2**20  # bytes
_UNDER_WAY = 2


class Shipment(NamedTuple):
    """A view of what goes to another rank, or of the place of what comes from there, and the dtype in which it does."""

    rank: int
    view: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What travels."""
        return prod(self.view.shape) * self.dtype.itemsize


def exchange_slices(
    sends: Iterable[Shipment], receives: Iterable[Shipment], ranks: Sequence[int], device: torch.device
) -> None:
    """Send views and fill others, among ranks that all call this; what goes between two has one order on both.

    Outside autograd. The bytes of the views travel and no others, by the host if the backend cannot send from the
    device.
    """
    world: Any = dist.group.WORLD
    places, backend = {rank: place for place, rank in enumerate(sorted(ranks))}, backend_of(world, device)
    by = device if device.type == "cpu" or backend not in ("", "gloo") else torch.device("cpu")
    # NCCL wants what goes out and comes in in one operation, the first of which all of the world must join.
    at_once = backend != "nccl" or len(places) == dist.get_world_size()
    turns = defaultdict[tuple[int, int], list[tuple[bool, int, list[Shipment]]]](list)
    for outgoing, shipments in ((True, sends), (False, receives)):
        rows = defaultdict[int, list[Shipment]](list)
        for each in sorted(shipments, key=lambda x: -x.dtype.itemsize):  # so that all begin at multiples of it
            cut = blocks(each.view.shape, PARCEL // each.dtype.itemsize)
            rows[each.rank] += (each._replace(view=narrowed(each.view, box)) for box in cut)
        for rank, row in rows.items():
            step = (places[rank] - places[dist.get_rank()]) * (1 if outgoing else -1) % len(places)
            for number, parcel in enumerate(portions(row, lambda x: x.nbytes, PARCEL)):
                turns[step, number].append((outgoing, rank, parcel))
    largest = max((sum(x.nbytes for x in row) for turn in turns.values() for _, _, row in turn), default=0)
    take, spare = partial(torch.empty, largest, dtype=torch.uint8, device=by), list[Tensor]()
    under_way = deque[AsyncCollective]()
    for turn in sorted(turns):
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().finish()
        under_way.append(AsyncCollective(_deliver(turns[turn], take, spare, at_once)))
    for parcels in under_way:
        parcels.finish()


def _deliver(
    parcels: list[tuple[bool, int, list[Shipment]]], take: Callable[[], Tensor], spare: list[Tensor], at_once: bool
) -> Steps:
    """One parcel out, one in, or both, in memory that is spare: an allocator keeps what each would take."""
    ops, arriving, flats = list[dist.P2POp](), list[tuple[Tensor, Tensor]](), list[Tensor]()
    for outgoing, rank, shipments in sorted(parcels, key=lambda x: x[0] == (x[1] < dist.get_rank())):  # up, then down
        sizes = [each.nbytes for each in shipments]
        flats.append(spare.pop() if spare else take())
        data = flats[-1][: sum(sizes)]
        for part, (_, view, dtype) in zip(data.split(sizes), shipments, strict=True):
            value = part.view(dtype).view(view.shape)
            if outgoing:
                value.copy_(view)
            else:
                arriving.append((value, view))
        ops.append(dist.P2POp(dist.isend if outgoing else dist.irecv, data, rank))
    yield dist.batch_isend_irecv(ops) if at_once else [op.op(op.tensor, op.peer) for op in ops]
    for value, view in arriving:
        view.copy_(value)
    spare.extend(flats)
    return []
