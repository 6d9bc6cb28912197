"""What one instance of FSDP1 was asked and knows, what that means in a policy, and how it shards."""

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, StateDictSettings, StateDictType
from torch.distributed.fsdp import _init_utils as torchs
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp.wrap import _Policy, _post_order_apply
from torch.distributed.tensor import DTensor

from shardfn._torch import buffers_of, draw_whole_values, parameters_of
from shardfn.comm import exchange_numbers
from shardfn.compat.common import FillsBlanks, Sharded, Tree, note_blanks, own_modules, put_shards, spread_inside
from shardfn.layout import by_all_names, exactly, shards_in, unwrapped
from shardfn.notation import ShardError, see
from shardfn.params import initialize
from shardfn.stateful import REPLACED, take_shards

_ZERO2 = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
_CONFIGS: dict[StateDictType, tuple[type[fsdp.StateDictConfig], type[fsdp.OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (fsdp.LocalStateDictConfig, fsdp.LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig),
}
NOT_GIVEN: Any = object()
# Argument that changed places, in the present order -> the type that only it has; a policy may be any function.
_MOVED: dict[str, Any] = {"sharding_strategy": ShardingStrategy, "cpu_offload": CPUOffload}
_MOVED |= {"auto_wrap_policy": (_Policy, Callable), "backward_prefetch": fsdp.BackwardPrefetch}
_EXAMPLES = {"sharding_strategy": "ShardingStrategy.FULL_SHARD", "cpu_offload": "CPUOffload(offload_params=True)"}
_EXAMPLES |= {"auto_wrap_policy": "ModuleWrapPolicy({Block})", "backward_prefetch": "BackwardPrefetch.BACKWARD_PRE"}
_MASTER = "_shardfn_buffer_before"  # on a buffer that was cast to `buffer_dtype`: what it was


@dataclass(frozen=True)
class Settings:
    """What one instance was asked to do; the names are those of the constructor."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    backward_prefetch: fsdp.BackwardPrefetch | None = fsdp.BackwardPrefetch.BACKWARD_PRE
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

    def require_idle(self) -> None:
        """Refuse what cannot be done while parameters are whole.

        Raises:
            ValueError: they are, with the words of torch.
        """
        if self.training_state != (idle := TrainingState.IDLE):
            raise ValueError(f"expected to be in states {[idle]} but current state is {self.training_state}")

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
        params = [p for p in module.parameters() if id(p) not in ignored]
        torchs._verify_managed_params(module, params)
        for parameter in self.ignored_params if self.settings.device_id is not None else ():
            if not parameter.is_meta:  # `device_id` says where they are too
                parameter.data = parameter.data.to(self.device)
        has_meta = any(x.is_meta for x in (*params, *module.buffers()))
        src = self._source(module, has_meta)
        materializes = has_meta and src is None
        if materializes:
            draw_whole_values()
            with FillsBlanks():
                _materialize(module)
        put_shards(self, module, initialize.Origin(module, src=src))
        if materializes:
            note_blanks(self, module)
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                vars(parameter)["_fsdp_flattened"] = True  # Prodigy and Lightning look for it
        for _, inside, record in Instance.all_in(module):
            record._set_dtypes_of_gradients(inside)

    def _source(self, module: nn.Module, has_meta: bool) -> int | None:
        """The rank whose values all get, if that is asked for and it has them.

        Communication: one small all-gather, with `sync_module_states`.
        """
        asked = any(inner.settings.sync_module_states for _, _, inner in Instance.all_in(module))
        if not asked or self.mesh.size() == 1:
            return None
        (first_has_meta,), *_ = exchange_numbers(self.mesh, [has_meta])
        return None if first_has_meta else self.first_rank

    def _set_dtypes_of_gradients(self, module: Any) -> None:
        """`keep_low_precision_grads`: gradients stay in the dtype in which they are reduced."""
        mixed = self.settings.mixed_precision
        if mixed.keep_low_precision_grads and (mixed.reduce_dtype or mixed.param_dtype):
            for parameter in module.params:
                if isinstance(parameter, DTensor):
                    parameter.grad_dtype = mixed.reduce_dtype or mixed.param_dtype

    def is_exact(self, module: nn.Module) -> bool:
        return self.full_precision_in_eval and not module.training

    def note_root(self, module: nn.Module) -> None:
        for name, _, inner in Instance.all_in(module):
            inner.is_root = False if name else not inner.inner
        if self.is_root and self.settings.use_orig_params:
            take_shards()

    def begin(self, module: nn.Module, tree: Tree) -> None:
        """From the first call on buffers are in `buffer_dtype`, but for calls in full precision."""
        low = not self.is_exact(module)
        if self.buffers_are_low == low:
            return
        for _, inside, record in Instance.all_in(module):
            record.buffers_are_low = low
            record._cast_buffers(inside, low)

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
            "regather": self.settings.shards and self.settings.sharding_strategy not in _ZERO2,
            "cast_inputs": mixed.cast_forward_inputs,
            "compute_dtype": None if exact else mixed.param_dtype,
            "reduce_dtype": None if exact else mixed.reduce_dtype,
        }

    def root_settings(self, exact: bool) -> dict[str, Any]:
        return self.unit_settings(exact) | {"cast_inputs": self.settings.mixed_precision.cast_root_forward_inputs}

    def rules(self, module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
        """Parameters of instances that shard none are whole everywhere."""
        whole = [inside for _, inside, record in Instance.all_in(module) if not record.settings.shards]
        parts = (part for inside in whole for _, part in own_modules(inside))
        ids = {id(parameter) for part in parts for parameter in parameters_of(part).values()}
        return {exactly(name): "..." for name, parameter in named.items() if id(parameter) in ids}


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
    inner = {id(p) for name, inside, _ in Instance.all_in(module) if name for p in inside.parameters()}
    others = shards_in(module) - inner
    for name, parameter in module.named_parameters():
        if REPLACED in vars(parameter):
            why = f"FullyShardedDataParallel: '{name}' is tied to '{vars(parameter)[REPLACED]}' of one wrapped before"
            raise ShardError(f"{why}, and would train apart. Wrap the module that holds both, or use a policy.")
        if isinstance(parameter, DTensor) and id(parameter) in others:
            why = f"'{name}' is a shard already ({parameter.placements}), of another model that holds this module"
            raise ShardError(f"FullyShardedDataParallel: {why}. Wrap the module that both share, once, by itself.")


def _materialize(module: nn.Module) -> None:
    """Give meta tensors memory and values, in the order of torch: instances inside first, each breadth first."""
    tied = by_all_names(module.named_parameters(remove_duplicate=False))

    def materialize(inside: nn.Module) -> None:
        if Instance.has_sharded(inside):
            _materialize_own(unwrapped(inside), Instance.of(inside))

    _post_order_apply(module, materialize)
    for _, names in (one for one in tied if one[0].is_meta):
        for name in names[1:]:  # memory of their own
            path, _, attribute = name.rpartition(".")
            module.get_submodule(path)._parameters[attribute] = module.get_parameter(names[0])


def _materialize_own(module: nn.Module, record: Instance) -> None:
    """By `param_init_fn`, called with every module, or `reset_parameters()`; not what instances inside have."""
    fill = record.settings.param_init_fn
    left = record.ignored_modules | {inside for _, inside, _ in Instance.all_in(module)}
    modules = torchs._get_modules_to_materialize(module, left)
    of_meta = [one for one in modules if any(map(attrgetter("is_meta"), (*one.parameters(False), *one.buffers(False))))]
    if fill is not None and (of_meta or not callable(fill)):
        torchs._materialize_with_param_init_fn(module, fill, left)  # raises where it is not callable
        return
    for one in of_meta:
        one.to_empty(device=record.device, recurse=False)
        _reset(one)


def _reset(module: Any) -> None:
    try:
        with torch.no_grad():
            module.reset_parameters()
    except Exception as error:
        warnings.warn(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure "
            f"that your module of type {type(module)} implements a `reset_parameters()` method.",
            stacklevel=2,
        )
        raise


# ---------------------------------------------------------------------------------------------------------------------
# What the constructor takes, in every order that torch had
#
# torch 1.11 took `(module, process_group, cpu_offload, fsdp_auto_wrap_policy, backward_prefetch)`, 1.12 put
# `sharding_strategy` third and renamed the policy. The four that moved have four different types, so that each finds
# its name.


def told_apart(*values: Any) -> dict[str, Any]:
    """The four arguments whose order differs between versions of torch, by their present names.

    Args:
        values: in the order of `_MOVED`, as the present signature binds them.

    Raises:
        TypeError: a value of a type that none of them has, or two values for one of them.
    """
    arguments: dict[str, Any] = {}
    for name, value in zip(_MOVED, values, strict=True):
        if value is None or value is NOT_GIVEN:
            continue
        right = next((name for name, kind in _MOVED.items() if isinstance(value, kind)), None)
        if right is None:
            why = f"FullyShardedDataParallel: {name}={value!r} is no {name}, as {_EXAMPLES[name]} is"
            raise see(TypeError(why), "classes")
        if right in arguments:
            raise TypeError(f"FullyShardedDataParallel: two values for {right}: {arguments[right]!r} and {value!r}")
        arguments[right] = value
    if values[-1] is None:  # written out, None is a choice
        arguments.setdefault("backward_prefetch", None)
    return arguments


def the_policy(auto_wrap_policy: Any, fsdp_auto_wrap_policy: Any) -> Any:
    """The policy under its present name or that of torch 1.11, asked with the keyword that it knows."""
    if auto_wrap_policy is not None and fsdp_auto_wrap_policy is not None:
        raise TypeError("FullyShardedDataParallel: fsdp_auto_wrap_policy is the old name of auto_wrap_policy; pass one")
    policy = auto_wrap_policy if auto_wrap_policy is not None else fsdp_auto_wrap_policy
    if policy is None or isinstance(policy, _Policy):
        return policy
    if isinstance(policy, type):
        why = f"FullyShardedDataParallel: auto_wrap_policy={policy.__name__} is a class"
        raise see(TypeError(f"{why}: write ModuleWrapPolicy({{{policy.__name__}}})"), "classes")
    # torch up to 1.13 called the third argument of a policy `unwrapped_params`, later versions `nonwrapped_numel`
    try:
        named = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return policy
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in named.values())
    if "nonwrapped_numel" in named or (takes_any and "unwrapped_params" not in named):
        return policy

    def asked(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if "unwrapped_params" in named:
            return policy(module=module, recurse=recurse, unwrapped_params=nonwrapped_numel)
        return policy(module, recurse, nonwrapped_numel)

    return asked


def ignored_in(
    module: nn.Module, ignored_modules: Any, ignored_states: Any, ignored_parameters: Any
) -> tuple[set[nn.Module], list[nn.Parameter]]:
    """All modules and parameters of a tree to leave alone: what the caller names, and what instances in it leave alone.

    Raises:
        ValueError, TypeError: the caller names something else, with the words of torch.
    """
    if ignored_modules is not None and ignored_states is not None:
        why = "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        raise ValueError(why)
    if ignored_states is not None and ignored_parameters is not None:
        raise ValueError("ignored_parameters is the old name of ignored_states. Please just pass ignored_states.")
    states: list[Any] = list(ignored_states if ignored_states is not None else ignored_parameters or [])
    torchs._check_ignored_states(states, True)
    try:
        modules: list[Any] = list(ignored_modules) if ignored_modules is not None else []
    except TypeError as error:
        kind = type(ignored_modules)
        raise TypeError(f"`ignored_modules` should be an iterable of `torch.nn.Module`s but got {kind}") from error
    torchs._check_ignored_states(modules, False)
    modules += [state for state in states if isinstance(state, nn.Module)]
    parameters = [state for state in states if isinstance(state, nn.Parameter)]
    if any(Instance.has_sharded(one) for one in modules):
        raise ValueError("`ignored_modules` should not include FSDP modules")
    inside = {child for one in modules for child in one.modules() if not Instance.has_sharded(child)}
    if module in inside:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            f"parameters being ignored and is not well-supported: {module}",
            stacklevel=3,
        )
    params = {id(p): p for one in inside for p in one.parameters(recurse=False)} | {id(p): p for p in parameters}
    for _, _, inner in Instance.all_in(module):
        inside |= inner.ignored_modules
        params |= {id(p): p for p in inner.ignored_params}
    return inside, list(params.values())


def settings_of(options: Mapping[str, Any]) -> Settings:
    """The settings of a unit, from what a policy returns for it: all arguments of the instance around it, some changed.

    Raises:
        ShardError: it wants ranks of its own.
    """
    for name in ("process_group", "device_mesh"):
        if options.get(name) is not None:
            raise ShardError(f"FullyShardedDataParallel: a policy gives a unit a {name} of its own; wrap it by hand")
    known: dict[str, Any] = {name: options[name] for name in Settings.__dataclass_fields__ if name in options}
    unset = ("sharding_strategy", "mixed_precision", "cpu_offload")
    return replace(Settings(), **{n: value for n, value in known.items() if not (value is None and n in unset)})


def clamped(settings: Settings, mesh: DeviceMesh, *, quiet: bool = False) -> Settings:
    """NO_SHARD when there is nothing to split over; warns as torch does, unless `quiet`."""
    strategy = settings.sharding_strategy
    if mesh.get_group("fsdp").size() == 1:
        if strategy != ShardingStrategy.NO_SHARD and not quiet:
            why = f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1."
            warnings.warn(why, stacklevel=3)
        return replace(settings, sharding_strategy=ShardingStrategy.NO_SHARD)
    if strategy == ShardingStrategy.NO_SHARD and not quiet:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` "
            "instead.",
            FutureWarning,
            stacklevel=3,
        )
    return settings
