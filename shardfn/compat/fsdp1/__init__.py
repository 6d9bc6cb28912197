"""Everything that `torch.distributed.fsdp` has for FSDP1, with the class on shardfn.

    from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP, ShardingStrategy, MixedPrecision

The config classes and enums are torch's own; what belongs to FSDP2 is that of `compat.fsdp2`. `FlatParameter` is there
for `isinstance(p, FlatParameter)`, which is always False here. docs/howto/from-fsdp1.md lists what each argument and
method does. Read `instance` (the arguments of one FSDP object), then `wrapper`, whose calls go
through `compat.common.run` to `apply` and the engine, and which clips by a norm of its own. Not here: numerics.
"""

from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, FlatParameter, FullStateDictConfig
from torch.distributed.fsdp import FullOptimStateDictConfig, LocalOptimStateDictConfig, LocalStateDictConfig
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, OffloadPolicy, OptimStateDictConfig
from torch.distributed.fsdp import OptimStateKeyType, ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.distributed.fsdp import ShardingStrategy, StateDictConfig, StateDictSettings, StateDictType, UnshardHandle

from shardfn.compat import fsdp2
from shardfn.compat.fsdp1 import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap
from shardfn.compat.fsdp1.instance import Instance, state_dict_settings
from shardfn.compat.fsdp1.state_dicts import OnClassOrInstance
from shardfn.compat.fsdp1.wrapper import FullyShardedDataParallel
from shardfn.compat.fsdp2 import DataParallelMeshDims, FSDPModule, fully_shard, register_fsdp_forward_method
from shardfn.compat.fsdp2 import share_comm_ctx

__all__ = ["FlatParameter", "FullyShardedDataParallel", "OptimStateKeyType", "api"]
__all__ += ["fully_sharded_data_parallel", "sharded_grad_scaler", "wrap"]
__all__ += api.__all__
__all__ += fsdp2.__all__
