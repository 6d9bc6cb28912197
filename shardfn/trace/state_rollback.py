"""What Python code can reach and change that is no tensor: containers, objects, closures and globals.

A shape-only trace goes through the user's modules and code, which assign attributes, or collect outputs in a list that
a hook has in its closure. `undone` puts all of it back, also what this library puts into modules for such a run: and
where sources of random numbers, arrays and files are. What is taken from an iterator cannot be put back.
"""

import gc
import pickle
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from io import IOBase
from itertools import chain, islice, starmap
from operator import is_, length_hint
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardfn._torch import forward_hooks
from shardfn.layout import OWN, class_of, unwrapped
from shardfn.notation import ShardError
from shardfn.trace.meta_values import is_cache
from shardfn.trace.paired_sizes import local_of, whole_of

_DEPTH = 8  # how many steps are followed from a module, an argument or a hook
_NEAR = 3  # the same, of what is looked at in every call
_MOST = 2**12  # items of a container that are looked into
_LARGE = 2**20  # numbers of an array that is not copied
_MOST_REACHED = 2**16  # values that are looked at from one that leaves a forward
_FOREIGN = {"torch", "shardfn", "numpy", "builtins", "logging", "functools", "typing", "enum"}
_PLAIN = (str, bytes, int, float, complex, type(None), Tensor, nn.Module, type, ModuleType, torch.dtype, torch.device)
_ENDS = (*_PLAIN, FunctionType, MethodType, partial)  # also where functions are not followed

_NO_SOURCES = (dict, list, tuple, FunctionType, MethodType, CellType)
_UNREAD = (*_PLAIN, CodeType, types.FrameType, types.TracebackType)

CONTAINERS = (OrderedDict, dict, list, deque, set)  # read and written as such: their own methods may be user's code

_TORCHS = frozenset(nn.Module().__dict__) | {"forward", "_flat_weights", "_compiled_call_impl"}  # attributes of its own

Contents = dict[int, tuple[Any, Any]]  # by identity, what can be changed in place, and what it holds
# By identity, a source of numbers or items, and what brings it to where it was.
_Back = dict[int, tuple[Any, partial[Any]]]


