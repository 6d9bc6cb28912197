"""What one instance of FSDP1 was asked and knows, and the policy that a tree of them means. Layer 6."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp._common_utils import TrainingState

from shardfn.core.errors import ShardError
from shardfn.core.pattern import exactly
from shardfn.core.policy import Policy
from shardfn.held import Held

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
ZERO2 = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
OWN_AXES = ("replicate", "fsdp")  # of the mesh of an instance, the second alone where nothing is replicated
INSTANCE = "_shardfn_fsdp1"  # the key of an `Instance` in the dict of its module


@dataclass(frozen=True)
class Settings:
    """What one instance was asked to do; the names are those of the constructor."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    param_init_fn: Callable[[nn.Module], Any] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False

    @property
    def shards(self) -> bool:
        """Whether weights are split at all."""
        return self.sharding_strategy != ShardingStrategy.NO_SHARD

    @property
    def regathers(self) -> bool:
        """Whether weights are freed after the forward."""
        return self.shards and self.sharding_strategy not in ZERO2


@dataclass(eq=False)
class Instance:
    """One `FullyShardedDataParallel`: what it was asked, where it runs, and how things stand."""

    settings: Settings
    mesh: DeviceMesh
    device: torch.device
    ignored_modules: set[nn.Module] = field(default_factory=set)
    ignored_params: list[nn.Parameter] = field(default_factory=list)
    given_mesh: bool = False  # whether the constructor was given a `device_mesh`
    placed: DeviceMesh | None = None  # of the parameters that `parallelize_module` had split before
    inner: bool = False  # whether another instance holds it
    is_root: bool | None = None
    training_state: TrainingState = TrainingState.IDLE
    syncs: bool = True
    whole_everywhere: bool = False  # whether `summon_full_params` made parameters whole on all ranks
    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)
    comm_hook: Callable[[torch.Tensor, torch.Tensor | None], None] | None = None
    buffers_are_low: bool | None = None  # whether they were cast to `buffer_dtype`; None before the first forward
    held: dict[bool, Held] = field(default_factory=dict)  # of the tree below, by whether it is in full precision
    full_precision_in_eval: bool = field(default_factory=lambda: os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1")

    def require(self, state: TrainingState) -> None:
        """Raise unless things stand so.

        Raises:
            ValueError: they do not, with the words of torch.
        """
        if self.training_state != state:
            raise ValueError(f"expected to be in states {[state]} but current state is {self.training_state}")

    def copied(self, memo: Mapping[int, Any]) -> "Instance":
        """The same for a deep copy of the module; it shares the mesh."""
        modules = {memo.get(id(one), one) for one in self.ignored_modules}
        params = [memo.get(id(one), one) for one in self.ignored_params]
        return replace(self, ignored_modules=modules, ignored_params=params, held={})


def instance_of(module: nn.Module) -> Instance | None:
    """What an FSDP1 module knows; None of other modules."""
    return module.__dict__.get(INSTANCE)


def instances(module: nn.Module) -> Iterator[tuple[str, nn.Module, Instance]]:
    """(name, module, instance) of every FSDP1 module in a tree, in its order."""
    for name, inside in module.named_modules():
        if (found := instance_of(inside)) is not None:
            yield name, inside, found


def policy_of(module: nn.Module, *, ignore: set[int], full_precision: bool = False) -> Policy:
    """The policy that the instances in a tree mean; `module` is one itself.

    Args:
        module: the outermost instance.
        ignore: ids of parameters to leave out.
        full_precision: without mixed precision.

    Raises:
        ShardError: instances differ in what only a whole tree can have.
    """
    own = instance_of(module)
    assert own is not None
    units: dict[str, dict[str, Any]] = {}
    whole: list[str] = []
    for name, inside, instance in instances(module):
        _require_alike(name, own, instance)
        if name:
            units[exactly(name)] = _unit_settings(instance.settings, full_precision)
        if not instance.settings.shards:
            whole += [exactly(full) for full in _own_names(name, inside, ignore)]
    settings = own.settings
    mixed = settings.mixed_precision
    ignored = [exactly(name) for name, p in module.named_parameters(remove_duplicate=False) if id(p) in ignore]
    return Policy(
        rules=dict.fromkeys(whole, "..."),
        units=units,
        ignore=ignored,
        regather=settings.regathers,
        compute_dtype=None if full_precision else mixed.param_dtype,
        reduce_dtype=None if full_precision else mixed.reduce_dtype,
        cast_inputs=mixed.cast_root_forward_inputs,
        offload="cpu" if settings.cpu_offload.offload_params else None,
        batch=[axis for axis in OWN_AXES if axis in (own.mesh.mesh_dim_names or ())],
    )


def _unit_settings(settings: Settings, full_precision: bool) -> dict[str, Any]:
    mixed = settings.mixed_precision
    found: dict[str, Any] = {"regather": settings.regathers, "cast_inputs": mixed.cast_forward_inputs}
    found["compute_dtype"] = None if full_precision else mixed.param_dtype
    found["reduce_dtype"] = None if full_precision else mixed.reduce_dtype
    return found


def _require_alike(name: str, own: Instance, inner: Instance) -> None:
    if inner.mesh != own.mesh:
        raise ShardError(
            f"FullyShardedDataParallel: {name!r} was wrapped over other process groups ({inner.mesh}) than the module "
            f"around it ({own.mesh}); use the same ones"
        )
    if inner.settings.cpu_offload != own.settings.cpu_offload:
        raise ShardError(
            f"FullyShardedDataParallel: {name!r} has {inner.settings.cpu_offload}, and the module around it "
            f"{own.settings.cpu_offload}; offload all of them, or none"
        )


def _own_names(name: str, module: nn.Module, ignore: set[int]) -> Iterator[str]:
    """Parameters of an instance that no deeper one has, under the names of the tree."""
    prefix = f"{name}." if name else ""
    inner = [f"{path}." for path, _, _ in instances(module) if path]
    for own, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in ignore and not any(own.startswith(path) for path in inner):
            yield prefix + own
