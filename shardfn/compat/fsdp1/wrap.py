"""Everything in `torch.distributed.fsdp.wrap`: torch's own policies; they do not care what class wraps."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap as torchs

__all__ = ["ConfigAutoWrap", "ParamExecOrderWrapPolicy", "default_auto_wrap_policy"]  # which torch has no more
__all__ += torchs.__all__
ConfigAutoWrap = torchs._ConfigAutoWrap  # its name in torch 1.11


def __getattr__(name: str) -> Any:
    return getattr(torchs, name)


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Any = None,
    exclude_wrap_modules: Any = None,
) -> bool:
    """`size_based_auto_wrap_policy` under its name in torch 1.11, with the argument name of then."""
    least, leaves, excluded = min_num_params, force_leaf_modules, exclude_wrap_modules
    return torchs.size_based_auto_wrap_policy(module, recurse, unwrapped_params, least, leaves, excluded)


default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = torchs.size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # pyright: ignore
default_auto_wrap_policy.FORCE_LEAF_MODULES = torchs.size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # pyright: ignore


class ParamExecOrderWrapPolicy:
    """torch 1.13's experiment that wrapped by the order of execution.

    The engine learns the order of execution by itself and looks ahead along it, whatever the units are: this wraps as
    the policy that it is given.

    Args:
        init_policy: the policy that chooses the units.
        tracing_config: no effect.
    """

    def __init__(self, init_policy: Any = torchs.always_wrap_policy, tracing_config: Any = None) -> None:
        self.init_policy, self.tracing_config = init_policy, tracing_config

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return self.init_policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
