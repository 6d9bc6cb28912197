"""`torch.compile` on an instance, and its own `compile()`: every unit becomes a graph. Layer 6.

Gathers stay outside of graphs, and a graph ends where a unit begins. So what is compiled is the forward of every
instance that holds no other one; `torch.compile(fsdp)` finds out how at a call, from the context that it runs in.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from shardfn.compat.fsdp1.instance import instances
from shardfn.compat.fsdp1.running import run
from shardfn.core.engine.compiled import GraphBreak
from shardfn.core.shadow import WRAPPED

OUTSIDE: dict[
    str, Callable[..., Any]
] = {}  # "run", once somebody compiles: making it imports Dynamo, which takes 0.7 s


def expect_graphs() -> None:
    """Somebody is about to compile an instance."""
    if "run" not in OUTSIDE:
        OUTSIDE["run"] = GraphBreak(_run_with_graphs)


def compile_units(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`compile(*args, **kwargs)` on the module of every instance that holds no other one and is not compiled yet."""
    found = [(name, inside) for name, inside, _ in instances(module)]
    for name, inside in found:
        prefix = f"{name}." if name else ""
        wrapped: Any = inside.__dict__[WRAPPED]
        if not any(other.startswith(prefix) and other != name for other, _ in found):
            if wrapped._compiled_call_impl is None:
                wrapped.compile(*args, **kwargs)


def _run_with_graphs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward in a program that compiles; where a graph ended for it, its units are compiled alike."""
    options = _options_around()
    if options is not None:
        compile_units(module, **options)
    return run(module, args, kwargs)


def _options_around() -> dict[str, Any] | None:
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
