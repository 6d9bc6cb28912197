"""`import shardfn.compat.auto` first, and imports of `torch.distributed.fsdp` find our class."""

from shardfn.compat import switch

__all__ = ["switch"]
switch.on()
