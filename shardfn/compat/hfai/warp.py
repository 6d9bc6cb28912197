"""`hfai.distributed.fsdp.warp`: `wrap` as hfai's documentation spells it. Layer 6."""

from shardfn.compat.hfai.wrap import always_wrap_policy as always_wrap_policy
from shardfn.compat.hfai.wrap import default_auto_wrap_policy as default_auto_wrap_policy
from shardfn.compat.hfai.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from shardfn.compat.hfai.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from shardfn.compat.hfai.wrap import transformer_auto_wrap_policy as transformer_auto_wrap_policy
