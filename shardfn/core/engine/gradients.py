"""Gradients of one differentiation, reduced bucket by bucket while its backward goes on. Layer 3.

Autograd adds up what reaches a leaf as soon as it comes, and so would read sums that are still on their way. Here the
leaves of a tree that is differentiated get no gradient from autograd through their buckets: a `Gradients` takes each
bucket, starts its reduction and hands everything out when the backward is over.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardfn._torch import foreach
from shardfn.core.buckets import BucketOnGrid, Flight

_IN_THE_AIR = 1  # reductions under way at the same time: each holds the gradients that it sends
_TO_THE_HOST = 2  # and so many more when shards live on the host, whose copies would have to be waited for


class Gradients:
    """Reduced gradients of the leaves of a tree, by name."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        """`leaves` are fresh: nobody but the differentiation that made them waits for their gradients."""
        self._leaves = leaves
        self._collects = False
        self._flights: deque[tuple[tuple[str, ...], Flight]] = deque()
        self._found: dict[str, Tensor] = {}

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
        own = all(self._leaves.get(name) is leaf for name, leaf in zip(names, leaves, strict=True))
        return self._collects and own and not torch.is_grad_enabled()

    def reduce(
        self,
        spot: BucketOnGrid,
        pending: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype],
        explain: Callable[[RuntimeError], Exception],
    ) -> None:
        """Start to reduce the gradients of a bucket; wait for the oldest when too many are under way."""
        op = spot.plan.reduction
        assert op is not None
        # Hybrid sharding has one more: the last bucket goes on from its reduce-scatter to its all-reduce.
        while len(self._flights) >= _IN_THE_AIR + spot.reduces_twice + (_TO_THE_HOST if spot.host is not None else 0):
            self._land()
        if self._flights:
            self._flights[-1][1].advance()
        self._flights.append((spot.bucket.leaves, Flight(spot.reduce_steps(pending, dtypes, op), explain)))

    def settle(self) -> dict[str, Tensor]:
        """Wait for all; this rank's part of the gradient of every leaf that got one."""
        while self._flights:
            self._land()
        return self._found

    def _land(self) -> None:
        names, flight = self._flights.popleft()
        shards = flight.finish()
        twice = [(name, shard) for name, shard in zip(names, shards, strict=True) if name in self._found]
        if twice:  # gathered several times: gradients add up
            foreach("add_")([self._found[name] for name, _ in twice], [shard for _, shard in twice])
        self._found |= {name: shard for name, shard in zip(names, shards, strict=True) if name not in self._found}
