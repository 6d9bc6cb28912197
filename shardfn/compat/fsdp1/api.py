"""Everything in `torch.distributed.fsdp.api`: torch's own enums and config classes."""

from typing import Any

from torch.distributed.fsdp import api as torchs

__all__ = []
__all__ += torchs.__all__


def __getattr__(name: str) -> Any:
    return getattr(torchs, name)
