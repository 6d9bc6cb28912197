"""FSDP2 of `torch.distributed.fsdp`, on shardfn.

    from shardfn.compat.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

The policy classes are torch's own. docs/howto/from-fsdp2.md lists what each argument and method does.
All of it is in `fully_sharded`, which meets the engine in `compat.common`. Not here: numerics.
"""

from typing import Any

import torch.distributed.fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from shardfn.compat.fsdp2.fully_sharded import FSDPModule, Group, fully_shard, register_fsdp_forward_method
from shardfn.compat.fsdp2.fully_sharded import share_comm_ctx

# Newer than the oldest torch that this library runs on; None there.
DataParallelMeshDims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)

__all__ = ["CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy"]
__all__ += ["UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
