"""Meshes of several ranks on one GPU, which NCCL refuses: a process group that takes its data through the host.

Its numbers are right and its backend is none that shardfn knows, so that everything else is done as on NCCL: which
collectives are called, with which buffers, on which streams.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

_WORK_OF: Callable[..., Any] = vars(c10d)["_create_work_from_future"]
_NAMES = (
    *("broadcast", "allreduce", "allreduce_coalesced", "barrier", "send", "recv", "gather", "scatter"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "all_gather_single_coalesced"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)


def cuda_mesh(backend: str, **axes: int) -> DeviceMesh:
    """A mesh of CUDA devices with groups of their own, in a process that has a gloo world."""
    os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(0)
    backends: dict[int | str, Any] = dict.fromkeys(axes, backend)
    return init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=backends)


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    group: Any = dist.ProcessGroup
    inner = group(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return _ByHost(inner, rank, size)


class _ByHost(dist.ProcessGroup):
    """gloo on copies of what it is given."""

    def __init__(self, gloo: dist.ProcessGroup, rank: int, size: int) -> None:
        begin: Any = super().__init__
        begin(rank, size)
        self.gloo = gloo
        self.sizes = size

    def size(self) -> int:
        return self.sizes

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "byhost"


def _by_host(name: str) -> Callable[..., Any]:
    def call(self: _ByHost, *args: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []

        def on_host(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_cuda:
                return x
            copies.append((x, x.cpu()))
            return copies[-1][1]

        work = getattr(self.gloo, name)(*pytree.tree_map(on_host, args))
        work.wait()
        for there, here in copies:
            there.copy_(here)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(args[0] if args else None)
        return _WORK_OF(done)

    return call


for _name in _NAMES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(_ByHost, _name, _by_host(_name))
dist.Backend.register_backend("byhost", _group, devices=["cpu", "cuda"])
