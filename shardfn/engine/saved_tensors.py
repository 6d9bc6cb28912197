"""What autograd keeps instead of what was gathered: of a bucket, and of an activation.

A `Gathered` is one bucket of one gather. Where its bytes are, `_collective` and `_flat` say:

    in flight          `_collective`    the gather has begun, or there is nothing to send
    whole                           the forward computes with the leaves, which lie in one storage
    freed                           the forward of the unit is over: autograd keeps descriptions of views, and nobody
                                    the storage
    in flight again    `_collective`    the backward is expected to ask for them, or does: the same bytes once more
    whole again        `_flat`      views of them are handed out
    (freed)                         the gradients of the bucket are here, or too many units are whole: a later view
                                    gathers again

A bucket whose storage is not freed stays whole; that its weights are read again is none of its business then. What
comes next is the session's, which calls in here; only what autograd calls (`unpack`) calls out, and a second gather,
which has its place in the order.

An `Activation` is gathered over a compute axis: with `acts={"layers.*": "b s@tp c"}` linears read inputs that were
gathered along the sequence, and autograd saves them for the gradients of weights. It saves this rank's piece instead,
and the first one that is asked for in the backward gathers again, for all that the forward saved of it.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardfn import _torch
from shardfn.binding import untraced
from shardfn.comm import AsyncCollective, BucketOnGrid
from shardfn.engine.runtime import Event, Neighbours, Runtime

_offset_of: Callable[[Tensor], int] = methodcaller("storage_offset")


class SavedView(NamedTuple):
    """What autograd keeps of a view of what was gathered, without the storage."""

    source: "Gathered | Activation"
    strided: tuple[torch.Size, tuple[int, ...], int]  # shape, stride, offset
    spec: _torch.DTensorSpec | None  # of the DTensor whose local part it is


_SAVED_VIEW: Callable[[Any, tuple[Any, ...]], SavedView] = tuple.__new__  # without a frame


class Gathered:
    """One bucket of one gather, ready to be gathered again with the same values."""

    def __init__(self, session: Any, event: Event) -> None:
        """`session` is what autograd turns to, whose leaves these are."""
        runtime: Runtime = session.runtime
        on_grid: BucketOnGrid = runtime.bucket_of[event[1:]]
        leaves: Sequence[Tensor] = [*map(session.leaves.__getitem__, on_grid.bucket.leaves)]
        self.session, self.event, self.on_grid, self.leaves, self._runtime = session, event, on_grid, leaves, runtime
        self.again = Event("gather again", event.unit, event.bucket)
        self.frees = event.unit in runtime.frees and bool(on_grid.collectives)
        self._neighbours: Neighbours | None = runtime.neighbours.get(event.unit)
        self._shards, self._dtype = _torch.unwrap_locals(leaves), on_grid.bucket.dtype
        sources: Mapping[str, Tensor] | None = session.sources  # what leaves were made of, whose owner may change it
        made_of = map(sources.__getitem__, on_grid.bucket.leaves) if sources else leaves
        # What counts changes: a shard is written directly, or by an operation on its DTensor, which has a counter.
        self._counters = [*self._shards, *leaves, *made_of]
        self._versions = _torch.versions_of(self._counters)
        self._collective: AsyncCollective | None = None
        self._flat: Tensor | None = None  # all of it, while the backward, or `free`, uses it
        self._kept: Tensor | None = None  # with `regather=n`, this rank's part of what was gathered
        self._begins: dict[int, int] = {}  # offset in the gathered storage -> version of the tensor that begins there
        self.first = self.end = 0  # addresses of the storage

    def wholes(self) -> list[Tensor]:
        """Wait for the gather: the whole leaves."""
        collective, self._collective = self._collective, None
        if collective is not None:
            return self.on_grid.collectives[-1].wholes_of(self._runtime.finish(collective))
        return [whole.detach() for whole in self.on_grid.unmoved(self._shards)]

    def note(self, wholes: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Remember where the whole leaves lie: they will be freed."""
        self._begins = dict(zip(map(_offset_of, wholes), versions, strict=True))
        storage = wholes[0].untyped_storage()
        if type(wholes[0]) is Tensor:
            self.first = storage.data_ptr()
            self.end = self.first + storage.nbytes()
        if self._neighbours is not None and torch.is_grad_enabled():
            numel = storage.nbytes() // wholes[0].element_size()
            self._flat = _torch.set_storage(wholes[0].detach().new_empty(0), storage, 0, (numel,))

    def free(self) -> None:
        """The forward of the unit is over."""
        if self._neighbours is not None and self._flat is not None:
            self._kept = self._neighbours.part_of(self._flat, self.on_grid.buffers)
        self._flat = None

    def pack(self, saved: Tensor, part: Tensor) -> SavedView | None:
        """What autograd keeps instead of a view of the gathered storage; None when it keeps that as it is.

        `part` is the view: what is saved, or the local part of it.
        """
        if part.dtype != self._dtype or part.is_neg() or part.is_conj():
            return None
        offset = int(part.storage_offset())
        spec = _torch.spec_of(saved) if isinstance(saved, DTensor) else None
        if spec is not None or _torch.version_of_saved(saved) != self._begins.get(offset):
            self._require_unwritten(saved, offset)
        strided = part.shape, part.stride(), offset
        return _SAVED_VIEW(SavedView, (self, self._runtime.strided.setdefault(strided, strided), spec))

    def _require_unwritten(self, saved: Tensor, begins: int) -> None:
        """A forward that writes into a gathered weight uses values that gathering again would not bring back."""
        if begins not in self._begins:
            begins = max(offset for offset in self._begins if offset <= begins)
        before = 0 if isinstance(saved, DTensor) else self._begins[begins]  # a DTensor counts its changes by itself
        if _torch.version_of(saved) != before:
            name = self.on_grid.bucket.leaves[list(self._begins).index(begins)]
            why = f"'{name}' was changed in place by the forward; Policy(regather=...) frees it"
            raise RuntimeError(f"{why}. Write a new tensor instead, or update the tree of parameters.")

    def start_again(self) -> bool:
        """Start to gather the bytes that the forward had; False when they are there, or on their way.

        Raises:
            RuntimeError: a shard was written since.
        """
        if self._flat is not None or self._collective is not None:
            return False
        now = _torch.versions_of(self._counters)
        if now != self._versions:
            changed = [have != had for have, had in zip(now, self._versions, strict=True)].index(True)
            name = self.on_grid.bucket.leaves[changed % len(self.leaves)]
            why = f"'{name}' was changed in place between the forward and the backward that needs it"
            raise RuntimeError(f"{why}; run the backward before the optimizer step")
        self.session.pass_by("weights", self.again)
        self.start()
        return True

    def start(self) -> None:
        """The bytes are in flight; and once more, as they were."""
        steps = self.on_grid.gather_steps(self._shards)
        if self._kept is not None and self._neighbours is not None:
            steps = self._neighbours.gather_steps(self._kept, self.on_grid.buffers)
        self._collective = self._runtime.start(steps, partial(self.on_grid.profiler_name, "all_gather"))

    def finish_again(self) -> None:
        """Wait for them."""
        collective, self._collective = self._collective, None
        if collective is not None:
            self._flat = self._runtime.finish(collective)

    def view(self, of: SavedView) -> Tensor:
        """A view that autograd kept, of the bucket that is whole again."""
        if self._flat is None:
            self.session.backward_begins(self)
        assert self._flat is not None
        part = self._flat.as_strided(*of.strided)
        return part if of.spec is None else _torch.wrap_local(part, of.spec)

    def release(self) -> None:
        """Let go of what is whole again, or on its way."""
        self._flat = self._collective = None