class ReachableState:
    """What a model's forwards and hooks, and other values, can reach and change; and what it holds now."""

    def __init__(self, model: nn.Module, *roots: Any) -> None:
        self._of, self._found, self._back = (model, *roots), Contents(), _Back()
        # What the last run has put into it that outlives a forward: tensors, whole numbers, words, attributes.
        self.collected: list[Any] = []
        self.draws = False  # whether a run has drawn random numbers that are not torch's
        modules = [unwrapped(module) for module in model.modules()]
        self._tables = {id(vars(module)) for module in modules}
        numpy: Any = sys.modules.get("numpy")
        roots = (*roots, random.random, None if numpy is None else numpy.random.random)  # with those of everybody
        methods = [x for cls in users_classes(model) for x in vars(cls).values() if isinstance(x, FunctionType)]
        hooks = [hook for table in forward_hooks(model) for hook in table.values()]
        for module in modules:
            self._found[id(vars(module))] = vars(module), dict(vars(module))
            for name, value in vars(module).items():
                if not name.startswith(OWN):
                    _follow(value, _DEPTH, self._found, back=self._back)
        for value in (*methods, *hooks, *roots):
            _follow(value, _DEPTH, self._found, back=self._back)
        self._functions = [x for x, _ in self._found.values() if isinstance(x, FunctionType) and _is_own(x)]
        named = (space[name] for function in self._functions for space, name in _read_from(function))
        kinds = (x if issubclass(type(x), type) else type(x) for x in named)
        self._classes = dict.fromkeys(kind for kind in chain(users_classes(model), kinds) if _is_own(kind))
        for kind in self._classes:
            self._found[id(kind)] = kind, read(kind)
            for name, value in vars(kind).items():
                _follow(value, 0 if name.startswith("__") else _DEPTH, self._found, back=self._back)
        self._of_caches: Contents = {}  # which keep parts for the next call
        for value, _ in list(self._found.values()):
            if is_cache(value):
                _follow(value, _DEPTH, self._of_caches)

    @contextmanager
    def undone(self, arguments: Iterable[Any]) -> Iterator[None]:
        """Afterwards all of it, and what the arguments of a run can reach, holds again what it held before.

        Raises:
            ShardError: something was taken from an iterator.
        """
        back = dict(self._back)
        reached = reach((x for x in arguments if not is_cache(x)), back)
        self.collected = []
        try:
            yield
        finally:
            self.draws |= any(starmap(_has_drawn, back.values()))
            for value, now, held in _put_back([*self._found.values(), *reached.values()], back):
                before = set(map(id, _items(held)))
                if id(value) in self._tables:
                    self.collected += [x for name, x in now.items() if name not in _TORCHS and id(x) not in before]
                elif id(value) not in self._of_caches:
                    new = [item for item in _items(now) if id(item) not in before]
                    # Other numbers, which may be times, are nobody's.
                    self.collected += [x for item in new for x in all_in(item) if isinstance(x, Tensor | int | str)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it all holds what it held when this was made, and afterwards what it holds now.

        Raises:
            ShardError: something was taken from an iterator since.
        """
        with ReachableState(*self._of).undone(()):
            _put_back(self._found.values(), self._back)
            yield

    def outside(self) -> tuple[list[tuple[Any, str]], list[Any]]:
        """What functions that a forward may call read from outside: (namespace, name) of values; holders of others.

        Not what libraries read that are installed: nobody changes that between calls.
        """
        names = dict[tuple[int, str], tuple[Any, str]]()
        holders: dict[int, Any] = {id(kind): kind for kind in self._classes}
        for function in self._functions:
            read_, cells = list(_read_from(function)), function.__closure__ or ()
            names |= {(id(space), name): (space, name) for space, name in read_ if _may_change(space[name])}
            holders |= {id(cell): cell for cell in cells if all(map(_may_change, read(cell)))}
            defaults = (x for x in function.__defaults__ or () if _is_value(x) and read(x) is not None)
            holders |= {id(default): default for default in defaults}
        return [*names.values()], [*holders.values()]


def _put_back(contents: Iterable[tuple[Any, Any]], back: _Back) -> list[tuple[Any, Any, Any]]:
    """Give all what it held; returns (value, what it has held until now, what it held) where that is something else."""
    changed = [(value, now, held) for value, held in contents if not alike(now := read(value), held)]
    for value, _, held in changed:
        _write(value, held)
    for _, to_here in back.values():
        to_here()
    return changed


def _is_own(kind: Any) -> bool:
    """Whether a class, a function or a module is of a program of the user's."""
    module = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__ or "builtins"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not ("site-packages" in file or module.partition(".")[0] in sys.stdlib_module_names | _FOREIGN)


def _is_value(x: Any) -> bool:
    """Whether it is no function, class or module, nor a tensor."""
    return not (callable(x) or isinstance(x, ModuleType | Tensor))


def _may_change(x: Any) -> bool:
    """The same, or a function that may be bound anew."""
    return _is_value(x) or isinstance(x, FunctionType | partial)


def reach(values: Iterable[Any], back: _Back | None = None) -> Contents:
    """What these values lead to that can be changed in place, and what is in it; functions are not followed."""
    reached: Contents = {}
    for value in values:
        _follow(value, _NEAR, reached, _ENDS, back)
    return reached


def _follow(
    value: Any, depth: int, reached: Contents, ends: tuple[type, ...] = _PLAIN, back: _Back | None = None
) -> None:
    """Note what can be changed in place, and what it leads to; not what is at the ends."""
    if not depth or isinstance(value, ends) or id(value) in reached:
        return
    held = read(value)
    if held is not None:
        reached[id(value)] = value, held
    if back is not None and id(value) not in back and (to_here := _way_back(value)) is not None:
        back[id(value)] = value, to_here
    for item in islice(chain(_items(held), _leads_to(value)), _MOST):
        _follow(item, depth - 1, reached, ends, back)


def all_in(value: Any) -> Iterator[Any]:
    """A value and all that is in it, whatever holds that: slots, closures, views, iterators; nothing is called for it.

    Not what modules, classes, the globals of functions and caches hold.
    """
    waiting, seen = deque([value]), dict[int, Any]()
    while waiting and len(seen) < _MOST_REACHED:
        value = waiting.popleft()
        if id(value) not in seen:
            seen[id(value)] = value  # which keeps its id from being given to another one
            yield value
            waiting += _held_by(value)


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor):
        return [x for x in vars(value).values() if x is not local_of(value) and x is not whole_of(value)]
    if isinstance(value, FunctionType):
        return value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)
    return () if isinstance(value, _UNREAD) or is_cache(value) else gc.get_referents(value)


