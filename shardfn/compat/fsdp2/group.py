"""What one call of `fully_shard` was asked and knows, what that means in a policy, and how it shards. Layer 6."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from shardfn._torch import move_to_mesh
from shardfn.compat.sharded import Sharded, Tree, ignored_in, put_shards, refuse_scalars, spread_inside
from shardfn.core.model import shards_in
from shardfn.core.pattern import exactly
from shardfn.torch_optimizers import REPLACED


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
    unsharded: ExitStack | None = None  # puts the shards back that whole weights have taken the places of

    @property
    def holds_back(self) -> bool:
        return not self.syncs or (not self.all_reduces and len(self.data) > 1)

    def shard(self, module: nn.Module) -> None:
        """Shard what is in what it is to hold, is not ignored, and no group in it has sharded before.

        Raises:
            ValueError: scalar parameters; parameters that are shared with modules sharded before.
            ShardError: as `shard`.
        """
        left = shards_in(module) | {id(p) for p in self.ignored_params} | ignored_in(module, Group)
        refuse_scalars(module, "fully_shard doesn't support scalar parameters", left)
        for name, parameter in module.named_parameters():
            if id(parameter) not in left and REPLACED in vars(parameter):
                raise ValueError(
                    f"Parameter '{name}' is shared with a parameter already managed by another FSDP group. For "
                    "shared/tied parameters, use fully_shard([module_a, module_b]) to place them in the same FSDP "
                    "group."
                )
        spread_inside(module, self)
        for _, inside, inner in Group.all_in(module):
            if inner.mesh != self.mesh and inner.placed is None and inner.mesh.mesh.equal(self.mesh.mesh):
                _move((p for p in _dtensors(inside) if p.device_mesh == inner.mesh), self.mesh)
                inner.mesh, inner.data = self.mesh, self.data  # the same ranks by other axis names
                inner.changed()
        # DTensors on the whole mesh, maybe by other axis names than those of the data axes here
        has_whole = self.placed is not None and self.placed.ndim >= self.mesh.ndim
        renamed = [p for p in _dtensors(module) if id(p) not in left] if has_whole else []
        _move(renamed, self.mesh)
        try:
            put_shards(module, self, later=True)
        except Exception:
            if self.placed is not None:
                _move(renamed, self.placed)
            raise

    def put_back(self) -> None:
        if self.unsharded is not None:
            unsharded, self.unsharded = self.unsharded, None
            unsharded.close()

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


def _dtensors(module: nn.Module) -> list[DTensor]:
    return [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]


def _move(parameters: Iterable[DTensor], mesh: DeviceMesh) -> None:
    for parameter in parameters:
        move_to_mesh(parameter, mesh, parameter.placements)
