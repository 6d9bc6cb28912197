"""The user's own modules run: what asks them for a parameter gets a weight in a call, and its own outside.

[Note: tables that ask]
No copy of a model is needed: `self` in a forward, what a closure, a list or a dict of modules holds, is the object that
the user made. These stay in the modules once a call is made:

    `WeightTable`     the `_parameters` of every module: holds its own, which optimizers, checkpoints and walks through
                      the tree find there. Whoever computes gets what the session of the call gives.
    `BufferTable`     the `_buffers` of every module: whoever computes reads and assigns those of the tree.
    `ForwardStandIn`  the `forward` of a unit, and of what has a parallel one or collectives around its own. Whoever
                      computes gets these.

Who computes is asked at each read, by the thread that reads:

    a call goes on here               its session, or that of a call around it whose model the module belongs to
    a backward runs a node here       the forward computes again (`torch.utils.checkpoint`): the session of the call
                                      whose saved tensors this thread has read last, else of the latest one that waits
                                      for its backward. What autograd saves, and gathers, keeps sessions alive for that
    else, or gradients are added up   nobody: the module's own

So hooks of parameters and optimizers that step in a backward find shards. `ModelBinding` is what one plan, with what
runs without data have added, says of the modules; a module inside two sharded ones, each called by itself, is in two.
Attributes that hold sizes of a rank (`Policy.local_sizes`) have them while a call goes on.
"""

import copy
import copyreg
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter, methodcaller
from threading import get_ident
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from torch import Tensor, nn

from shardfn import _torch
from shardfn.binding.compiled_forwards import Forward, GraphBreak, compiled, own_code
from shardfn.binding.forwards import Wiring, has_attribute, own_forward, put_entries, with_flat_weights, with_size
from shardfn.layout import StandIn, unwrapped
from shardfn.notation import ShardError

_own_forward_of: Callable[[dict[str, Any]], Any] = methodcaller("get", "forward")
_graph_of: Callable[[Any], Any] = attrgetter("_compiled_call_impl")
_LATER = (GeneratorType, AsyncGeneratorType, CoroutineType, map, filter)
_OURS = ("_parameters", "_buffers", "forward", "_compiled_call_impl")  # entries of modules that are replaced


class Call:
    """A computation with the weights of a call that goes on in this thread."""

    __slots__ = ("binding", "instead", "outer", "session", "tables", "thread", "weight")

    def __init__(self, binding: Any, session: Any) -> None:
        """`session`: a `Session`, or what stands for it in a shape-only trace."""
        self.binding, self.session, self.tables, self.outer = binding, session, binding.tables, CALL.get()
        self.thread = get_ident()
        # The gathered parameter of a name, as modules see it.
        varied = session.weight if binding.vary is None else partial(_varied, binding, session)
        self.weight: Callable[[str], Any] = varied
        # By table and attribute: what `torch.func.functional_call` in a forward has put in the place of a weight.
        self.instead: dict[tuple[int, str], Any] = {}

    def require_sizes(self) -> None:
        """Raise when a weight is read and the sizes of this rank are not in the attributes that hold them.

        Raises:
            ShardError: it computes again for an output that `apply` has not seen.
        """
        if self.binding.sizes and not self.binding.has_sizes and self not in GOING_ON:
            why = "a checkpoint computes a function again in which modules have other sizes, by Policy.local_sizes"
            raise ShardError(f"apply: {why}. Return the tensors that it makes, or take sizes from tensors")

    def require_others_wait(self) -> None:
        """Raise when another thread computes with the same weights, too.

        Raises:
            ShardError: it does. Ranks would then gather weights in different orders.
        """
        threads = [call.thread for call in GOING_ON if call.session is self.session]
        if threads[-1] != self.thread or len(set(threads)) > _MOST_THREADS:
            why = "apply: two threads compute with the weights of one call at once, maybe in another order on each rank"
            raise ShardError(f"{why}. Let the forward wait for a thread before it computes, or starts another one")


def _varied(binding: Any, session: Any, name: str) -> Tensor:
    assert binding.vary is not None
    call = CALL.get()
    if call is not None and call.session is session:
        return binding.vary(name, session.weight(name))
    with binding.computes(session):  # a function computes again, and no module that has begun
        return binding.vary(name, session.weight(name))


