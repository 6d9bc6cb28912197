"""The user's own modules run: what asks them for a parameter gets a weight in a call, and a shard outside. Layer 3.

[Note: tables that ask]
The classes own their model, so that no copy of it is needed: `self` in a forward, what a closure, a list or a dict of
modules holds, is the object that the user made. Two things stay in the modules for good, once a plan is known:

    `Table`    the `_parameters` of every module: holds the shards, which optimizers, checkpoints and walks through the
               tree find there. Whoever computes gets what the session of the call gives.
    `Stand`    the `forward` of every unit, and of RNNs, which read their weights from a list: begins and ends the unit
               around the module's own. It sees no difference.

Who computes is asked at each read, by the thread that reads:

    a call goes on here               its session, or that of a call around it whose model the module belongs to
    a backward runs a node here       the forward computes again (`torch.utils.checkpoint`): the session of the call
                                      whose saved tensors this thread has read last, else of the latest one that waits
                                      for its backward. What autograd saves, and gathers, keeps sessions alive for that
    else, or gradients are added up   nobody: shards

So hooks of parameters and optimizers that step in a backward find shards. `Place` is what one plan says of the modules;
a module inside two sharded ones, each called by itself, is in two of them.
"""

import copy
import copyreg
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from torch import Tensor, nn

from shardfn._torch import metadata_of, node_that_runs, parameters_of, pytree, refresh_flat_weights, set_tables
from shardfn.core.engine.gathered import UNPACKED
from shardfn.core.engine.session import Session
from shardfn.core.errors import ShardError
from shardfn.core.model import StandIn, submodule, unwrapped
from shardfn.core.plan import Plan

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
_LATER = (GeneratorType, AsyncGeneratorType, CoroutineType, map, filter)


class _Call:
    """A call that goes on in this thread."""

    __slots__ = ("instead", "outer", "place", "session", "tables", "thread")

    def __init__(self, place: "Place", session: Session) -> None:
        self.place, self.session, self.tables, self.outer = place, session, place.tables, _CALL.get()
        self.thread = get_ident()
        # By table and attribute: what `torch.func.functional_call` in a forward has put in the place of a weight.
        self.instead: dict[tuple[int, str], Any] = {}

    def use_instead(self, table: "Table", attribute: str, value: Tensor) -> None:
        """Have `value` for a weight; the weight itself for its place again."""
        self.instead.pop((id(table), attribute), None)
        if table[attribute] is not value:
            self.instead[id(table), attribute] = value

    def weight(self, table: int, attribute: str, name: str) -> Any:
        """That of the session, or what is used instead of it."""
        weight = self.instead.get((table, attribute)) if self.instead else None
        return self.session.weight(name) if weight is None else weight

    def require_others_wait(self) -> None:
        """Raise when another thread computes with the same weights, too.

        Raises:
            ShardError: it does. Ranks would then gather weights in different orders.
        """
        threads = [call.thread for call in _GOING_ON if call.session is self.session]
        if threads[-1] != self.thread or len(set(threads)) > _MOST_THREADS:
            raise ShardError(
                "apply: two threads compute with the weights of one call at once, in an order that may differ from "
                "rank to rank. Let the forward wait for a thread before it computes itself, or starts another one"
            )


_CALL: "ContextVar[_Call | None]" = ContextVar("call", default=None)
_GOING_ON: list[_Call] = []  # calls in any thread, the latest last
_MOST_THREADS = 2  # with the weights of one call: its own, which waits for the other one
_WAITING: list[weakref.ref[Session]] = []  # sessions of calls whose graph is there, the latest last


