"""One process as rank 0 of many, with torch's fake process group: collectives return at once and move nothing between
ranks. What is left of a step is the host's own work, in seconds of this process's CPU time."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.testing import count_collectives

# torch 2.13 renamed these two; the old names warn.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What copies in the fake group: kind -> (collective, size of its output for an input of n bytes on w ranks).
COPYING: dict[str, tuple[Callable[..., Any], Callable[[int, int], int]]] = {
    "all_gather": (all_gather, lambda n, w: n * w),
    "reduce_scatter": (reduce_scatter, lambda n, w: n // w),
    "all_to_all": (dist.all_to_all_single, lambda n, w: n),
}


def start_fake(ranks: int, rank: int = 0) -> None:
    """Start the process group."""
    # Private, but what torch's own projects use; importing it registers the backend, too.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    torch.set_flush_denormal(True)  # buffers that nobody fills hold anything; denormals would cost time


def copying_seconds(run: Callable[[], object], mesh: DeviceMesh) -> float:
    """CPU time that `run` spends in copies which stand for what other ranks would have sent over the fsdp axis.

    An all-gather of the fake group copies its input to the place of every rank: 0.05 ms at 64 ranks, 3 ms at 4096,
    which no host spends with a real one. Found by counting what `run` issues and timing the same alone.
    """
    group, ranks = mesh["fsdp"].get_group(), mesh["fsdp"].size()
    with count_collectives() as counts:
        run()
    total = 0.0
    for kind, (collective, size_of) in COPYING.items():
        calls = getattr(counts, kind)
        if calls:
            size = -(-counts.bytes_of[kind] // calls // ranks) * ranks
            given, into = (torch.zeros(n, dtype=torch.uint8) for n in (size, size_of(size, ranks)))
            total += calls * _seconds(collective, into, given, group)
    return total


def _seconds(collective: Callable[..., Any], into: Tensor, given: Tensor, group: dist.ProcessGroup) -> float:
    """The median of many calls."""
    seconds = []
    for _ in range(50):
        start = time.process_time()
        collective(into, given, group=group)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)
