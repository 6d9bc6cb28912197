"""What `hfai.distributed.fsdp` and `haiscale.fsdp` have, on shardfn.

    from shardfn.compat.hfai import BackwardPrefetch, FullyShardedDataParallel

docs/howto/from-hfai.md lists what each argument and method does. Not here: the class itself, which is
FSDP1's with other arguments.
"""

from torch.distributed.fsdp import BackwardPrefetch

from shardfn.compat.hfai import warp, wrap
from shardfn.compat.hfai.wrapper import FullyShardedDataParallel

__all__ = ["BackwardPrefetch", "FullyShardedDataParallel", "warp", "wrap"]
