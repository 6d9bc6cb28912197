"""Filling meta tensors one module at a time, with values that do not depend on the mesh. Layer 3."""

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardfn.core.errors import ShardError
from shardfn.core.model import shallow_copy


def initialized(
    model: nn.Module,
    init: Callable[[Any], Any],
    seed: int,
    device: torch.device,
    buffers: dict[str, Tensor],
    held: Container[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """(first name, full tensor) of every meta parameter; replaces meta tensors in `buffers`.

    Values of the tensors in `held`, by first names, come from elsewhere: modules without others are left out.

    `init` is called on a copy of each module that owns meta tensors. The caller cuts its shard from what is yielded and
    lets go, so that one module's tensors at a time are whole.

    Raises:
        ShardError: `init` left a tensor unfilled.
    """
    first_names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *buffers.items()):
        first_names.setdefault(id(tensor), name)
    for path, module in model.named_modules():
        owned = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta and first_names[id(tensor)] not in held for tensor in owned):
            filled = _filled(module, path, init, _module_seed(seed, path), device)
            for name, buffer in tuple(buffers.items()):
                buffers[name] = filled.get(id(buffer), buffer)  # under all of its names
            for tensor in module.parameters(recurse=False):
                prefix, _, attribute = first_names[id(tensor)].rpartition(".")
                if prefix == path and id(tensor) in filled:
                    yield f"{path}.{attribute}" if path else attribute, filled.pop(id(tensor))
            filled = {}  # or this module would still be whole while the next one is filled


def _filled(
    module: nn.Module, path: str, init: Callable[[Any], Any], seed: int, device: torch.device
) -> dict[int, Tensor]:
    """id of a meta tensor that `module` owns -> what `init` puts in its place."""
    own = {kind: module.__dict__[kind] for kind in ("_parameters", "_buffers")}
    copy = shallow_copy(module, _blanks(own["_parameters"], device), _blanks(own["_buffers"], device))
    _run(init, copy, path, seed, device)
    filled: dict[int, Tensor] = {}
    for attribute, meta in (*own["_parameters"].items(), *own["_buffers"].items()):
        if meta is not None and meta.is_meta:
            filled.setdefault(
                id(meta), _checked(f"{path}.{attribute}".removeprefix("."), getattr(copy, attribute), meta)
            )
    return filled


def _blanks(own: Mapping[str, Tensor | None], device: torch.device) -> dict[str, Tensor | None]:
    """Memory for the tensors of one module; what it leaves out (a bias that is None) stays out."""
    return {name: None if tensor is None else _blank(tensor, device) for name, tensor in own.items()}


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a meta tensor, filled with NaN so that what stays unfilled is noticed; other tensors are copied."""
    if isinstance(tensor, DTensor):
        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).fill_(float("nan"))
    elif not tensor.is_meta:
        blank = tensor.detach().to(device, copy=True)
    elif tensor.is_floating_point():
        blank = torch.full_like(tensor, float("nan"), device=device)
    else:
        blank = torch.zeros_like(tensor, device=device)
    return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


def _run(init: Callable[[Any], Any], module: nn.Module, path: str, seed: int, device: torch.device) -> None:
    devices = [device.index or 0] if device.type != "cpu" else []
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        try:
            init(module)
        except Exception as error:
            error.add_note(f"in init of {path or '(the model)'!r}, a {type(module).__name__}")
            raise


def _module_seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "little")


def _checked(name: str, tensor: Tensor | None, meta: Tensor) -> Tensor:
    """What `init` made of a meta tensor, if it is one that can stand for it."""
    if tensor is None or tensor.is_meta or (tensor.is_floating_point() and bool(tensor.isnan().any())):
        raise ShardError(f"shard: init left '{name}' unfilled; it must fill every tensor of the module it is given")
    if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
        was, now = (f"{tuple(x.shape)} {x.dtype}" for x in (meta, tensor))
        raise ShardError(f"shard: init replaced '{name}', {was}, by a tensor {now}; it must keep shapes and dtypes")
    return tensor.detach()
