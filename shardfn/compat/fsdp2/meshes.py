"""The meshes that `fully_shard` takes, as meshes whose axes the engine knows by name. Layer 6."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfn.compat.meshes import OWN_AXES, groups_of, mesh_of
from shardfn.core.errors import ShardError
from shardfn.core.mesh import default_device_type, roles, use_part


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
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    names = mesh.mesh_dim_names
    if mesh.ndim == 2 and names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    if names is not None and roles(names, names).shardable == names[-1:]:
        return mesh
    return mesh_of(groups_of(mesh), mesh.device_type, OWN_AXES[-mesh.ndim :], mesh.mesh)


def whole_mesh(mesh: DeviceMesh, dims: Any) -> tuple[DeviceMesh, tuple[str, ...]]:
    """A mesh on which parameters are DTensors, and its data axes, by names of ours where theirs say something else.

    Modules go on computing with DTensors on `mesh`.

    Raises:
        ShardError: several dims shard, or replicate.
    """
    theirs = (*dims.replicate_names, *dims.shard_names)
    if len(dims.shard_names) != 1 or len(dims.replicate_names) > 1:
        raise ShardError(
            f"fully_shard: parameters are DTensors on {mesh}, and dp_mesh_dims has several dims of a kind, {theirs}; "
            "make them one dim of the mesh"
        )
    names = tuple(mesh.mesh_dim_names or ())
    if roles(names, theirs).shardable == theirs[-1:]:
        return mesh, theirs
    ours = dict(zip(theirs, OWN_AXES[-len(theirs) :], strict=True))
    names = tuple(ours.get(name, name) for name in names)
    made = mesh_of(groups_of(mesh), mesh.device_type, names, mesh.mesh)
    use_part(made, names, mesh)
    return made, tuple(ours.values())


def _named_dims(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """The data dims of a mesh of all dims, as `DataParallelMeshDims` names them."""
    shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
    if not shard and not replicate:
        raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims")
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*shard, *replicate):
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
    if not shard:
        raise ShardError(
            "fully_shard: dp_mesh_dims names no dim to shard over; replicate by sf.policies.ddp(), or by DDP"
        )
    if not replicate:
        return mesh[shard[0]] if len(shard) == 1 else mesh[shard]._flatten("_".join(shard))
    order = [axis for axis in mesh.mesh_dim_names if axis in (*shard, *replicate)]
    if len(replicate) == len(shard) == 1 and order == [*replicate, *shard]:
        return mesh[(*replicate, *shard)]
    raise ShardError(f"fully_shard: dp_mesh_dims needs one dim each, replicate before shard, got {replicate}, {shard}")
