"""What each class takes as ranks, as a mesh whose axes the engine knows by name.

Axes that have no name, or one that says something else, are `replicate` and `fsdp`. FSDP1 takes process groups too, and
finds out on which device it computes; FSDP2 takes meshes with more dims than those of the data ranks. Of some models
`parallelize_module` has split parameters before: the mesh of these goes beside, or is cut.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_init import _validate_mesh
from torch.distributed.fsdp._init_utils import _get_device_from_device_id, _is_valid_hybrid_shard_pg_type
from torch.distributed.tensor import DTensor, Replicate

from shardfn._torch import move_to_mesh
from shardfn.layout import default_device_type, device_of, grid_of, roles, shards_in, use_part
from shardfn.notation import ShardError

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
OWN_AXES = ("replicate", "fsdp")  # of a mesh that says no names, the second alone where nothing is replicated
ONE_MESH = (
    "Make one mesh, init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), give parallelize_module its "
    "mesh['tp'], and the data parallel class its mesh['dp']."
)


def mesh_of(
    groups: Sequence[dist.ProcessGroup], device_type: str, names: tuple[str, ...], ranks: Tensor | None = None
) -> DeviceMesh:
    """The mesh with these process groups of this rank along its axes; `ranks`: default `_ranks_across`."""
    ranks = ranks if ranks is not None else _ranks_across(groups)
    return DeviceMesh.from_group(list(groups), device_type, mesh=ranks, mesh_dim_names=names)


def _ranks_across(groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The ranks of a mesh on which neighbours along one axis are as far apart everywhere."""
    rank = dist.get_rank()
    ranks = torch.tensor(rank, dtype=torch.int)
    for group in groups:
        ranks = ranks.unsqueeze(-1) + torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int) - rank
    return ranks


def placed_mesh(
    verb: str, module: nn.Module, ignored: set[int], device_mesh: DeviceMesh | None, inside: Iterable[DeviceMesh | None]
) -> DeviceMesh | None:
    """The mesh of the parameters that are DTensors before they are sharded.

    Args:
        verb: who asks.
        module: the tree.
        ignored: ids of parameters that stay as they are.
        device_mesh: of the data ranks, as the caller was given it.
        inside: what this found for modules in the tree that are sharded already.

    Raises:
        ShardError: there are several, or no `device_mesh` to which it can be added.
    """
    out = ignored | shards_in(module)
    seen = {p.device_mesh: name for name, p in module.named_parameters() if isinstance(p, DTensor) and id(p) not in out}
    seen |= {mesh: "a module inside" for mesh in inside if mesh is not None and mesh not in seen}
    if not seen:
        return None
    (mesh, name), *others = seen.items()
    if others or device_mesh is None:
        why = f"and {others[0][1]!r} on {others[0][0]}" if others else "but there is no device_mesh beside it"
        raise ShardError(f"{verb}: {name!r} is a DTensor on {mesh}, {why}. {ONE_MESH}")
    return mesh


def across(verb: str, data: DeviceMesh, names: tuple[str, ...], placed: DeviceMesh) -> DeviceMesh:
    """The mesh over both: the data axes by these names, then those over which parameters are split already.

    Raises:
        ShardError: they do not cross.
    """
    groups = data.get_all_groups() + placed.get_all_groups()
    names = (*names, *(placed.mesh_dim_names or ()))
    ranks = _ranks_across(groups)
    if len(set(names)) < len(names) or len(set(ranks.flatten().tolist())) < ranks.numel():
        raise ShardError(f"{verb}: parameters are DTensors on {placed}, which {data} does not cross. {ONE_MESH}")
    mesh = mesh_of(groups, data.device_type, names, ranks)
    use_part(mesh, tuple(placed.mesh_dim_names or ()), placed)
    return mesh


def spread(module: nn.Module, before: DeviceMesh, now: DeviceMesh) -> bool:
    """Have shards in a module, on a mesh of some axes of `now`, lie on `now`, whole over the others.

    Returns:
        whether the axes were some of those.
    """
    theirs = before.mesh_dim_names or ()
    more = tuple(axis for axis in now.mesh_dim_names or () if axis not in theirs)
    if not more or any(ranks_of(before, axis) != ranks_of(now, axis) for axis in theirs):
        return False
    storage, wider = grid_of(before, theirs).storage, grid_of(now, (*more, *theirs)).storage
    ours = shards_in(module)
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and id(parameter) in ours and parameter.device_mesh == storage:
            move_to_mesh(parameter, wider, [Replicate()] * len(more) + list(parameter.placements))
    return True


def ranks_of(mesh: DeviceMesh, axis: str) -> list[int] | None:
    """The ranks along an axis from here; None when the mesh has no such axis."""
    return dist.get_process_group_ranks(mesh.get_group(axis)) if axis in (mesh.mesh_dim_names or ()) else None


# ---------------------------------------------------------------------------------------------------------------------
# What FSDP1 takes


def check_groups(process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy, wraps: bool) -> None:
    """Refuse what cannot be a mesh, with the words of torch, before any process is asked.

    Raises:
        ValueError: two ways at once, or a hybrid strategy that does not know its groups.
    """
    if process_group is not None and device_mesh is not None:
        why = "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        raise ValueError(why)
    if strategy not in HYBRID:
        return
    if process_group is None and device_mesh is None and not wraps:
        why = f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        raise ValueError(why)
    if device_mesh is not None and (not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 2):
        raise ValueError(f"Expected device_mesh to have ndim=2 but got {getattr(device_mesh, 'ndim', device_mesh)}")
    if process_group is not None and not _is_valid_hybrid_shard_pg_type(process_group):
        two = "either None or Tuple[dist.ProcessGroup, dist.ProcessGroup]"
        raise ValueError(f"Expected process_group to be passed in as {two} but got {type(process_group)}")


