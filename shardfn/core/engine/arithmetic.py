"""How Python computes with what it takes for a number, in terms of plain numbers. Layer 3.

A run without data has numbers that are two at once (`paired.py`), and numbers that remember what they were asked
(`guards.py`). Both define what a sum, a comparison or `int()` of one is once, for all methods of their kind.
"""

import operator
from collections.abc import Callable
from typing import Any

_Function = Callable[..., Any]
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_CONVERSIONS: dict[str, _Function] = {
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__index__": operator.index,
    "__repr__": repr,
    "__str__": str,
    "__format__": format,
}


def computing(method_of: Callable[[_Function], _Function]) -> dict[str, _Function]:
    """Methods by which numbers are computed with and compared; `method_of` makes one of what plain numbers do."""
    methods = {f"__{name}__": getattr(operator, name) for name in (*_OF_TWO, "neg", "pos", "abs")}
    methods |= {f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
    methods |= {f"__r{name}__": _swapped(getattr(operator, name)) for name in _OF_TWO}
    return {name: method_of(function) for name, function in methods.items()}


def converting(decided: Callable[[Any], Any]) -> dict[str, _Function]:
    """Methods that make something else of a number: of the plain one that counts, which `decided` says."""

    def method_of(function: _Function) -> _Function:
        return lambda self, *args: function(decided(self), *args)

    return {name: method_of(function) for name, function in _CONVERSIONS.items()}


def _swapped(function: _Function) -> _Function:
    return lambda a, b: function(b, a)
