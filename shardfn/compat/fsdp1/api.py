"""Everything in `torch.distributed.fsdp.api`: torch's own enums and config classes. Layer 6."""

from torch.distributed.fsdp.api import BackwardPrefetch as BackwardPrefetch
from torch.distributed.fsdp.api import CPUOffload as CPUOffload
from torch.distributed.fsdp.api import FullOptimStateDictConfig as FullOptimStateDictConfig
from torch.distributed.fsdp.api import FullStateDictConfig as FullStateDictConfig
from torch.distributed.fsdp.api import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from torch.distributed.fsdp.api import LocalStateDictConfig as LocalStateDictConfig
from torch.distributed.fsdp.api import MixedPrecision as MixedPrecision
from torch.distributed.fsdp.api import OptimStateDictConfig as OptimStateDictConfig
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from torch.distributed.fsdp.api import ShardedStateDictConfig as ShardedStateDictConfig
from torch.distributed.fsdp.api import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp.api import StateDictConfig as StateDictConfig
from torch.distributed.fsdp.api import StateDictSettings as StateDictSettings
from torch.distributed.fsdp.api import StateDictType as StateDictType
