"""`hfai.distributed.fsdp.wrap`: wrap policies, which are torch's own."""

from shardfn.compat.fsdp1.wrap import __getattr__ as __getattr__
from shardfn.compat.fsdp1.wrap import default_auto_wrap_policy as default_auto_wrap_policy
