"""`hfai.distributed.fsdp.warp`: `wrap` as hfai's documentation spells it."""

from shardfn.compat.hfai.wrap import __getattr__ as __getattr__
from shardfn.compat.hfai.wrap import default_auto_wrap_policy as default_auto_wrap_policy
