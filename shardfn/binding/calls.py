"""Calls that go on: whose weights a module computes with, asked by the thread that reads."""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from shardfn import _torch
from shardfn.notation import ShardError


class Call:
    """A computation with the weights of a call that goes on in this thread."""

    __slots__ = ("instead", "outer", "place", "session", "tables", "thread", "weight")

    def __init__(self, place: Any, session: Any) -> None:
        """`session`: a `Session`, or what stands for it in a run without data."""
        self.place, self.session, self.tables, self.outer = place, session, place.tables, CALL.get()
        self.thread = get_ident()
        # The gathered parameter of a name, as modules see it.
        self.weight: Callable[[str], Any] = session.weight if place.vary is None else partial(_varied, place, session)
        # By table and attribute: what `torch.func.functional_call` in a forward has put in the place of a weight.
        self.instead: dict[tuple[int, str], Any] = {}

    def require_sizes(self) -> None:
        """Raise when a weight is read and the sizes of this rank are not in the attributes that hold them.

        Raises:
            ShardError: it computes again for an output that `apply` has not seen.
        """
        if self.place.sizes and not self.place.has_sizes and self not in GOING_ON:
            raise ShardError(
                "apply: a checkpoint computes a function again in which modules have other sizes, by "
                "Policy.local_sizes. Return the tensors that it makes, or take sizes from tensors"
            )

    def require_others_wait(self) -> None:
        """Raise when another thread computes with the same weights, too.

        Raises:
            ShardError: it does. Ranks would then gather weights in different orders.
        """
        threads = [call.thread for call in GOING_ON if call.session is self.session]
        if threads[-1] != self.thread or len(set(threads)) > _MOST_THREADS:
            raise ShardError(
                "apply: two threads compute with the weights of one call at once, in an order that may differ from "
                "rank to rank. Let the forward wait for a thread before it computes itself, or starts another one"
            )


def _varied(place: Any, session: Any, name: str) -> Tensor:
    assert place.vary is not None
    call = CALL.get()
    if call is not None and call.session is session:
        return place.vary(name, session.weight(name))
    with place.computes(session):  # a function computes again, and no module that has begun
        return place.vary(name, session.weight(name))


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
    return next((call for call in reversed(GOING_ON) if key in call.tables and key != call.place.root), None)


def _waiting(key: int, node: Any) -> Call | None:
    """The call, of those that wait for a backward, whose forward made a node and computes again.

    Raises:
        ShardError: it may be one of several.
    """
    alive = [session for ref in WAITING if (session := ref()) is not None and key in session.place.tables]
    number = _torch.number_of(node)
    spans = [(end - first, s, thread) for s in alive for first, end, thread in s.made if first <= number < end]
    if spans and len({thread for *_, thread in spans}) == 1:
        alive = [min(spans, key=itemgetter(0))[1]]
    elif spans:
        alive = [session for _, session, _ in spans]
    if any(session.place is not alive[-1].place or not session.has_weights_of(alive[-1]) for session in alive):
        raise ShardError(
            "a checkpoint computes a forward again while the outputs of several calls wait for their backward, which "
            "were made in other precision or of other modules, and it is not known which one it belongs to. Run the "
            "backward of one before the next call, or the call that needs none under torch.no_grad()"
        )
    return Call(alive[-1].place, alive[-1]) if alive else None
