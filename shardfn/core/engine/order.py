"""One order of communication on every rank: learnt, used to look ahead, and guarded. Layer 3.

[Note: one order on every rank]
Ranks that gather units in different orders exchange the wrong bytes or wait for ever. Each session walks over a table
that says which event followed which; where exactly one is known, nothing is asked, and the next one may begin early.
Where none or several are known, the ranks agree through the process group's store before any data moves, so that a
rank which goes another way gets an error with the names of both units.
"""

import secrets
from collections.abc import Hashable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardfn._torch import close_connections, default_store
from shardfn.core.collectives import backend_of, gather_flat
from shardfn.core.errors import ShardError
from shardfn.core.mesh import Grid

# How long a rank waits for the others to ask for the same unit: as long as NCCL waits for a collective. One rank may
# have been saving a checkpoint before it comes.
_PATIENCE = timedelta(minutes=10)


class Event(NamedTuple):
    """A communication over the data axes: what is done to which bucket of a unit."""

    kind: str  # "gather", "gather again" or "reduce"
    unit: str
    bucket: int

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or '(root)'!r}" + (f", bucket {self.bucket}" if self.bucket else "")


class Order:
    """Which events follow which, on a grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._after: dict[Hashable, set[Event]] = {}
        self.sure: dict[Hashable, Event] = {}  # what comes after, where only one event ever did
        self._asked = 0
        self._prefix: str | None = None
        self._alone = not grid.exchanges or backend_of(next(iter(grid.groups.values())), grid.device) == "fake"

    def check(self, before: Hashable, event: Event) -> None:
        """Note that `event` comes now, which is not `sure`, after all ranks agreed.

        Raises:
            ShardError: another rank is about to do something else.
        """
        if not self._alone:
            self._agree(str(event))
        known = self._after.setdefault(before, set())
        known.add(event)
        self.sure.pop(before, None)
        if len(known) == 1:
            self.sure[before] = event

    def _agree(self, event: str) -> None:
        """Meet the other ranks at the store: the first one says what it does, the last one lets all go on."""
        store, ranks = default_store(), self._grid.ranks()
        key = f"{self._common_prefix()}/{self._asked}"
        self._asked += 1
        mine = f"rank {dist.get_rank()} is about to {event}"
        first = store.compare_set(key, "", mine).decode()
        if first.partition(" to ")[2] != event:
            self._refuse(f"{mine}, {first}")
            store.set(f"{key}/go", "")
        elif store.add(f"{key}/count", 1) == len(ranks):
            store.set(f"{key}/go", "")
        else:
            self._wait(store, key, mine, ranks)
        if (refusal := self._refusal()) is not None:
            self._break_off()
            raise refusal

    def _wait(self, store: Any, key: str, mine: str, ranks: list[int]) -> None:
        try:
            store.wait([f"{key}/go"], _PATIENCE)
        except (RuntimeError, dist.DistError):
            count = store.add(f"{key}/count", 0)
            here = f"{len(ranks) - count} of {len(ranks)} ranks did not come to the same point"
            self._refuse(f"{mine}, {here} within {_PATIENCE.total_seconds():g} s")

    def explained(self, error: RuntimeError) -> Exception:
        """Why a communication failed: what another rank said before it broke off, or the error itself."""
        return error if self._alone else (self._refusal() or error)

    def _refuse(self, what: str) -> None:
        default_store().set(f"{self._common_prefix()}/error", what)

    def _refusal(self) -> ShardError | None:
        store, key = default_store(), f"{self._common_prefix()}/error"
        if not store.check([key]):
            return None
        return ShardError(
            f"apply: {store.get(key).decode()}. Every rank must call the same units in the same order: control flow "
            "that depends on the rank, on data or on random numbers must go the same way on all of them; a method that "
            "calls its model until its values say so has to be named 'generate'. The process groups of this mesh are "
            "closed now."
        )

    def _break_off(self) -> None:
        """Ranks that wait for this one shall hear of it now, not when the timeout of the group is over."""
        for axis, group in self._grid.groups.items():
            if self._grid.sizes[axis] > 1:
                close_connections(group, self._grid.coords[axis], self._grid.device)

    def _common_prefix(self) -> str:
        """A name in the store that no earlier order used; the first rank of the mesh chooses it."""
        if self._prefix is None:
            number = torch.tensor([secrets.randbits(62)])
            for axis in self._grid.sizes:
                group = self._grid.groups[axis]
                number = gather_flat(number.to(self._grid.device), group)[:1]
            self._prefix = f"shardfn/order/{int(number)}"
        return self._prefix