class Activation:
    """One gathered activation."""

    def __init__(self, piece: Tensor, whole: Tensor, again: Callable[[Tensor], Tensor]) -> None:
        """`again` gathers `piece`, which was gathered as `whole`."""
        self._own, self._own_version = piece.detach(), _torch.version_of(piece)  # they count changes together
        self._first, self._version, self._dtype = weakref.ref(whole), _torch.version_of(whole), whole.dtype
        self._again = again
        self._saved = self._waiting = 0  # views that were saved, and that the backward under way has not asked for
        self._whole: Tensor | None = None
        self._changed = False

    def pack(self, saved: Tensor) -> SavedView | None:
        """What autograd keeps of a view; None when that is not a view of what was gathered, as it was."""
        if saved.dtype != self._dtype or saved.is_neg() or saved.is_conj() or _torch.version_of(saved) != self._version:
            return None
        self._saved += 1
        return SavedView(self, (saved.shape, saved.stride(), int(saved.storage_offset())), None)

    def end(self) -> None:
        """The module that reads it has ended."""
        first = self._first()
        self._changed = first is not None and _torch.version_of(first) != self._version

    def view(self, of: SavedView) -> Tensor:
        """A view that autograd kept."""
        if self._changed or _torch.version_of(self._own) != self._own_version:
            raise _changed("an activation, split by Policy.acts,", of.strided[0])
        if self._whole is None:
            with torch.no_grad():
                self._whole = self._again(self._own)
            self._waiting = self._saved
        whole = self._whole
        self._waiting -= 1
        if self._waiting == 0:
            self._whole = None
        return whole.as_strided(*of.strided)


