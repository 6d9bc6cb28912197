"""What a shape-only trace was decided by, beside its tensors: numbers, attributes, what lists and objects hold.

[Note: guards]
A forward may go another way when a number, an attribute or an item of a list is another one. At first each that a run
could see is taken for one that it decided by: all numbers among its arguments, the attributes that it read before it
had assigned them, and what these hold. When some have changed, the run is repeated with numbers and lists in their
places that remember what they were asked (`Watch`). What was only added and multiplied, or only appended to, is no
guard from then on; a comparison is one by its outcome. So a counter and an annealed factor cost one such repetition,
and no more.

Values of tensors decide, too: `if mask.all()`, `lengths.max().item()`. A run notes what it does with the tensors whose
values it knows (`ValueReads`), and what Python is told of them. A later call does the same with its own tensors first,
as far as anything was told; when that is something else, there is another run. What `.item()` returned is a number as
the others are.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from itertools import chain, repeat, zip_longest
from operator import attrgetter, is_, is_not, methodcaller
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn._torch import attributes_read, children_of, forward_hooks, pytree
from shardfn.layout import StandIn, unwrapped
from shardfn.trace.meta_values import MetaValues, ValueReads, is_cache
from shardfn.trace.paired_sizes import methods
from shardfn.trace.state_rollback import CONTAINERS, Contents, alike, is_slotted, reach, read, users_classes

_NOTHING = object()
_VALUES: dict[int, Any] = {}  # stands for the table of what Python was told of the values of tensors
_dict_of = attrgetter("__dict__")
_values_of = methodcaller("values")
_forward_of = attrgetter("forward")
_is_there = partial(is_not, None)
_METHOD_KINDS = {FunctionType, staticmethod, classmethod, property}
_NAMES = frozenset(nn.Module().__dict__) - {"training"} | {"forward"}
_ARITHMETIC = {"mul", "multiply", "add", "sub", "subtract", "rsub", "div", "divide", "true_divide", "lerp"}

Look = Callable[["ValuePath"], Any]
Question = tuple[Callable[[Look], Any], Any]  # what was asked of places, and the answer


class ValuePath(NamedTuple):
    """Where a value is: a leaf of the arguments, an entry of a table, or a list that is there."""

    table: Any  # a dict; None for a leaf
    name: Any

    @property
    def key(self) -> tuple[int, Any]:
        return id(self.table), self.name

    def now(self, leaves: Sequence[Any]) -> Any:
        """The value."""
        return leaves[self.name] if self.table is None else self.table.get(self.name, _NOTHING)

    @property
    def holds_tensors(self) -> bool:
        """Whether it is an entry of a table, with tensors in it."""
        return self.table is not None and any(isinstance(x, Tensor) for x in pytree.tree_leaves(self.now(())))


@contextmanager
def reads_noted(model: nn.Module, places: dict[tuple[int, Any], ValuePath]) -> Iterator[None]:
    """Within it, attributes of a model's modules that are read before they are assigned are added to `places`."""
    known = {id(module): dict(vars(module)) for module in map(unwrapped, model.modules())}

    def note(module: Any, name: str) -> None:
        if name in _NAMES or id(module) not in known:
            return
        before = known[id(module)]
        table = object.__getattribute__(module, "__dict__")
        value = table.get(name, _NOTHING)
        if value is not before.get(name, _NOTHING):
            return  # the forward has assigned it
        if value is _NOTHING and name in table["_modules"]:
            table = table["_modules"]
        elif value is _NOTHING and (hasattr(nn.Module, name) or name in {**table["_parameters"], **table["_buffers"]}):
            return
        places.setdefault((id(table), name), ValuePath(table, name))

    with attributes_read(note):
        yield