class Table(dict[str, Any]):
    """The `_parameters` of a module: see [Note: tables that ask]."""

    def __getitem__(self, attribute: str) -> Any:
        call = _CALL.get()
        names = None if call is None else call.tables.get(id(self))
        if call is None or names is None:
            call = call_of(self)
            names = None if call is None else call.tables[id(self)]
        name = None if names is None else names.get(attribute)
        if call is None or name is None:
            return super().__getitem__(attribute)
        return call.weight(id(self), attribute, name) if call.instead else call.session.weight(name)

    def get(self, attribute: str, default: Any = None) -> Any:
        return self[attribute] if attribute in self else default

    def items(self) -> Any:
        return super().items() if call_of(self) is None else [(key, self[key]) for key in super().keys()]

    def values(self) -> Any:
        return super().values() if call_of(self) is None else [self[key] for key in super().keys()]

    def __iter__(self) -> Iterator[str]:
        """By a function of its own: what copies a dict then asks for each value, too."""
        return iter(super().keys())

    def __setitem__(self, attribute: str, value: Any) -> None:
        call = call_of(self)
        if call is None:
            super().__setitem__(attribute, value)
        elif isinstance(value, Tensor) and not _is_new(value) and call.tables[id(self)].get(attribute):
            call.use_instead(self, attribute, value)
        else:
            self._require_nobody(attribute, "assigns")

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy belongs to another module, which nobody has sharded."""
        return dict, (dict(self.items()),)


def _is_new(value: Tensor) -> bool:
    """Whether it is a parameter that a forward has made; weights of a call only say of themselves that they are one."""
    return issubclass(type(value), nn.Parameter)


class Stand(StandIn):
    """Stands for the forward of a module, which it holds weakly: a cycle would keep shards."""

    def __init__(self, module: nn.Module, original: Any = None) -> None:
        """`original` is what stood for it before."""
        self._module, self.original = weakref.ref(module), original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, module = self._own(), self._module()
        assert module is not None
        call = call_of(module.__dict__["_parameters"]) or _elsewhere(module.__dict__["_parameters"])
        if call is None:
            return forward(*args, **kwargs)
        if call is not _CALL.get():  # a backward, a call of a model around the one that goes on, or in another thread
            with call.place.computes(call.session):
                return self(*args, **kwargs)
        if isinstance(module, nn.RNNBase):
            forward = _with_flat_weights(module, forward)
        unit, cast = call.place.units.get(id(module), (None, None))
        if unit is None:
            return forward(*args, **kwargs)
        if cast is not None:
            forward = cast(forward)
        if len(_GOING_ON) > 1:
            call.require_others_wait()
        call.session.enter(unit)
        try:
            return forward(*args, **kwargs)
        finally:
            call.session.leave(unit)

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


class Place:
    """What the modules of a model do in the calls of a plan."""

    def __init__(self, model: nn.Module, plan: Plan, casts: Mapping[str, Around]) -> None:
        """Put a `Table` into every module, and a `Stand` where one is needed; those that are there serve this plan too.

        `casts` go around the forwards of units.
        """
        names = plan.canonical
        owned = {module.name: {key: names[name] for key, name in module.params} for module in plan.info.modules}
        self.tables: dict[int, Mapping[str, str]] = {}
        self.root = id(with_table(model))
        self._alive: list[Table] = []  # by whose addresses `tables` goes
        for path, module in model.named_modules(remove_duplicate=False):
            table = with_table(module)
            self.tables[id(table)] = owned.get(path, {}) | dict(self.tables.get(id(table), {}))
            self._alive.append(table)
        units = {unit.name: unwrapped(submodule(model, unit.name)) for unit in plan.units if unit.name}
        self.units: dict[int, tuple[str, Around | None]] = {  # by id of the module
            id(module): (path, casts.get(path)) for path, module in units.items()
        }
        lists = [own for module in model.modules() if isinstance(own := unwrapped(module), nn.RNNBase)]
        self._stand_for = [weakref.ref(module) for module in {id(x): x for x in (*units.values(), *lists)}.values()]
        self.prepare()

    def prepare(self) -> None:
        """Put a `Stand` where one is needed, also around a forward that a module was given since the last call."""
        for ref in self._stand_for:
            if (module := ref()) is not None and type(now := module.__dict__.get("forward")) is not Stand:
                module.__dict__["forward"] = Stand(module, now)
                copyreg.dispatch_table[type(module)] = _reduced

    @contextmanager
    def computes(self, session: Session) -> Iterator[None]:
        """Within it, whoever reads a parameter in this thread gets the weights of a session."""
        call = _Call(self, session)
        token = _CALL.set(call)
        _GOING_ON.append(call)
        try:
            yield
        finally:
            _GOING_ON.remove(call)
            _CALL.reset(token)

    def wait(self, session: Session, output: Any) -> None:
        """The call is over, and a backward may compute again.

        Raises:
            ShardError: the output computes when the call is over, with weights that it would not get.
        """
        leaves = pytree.tree_leaves(output)
        if (later := next((leaf for leaf in leaves if isinstance(leaf, _LATER)), None)) is not None:
            raise ShardError(
                f"apply: the forward returns a {type(later).__name__.replace('_', ' ')}, which reads parameters when "
                "the call is over, and they are shards again. Return what it yields: a list, or tensors"
            )
        session.place = self
        for x in leaves:
            if isinstance(x, Tensor) and x.grad_fn is not None:  # when nothing is saved, this keeps the session
                metadata_of(x.grad_fn).setdefault("shardfn", []).append(session)
        _WAITING[:] = [ref for ref in _WAITING if ref() is not None]
        _WAITING.append(session.ref)


def _reduced(module: nn.Module) -> Any:
    """What makes a copy of a module: that has a forward of its own, not the one that stands for the original's."""
    made = module.__reduce_ex__(4)
    if len(made) > 2 and isinstance(made[2], dict) and isinstance(stand := made[2].get("forward"), Stand):
        state = {key: value for key, value in made[2].items() if key != "forward"}
        if stand.original is not None:
            state["forward"] = stand.original
        made = (*made[:2], state, *made[3:])
    return made