class Uncopied(NamedTuple):
    """A weight that is the shard itself: where it lies, and the tensors whose versions count changes."""

    begin: int
    end: int
    counters: tuple[Tensor, ...]


class _OfWeight(NamedTuple):
    """A saved view of a weight that is the shard itself, detached, with what counts changes of it."""

    tensor: Tensor
    counters: list[Tensor]
    versions: list[int]


def _changed(what: str, shape: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} of shape {list(shape)}. Update parameters after the backward; in a forward, write new tensors."
    )


class _Kept(dict[int, int]):
    """The versions of saved tensors that are kept detached, by identity: where there are hooks autograd has none."""

    def detached(self, saved: Tensor) -> Tensor:
        """Without its node: together they would be a cycle through C++, and live for ever."""
        detached = saved.detach()
        self[id(detached)] = _torch.version_of_saved(saved)
        return detached

    def as_it_is(self, saved: Tensor) -> Tensor:
        """The tensor itself, whose version is not looked at."""
        self.pop(id(saved), None)  # of what was there before it
        return saved


def saved_hooks(session: Any, traced: bool) -> AbstractContextManager[Any]:
    """Hooks around a forward of a session, see `Session.hooks`, that know what it has gathered by its storage.

    A view of a storage that is freed becomes a description, and one of a weight that is the shard itself is kept with
    what counts its changes; everything else is kept detached, and its version beside it.
    """
    by_storage: Mapping[int, Gathered] = session.by_storage
    uncopied: Mapping[int, Sequence[Uncopied]] = session.uncopied
    activations: Mapping[int, Activation] = session.activations
    freed, kept, pure = by_storage.values(), _Kept(), session.grid.pure

    def pack(saved: Tensor) -> Any:  # of every saved tensor: most are activations
        if type(saved) is not Tensor or activations or uncopied:
            return pack_other(saved)
        try:
            at = saved.data_ptr()
        except (RuntimeError, NotImplementedError):  # sparse, or of a transform that the forward itself has begun
            return kept.as_it_is(saved)
        for gathered in freed:
            if gathered.first <= at < gathered.end:
                return gathered.pack(saved, saved) or kept.as_it_is(saved)
        return kept.as_it_is(saved) if pure else kept.detached(saved)

    def pack_other(saved: Tensor) -> Any:
        """The same of any tensor, in any forward."""
        part = _torch.unwrap_local(saved)
        if type(part) is not Tensor and _torch.wraps(part):
            return kept.as_it_is(_torch.with_local(saved, part))  # a new DTensor, detached as others are
        try:
            key = _torch.storage_key(part)
        except (RuntimeError, NotImplementedError):
            return kept.as_it_is(saved)
        if (gathered := by_storage.get(key)) is not None:
            return gathered.pack(saved, part) or kept.as_it_is(saved)
        if key in activations and (packed := activations[key].pack(saved)) is not None:
            return packed
        if pure:
            return kept.as_it_is(saved)
        for weight in uncopied.get(key, ()):
            if weight.begin <= part.data_ptr() < weight.end:
                detached = saved.detach()
                return _OfWeight(detached, [detached, *weight.counters], _torch.versions_of([saved, *weight.counters]))
        return kept.detached(saved)

    unpack = _unpacking(session, kept)
    return saved_tensors_hooks(untraced(pack), untraced(unpack)) if traced else saved_tensors_hooks(pack, unpack)


def _unpacking(session: Any, kept: _Kept) -> Callable[[Any], Tensor]:
    """What gives autograd back what it has saved in a forward of a session, which lives as long as that is kept."""
    version_of_kept = kept.get

    def unpack(packed: Any, _keeps: Any = session) -> Tensor:  # a checkpoint finds the session as long as it is there
        kind = type(packed)
        if kind is SavedView:
            return packed.source.view(packed)
        if kind is _OfWeight:
            if _torch.versions_of(packed.counters) != packed.versions:
                raise _changed("a weight", packed.tensor.shape)
            return packed.tensor
        version = version_of_kept(id(packed))
        if version is not None and _torch.version_of_saved(packed) != version:
            raise _changed("a tensor", packed.shape)
        return packed

    return unpack
