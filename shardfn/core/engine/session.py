"""The weights of one `apply`: gathered just in time, freed after their unit, gathered again for its backward. Layer 3.

    forward                                             backward
    enter unit 1                                        first saved weight of unit 2 is asked for
      first weight asked for: wait for its gather         wait for its gather again
      start the gather of unit 2                          start the gather again of unit 1
      compute                                             compute
    leave unit 1: let go of its weights                 its gradients are here: let go of its weights
    enter unit 2 ...                                      wait for those of the unit before, start to reduce these

[Note: who keeps a gathered weight alive]
    from `enter` to `leave` of its unit     the session (`_live`)
    between forward and backward            nobody: autograd saves views of it, and the pack hook replaces each view
                                            of a gathered storage by (bucket, offset, size, stride); with `regather=n`
                                            the n-th part of it (`_kept`), with False everything, by the graph
    in the backward of the unit             `Gathered`, from the first unpack until the bucket's gradients arrive
These are all collectives over data axes: one all-gather a bucket in each column, and one reduction (an all-reduce more
over `replicate`). Those over compute axes are in tensor_parallel.py, that of the loss is in transforms.py, and
docs/design.md follows a whole step. The root unit is gathered first and, unless the policy frees it too, kept until its
backward: its views are saved as they are. A bucket that needs no collective (one data rank, or replicated weights) has
nothing to free. Memory comes from the buckets' pool, which hands it out again when nobody refers to it.
"""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import (
    after_backward,
    backward_id,
    call_parameters,
    dispatch_modes,
    has_gradient_hooks,
    in_selective_checkpoint,
    in_transform,
    innermost_transform,
    out_of_inference_mode,
    outside_dispatch,
    outside_transforms,
    simulated,
    storage_key,
    unwrap_local,
    unwrap_locals,
    versions_of,
)
from shardfn.core.buckets import BucketOnGrid, Flight, GatherBucket, ReduceBucket
from shardfn.core.dropout import Masks
from shardfn.core.engine.gathered import UNPACKED, Activation, Gathered, Uncopied, saved_hooks
from shardfn.core.engine.gradients import (
    Accumulation,
    Gradients,
    Reductions,
    goes_into_grad,
    hold_back,
    reduce_held_back,
    waiting,
    with_held_back,
)
from shardfn.core.engine.order import Event
from shardfn.core.engine.remat import Borrowed
from shardfn.core.engine.runtime import runtime_of
from shardfn.core.engine.weights import AsPlaced
from shardfn.core.errors import ShardError
from shardfn.core.layout import compute_view
from shardfn.core.mesh import Grid
from shardfn.core.plan import Bucket, Plan, Unit
from shardfn.core.underway import asks

_first: Callable[[Any], Any] = itemgetter(0)
_UNITS_REGATHERED = 2  # how many units may be whole at the same time in a backward


def _never(unit: str) -> bool:
    return False


def _refuse(written: str) -> None:
    """Raise for a weight that a forward has written in place, unless the forward raises itself."""
    if sys.exception() is None:
        raise RuntimeError(
            f"'{written}' was changed in place by the forward, in the copy that was gathered for it: the change is "
            "lost. Make it a buffer, or update the tree of parameters between steps."
        )


class CurrentSession:
    """The session that modules get their weights from, call after call. It knows nothing of them."""

    session: "Session | None" = None

    def weight(self, name: str) -> Tensor:
        """That of the session."""
        assert self.session is not None
        return self.session.weight(name)


