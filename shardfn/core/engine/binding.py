"""A copy of the module tree whose parameters come from a session. Layer 3.

The caller's model is a template: it is never changed, so that calls with other parameters may nest, run in threads or
be recomputed in a backward (`torch.utils.checkpoint` keeps the copies it was given), and an exception leaves nothing
bound. What a forward assigns to attributes of its own modules is written back to the template afterwards.
"""

import copy as copying
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from shardfn._torch import (
    Compiler,
    after_backward,
    buffers_of,
    call_wrapped,
    children_of,
    compiler_of,
    compiler_of_wrapped,
    compiles_itself_no_more,
    drop_flat_weights,
    has_forward_hooks,
    keep_containers_apart,
    keep_hooks_apart,
    parameters_of,
    pytree,
    refresh_flat_weights,
    set_tables,
)
from shardfn.core.engine.compiled import GraphBreak, compiled, own_code
from shardfn.core.engine.weights import LazyWeights
from shardfn.core.errors import ShardError
from shardfn.core.model import class_of, patched_forward, shallow_copy, submodule, unwrapped

Forward = Callable[..., Any]
InnerCall = tuple[str, Any, Any]  # path of a module, arguments, keyword arguments
_FUNCTIONS = (FunctionType, MethodType)
_dict_of = attrgetter("__dict__")
_forward_of = attrgetter("forward")
_OWN = frozenset(nn.Module().__dict__) | {"forward", "_flat_weights"}  # attributes that are torch's own
_DELETED = object()


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute, "heads", or an object that has it, "config.heads"."""
    holder, _, attribute = name.rpartition(".")
    return hasattr(module.__dict__.get(holder), attribute) if holder else hasattr(module, attribute)


@dataclass(frozen=True)
class Wiring:
    """What to put into the copies.

    `params[path]` maps attributes to canonical parameter names, and `fetch` gives the weight; `forwards[path]` replaces
    a module's forward, `around[path]` goes around it, and `compilers[path]` compiles it; with `compilers` None nothing
    is compiled. Parameters in `ignored` are the module's own, as `of_own` makes them. `sizes[path]` are attributes that
    hold a size of this rank, by their names; "config.heads" is one of an object that the module has. `units` are the
    modules whose weights are gathered when their forwards begin. What `rehearses` leaves no hooks that it installs.
    """

    params: Mapping[str, Mapping[str, str]]
    fetch: Callable[[str], Tensor]
    forwards: Mapping[str, Forward] = field(default_factory=dict)
    around: Mapping[str, Callable[[Forward], Forward]] = field(default_factory=dict)
    compilers: Mapping[str, Compiler] | None = None
    ignored: Collection[str] = ()
    of_own: Callable[[Any], Any] = lambda own: own
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    units: Collection[str] = ()
    rehearses: bool = False

    def lazy_weights(self, path: str, own: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """The `_parameters` of the copy at `path` of a module whose own table is `own`."""
        names = self.params.get(path, {})
        prefix = f"{path}." if path else ""
        absent = [attribute for attribute, value in own.items() if value is None or prefix + attribute in self.ignored]
        return LazyWeights({**dict.fromkeys(absent), **names}, self.fetch, self.of_own(own))

    def set_sizes(self, path: str, copy: nn.Module) -> None:
        """Give a copy the sizes of this rank; objects that hold one are copied."""
        for name, size in self.sizes.get(path, {}).items():
            holder, _, attribute = name.rpartition(".")
            table = copy.__dict__
            if not has_attribute(copy, name):
                continue  # a pattern may be about others of the modules that it matches
            if holder:
                own = table[holder] = copying.copy(table[holder])
                setattr(own, attribute, size)
            else:
                table[attribute] = size

    def compiler(self, asked: Compiler | None, path: str) -> Compiler | None:
        """What compiles the forward of a module: what the module was asked to compile itself with, or the policy.

        Raises:
            ShardError: there is one, and units in the module, whose gathers cannot be part of its graph.
        """
        if self.compilers is None:
            return None
        found = asked or self.compilers.get(path)
        inner = [unit for unit in self.units if unit != path and unit.startswith(f"{path}." if path else "")]
        if found is not None and inner:
            raise ShardError(
                f"apply: {path or '(the model)'!r} is compiled and holds unit {inner[0]!r}, whose weights are gathered "
                f"when its forward begins, outside of any graph. Compile the units instead: Policy(compile=True), or "
                f"compile() on each of them."
            )
        return found


class Bound:
    """The copies: `root` is what runs, between `begin` and `write_back`.

    Making them takes longer than running a small layer, so they serve again while the template stays as it was and
    nobody else (a checkpoint that will recompute, a traceback) holds one.
    """

    def __init__(self, model: nn.Module, wiring: Wiring) -> None:
        self._wiring = wiring
        self._copies: dict[int, nn.Module] = {}
        self._containers: dict[int, Any] = {}
        self._pairs: list[tuple[weakref.ref[nn.Module], nn.Module]] = []  # weak: the template may go before its copies
        self._lists: list[list[Any] | dict[Any, Any]] = []  # containers of modules in the template
        self.compiles = False  # whether any forward is a graph
        self.root = self._copy(model, "")
        self._rebind_all()
        names = model.named_modules(remove_duplicate=False)  # a module with several names has its buffers under each
        self._owners = [(f"{path}." if path else "", self._copies[id(unwrapped(module))]) for path, module in names]
        self._buffers = [
            (prefix + name, name, copy, buffer)  # (full name, attribute, copy, the template's)
            for prefix, copy in self._owners
            for name, buffer in buffers_of(copy).items()
        ]
        self._copies.clear()
        # The copies share most values, so that their addresses are not given to others; not these, which they replace.
        self._replaced = [
            (template, name)
            for template, _ in self._pairs
            if (module := template()) is not None
            for name, value in module.__dict__.items()
            if isinstance(value, MethodType | tuple)
        ]
        self._template = self._template_now()
        self._own = [copy for _, copy in self._pairs]
        self._made = [(_identities(copy.__dict__), _identities(children_of(copy))) for copy in self._own]
        self._sizes, held = self._mine_now()
        self._buffer_counts = self._buffer_counts_now()
        self._held = list(held)
        # Reached without a reference to the copy: a forward, a method kept as an attribute.
        self._reached = [
            value for _, copy in self._pairs for value in copy.__dict__.values() if isinstance(value, _FUNCTIONS)
        ]
        self._uses = self._uses_now()

    def begin(self, buffers: Mapping[str, Tensor]) -> None:
        """Put the buffers of a tree into the copies."""
        self._given = [buffers.get(name, own) for name, _, _, own in self._buffers]
        for (_, attribute, copy, _), buffer in zip(self._buffers, self._given, strict=True):
            buffers_of(copy)[attribute] = buffer

    def pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """The modules of the template, and their copies."""
        return [(module, copy) for template, copy in self._pairs if (module := template()) is not None]

    def hooked(self, path: str) -> bool:
        """Whether hooks run around a module in the copy at `path`, or around it."""
        return any(has_forward_hooks(module) for module in submodule(self.root, path).modules())

    @property
    def untouched(self) -> bool:
        """Whether the copies are as they were made, and nobody else holds one."""
        return self._uses == self._uses_now()

    @property
    def up_to_date(self) -> bool:
        """Whether the template is as it was when the copies were made."""
        return self._template == self._template_now()

    def _template_now(self) -> list[Any]:
        # Every call makes this list: passes in C over what may be changed by replacing it.
        modules = [module for template, _ in self._pairs if (module := template()) is not None]
        tables = [*map(_dict_of, modules), *map(children_of, modules), *map(buffers_of, modules)]
        held = [container.values() if isinstance(container, dict) else container for container in self._lists]
        return [
            *map(len, tables),
            *map(len, held),
            *chain.from_iterable(tables),
            *map(id, chain.from_iterable(map(dict.values, tables))),
            *chain.from_iterable(container for container in self._lists if isinstance(container, dict)),
            *map(id, chain.from_iterable(held)),
            *chain.from_iterable(map(parameters_of, modules)),
            *map(type, modules),
            *map(_forward_of, map(type, modules)),
            *(_parts(m.__dict__.get(name)) for template, name in self._replaced if (m := template()) is not None),
        ]

    def _uses_now(self) -> list[int]:
        copies = [copy for _, copy in self._pairs]
        counts = [*map(sys.getrefcount, copies), *map(sys.getrefcount, self._reached)]
        return [*counts, *map(len, map(_dict_of, copies))]

    def _copy(
        self, module: nn.Module, path: str, inside_graph: bool = False, asked: Compiler | None = None
    ) -> nn.Module:
        """The copy of a module and of all in it; `asked` is what its wrapper wants it to be compiled with."""
        module = unwrapped(module)
        if id(module) in self._copies:
            return self._copies[id(module)]
        prefix = f"{path}." if path else ""
        weights = self._wiring.lazy_weights(path, parameters_of(module))
        copy = self._copies[id(module)] = shallow_copy(module, weights, dict(buffers_of(module)))
        self._wiring.set_sizes(path, copy)
        if self._wiring.rehearses:
            keep_hooks_apart(copy)
            keep_containers_apart(copy, self._containers)
        self._pairs.append((weakref.ref(module), copy))
        compiler = None if inside_graph else self._wiring.compiler(asked or compiler_of(module), path)
        self.compiles |= compiler is not None
        wrapped, inside = compiler_of_wrapped(module), inside_graph or compiler is not None
        for name, child in children_of(module).items():
            if child is not None:
                children_of(copy)[name] = self._copy(child, prefix + name, inside, wrapped)
        self._set_forward(module, copy, path, compiler, inside_graph)
        return copy

    def _set_forward(
        self, module: nn.Module, copy: nn.Module, path: str, compiler: Compiler | None, inside_graph: bool
    ) -> None:
        """Install the forward, and what goes around it.

        It holds the copy weakly: a cycle would keep gathered weights until the next garbage collection.
        """
        wiring = self._wiring
        function = wiring.forwards.get(path) or own_forward(module)
        if compiler is not None:
            function = compiled(own_code(function, module), compiler)
        if isinstance(module, nn.RNNBase) and path not in wiring.forwards:
            function = _with_flat_weights(function)
        compiles_itself_no_more(copy)
        if function is class_of(module).forward and path not in wiring.around:
            return
        forward = _method(function, weakref.ref(copy))
        if inside_graph and path in wiring.forwards:
            forward = GraphBreak(forward)
        copy.__dict__["forward"] = wiring.around[path](forward) if path in wiring.around else forward

    def _rebind_all(self) -> None:
        for template, copy in self._pairs:
            if (module := template()) is not None:
                self._rebind(module, copy)

    def _rebind(self, module: nn.Module, copy: nn.Module) -> None:
        """Attributes that hold modules of the template (lists, methods) hold their copies."""
        for name in module.__dict__.keys() - _OWN:
            value = module.__dict__[name]
            moved = self._moved(value)
            if moved is not value:
                copy.__dict__[name] = moved
                if isinstance(value, list | dict):
                    self._lists.append(value)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._copies.get(id(unwrapped(value)), value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            copy = self._copies.get(id(unwrapped(value.__self__)))
            return value if copy is None else _method(value.__func__, weakref.ref(copy))
        if (
            isinstance(value, list | tuple)
            and type(value) in (list, tuple)
            and any(isinstance(item, nn.Module | MethodType) for item in value)
        ):
            return type(value)(self._moved(item) for item in value)
        if type(value) is dict and any(isinstance(item, nn.Module | MethodType) for item in value.values()):
            return {key: self._moved(item) for key, item in value.items()}
        return value

    def _mine_now(self) -> tuple[list[int], Iterator[Any]]:
        """Sizes of the tables of the copies; what is in them."""
        tables = [*map(_dict_of, self._own), *map(children_of, self._own)]
        return list(map(len, tables)), chain(*tables, chain.from_iterable(map(dict.values, tables)))

    def _assigned(self) -> Iterator[tuple[weakref.ref[nn.Module], str, Any]]:
        """(module of the template, attribute, value) of what the forward assigned; deleted ones are `_DELETED`."""
        sizes, held = self._mine_now()
        if sizes == self._sizes and all(map(is_, held, self._held)):
            return
        for (template, copy), (attributes, children) in zip(self._pairs, self._made, strict=True):
            for made, now in ((attributes, copy.__dict__), (children, children_of(copy))):
                for name in sorted((made.keys() | now.keys()) - _OWN):
                    if name not in now:
                        yield template, name, _DELETED
                    elif made.get(name) != id(now[name]):
                        yield template, name, self._original(now[name])

    def _original(self, value: Any) -> Any:
        """The module of the template that a copy stands for; other values as they are."""
        for template, copy in self._pairs if isinstance(value, nn.Module) else ():
            if copy is value:
                return template()
        return value

    def assigned(self) -> list[Any]:
        """What the forward assigned to attributes of its modules, and all buffers: it may have filled them."""
        values = [value for _, _, value in self._assigned()]
        return values + [buffers_of(copy).get(attribute) for _, attribute, copy, _ in self._buffers]

    def contents(self) -> list[Any]:
        """The lists, dicts and sets of the copies, when these have their own."""
        return list(self._containers.values())

    def write_back(self, buffers: dict[str, Tensor]) -> None:
        """Give the template the attributes, and `buffers` the buffers, that the forward assigned.

        Buffers that it registered or took away are new, or gone, in both.
        """
        for template, name, value in list(self._assigned()):
            module = template()
            if module is None:
                continue
            module.__dict__.pop(name, None)
            children_of(module).pop(name, None)
            if isinstance(value, nn.Module):
                children_of(module)[name] = value
            elif value is not _DELETED:
                module.__dict__[name] = value
        self._write_back_buffers(buffers)

    def write_back_later(self, output: Any) -> None:
        """Give the template what hooks assign in a backward of an output, to copies that somebody holds until then."""
        held = [(template, copy, dict(copy.__dict__)) for template, copy in self._pairs]

        def write_back() -> None:
            for template, copy, was in held:
                module, now = template(), copy.__dict__
                for name in now.keys() - _OWN if module is not None else ():
                    if name not in was or was[name] is not now[name]:
                        was[name] = now[name]
                        module.__dict__[name] = self._original(now[name])

        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.register_hook(lambda _: after_backward(write_back))

    def _write_back_buffers(self, buffers: dict[str, Tensor]) -> None:
        values = (buffers_of(copy).get(attribute) for _, attribute, copy, _ in self._buffers)
        if all(map(is_, values, self._given)) and self._buffer_counts == self._buffer_counts_now():
            return
        was = dict(zip((name for name, *_ in self._buffers), self._given, strict=True))
        now = {prefix + name: value for prefix, copy in self._owners for name, value in buffers_of(copy).items()}
        for name in was.keys() | now.keys():
            value = now.get(name)
            if value is None:
                buffers.pop(name, None)
            elif value is not was.get(name):
                buffers[name] = value
        self._list_buffers()

    def _buffer_counts_now(self) -> list[int]:
        return list(map(len, map(buffers_of, self._own)))

    def _list_buffers(self) -> None:
        """Give the modules of the template the buffers that their copies have; a value of the template's own stays."""
        for template, copy in self._pairs:
            if (module := template()) is not None:
                own = dict(buffers_of(module))
                buffers_of(module).clear()
                for name, value in buffers_of(copy).items():
                    kept = own.get(name)
                    buffers_of(module)[name] = value if value is None or kept is None else kept


