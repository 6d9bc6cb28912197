"""Cutting the parameters of a new instance into shards, in place. Layer 6."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardfn.compat.fsdp1.instance import Instance, instances, own_of
from shardfn.compat.sharded import put_shards, refuse_scalars, spread_inside
from shardfn.core.agreement import exchange_numbers
from shardfn.core.errors import ShardError
from shardfn.core.model import shards_in
from shardfn.watched import REPLACED


def shard_now(module: nn.Module) -> None:
    """Shard what is in the tree of an instance, is not ignored, and no instance in it has sharded before.

    Raises:
        ValueError: a scalar parameter.
        ShardError: as `shard`.
    """
    own = own_of(module)
    ignored = {id(p) for p in own.ignored_params}
    _require_own_shards(module)
    spread_inside(module, own)
    refuse_scalars(module, "FSDP doesn't support scalar parameters", ignored)
    _move_ignored(own)
    src = _source(own, module, ignored)
    init = _init(own) if _has_meta(module, ignored) and src is None else None
    put_shards(module, own, init=init, src=src)
    _set_dtypes_of_gradients(module)


def _set_dtypes_of_gradients(module: nn.Module) -> None:
    """`keep_low_precision_grads`: gradients stay in the dtype in which they are reduced."""
    for _, inside, own in instances(module):
        mixed = own.settings.mixed_precision
        if mixed.keep_low_precision_grads and (mixed.reduce_dtype or mixed.param_dtype):
            inner = {id(p) for name, deeper, _ in instances(inside) if name for p in deeper.parameters()}
            for parameter in inside.parameters():
                if isinstance(parameter, DTensor) and id(parameter) not in inner:
                    parameter.grad_dtype = mixed.reduce_dtype or mixed.param_dtype


def _require_own_shards(module: nn.Module) -> None:
    """Parameters that are DTensors already must be those of instances inside, and none may be tied to one of those."""
    for name, parameter in module.named_parameters():
        if REPLACED in vars(parameter):
            raise ShardError(
                f"FullyShardedDataParallel: '{name}' is tied to '{vars(parameter)[REPLACED]}' of a module that was "
                "wrapped before, and would train apart from it. Wrap the module that holds both, or use a policy."
            )
    inner = {id(p) for name, inside, _ in instances(module) if name for p in inside.parameters()}
    others = shards_in(module) - inner
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) in others:
            raise ShardError(
                f"FullyShardedDataParallel: '{name}' is a shard already ({parameter.placements}), of another model "
                "that holds this module. Wrap the module that both share, once, by itself."
            )


def _move_ignored(own: Instance) -> None:
    """`device_id` says where ignored parameters are too."""
    if own.settings.device_id is not None:
        for parameter in own.ignored_params:
            if not parameter.is_meta:
                parameter.data = parameter.data.to(own.device)


def _has_meta(module: nn.Module, ignored: set[int]) -> bool:
    held = [p for p in module.parameters() if id(p) not in ignored]
    return any(x.is_meta for x in (*held, *module.buffers()))


def _source(own: Instance, module: nn.Module, ignored: set[int]) -> int | None:
    """The rank whose values all get, if that is asked for and it has them.

    Communication: one small all-gather, with `sync_module_states`.
    """
    asked = any(inner.settings.sync_module_states for _, _, inner in instances(module))
    if not asked or own.mesh.size() == 1:
        return None
    (first_has_meta,), *_ = exchange_numbers(own.mesh, [_has_meta(module, ignored)])
    return None if first_has_meta else int(own.mesh.mesh.flatten()[0])


def _init(own: Instance) -> Callable[[Any], Any]:
    """What fills the meta tensors of one module."""
    fill = own.settings.param_init_fn
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
