"""Process groups and meshes of FSDP1 as meshes with the axes `replicate` and `fsdp`. Layer 6."""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import ShardingStrategy

from shardfn.compat.fsdp1.instance import HYBRID
from shardfn.compat.meshes import OWN_AXES, across, device_of, groups_of, mesh_of
from shardfn.core.mesh import default_device_type


def check_groups(
    process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy, has_policy: bool
) -> None:
    """Refuse what cannot be a mesh, with the words of torch, before any process is asked.

    Raises:
        ValueError: two ways at once, or a hybrid strategy that does not know its groups.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    if strategy not in HYBRID:
        return
    if process_group is None and device_mesh is None and not has_policy:
        raise ValueError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        )
    if device_mesh is not None and (not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 2):
        raise ValueError(f"Expected device_mesh to have ndim=2 but got {getattr(device_mesh, 'ndim', device_mesh)}")
    if process_group is not None and not _is_pair(process_group):
        raise ValueError(
            "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] but "
            f"got {type(process_group)}"
        )


def _is_pair(groups: Any) -> bool:
    return isinstance(groups, tuple) and len(groups) == 2 and all(isinstance(g, ProcessGroup) for g in groups)


def make_mesh(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    device_type: str,
    placed: DeviceMesh | None,
) -> DeviceMesh:
    """The mesh over the ranks of a process group, of a pair `(shard, replicate)`, of a mesh, or over all ranks.

    Args:
        process_group, device_mesh, strategy: as the constructor has them.
        device_type: of the mesh.
        placed: the mesh of parameters that `parallelize_module` has split already; its axes come last, by their names.
    """
    if device_mesh is not None and placed:
        return across("FullyShardedDataParallel", device_mesh, OWN_AXES[-device_mesh.ndim :], placed)
    if device_mesh is not None and strategy in HYBRID:
        return mesh_of(groups_of(device_mesh), device_type, OWN_AXES, device_mesh.mesh)
    if process_group is not None and strategy in HYBRID:
        shard, replicate = process_group
        return mesh_of([replicate, shard], device_type, OWN_AXES)
    if device_mesh is not None:
        process_group = device_mesh.get_group(0)
    group = process_group if process_group is not None else _get_default_group()
    if strategy not in HYBRID:
        return mesh_of([group], device_type, OWN_AXES[1:])
    per_node = ranks_per_node()
    return init_device_mesh(device_type, (dist.get_world_size() // per_node, per_node), mesh_dim_names=OWN_AXES)


def ranks_per_node() -> int:
    """How many ranks share a machine: torchrun says so; else as many as it has devices; else all of them."""
    world = dist.get_world_size()
    said = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.cuda.device_count() or world
    return said if world % said == 0 else world


def compute_device(module: nn.Module, ignored: set[int], device_id: int | torch.device | None) -> torch.device:
    """Where an instance computes: `device_id`, else where its parameters are, else the accelerator that serves ranks.

    Raises:
        RuntimeError: parameters on several devices, with the words of torch.
        ValueError: `device_id` says another device.
    """
    devices = {p.device for p in module.parameters() if id(p) not in ignored and p.device.type != "meta"}
    if len(devices) == 2 and any(device.type == "cpu" for device in devices):
        if device_id is None:
            raise RuntimeError("To support a module with both CPU and GPU params, please pass in device_id argument.")
    elif len(devices) > 1:
        raise RuntimeError(f"FSDP only supports single device modules but got params on {devices}")
    held = next((device for device in devices if device.type != "cpu"), None)
    if device_id is None:
        return held or _served_accelerator() or torch.device("cpu")
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        raise RuntimeError(
            f"FSDP needs a non-CPU accelerator device, but no accelerator device is detected: device_id={device_id}. "
            'Leave it out, or pass torch.device("cpu").'
        )
    asked = _with_index(torch.device(device_id))
    if held is not None and held != asked:
        raise ValueError(f"Inconsistent compute device and `device_id` on rank {dist.get_rank()}: {held} vs {asked}")
    return asked


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cpu" and device.index is not None:
        return device
    current = device_of(device.type)
    if device.type == "cpu":
        return current
    warnings.warn(
        f"FSDP got the argument `device_id` {device} on rank {dist.get_rank()}, which does not have an explicit index. "
        f"FSDP will use the current device {current}. If this is incorrect, please explicitly call "
        f"`torch.{device.type}.set_device()` before FSDP initialization or pass in the explicit device index as the "
        "`device_id` argument.",
        stacklevel=5,
    )
    return current


def _served_accelerator() -> torch.device | None:
    """The accelerator, when the default process group has a backend for it other than gloo."""
    kind = default_device_type()
    if kind == "cpu" or not dist.is_initialized():
        return None
    return None if "gloo" in dist.get_backend_config().split(f"{kind}:")[-1].split(",")[0] else device_of(kind)