def _parts(value: Any) -> Any:
    """What a method or a tuple is made of: the object itself may be gone, and another one at its address."""
    if isinstance(value, MethodType):
        return id(value.__func__), id(value.__self__)
    return tuple(map(_parts, value)) if isinstance(value, tuple) else id(value)


def _identities(table: Mapping[str, Any]) -> dict[str, int]:
    return dict(zip(table, map(id, table.values()), strict=True))


def _method(function: Forward, here: Callable[[], Any]) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        module = here()
        if module is None:
            raise ShardError(
                "apply: a method of a module is called after its apply has ended, and nobody kept the module; give "
                "torch.utils.checkpoint the module itself, not module.forward or a method that an attribute holds"
            )
        return function(module, *args, **kwargs)

    return call


def own_forward(module: nn.Module) -> Forward:
    """The forward of a module as a function of the module."""
    patched = patched_forward(module)
    if compiler_of_wrapped(module) is not None:
        return call_wrapped
    if isinstance(patched, MethodType) and patched.__self__ is module:
        return patched.__func__
    return class_of(module).forward if patched is None else lambda _, *args, **kwargs: patched(*args, **kwargs)


def _with_flat_weights(function: Forward) -> Forward:
    """An RNN's forward around which its list of weights is the copy's."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        refresh_flat_weights(module)
        try:
            return function(module, *args, **kwargs)
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


def is_cache(value: object) -> bool:
    """Whether a value is for later calls of the same model and may hold parts: a cache of keys and values."""
    return any(
        f"{cls.__module__}.{cls.__qualname__}" == "transformers.cache_utils.Cache" for cls in type(value).__mro__
    )
