"""Gradients of one backward, reduced bucket by bucket while it goes on.

Autograd adds up what reaches a leaf as soon as it comes, and so would read sums that are still on their way. Here
leaves get no gradient from autograd through their buckets: `Reductions` take each bucket, start its reduction and hand
everything out when the backward is over, to `value_and_grad` (`Gradients`) or into `.grad` (`Accumulation`).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfn._torch import accumulates, foreach, grad_dtypes_of, spec_of, unwrap_local, wrap_local
from shardfn.comm import AsyncCollective, BucketOnGrid, Explain
from shardfn.layout import Plan, local_slice
from shardfn.notation import ShardError
from shardfn.params import is_sum

Grads = Sequence[Tensor | None]  # one for each leaf, or none
_IN_FLIGHT = 1  # reductions under way at the same time: each holds the gradients that it sends
_TO_THE_HOST = 2  # and so many more when shards live on the host, whose copies would have to be waited for


# [Note: gradients that are held back]
# With `plan.reduction` None (`no_sync`) a backward leaves the gradients of this rank's losses only: whole over the data
# axes, in `.grad`, as DTensors that are `Partial("avg")` over these, so that what torch makes of them is made of the
# mean. The first backward that reduces takes them along.


def goes_into_grad(nodes: Sequence[Any]) -> bool:
    """Whether autograd, having got gradients from `nodes`, would only add them to the `.grad` of leaves.

    Not when the backward is differentiated, or `autograd.grad` or `inputs=` ask for them. To ask costs 25 us then.
    """
    return not torch.is_grad_enabled() and all(map(accumulates, nodes))


@torch.no_grad()
def hold_back(on_grid: BucketOnGrid, leaves: Sequence[Tensor], pending: Grads) -> None:
    """Add pending gradients [whole over data] to those in `.grad`, unreduced."""
    _names_waiting(on_grid.plan).update(on_grid.bucket.leaves)
    for index, (leaf, grad) in enumerate(zip(leaves, pending, strict=True)):
        if grad is None:
            continue
        had = leaf.grad
        if had is not None and is_sum(had):
            unwrap_local(had).add_(grad)
            continue
        (dtype,) = grad_dtypes_of([leaf])
        whole = torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format).copy_(grad)
        if had is not None:
            # It counts more than those of all ranks, whose mean is still to be taken.
            gathered, grid = replace(on_grid.leaves[index], shape=tuple(whole.shape)), on_grid.grid
            ranks = prod(grid.sizes[axis] for axis in on_grid.plan.roles.data if axis in gathered.axes)
            own = local_slice(gathered, whole, grid.sizes, grid.coords, on_grid.bucket.axes)  # this rank's shard
            own.add_(unwrap_local(had), alpha=ranks)
        leaf.grad = wrap_local(whole, on_grid.spec(index, dtype, "avg"))


@torch.no_grad()
def with_held_back(leaves: Sequence[Tensor], pending: Grads) -> list[Tensor | None]:
    """Pending gradients with those that were held back, which leave `.grad`."""
    grads = list(pending)
    for index, leaf in enumerate(leaves):
        had = leaf.grad
        if had is not None and is_sum(had):
            more, leaf.grad = grads[index], None
            grads[index] = unwrap_local(had) if more is None else unwrap_local(had).add_(more)
    return grads


def _names_waiting(plan: Plan) -> set[str]:
    """Leaves whose gradients were held back at some time; shared by the plans that differ in their reduction."""
    return plan.home.once("held back", set)


@torch.no_grad()
def reduce_held_back(plan: Plan, on_grids: Iterable[BucketOnGrid], leaves: Mapping[str, Tensor]) -> None:
    """Reduce what was held back and the last backward did not reach."""
    names = {name for name in _names_waiting(plan) if name in leaves and is_sum(leaves[name].grad)}
    for on_grid in on_grids if names else ():
        waiting = [leaves[name] for name in on_grid.bucket.leaves if name in names]
        if not waiting:
            continue
        part, op = on_grid.part([name in names for name in on_grid.bucket.leaves]), plan.reduction
        assert op is not None
        shards = part.reduce(with_held_back(waiting, [None] * len(waiting)), grad_dtypes_of(waiting), op)
        for index, (leaf, shard) in enumerate(zip(waiting, shards, strict=True)):
            leaf.grad = wrap_local(shard, part.spec(index, shard.dtype, None))


class Reductions:
    """Gradients on their way; by the name of their leaf when they are there."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[tuple[str, ...], AsyncCollective]] = deque()
        self._found: dict[str, Tensor] = {}

    def reduce(self, on_grid: BucketOnGrid, pending: Grads, dtypes: Sequence[torch.dtype], explain: Explain) -> None:
        """Start to reduce the gradients of a bucket; wait for the oldest when too many are under way."""
        op = on_grid.plan.reduction
        assert op is not None
        # Hybrid sharding has one more: the last bucket goes on from its reduce-scatter to its all-reduce.
        most = _IN_FLIGHT + on_grid.reduces_twice + (_TO_THE_HOST if on_grid.host is not None else 0)
        while len(self._in_flight) >= most:
            self._land()
        if self._in_flight:
            self._in_flight[-1][1].advance()
        name = partial(on_grid.profiler_name, "reduce")
        begun = AsyncCollective(on_grid.reduce_steps(pending, dtypes, op), explain, name)
        self._in_flight.append((on_grid.bucket.leaves, begun))

    def settle(self) -> dict[str, Tensor]:
        """Wait for all; this rank's part of the gradient of every leaf that got one."""
        while self._in_flight:
            self._land()
        return self._found

    def _land(self) -> None:
        names, collective = self._in_flight.popleft()
        shards = collective.finish()
        twice = [(name, shard) for name, shard in zip(names, shards, strict=True) if name in self._found]
        if twice:  # gathered several times: gradients add up
            foreach("add_")([self._found[name] for name, _ in twice], [shard for _, shard in twice])
        self._found |= {name: shard for name, shard in zip(names, shards, strict=True) if name not in self._found}


