"""What one call of `fully_shard` was asked and knows, and what that means in a policy. Layer 6."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from shardfn.compat.sharded import Sharded, Tree, record_in, record_of, records
from shardfn.core.model import shards_in
from shardfn.core.pattern import exactly


@dataclass(eq=False, kw_only=True)
class Group(Sharded):
    """One call of `fully_shard`: what it was asked, and how things stand; all its modules know it.

    Axes of the mesh that are not `data` are those of DTensors that `parallelize_module` made.
    """

    verb = "fully_shard"

    precision: MixedPrecisionPolicy
    reshard: bool | int | None  # after the forward; None: unless it is the root
    dims: dict[int, int] = field(default_factory=dict)  # id of a parameter that is no shard yet -> the dim to split
    all_reduces: bool = True  # whether reductions go on over the axis that replicates
    unsharded: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)  # (table, key, shard)

    @property
    def holds_back(self) -> bool:
        return not self.syncs or (not self.all_reduces and len(self.data) > 1)

    def put_back(self) -> None:
        while self.unsharded:
            table, key, shard = self.unsharded.pop()
            table[key] = shard

    def begin(self, module: nn.Module, tree: Tree) -> None:
        """The first forward decides who is the root: the module that it goes through.

        Raises:
            RuntimeError: a module inside was a root before, with the words of torch.
        """
        for group in tree.units.values():
            group.put_back()
        if self.is_root is not None:
            return
        inner = [(name, group) for name, group in tree.units.items() if group is not self]
        for name, group in inner:
            if group.is_root:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\nFSDP requires running forward through "
                    "the root module first"
                )
        self.is_root = True
        for _, group in inner:
            group.is_root = False

    def unit_settings(self, exact: bool) -> dict[str, Any]:
        return {"regather": self.reshard if self.reshard is not None else True, **self._precision()}

    def root_settings(self, exact: bool) -> dict[str, Any]:
        return self._precision() | ({"units": {"": {"regather": self.reshard}}} if self.reshard else {})

    def _precision(self) -> dict[str, Any]:
        return {
            "compute_dtype": self.precision.param_dtype,
            "reduce_dtype": self.precision.reduce_dtype,
            "output_dtype": self.precision.output_dtype,
            "cast_inputs": self.precision.cast_forward_inputs,
        }

    def rules(self, module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
        """Where the last data axis splits: dim 0, or what `shard_placement_fn` said."""
        shards = shards_in(module)
        made = {exactly(name): self._rule(p, id(p) in shards) for name, p in named.items()}
        return {name: rule for name, rule in made.items() if rule is not None}

    def _rule(self, parameter: Tensor, is_shard: bool) -> str | None:
        axis, dim = self.data[-1], self.dims.get(id(parameter), 0)
        mesh = parameter.device_mesh if is_shard and isinstance(parameter, DTensor) else None
        if isinstance(parameter, DTensor) and mesh is not None and axis in (names := mesh.mesh_dim_names or ()):
            placement = parameter.placements[names.index(axis)]
            dim = placement.dim if isinstance(placement, Shard) else 0
        if dim == 0 and parameter.dim() and parameter.numel() and parameter.shape[0] % self.mesh.size() == 0:
            return None
        return " ".join(f"{size}@{axis}" if i == dim else str(size) for i, size in enumerate(parameter.shape))


def group_of(module: nn.Module) -> Group | None:
    """What a module that was sharded by `fully_shard` knows; None of other modules."""
    return record_in(module, Group)


def groups(module: nn.Module) -> Iterator[tuple[str, nn.Module, Group]]:
    """(name, module, group) of every such module in a tree, in its order."""
    return records(module, Group)


def own_of(module: nn.Module) -> Group:
    """The group of a module that was sharded."""
    return record_of(module)
