"""Cutting the parameters of modules into shards, in place. Layer 6."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardfn._torch import move_to_mesh
from shardfn.compat.fsdp2.group import Group, group_of, groups
from shardfn.compat.sharded import ignored_in, put_shards, refuse_scalars, spread_inside
from shardfn.core.errors import ShardError
from shardfn.core.model import shards_in
from shardfn.watched import REPLACED


def check_modules(given: Any) -> tuple[nn.Module, ...]:
    """What to shard together.

    Raises:
        ValueError, AssertionError, TypeError: it cannot be, with the words of torch where it has some.
    """
    modules = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not modules:
        raise ValueError("fully_shard: an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard: expected an nn.Module, or a list of them, got {type(module).__name__}")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
        if group_of(module) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has "
                f"already been applied to the following module:\n{module}"
            )
    return _outermost(modules)


def _outermost(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Those that no other one of them holds, each once."""
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    return tuple({id(module): module for module in modules if id(module) not in inside}.values())


def container(modules: Sequence[nn.Module]) -> nn.Module:
    """One module that holds them all."""
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def dims_of(module: nn.Module, fn: Callable[[nn.Parameter], Any] | None, ranks: int, leave: set[int]) -> dict[int, int]:
    """The dim of each parameter that `shard_placement_fn` wants split, by id.

    Raises:
        ValueError: it is no `Shard`, or splits unevenly.
        ShardError: it asks for a mesh of a parameter's own.
    """
    found: dict[int, int] = {}
    if fn is None:
        return found
    for name, parameter in module.named_parameters():
        placement = fn(parameter) if id(parameter) not in leave else None
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            if hasattr(placement, "mesh_info"):
                raise ShardError(
                    f"fully_shard: shard_placement_fn gives {name!r} a mesh of its own; shard its module over that "
                    "mesh, as a model of its own"
                )
            raise ValueError(f"fully_shard: shard_placement_fn returned {placement!r} for {name!r}, not Shard or None")
        dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
        if not 0 <= dim < parameter.dim():
            raise ValueError(f"fully_shard: {name!r} of shape {tuple(parameter.shape)} has no dim {placement.dim}")
        if dim and parameter.shape[dim] % ranks:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: {tuple(parameter.shape)} (world size: {ranks})"
            )
        found[id(parameter)] = dim
    return found


def check_whole(module: nn.Module, leave: set[int], dims: Any) -> None:
    """Parameters that are DTensors on the whole mesh must be whole over its data dims.

    Raises:
        ValueError: with the words of torch.
    """
    done = leave | shards_in(module)
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) or id(parameter) in done:
            continue
        names = list(parameter.device_mesh.mesh_dim_names or ())
        for kind, name in [("shard", n) for n in dims.shard_names] + [("replicate", n) for n in dims.replicate_names]:
            placement = parameter.placements[names.index(name)]
            if not placement.is_replicate():
                raise ValueError(
                    f"Expected Replicate() on DP {kind} dim '{name}' (index {names.index(name)}) but got {placement}"
                )


def shard_now(own: Group, module: nn.Module) -> None:
    """Shard what is in what a group is to hold, is not ignored, and no group in it has sharded before.

    Raises:
        ValueError: scalar parameters; parameters that are shared with modules sharded before.
        ShardError: as `shard`.
    """
    left = shards_in(module) | {id(p) for p in own.ignored_params} | ignored_in(module, Group)
    refuse_scalars(module, "fully_shard doesn't support scalar parameters", left)
    for name, parameter in module.named_parameters():
        if id(parameter) not in left and REPLACED in vars(parameter):
            raise ValueError(
                f"Parameter '{name}' is shared with a parameter already managed by another FSDP group. For shared/tied "
                "parameters, use fully_shard([module_a, module_b]) to place them in the same FSDP group."
            )
    spread_inside(module, own)
    for _, inside, inner in groups(module):
        if inner.mesh != own.mesh and inner.placed is None and inner.mesh.mesh.equal(own.mesh.mesh):
            _by_the_names_of(inside, inner, own)
    renamed = _on_whole_mesh(module, left, own)
    _move(renamed, own.mesh)
    try:
        put_shards(module, own, later=True)
    except Exception:
        if own.placed is not None:
            _move(renamed, own.placed)
        raise


def _on_whole_mesh(module: nn.Module, leave: set[int], own: Group) -> list[DTensor]:
    """Parameters that are DTensors on the whole mesh, maybe by other axis names than the group's mesh of its ranks."""
    if own.placed is None or own.placed.ndim < own.mesh.ndim:
        return []
    return [p for p in module.parameters() if isinstance(p, DTensor) and id(p) not in leave]


def _move(parameters: Iterable[DTensor], mesh: DeviceMesh) -> None:
    for parameter in parameters:
        move_to_mesh(parameter, mesh, parameter.placements)


def _by_the_names_of(module: nn.Module, inner: Group, own: Group) -> None:
    """Give a group inside, on the same ranks by other axis names, the mesh of this one."""
    _move([p for p in module.parameters() if isinstance(p, DTensor) and p.device_mesh == inner.mesh], own.mesh)
    inner.mesh, inner.data = own.mesh, own.data
    inner.changed()