def read(value: Any) -> Any:
    """What something holds that can be changed in place; None of other things."""
    if isinstance(value, dict):
        return dict(zip(dict.keys(value), dict.values(value), strict=True))
    if isinstance(value, CONTAINERS):
        iterate: Any = _base(value).__iter__
        return (set if isinstance(value, set) else list)(iterate(value))
    if isinstance(value, CellType):
        return [value.cell_contents] if value != CellType() else []  # which is empty
    if isinstance(value, ContextVar):
        with suppress(LookupError):
            return [value.get()]
        return [None]
    if isinstance(value, type):
        return dict(vars(value))
    if isinstance(value, FunctionType):
        return {(id(space), name): space[name] for space, name in _read_from(value)}
    if (memory := _memory(value)) is not None:
        return {memory}
    if isinstance(value, tuple | MethodType | partial) or _is_foreign(type(value)) or not has_attributes(type(value)):
        return None
    return _attributes(value)


def _write(value: Any, held: Any) -> None:
    """Give something back what it held."""
    if isinstance(value, CONTAINERS):
        base: Any = _base(value)
        base.clear(value)
        for key, item in held.items() if isinstance(held, dict) else ():
            base.__setitem__(value, key, item)
        if not isinstance(held, dict):
            (base.update if isinstance(held, set) else base.extend)(value, held)
    elif isinstance(value, bytearray):
        value[:] = next(iter(held))
    elif isinstance(held, set):
        memoryview(value).cast("B")[:] = next(iter(held))
    elif isinstance(value, ContextVar):
        value.set(held[0])
    elif isinstance(value, CellType):
        if held:
            value.cell_contents = held[0]
        else:
            del value.cell_contents
    elif isinstance(value, FunctionType):
        for space, name in [(space, name) for space, name in _read_from(value) if (id(space), name) not in held]:
            del space[name]
        for (at, name), item in held.items():  # of its module first, in which others are found
            next(space for space in _spaces(value) if id(space) == at)[name] = item
    else:
        base, now = (type if isinstance(value, type) else object), read(value)
        for name in now.keys() - held.keys():
            base.__delattr__(value, name)
        for name in [name for name, item in held.items() if now.get(name, now) is not item]:
            base.__setattr__(value, name, held[name])