CALL: "ContextVar[Call | None]" = ContextVar("call", default=None)
GOING_ON: list[Call] = []  # calls in any thread, the latest last
_MOST_THREADS = 2  # with the weights of one call: its own, which waits for the other one
WAITING: list[weakref.ref[Any]] = []  # sessions of calls whose graph is there, the latest last


def call_now() -> Call:
    """The innermost call that goes on in this thread."""
    call = CALL.get()
    assert call is not None
    if len(GOING_ON) > 1:
        call.require_others_wait()
    return call


def weight_now(name: str) -> Any:
    """A gathered parameter of that call, by its canonical name."""
    call = CALL.get()
    assert call is not None
    return call.weight(name)


def call_of(table: Any) -> Call | None:
    """The call in which this thread computes with the parameters of a module's table, if there is one.

    Raises:
        ShardError: a forward computes again, and nobody can tell in which call.
    """
    call, key = CALL.get(), id(table)
    while call is not None and key not in call.tables:
        call = call.outer
    if call is None and WAITING and (node := _torch.node_that_runs()) is not None:
        return None if type(node).__name__ == "AccumulateGrad" else _waiting(key, node)
    return call


def escaped(error: RuntimeError) -> ShardError | None:
    """What to say of torch's refusal to compute with a shard, if `error` is that: somebody read it in no call."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    return ShardError(
        "apply: a shard meets a tensor. The forward has it from a module that is not in this model (as closures of a "
        "copied model do), from another thread, or from before the call; in its own thread, parameters of the model's "
        f"modules are weights. torch says: {error}"
    )


def is_computing(module: nn.Module) -> bool:
    """Whether this thread computes with the parameters of a module, in a call of it or of one that holds it."""
    table = module.__dict__["_parameters"]
    return call_of(table) is not None or elsewhere(table) is not None


def elsewhere(table: Any) -> Call | None:
    """The call in another thread for which this one computes a module: one inside of the model, and not all of it."""
    key = id(table)
    return next((call for call in reversed(GOING_ON) if key in call.tables and key != call.binding.root), None)


def _waiting(key: int, node: Any) -> Call | None:
    """The call, of those that wait for a backward, whose forward made a node and computes again.

    Raises:
        ShardError: it may be one of several.
    """
    alive = [session for ref in WAITING if (session := ref()) is not None and key in session.binding.tables]
    number = _torch.number_of(node)
    spans = [(end - first, s, thread) for s in alive for first, end, thread in s.made if first <= number < end]
    if spans and len({thread for *_, thread in spans}) == 1:
        alive = [min(spans, key=itemgetter(0))[1]]
    elif spans:
        alive = [session for _, session, _ in spans]
    if any(session.binding is not alive[-1].binding or not session.has_weights_of(alive[-1]) for session in alive):
        raise ShardError(
            "a checkpoint computes a forward again while the outputs of several calls wait for their backward, which "
            "were made in other precision or of other modules, and it is not known which one it belongs to. Run the "
            "backward of one before the next call, or the call that needs none under torch.no_grad()"
        )
    return Call(alive[-1].binding, alive[-1]) if alive else None


class _LookupTable(dict[str, Any]):
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


class WeightTable(_LookupTable):
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
            parameter = super().__getitem__(attribute)
            return parameter if parameter is None else call.session.not_in_tree(parameter)
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
        # A parameter that the forward has made is a new one; weights of a call only say of themselves that they are. A
        # frozen one around the same memory is what bitsandbytes makes in each call.
        is_plain = isinstance(value, Tensor) and not issubclass(type(value), nn.Parameter)
        own = dict.get(self, attribute)
        frozen = own is not None and isinstance(value, Tensor) and not (own.requires_grad or value.requires_grad)
        wraps = frozen and value.data_ptr() == self[attribute].data_ptr()
        if not (is_plain or wraps) or attribute not in call.tables[id(self)] or call.binding.is_parallel:
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
            why = f"apply: a forward {what} the parameter '{attribute}'; parameters are shards, which optimizers hold"
            raise ShardError(f"{why}. Assign a plain tensor under another name, or change parameters between steps")


class BufferTable(_LookupTable):
    """The `_buffers` of a module: those of the tree while somebody computes with it."""

    def __init__(self, entries: Mapping[str, Any], of: WeightTable) -> None:
        """`of`: the other table of the module."""
        super().__init__(entries)
        self._of = of

    def _tree(self) -> tuple[dict[str, Any], list[str]] | None:
        """The buffers of the tree, and the names of the module in it, "block."; None of the module's own."""
        call = call_of(self._of)
        if call is None or call.session.buffers is None:
            return None
        return call.session.buffers, call.binding.prefixes[id(self._of)]

    def __getitem__(self, attribute: str) -> Any:
        buffer, tree = super().__getitem__(attribute), self._tree()
        return buffer if tree is None else tree[0].get(tree[1][0] + attribute, buffer)

    def __setitem__(self, attribute: str, value: Any) -> None:
        tree = self._tree()
        if tree is None or value is None or dict.get(self, attribute) is None:
            super().__setitem__(attribute, value)
        buffers, prefixes = tree or ({}, [])
        put_entries(buffers, {prefix + attribute: value for prefix in prefixes})

    def __delitem__(self, attribute: str) -> None:
        super().__delitem__(attribute)
        buffers, prefixes = self._tree() or ({}, [])
        put_entries(buffers, {prefix + attribute: None for prefix in prefixes})


