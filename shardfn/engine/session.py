"""The weights of one `apply`: gathered just in time, freed after their unit, gathered again for its backward.

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
over `replicate`). Those over compute axes are in parallel/compute_axes.py, that of the loss is in autodiff.py, and
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
from torch.utils.weak import WeakIdKeyDictionary

from shardfn import _torch
from shardfn.comm import JOURNALS, BucketOnGrid, GatherBucket, Gathers, ReduceBucket, all_gather
from shardfn.context import having, requires_grad
from shardfn.engine import reductions
from shardfn.engine.reductions import Grads
from shardfn.engine.remat import Borrowed
from shardfn.engine.runtime import AsPlaced, Event, runtime_of
from shardfn.engine.saved_tensors import Activation, Gathered, Uncopied, saved_hooks
from shardfn.layout import Grid, Unit, compute_view
from shardfn.notation import ShardError
from shardfn.params import Params
from shardfn.random import Masks

_first: Callable[[Any], Any] = itemgetter(0)
_REENTRANT = (
    "value_and_grad: the forward computes in a torch.utils.checkpoint with use_reentrant=True, where only "
    "loss.backward() finds gradients of weights. Write use_reentrant=False; in transformers, "
    'gradient_checkpointing_enable({"use_reentrant": False})'
)
_UNITS_REGATHERED = 2  # how many units may be whole at the same time in a backward


def _refuse(written: str | None) -> None:
    """Raise for a weight, if there is one, that a forward has written in place, unless the forward raises itself."""
    if written is not None and sys.exception() is None:
        why = f"'{written}' was changed in place by the forward, in the copy that was gathered for it: the change"
        raise RuntimeError(f"{why} is lost. Make it a buffer, or update the tree of parameters between steps.")


class Session:
    """Gives a module its weights by parameter name, in the shapes that it computes with."""

    def __init__(self, params: Params, grid: Grid, mode: Hashable, are_parameters: bool = False) -> None:
        """`mode` tells apart calls that may ask for units in different orders.

        `are_parameters`: weights say of themselves that they are `nn.Parameter`s, as those do that they stand for.
        """
        self.plan, self.grid, self.gradients = params.plan, grid, params.gradients
        self.leaves: Mapping[str, Tensor] = params
        self._are_parameters = are_parameters
        # What `value_and_grad` made its fresh leaves of: their owner may still change them.
        self.sources, self.scale_of_gradients = params.sources, params.scale_of_gradients
        self._holds_back = params.holds_back
        self.runtime = runtime_of(params.plan, grid)
        self.runtime.begin()
        self.journal = JOURNALS.get(grid.mesh)
        self._differentiates = torch.is_grad_enabled()
        # A transform wraps the leaves: only an autograd.Function sees the shards.
        self.in_transform = _torch.in_transform()
        self._only: str | None = None  # the unit that computes again
        self.masks: Masks | None = None  # those of a `dropout_seed`
        self._at: dict[str, Hashable] = {x: (x, mode, self._differentiates) for x in ("weights", "gradients")}
        self._weights: dict[str, Tensor] = {}  # of all live units
        self._versions: dict[str, int] = {}  # of their whole leaves, when they were gathered
        self._live: set[str] = set()
        self._depth: dict[str, int] = {}
        self._holds = False  # weights until the call ends
        self._started: dict[Event, Gathered] = {}  # which nobody has asked for yet
        self.by_storage: dict[int, Gathered] = {}
        self.uncopied: dict[int, list[Uncopied]] = {}  # by storage
        self.activations: dict[int, Activation] = {}  # of modules that are running, by storage
        # Weak: the graph and its packed views keep these alive, and each keeps the session.
        self._passed: dict[Event, list[weakref.ref[Gathered]]] = {}  # freed by the forward, the last one at the end
        self._regathered: list[weakref.ref[Gathered]] = []
        self._backwards: set[int] = set()  # under way; one that failed is never over
        self.ref = weakref.ref(self)
        self.binding: Any = None  # what the modules do, when they may compute again
        self.made: list[tuple[int, int, int]] = []  # numbers of the nodes of graphs made by it, and their thread
        self.buffers: dict[str, Tensor] | None = None  # of the tree; None: the modules' own
        self.varied: dict[str, WeakIdKeyDictionary] = {}  # see `ComputeAxes.vary`

    # -- forward ------------------------------------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        """The gathered parameter, [whole over data, split over compute]; gathers its unit when it is not live."""
        if self.gradients is not None and not torch.is_grad_enabled() and _torch.in_reentrant_checkpoint():
            raise ShardError(_REENTRANT)
        weight = self._weights.get(name)
        if weight is None and _torch.innermost_transform() is not None and not self.in_transform:
            with _torch.outside_transforms():  # one that the forward itself has begun, to which weights are constants
                return self.weight(name)
        if weight is None and _torch.dispatch_modes() and _torch.in_selective_checkpoint():
            with _torch.outside_dispatch():  # which gathers a weight once, and not again in the same places
                return self.weight(name)
        if weight is None:
            unit = self.plan.layouts[name].unit
            if self._only is not None and unit != self._only:
                raise Borrowed
            # A unit first read under no_grad, or by a checkpoint that recomputes, is used with gradients afterwards.
            with _torch.out_of_inference_mode() if torch.is_inference_mode_enabled() else nullcontext():
                with torch.set_grad_enabled(self._differentiates or torch.is_grad_enabled()):
                    gathered = self._gather(self.runtime.units[unit])
                if self._are_parameters:
                    _torch.call_parameters(gathered.values())
                self._weights |= gathered
                self._live.add(unit)
                if not self.in_transform:
                    self._look_ahead()
            weight = self._weights[name]
        return weight

    def not_in_tree(self, value: Any) -> Any:
        """What a module has in the place of a parameter that is not in the tree: its own."""
        return value

    def has_weights_of(self, other: "Session") -> bool:
        """Whether both calls were made with the same leaves."""
        return [*map(id, self.leaves.values())] == [*map(id, other.leaves.values())]

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
            _refuse(self._free(unit))

    def close(self) -> None:
        """The call ends: let go of everything. A recomputation in the backward may still ask for weights."""
        written = next(filter(None, [self._free(unit) for unit in list(self._live)]), None)
        self._started.clear()
        if self.runtime.in_flight:
            with _torch.out_of_inference_mode() if torch.is_inference_mode_enabled() else nullcontext():
                self.runtime.settle()
        if self.runtime.host is not None:
            self.runtime.host.settle()
        _refuse(written)

    def computes_again(self, unit: str) -> bool:
        """Whether the unit saves only inputs and shards for its derivatives: inside transforms, when it can."""
        return self.in_transform and self._only is None and unit in self.runtime.recomputable

    @contextmanager
    def only(self, unit: str, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it, `unit` computes with these leaves and there is no other one.

        Raises:
            Borrowed: it reads the weight of another unit.
        """
        with having(self, leaves=leaves, _weights={}, _live=set(), _depth={unit: 1}, _only=unit):
            try:
                yield
            finally:
                self.leave(unit)

    def _gather(self, unit: Unit) -> dict[str, Tensor]:
        wholes: dict[str, Tensor] = {}
        kind = "recompute" if _torch.backward_id() != -1 else "gather"
        self._note_backward()
        for index, bucket in enumerate(unit.buckets):
            wholes |= zip(bucket.leaves, self._gather_bucket(Event(kind, unit.name, index)), strict=True)
        plain, layouts = self.runtime.plain, self.plan.layouts
        for name in unit.params:
            if not plain.get(name):
                wholes[name] = compute_view(layouts[name], [wholes[leaf.name] for leaf in layouts[name].leaves])
            if name in self.runtime.placed:
                self._versions.pop(name, None)  # the DTensor counts its changes by itself
                wholes[name] = AsPlaced.apply(wholes[name], *self.runtime.placed[name])
        return wholes

    def _gather_bucket(self, event: Event) -> Sequence[Tensor]:
        on_grid = self.runtime.bucket_of[event[1:]]
        bucket = on_grid.bucket
        if self.in_transform:
            leaves = [*map(self.leaves.__getitem__, bucket.leaves)]
            same = all(leaf.dtype == bucket.dtype for leaf in leaves)
            if on_grid.idle and same and self.plan.vmaps is not None and self.plan.reduction is not None:
                return leaves
            return GatherBucket.apply(on_grid, *leaves)
        gathered = self._started.pop(event, None) or self._start(event)
        wholes = _Gather.apply(gathered, *gathered.leaves)
        if not on_grid.collectives:
            self._note_uncopied(bucket.leaves, gathered.leaves, wholes)
            return wholes
        versions = _torch.versions_of(wholes)
        self._versions |= zip(bucket.leaves, versions, strict=True)
        first = wholes[0]
        if gathered.frees and first.untyped_storage().nbytes():
            gathered.note(wholes, versions)
            self.by_storage[gathered.first or _torch.storage_key(first)] = gathered
        return wholes

    def _note_uncopied(self, names: Sequence[str], leaves: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Weights that are the shards themselves, because nothing is split."""
        if not torch.is_grad_enabled() or self.grid.pure:
            return
        for name, leaf, whole in zip(names, leaves, wholes, strict=True):
            shard, key = _torch.unwrap_local(leaf), _torch.storage_key(whole)
            if key == _torch.storage_key(shard):
                begin = whole.data_ptr()
                counters = (leaf, shard, *((self.sources[name],) if self.sources else ()))
                self.uncopied.setdefault(key, []).append(Uncopied(begin, begin + whole.nbytes, counters))

    def _start(self, event: Event) -> Gathered:
        """Start the gather of a bucket, if there is something to send."""
        gathered = Gathered(self, event)
        if gathered.on_grid.collectives:
            self.pass_by("weights", event)
            gathered.start()
        return gathered

    def pass_by(self, chain: str, event: Event) -> None:
        """Check, and remember, that this is what comes now."""
        before, order = self._at[chain], self.runtime.order
        if self.journal is not None:
            self.journal.note(event)
        if order.sure.get(before) != event:
            order.check(before, event)
        self._at[chain] = event

    def _look_ahead(self) -> None:
        """Start to gather the unit that comes next, if that is known."""
        sure, kind = self.runtime.order.sure, "recompute" if _torch.backward_id() != -1 else "gather"
        event = sure.get(self._at["weights"])
        unit = None if event is None else event.unit
        while event is not None and event.unit == unit and event not in self._started:
            if event.kind == kind and unit not in self._live:
                self._started[event] = self._start(event)
            elif event.kind == "gather again" and _torch.backward_id() in self._backwards:
                waiting = self._passed.get(event, [])  # the one whose forward ended last comes first
                while waiting and waiting[-1]() is None:
                    waiting.pop()
                gathered = waiting[-1]() if waiting else None
                if gathered is None or not gathered.start_again():
                    return
            else:
                return
            event = sure.get(self._at["weights"])

    def _free(self, unit: str) -> str | None:
        """Let go of the weights of a unit; returns one that was written in place since it was gathered."""
        written = None
        if unit in self._live:
            self._live.discard(unit)
            names, known, weights = self.runtime.leaves_of[unit], self._versions, self._weights
            tracked = [name for name in names if name in known and name in weights]
            before, now = [*map(known.pop, tracked)], _torch.versions_of([*map(weights.__getitem__, tracked)])
            if before != now:
                written = next(name for name, a, b in zip(tracked, before, now, strict=True) if a != b)
            for name in (*names, *self.runtime.units[unit].params):
                weights.pop(name, None)
        for at, gathered in list(self.by_storage.items()):
            if gathered.event.unit == unit:
                del self.by_storage[at]
                gathered.free()
                self._passed.setdefault(gathered.again, []).append(weakref.ref(gathered))
        return written

    # -- between forward and backward ---------------------------------------------------------------------------------

    def hooks(self, traced: bool = False) -> AbstractContextManager[Any]:
        """Within it, autograd saves views of freed weights as descriptions; `traced` when Dynamo may see the hooks.

        Those of weights that are the shards themselves are saved with what counts changes: an operation on a DTensor
        changes its local part without a trace there.
        """
        pure = self.grid.pure  # and what is recorded never changes
        if (pure and not self.runtime.frees) or not torch.is_grad_enabled() or self.in_transform:
            return nullcontext()
        return saved_hooks(self, traced)

    @contextmanager
    def keeps_pieces(self, gathered: Gathers) -> Iterator[None]:
        """Within it, autograd keeps pieces of activations instead of what was gathered of them."""
        activations = {}  # simulated ranks have storages of their own
        if torch.is_grad_enabled() and not _torch.in_transform() and not _torch.simulated():
            for axis, dim, piece, whole in gathered:
                again = partial(all_gather, mesh=self.grid.mesh, axis=axis, dim=dim)
                activations[_torch.storage_key(whole)] = Activation(piece, whole, again)
        self.activations |= activations
        try:
            yield
        finally:
            for key, activation in activations.items():
                self.activations.pop(key)
                activation.end()

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward_begins(self, gathered: Gathered) -> None:
        """A view of a bucket is asked for: have it whole again. The backward of a unit begins, which comes next.

        After the last one, nothing stays.
        """
        gathered.start_again()
        gathered.finish_again()
        self._regathered = [ref for ref in self._regathered if ref() not in (None, gathered)]
        self._regathered.append(weakref.ref(gathered))
        self._release(_UNITS_REGATHERED)
        self._note_backward()
        waiting = self._passed.get(gathered.again, [])
        waiting[:] = [ref for ref in waiting if ref() not in (None, gathered)]
        self._look_ahead()
        following = self.runtime.order.sure.get(self._at["weights"])
        if following is None or following.kind != "gather again":
            self.runtime.pool.shrink()  # the last unit: from here on there are the most gradients

    def _note_backward(self) -> None:
        """A backward runs through the graph of the call."""
        backward = _torch.backward_id()
        if backward != -1 and backward not in self._backwards:
            self._backwards.add(backward)
            _torch.after_backward(partial(self._end_backward, backward))

    def gradients_arrived(self, gathered: Gathered, grads: Grads, nodes: Sequence[Any]) -> Grads:
        """A bucket's gradients are here: let go of its weights and start to reduce.

        Returns what autograd gets for the leaves, at whose `nodes` it goes on.
        """
        unit = gathered.event.unit
        gathered.release()
        self._note_backward()
        if not self._depth.get(unit):  # what a recomputation gathered in it, no `leave` frees
            self._free(unit)
        needed, on_grid, leaves = [*map(requires_grad, gathered.leaves)], gathered.on_grid, gathered.leaves
        # As the collectives take them: that of an embedding may be sparse.
        pending = [x if x is None or x.layout is torch.strided else x.to_dense() for x in grads]
        if not all(needed):
            on_grid = on_grid.part(needed)
            pending, leaves = [*compress(pending, needed)], [*compress(leaves, needed)]
            nodes = [*compress(nodes, needed)]
        reduced = self._reduced(gathered.event, on_grid, leaves, pending, nodes)
        if reduced is None:
            return [None] * len(needed)
        values = iter(reduced)
        return [next(values) if need else None for need in needed]

    def _reduced(
        self, event: Event, on_grid: BucketOnGrid, leaves: Sequence[Tensor], pending: Grads, nodes: Sequence[Any]
    ) -> Grads | None:
        """The gradients of leaves, when autograd itself needs them; None when they are reduced, or held back, later."""
        dtypes = [(leaf.grad_dtype if leaf.is_leaf else None) or leaf.dtype for leaf in leaves]
        if self.scale_of_gradients is not None:
            scale = self.scale_of_gradients(event.unit)
            pending = [None if grad is None else grad * scale for grad in pending]
        names, reduction = on_grid.bucket.leaves, on_grid.plan.reduction
        collects = self.gradients is not None and self.gradients.takes(names, leaves)
        into_grad = not collects and reductions.goes_into_grad(nodes)
        if into_grad and (reduction is None or (self._holds_back is not None and self._holds_back(event.unit))):
            reductions.hold_back(on_grid, leaves, pending)
            return None
        if into_grad:
            pending = reductions.with_held_back(leaves, pending)
        if reduction is not None:
            self.pass_by("gradients", Event("reduce", event.unit, event.bucket))
            adds = into_grad and not any(map(_torch.has_gradient_hooks, leaves))
            later = self.gradients if collects else self._accumulation(names, leaves) if adds else None
            if later is not None:
                later.reduce(on_grid, pending, dtypes, self.runtime.order.explained)
                return None
        return ReduceBucket.apply(on_grid, reduction, dtypes, *pending)

    def _accumulation(self, names: Sequence[str], leaves: Sequence[Tensor]) -> reductions.Accumulation:
        """What takes the gradients of a bucket that nobody collects, and that autograd would only add to `.grad`."""
        known, key = self.runtime.accumulations, (id(self), _torch.backward_id())
        if key not in known:
            known[key] = reductions.Accumulation()
            _torch.after_backward(partial(self._accumulate, key))
        known[key].note(names, leaves)
        return known[key]

    def _accumulate(self, key: tuple[int, int]) -> None:
        self.runtime.accumulations[key].finish()
        del self.runtime.accumulations[key]
        reductions.reduce_held_back(self.plan, self.runtime.bucket_of.values(), self.leaves)

    def _end_backward(self, backward: int) -> None:
        """It is over, and with it those that began in it."""
        self._backwards = {other for other in self._backwards if other < backward}
        for unit in [unit for unit in self._live if not self._depth.get(unit)]:
            self._free(unit)  # which the backward has read by itself
        if not self._backwards:
            self._started.clear()  # for nothing
        if self.runtime.in_flight:
            self.runtime.settle()
        self._release(0)

    def _release(self, most: int) -> None:
        """Let go of buckets that were gathered again, those that came first, until so many units at most are whole."""
        while len({g.event.unit for ref in self._regathered if (g := ref()) is not None}) > most:
            if (gathered := self._regathered.pop(0)()) is not None:
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
        return (None, *gathered.session.gradients_arrived(gathered, grads, [*map(_first, ctx.next_functions)]))
