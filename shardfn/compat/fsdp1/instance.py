"""What one instance of FSDP1 was asked and knows, and what that means in a policy. Layer 6."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp._common_utils import TrainingState

from shardfn._torch import buffers_of
from shardfn.compat.fsdp1.buffers import as_before, cast
from shardfn.compat.sharded import Sharded, Tree, own_modules, record_in, record_of, records
from shardfn.core.pattern import exactly

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
ZERO2 = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


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


def state_dict_settings(kind: StateDictType) -> StateDictSettings:
    """A flavour of state dicts, with configs as they are by default."""
    config, optim_config = _CONFIGS[kind]
    return StateDictSettings(kind, config(), optim_config())


@dataclass(eq=False, kw_only=True)
class Instance(Sharded):
    """One `FullyShardedDataParallel`: what it was asked, where it runs, and how things stand."""

    verb = "FullyShardedDataParallel"

    settings: Settings
    ignored_modules: set[nn.Module] = field(default_factory=set)
    given_mesh: bool = False  # whether the constructor was given a `device_mesh`
    inner: bool = False  # whether another instance holds it
    training_state: TrainingState = TrainingState.IDLE
    state_dicts: StateDictSettings = field(default_factory=lambda: state_dict_settings(StateDictType.FULL_STATE_DICT))
    buffers_are_low: bool | None = None  # whether they were cast to `buffer_dtype`; None before the first forward
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
        return replace(self, ignored_modules=modules, ignored_params=params)

    def is_exact(self, module: nn.Module) -> bool:
        return self.full_precision_in_eval and not module.training

    def note_root(self, module: nn.Module) -> None:
        for name, _, inner in instances(module):
            inner.is_root = False if name else not inner.inner

    def begin(self, module: nn.Module, tree: Tree) -> None:
        """From the first call on buffers are in `buffer_dtype`, but for calls in full precision."""
        low = not self.is_exact(module)
        if self.buffers_are_low == low:
            return
        for _, inside, own in instances(module):
            own.buffers_are_low = low
            own._cast_buffers(inside, low)

    def _cast_buffers(self, module: nn.Module, low: bool) -> None:
        """Give what is in its module, and in no deeper instance, its buffers in `buffer_dtype`, or as they were."""
        dtype = self.settings.mixed_precision.buffer_dtype
        if dtype is None:
            return
        for _, part in own_modules(module):
            table = buffers_of(part) if part not in self.ignored_modules else {}
            for name, buffer in table.items():
                if buffer is not None and buffer.is_floating_point():
                    table[name] = cast(buffer, dtype) if low else as_before(buffer)

    def unit_settings(self, exact: bool) -> dict[str, Any]:
        mixed = self.settings.mixed_precision
        return {
            "regather": self.settings.regathers,
            "cast_inputs": mixed.cast_forward_inputs,
            "compute_dtype": None if exact else mixed.param_dtype,
            "reduce_dtype": None if exact else mixed.reduce_dtype,
        }

    def root_settings(self, exact: bool) -> dict[str, Any]:
        return self.unit_settings(exact) | {"cast_inputs": self.settings.mixed_precision.cast_root_forward_inputs}

    def rules(self, module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
        """Parameters of instances that shard none are whole everywhere."""
        whole = (_own_names(name, inside) for name, inside, own in instances(module) if not own.settings.shards)
        return {exactly(name): "..." for name in chain.from_iterable(whole) if name in named}


def instance_of(module: nn.Module) -> Instance | None:
    """What an FSDP1 module knows; None of other modules."""
    return record_in(module, Instance)


def instances(module: nn.Module) -> Iterator[tuple[str, nn.Module, Instance]]:
    """(name, module, instance) of every FSDP1 module in a tree, in its order."""
    return records(module, Instance)


def own_of(module: nn.Module) -> Instance:
    """The instance of an FSDP1 module."""
    return record_of(module)


def _own_names(name: str, module: nn.Module) -> Iterator[str]:
    """Parameters of an instance that no deeper one has, under the names of the tree."""
    prefix = f"{name}." if name else ""
    inner = [f"{path}." for path, _, _ in instances(module) if path]
    for own, _ in module.named_parameters(remove_duplicate=False):
        if not any(own.startswith(path) for path in inner):
            yield prefix + own