class Structure:
    """The modules that a model is made of, their classes, forwards and methods, and the hooks around them."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [table for module in model.modules() if (table := children_of(module))]
        self._hooks = forward_hooks(model)
        self._methods = [vars(cls) for cls in users_classes(model)]
        self._was = self._now(model)

    def _now(self, model: nn.Module) -> list[Any]:
        children = [*chain.from_iterable(map(dict.values, self._tables))]
        inside = [model, *filter(_is_there, children)]
        kinds = [*map(type, inside)]
        forwards = map(dict.get, map(_dict_of, inside), repeat("forward"))
        forwards = [forward.original if isinstance(forward, StandIn) else forward for forward in forwards]
        methods = [x for x in chain.from_iterable(map(_values_of, self._methods)) if type(x) in _METHOD_KINDS]
        return [*children, *kinds, *forwards, *map(_forward_of, dict.fromkeys(kinds)), *methods]

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model is made as it was."""
        now = self._now(model)
        return len(now) == len(self._was) and all(map(is_, now, self._was))

    def hooks(self) -> list[Any]:
        """The hooks that there are now, each with where it is."""
        return [(id(table), signature(fn, sizes=False)) for table in filter(None, self._hooks) for fn in table.values()]


class Guards:
    """What must be as it was in a run, for the run to tell about a call."""

    VALUES = id(_VALUES), None  # the key of all that Python is told of values of tensors

    def __init__(
        self, leaves: Sequence[Any], places: Sequence[ValuePath], reads: ValueReads, holders: Sequence[Any] = ()
    ) -> None:
        """The guards of a run whose arguments have these leaves, and which read these places, values and holders."""
        positions = [at for at, x in enumerate(leaves) if not (isinstance(x, (Tensor, *_WORDS)) or is_cache(x))]
        self.places = [*(ValuePath(None, at) for at in positions), *places]
        self.values = [place.now(leaves) for place in self.places]
        cells = (read(holder) for holder in holders if isinstance(holder, CellType))
        classes = (vars(holder).items() for holder in holders if isinstance(holder, type))
        of_classes = (x for name, x in chain.from_iterable(classes) if not name.startswith("__"))
        inside = chain(chain.from_iterable(cells), of_classes)
        self.held = reach(x for x in (*self.values, *inside) if not isinstance(x, nn.Module) and not callable(x))
        self.held |= {id(holder): (holder, read(holder)) for holder in holders}
        self.questions: Sequence[Question] = ()
        self.reads, sources = reads, reads.end()
        self.sources = {at: (ValuePath({0: x}, 0), 0) for at, x in sources.items()}
        for place in (*places, *(ValuePath(None, at) for at in range(len(leaves)) if sources)):
            where = {id(leaf): at for at, leaf in enumerate(pytree.tree_leaves(place.now(leaves)))}
            self.sources |= {at: (place, where[id(x)]) for at, x in sources.items() if id(x) in where}
        self._ask_values()
        self.loose: dict[tuple[int, Any], tuple[ValuePath, Any]] = {}  # what they are about, and was there
        self._list()

    def _list(self) -> None:
        entries = [(p, v) for p, v in zip(self.places, self.values, strict=True) if p.table is not None]
        self._tables = [place.table for place, _ in entries]
        self._names = [place.name for place, _ in entries]
        self._owned = [value for _, value in entries]
        # Most are read as they are: every call does.
        self._contents = [
            (value, value if type(value) in (dict, list, set) else _only_table(value), held)
            for value, held in self.held.values()
        ]
        self._leaves = [(p.name, v) for p, v in zip(self.places, self.values, strict=True) if p.table is None]

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether all is as it was."""
        same = all(map(is_, map(dict.get, self._tables, self._names, repeat(_NOTHING)), self._owned))
        same = same and all(alike(read(value) if now is None else now, held) for value, now, held in self._contents)
        same = same and all(leaves[at] is value or _equal(leaves[at], value, self.held) for at, value in self._leaves)
        return (same or not self.broken(leaves)) and self.answered(leaves)

    def answered(self, leaves: Sequence[Any], values: bool = True) -> bool:
        """Whether all questions have the answers that they had; `values`: also those about values of tensors."""
        return answered([*self.questions, *self.of_values * values], self._look(leaves))

    def _ask_values(self, but: Set[int] = frozenset()) -> None:
        """Be guarded by what Python was told of the values of tensors, but for some."""
        told = enumerate(self.reads.told)
        self.of_values = [(methodcaller("__call__", _told_at(at)), answer) for at, answer in told if at not in but]

    def _look(self, leaves: Sequence[Any]) -> Look:
        """What is now in places."""

        @cache
        def told() -> list[Any]:
            now = {n: pytree.tree_leaves(place.now(leaves))[at] for n, (place, at) in self.sources.items()}
            with torch.no_grad():
                return self.reads.told_of(now)

        return lambda place: told()[place.name] if place.table is _VALUES else place.now(leaves)

    def broken(self, leaves: Sequence[Any]) -> list[ValuePath]:
        """The places that now hold another value; an equal one takes the place of the old one."""
        changed = []
        for at, place in enumerate(self.places):
            now = place.now(leaves)
            if now is self.values[at]:
                continue
            if _equal(now, self.values[at], self.held):
                if self.held.pop(id(self.values[at]), None) is not None:
                    self.held |= reach([now])
                self.values[at] = now
            else:
                changed.append(place)
        for key, (value, held) in list(self.held.items()):
            if alike(now := read(value), held):
                continue
            if _equal(now, held, self.held):
                self.held[key] = value, now
            elif isinstance(held, dict) and _only_table(value) is not None and held.keys() == now.keys():
                names = [name for name in held if not _equal(now[name], held[name], self.held)]
                changed += [ValuePath(vars(value), name) for name in names]
            else:
                changed += self._owners(value) or [ValuePath({0: None}, 0)]
        self._list()
        return changed

    def _owners(self, value: Any) -> list[ValuePath]:
        """The places that hold a container."""
        places = [place for place, held in zip(self.places, self.values, strict=True) if held is value]
        tables = [(_table(v), held) for v, held in self.held.values() if isinstance(held, dict)]
        entries = ((t, key) for t, held in tables for key, x in held.items() if x is value and t is not None)
        return places + [ValuePath(table, key) for table, key in entries]

    def told_alike(self, watch: "Watch") -> bool:
        """Whether Python was told the same of values there, but for those that the watch remembers."""
        pairs = zip_longest(self.reads.told, watch.known.reads.told)
        return all(mine == theirs for at, (mine, theirs) in enumerate(pairs) if at not in watch.items)

    def relaxed(self, watch: "Watch") -> bool:
        """From now on ask the watched places only what the watch has seen; False if the known run went another way."""
        known = {place.key: value for place, value in zip(self.places, self.values, strict=True)}
        for value, held in self.held.values():
            known |= {(id(_table(value)), name): x for name, x in held.items()} if isinstance(held, dict) else {}
        known |= {key: value for key, (_, value) in self.loose.items()}
        seen = list(watch.places.values())
        if not all(type(known.get(place.key, _NOTHING)) is type(value) for place, value in seen):
            return False
        known |= {_told_at(at).key: told for at, told in enumerate(self.reads.told)}
        alike = self.told_alike(watch) and answered(watch.questions, lambda place: known[place.key])
        if watch.asked or not alike:
            return False
        self._ask_values(but=watch.items)
        self.questions, self.loose = watch.questions, {place.key: (place, known[place.key]) for place, _ in seen}
        lists = {id(value) for _, value in self.loose.values()}
        self.held = {at: entry for at, entry in self.held.items() if at not in lists}
        kept = [(p, v) for p, v in zip(self.places, self.values, strict=True) if p.key not in self.loose]
        for at, (value, held) in list(self.held.items()):
            names = {name for table, name in self.loose if isinstance(held, dict) and table == id(_table(value))}
            if names and _table(value) is not None:  # the others by themselves
                del self.held[at]
                kept += [(ValuePath(_table(value), name), x) for name, x in held.items() if name not in names]
        self.places, self.values = [place for place, _ in kept], [value for _, value in kept]
        self._list()
        return True


def _told_at(number: int) -> ValuePath:
    """Where what Python was told of a value is."""
    return ValuePath(_VALUES, number)


def answered(questions: Sequence[Question], look: Look) -> bool:
    """Whether what was asked has the answers that it had."""
    try:
        return all(of(look) == answer for of, answer in questions)
    except Exception:  # it cannot be asked of what is there
        return False


def _table(value: Any) -> Any:
    return value if isinstance(value, dict) else getattr(value, "__dict__", None)


def _only_table(value: Any) -> Any:
    """The table of attributes, where an object has no others."""
    return None if is_slotted(type(value)) or isinstance(value, CONTAINERS) else getattr(value, "__dict__", None)


def _equal(a: Any, b: Any, held: Contents) -> bool:
    """Whether two values are alike for a forward."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
    if type(a) is not type(b) or isinstance(a, Tensor | nn.Module):
        return False
    if callable(a):
        return _parts(a) is not None and _equal(_parts(a), _parts(b), held)
    b = held[id(b)][1] if id(b) in held else b
    a = read(a) if isinstance(b, dict) and not isinstance(a, dict) else a
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_equal(x, y, held) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_equal(x, b[name], held) for name, x in a.items())
    try:
        return bool(a == b)
    except Exception:  # values that cannot be compared are other ones
        return False


