"""What modules do in the calls of a plan, and what they would do by themselves."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shardfn import _torch
from shardfn.binding.compiled_forwards import Forward
from shardfn.layout import class_of, is_in, patched_forward
from shardfn.notation import ShardError

Around = Callable[[Forward], Forward]
InnerCall = tuple[str, Any, Any]  # path of a module, arguments, keyword arguments


@dataclass(frozen=True)
class Wiring:
    """What modules do in the calls of a plan, by their paths.

    `forwards[path]` replaces a module's forward, a function of the module; `around[path]` goes around it, and
    `compilers[path]` compiles it; with `compilers` None nothing is compiled. `vary` makes a gathered weight, by name,
    vary where it is needed so. `sizes[path]` are attributes that hold a size of this rank, by their names;
    "config.heads" is one of an object that the module has. `units` are the modules whose weights are gathered when
    their forwards begin, `amended` those of which calls of torch are amended.
    """

    forwards: Mapping[str, Forward] = field(default_factory=dict)
    around: Mapping[str, Around] = field(default_factory=dict)
    compilers: Mapping[str, _torch.Compiler] | None = None
    vary: Callable[[str, Tensor], Tensor] | None = None
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    units: Collection[str] = ()
    amended: Collection[str] = ()

    def compiler(self, asked: _torch.Compiler | None, path: str) -> _torch.Compiler | None:
        """What compiles the forward of a module: what the module was asked to compile itself with, or the policy.

        Raises:
            ShardError: there is one, and units in the module, whose gathers cannot be part of its graph; or calls that
                are amended.
        """
        if self.compilers is None or (compiler := asked or self.compilers.get(path)) is None:
            return None
        if inner := [unit for unit in self.units if is_in(unit, path)]:
            raise ShardError(
                f"apply: {path or '(the model)'!r} is compiled and holds unit {inner[0]!r}, whose weights are gathered "
                f"when its forward begins, outside of any graph. Compile the units instead: Policy(compile=True), or "
                f"compile() on each of them."
            )
        if amended := [other for other in self.amended if other == path or is_in(other, path)]:
            raise ShardError(
                f"apply: {path or '(the model)'!r} is compiled, and {amended[0] or '(the model)'!r} in it has calls "
                "that take other arguments on a rank than in one process. Compile it before the first call, which then "
                "says what to write; or use sf.jit"
            )
        return compiler


def goes_around(forward: Callable[..., Any], *given: Any) -> Around:
    """What goes around a forward, `inner`: in its place `forward(*given, inner, *args, **kwargs)` runs."""
    return partial(partial, forward, *given)


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute, "heads", or an object that has it, "config.heads"."""
    holder, _, attribute = name.rpartition(".")
    return hasattr(module.__dict__.get(holder), attribute) if holder else hasattr(module, attribute)


def with_size(module: nn.Module | None, name: str, size: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give a module the size of a rank; an object that holds it is copied. Returns a table, and what was in it."""
    assert module is not None
    holder, _, attribute = name.rpartition(".")
    table, had = vars(module), {holder or attribute: vars(module).get(holder or attribute)}
    if holder:
        table[holder] = copy.copy(table[holder])
        setattr(table[holder], attribute, size)
    else:
        table[attribute] = size
    return table, had


def put_entries(table: dict[str, Any], had: Mapping[str, Any]) -> None:
    """Give a table what it had under some names; None: nothing."""
    for name, value in had.items():
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value


def own_forward(module: nn.Module) -> Forward:
    """The forward of a module as a function of the module."""
    patched = patched_forward(module)
    if _torch.compiler_of_wrapped(module) is not None:
        return _torch.call_wrapped
    if patched is None:
        kind = class_of(module)
        return _bound if isinstance(inspect.getattr_static(kind, "forward"), staticmethod) else kind.forward
    return patched.__func__ if isinstance(patched, MethodType) and patched.__self__ is module else _bound


def _bound(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return (patched_forward(module) or class_of(module).forward)(*args, **kwargs)


def with_flat_weights(forward: Forward, rnn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """An RNN's forward during which its list of weights is that of the call."""
    try:
        _torch.refresh_flat_weights(rnn)
        return forward(rnn, *args, **kwargs)
    finally:
        _torch.refresh_flat_weights(rnn, plain=True)
