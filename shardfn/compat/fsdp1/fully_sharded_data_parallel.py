"""Everything in `torch.distributed.fsdp.fully_sharded_data_parallel` that scripts import from there. Layer 6."""

from torch.distributed.fsdp._common_utils import TrainingState as TrainingState
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType as OptimStateKeyType

from shardfn.compat.fsdp1.api import BackwardPrefetch as BackwardPrefetch
from shardfn.compat.fsdp1.api import CPUOffload as CPUOffload
from shardfn.compat.fsdp1.api import FullOptimStateDictConfig as FullOptimStateDictConfig
from shardfn.compat.fsdp1.api import FullStateDictConfig as FullStateDictConfig
from shardfn.compat.fsdp1.api import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from shardfn.compat.fsdp1.api import LocalStateDictConfig as LocalStateDictConfig
from shardfn.compat.fsdp1.api import MixedPrecision as MixedPrecision
from shardfn.compat.fsdp1.api import OptimStateDictConfig as OptimStateDictConfig
from shardfn.compat.fsdp1.api import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from shardfn.compat.fsdp1.api import ShardedStateDictConfig as ShardedStateDictConfig
from shardfn.compat.fsdp1.api import ShardingStrategy as ShardingStrategy
from shardfn.compat.fsdp1.api import StateDictConfig as StateDictConfig
from shardfn.compat.fsdp1.api import StateDictSettings as StateDictSettings
from shardfn.compat.fsdp1.api import StateDictType as StateDictType
from shardfn.compat.fsdp1.wrapper import FullyShardedDataParallel as FullyShardedDataParallel
