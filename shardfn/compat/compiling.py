"""`torch.compile` on what the classes shard, and their own `compile()`: every unit becomes a graph. Layer 6.

Gathers stay outside of graphs, and a graph ends where a unit begins. So what is compiled is the forward of every
sharded module that holds no other one; `torch.compile(model)`, or a compiled function that calls the model, says how at
the call, by the context that it runs in.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shardfn.core.engine.compiled import GraphBreak


def compile_units(sharded: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> None:
    """`compile(*args, **kwargs)` on each of these (name, module) that holds no other one and is not compiled yet."""
    found = list(sharded)
    for name, module in found:
        prefix = f"{name}." if name else ""
        if not any(other.startswith(prefix) and other != name for other, _ in found):
            if module._compiled_call_impl is None:
                module.compile(*args, **kwargs)


class Outside:
    """A run of a sharded module out of Dynamo's sight; where a graph ended for it, its units are compiled alike."""

    def __init__(self, run: Callable[..., Any], units: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]]) -> None:
        """`units` names what is sharded in a module, and what of it is compiled.

        Dynamo is imported by this; a process that trains imports it in any case.
        """
        self._run, self._units = run, units
        self._here = GraphBreak(self._run_here)

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return self._here(module, *args)

    def _run_here(self, module: nn.Module, *args: Any) -> Any:
        options = _options_around()
        if options is not None:
            compile_units(self._units(module), **options)
        return self._run(module, *args)


OUTSIDE: dict[str, Outside] = {}  # by kind of class, once there is an instance; a traced call finds it here


def expect_graphs(
    kind: str, run: Callable[..., Any], units: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]]
) -> None:
    """There are instances of a class, which somebody may compile."""
    if kind not in OUTSIDE:
        OUTSIDE[kind] = Outside(run, units)


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
