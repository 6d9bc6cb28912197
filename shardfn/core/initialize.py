"""Filling meta tensors one module at a time, with values that do not depend on the mesh. Layer 3."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.core.errors import ShardError
from shardfn.core.shadow import shallow_copy


def initialized(
    model: nn.Module, init: Callable[[nn.Module], Any], seed: int, device: torch.device, buffers: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(first name, full tensor) of every meta parameter; replaces meta tensors in `buffers`.

    `init` is called on a copy of each module that owns meta tensors. The caller cuts its shard from what is yielded and
    lets go, so that one module's tensors at a time are whole.

    Raises:
        ShardError: `init` left a tensor unfilled.
    """
    canonical: dict[int, str] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        canonical.setdefault(id(tensor), name)
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        own_buffers = dict(module.named_buffers(recurse=False))
        if not any(tensor.is_meta for tensor in (*own.values(), *own_buffers.values())):
            continue
        copy = shallow_copy(module, {n: _blank(p, device) for n, p in own.items()}, {n: _blank(b, device) for n, b in own_buffers.items()})
        _run(init, copy, _module_seed(seed, path), device)
        prefix = f"{path}." if path else ""
        _require_filled(prefix, copy)
        for attribute, buffer in copy.named_buffers(recurse=False):
            if own_buffers[attribute].is_meta:
                buffers[prefix + attribute] = buffer.detach()
        for attribute, tensor in own.items():
            if tensor.is_meta and canonical[id(tensor)] == prefix + attribute:
                yield prefix + attribute, getattr(copy, attribute).detach()


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a meta tensor, filled with NaN so that what stays unfilled is noticed; other tensors are copied."""
    if not tensor.is_meta:
        blank = tensor.detach().to(device, copy=True)
    elif tensor.is_floating_point():
        blank = torch.full_like(tensor, float("nan"), device=device)
    else:
        blank = torch.zeros_like(tensor, device=device)
    return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


def _run(init: Callable[[nn.Module], Any], module: nn.Module, seed: int, device: torch.device) -> None:
    devices = [device.index or 0] if device.type != "cpu" else []
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        init(module)


def _module_seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "little")


def _require_filled(prefix: str, module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if tensor.is_meta or (tensor.is_floating_point() and bool(tensor.isnan().any())):
            raise ShardError(f"shard: init left '{prefix}{name}' unfilled; it must fill every tensor of the module it is given")
