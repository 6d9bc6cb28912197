"""`sf.policies`: ready-made policies, and what the plans of other libraries mean here.

`presets` are data parallelism's usual forms and torch's plans, `transformers` the model types of that library.
Not here: what a policy means for a model, see `layout`.
"""

from shardfn.parallel import Experts
from shardfn.policies.presets import ddp, from_parallelize_plan, from_regex, from_wrap_policy, fsdp, gathered
from shardfn.policies.presets import hsdp, zero2
from shardfn.policies.transformers import from_transformers

__all__ = ["Experts", "ddp", "from_parallelize_plan", "from_regex", "from_transformers", "from_wrap_policy", "fsdp"]
__all__ += ["gathered", "hsdp", "zero2"]