def mesh_of_ranks(
    process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy, kind: str, placed: DeviceMesh | None
) -> DeviceMesh:
    """The mesh over the ranks of a process group, of a pair `(shard, replicate)`, of a mesh, or over all ranks.

    Args:
        process_group, device_mesh, strategy: as the constructor has them.
        kind: of its devices.
        placed: the mesh of parameters that `parallelize_module` has split already; its axes come last, by their names.
    """
    if device_mesh is not None and placed:
        return across("FullyShardedDataParallel", device_mesh, OWN_AXES[-device_mesh.ndim :], placed)
    if strategy not in HYBRID:
        group = device_mesh.get_group(0) if device_mesh is not None else process_group
        return mesh_of([group if group is not None else _get_default_group()], kind, OWN_AXES[1:])
    if device_mesh is not None:
        return mesh_of(device_mesh.get_all_groups(), kind, OWN_AXES, device_mesh.mesh)
    if process_group is not None:
        shard, replicate = process_group
        return mesh_of([replicate, shard], kind, OWN_AXES)
    world = dist.get_world_size()  # ranks that share a machine: torchrun says so; else one a device; else all of them
    said = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.cuda.device_count() or world
    per_node = said if world % said == 0 else world
    return init_device_mesh(kind, (world // per_node, per_node), mesh_dim_names=OWN_AXES)


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
        why = "FSDP needs a non-CPU accelerator device, but no accelerator device is detected"
        raise RuntimeError(f'{why}: device_id={device_id}. Leave it out, or pass torch.device("cpu").')
    named = torch.device(device_id)
    numbered = None if named.type == "cpu" else named
    asked = _get_device_from_device_id(numbered, dist.get_rank(), torch.get_device_module(named)) or device_of("cpu")
    if held is not None and held != asked:
        raise ValueError(f"Inconsistent compute device and `device_id` on rank {dist.get_rank()}: {held} vs {asked}")
    return asked


def _served_accelerator() -> torch.device | None:
    """The accelerator, when the default process group has a backend for it other than gloo."""
    kind = default_device_type()
    if kind == "cpu" or not dist.is_initialized():
        return None
    return None if "gloo" in dist.get_backend_config().split(f"{kind}:")[-1].split(",")[0] else device_of(kind)


# ---------------------------------------------------------------------------------------------------------------------
# What FSDP2 takes


def data_mesh(mesh: DeviceMesh | None, dims: Any) -> DeviceMesh:
    """The mesh over the data ranks: `(fsdp,)` or `(replicate, fsdp)`, by names of its own where those say the same.

    Raises:
        ValueError, AssertionError: with the words of torch, what is no such mesh.
        ShardError: axes that only replicate.
    """
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        return init_device_mesh(default_device_type(), (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard: expected a DeviceMesh, got {type(mesh).__name__}")
    if dims is not None:
        mesh = _named_dims(mesh, dims)
    _validate_mesh(mesh)
    names = mesh.mesh_dim_names
    if names is not None and roles(names, names).shardable == names[-1:]:
        return mesh
    return mesh_of(mesh.get_all_groups(), mesh.device_type, OWN_AXES[-mesh.ndim :], mesh.mesh)


def whole_mesh(mesh: DeviceMesh, dims: Any) -> tuple[DeviceMesh, tuple[str, ...]]:
    """A mesh on which parameters are DTensors, and its data axes, by names of ours where theirs say something else.

    Modules go on computing with DTensors on `mesh`.

    Raises:
        ShardError: several dims shard, or replicate.
    """
    theirs = (*dims.replicate_names, *dims.shard_names)
    if len(dims.shard_names) != 1 or len(dims.replicate_names) > 1:
        why = f"parameters are DTensors on {mesh}, and dp_mesh_dims has several dims of a kind, {theirs}"
        raise ShardError(f"fully_shard: {why}; make them one dim of the mesh")
    names = tuple(mesh.mesh_dim_names or ())
    if roles(names, theirs).shardable == theirs[-1:]:
        return mesh, theirs
    ours = dict(zip(theirs, OWN_AXES[-len(theirs) :], strict=True))
    names = tuple(ours.get(name, name) for name in names)
    whole = mesh_of(mesh.get_all_groups(), mesh.device_type, names, mesh.mesh)
    use_part(whole, names, mesh)
    return whole, tuple(ours.values())


def _named_dims(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """The data dims of a mesh of all dims, as `DataParallelMeshDims` names them."""
    _validate_mesh(mesh, dims)  # torch 2.11 has no such dims, and takes none
    shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
    if not shard:
        raise ShardError("fully_shard: dp_mesh_dims names no dim to shard over; replicate by DDP or sf.policies.ddp()")
    if not replicate:
        return mesh[shard[0]] if len(shard) == 1 else mesh[shard]._flatten("_".join(shard))
    order = [axis for axis in mesh.mesh_dim_names or () if axis in (*shard, *replicate)]
    if len(replicate) == len(shard) == 1 and order == [*replicate, *shard]:
        return mesh[(*replicate, *shard)]
    raise ShardError(f"fully_shard: dp_mesh_dims needs one dim each, replicate before shard, got {replicate}, {shard}")
