"""The user's own modules run: what asks them for a parameter gets a weight in a call, and its own outside.

[Note: tables that ask]
No copy of a model is needed: `self` in a forward, what a closure, a list or a dict of modules holds, is the object that
the user made. These stay in the modules once a call is made:

    `Weights`  the `_parameters` of every module: holds its own, which optimizers, checkpoints and walks through the
               tree find there. Whoever computes gets what the session of the call gives.
    `Buffers`  the `_buffers` of every module: whoever computes reads and assigns those of the tree.
    `Stand`    the `forward` of a unit, and of what has a parallel one or collectives around its own. Whoever computes
               gets these.

Who computes is asked at each read, by the thread that reads:

    a call goes on here               its session, or that of a call around it whose model the module belongs to
    a backward runs a node here       the forward computes again (`torch.utils.checkpoint`): the session of the call
                                      whose saved tensors this thread has read last, else of the latest one that waits
                                      for its backward. What autograd saves, and gathers, keeps sessions alive for that
    else, or gradients are added up   nobody: the module's own

So hooks of parameters and optimizers that step in a backward find shards. `Place` is what one plan, with what runs
without data have added, says of the modules; a module inside two sharded ones, each called by itself, is in two.
Attributes that hold sizes of a rank (`Policy.local_sizes`) have them while a call goes on.
"""

import copy
import copyreg
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, call, is_, methodcaller
from types import AsyncGeneratorType, CoroutineType, GeneratorType, MethodType
from typing import Any

from torch import Tensor, nn

from shardfn import _torch
from shardfn.binding.calls import CALL, GOING_ON, WAITING, Call, call_now, call_of, elsewhere, is_computing
from shardfn.binding.graphs import Forward, GraphBreak, compiled, own_code
from shardfn.layout import StandIn, class_of, patched_forward, unwrapped
from shardfn.notation import ShardError

Around = Callable[[Forward], Forward]
InnerCall = tuple[str, Any, Any]  # path of a module, arguments, keyword arguments
_own_forward_of: Callable[[dict[str, Any]], Any] = methodcaller("get", "forward")
_graph_of: Callable[[Any], Any] = attrgetter("_compiled_call_impl")
_LATER = (GeneratorType, AsyncGeneratorType, CoroutineType, map, filter)
_OURS = ("_parameters", "_buffers", "forward", "_compiled_call_impl")  # entries of modules that are replaced


@dataclass(frozen=True)
class Wiring:
    """What modules do in the calls of a plan, by their paths.

    `forwards[path]` replaces a module's forward, a function of the module; `around[path]` goes around it, and
    `compilers[path]` compiles it; with `compilers` None nothing is compiled. `vary` makes a gathered weight, by name,
    vary where it is needed so. `sizes[path]` are attributes that hold a size of this rank, by their names;
    "config.heads" is one of an object that the module has. `units` are the modules whose weights are gathered when
    their forwards begin.
    """

    forwards: Mapping[str, Forward] = field(default_factory=dict)
    around: Mapping[str, Around] = field(default_factory=dict)
    compilers: Mapping[str, _torch.Compiler] | None = None
    vary: Callable[[str, Tensor], Tensor] | None = None
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    units: Collection[str] = ()

    def compiler(self, asked: _torch.Compiler | None, path: str) -> _torch.Compiler | None:
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


