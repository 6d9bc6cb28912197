"""`torch.compile` on what the classes shard, and their own `compile()`: every unit becomes a graph. Layer 6.

Gathers stay outside of graphs, and a graph ends where a unit begins. So what is compiled is the forward of every
sharded module that holds no other one; `torch.compile(model)`, or a compiled function that calls the model, says how at
the call, by the context that it runs in.
"""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn


def compile_units(units: Sequence[tuple[str, nn.Module]], *args: Any, **kwargs: Any) -> None:
    """`compile(*args, **kwargs)` on each of these (name, module) that holds no other one and is not compiled yet."""
    for name, module in units:
        prefix = f"{name}." if name else ""
        if not any(other.startswith(prefix) and other != name for other, _ in units):
            if module._compiled_call_impl is None:
                module.compile(*args, **kwargs)


def options_around() -> dict[str, Any] | None:
    """What `torch.compile` was asked for, by the context that this call runs in."""
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    frame: Any = sys._getframe(1)
    while frame is not None:
        context: Any = frame.f_locals.get("self") if frame.f_code.co_name == "compile_wrapper" else None
        if isinstance(context, dynamo.OptimizeContext):
            return {
                "backend": dynamo.innermost_backend(context.callback),
                "dynamic": getattr(context, "_dynamic", None),
            }
        frame = frame.f_back
    return None
