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
    in the backward of the unit             `_Gathered`, from the first unpack until the bucket's gradients arrive
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
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardfn._torch import (
    DTensorSpec,
    after_backward,
    backward_id,
    grad_dtype_of,
    has_gradient_hooks,
    in_transform,
    out_of_inference_mode,
    simulated,
    spec_of,
    storage_key,
    tensor_in,
    unwrap_local,
    unwrap_locals,
    version_of,
    version_of_saved,
    versions_of,
    with_local,
    wrap_local,
    wraps,
)
from shardfn.core.buckets import BucketOnGrid, Flight, GatherBucket, ReduceBucket, dense
from shardfn.core.dropout import Masks
from shardfn.core.engine.activations import Activation, PackedActivation
from shardfn.core.engine.compiled import untraced
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
from shardfn.core.engine.placed import AsPlaced
from shardfn.core.engine.remat import Borrowed
from shardfn.core.engine.runtime import runtime_of
from shardfn.core.errors import ShardError
from shardfn.core.layout import compute_view
from shardfn.core.mesh import Grid
from shardfn.core.plan import Bucket, Plan, Unit
from shardfn.core.underway import asks

_offset_of: Callable[[Tensor], int] = methodcaller("storage_offset")
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


class Session:
    """Gives a module its weights by parameter name, in the shapes that it computes with."""

    def __init__(
        self, plan: Plan, grid: Grid, leaves: Mapping[str, Tensor], gradients: Gradients | None, mode: Hashable
    ) -> None:
        """`mode` tells apart calls that may ask for units in different orders."""
        self.plan, self.grid, self.leaves, self.gradients = plan, grid, leaves, gradients
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
        self._by_storage: dict[int, _Gathered] = {}
        self._uncopied: dict[int, list[_Uncopied]] = {}  # by storage
        self._activations: dict[int, Activation] = {}  # of modules that are running, by storage
        # Weak: the graph and its packed views keep these alive, and each keeps the session.
        self._passed: dict[Event, list[weakref.ref[_Gathered]]] = {}  # freed by the forward, the last one at the end
        self._regathered: list[weakref.ref[_Gathered]] = []
        self._backwards: set[int] = set()  # under way; one that failed is never over
        self.went_back = False  # whether one is over
        self.place: Any = None  # the modules that compute, when those are the user's own and may compute again
        self._accumulations: dict[int, Accumulation] = {}  # by backward

    # -- forward ------------------------------------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        """The gathered parameter, [whole over data, split over compute]; gathers its unit when it is not live."""
        found = self._weights.get(name)
        if found is None:
            unit = self.runtime.unit_of[name]
            if self._only is not None and unit != self._only:
                raise Borrowed
            # A unit first read under no_grad, or by a checkpoint that recomputes, is used with gradients afterwards.
            with out_of_inference_mode():
                with torch.set_grad_enabled(self._differentiates or torch.is_grad_enabled()):
                    self._weights |= self._gather(self.runtime.units[unit])
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
        with out_of_inference_mode():
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
        flight = self._started.pop(event, None) or self._start(event, spot, leaves)
        gathered = _Gathered(self, event, spot, leaves, flight)
        wholes = _Gather.apply(gathered, *leaves)
        if not spot.moves:
            self._note_uncopied(bucket.leaves, leaves, wholes)
            return dict(zip(bucket.leaves, wholes, strict=True))
        versions = versions_of(wholes)
        self._versions |= zip(bucket.leaves, versions, strict=True)
        if gathered.frees and wholes[0].untyped_storage().nbytes():
            gathered.note(wholes, versions)
            self._by_storage[storage_key(wholes[0])] = gathered
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
                self._uncopied.setdefault(key, []).append(_Uncopied(begin, begin + whole.nbytes, counters))

    def _leaves_of(self, bucket: Bucket) -> list[Tensor]:
        try:
            return [*map(self.leaves.__getitem__, bucket.leaves)]
        except KeyError as missing:
            where = bucket.unit or "(root)"
            raise ShardError(f"apply: the tree has no leaf {missing}, which unit {where!r} needs") from None

    def _start(self, event: Event, spot: BucketOnGrid, leaves: Sequence[Tensor]) -> Flight | None:
        """Start the gather of a bucket; None when there is nothing to send."""
        if not spot.moves:
            return None
        self.pass_by("weights", event)
        return self.runtime.start(spot.gather_steps(unwrap_locals(leaves)))

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
                flight = self._start(event, spot, self._leaves_of(spot.bucket))
                assert flight is not None
                self._started[event] = flight
            elif event.kind == "gather again" and backward_id() in self._backwards:
                gathered = self._last_passed(event)
                if gathered is None or not gathered.start_again():
                    return
            else:
                return
            event = sure.get(self._at["weights"])

    def _last_passed(self, again: Event) -> "_Gathered | None":
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
                gathered.leave()
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
        of_storage, uncopied, activations = self._by_storage.get, self._uncopied, self._activations

        def pack(saved: Tensor) -> Any:  # of every saved tensor: most are activations
            if saved.layout is not torch.strided:
                return saved
            part = saved if type(saved) is Tensor else unwrap_local(saved)
            if type(part) is Tensor:
                key = part.untyped_storage().data_ptr()
            elif wraps(part):
                return with_local(saved, part)  # a new DTensor, detached as `_Saved` is
            else:
                key = storage_key(part)
            gathered = of_storage(key)
            if gathered is not None:
                return gathered.pack(saved, part)
            if key in activations and (packed := activations[key].pack(saved)) is not None:
                return packed
            if pure:
                return saved
            if key in uncopied and (counters := _counters_of(part, uncopied[key])):
                detached = saved.detach()
                return _OfWeight(detached, [detached, *counters], versions_of([saved, *counters]))
            return saved.detach(), version_of_saved(saved)

        if traced:
            return saved_tensors_hooks(untraced(pack), untraced(_unpack))
        return saved_tensors_hooks(pack, _unpack)

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

    def begin_backward(self, gathered: "_Gathered") -> None:
        """The backward of a unit begins, and the one before it comes next. After the last one, nothing stays."""
        self.note_backward()
        waiting = self._passed.get(gathered.again, [])
        waiting[:] = [ref for ref in waiting if ref() not in (None, gathered)]
        self._look_ahead()
        following = self.runtime.order.sure.get(self._at["weights"])
        if following is None or following.kind != "gather again":
            self.runtime.pool.shrink()  # the last unit: from here on there are the most gradients

    def note_backward(self) -> None:
        """A backward runs through the graph of the call."""
        backward = backward_id()
        if backward != -1 and backward not in self._backwards:
            self._backwards.add(backward)
            after_backward(partial(self._end_backward, backward))

    def end_backward_of(self, unit: str) -> None:
        """What a recomputation inside the unit gathered, and no `leave` frees, is not needed any more."""
        if not self._depth.get(unit):
            self._free(unit)

    def collects(self, names: Sequence[str], leaves: Sequence[Tensor]) -> bool:
        """Whether the differentiation that the call belongs to takes the gradients of these leaves."""
        return self.gradients is not None and self.gradients.takes(names, leaves)

    def reductions(self, names: Sequence[str], leaves: Sequence[Tensor], into_grad: bool) -> Reductions | None:
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
        self.went_back = True
        self.runtime.settle()
        while self._regathered:
            self._release_oldest()

    def keep(self, gathered: "_Gathered") -> None:
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
    def forward(ctx: Any, gathered: "_Gathered", *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return tuple(gathered.wholes())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gathered.arrived(grads, [*map(_first, ctx.next_functions)]))


