"""Which modules an auto-wrap policy wraps: torch's own algorithm, with our class in the place of its. Layer 6."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from shardfn.compat.fsdp1.instance import instances


def wrap_inside(
    module: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: dict[str, Any],
    wrap: Callable[..., nn.Module],
) -> None:
    """Replace the modules that the policy chooses by `wrap(module, **kwargs)`, innermost first.

    Raises:
        ValueError: something in it is wrapped already; frozen and trainable parameters in one unit.
    """
    for name, _, _ in instances(module):
        raise ValueError(
            f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in\n{module}"
        )

    @functools.wraps(wrap)
    def wrap_one(module: nn.Module, **kwargs: Any) -> nn.Module:
        return wrap(
            module, **{key: value for key, value in kwargs.items() if key not in ("policy", "auto_wrap_policy")}
        )

    try:
        _auto_wrap(module, policy, ignored_modules, ignored_params, root_kwargs, wrap_one)
    finally:
        for inside in module.modules():
            inside.__dict__.pop("_wrap_overrides", None)
