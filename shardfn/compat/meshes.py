"""Meshes of process groups, also for models of which `parallelize_module` has split some parameters. Layer 6."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardfn._torch import move_to_mesh
from shardfn.core.errors import ShardError
from shardfn.core.mesh import grid, use_part
from shardfn.core.model import shards_in

OWN_AXES = ("replicate", "fsdp")  # of a mesh that says no names, the second alone where nothing is replicated
ONE_MESH = (
    "Make one mesh, init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), give parallelize_module its "
    "mesh['tp'], and the data parallel class its mesh['dp']."
)


def device_of(kind: str) -> torch.device:
    """Where this rank computes on devices of a kind."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def mesh_of(
    groups: Sequence[ProcessGroup], device_type: str, names: tuple[str, ...], ranks: Tensor | None = None
) -> DeviceMesh:
    """The mesh with these process groups of this rank along its axes; `ranks`: default `_ranks_across`."""
    ranks = ranks if ranks is not None else _ranks_across(groups)
    return DeviceMesh.from_group(list(groups), device_type, mesh=ranks, mesh_dim_names=names)


def groups_of(mesh: DeviceMesh) -> list[ProcessGroup]:
    """The process groups of this rank along the axes of a mesh."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def _ranks_across(groups: Sequence[ProcessGroup]) -> Tensor:
    """The ranks of a mesh on which neighbours along one axis are as far apart everywhere."""
    own = dist.get_rank()
    ranks = torch.tensor(own, dtype=torch.int)
    for group in groups:
        ranks = ranks.unsqueeze(-1) + torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int) - own
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
    done = ignored | shards_in(module)
    found = {
        parameter.device_mesh: name
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor) and id(parameter) not in done
    }
    for mesh in inside:
        if mesh is not None:
            found.setdefault(mesh, "a module inside")
    if not found:
        return None
    (mesh, name), *others = found.items()
    if others or device_mesh is None:
        why = f"and {others[0][1]!r} on {others[0][0]}" if others else "but there is no device_mesh beside it"
        raise ShardError(f"{verb}: {name!r} is a DTensor on {mesh}, {why}. {ONE_MESH}")
    return mesh


def across(verb: str, data: DeviceMesh, names: tuple[str, ...], placed: DeviceMesh) -> DeviceMesh:
    """The mesh over both: the data axes by these names, then those over which parameters are split already.

    Raises:
        ShardError: they do not cross.
    """
    groups = [*groups_of(data), *groups_of(placed)]
    names = (*names, *(placed.mesh_dim_names or ()))
    ranks = _ranks_across(groups)
    if len(set(names)) < len(names) or len(set(ranks.flatten().tolist())) < ranks.numel():
        raise ShardError(
            f"{verb}: parameters are DTensors on {placed}, which device_mesh={data} does not cross. {ONE_MESH}"
        )
    made = mesh_of(groups, data.device_type, names, ranks)
    use_part(made, tuple(placed.mesh_dim_names or ()), placed)
    return made


def spread(module: nn.Module, before: DeviceMesh, now: DeviceMesh) -> bool:
    """Have shards in a module, on a mesh of some axes of `now`, lie on `now`, whole over the others.

    Returns:
        whether the axes were some of those.
    """
    theirs = before.mesh_dim_names or ()
    more = tuple(axis for axis in now.mesh_dim_names or () if axis not in theirs)
    if not more or any(ranks_of(before, axis) != ranks_of(now, axis) for axis in theirs):
        return False
    storage, wider = grid(before, theirs).storage, grid(now, (*more, *theirs)).storage
    ours = shards_in(module)
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and id(parameter) in ours and parameter.device_mesh == storage:
            move_to_mesh(parameter, wider, [Replicate()] * len(more) + list(parameter.placements))
    return True


def ranks_of(mesh: DeviceMesh, axis: str) -> list[int] | None:
    """The ranks along an axis from here; None when the mesh has no such axis."""
    return dist.get_process_group_ranks(mesh.get_group(axis)) if axis in (mesh.mesh_dim_names or ()) else None