class _Packed(NamedTuple):
    """A saved view of a gathered storage, without the storage."""

    gathered: "_Gathered"
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: DTensorSpec | None  # of the DTensor whose local part it is


class _Uncopied(NamedTuple):
    """A weight that is the shard itself: where it lies, and the tensors whose versions count changes."""

    begin: int
    end: int
    counters: tuple[Tensor, ...]


def _counters_of(part: Tensor, weights: Sequence[_Uncopied]) -> tuple[Tensor, ...]:
    at = part.data_ptr()
    return next((weight.counters for weight in weights if weight.begin <= at < weight.end), ())


class _OfWeight(NamedTuple):
    """A saved view of a weight that is the shard itself, detached, with what counts changes of it."""

    tensor: Tensor
    counters: list[Tensor]
    versions: list[int]


# Any other saved tensor, detached: with its node it would be a cycle through C++, and live for ever; and its version,
# since autograd does not look at versions where there are hooks.
_Saved = tuple[Tensor, int]


def _unpack(packed: Any) -> Tensor:
    kind = type(packed)
    if kind is tuple:
        tensor, version = packed
        if version_of_saved(tensor) != version:
            raise _changed("a tensor", tensor)
        return tensor
    if kind is _OfWeight:
        if versions_of(packed.counters) != packed.versions:
            raise _changed("a weight", packed.tensor)
        return packed.tensor
    if kind is PackedActivation:
        return packed.activation.view(packed)
    return packed.gathered.view(packed) if kind is _Packed else packed


