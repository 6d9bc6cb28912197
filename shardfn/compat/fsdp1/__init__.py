"""Everything that `torch.distributed.fsdp` has for FSDP1, with the class on shardfn's engine.

    from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP, ShardingStrategy, MixedPrecision

The config classes and enums are torch's own; what belongs to FSDP2 is that of `compat.fsdp2`. `FlatParameter` is there
for `isinstance(p, FlatParameter)`, which is always False here. docs/howto/from-fsdp1.md lists what each argument and
method does. Read `instance` (the arguments of one FSDP object), then `wrapper`, which meets the engine in
`compat.common`. Not here: numerics.
"""

from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
from torch.distributed.fsdp import CPUOffload as CPUOffload
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import FlatParameter as FlatParameter
from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
from torch.distributed.fsdp import MixedPrecision as MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType
from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import StateDictConfig as StateDictConfig
from torch.distributed.fsdp import StateDictSettings as StateDictSettings
from torch.distributed.fsdp import StateDictType as StateDictType
from torch.distributed.fsdp import UnshardHandle as UnshardHandle

from shardfn.compat.fsdp1 import api as api
from shardfn.compat.fsdp1 import fully_sharded_data_parallel as fully_sharded_data_parallel
from shardfn.compat.fsdp1 import sharded_grad_scaler as sharded_grad_scaler
from shardfn.compat.fsdp1 import wrap as wrap
from shardfn.compat.fsdp1.instance import Instance, state_dict_settings
from shardfn.compat.fsdp1.wrapper import FullyShardedDataParallel as FullyShardedDataParallel
from shardfn.compat.fsdp2 import DataParallelMeshDims as DataParallelMeshDims
from shardfn.compat.fsdp2 import FSDPModule as FSDPModule
from shardfn.compat.fsdp2 import fully_shard as fully_shard
from shardfn.compat.fsdp2 import register_fsdp_forward_method as register_fsdp_forward_method
from shardfn.compat.fsdp2 import share_comm_ctx as share_comm_ctx
