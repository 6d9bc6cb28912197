"""What all calls of a plan on a grid share: memory, learnt order, what is in the air. Layer 3.

A plan is plain data, and `Plan.home` keeps one of these for each grid that it runs on.

[Note: neighbours]
With `Policy(regather=n)` a gathered unit stays between forward and backward, split over n neighbouring ranks.

    after the forward     every rank keeps the n-th part of what it gathered     no collective
    for the backward      one all-gather over the n ranks, into its place

The ranks of one machine are neighbours on the mesh, so that the second gather need not leave it.
"""

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn._torch import all_gather_single, backward_id, group_of, simulated
from shardfn.core.buckets import BucketOnGrid, Flight
from shardfn.core.collectives import Steps
from shardfn.core.engine.gradients import Accumulation
from shardfn.core.engine.order import Order
from shardfn.core.engine.weights import placed_specs
from shardfn.core.mesh import Grid
from shardfn.core.offload import host_of
from shardfn.core.plan import Plan
from shardfn.core.storage import BufferPool, Buffers, NoBuffers


class Neighbours:
    """The n ranks around this one along a data axis, which hold the same gathered weights; see [Note: neighbours]."""

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


class Runtime:
    """What the calls of a plan on a grid share."""

    def __init__(self, plan: Plan, grid: Grid) -> None:
        self.pool = NoBuffers(grid.device) if grid.pure else BufferPool(grid.device)
        self.host = host_of(plan.policy, grid.device)
        self.spots = {b: BucketOnGrid(plan, grid, b, self.pool) for unit in plan.units for b in unit.buckets}
        self.spot_of = {(unit.name, i): self.spots[b] for unit in plan.units for i, b in enumerate(unit.buckets)}
        self.order = Order(grid)
        self.units = {unit.name: unit for unit in plan.units}
        self.leaves_of = {unit.name: [name for b in unit.buckets for name in b.leaves] for unit in plan.units}
        self.unit_of = {name: layout.unit for name, layout in plan.layouts.items()}
        moving = {bucket.unit for bucket, spot in self.spots.items() if spot.moves}
        regather = {name for name, unit in self.units.items() if unit.regather}
        self.frees = regather & moving if not simulated() else set[str]()
        self.watched: set[Hashable] = set()  # ways in which units computed again, see remat.py
        self.recomputable = {name for name in self.frees if self._stands_alone(name)}
        # Parameters that a module sees exactly as they are stored, which is most of them, need no further view.
        self.plain = {
            name: all(merge == 1 for merge in x.leaves[0].merges) and x.leaves[0].shape == x.leaves[0].extent
            for name, x in plan.layouts.items()
            if len(x.leaves) == 1
        }
        self.placed = placed_specs(plan, grid)  # parameters that modules use as DTensors
        self.neighbours = _neighbours(plan, grid)  # of the units that stay split over some of the ranks
        self.strided: dict[Any, Any] = {}  # shapes, strides and offsets of views that autograd saves, once each
        self.in_the_air: list[Flight] = []
        self.accumulations: list[Accumulation] = []
        self.models: dict[int, Any] = {}  # what `apply` keeps of the models that it ran, by identity

    def _stands_alone(self, unit: str) -> bool:
        """Whether a unit holds no other one, and gathering it moves data."""
        inner = not unit or any(other.startswith(f"{unit}.") for other in self.units)
        return not inner and any(self.spots[bucket].moves for bucket in self.units[unit].buckets)

    def begin(self) -> None:
        """A call begins. What an exception left of a backward is waited for, and forgotten."""
        self.settle()
        if backward_id() == -1:
            for accumulation in self.accumulations:
                accumulation.settle()
            self.accumulations.clear()
        self.pool.turn()

    def start(self, steps: Steps) -> Flight:
        """A communication that `settle` knows of."""
        flight = Flight(steps, self.order.explained)
        self.in_the_air.append(flight)
        return flight

    def finish(self, flight: Flight) -> Tensor:
        """The flat tensor that a gather makes."""
        if flight in self.in_the_air:
            self.in_the_air.remove(flight)
        return flight.finish()[0]

    def settle(self) -> None:
        """Nothing stays in the air: what was started for nothing, or left by an exception, is waited for."""
        while self.in_the_air:
            self.in_the_air.pop(0).finish()


def _neighbours(plan: Plan, grid: Grid) -> dict[str, Neighbours]:
    axis = plan.keep_axis
    counts = {unit.name: plan.kept_over(unit) for unit in plan.units if not grid.pure}
    made = {n: Neighbours(grid, axis, n) for n in dict.fromkeys(counts.values()) if n is not None and axis is not None}
    return {name: made[count] for name, count in counts.items() if count in made}


def runtime_of(plan: Plan, grid: Grid) -> Runtime:
    """Made once for a plan and a grid, and kept with the plan."""
    return plan.home.once(("runtime", plan.reduction, grid), lambda: Runtime(plan, grid))
