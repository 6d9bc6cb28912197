"""Whole tensors, DTensors of other layouts and `ShardedTensor`s, copied into shards, or put in their place. Layer 6."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

from shardfn._torch import move_to_mesh, parameters_of, unwrap_local
from shardfn.compat.meshes import device_of
from shardfn.core.errors import ShardError
from shardfn.core.whole import whole


class CopiesIntoShards(TorchFunctionMode):
    """Within it, copying a whole tensor into a shard takes this rank's part."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], DTensor):
            own: DTensor = args[0]
            unwrap_local(own).copy_(unwrap_local(laid_out(args[1], own)))
            return own
        return func(*args, **(kwargs or {}))


def laid_out(value: Any, like: DTensor) -> Tensor:
    """A tensor of any layout in that of another one; itself where it has it already."""
    if isinstance(value, DTensor) and value.placements == like.placements and value.device_mesh == like.device_mesh:
        return value.detach()
    full = (whole(value) if isinstance(value, DTensor) else whole_of(value)).detach().to(unwrap_local(like).device)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


class StayTogether:
    """Hooks around `load_state_dict(assign=True)`: what was one shard before is one again, on the mesh where it was.

    Of several new ones the first counts. Their mesh may be one of the same ranks with other names, or with none.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        named = [each for module in modules for each in module.named_modules()]
        self._tables = [(f"{path}." if path else "", parameters_of(inside)) for path, inside in named]
        self._shards: dict[int, tuple[str, DTensor, list[tuple[dict[str, Any], str]]]] = {}

    def before(self, module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Take note of where each shard is."""
        self._shards.clear()
        for path, table in self._tables if metadata.get("assign_to_params_buffers") else ():
            for key, parameter in table.items():
                if isinstance(parameter, DTensor):
                    self._shards.setdefault(id(parameter), (prefix + path + key, parameter, []))[2].append((table, key))

    def after(self, *_: Any) -> None:
        """Put the new ones there.

        Raises:
            ShardError: one is no DTensor.
        """
        for name, old, slots in self._shards.values():
            new = next((now for table, key in slots if (now := table[key]) is not old), old)
            if not isinstance(new, DTensor):
                raise ShardError(
                    f"load_state_dict(assign=True): {name!r} is whole, and would replace a shard. Leave assign=True "
                    "out, or give it distribute_tensor(value, shard.device_mesh, shard.placements)."
                )
            if new.device_mesh != old.device_mesh and torch.equal(new.device_mesh.mesh, old.device_mesh.mesh):
                move_to_mesh(new, old.device_mesh, new.placements)
            for table, key in slots:
                table[key] = new
        self._shards.clear()


def whole_of(value: Any) -> Any:
    """The whole tensor in a `ShardedTensor`; other values as they are.

    Communication: one all-reduce of the whole tensor over the ranks that share it.
    """
    if not isinstance(value, ShardedTensor):
        return value
    metadata, shards = value.metadata(), value.local_shards()
    device = shards[0].tensor.device if shards else _device_of(value)
    whole = torch.zeros(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    for shard in shards:
        places = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        whole[tuple(slice(start, start + length) for start, length in places)] = shard.tensor
    dist.all_reduce(whole, group=value._process_group)
    return whole


def _device_of(value: ShardedTensor) -> torch.device:
    placement = value.metadata().shards_metadata[0].placement
    kind = placement.device().type if placement is not None else "cpu"
    return device_of(kind)
