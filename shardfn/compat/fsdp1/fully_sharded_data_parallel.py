"""Everything in `torch.distributed.fsdp.fully_sharded_data_parallel`, with the class on shardfn."""

from typing import Any

from torch.distributed.fsdp import fully_sharded_data_parallel as torchs

from shardfn.compat.fsdp1.wrapper import FullyShardedDataParallel as FullyShardedDataParallel

__all__ = []
__all__ += torchs.__all__


def __getattr__(name: str) -> Any:
    return getattr(torchs, name)
