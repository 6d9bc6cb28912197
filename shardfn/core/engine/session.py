"""The weights of one `apply`: gathered just in time, freed after their unit, gathered again for its backward. Layer 3.

[Note: who keeps a gathered weight alive]
    from `enter` to `leave` of its unit     the session (`_live`)
    between forward and backward            nobody: autograd saves views of it, and the pack hook replaces each view
                                            of a gathered storage by (bucket, offset, size, stride)
    in the backward of the unit             `_Regather`, from the first unpack until the bucket's gradients arrive
The root unit is gathered first and kept until its backward: its views are saved as they are.
A bucket that needs no collective (one data rank, or replicated weights) has nothing to free.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardfn._torch import in_transform, unwrap_local, version_of
from shardfn.core.buckets import BucketOnGrid, GatherBucket, buckets_on_grid
from shardfn.core.errors import ShardError
from shardfn.core.layout import compute_view
from shardfn.core.mesh import Grid
from shardfn.core.plan import Bucket, Plan, Unit

_UNITS_REGATHERED = 2  # how many units may be whole at the same time in a backward


class Session:
    """Gives a module its weights by parameter name, in the shapes that it computes with."""

    def __init__(self, plan: Plan, grid: Grid, leaves: Mapping[str, Tensor]) -> None:
        self.plan, self.grid, self.leaves = plan, grid, leaves
        self._units = {unit.name: unit for unit in plan.units}
        self._spots = buckets_on_grid(plan, grid)
        self._differentiates = torch.is_grad_enabled()
        self._live: dict[str, dict[str, Tensor]] = {}
        self._depth: dict[str, int] = {}
        self._by_storage: dict[int, _Regather] = {}
        self._regathered: list[_Regather] = []

    def weight(self, name: str) -> Tensor:
        """The gathered parameter, [whole over data, split over compute]; gathers its unit when it is not live."""
        unit = self.plan.layouts[name].unit
        if unit not in self._live:
            # A unit first read under no_grad, or by a checkpoint that recomputes, is used with gradients afterwards.
            with torch.set_grad_enabled(self._differentiates or torch.is_grad_enabled()):
                self._live[unit] = self._gather(self._units[unit])
        return self._live[unit][name]

    def enter(self, unit: str) -> None:
        """The forward of a unit begins; its weights are gathered when first asked for."""
        self._depth[unit] = self._depth.get(unit, 0) + 1

    def leave(self, unit: str) -> None:
        """The forward of a unit ends: let go of its weights, also after an exception."""
        self._depth[unit] -= 1
        if self._depth[unit] == 0:
            self._free(unit)

    def close(self) -> None:
        """The call ends: let go of everything. A recomputation in the backward may still ask for weights."""
        for unit in list(self._live):
            self._free(unit)

    def hooks(self) -> AbstractContextManager[Any]:
        """Within it, autograd saves views of freed weights as descriptions."""
        frees = self.plan.policy.regather and any(unit for unit in self._units)
        if not frees or not torch.is_grad_enabled() or in_transform():
            return nullcontext()
        return saved_tensors_hooks(self._pack, _unpack)

    def _gather(self, unit: Unit) -> dict[str, Tensor]:
        wholes: dict[str, Tensor] = {}
        for bucket in unit.buckets:
            wholes |= self._gather_bucket(unit, bucket)
        layouts = (self.plan.layouts[name] for name in unit.params)
        return {x.name: compute_view(x, [wholes[leaf.name] for leaf in x.leaves]) for x in layouts}

    def _gather_bucket(self, unit: Unit, bucket: Bucket) -> dict[str, Tensor]:
        missing = [name for name in bucket.leaves if name not in self.leaves]
        if missing:
            raise ShardError(f"apply: the tree has no leaf {missing[0]!r}, which unit {unit.name or '(root)'!r} needs")
        spot = self._spots[bucket]
        leaves = [self.leaves[name] for name in bucket.leaves]
        frees = bool(self.plan.policy.regather and unit.name and spot.communicates)
        regather = _Regather(spot, leaves, self) if frees else None
        wholes = GatherBucket.apply(spot, regather.release if regather else None, *leaves)
        if regather is not None and (storage := wholes[0].untyped_storage().data_ptr()):
            regather.gathered = {whole.storage_offset(): version_of(whole) for whole in wholes}
            self._by_storage[storage] = regather
        return dict(zip(bucket.leaves, wholes, strict=True))

    def _free(self, unit: str) -> None:
        self._live.pop(unit, None)
        gone = [storage for storage, regather in self._by_storage.items() if regather.spot.bucket.unit == unit]
        for storage in gone:
            del self._by_storage[storage]

    def _pack(self, saved: Tensor) -> Any:
        regather = self._by_storage.get(saved.untyped_storage().data_ptr()) if self._by_storage else None
        if regather is None:
            return saved
        regather.require_unchanged(saved)
        return _Packed(regather, saved.dtype, saved.shape, saved.stride(), int(saved.storage_offset()))

    def keep(self, regather: "_Regather") -> None:
        """Note a bucket gathered again; the one that came first goes when too many units are whole."""
        self._regathered.append(regather)
        while len({r.spot.bucket.unit for r in self._regathered}) > _UNITS_REGATHERED:
            self._regathered[0].release()

    def drop(self, regather: "_Regather") -> None:
        """Forget a bucket that was released."""
        if regather in self._regathered:
            self._regathered.remove(regather)


@dataclass(frozen=True)
class _Packed:
    """A saved view of a gathered storage, without the storage."""

    regather: "_Regather"
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: Any) -> Tensor:
    return packed.regather.view(packed) if isinstance(packed, _Packed) else packed


class _Regather:
    """One bucket of one gather, ready to be gathered again with the same values."""

    def __init__(self, spot: BucketOnGrid, leaves: list[Tensor], session: Session) -> None:
        self.spot = spot
        self._shards = [unwrap_local(leaf).detach() for leaf in leaves]
        self._versions = [version_of(shard) for shard in self._shards]
        self._session = session
        self._flat: Tensor | None = None
        self.gathered: dict[int, int] = {}  # offset in the gathered storage -> version of the tensor that begins there

    def require_unchanged(self, saved: Tensor) -> None:
        """A forward that writes into a gathered weight uses values that gathering again would not bring back."""
        begins = max(offset for offset in self.gathered if offset <= saved.storage_offset())
        if version_of(saved) != self.gathered[begins]:
            name = self.spot.bucket.leaves[list(self.gathered).index(begins)]
            raise RuntimeError(
                f"'{name}' was changed in place by the forward; with Policy(regather=True) its backward would use the "
                f"value from before. Write a new tensor instead, or update the tree of parameters."
            )

    def view(self, packed: _Packed) -> Tensor:
        """The saved view; the bucket's one all-gather happens at the first one."""
        if self._flat is None:
            for name, shard, version in zip(self.spot.bucket.leaves, self._shards, self._versions, strict=True):
                if version_of(shard) != version:
                    raise RuntimeError(
                        f"'{name}' was changed in place between the forward and the backward that needs it; "
                        f"run the backward before the optimizer step"
                    )
            first = self.spot.gather(self._shards)[0]
            self._flat = first.new_empty(0).set_(first.untyped_storage())
            self._session.keep(self)
        return self._flat.as_strided(packed.shape, packed.stride, packed.offset)

    def release(self) -> None:
        """Let go of the gathered storage; a later view gathers again."""
        self._flat = None
        self._session.drop(self)
