"""`Policy(regather=n)`: between forward and backward a gathered unit stays, split over n neighbouring ranks. Layer 3.

    after the forward     every rank keeps the n-th part of what it gathered     no collective
    for the backward      one all-gather over the n ranks, into its place

The ranks of one machine are neighbours on the mesh, so that the second gather need not leave it.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn._torch import all_gather_single, group_of
from shardfn.core.collectives import Steps
from shardfn.core.mesh import Grid
from shardfn.core.storage import Buffers


class Neighbours:
    """The n ranks around this one along a data axis; they hold the same gathered weights."""

    def __init__(self, grid: Grid, axis: str, count: int) -> None:
        """Every rank of the mesh makes its own at the same point: the process group is new."""
        own = dist.get_process_group_ranks(grid.groups[axis])
        first = grid.coords[axis] // count * count
        self.count, self.index = count, grid.coords[axis] - first
        self.group = group_of(own[first : first + count])

    def part_of(self, whole: Tensor, buffers: Buffers) -> Tensor:
        """This rank's part [part] of a flat tensor; the last one is filled up."""
        size = -(-whole.numel() // self.count)
        start = min(self.index * size, whole.numel())
        mine = whole[start : start + size]
        part = buffers.tensor(size, whole.dtype)
        part[: mine.numel()].copy_(mine)
        return part

    def gather_steps(self, part: Tensor, buffers: Buffers) -> Steps:
        """The parts of all, [count * part], as they lay in the flat tensor."""
        whole = buffers.tensor(self.count * part.numel(), part.dtype)
        yield [all_gather_single(whole.view(torch.uint8), part.view(torch.uint8), group=self.group, async_op=True)]
        return [whole]
