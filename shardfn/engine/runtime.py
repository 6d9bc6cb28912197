"""What all calls of a plan on a grid share: memory, learnt order, what is in the air.

A plan is plain data, and `Plan.home` keeps one of these for each grid that it runs on.

[Note: one order on every rank]
Ranks that gather units in different orders exchange the wrong bytes or wait for ever. Each session walks over a table
that says which event followed which; where exactly one is known, nothing is asked, and the next one may begin early.
Where none or several are known, the ranks agree through the process group's store before any data moves, so that a
rank which goes another way gets an error with the names of both units.

[Note: neighbours]
With `Policy(regather=n)` a gathered unit stays between forward and backward, split over n neighbouring ranks.

    after the forward     every rank keeps the n-th part of what it gathered     no collective
    for the backward      one all-gather over the n ranks, into its place

The ranks of one machine are neighbours on the mesh, so that the second gather need not leave it.

[Note: placed parameters]
Modules use as DTensors what `parallelize_module` made so. Stored, such a parameter is split over the data axes too.
What is gathered is this rank's part over the other axes, as of any split weight; here it becomes a DTensor over those
axes again, and torch's own rules and hooks do the rest.
"""

import secrets
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfn import _torch, comm
from shardfn.comm import AsyncCollective, BucketOnGrid, BufferPool, Buffers, Steps, backend_of, gather_flat, host_of
from shardfn.engine.reductions import Accumulation
from shardfn.layout import Grid, Plan, modules_above, part_of
from shardfn.notation import ShardError

# Seconds that a rank waits for the others to ask for the same unit: as long as NCCL waits for a collective. One rank
# may have been saving a checkpoint before it comes.
_PATIENCE = 600.0


class Event(NamedTuple):
    """A communication over the data axes: what is done to which bucket of a unit."""

    kind: str  # "gather", "gather again", "recompute" or "reduce"
    unit: str
    bucket: int

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or '(root)'!r}" + (f", bucket {self.bucket}" if self.bucket else "")


