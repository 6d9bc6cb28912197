"""What the constructor of FSDP1 takes, in every order that torch had. Layer 6.

torch 1.11 took `(module, process_group, cpu_offload, fsdp_auto_wrap_policy, backward_prefetch)`, 1.12 put
`sharding_strategy` third and renamed the policy. The four that moved have four different types, so each finds its name.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import _Policy

from shardfn.compat.fsdp1.instance import Instance, Settings
from shardfn.compat.meshes import HYBRID
from shardfn.core.errors import ShardError

NOT_GIVEN: Any = object()
_MOVED: dict[str, Any] = {  # argument that changed places -> the type that only it has; a policy may be any function
    "sharding_strategy": ShardingStrategy,
    "cpu_offload": CPUOffload,
    "backward_prefetch": BackwardPrefetch,
    "auto_wrap_policy": (_Policy, Callable),
}


def told_apart(given: dict[str, Any]) -> dict[str, Any]:
    """The four arguments that changed places between versions, under the names that they have now.

    Args:
        given: name -> value, as the present signature binds them.

    Raises:
        TypeError: a value of a type that none of them has, or two values for one of them.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or value is NOT_GIVEN:
            continue
        right = next((name for name, kind in _MOVED.items() if isinstance(value, kind)), None)
        if right is None:
            raise TypeError(f"FullyShardedDataParallel: {name}={value!r} is no {name}")
        if right in found:
            raise TypeError(f"FullyShardedDataParallel: two values for {right}: {found[right]!r} and {value!r}")
        found[right] = value
    if given["backward_prefetch"] is None:  # said in its place, it is a choice
        found.setdefault("backward_prefetch", None)
    return found


def the_policy(auto_wrap_policy: Any, fsdp_auto_wrap_policy: Any) -> Any:
    """The policy under its present name or that of torch 1.11, asked with the keyword that it knows."""
    if auto_wrap_policy is not None and fsdp_auto_wrap_policy is not None:
        raise TypeError("FullyShardedDataParallel: fsdp_auto_wrap_policy is the old name of auto_wrap_policy; pass one")
    policy = auto_wrap_policy if auto_wrap_policy is not None else fsdp_auto_wrap_policy
    if policy is None or isinstance(policy, _Policy):
        return policy
    return asked_as_it_knows(policy)


def asked_as_it_knows(policy: Callable[..., bool]) -> Callable[..., bool]:
    """torch up to 1.13 called the third argument of a policy `unwrapped_params`, later versions `nonwrapped_numel`."""
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


def ignored_of(
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    ignored_parameters: Iterable[nn.Parameter] | None,
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """The modules and parameters that a caller wants left alone, checked.

    Raises:
        ValueError, TypeError: with the words of torch.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    if ignored_states is not None and ignored_parameters is not None:
        raise ValueError("ignored_parameters is the old name of ignored_states. Please just pass ignored_states.")
    states: list[Any] = list(ignored_states if ignored_states is not None else ignored_parameters or [])
    if not (_all_are(nn.Parameter, states) or _all_are(nn.Module, states)):
        raise ValueError(
            f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {_types_of(states)}"
        )
    try:
        modules: list[Any] = list(ignored_modules) if ignored_modules is not None else []
    except TypeError as error:
        kind = type(ignored_modules)
        raise TypeError(f"`ignored_modules` should be an iterable of `torch.nn.Module`s but got {kind}") from error
    if not _all_are(nn.Module, modules):
        raise ValueError(f"ignored_modules expects nn.Module list elements but got types {_types_of(modules)}")
    found = [*modules, *(state for state in states if isinstance(state, nn.Module))]
    return found, [state for state in states if isinstance(state, nn.Parameter)]


def _all_are(kind: type, found: list[Any]) -> bool:
    return all(isinstance(one, kind) for one in found)


def _types_of(found: list[Any]) -> list[type]:
    return sorted({type(one) for one in found}, key=repr)


def ignored_in(
    module: nn.Module, modules: list[nn.Module], parameters: list[nn.Parameter]
) -> tuple[set[nn.Module], list[nn.Parameter]]:
    """All modules and parameters of a tree to leave alone, with those that instances in it leave alone.

    Raises:
        ValueError: an FSDP module is among them.
    """
    if any(Instance.has_sharded(one) for one in modules):
        raise ValueError("`ignored_modules` should not include FSDP modules")
    inside = {child for one in modules for child in one.modules() if not Instance.has_sharded(child)}
    if module in inside:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            f"parameters being ignored and is not well-supported: {module}",
            stacklevel=3,
        )
    found = {id(p): p for one in inside for p in one.parameters(recurse=False)} | {id(p): p for p in parameters}
    for _, _, inner in Instance.all_in(module):
        inside |= inner.ignored_modules
        found |= {id(p): p for p in inner.ignored_params}
    return inside, list(found.values())


def settings_of(given: Mapping[str, Any]) -> Settings:
    """The settings of a unit, from what a policy returns for it: all arguments of the instance around it, some changed.

    Raises:
        ShardError: it wants ranks of its own.
    """
    for name in ("process_group", "device_mesh"):
        if given.get(name) is not None:
            raise ShardError(f"FullyShardedDataParallel: a policy gives a unit a {name} of its own; wrap it by hand")
    known: dict[str, Any] = {name: given[name] for name in Settings.__dataclass_fields__ if name in given}
    unset = ("sharding_strategy", "mixed_precision", "cpu_offload")
    return replace(Settings(), **{n: value for n, value in known.items() if not (value is None and n in unset)})


def clamped(settings: Settings, mesh: DeviceMesh, *, quiet: bool = False) -> Settings:
    """NO_SHARD when there is nothing to split over; warns as torch does, unless `quiet`."""
    strategy = settings.sharding_strategy
    if mesh.get_group("fsdp").size() == 1:
        if strategy != ShardingStrategy.NO_SHARD and not quiet:
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", stacklevel=3
            )
        return replace(settings, sharding_strategy=ShardingStrategy.NO_SHARD)
    if strategy == ShardingStrategy.NO_SHARD and not quiet:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` "
            "instead.",
            FutureWarning,
            stacklevel=3,
        )
    return settings


def check_comm_hook(module: nn.Module, hook: object) -> None:
    """Refuse a hook that cannot be registered, with the words of torch.

    Raises:
        AssertionError, ValueError: see `FullyShardedDataParallel.register_comm_hook`.
    """
    if Instance.of(module).inner:
        raise AssertionError("register_comm_hook can only be called on a root instance.")
    for _, _, inner in Instance.all_in(module):
        if inner.settings.sharding_strategy in HYBRID:
            raise AssertionError(
                f"Communication hook is not supported for hybrid strategies: {inner.settings.sharding_strategy}"
            )
        if inner.reduction != "mean":
            raise AssertionError("A communication hook is already registered")
    if not callable(hook):
        raise ValueError(f"The communication hook must be callable but got {hook}")
