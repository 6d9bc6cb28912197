"""A copy of the module tree whose parameters come from a session. Layer 3.

The caller's model is a template: it is never changed, so that calls with other parameters may nest, run in threads or
be recomputed in a backward (`torch.utils.checkpoint` keeps the copies it was given), and an exception leaves nothing
bound. What a forward assigns to attributes of its own modules is written back to the template afterwards.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shardfn._torch import (
    buffers_of,
    children_of,
    drop_flat_weights,
    parameters_of,
    refresh_flat_weights,
    set_tables,
)
from shardfn.core.errors import ShardError
from shardfn.core.shadow import shallow_copy

Forward = Callable[..., Any]
_OWN = frozenset(nn.Module().__dict__) | {"forward"}  # attributes that are nn.Module's own


@dataclass(frozen=True)
class Wiring:
    """What to put into the copies.

    `params[path]` maps attributes to canonical parameter names; `fetch` gives the weight, `guard` may refuse that a
    forward reads it from the module; `forwards[path]` replaces a module's forward, and `around[path]` goes around it.
    """

    params: Mapping[str, Mapping[str, str]]
    buffers: Mapping[str, Tensor]
    fetch: Callable[[str], Tensor]
    guard: Callable[[str, str, str], None]
    forwards: Mapping[str, Forward] = field(default_factory=dict)
    around: Mapping[str, Callable[[Forward], Forward]] = field(default_factory=dict)


class _Weights(dict[str, Any]):
    """The `_parameters` of a copy: looks a weight up when it is read. Missing biases stay None."""

    def __init__(self, path: str, names: Mapping[str, str], absent: Iterable[str], wiring: Wiring) -> None:
        super().__init__({**dict.fromkeys(absent), **names})
        self._path, self._wiring = path, wiring

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        if name is None:
            return None
        self._wiring.guard(self._path, attribute, name)
        return self._wiring.fetch(name)

    def get(self, attribute: str, default: Any = None) -> Any:
        return self[attribute] if attribute in self else default

    def items(self) -> Any:
        return ((attribute, None if name is None else self._wiring.fetch(name)) for attribute, name in super().items())

    def values(self) -> Any:
        return (weight for _, weight in self.items())


class Bound:
    """The copies of one call: `root` is what runs, `write_back` is for afterwards."""

    def __init__(self, model: nn.Module, wiring: Wiring) -> None:
        self._wiring = wiring
        self._copies: dict[int, nn.Module] = {}
        self._changed: list[tuple[nn.Module, nn.Module, dict[str, Any]]] = []
        self._named_buffers: list[tuple[str, str, nn.Module, Tensor | None]] = []
        self.root = self._copy(model, "")
        for module, copy, _ in self._changed:
            self._rebind(module, copy)
        self._changed = [(module, copy, dict(copy.__dict__)) for module, copy, _ in self._changed]

    def _copy(self, module: nn.Module, path: str) -> nn.Module:
        if id(module) in self._copies:
            return self._copies[id(module)]
        wiring, prefix = self._wiring, f"{path}." if path else ""
        names = wiring.params.get(path, {})
        absent = [attribute for attribute, value in parameters_of(module).items() if value is None]
        weights = _Weights(path, names, absent, wiring) if names or absent else {}
        buffers = {n: wiring.buffers.get(prefix + n, b) for n, b in buffers_of(module).items()}
        copy = self._copies[id(module)] = shallow_copy(module, weights, buffers)
        for name, buffer in buffers.items():
            self._named_buffers.append((prefix + name, name, copy, buffer))
        for name, child in children_of(module).items():
            if child is not None:
                children_of(copy)[name] = self._copy(child, prefix + name)
        if not type(module).__module__.startswith("torch.nn."):
            self._changed.append((module, copy, {}))
        self._set_forward(module, copy, path)
        return copy

    def _set_forward(self, module: nn.Module, copy: nn.Module, path: str) -> None:
        """Install the replacement of a forward, and what goes around it.

        The closures hold the copy weakly: a cycle would keep gathered weights until the next garbage collection.
        """
        wiring, here = self._wiring, weakref.ref(copy)
        patched = module.__dict__.get("forward")
        if isinstance(patched, MethodType) and patched.__self__ is module:
            patched = patched.__func__
            copy.__dict__["forward"] = inner = _method(patched, here)
        elif patched is not None:
            inner = patched
        else:
            inner = _method(type(module).forward, here)
        if path in wiring.forwards:
            copy.__dict__["forward"] = inner = _method(wiring.forwards[path], here)
        elif isinstance(module, nn.RNNBase):
            inner = _refresh_flat_weights(here, inner)
            copy.__dict__["forward"] = inner
        if path in wiring.around:
            copy.__dict__["forward"] = wiring.around[path](inner)

    def _rebind(self, module: nn.Module, copy: nn.Module) -> None:
        """Attributes that hold modules of the template (lists, methods) hold their copies."""
        for name in module.__dict__.keys() - _OWN:
            value = module.__dict__[name]
            moved = self._moved(value)
            if moved is not value:
                copy.__dict__[name] = moved

    def _moved(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._copies.get(id(value), value)
        if isinstance(value, MethodType) and id(value.__self__) in self._copies:
            return MethodType(value.__func__, weakref.proxy(self._copies[id(value.__self__)]))
        if (
            isinstance(value, list | tuple)
            and type(value) in (list, tuple)
            and any(isinstance(item, nn.Module | MethodType) for item in value)
        ):
            return type(value)(self._moved(item) for item in value)
        if type(value) is dict and any(isinstance(item, nn.Module | MethodType) for item in value.values()):
            return {key: self._moved(item) for key, item in value.items()}
        return value

    def assigned(self) -> list[Any]:
        """What the forward assigned to attributes of its modules, and all buffers: it may have filled them."""
        values = [
            copy.__dict__[name]
            for _, copy, before in self._changed
            for name in copy.__dict__.keys() - _OWN
            if before.get(name, self) is not copy.__dict__[name]
        ]
        return values + [buffers_of(copy).get(attribute) for _, attribute, copy, _ in self._named_buffers]

    def write_back(self, buffers: dict[str, Tensor]) -> None:
        """Give the template the attributes, and `buffers` the buffers, that the forward assigned."""
        for module, copy, before in self._changed:
            for name in copy.__dict__.keys() - _OWN:
                value = copy.__dict__[name]
                if before.get(name, self) is not value:
                    module.__dict__[name] = value
        for name, attribute, copy, before_buffer in self._named_buffers:
            value = buffers_of(copy).get(attribute)
            if value is not None and value is not before_buffer:
                buffers[name] = value


def _method(function: Forward, here: Callable[[], Any]) -> Forward:
    return lambda *args, **kwargs: function(here(), *args, **kwargs)


def _refresh_flat_weights(here: Callable[[], Any], inner: Forward) -> Forward:
    """An RNN's forward around which its list of weights is the copy's."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        module = here()
        refresh_flat_weights(module)
        try:
            return inner(*args, **kwargs)
        finally:
            drop_flat_weights(module)

    return forward


class _Escaped(dict[str, Any]):
    """Stands in for the template's parameters while the copies run: reading one is an error."""

    def __getitem__(self, attribute: str) -> Any:
        raise ShardError(
            f"apply: '{attribute}' was read from the model itself, not from the copy that holds the shards: a "
            "closure or "
            f"a list keeps a reference to the original module. Reach modules through attributes of 'self' in forward."
        )


@contextmanager
def no_escape(model: nn.Module) -> Iterator[None]:
    """Within it, reading a parameter of `model` itself is an error; used for the first call."""
    owners = [module for module in model.modules() if parameters_of(module)]
    kept = [parameters_of(module) for module in owners]
    try:
        for module, parameters in zip(owners, kept, strict=True):
            set_tables(module, parameters=_Escaped(parameters))
        yield
    finally:
        for module, parameters in zip(owners, kept, strict=True):
            set_tables(module, parameters=parameters)
