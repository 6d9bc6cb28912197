"""`Policy(offload="cpu")`: shards on the host, copies that go on beside the device's computation. Layer 2.

[Note: copies beside the computation]
Copies in both directions, and the collectives that send what was copied, are queued on a stream of their own: behind
all work that was queued before, which may still use the memory that they fill, and beside all that is queued later.
Memory is taken outside of that stream, so that the allocator knows it as the computation's. Who uses a result on the
device waits for its collective, or for `arrived`; who uses one on the host waits on the host. Host memory is pinned:
only then does a copy not stop the host.

The CPU has no streams: there everything happens at once. A mesh of CPUs is never offloaded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardfn.core.collectives import Steps
from shardfn.core.policy import Policy
from shardfn.core.storage import FreshBuffers


class Host:
    """The host memory of one device, and the stream of its copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers = FreshBuffers(torch.device("cpu"), pinned=self._stream is not None)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Within it, work is queued on the stream of the copies."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def arrived(self) -> "Wait":
        """What the computation waits for before it reads copies that were queued so far; the host goes on."""
        if self._stream is None:
            return Wait(lambda: None)
        event = self._stream.record_event()
        return Wait(lambda: torch.cuda.current_stream().wait_event(event))

    def fetch(self, flat: Tensor) -> Steps:
        """A flat tensor of the device, on the host."""
        out = self.buffers.tensor(flat.numel(), flat.dtype)
        with self.beside():
            out.copy_(flat, non_blocking=True)
        yield [Wait(self.settle if self._stream is None else self._stream.record_event().synchronize)]
        return [out]

    def settle(self) -> None:
        """Wait on the host until nothing is copied any more: from here on shards may be changed."""
        if self._stream is not None:
            self._stream.synchronize()


class Wait:
    """Something to wait for, like the work of a collective."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


def host_of(policy: Policy, device: torch.device) -> Host | None:
    """Where shards live, when they do not live on the device that computes."""
    return _host(device) if policy.offload == "cpu" and device.type != "cpu" else None


def stored_on(policy: Policy, device: torch.device) -> torch.device:
    """Where shards, gradients and optimizer state live."""
    host = host_of(policy, device)
    return device if host is None else host.buffers.device


_host = cache(Host)
