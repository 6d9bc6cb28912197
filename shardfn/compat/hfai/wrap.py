"""`hfai.distributed.fsdp.wrap`: wrap policies, which are torch's own."""

from shardfn.compat.fsdp1 import wrap

__getattr__ = wrap.__getattr__
default_auto_wrap_policy = wrap.default_auto_wrap_policy