class _Asks(dict[str, Any]):
    """A table of a module of which each entry is asked for, also by whoever walks through it."""

    def get(self, attribute: str, default: Any = None) -> Any:
        return self[attribute] if attribute in self else default

    def items(self) -> Any:
        return [(key, self[key]) for key in self.keys()]

    def values(self) -> Any:
        return [self[key] for key in self.keys()]

    def __iter__(self) -> Iterator[str]:
        """By a function of its own: what copies a dict then asks for each value, too."""
        return iter(self.keys())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy belongs to another module, of which no plan knows."""
        return dict, (dict(self.items()),)


class Weights(_Asks):
    """The `_parameters` of a module: see [Note: tables that ask]."""

    def __getitem__(self, attribute: str) -> Any:
        call = CALL.get()
        names = None if call is None else call.tables.get(id(self))
        if call is None or names is None:
            call = call_of(self)
            if call is None:
                return super().__getitem__(attribute)
            call.require_sizes()
            names = call.tables[id(self)]
        name = names.get(attribute)
        if name is None:
            own = super().__getitem__(attribute)
            return own if own is None else call.session.own(own)
        instead = call.instead.get((id(self), attribute)) if call.instead else None
        return call.weight(name) if instead is None else instead

    def __contains__(self, attribute: object) -> bool:
        return super().__contains__(attribute) or attribute in self.keys()

    def keys(self) -> Any:
        """One for each parameter, of which the module may hold several shards: "weight[q]", "weight[k]"."""
        call = call_of(self)
        if call is None:
            return super().keys()
        names = call.tables[id(self)]
        return dict.fromkeys(key if key in names else key.partition("[")[0] for key in super().keys())

    def __setitem__(self, attribute: str, value: Any) -> None:
        call = call_of(self)
        if call is None:
            super().__setitem__(attribute, value)
            return
        # A parameter that the forward has made is a new one; weights of a call only say of themselves that they are.
        is_plain = isinstance(value, Tensor) and not issubclass(type(value), nn.Parameter)
        if not is_plain or attribute not in call.tables[id(self)] or call.place.is_parallel:
            self._require_nobody(attribute, "assigns")  # parallel forwards would not find a value in its place
        call.instead.pop((id(self), attribute), None)
        if self[attribute] is not value:
            call.instead[id(self), attribute] = value

    def __delitem__(self, attribute: str) -> None:
        self._require_nobody(attribute, "deletes")
        super().__delitem__(attribute)

    def _require_nobody(self, attribute: str, what: str) -> None:
        """Raise when a forward changes which parameters there are.

        Raises:
            ShardError: it does.
        """
        if call_of(self) is not None:
            raise ShardError(
                f"apply: a forward {what} the parameter '{attribute}'; parameters are shards, which optimizers hold. "
                "Assign a plain tensor under another name, or change parameters between steps"
            )


class Buffers(_Asks):
    """The `_buffers` of a module: those of the tree while somebody computes with it."""

    def __init__(self, own: Mapping[str, Any], of: Weights) -> None:
        """`of`: the other table of the module."""
        super().__init__(own)
        self._of = of

    def _tree(self) -> tuple[dict[str, Any], list[str]] | None:
        """The buffers of the tree, and the names of the module in it, "block."; None of the module's own."""
        call = call_of(self._of)
        if call is None or call.session.buffers is None:
            return None
        return call.session.buffers, call.place.prefixes[id(self._of)]

    def __getitem__(self, attribute: str) -> Any:
        own, tree = super().__getitem__(attribute), self._tree()
        return own if tree is None else tree[0].get(tree[1][0] + attribute, own)

    def __setitem__(self, attribute: str, value: Any) -> None:
        tree = self._tree()
        if tree is None or value is None or dict.get(self, attribute) is None:
            super().__setitem__(attribute, value)
        buffers, prefixes = tree or ({}, [])
        _put_back(buffers, {prefix + attribute: value for prefix in prefixes})

    def __delitem__(self, attribute: str) -> None:
        super().__delitem__(attribute)
        buffers, prefixes = self._tree() or ({}, [])
        _put_back(buffers, {prefix + attribute: None for prefix in prefixes})


