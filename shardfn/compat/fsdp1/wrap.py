"""Everything in `torch.distributed.fsdp.wrap`: torch's own policies; they do not care what class wraps. Layer 6."""

from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy
from torch.distributed.fsdp.wrap import _ConfigAutoWrap as _ConfigAutoWrap
from torch.distributed.fsdp.wrap import _module_wrap_policy as _module_wrap_policy
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import _post_order_apply as _post_order_apply
from torch.distributed.fsdp.wrap import _recursive_wrap as _recursive_wrap
from torch.distributed.fsdp.wrap import _wrap as _wrap
from torch.distributed.fsdp.wrap import always_wrap_policy as always_wrap_policy
from torch.distributed.fsdp.wrap import enable_wrap as enable_wrap
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as transformer_auto_wrap_policy
from torch.distributed.fsdp.wrap import wrap as wrap

ConfigAutoWrap = _ConfigAutoWrap  # its name in torch 1.11


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Any = None,
    exclude_wrap_modules: Any = None,
) -> bool:
    """`size_based_auto_wrap_policy` under its name in torch 1.11, with the argument name of then."""
    return size_based_auto_wrap_policy(
        module, recurse, unwrapped_params, min_num_params, force_leaf_modules, exclude_wrap_modules
    )


default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # pyright: ignore
default_auto_wrap_policy.FORCE_LEAF_MODULES = size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # pyright: ignore


class ParamExecOrderWrapPolicy:
    """torch 1.13's experiment that wrapped by the order of execution.

    The engine learns the order of execution by itself and looks ahead along it, whatever the units are: this wraps as
    the policy that it is given.

    Args:
        init_policy: the policy that chooses the units.
        tracing_config: no effect.
    """

    def __init__(self, init_policy: Any = always_wrap_policy, tracing_config: Any = None) -> None:
        self.init_policy, self.tracing_config = init_policy, tracing_config

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return self.init_policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