def _changed(what: str, tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} of shape {list(tensor.shape)}. Update parameters after the backward; in a forward, write new tensors."
    )


class _Gathered:
    """One bucket of one gather, ready to be gathered again with the same values."""

    def __init__(
        self, session: Session, event: Event, spot: BucketOnGrid, leaves: Sequence[Tensor], flight: Flight | None
    ) -> None:
        self.session, self.event, self.spot = session, event, spot
        self.again = Event("gather again", event.unit, event.bucket)
        self.frees = event.unit in session.runtime.frees and spot.moves
        self._neighbours = session.runtime.neighbours.get(event.unit)
        self._leaves, self._shards = leaves, unwrap_locals(leaves)
        sources = map(session.sources.__getitem__, spot.bucket.leaves) if session.sources else leaves
        # What counts changes: a shard is written directly, or by an operation on its DTensor, which has a counter.
        self._counters = [*self._shards, *leaves, *sources]
        self._versions = versions_of(self._counters)
        self._flight = flight
        self._awake = False
        self._flat: Tensor | None = None
        self._kept: Tensor | None = None  # with `regather=n`, this rank's part of what was gathered
        self._begins: dict[int, int] = {}  # offset in the gathered storage -> version of the tensor that begins there

    def wholes(self) -> list[Tensor]:
        """Wait for the gather."""
        flight, self._flight = self._flight, None
        if flight is not None:
            return self.spot.wholes_of(self.session.runtime.finish(flight))
        return [whole.detach() for whole in self.spot.unmoved(self._shards)]

    def note(self, wholes: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Remember where the whole leaves lie."""
        self._begins = dict(zip(map(_offset_of, wholes), versions, strict=True))
        if self._neighbours is not None and torch.is_grad_enabled():
            storage = wholes[0].untyped_storage()
            self._flat = tensor_in(storage, 0, (storage.nbytes() // wholes[0].element_size(),), wholes[0].detach())

    def leave(self) -> None:
        """The forward of the unit is over."""
        if self._neighbours is not None and self._flat is not None:
            self._kept, self._flat = self._neighbours.part_of(self._flat, self.spot.buffers), None

    def pack(self, saved: Tensor, part: Tensor) -> "_Packed | Tensor":
        """What autograd keeps instead of a view of the gathered storage; a view in another dtype it keeps as it is.

        `part` is the view: what is saved, or the local part of it.
        """
        if part.dtype != self.spot.bucket.dtype or part.is_neg() or part.is_conj():
            return saved
        self._require_unchanged(saved, int(part.storage_offset()))
        spec = spec_of(saved) if isinstance(saved, DTensor) else None
        return _Packed(self, part.shape, part.stride(), int(part.storage_offset()), spec)

    def _require_unchanged(self, saved: Tensor, begins: int) -> None:
        """A forward that writes into a gathered weight uses values that gathering again would not bring back."""
        if begins not in self._begins:
            begins = max(offset for offset in self._begins if offset <= begins)
        before = 0 if isinstance(saved, DTensor) else self._begins[begins]  # a DTensor counts its changes by itself
        if version_of(saved) != before:
            name = self.spot.bucket.leaves[list(self._begins).index(begins)]
            raise RuntimeError(
                f"'{name}' was changed in place by the forward; Policy(regather=...) frees it, and its backward would "
                f"use the value from before. Write a new tensor instead, or update the tree of parameters."
            )

    def view(self, packed: _Packed) -> Tensor:
        """The saved view; the bucket's one all-gather is waited for at the first one."""
        if not self._awake:
            self._wake()
        assert self._flat is not None
        part = self._flat.as_strided(packed.shape, packed.stride, packed.offset)
        return part if packed.spec is None else wrap_local(part, packed.spec)

    def _wake(self) -> None:
        if self._flat is None:
            self.start_again()
            assert self._flight is not None
            flight, self._flight = self._flight, None
            self._flat = self.session.runtime.finish(flight)
        self._awake = True
        self.session.keep(self)
        self.session.begin_backward(self)

    def start_again(self) -> bool:
        """Start to gather, from shards that must still be those of the forward; False when that is done already."""
        if self._flight is not None or self._flat is not None:
            return False
        now = versions_of(self._counters)
        if now != self._versions:
            changed = [have != had for have, had in zip(now, self._versions, strict=True)].index(True)
            name = self.spot.bucket.leaves[changed % len(self._leaves)]
            raise RuntimeError(
                f"'{name}' was changed in place between the forward and the backward that needs it; "
                f"run the backward before the optimizer step"
            )
        self.session.pass_by("weights", self.again)
        steps = self.spot.gather_steps(self._shards)
        if self._kept is not None and self._neighbours is not None:
            steps = self._neighbours.gather_steps(self._kept, self.spot.buffers)
        self._flight = self.session.runtime.start(steps)
        return True

    def release(self) -> None:
        """Let go of the gathered storage; a later view gathers again."""
        self._flat = self._flight = None
        self._awake = False

    def arrived(self, grads: Sequence[Tensor | None], nodes: Sequence[Any]) -> Sequence[Tensor | None]:
        """The bucket's gradients are here: let go of its weights and start to reduce.

        Returns what autograd gets for the leaves, at whose `nodes` it goes on.
        """
        self.release()
        self.session.note_backward()
        self.session.end_backward_of(self.event.unit)
        needed, spot, leaves = [*map(asks, self._leaves)], self.spot, self._leaves
        pending = [*map(dense, grads)]
        if not all(needed):
            spot = spot.part(needed)
            pending, leaves = [*compress(pending, needed)], [*compress(leaves, needed)]
            nodes = [*compress(nodes, needed)]
        dtypes = [*map(grad_dtype_of, leaves)]
        if self.session.scale_of_gradients is not None:
            scale = self.session.scale_of_gradients(self.event.unit)
            pending = [None if grad is None else grad * scale for grad in pending]
        collects = self.session.collects(spot.bucket.leaves, leaves)
        into_grad = not collects and goes_into_grad(nodes)
        if into_grad and (spot.plan.reduction is None or self.session.holds_back(self.event.unit)):
            hold_back(spot, leaves, pending)
            return [None] * len(needed)
        if into_grad:
            pending = with_held_back(leaves, pending)
        if spot.plan.reduction is not None:
            self.session.pass_by("gradients", Event("reduce", self.event.unit, self.event.bucket))
            names = spot.bucket.leaves
            reductions = self.session.gradients if collects else self.session.reductions(names, leaves, into_grad)
            if reductions is not None:
                reductions.reduce(spot, pending, dtypes, self.session.runtime.order.explained)
                return [None] * len(needed)
        reduced = iter(ReduceBucket.apply(spot, spot.plan.reduction, dtypes, *pending))
        return [next(reduced) if need else None for need in needed]