class Session:
    """Gives a module its weights by parameter name, in the shapes that it computes with."""

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        leaves: Mapping[str, Tensor],
        gradients: Gradients | None,
        mode: Hashable,
        in_place: bool = False,
    ) -> None:
        """`mode` tells apart calls that may ask for units in different orders; `in_place`: the modules compute."""
        self.plan, self.grid, self.leaves, self.gradients = plan, grid, leaves, gradients
        self.in_place = in_place
        # What `value_and_grad` made its fresh leaves of: their owner may still change them.
        self.sources: Mapping[str, Tensor] | None = getattr(leaves, "sources", None)
        self.holds_back: Callable[[str], bool] = getattr(leaves, "holds_back", None) or _never
        self.scale_of_gradients: Callable[[str], float] | None = getattr(leaves, "scale_of_gradients", None)
        self.runtime = runtime_of(plan, grid)
        self.runtime.begin()
        self._differentiates = torch.is_grad_enabled()
        # A transform wraps the leaves: only an autograd.Function sees the shards.
        self.in_transform = in_transform()
        self._only: str | None = None  # the unit that computes again
        self.keeps: Any = None  # what units that compute again need when the call is over
        self.masks: Masks | None = None  # those of a `dropout_seed`
        start = mode, self._differentiates
        self._at: dict[str, Hashable] = {"weights": ("weights", *start), "gradients": ("gradients", *start)}
        self._weights: dict[str, Tensor] = {}  # of all live units
        self._versions: dict[str, int] = {}  # of their whole leaves, when they were gathered
        self._live: set[str] = set()
        self._depth: dict[str, int] = {}
        self._holds = False  # weights until the call ends
        self._started: dict[Event, Flight] = {}
        self._by_storage: dict[int, Gathered] = {}
        self._uncopied: dict[int, list[Uncopied]] = {}  # by storage
        self._activations: dict[int, Activation] = {}  # of modules that are running, by storage
        # Weak: the graph and its packed views keep these alive, and each keeps the session.
        self._passed: dict[Event, list[weakref.ref[Gathered]]] = {}  # freed by the forward, the last one at the end
        self._regathered: list[weakref.ref[Gathered]] = []
        self._backwards: set[int] = set()  # under way; one that failed is never over
        self.went_back = False  # whether one is over
        self.ref = weakref.ref(self)
        self.place: Any = None  # the modules that compute, when those are the user's own and may compute again
        self._accumulations: dict[int, Accumulation] = {}  # by backward

    # -- forward ------------------------------------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        """The gathered parameter, [whole over data, split over compute]; gathers its unit when it is not live."""
        found = self._weights.get(name)
        if found is None and innermost_transform() is not None and not self.in_transform:
            with outside_transforms():  # one that the forward itself has begun, to which weights are constants
                return self.weight(name)
        if found is None and dispatch_modes() and in_selective_checkpoint():
            with outside_dispatch():  # which gathers a weight once, and not again in the same places
                return self.weight(name)
        if found is None:
            unit = self.runtime.unit_of[name]
            if self._only is not None and unit != self._only:
                raise Borrowed
            # A unit first read under no_grad, or by a checkpoint that recomputes, is used with gradients afterwards.
            with out_of_inference_mode() if torch.is_inference_mode_enabled() else nullcontext():
                with torch.set_grad_enabled(self._differentiates or torch.is_grad_enabled()):
                    gathered = self._gather(self.runtime.units[unit])
                if self.in_place:
                    call_parameters(gathered.values())
                self._weights |= gathered
                self._live.add(unit)
                if not self.in_transform:
                    self._look_ahead()
            found = self._weights[name]
        return found

    def hold(self) -> None:
        """Gather everything now, and keep it until the call ends: from here on nothing moves over data axes."""
        self._holds = True
        for unit in self.plan.units:
            for name in unit.params[:1]:
                self.weight(name)

    def enter(self, unit: str) -> None:
        """The forward of a unit begins; its weights are gathered when first asked for."""
        self._depth[unit] = self._depth.get(unit, 0) + 1

    def leave(self, unit: str) -> None:
        """The forward of a unit ends: let go of its weights, also after an exception."""
        self._depth[unit] -= 1
        if self._depth[unit] == 0 and not self._holds:
            if (written := self._free(unit)) is not None:
                _refuse(written)

    def close(self) -> None:
        """The call ends: let go of everything. A recomputation in the backward may still ask for weights."""
        written = next(filter(None, [self._free(unit) for unit in list(self._live)]), None)
        self._started.clear()
        if self.runtime.in_the_air:
            with out_of_inference_mode() if torch.is_inference_mode_enabled() else nullcontext():
                self.runtime.settle()
        if self.runtime.host is not None:
            self.runtime.host.settle()
        if written is not None:
            _refuse(written)

    def computes_again(self, unit: str) -> bool:
        """Whether the unit saves only inputs and shards for its derivatives: inside transforms, when it can."""
        return self.in_transform and self._only is None and unit in self.runtime.recomputable

    def leaves_of(self, unit: str) -> dict[str, Tensor]:
        """The stored leaves of a unit."""
        return {
            name: x
            for b in self.runtime.units[unit].buckets
            for name, x in zip(b.leaves, self._leaves_of(b), strict=True)
        }

    @contextmanager
    def only(self, unit: str, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it, `unit` computes with these leaves and there is no other one.

        Raises:
            Borrowed: it reads the weight of another unit.
        """
        outer = self.leaves, self._weights, self._live, self._depth, self._only
        self.leaves, self._weights, self._live, self._depth, self._only = leaves, {}, set(), {}, unit
        self.enter(unit)
        try:
            yield
        finally:
            self.leave(unit)
            self.leaves, self._weights, self._live, self._depth, self._only = outer

    def _gather(self, unit: Unit) -> dict[str, Tensor]:
        wholes: dict[str, Tensor] = {}
        kind = "recompute" if backward_id() != -1 else "gather"
        self._note_backward()
        for index in range(len(unit.buckets)):
            wholes |= self._gather_bucket(Event(kind, unit.name, index))
        plain, layouts = self.runtime.plain, self.plan.layouts
        for name in unit.params:
            if not plain.get(name):
                wholes[name] = compute_view(layouts[name], [wholes[leaf.name] for leaf in layouts[name].leaves])
            if name in self.runtime.placed:
                self._versions.pop(name, None)  # the DTensor counts its changes by itself
                wholes[name] = AsPlaced.apply(wholes[name], *self.runtime.placed[name])
        return wholes

    def _gather_bucket(self, event: Event) -> dict[str, Tensor]:
        spot = self.runtime.spot_of[event[1:]]
        bucket = spot.bucket
        leaves = self._leaves_of(bucket)
        if self.in_transform:
            same = all(leaf.dtype == bucket.dtype for leaf in leaves)
            if spot.idle and same and self.plan.vmaps is not None and self.plan.reduction is not None:
                return dict(zip(bucket.leaves, leaves, strict=True))
            wholes = GatherBucket.apply(spot, *leaves)
            return dict(zip(bucket.leaves, wholes, strict=True))
        shards = unwrap_locals(leaves)
        flight = self._started.pop(event, None) or self._start(event, spot, shards)
        gathered = Gathered(self, event, spot, leaves, shards, flight)
        wholes = _Gather.apply(gathered, *leaves)
        if not spot.moves:
            self._note_uncopied(bucket.leaves, leaves, wholes)
            return dict(zip(bucket.leaves, wholes, strict=True))
        versions = versions_of(wholes)
        self._versions |= zip(bucket.leaves, versions, strict=True)
        first = wholes[0]
        if gathered.frees and first.untyped_storage().nbytes():
            gathered.note(wholes, versions)
            self._by_storage[gathered.first or storage_key(first)] = gathered
        return dict(zip(bucket.leaves, wholes, strict=True))

    def _note_uncopied(self, names: Sequence[str], leaves: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Weights that are the shards themselves, because nothing is split."""
        if not torch.is_grad_enabled() or self.grid.pure:
            return
        for name, leaf, whole in zip(names, leaves, wholes, strict=True):
            shard, key = unwrap_local(leaf), storage_key(whole)
            if key == storage_key(shard):
                begin = whole.data_ptr()
                counters = (leaf, shard, *((self.sources[name],) if self.sources else ()))
                self._uncopied.setdefault(key, []).append(Uncopied(begin, begin + whole.nbytes, counters))

    def _leaves_of(self, bucket: Bucket) -> list[Tensor]:
        try:
            return [*map(self.leaves.__getitem__, bucket.leaves)]
        except KeyError as missing:
            where = bucket.unit or "(root)"
            raise ShardError(f"apply: the tree has no leaf {missing}, which unit {where!r} needs") from None

    def _start(self, event: Event, spot: BucketOnGrid, shards: Sequence[Tensor]) -> Flight | None:
        """Start the gather of a bucket; None when there is nothing to send."""
        if not spot.moves:
            return None
        self.pass_by("weights", event)
        return self.runtime.start(spot.gather_steps(shards))

    def pass_by(self, chain: str, event: Event) -> None:
        """Check, and remember, that this is what comes now."""
        before, order = self._at[chain], self.runtime.order
        if order.sure.get(before) != event:
            order.check(before, event)
        self._at[chain] = event

    def _look_ahead(self) -> None:
        """Start to gather the unit that comes next, if that is known."""
        sure, kind = self.runtime.order.sure, "recompute" if backward_id() != -1 else "gather"
        event = sure.get(self._at["weights"])
        unit = None if event is None else event.unit
        while event is not None and event.unit == unit and event not in self._started:
            if event.kind == kind and unit not in self._live:
                spot = self.runtime.spot_of[event[1:]]
                flight = self._start(event, spot, unwrap_locals(self._leaves_of(spot.bucket)))
                assert flight is not None
                self._started[event] = flight
            elif event.kind == "gather again" and backward_id() in self._backwards:
                gathered = self._last_passed(event)
                if gathered is None or not self._start_again(gathered):
                    return
            else:
                return
            event = sure.get(self._at["weights"])

    def _last_passed(self, again: Event) -> Gathered | None:
        """The gather whose unit's forward ended last, of those whose backward is still to come."""
        waiting = self._passed.get(again, [])
        while waiting and waiting[-1]() is None:
            waiting.pop()
        return waiting[-1]() if waiting else None

    def _free(self, unit: str) -> str | None:
        """Let go of the weights of a unit; returns one that was written in place since it was gathered."""
        written = None
        if unit in self._live:
            self._live.discard(unit)
            names = self.runtime.leaves_of[unit]
            written = self._written_in_place(names)
            for name in (*names, *self.runtime.units[unit].params):
                self._weights.pop(name, None)
        for at, gathered in list(self._by_storage.items()):
            if gathered.event.unit == unit:
                del self._by_storage[at]
                gathered.free()
                self._passed.setdefault(gathered.again, []).append(weakref.ref(gathered))
        return written

    def _written_in_place(self, names: Sequence[str]) -> str | None:
        """The first gathered leaf that has another version than it was gathered with."""
        known, weights = self._versions, self._weights
        held = [name for name in names if name in known and name in weights]
        had, now = [*map(known.pop, held)], versions_of([*map(weights.__getitem__, held)])
        return next((name for name, a, b in zip(held, had, now, strict=True) if a != b), None) if had != now else None

    # -- between forward and backward ---------------------------------------------------------------------------------

    def hooks(self, traced: bool = False) -> AbstractContextManager[Any]:
        """Within it, autograd saves views of freed weights as descriptions; `traced` when Dynamo may see the hooks.

        Those of weights that are the shards themselves are saved with what counts changes: an operation on a DTensor
        changes its local part without a trace there.
        """
        pure = self.grid.pure  # and what is recorded never changes
        if (pure and not self.runtime.frees) or not torch.is_grad_enabled() or self.in_transform:
            return nullcontext()
        return saved_hooks(self, self._by_storage, self._uncopied, self._activations, pure, traced)

    @contextmanager
    def keeps_pieces(self, gathered: Sequence[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
        """Within it, autograd keeps pieces of activations instead of what was gathered of them.

        Args:
            gathered: the piece, what was gathered of it, and what gathers it again.
        """
        made = {}
        if torch.is_grad_enabled() and not in_transform() and not simulated():  # whose ranks have storages of their own
            made = {storage_key(whole): Activation(own, whole, again) for own, whole, again in gathered}
        self._activations |= made
        try:
            yield
        finally:
            for key, activation in made.items():
                self._activations.pop(key)
                activation.end()

    # -- backward -----------------------------------------------------------------------------------------------------

    def wake(self, gathered: Gathered) -> None:
        """A view of a bucket is asked for: have it whole again. The backward of a unit begins, which comes next.

        After the last one, nothing stays.
        """
        self._start_again(gathered)
        gathered.finish_again()
        self._keep(gathered)
        self._note_backward()
        waiting = self._passed.get(gathered.again, [])
        waiting[:] = [ref for ref in waiting if ref() not in (None, gathered)]
        self._look_ahead()
        following = self.runtime.order.sure.get(self._at["weights"])
        if following is None or following.kind != "gather again":
            self.runtime.pool.shrink()  # the last unit: from here on there are the most gradients

    def _start_again(self, gathered: Gathered) -> bool:
        """Start to gather, from shards that must still be those of the forward; False when that is done already."""
        starts = gathered.may_start_again()
        if starts:
            self.pass_by("weights", gathered.again)
            gathered.start_again()
        return starts

    def _note_backward(self) -> None:
        """A backward runs through the graph of the call."""
        backward = backward_id()
        if backward != -1 and backward not in self._backwards:
            self._backwards.add(backward)
            after_backward(partial(self._end_backward, backward))

    def arrived(
        self, gathered: Gathered, grads: Sequence[Tensor | None], nodes: Sequence[Any]
    ) -> Sequence[Tensor | None]:
        """A bucket's gradients are here: let go of its weights and start to reduce.

        Returns what autograd gets for the leaves, at whose `nodes` it goes on.
        """
        unit = gathered.event.unit
        gathered.release()
        self._note_backward()
        if not self._depth.get(unit):  # what a recomputation gathered in it, no `leave` frees
            self._free(unit)
        needed, spot, leaves = [*map(asks, gathered.leaves)], gathered.spot, gathered.leaves
        # As the collectives take them: that of an embedding may be sparse.
        pending = [x if x is None or x.layout is torch.strided else x.to_dense() for x in grads]
        if not all(needed):
            spot = spot.part(needed)
            pending, leaves = [*compress(pending, needed)], [*compress(leaves, needed)]
            nodes = [*compress(nodes, needed)]
        reduced = self._reduced(gathered.event, spot, leaves, pending, nodes)
        if reduced is None:
            return [None] * len(needed)
        values = iter(reduced)
        return [next(values) if need else None for need in needed]

    def _reduced(
        self,
        event: Event,
        spot: BucketOnGrid,
        leaves: Sequence[Tensor],
        pending: list[Tensor | None],
        nodes: Sequence[Any],
    ) -> Sequence[Tensor | None] | None:
        """The gradients of leaves, when autograd itself needs them; None when they are reduced, or held back, later."""
        dtypes = [(leaf.grad_dtype if leaf.is_leaf else None) or leaf.dtype for leaf in leaves]
        if self.scale_of_gradients is not None:
            scale = self.scale_of_gradients(event.unit)
            pending = [None if grad is None else grad * scale for grad in pending]
        names, reduction = spot.bucket.leaves, spot.plan.reduction
        collects = self.gradients is not None and self.gradients.takes(names, leaves)
        into_grad = not collects and goes_into_grad(nodes)
        if into_grad and (reduction is None or self.holds_back(event.unit)):
            hold_back(spot, leaves, pending)
            return None
        if into_grad:
            pending = with_held_back(leaves, pending)
        if reduction is not None:
            self.pass_by("gradients", Event("reduce", event.unit, event.bucket))
            later = self.gradients if collects else self._reductions(names, leaves, into_grad)
            if later is not None:
                later.reduce(spot, pending, dtypes, self.runtime.order.explained)
                return None
        return ReduceBucket.apply(spot, reduction, dtypes, *pending)

    def _reductions(self, names: Sequence[str], leaves: Sequence[Tensor], into_grad: bool) -> Reductions | None:
        """What takes the gradients of a bucket that nobody collects; None when autograd itself needs them at once.

        `into_grad`: autograd would only add them to the `.grad` of the leaves.
        """
        if not into_grad or any(map(has_gradient_hooks, leaves)):
            return None
        backward = backward_id()
        if backward not in self._accumulations:
            made = self._accumulations[backward] = Accumulation()
            self.runtime.accumulations.append(made)
            after_backward(partial(self._accumulate, backward))
        self._accumulations[backward].note(names, leaves)
        return self._accumulations[backward]

    def _accumulate(self, backward: int) -> None:
        accumulation = self._accumulations.pop(backward)
        accumulation.finish()
        self.runtime.accumulations.remove(accumulation)
        if names := waiting(self.plan, self.leaves):
            for bucket in (bucket for unit in self.plan.units for bucket in unit.buckets):
                spot = self.runtime.spots[bucket]
                reduce_held_back(spot, [self.leaves[name] for name in spot.bucket.leaves], names)

    def _end_backward(self, backward: int) -> None:
        """It is over, and with it those that began in it."""
        self._backwards = {other for other in self._backwards if other < backward}
        self.went_back, UNPACKED.session = True, None
        for unit in [unit for unit in self._live if not self._depth.get(unit)]:
            self._free(unit)  # which the backward has read by itself
        if self.runtime.in_the_air:
            self.runtime.settle()
        while self._regathered:
            self._release_oldest()

    def _keep(self, gathered: Gathered) -> None:
        """Note a bucket gathered again; the one that came first goes when too many units are whole."""
        self._regathered = [ref for ref in self._regathered if ref() not in (None, gathered)]
        self._regathered.append(weakref.ref(gathered))
        while len({g.event.unit for ref in self._regathered if (g := ref()) is not None}) > _UNITS_REGATHERED:
            self._release_oldest()

    def _release_oldest(self) -> None:
        gathered = self._regathered.pop(0)()
        if gathered is not None:
            gathered.release()


class _Gather(torch.autograd.Function):
    """What `GatherBucket` does, with a gather that is under way and gradients that may be reduced later.

    forward   leaf [shard]            -> (gathered) -> [whole over data, split over compute]
    backward  d    [whole over data]  -> to the `Gradients` of the differentiation; else reduced at once -> d leaf
    """

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return tuple(gathered.wholes())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gathered = ctx.gathered
        return (None, *gathered.session.arrived(gathered, grads, [*map(_first, ctx.next_functions)]))
