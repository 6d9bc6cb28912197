"""Forwards run by `torch.compile`, with their gathers outside of the graph. Layer 3.

    enter unit -> gather -> plain_weights(unit): [ graph(module, ...) ] -> leave unit

Dynamo sees an ordinary module and an ordinary function, that of the module's class. So units of one class and of equal
shapes share one graph, and the weights are inputs of it: what the graph saves of them for its backward are views of
gathered memory, which the session frees and gathers again as ever.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from shardfn._torch import Compiler, in_transform
from shardfn.core.engine.weights import plain_weights

Forward = Callable[..., Any]


def compiled(function: Forward, compiler: Compiler) -> Forward:
    """`function(module, ...)` as a graph; inside a `torch.func` transform, which a graph would not see, as it is."""
    graph = compiler(function)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if in_transform() or torch.compiler.is_compiling():
            return function(module, *args, **kwargs)
        with plain_weights(module):
            return graph(module, *args, **kwargs)

    return forward


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