def call_of(table: Any) -> _Call | None:
    """The call in which this thread computes with the parameters of a module's table, if there is one.

    Raises:
        ShardError: a forward computes again, and nobody can tell in which call.
    """
    call, key = _CALL.get(), id(table)
    while call is not None and key not in call.tables:
        call = call.outer
    if call is None and _WAITING and (node := node_that_runs()) is not None:
        return None if type(node).__name__ == "AccumulateGrad" else _waiting(key)
    return call


def runs_in_place(plan: Plan) -> bool:
    """Whether modules compute a plan's forward by themselves: with whole weights in their shapes, and no graphs."""
    policy = plan.policy
    others = plan.splits_compute or policy.acts or plan.forwards or policy.compile is not False
    return not others and all(layout.plain for layout in plan.layouts.values())


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
    return call_of(table) is not None or _elsewhere(table) is not None


def _elsewhere(table: Any) -> _Call | None:
    """The call in another thread for which this one computes a module: one inside of the model, and not all of it."""
    key = id(table)
    return next((call for call in reversed(_GOING_ON) if key in call.tables and key != call.place.root), None)


def _waiting(key: int) -> _Call | None:
    """The call, of those that wait for a backward, whose forward computes again with the module of a table."""
    read = UNPACKED.session and UNPACKED.session()
    if read is not None and read.place is not None and key in read.place.tables:
        return _Call(read.place, read)
    alive = [session for ref in _WAITING if (session := ref()) is not None and key in session.place.tables]
    asked = [session for session in alive if not session.went_back]
    if any(session.place is not asked[-1].place for session in asked):
        raise ShardError(
            "a checkpoint computes a forward again while the outputs of several calls wait for their backward, which "
            "were made in other precision or of other modules, and it is not known which one it belongs to. Run the "
            "backward of one before the next call, or the call that needs none under torch.no_grad()"
        )
    found = (asked or alive)[-1:]
    return _Call(found[0].place, found[0]) if found else None


def with_table(module: nn.Module) -> Table:
    """The `Table` of a module, made at need; in the module behind one that stands before it, too."""
    table = parameters_of(module)
    if not isinstance(table, Table):
        table = Table(table)
        set_tables(unwrapped(module), parameters=table)
    if parameters_of(module) is not table:
        set_tables(module, parameters=table)
    return table


def _with_flat_weights(rnn: nn.RNNBase, forward: Callable[..., Any]) -> Callable[..., Any]:
    """An RNN's forward during which its list of weights is that of the call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            refresh_flat_weights(rnn)
            return forward(*args, **kwargs)
        finally:
            refresh_flat_weights(rnn, plain=True)

    return run
