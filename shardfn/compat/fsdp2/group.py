"""What one call of `fully_shard` was asked and knows, and the policy that a tree of such groups means. Layer 6."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from shardfn.core.errors import ShardError
from shardfn.core.model import shards_in
from shardfn.core.pattern import exactly
from shardfn.core.policy import Policy
from shardfn.held import Held

GROUP = "_shardfn_fsdp2"  # the key of a `Group` in the dict of each of its modules


@dataclass(eq=False)
class Group:
    """One call of `fully_shard`: what it was asked, and how things stand.

    `data` are the axes of the mesh that split the batch, the last one weights too; others are those of DTensors that
    `parallelize_module` made.
    """

    mesh: DeviceMesh
    data: tuple[str, ...]
    precision: MixedPrecisionPolicy
    offloads: bool
    reshard: bool | int | None  # after the forward; None: unless it is the root
    ignored: list[nn.Parameter] = field(default_factory=list)
    dims: dict[int, int] = field(default_factory=dict)  # id of a parameter that is no shard yet -> the dim to split
    placed: DeviceMesh | None = None
    syncs: bool = True  # whether gradients are reduced
    all_reduces: bool = True  # whether that goes on over the axis that replicates
    scale: float = 1.0  # of gradients, beside the mean over ranks
    is_root: bool | None = None  # None before the first forward
    version: int = 0  # counts changes of what a plan is made from
    held: "tuple[list[Group], list[int], Held] | None" = None  # of the tree below
    unsharded: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)  # (table, key, shard)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        kind = self.mesh.device_type
        return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")

    @property
    def holds_back(self) -> bool:
        """Whether gradients stay on each rank, to be reduced with those of a later backward."""
        return not self.syncs or (not self.all_reduces and len(self.data) > 1)

    def put_back(self) -> None:
        """Have the shards in their places that whole weights took."""
        while self.unsharded:
            table, key, shard = self.unsharded.pop()
            table[key] = shard

    def changed(self) -> None:
        """Plans that were made with it are no good any more."""
        self.version += 1


def group_of(module: nn.Module) -> Group | None:
    """What a module that was sharded by `fully_shard` knows; None of other modules."""
    return module.__dict__.get(GROUP)


def groups(module: nn.Module) -> Iterator[tuple[str, nn.Module, Group]]:
    """(name, module, group) of every such module in a tree, in its order."""
    for name, inside in module.named_modules():
        if (found := group_of(inside)) is not None:
            yield name, inside, found


def ignored_in(module: nn.Module) -> set[int]:
    """The ids of the parameters that the groups in a tree leave alone."""
    return {id(parameter) for _, _, group in groups(module) for parameter in group.ignored}


def policy_of(module: nn.Module, own: Group, leave: Set[int] = frozenset()) -> Policy:
    """The policy that the groups in a tree mean, without the parameters whose ids are in `leave`.

    Raises:
        ShardError: groups differ in what only a whole tree can have.
    """
    units: dict[str, dict[str, Any]] = {}
    ignored = leave | {id(p) for p in own.ignored} | ignored_in(module)
    for name, _, group in groups(module):
        _require_alike(name, own, group)
        if name:
            units[exactly(name)] = _unit_settings(group)
    if own.reshard:
        units[""] = {"regather": own.reshard}
    rules: dict[str, str] = {}
    ignore: list[str] = []
    shards = shards_in(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in ignored:
            ignore.append(exactly(name))
        elif (rule := _rule(parameter, own, id(parameter) in shards)) is not None:
            rules[exactly(name)] = rule
    precision = own.precision
    return Policy(
        rules=rules,
        units=units,
        ignore=ignore,
        batch=own.data,
        compute_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        output_dtype=precision.output_dtype,
        cast_inputs=precision.cast_forward_inputs,
        offload="cpu" if own.offloads else None,
    )


def _unit_settings(group: Group) -> dict[str, Any]:
    precision = group.precision
    return {
        "regather": group.reshard if group.reshard is not None else True,
        "compute_dtype": precision.param_dtype,
        "reduce_dtype": precision.reduce_dtype,
        "output_dtype": precision.output_dtype,
        "cast_inputs": precision.cast_forward_inputs,
    }


def _rule(parameter: Tensor, own: Group, is_shard: bool) -> str | None:
    """Where the last data axis splits a parameter: dim 0, or what `shard_placement_fn` said; None for the default."""
    axis, dim = own.data[-1], own.dims.get(id(parameter), 0)
    if is_shard and isinstance(parameter, DTensor) and axis in (names := parameter.device_mesh.mesh_dim_names or ()):
        placement = parameter.placements[names.index(axis)]
        dim = placement.dim if isinstance(placement, Shard) else 0
    if dim == 0 and parameter.dim() and parameter.numel() and parameter.shape[0] % own.mesh.size() == 0:
        return None
    return " ".join(f"{size}@{axis}" if i == dim else str(size) for i, size in enumerate(parameter.shape))


def _require_alike(name: str, own: Group, inner: Group) -> None:
    if inner.mesh != own.mesh:
        raise ShardError(
            f"fully_shard: {name!r} was sharded over another mesh ({inner.mesh}) than the module around it "
            f"({own.mesh}); use the same one"
        )
    if inner.offloads != own.offloads:
        raise ShardError(f"fully_shard: {name!r} and the module around it have different offload policies; use one")