def _parts(function: Any) -> tuple[Any, ...] | None:
    """What makes a function of Python's, or a `partial`, what it is; None of others."""
    if isinstance(function, FunctionType):
        cells = tuple(map(read, function.__closure__ or ()))
        return function.__code__, function.__defaults__, function.__kwdefaults__, cells
    return (function.func, function.args, function.keywords) if isinstance(function, partial) else None


def signature(leaf: Any, sizes: bool) -> Any:
    """What of a leaf of the arguments is always looked at; numbers and objects have places of their own."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape) if sizes else leaf.dim(), leaf.dtype, leaf.requires_grad, leaf.is_contiguous()
    if isinstance(leaf, FunctionType | MethodType):
        return leaf.__code__ if isinstance(leaf, FunctionType) else leaf.__func__
    return (type(leaf), leaf) if isinstance(leaf, _WORDS) else type(leaf)


_WORDS = (bool, str, bytes, type(None), torch.dtype, torch.device, range, Enum)


class Watch(TorchFunctionMode):
    """Puts numbers and lists that remember what they are asked into some places, in a shape-only trace."""

    serves = (int, float, list, dict, set)  # types of what it can stand for
    known: MetaValues  # of tensors, in that run

    def __init__(self, places: Sequence[ValuePath], leaves: Sequence[Any]) -> None:
        super().__init__()
        self.places = {place.key: (place, place.now(leaves)) for place in places}
        self.questions: list[Question] = []
        self.asked: set[tuple[int, Any]] = set()  # lists
        self.items: set[int] = set()  # which of the values that Python was told are remembered
        # Within it functions of Python's take what remembers.
        self.math: Any = patch.multiple(math, **{name: _followed(getattr(math, name)) for name in _MATH})

    def put(self, leaves: list[Any], known: MetaValues) -> None:
        """Put all into the modules, the objects and the leaves of a run, after which they are put back."""
        self.known = known
        for place, value in self.places.values():
            stand_in = self._stand_in(place, value)
            if place.table is None:
                leaves[1 + place.name] = stand_in  # after the path of the module that is called
            else:
                place.table[place.name] = stand_in

    def _stand_in(self, place: ValuePath, value: Any) -> Any:
        if type(value) in (int, float):
            return _number(self, value, lambda look: look(place))
        container = _CONTAINERS[type(value)](value)
        container.__dict__["ask"] = lambda: self.asked.add(place.key)
        return container

    def note(self, of: Callable[[Look], Any], answer: Any) -> Any:
        """Something was asked of a number."""
        self.questions.append((of, answer))
        return answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = any(isinstance(x, Tensor) and self.known.of(x) is not None for x in args)
        if known and func is Tensor.item:
            place, value = _told_at(len(self.known.reads.told)), func(*args)
            self.items.add(place.name)
            return _number(self, value, lambda look: look(place)[0])
        free = getattr(func, "__name__", "").strip("_").removeprefix("i") in _ARITHMETIC and not known

        def plain(x: Any) -> Any:
            if type(x) in (_Int, _Float):
                return x.value if free else self.note(x.of, x.value)
            if isinstance(x, tuple | list) and type(x) is not torch.Size:
                items = [plain(item) for item in x]
                return tuple(items) if isinstance(x, tuple) else items
            return slice(plain(x.start), plain(x.stop), plain(x.step)) if isinstance(x, slice) else x

        return func(*map(plain, args), **{key: plain(x) for key, x in (kwargs or {}).items()})


class _Number:
    """A number that remembers what it is asked; torch takes it for one of its own, and hands it to modes as it is."""

    def __init__(self, watch: Watch, value: Any, of: Callable[[Look], Any]) -> None:
        self.watch, self.value, self.of = watch, value, of

    def ask(self) -> Any:
        """The value, which something is decided by."""
        return self.watch.note(self.of, self.value)

    def __hash__(self) -> int:
        return hash(self.ask())

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self.value, name):  # torch looks for some
            raise AttributeError(name)
        return getattr(self.ask(), name)


def _number(watch: Watch, value: Any, of: Callable[[Look], Any]) -> Any:
    kinds = {int: _Int, float: _Float}
    return kinds[type(value)](watch, value, of) if type(value) in kinds else watch.note(of, value)


def _computed(function: Callable[..., Any], *numbers: Any) -> Any:
    """What a function makes of numbers; it remembers how."""
    watch = next(x.watch for x in numbers if isinstance(x, _Number))
    asked = [x.of if isinstance(x, _Number) else lambda _, x=x: x for x in numbers]
    value = function(*(x.value if isinstance(x, _Number) else x for x in numbers))
    return _number(watch, value, lambda look: function(*(of(look) for of in asked)))


def _followed(function: Callable[..., Any]) -> Any:
    """A function of `math` that also takes numbers that remember; those that C code reads do not."""

    def call(*args: Any) -> Any:
        return _computed(function, *args) if any(isinstance(x, _Number) for x in args) else function(*args)

    return call


_MATH = ("exp", "log", "sqrt", "pow", "cos", "sin", "tanh", "log1p", "expm1")
_Int: Any = type("_Int", (_Number, torch.SymInt), {"__class__": property(lambda self: int)})
_Float: Any = type("_Float", (_Number, torch.SymFloat), {"__class__": property(lambda self: float)})
for _kind in (_Int, _Float):
    for _name, _method in methods(_computed, _Number.ask, (_Int, _Float)).items():
        setattr(_kind, _name, _method)


def _telling(kind: type, silent: str) -> Any:
    """A container that tells when it is asked for something; it may be added to."""

    def method(name: str) -> Any:
        def asks(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (ask := self.__dict__.get("ask")) is not None:
                ask()
            return getattr(kind, name)(self, *args, **kwargs)

        return asks

    plain = set("__init__ __new__ __getattribute__ __setattr__ __delattr__ __class__ __init_subclass__".split())
    plain |= set("__subclasshook__ __class_getitem__ __doc__ __hash__".split()) | set(silent.split())
    return type(kind.__name__, (kind,), {name: method(name) for name in dir(kind) if name not in plain})


_SILENT = {list: "append extend insert __iadd__", dict: "__setitem__ update __ior__", set: "add update __ior__"}
_CONTAINERS = {kind: _telling(kind, silent) for kind, silent in _SILENT.items()}
