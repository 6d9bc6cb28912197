"""The import switch: `torch.distributed.fsdp` in a script that nobody changed resolves to our class. Layer 6.

It puts our names into torch's own modules, so that every way to import them finds ours, also in libraries that are
imported later. torch's parts that know FSDP1 by its class are imported before, and keep the class that they know.
"""

import importlib
import warnings
from types import ModuleType
from typing import Any

from shardfn.compat import fsdp1
from shardfn.compat.fsdp1 import _runtime_utils, sharded_grad_scaler, wrap

# Modules of torch that look at the class when they are imported: to them ours is a module like any other.
_KNOW_THE_CLASS = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp._wrap_utils",
    "torch.distributed.fsdp._optim_utils",
    "torch.distributed.algorithms._optimizer_overlap.optimizer_overlap",
    "torch.distributed.optim",
)
_PUT: dict[str, dict[str, Any]] = {
    "torch.distributed.fsdp": {"FullyShardedDataParallel": fsdp1.FullyShardedDataParallel},
    "torch.distributed.fsdp.fully_sharded_data_parallel": {"FullyShardedDataParallel": fsdp1.FullyShardedDataParallel},
    "torch.distributed.fsdp.wrap": {
        "default_auto_wrap_policy": wrap.default_auto_wrap_policy,
        "ConfigAutoWrap": wrap.ConfigAutoWrap,
        "ParamExecOrderWrapPolicy": wrap.ParamExecOrderWrapPolicy,
    },
    "torch.distributed.fsdp.sharded_grad_scaler": {"ShardedGradScaler": sharded_grad_scaler.ShardedGradScaler},
    "torch.distributed.fsdp._runtime_utils": {"_lazy_init": _runtime_utils._lazy_init},
}
_before: list[tuple[ModuleType, str, Any]] = []
_ABSENT = object()


def on() -> None:
    """From here on imports find our names; a second call changes nothing."""
    if _before:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of modules that nobody asked for
        for name in _KNOW_THE_CLASS:
            importlib.import_module(name)
    for name, values in _PUT.items():
        module = importlib.import_module(name)
        for key, value in values.items():
            _before.append((module, key, getattr(module, key, _ABSENT)))
            setattr(module, key, value)


def off() -> None:
    """As before `on`."""
    while _before:
        module, key, value = _before.pop()
        if value is _ABSENT:
            delattr(module, key)
        else:
            setattr(module, key, value)