def _memory(value: Any) -> bytes | None:
    """What an array, of whatever kind, has in its memory; None of other things."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError):
        return None
    known = view.c_contiguous and not view.readonly and view.nbytes <= _LARGE and "O" not in view.format
    return view.tobytes() if known else None


def _way_back(value: Any) -> partial[Any] | None:
    """What brings a source of numbers or items to where it is now; None of what is none."""
    if isinstance(value, _NO_SOURCES):
        return None
    numpy: Any = sys.modules.get("numpy")
    match value:
        case torch.Generator():
            return partial(value.set_state, value.get_state())
        case random.Random():
            return partial(value.setstate, value.getstate())
        case IOBase():
            return partial(value.seek, value.tell()) if not value.closed and value.seekable() else None
        case Iterator() if _is_builtin(value):
            return partial(_require_untouched, value, _left(value))
        case _ if numpy is None:
            return None
        case numpy.random.RandomState():
            return partial(value.set_state, value.get_state())
        case numpy.random.Generator():
            return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        case numpy.ndarray() if value.flags.writeable and value.size <= _LARGE and not value.dtype.hasobject:
            return partial(numpy.copyto, value, value.copy())
    return None


def _has_drawn(source: Any, to_there: partial[Any]) -> bool:
    """Whether a source of random numbers, of Python's or NumPy's, is elsewhere by now."""
    of_numpy = type(source).__module__.startswith("numpy.random")
    now = _way_back(source) if of_numpy or isinstance(source, random.Random) else None
    return now is not None and pickle.dumps(now.args) != pickle.dumps(to_there.args)


def _require_untouched(source: Iterator[Any], left: list[Any]) -> None:
    if _left(source) != left:
        raise ShardError(
            f"apply: the forward takes items from a {type(source).__name__}, and other ones when it is run again: a "
            "first run is without data, and inside a transform a unit computes again. Hand over a list, such as "
            "list(items), or call next() before the forward"
        )


def _left(source: Iterator[Any], depth: int = _NEAR) -> list[Any]:
    """What is otherwise when something has been taken from an iterator, or from one that it takes from."""
    frame = getattr(source, "gi_frame", None)
    at = [] if frame is None else [frame.f_lasti, *map(id, frame.f_locals.values())]
    held = (x if isinstance(x, tuple) else (x,) for x in gc.get_referents(source))
    inner = [x for x in chain.from_iterable(held) if depth and isinstance(x, Iterator) and _is_builtin(x)]
    return [frame is None, repr(source), length_hint(source, -1), at, *(_left(x, depth - 1) for x in inner)]


def _is_builtin(value: Any) -> bool:
    return type(value).__module__ in ("builtins", "itertools")


def alike(now: Any, held: Any) -> bool:
    """Whether something holds the very values that it held."""
    if isinstance(held, set):
        return now == held
    keys = list(now) == list(held) if isinstance(held, dict) else len(now) == len(held)
    return keys and all(map(is_, _items(now), _items(held)))


def _items(held: Any) -> Any:
    return held.values() if isinstance(held, dict | types.MappingProxyType) else held or ()


def _leads_to(value: Any) -> tuple[Any, ...]:
    """What is reached through something that is not changed itself."""
    match value:
        case tuple():
            return value
        case MethodType():
            return value.__self__, value.__func__
        case BuiltinMethodType() | MethodWrapperType():
            return (value.__self__,)
        case partial():
            return value.func, value.args, value.keywords
        case types.MappingProxyType():
            return (*gc.get_referents(value),)
        case FunctionType() if not _is_foreign(value):
            return *(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__
    return ()


def users_classes(model: nn.Module) -> list[type]:
    """The classes of a model's modules, and what they inherit, that are not of a library."""
    kinds = {cls: None for module in model.modules() for cls in class_of(unwrapped(module)).__mro__}
    return [cls for cls in kinds if not _is_foreign(cls)]


def _read_from(function: FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """(namespace, name) of what a function names that its module or one of the user's has; of its attributes."""
    names = [*_names(function.__code__)]
    *spaces, attributes = _spaces(function)
    yield from ((space, name) for space in spaces for name in names if name in space)
    yield from ((attributes, name) for name in attributes)


def _spaces(function: FunctionType) -> Iterator[dict[str, Any]]:
    """What a function names is in: its module and others of the user's; last its own attributes."""
    own = {} if _is_foreign(function) else function.__globals__
    yield own
    modules = (own.get(name) for name in _names(function.__code__))
    yield from (vars(module) for module in modules if isinstance(module, ModuleType) and _is_own(module))
    yield vars(function)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _base(value: Any) -> Any:
    """The container that a value is at bottom."""
    return next(kind for kind in CONTAINERS if isinstance(value, kind))


def has_attributes(kind: type) -> bool:
    """Whether instances may have attributes; a date or a decimal number is only equal to others."""
    return kind.__dictoffset__ != 0 or is_slotted(kind)


def is_slotted(kind: type) -> bool:
    """Whether a class has slots."""
    return any("__slots__" in vars(cls) for cls in kind.__mro__[:-1])


def _attributes(value: Any) -> dict[str, Any]:
    """Those in its `__dict__` and its slots, as if it had no `__getstate__` of its own."""
    state: Any = object.__getstate__(value)
    table, slots = state if isinstance(state, tuple) else (state, None)
    return {**(slots or {}), **(table or {})}


def _is_foreign(kind: Any) -> bool:
    """Whether a class or a function is of torch, of this library, or of Python's own."""
    return (kind.__module__ or "builtins").partition(".")[0] in _FOREIGN
