"""The one name of `torch.distributed.fsdp._runtime_utils` that scripts call."""

from typing import Any

from torch import nn

from shardfn.compat.common import current_shards


def _lazy_init(state: nn.Module, root_module: nn.Module) -> Any:
    """Make `root_module`, which is the same as `state`, the root of its tree now instead of at its first forward."""
    current_shards(root_module)
    return state
