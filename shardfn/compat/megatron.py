"""Megatron-core's `TorchFullyShardedDataParallel` on shardfn; Megatron is no dependency."""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.compat.fsdp2 import fully_shard
from shardfn.layout import default_device_type
from shardfn.notation import ShardError

__all__ = ["TorchFullyShardedDataParallel"]
# Where Megatron has the classes that become units by default.
_DEFAULTS = (
    ("megatron.core.transformer.transformer_layer", "TransformerLayer"),
    ("megatron.core.models.common.embeddings.language_model_embedding", "LanguageModelEmbedding"),
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding"),
    ("megatron.core.tensor_parallel", "ColumnParallelLinear"),
)


class TorchFullyShardedDataParallel(nn.Module):
    """Megatron-core's wrapper around a model that `fully_shard` shards: change the import, keep the script.

        >>> import shardfn as sf, torch
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from shardfn.compat.megatron import TorchFullyShardedDataParallel
        >>> mesh = sf.make_mesh("cpu", fsdp=1)  # or torch.distributed.init_process_group(...)
        >>> config = SimpleNamespace(transformer_impl="local", recompute_granularity=None)
        >>> layers = nn.Sequential(nn.Linear(4, 2))
        >>> model = TorchFullyShardedDataParallel(config, SimpleNamespace(), layers, {nn.Linear})
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> sorted(model.state_dict()), type(model.module[0]).__name__
        (['0.bias', '0.weight'], 'FSDPLinear')

    Args:
        config: a `TransformerConfig`, or anything with `transformer_impl` and `recompute_granularity`.
        ddp_config: a `DistributedDataParallelConfig`, or anything; `reshard_after_forward` counts, True without it.
        module: the model; sharded in place.
        sub_modules_to_wrap: classes whose instances become units, with those that modules list in `_fsdp_modules`.
            Default: Megatron's, where it can be imported.
        disable_bucketing: no effect.
        process_group: the data ranks. Default: Megatron's, where it can be imported, else all.

    Raises:
        ShardError: `_fsdp_modules` that are no classes.
        ValueError, AssertionError: as `fully_shard`.

    Communication: one small object exchange a unit.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        sub_modules_to_wrap: Iterable[type[nn.Module]] | None = None,
        disable_bucketing: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ddp_config = config, ddp_config
        self.module = module
        self.process_group = process_group if process_group is not None else _data_group()
        kind = default_device_type() if "nccl" in dist.get_backend() else "cpu"
        self.device_mesh = DeviceMesh.from_group(self.process_group, kind, mesh_dim_names=("fsdp",))
        classes = set(_defaults() if sub_modules_to_wrap is None else sub_modules_to_wrap)
        if getattr(config, "transformer_impl", None) == "local":
            classes = {cls for cls in classes if cls.__name__ != "ColumnParallelLinear"}
        classes |= _asked_for(module)
        reshard = getattr(ddp_config, "reshard_after_forward", True)
        attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
        chosen: list[Any] = [x for x in module.modules() if isinstance(x, tuple(classes)) and x is not module]
        for each in reversed(chosen):  # inner modules first: a unit may hold another one
            fully_shard(each, mesh=self.device_mesh, reshard_after_forward=reshard)
        for i, each in enumerate(chosen) if getattr(config, "recompute_granularity", None) is not None else ():
            each.set_modules_to_backward_prefetch(chosen[max(0, i - 1) : i])
        fully_shard(module, mesh=self.device_mesh, reshard_after_forward=reshard)
        for name, parameter in module.named_parameters():
            vars(parameter).update(attributes[name] | {"is_torch_fsdp2_param": True})

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*inputs, **kwargs)

    def state_dict(self, prefix: str = "", keep_vars: bool = False, destination: Any = None) -> Any:  # pyright: ignore
        """The model's, under its own names: `DTensor`s; the arguments are in Megatron's order."""
        return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """What the model saves: its own method of this name, or its state dict."""
        method = getattr(self.module, "state_dict_for_save_checkpoint", self.module.state_dict)
        return method(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # pyright: ignore
        """Does nothing: Megatron has loaded into the tensors of `state_dict()` by then."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing, as in Megatron: gradients are reduced in it too."""
        yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Does nothing: backwards reduce."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Does nothing: backwards reduce."""

    def scale_gradients(self, scaling_factor: float) -> None:
        """Does nothing, as in Megatron."""

    def zero_grad_buffer(self) -> None:
        """Does nothing: there is no buffer; `optimizer.zero_grad()` counts."""

    def broadcast_params(self) -> None:
        """Does nothing: each rank has its own part."""


def _asked_for(module: nn.Module) -> set[type[nn.Module]]:
    """The classes that modules list in `_fsdp_modules`.

    Raises:
        ShardError: something else is listed.
    """
    classes: set[type[nn.Module]] = set()
    for name, inside in module.named_modules():
        listed = getattr(inside, "_fsdp_modules", ())
        what = f"TorchFullyShardedDataParallel: _fsdp_modules of {name or type(inside).__name__!r}"
        if not isinstance(listed, list | tuple | set | frozenset):
            raise ShardError(f"{what} is {listed!r}, no list of classes")
        for cls in listed:
            if not isinstance(cls, type) or not issubclass(cls, nn.Module):
                raise ShardError(f"{what} lists {cls!r}, which is no class of modules")
            classes.add(cls)
    return classes


def _defaults() -> set[type[nn.Module]]:
    """Megatron's own classes, as far as they can be imported."""
    classes: set[type[nn.Module]] = set()
    for path, name in _DEFAULTS:
        with suppress(ImportError):
            classes.add(getattr(importlib.import_module(path), name))
    return classes


def _data_group() -> dist.ProcessGroup:
    with suppress(ImportError, AssertionError):  # no Megatron, or nobody has initialized it
        state: Any = importlib.import_module("megatron.core.parallel_state")
        return state.get_data_parallel_group(with_context_parallel=True)
    group = dist.group.WORLD
    if group is None:
        raise ShardError("TorchFullyShardedDataParallel: no process group; init_process_group comes first")
    return group