class Stand(StandIn):
    """Stands for the forward of a module, which it holds weakly: a cycle would keep shards."""

    def __init__(self, module: nn.Module, original: Any = None) -> None:
        """`original` is what stood for it before."""
        self._module, self.original = weakref.ref(module), original

    @_torch.left_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:  # which calls this one
            return self._own()(*args, **kwargs)
        table = module.__dict__["_parameters"]
        call = call_of(table) or elsewhere(table)
        if call is None:
            return self._own()(*args, **kwargs)
        if call is not CALL.get():  # a backward, a call of a model around the one that goes on, or in another thread
            with call.place.computes(call.session):
                return self(*args, **kwargs)
        forward = call.place.forwards.get(id(module)) or self._own()
        return forward(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own())

    def _own(self) -> Callable[..., Any]:
        """What the module would compute with.

        Raises:
            ReferenceError: there is no module any more.
        """
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward is gone")
        if self.original is not None:
            return self.original
        kind = type(module)  # whose forward may be a static method
        return next(vars(cls)["forward"] for cls in kind.__mro__ if "forward" in vars(cls)).__get__(module, kind)

    def __getattr__(self, name: str) -> Any:
        """As of a method: its name, what it belongs to."""
        if name in ("_module", "original"):
            raise AttributeError(name)
        return getattr(self._own(), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo.get(id(self._module()))
        if made is None:
            raise ShardError(
                f"copy.deepcopy: {type(self._module()).__name__} copies its attributes before memo knows its copy, "
                "whose forward would be the original's; write memo[id(self)] = copy first"
            )
        return Stand(made, copy.deepcopy(self.original, memo))

    def __reduce__(self) -> Any:
        return Stand, (self._module(), self.original)


class _Uncompiled(Stand):
    """The same for the graph of `module.compile()`: while somebody computes, what its plan says is compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        return (_torch.call_uncompiled(module) if is_computing(module) else self.original)(*args, **kwargs)


class Place:
    """What the modules of a model do in the calls of a plan."""

    def __init__(self, model: nn.Module, names: Mapping[str, Mapping[str, str]], wiring: Wiring) -> None:
        """Put tables that ask into every module; those that are there serve this plan too.

        `names[path]`: attribute -> canonical parameter. See `prepare`.
        """
        self._wiring, self.vary, self.compiles = wiring, wiring.vary, False
        self.is_parallel = bool(wiring.forwards) or wiring.vary is not None
        self.root = id(with_tables(model))
        self.tables: dict[int, Mapping[str, str]] = {}
        self.prefixes: dict[int, list[str]] = {}  # of the names of buffers
        self._modules: list[Callable[[], Any]] = []  # weak references
        self._alive: list[Weights] = []  # their tables, by whose addresses the others go
        for path, module in model.named_modules(remove_duplicate=False):
            table = with_tables(module)
            self.tables[id(table)] = {**names.get(path, {}), **self.tables.get(id(table), {})}
            self.prefixes.setdefault(id(table), []).append(f"{path}." if path else "")
            own = unwrapped(module)
            if (graph := _graph_of(own)) is not None and type(graph) is not _Uncompiled:
                vars(own)["_compiled_call_impl"] = _Uncompiled(own, graph)
            self._modules.append(weakref.ref(own))
            self._alive.append(table)
        self._counts = list(map(len, self._alive))
        self._graphs = [_graph_of(ref()) for ref in self._modules]
        self.forwards: dict[int, Forward] = {}  # by id of the module
        self._stand_for: list[Callable[[], Any]] = []
        self.has_sizes = False  # whether modules have those of a rank, in a backward
        self.sizes: list[tuple[weakref.ref[nn.Module], str, Any]] = []
        self._resolve(model, "", set(), False, None)

    def _resolve(
        self, module: nn.Module, path: str, done: set[int], inside_graph: bool, asked: _torch.Compiler | None
    ) -> None:
        """Find what a module and all in it do; `asked` is what its wrapper wants it to be compiled with."""
        module = unwrapped(module)
        if id(module) in done:
            return
        done.add(id(module))
        ref, wrapped = weakref.ref(module), _torch.compiler_of_wrapped(module)
        sizes = self._wiring.sizes.get(path, {}).items()  # a pattern may be about others of the modules that it matches
        self.sizes += [(ref, *size) for size in sizes if has_attribute(module, size[0])]
        compiler = None if inside_graph else self._wiring.compiler(asked or _torch.compiler_of(module), path)
        self.compiles |= compiler is not None
        for name, child in _torch.children_of(module).items():
            if child is not None:
                inside = inside_graph or compiler is not None
                self._resolve(child, f"{path}.{name}" if path else name, done, inside, wrapped)
        function = self._wiring.forwards.get(path)
        around = self._wiring.around.get(path)
        if compiler is not None:
            function = compiled(own_code(function or own_forward(module), module), compiler, as_usual)
        if isinstance(module, nn.RNNBase) and path not in self._wiring.forwards:
            function = _with_flat_weights(function or own_forward(module))
        if function is None and around is None and wrapped is None:
            return
        forward = _method(function or own_forward(module), ref)
        if not inside_graph:
            _torch.left_by_dynamo(forward)
        elif path in self._wiring.forwards:
            forward = GraphBreak(forward)
        self.forwards[id(module)] = forward if around is None else around(forward)
        self._stand_for.append(ref)

    @property
    def is_there(self) -> bool:
        """Whether the modules have the tables that ask, as many parameters and the graphs as before."""
        own = map(is_, map(_torch.parameters_of, map(call, self._modules)), self._alive)
        graphs = map(is_, map(_graph_of, map(call, self._modules)), self._graphs)
        return all(own) and all(graphs) and list(map(len, self._alive)) == self._counts

    def prepare(self) -> list[nn.Module]:
        """Put a `Stand` where one is needed, also around a forward that a module was given since the last call.

        Returns:
            the modules that had none.
        """
        new = list[nn.Module]()
        if set(map(type, map(_own_forward_of, map(vars, map(call, self._stand_for))))) != {Stand}:
            for module in map(call, self._stand_for):
                if type(now := _own_forward_of(vars(module))) is not Stand:
                    vars(module)["forward"] = Stand(module, now)
                    copyreg.dispatch_table[type(module)] = _reduced
                    new.append(module)
        return new

    @contextmanager
    def for_now(self) -> Iterator[None]:
        """`prepare` for as long as this goes on."""
        new = self.prepare()
        try:
            yield
        finally:
            for module in new:
                _put_back(vars(module), {"forward": vars(module)["forward"].original})

    @contextmanager
    def computes(self, session: Any) -> Iterator[None]:
        """Within it, whoever reads a parameter in this thread gets the weights of a session."""
        call, first = Call(self, session), _torch.made_before()
        token = CALL.set(call)
        GOING_ON.append(call)
        before = [_with_size(ref(), name, size) for ref, name, size in self.sizes]
        try:
            yield
        finally:
            for table, had in reversed(before):
                _put_back(table, had)
            GOING_ON.remove(call)
            CALL.reset(token)
            session.made.append((first, _torch.made_before(), call.thread))
            if all(other.session is not session for other in GOING_ON):
                session.varied.clear()  # these belong to the graph, which keeps the session

    def _have_sizes(self, *_: Any) -> None:
        """Give modules the sizes of a rank until the backward that goes on is over."""
        if self.has_sizes:
            return
        self.has_sizes = True
        before = [_with_size(ref(), name, size) for ref, name, size in self.sizes]

        def put_back() -> None:
            self.has_sizes = False
            for table, had in reversed(before):
                _put_back(table, had)

        _torch.after_backward(put_back)

    def wait(self, session: Any, output: Any) -> None:
        """The call is over, and a backward may compute again.

        Raises:
            ShardError: the output computes when the call is over, with weights that it would not get.
        """
        leaves = _torch.pytree.tree_leaves(output)
        if (later := next((leaf for leaf in leaves if isinstance(leaf, _LATER)), None)) is not None:
            raise ShardError(
                f"apply: the forward returns a {type(later).__name__.replace('_', ' ')}, which reads parameters when "
                "the call is over, and they are shards again. Return what it yields: a list, or tensors"
            )
        session.place = self
        for x in leaves:
            if isinstance(x, Tensor) and x.grad_fn is not None:  # when nothing is saved, this keeps the session
                _torch.metadata_of(x.grad_fn).setdefault("shardfn", []).append(session)
                if self.sizes:
                    x.grad_fn.register_prehook(self._have_sizes)
        WAITING[:] = [ref for ref in WAITING if ref() is not None]
        WAITING.append(session.ref)


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute, "heads", or an object that has it, "config.heads"."""
    holder, _, attribute = name.rpartition(".")
    return hasattr(module.__dict__.get(holder), attribute) if holder else hasattr(module, attribute)


def _with_size(module: nn.Module | None, name: str, size: Any) -> tuple[dict[str, Any], dict[str, Any]]:
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


def _put_back(table: dict[str, Any], had: Mapping[str, Any]) -> None:
    """Give a table what it had under some names; None: nothing."""
    for name, own in had.items():
        if own is None:
            table.pop(name, None)
        else:
            table[name] = own


def own_forward(module: nn.Module) -> Forward:
    """The forward of a module as a function of the module."""
    patched = patched_forward(module)
    if _torch.compiler_of_wrapped(module) is not None:
        return _torch.call_wrapped
    if patched is None:
        kind = class_of(module)
        is_static = isinstance(inspect.getattr_static(kind, "forward"), staticmethod)
        return _bound if is_static else kind.forward
    return patched.__func__ if isinstance(patched, MethodType) and patched.__self__ is module else _bound


def _bound(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return (patched_forward(module) or class_of(module).forward)(*args, **kwargs)


def _method(function: Forward, here: "weakref.ref[nn.Module]") -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(here(), *args, **kwargs)

    return run


@contextmanager
def as_usual(module: nn.Module) -> Iterator[None]:
    """Within it, `module` and those in it are for Dynamo as any module is: with whole weights in their tables."""
    call = call_now()
    owners = list(dict.fromkeys(chain.from_iterable((inner, unwrapped(inner)) for inner in module.modules())))
    before: list[dict[str, Any]] = [{name: vars(owner).get(name) for name in _OURS} for owner in owners]
    plain = [{name: dict(own[name].items()) for name in ("_parameters", "_buffers")} for own in before]
    for owner, own, tables in zip(owners, before, plain, strict=True):
        forward = call.place.forwards.get(id(owner)) if owner is not module else None
        if forward is None:
            forward = own["forward"].original if isinstance(own["forward"], StandIn) else own["forward"]
        _put_back(vars(owner), {**tables, "forward": forward, "_compiled_call_impl": None})
    given = [dict(tables["_buffers"]) for tables in plain]
    try:
        yield
    finally:
        for owner, own in zip(owners, before, strict=True):
            _put_back(vars(owner), own)
        for own, was, tables in zip(before, given, plain, strict=True):
            for name, value in tables["_buffers"].items():
                if value is not was.get(name):
                    own["_buffers"][name] = value


def _reduced(module: nn.Module) -> Any:
    """What makes a copy of a module: that has a forward of its own, not the one that stands for the original's."""
    made = module.__reduce_ex__(4)
    if len(made) > 2 and isinstance(made[2], dict) and isinstance(stand := made[2].get("forward"), Stand):
        state = {key: value for key, value in made[2].items() if key != "forward"}
        if stand.original is not None:
            state["forward"] = stand.original
        made = (*made[:2], state, *made[3:])
    return made


def with_tables(module: nn.Module) -> Weights:
    """The `Weights` of a module, made at need with its `Buffers`; also in the module behind one that stands before it.

    Returns:
        the `Weights`.
    """
    own = unwrapped(module)
    table, buffers = _torch.parameters_of(own), _torch.buffers_of(own)
    if type(table) is not Weights or type(buffers) is not Buffers:
        table = Weights(table)
        buffers = Buffers(buffers, table)
        _torch.set_tables(own, parameters=table, buffers=buffers)
    if _torch.parameters_of(module) is not table or _torch.buffers_of(module) is not buffers:
        _torch.set_tables(module, parameters=table, buffers=buffers)
    return table


def _with_flat_weights(forward: Forward) -> Forward:
    """An RNN's forward during which its list of weights is that of the call."""

    def run(rnn: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _torch.refresh_flat_weights(rnn)
            return forward(rnn, *args, **kwargs)
        finally:
            _torch.refresh_flat_weights(rnn, plain=True)

    return run