class Gradients(Reductions):
    """Those of the leaves of a tree that `value_and_grad` differentiates."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        """`leaves` are fresh: nobody but the differentiation that made them waits for their gradients."""
        super().__init__()
        self._leaves = leaves
        self._collects = False

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Within it runs the backward that they are for; one that the loss itself runs gets its gradients as ever."""
        self._collects = True
        try:
            yield
        except BaseException:
            self.settle()  # nothing stays in the air
            raise
        finally:
            self._collects = False

    def takes(self, names: Sequence[str], leaves: Sequence[Tensor]) -> bool:
        """Whether these are its own leaves, in its own backward, which nobody differentiates."""
        collects = self._collects and not torch.is_grad_enabled()
        return collects and all(map(is_, map(self._leaves.get, names), leaves))


class Accumulation(Reductions):
    """Those that `loss.backward()` adds to the `.grad` of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self._leaves: dict[str, Tensor] = {}

    def note(self, names: Sequence[str], leaves: Sequence[Tensor]) -> None:
        """These are the leaves behind the names: a tree may hold others by the end of the backward."""
        self._leaves.update(zip(names, leaves, strict=True))

    @torch.no_grad()
    def finish(self) -> None:
        """The backward is over: wait for all, and add."""
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for name, shard in self.settle().items():
            leaf, grad = self._leaves[name], self._leaves[name].grad
            assert isinstance(leaf, DTensor)
            if grad is None:
                leaf.grad = wrap_local(shard, spec_of(leaf))
                continue
            if not isinstance(grad, DTensor):
                raise ShardError(f"backward: the gradient that '{name}' had before is a plain tensor, no DTensor")
            if grad.placements != leaf.placements:  # what a loss on the DTensor itself left
                leaf.grad = grad = grad.redistribute(leaf.device_mesh, leaf.placements)
            sums.append(unwrap_local(grad))
            added.append(shard)
        if sums:
            foreach("add_")(sums, added)
