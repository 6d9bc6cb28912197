"""What one instance of FSDP1 was asked and knows, what that means in a policy, and how it shards. Layer 6."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    api,
)
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.tensor import DTensor

from shardfn._torch import buffers_of, parameters_of
from shardfn.compat.sharded import Sharded, Tree, own_modules, put_shards, refuse_scalars, spread_inside
from shardfn.core.agreement import exchange_numbers
from shardfn.core.errors import ShardError
from shardfn.core.model import shards_in
from shardfn.core.pattern import exactly
from shardfn.torch_optimizers import REPLACED

_ZERO2 = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
_CONFIGS: dict[StateDictType, tuple[type[api.StateDictConfig], type[api.OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (api.FullStateDictConfig, api.FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (api.LocalStateDictConfig, api.LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (api.ShardedStateDictConfig, api.ShardedOptimStateDictConfig),
}
_MASTER = "_shardfn_buffer_before"  # on a buffer that was cast to `buffer_dtype`: what it was


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
        return self.shards and self.sharding_strategy not in _ZERO2


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

    def shard(self, module: nn.Module) -> None:
        """Shard what is in the tree of its module, is not ignored, and no instance in it has sharded before.

        Raises:
            ValueError: a scalar parameter.
            ShardError: as `shard`.
        """
        ignored = {id(p) for p in self.ignored_params}
        _require_own_shards(module)
        spread_inside(module, self)
        refuse_scalars(module, "FSDP doesn't support scalar parameters", ignored)
        for parameter in self.ignored_params if self.settings.device_id is not None else ():
            if not parameter.is_meta:  # `device_id` says where they are too
                parameter.data = parameter.data.to(self.device)
        has_meta = _has_meta(module, ignored)
        src = self._source(module, has_meta)
        put_shards(module, self, init=_init(self.settings.param_init_fn) if has_meta and src is None else None, src=src)
        for _, inside, own in Instance.all_in(module):
            own._set_dtypes_of_gradients(inside)

    def _source(self, module: nn.Module, has_meta: bool) -> int | None:
        """The rank whose values all get, if that is asked for and it has them.

        Communication: one small all-gather, with `sync_module_states`.
        """
        asked = any(inner.settings.sync_module_states for _, _, inner in Instance.all_in(module))
        if not asked or self.mesh.size() == 1:
            return None
        (first_has_meta,), *_ = exchange_numbers(self.mesh, [has_meta])
        return None if first_has_meta else self.first_rank

    def _set_dtypes_of_gradients(self, module: nn.Module) -> None:
        """`keep_low_precision_grads`: gradients stay in the dtype in which they are reduced."""
        mixed = self.settings.mixed_precision
        if mixed.keep_low_precision_grads and (mixed.reduce_dtype or mixed.param_dtype):
            inner = {id(p) for name, deeper, _ in Instance.all_in(module) if name for p in deeper.parameters()}
            for parameter in module.parameters():
                if isinstance(parameter, DTensor) and id(parameter) not in inner:
                    parameter.grad_dtype = mixed.reduce_dtype or mixed.param_dtype

    def is_exact(self, module: nn.Module) -> bool:
        return self.full_precision_in_eval and not module.training

    def note_root(self, module: nn.Module) -> None:
        for name, _, inner in Instance.all_in(module):
            inner.is_root = False if name else not inner.inner

    def begin(self, module: nn.Module, tree: Tree) -> None:
        """From the first call on buffers are in `buffer_dtype`, but for calls in full precision."""
        low = not self.is_exact(module)
        if self.buffers_are_low == low:
            return
        for _, inside, own in Instance.all_in(module):
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
                    table[name] = _cast(buffer, dtype) if low else as_before(buffer)

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
        whole = (
            ".".join(filter(None, (name, path, key)))
            for name, inside, own in Instance.all_in(module)
            if not own.settings.shards
            for path, part in own_modules(inside)
            for key in parameters_of(part)
        )
        return {exactly(name): "..." for name in whole if name in named}


def as_before(buffer: Tensor) -> Tensor:
    """A buffer in the dtype that it had: one that no forward has changed exactly, from what it was before the cast."""
    master = vars(buffer).get(_MASTER)
    if master is None:
        return buffer
    unchanged = master.shape == buffer.shape and master.to(buffer.dtype).equal(buffer)
    return master if unchanged else buffer.to(master.dtype)


def _cast(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer in another dtype, which knows what it was."""
    if buffer.dtype == dtype:
        return buffer
    low = buffer.to(dtype)
    vars(low)[_MASTER] = buffer
    return low


def _require_own_shards(module: nn.Module) -> None:
    """Parameters that are DTensors already must be those of instances inside, and none may be tied to one of those."""
    for name, parameter in module.named_parameters():
        if REPLACED in vars(parameter):
            raise ShardError(
                f"FullyShardedDataParallel: '{name}' is tied to '{vars(parameter)[REPLACED]}' of a module that was "
                "wrapped before, and would train apart from it. Wrap the module that holds both, or use a policy."
            )
    inner = {id(p) for name, inside, _ in Instance.all_in(module) if name for p in inside.parameters()}
    others = shards_in(module) - inner
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) in others:
            raise ShardError(
                f"FullyShardedDataParallel: '{name}' is a shard already ({parameter.placements}), of another model "
                "that holds this module. Wrap the module that both share, once, by itself."
            )


def _has_meta(module: nn.Module, ignored: set[int]) -> bool:
    held = [p for p in module.parameters() if id(p) not in ignored]
    return any(x.is_meta for x in (*held, *module.buffers()))


def _init(fill: Callable[[nn.Module], Any] | None) -> Callable[[Any], Any]:
    """What fills the meta tensors of one module: `param_init_fn`, or its own `reset_parameters`."""
    if fill is not None and not callable(fill):
        raise ValueError(f"Expected {fill} to be callable but got {type(fill)}")

    def init(module: Any) -> None:
        try:
            fill(module) if fill is not None else module.reset_parameters()
        except Exception as error:
            if fill is None:
                warnings.warn(
                    f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure "
                    f"that your module of type {type(module)} implements a `reset_parameters()` method.",
                    stacklevel=2,
                )
            raise
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():  # memory that nobody filled, for a checkpoint to come
                tensor.data.nan_to_num_(0.0, 0.0, 0.0)

    return init
