"""Forwards run by `torch.compile`, with their gathers outside of the graph.

    enter unit -> gather -> as_usual(unit): [ graph(module, ...) ] -> leave unit

Dynamo sees an ordinary module and an ordinary function, that of the module's class. So units of one class and of equal
shapes share one graph, and the weights are inputs of it: what the graph saves of them for its backward are views of
gathered memory, which the session frees and gathers again as ever.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from shardfn._torch import Compiler, has_forward_hooks, has_no_memory, in_transform, simulated
from shardfn.context import holding

Forward = Callable[..., Any]

_AS_THEY_ARE = ContextVar("as_they_are", default=False)

# Of modules that do not share their graphs: the function that they were given, and the copy of it that they run.
_OWN_CODE: "weakref.WeakKeyDictionary[nn.Module, tuple[Forward, Forward]]" = weakref.WeakKeyDictionary()


def own_code(function: Forward, module: nn.Module) -> Forward:
    """The function, or a copy of it with other code when hooks wait inside `module`.

    Graphs belong to code, and Dynamo does not ask whether another module of the same class has hooks.
    """
    hooked = any(has_forward_hooks(inner) for inner in module.modules() if inner is not module)
    if not hooked or not isinstance(function, FunctionType):
        return function
    known = _OWN_CODE.get(module)
    if known is None or known[0] is not function:
        code = function.__code__.replace()
        copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        known = _OWN_CODE[module] = function, copy
    return known[1]


def compiled(fn: Forward, compiler: Compiler, as_usual: Callable[[nn.Module], AbstractContextManager[None]]) -> Forward:
    """`fn(module, ...)` as a graph, which is `as_usual(module)`.

    Inside a `torch.func` transform, which a graph would not see, it runs as it is.
    """
    graph = compiler(fn)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if in_transform() or _AS_THEY_ARE.get() or torch.compiler.is_compiling() or has_no_memory() or simulated():
            return fn(module, *args, **kwargs)
        with as_usual(module):
            return graph(module, *args, **kwargs)

    return forward


def as_they_are() -> AbstractContextManager[None]:
    """Within it compiled forwards run without their graphs: in the innermost level of a transform, say."""
    return holding(_AS_THEY_ARE, True)


def untraced(function: Forward) -> Forward:
    """The function, as it is, also where Dynamo looks at every call."""
    return cast(Forward, torch.compiler.disable(function))


class GraphBreak:
    """A forward inside a compiled one at which the graph ends and another one begins.

    Graphs depend on its class only, not on which function it is, so that units share them.
    """

    _run: Forward | None = None  # made when first needed: it imports Dynamo, which takes 0.7 s

    def __init__(self, function: Forward) -> None:
        self._function = function
        if GraphBreak._run is None:
            GraphBreak._run = staticmethod(untraced(_run))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        return self._run(self._function, args, kwargs)


def _run(function: Forward, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)