class ForwardStandIn(StandIn):
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
            with call.binding.computes(call.session):
                return self(*args, **kwargs)
        forward = call.binding.forwards.get(id(module)) or self._own()
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
        copied = memo.get(id(self._module()))
        if copied is None:
            why = f"copy.deepcopy: {type(self._module()).__name__} copies its attributes before memo knows its copy"
            raise ShardError(f"{why}, whose forward would be the original's; write memo[id(self)] = copy first")
        return ForwardStandIn(copied, copy.deepcopy(self.original, memo))

    def __reduce__(self) -> Any:
        return ForwardStandIn, (self._module(), self.original)


class _Uncompiled(ForwardStandIn):
    """The same for the graph of `module.compile()`: while somebody computes, what its plan says is compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        return (_torch.call_uncompiled(module) if is_computing(module) else self.original)(*args, **kwargs)


class ModelBinding:
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
        self._alive: list[WeightTable] = []  # their tables, by whose addresses the others go
        for path, module in model.named_modules(remove_duplicate=False):
            table = with_tables(module)
            self.tables[id(table)] = {**names.get(path, {}), **self.tables.get(id(table), {})}
            self.prefixes.setdefault(id(table), []).append(f"{path}." if path else "")
            inner = unwrapped(module)
            if (graph := _graph_of(inner)) is not None and type(graph) is not _Uncompiled:
                vars(inner)["_compiled_call_impl"] = _Uncompiled(inner, graph)
            self._modules.append(weakref.ref(inner))
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
            function = partial(with_flat_weights, function or own_forward(module))
        if function is None and around is None and wrapped is None:
            return
        forward = partial(_method, function or own_forward(module), ref)
        if inside_graph and path in self._wiring.forwards:
            forward = GraphBreak(forward)
        self.forwards[id(module)] = forward if around is None else around(forward)
        self._stand_for.append(ref)

    @property
    def is_there(self) -> bool:
        """Whether the modules have the tables that ask, as many parameters and the graphs as before."""
        tables = map(is_, map(_torch.parameters_of, map(call, self._modules)), self._alive)
        graphs = map(is_, map(_graph_of, map(call, self._modules)), self._graphs)
        return all(tables) and all(graphs) and list(map(len, self._alive)) == self._counts

    def prepare(self) -> list[nn.Module]:
        """Put a `ForwardStandIn` where one is needed, also around a forward that a module has got since the last call.

        Returns:
            the modules that had none.
        """
        new = list[nn.Module]()
        if set(map(type, map(_own_forward_of, map(vars, map(call, self._stand_for))))) != {ForwardStandIn}:
            for module in map(call, self._stand_for):
                if type(now := _own_forward_of(vars(module))) is not ForwardStandIn:
                    vars(module)["forward"] = ForwardStandIn(module, now)
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
                put_entries(vars(module), {"forward": vars(module)["forward"].original})

    @contextmanager
    def computes(self, session: Any) -> Iterator[None]:
        """Within it, whoever reads a parameter in this thread gets the weights of a session."""
        call, first = Call(self, session), _torch.made_before()
        token = CALL.set(call)
        GOING_ON.append(call)
        before = [with_size(ref(), name, size) for ref, name, size in self.sizes]
        try:
            yield
        finally:
            for table, had in reversed(before):
                put_entries(table, had)
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
        before = [with_size(ref(), name, size) for ref, name, size in self.sizes]

        def put_back() -> None:
            self.has_sizes = False
            for table, had in reversed(before):
                put_entries(table, had)

        _torch.after_backward(put_back)

    def wait(self, session: Any, output: Any) -> None:
        """The call is over, and a backward may compute again.

        Raises:
            ShardError: the output computes when the call is over, with weights that it would not get.
        """
        leaves = _torch.pytree.tree_leaves(output)
        if (later := next((leaf for leaf in leaves if isinstance(leaf, _LATER)), None)) is not None:
            kind = type(later).__name__.replace("_", " ")
            why = f"apply: the forward returns a {kind}, which reads parameters when the call is over"
            raise ShardError(f"{why}, and they are shards again. Return what it yields: a list, or tensors")
        session.binding = self
        for x in leaves:
            if isinstance(x, Tensor) and x.grad_fn is not None:  # when nothing is saved, this keeps the session
                _torch.metadata_of(x.grad_fn).setdefault("shardfn", []).append(session)
                if self.sizes:
                    x.grad_fn.register_prehook(self._have_sizes)
        WAITING[:] = [ref for ref in WAITING if ref() is not None]
        WAITING.append(session.ref)


def _method(function: Forward, here: "weakref.ref[nn.Module]", /, *args: Any, **kwargs: Any) -> Any:
    return function(here(), *args, **kwargs)


@contextmanager
def as_usual(module: nn.Module) -> Iterator[None]:
    """Within it, `module` and those in it are for Dynamo as any module is: with whole weights in their tables."""
    call = call_now()
    owners = list(dict.fromkeys(chain.from_iterable((inner, unwrapped(inner)) for inner in module.modules())))
    before: list[dict[str, Any]] = [{name: vars(owner).get(name) for name in _OURS} for owner in owners]
    plain = [{name: dict(saved[name].items()) for name in ("_parameters", "_buffers")} for saved in before]
    for owner, saved, tables in zip(owners, before, plain, strict=True):
        forward = call.binding.forwards.get(id(owner)) if owner is not module else None
        if forward is None:
            forward = saved["forward"].original if isinstance(saved["forward"], StandIn) else saved["forward"]
        put_entries(vars(owner), {**tables, "forward": forward, "_compiled_call_impl": None})
    buffers = [dict(tables["_buffers"]) for tables in plain]
    try:
        yield
    finally:
        for owner, saved in zip(owners, before, strict=True):
            put_entries(vars(owner), saved)
        for saved, was, tables in zip(before, buffers, plain, strict=True):
            for name, value in tables["_buffers"].items():
                if value is not was.get(name):
                    saved["_buffers"][name] = value


def _reduced(module: nn.Module) -> Any:
    """What makes a copy of a module: that has a forward of its own, not the one that stands for the original's."""
    reduced = module.__reduce_ex__(4)
    had = reduced[2] if len(reduced) > 2 and isinstance(reduced[2], dict) else {}
    if isinstance(stand := had.get("forward"), ForwardStandIn):
        state = {key: value for key, value in had.items() if key != "forward"}
        if stand.original is not None:
            state["forward"] = stand.original
        reduced = (*reduced[:2], state, *reduced[3:])
    return reduced


def with_tables(module: nn.Module) -> WeightTable:
    """The `WeightTable` of a module, made at need with its `BufferTable`; also in one behind a stand-in.

    Returns:
        the `WeightTable`.
    """
    inner = unwrapped(module)
    table, buffers = _torch.parameters_of(inner), _torch.buffers_of(inner)
    if type(table) is not WeightTable or type(buffers) is not BufferTable:
        table = WeightTable(table)
        buffers = BufferTable(buffers, table)
        _torch.set_tables(inner, parameters=table, buffers=buffers)
    if _torch.parameters_of(module) is not table or _torch.buffers_of(module) is not buffers:
        _torch.set_tables(module, parameters=table, buffers=buffers)
    return table