class Order:
    """Which events follow which, on a grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.sure: dict[Hashable, Event | None] = {}  # what comes after, where only one event ever did; else None
        self.asked = 0
        self._alone = not grid.exchanges or backend_of(next(iter(grid.groups.values())), grid.device) == "fake"

    def check(self, before: Hashable, event: Event) -> None:
        """Note that `event` comes now, which is not `sure`, after all ranks agreed.

        Raises:
            ShardError: another rank is about to do something else.
        """
        if not self._alone:
            self._agree(str(event))
        self.sure[before] = event if before not in self.sure else None

    def _agree(self, event: str) -> None:
        """Meet the other ranks at the store: the first one says what it does, the last one lets all go on."""
        store, ranks = _torch.default_store(), self._grid.ranks
        comm.note(self._grid.mesh, f"say that it is to {event}")
        key = f"{self._prefix}/{self.asked}"
        self.asked += 1
        mine = f"rank {dist.get_rank()} is about to {event}"
        first = store.compare_set(key, "", mine).decode()
        if differs := first.partition(" to ")[2] != event:
            self._refuse(f"{mine}, {first}")
        if differs or store.add(f"{key}/count", 1) == len(ranks):
            store.set(f"{key}/go", "")
        if not self._comes(store, f"{key}/go"):
            count = store.add(f"{key}/count", 0)
            here = f"{len(ranks) - count} of {len(ranks)} ranks did not come to the same point"
            self._refuse(f"{mine}, {here} within {_PATIENCE:g} s")
        if (refusal := self._refusal()) is not None:
            # Ranks that wait for this one shall hear of it now, not when the timeout of the group is over.
            for axis, group in self._grid.groups.items():
                if self._grid.sizes[axis] > 1:
                    _torch.close_connections(group, self._grid.coords[axis], self._grid.device)
            raise refusal

    def _comes(self, store: Any, key: str) -> bool:
        """Wait for a key, until the run is over."""
        journal, end, pause = comm.journal_of(self._grid.mesh), monotonic() + _PATIENCE, 1e-4
        while not store.check([key]):
            if journal is not None:
                journal.require_going_on()
            if monotonic() > end:
                return False
            sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def explained(self, error: RuntimeError) -> Exception:
        """Why a communication failed: what another rank said before it broke off, or the error itself."""
        return error if self._alone else (self._refusal() or comm.explained(self._grid.mesh, error))

    def _refuse(self, what: str) -> None:
        _torch.default_store().set(f"{self._prefix}/error", what)

    def _refusal(self) -> ShardError | None:
        store, key = _torch.default_store(), f"{self._prefix}/error"
        if not store.check([key]):
            return None
        return ShardError(
            f"apply: {store.get(key).decode()}. Every rank must call the same units in the same order: control flow "
            "that depends on the rank, on data or on random numbers must go the same way on all of them; a method that "
            "calls its model until its values say so has to be named 'generate'. The process groups of this mesh are "
            "closed now."
        )

    @cached_property
    def _prefix(self) -> str:
        """A name in the store that no earlier order used; the first rank of the mesh chooses it."""
        number = torch.tensor([secrets.randbits(62)])
        for axis in self._grid.sizes:
            number = gather_flat(number.to(self._grid.device), self._grid.groups[axis])[:1]
        return f"shardfn/order/{int(number)}"


class Neighbours:
    """The n ranks around this one along a data axis, which hold the same gathered weights; see [Note: neighbours]."""

    def __init__(self, grid: Grid, axis: str, count: int) -> None:
        """Every rank of the mesh makes its own at the same point: the process group is new."""
        ranks = dist.get_process_group_ranks(grid.groups[axis])
        first = grid.coords[axis] // count * count
        self.count, self.index = count, grid.coords[axis] - first
        self.group = _torch.group_of(ranks[first : first + count])

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
        of_bytes = whole.view(torch.uint8), part.view(torch.uint8)
        yield [_torch.all_gather_single(*of_bytes, group=self.group, async_op=True)]
        return [whole]


class Runtime:
    """What the calls of a plan on a grid share."""

    def __init__(self, plan: Plan, grid: Grid) -> None:
        self.pool = BufferPool(grid.device)
        self.host = host_of(plan.policy, grid.device)
        buckets = [((unit.name, index), b) for unit in plan.units for index, b in enumerate(unit.buckets)]
        self.bucket_of = {at: BucketOnGrid(plan, grid, bucket, self.pool) for at, bucket in buckets}
        self.order = Order(grid)
        self.units = {unit.name: unit for unit in plan.units}
        self.leaves_of = {unit.name: [name for b in unit.buckets for name in b.leaves] for unit in plan.units}
        moving = {unit for (unit, _), on_grid in self.bucket_of.items() if on_grid.collectives}
        regather = {name for name, unit in self.units.items() if unit.regather}
        self.frees = regather & moving if not _torch.simulated() else set[str]()
        self.watched: set[Hashable] = set()  # ways in which units computed again, see remat.py
        # A unit that holds no other one, and moves data.
        self.recomputable = self.frees - modules_above(self.units) - {""}
        # Parameters that a module sees exactly as they are stored, which is most of them, need no further view.
        self.plain = {name: layout.plain for name, layout in plan.layouts.items()}
        self.placed = _placed_specs(plan, grid)  # see [Note: placed parameters]
        self.neighbours = _neighbours(plan, grid)  # of the units that stay split over some of the ranks
        self.strided: dict[Any, Any] = {}  # shapes, strides and offsets of views that autograd saves, once each
        self.in_flight: list[AsyncCollective] = []
        self.accumulations: dict[tuple[int, int], Accumulation] = {}  # by session and backward

    def begin(self) -> None:
        """A call begins. What an exception left of a backward is waited for, and forgotten."""
        self.settle()
        if _torch.backward_id() == -1:
            for accumulation in self.accumulations.values():
                accumulation.settle()
            self.accumulations.clear()
        self.pool.turn()

    def start(self, steps: Steps, name: Callable[[], str]) -> AsyncCollective:
        """A communication that `settle` knows of."""
        collective = AsyncCollective(steps, self.order.explained, name)
        self.in_flight.append(collective)
        return collective

    def finish(self, collective: AsyncCollective) -> Tensor:
        """The flat tensor that a gather makes."""
        if collective in self.in_flight:
            self.in_flight.remove(collective)
        return collective.finish()[0]

    def settle(self) -> None:
        """Nothing stays in the air: what was started for nothing, or left by an exception, is waited for."""
        while self.in_flight:
            self.in_flight.pop(0).finish()


def _placed_specs(plan: Plan, grid: Grid) -> Mapping[str, tuple[_torch.DTensorSpec, frozenset[int]]]:
    """Parameter -> mesh, placements and whole shape of the DTensor that modules use, and which axes split the batch."""
    specs: dict[str, tuple[_torch.DTensorSpec, frozenset[int]]] = {}
    for name, layout in plan.layouts.items():
        if layout.placed is not None:
            axes = tuple(axis for axis, _ in layout.placed)
            placements = [Replicate() if dim is None else Shard(dim) for _, dim in layout.placed]
            spec = _torch.dtensor_spec(part_of(grid.mesh, axes), placements, layout.shape, plan.compute_dtypes[name])
            specs[name] = spec, frozenset(at for at, axis in enumerate(axes) if axis in plan.roles.data)
    if specs:
        _torch.differentiates_from_local()
    return specs


class AsPlaced(torch.autograd.Function):
    """This rank's part as a DTensor.

    forward   [part] -> DTensor
    backward  d DTensor, of any placements -> (summed, gathered or cut) -> d [part]

    Along the axes in `data`, ranks have other samples, and gradients of their own: those are reduced as of any weight.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: _torch.DTensorSpec, data: frozenset[int]) -> DTensor:
        ctx.spec, ctx.data = spec, data
        return _torch.wrap_local(part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        assert isinstance(grad, DTensor)
        keeps = (at in ctx.data and placement.is_partial("sum") for at, placement in enumerate(grad.placements))
        wanted = [x if keep else y for keep, x, y in zip(keeps, grad.placements, ctx.spec.placements, strict=True)]
        if list(grad.placements) != wanted:
            grad = grad.redistribute(ctx.spec.mesh, wanted)
        if torch.is_grad_enabled():  # somebody differentiates the gradient
            return grad.to_local(), None, None
        return _torch.waited(_torch.unwrap_local(grad)), None, None


def _neighbours(plan: Plan, grid: Grid) -> dict[str, Neighbours]:
    axis = plan.keep_axis
    counts = {unit.name: plan.kept_over(unit) for unit in plan.units if not grid.pure}
    by_n = {n: Neighbours(grid, axis, n) for n in dict.fromkeys(counts.values()) if n is not None and axis is not None}
    return {name: by_n[count] for name, count in counts.items() if count in by_n}


def runtime_of(plan: Plan, grid: Grid) -> Runtime:
    """Made once for a plan and a grid, and kept with the plan."""
    return plan.home.once(("runtime", plan.reduction, grid), lambda: Runtime(plan, grid))
