"""Whole tensors, DTensors of other layouts and `ShardedTensor`s, copied into shards. Layer 6."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

from shardfn._torch import unwrap_local
from shardfn.core.whole import whole


class CopiesIntoShards(TorchFunctionMode):
    """Within it, copying a whole tensor into a shard takes this rank's part."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], DTensor):
            own: DTensor = args[0]
            unwrap_local(own).copy_(unwrap_local(_laid_out(args[1], own)))
            return own
        return func(*args, **(kwargs or {}))


def _laid_out(value: Any, like: DTensor) -> Tensor:
    if isinstance(value, DTensor) and value.placements == like.placements and value.device_mesh == like.device_mesh:
        return value.detach()
    full = (whole(value) if isinstance(value, DTensor) else whole_of(value)).detach().to(unwrap_local(like).device)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


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
        part = whole
        for dim, (start, length) in enumerate(
            zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        ):
            part = part.narrow(dim, start, length)
        part.copy_(shard.tensor)
    dist.all_reduce(whole, group=value._process_group)
    return whole


def _device_of(value: ShardedTensor) -> torch.device:
    placement = value.metadata().shards_metadata[0].placement
    kind = placement.device().type if placement is not None else "cpu"
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
