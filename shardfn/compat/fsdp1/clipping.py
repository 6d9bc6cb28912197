"""The norm of all gradients below an instance, and clipping by it. Layer 6."""

import functools
import math
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardfn._torch import unwrap_local
from shardfn.compat.fsdp1.instance import Instance
from shardfn.compat.sharded import held_now
from shardfn.core.engine.gradients import is_held_back
from shardfn.torch_optimizers import not_reduced


def clip_grad_norm(module: nn.Module, max_norm: float, p: float) -> Tensor:
    """Scale the gradients of shards, and of ignored parameters, to a total p-norm of at most `max_norm`.

    Returns the norm before; a gradient that several ranks have whole counts once.

    Communication: one small all-reduce an axis that splits any parameter.
    """
    own = Instance.of(module)
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if any(map(is_held_back, grads)):
        raise not_reduced("clip_grad_norm_", "a gradient")
    wide = torch.float64 if any(x.dtype == torch.float64 for x in module.parameters()) else torch.float32
    axes = _split_axes(module)
    first_along = [axis for axis in axes if own.mesh.get_local_rank(axis) == 0]
    whole: list[Tensor] = []
    parts: list[Tensor] = []  # what this rank adds to the sum over `axes`: along those that do not split it, one does
    for grad in grads:
        over = _axes_of(grad).intersection(axes)
        if not over:
            whole.append(unwrap_local(grad))
        elif over.union(first_along).issuperset(axes):
            parts.append(unwrap_local(grad))
    total = _sum_of_powers(parts, p, wide, own.device)
    for axis in axes:
        dist.all_reduce(total, dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM, own.mesh.get_group(axis))
    total = _joined(torch.stack([total, _sum_of_powers(whole, p, wide, own.device)]), p)
    total = total if p == math.inf else total ** (1 / p)
    total = total.cpu() if own.settings.cpu_offload.offload_params else total
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if not grads:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- returning the total norm in "
            f"the default dtype {total.dtype}",
            stacklevel=4,
        )
        return total
    for grad in map(unwrap_local, grads):
        grad.mul_(factor.to(grad.device, grad.dtype))
    return total.to(functools.reduce(torch.promote_types, [grad.dtype for grad in grads]))


def _split_axes(module: nn.Module) -> list[str]:
    """The axes that split any parameter: the same on every rank, whichever gradients it has."""
    plan = held_now(module).plan
    split = {axis for _, leaf in plan.leaves.values() for axis in leaf.axes}
    return [axis for axis, size in plan.axes.items() if axis in split and size > 1]


def _axes_of(grad: Tensor) -> set[str]:
    """The axes that split a gradient."""
    if not isinstance(grad, DTensor):
        return set()
    named = zip(grad.device_mesh.mesh_dim_names or (), grad.placements, strict=True)
    return {axis for axis, placement in named if placement.is_shard()}


def _sum_of_powers(tensors: Sequence[Tensor], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The p-th power of the norm, or for the largest element that itself."""
    norms = [torch.linalg.vector_norm(x, p, dtype=dtype).to(device) for x in tensors if x.numel()]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack(norms)
    return _joined(stacked if p == math.inf else stacked**p, p)


def _joined(powers: Tensor, p: float) -> Tensor:
    return powers.max() if p == math.inf else powers.sum()
