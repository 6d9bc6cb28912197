"""What `hfai.distributed.fsdp` and `haiscale.fsdp` have, on shardfn's engine.

    from shardfn.compat.hfai import BackwardPrefetch, FullyShardedDataParallel

docs/howto/from-hfai.md lists what each argument and method does. Not here: the class itself, which is
FSDP1's with other arguments.
"""

from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch

from shardfn.compat.hfai import warp as warp
from shardfn.compat.hfai import wrap as wrap
from shardfn.compat.hfai.wrapper import FullyShardedDataParallel as FullyShardedDataParallel
