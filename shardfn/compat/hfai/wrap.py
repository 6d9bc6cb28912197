"""`hfai.distributed.fsdp.wrap`: wrap policies, which are torch's own. Layer 6."""

from shardfn.compat.fsdp1.wrap import always_wrap_policy as always_wrap_policy
from shardfn.compat.fsdp1.wrap import default_auto_wrap_policy as default_auto_wrap_policy
from shardfn.compat.fsdp1.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from shardfn.compat.fsdp1.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from shardfn.compat.fsdp1.wrap import transformer_auto_wrap_policy as transformer_auto_wrap_policy
