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
from shardfn.compat.fsdp1.running import held_now, own_of
from shardfn.core.engine.gradients import is_held_back
from shardfn.core.errors import ShardError


def clip_grad_norm(module: nn.Module, max_norm: float, p: float) -> Tensor:
    """Scale the gradients of shards, and of ignored parameters, to a total p-norm of at most `max_norm`.

    Returns the norm before; a gradient that several ranks have whole counts once.
    """
    own = own_of(module)
    group, rank = own.mesh.get_group("fsdp"), dist.get_rank()
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if any(map(is_held_back, grads)):
        raise ShardError(
            "clip_grad_norm_: gradients were only added up under no_sync(), never reduced; run the last backward of a "
            "step outside of no_sync()"
        )
    split = [unwrap_local(grad) for grad in grads if isinstance(grad, DTensor) and _is_split(grad)]
    whole = [unwrap_local(grad) for grad in grads if not (isinstance(grad, DTensor) and _is_split(grad))]
    wide = torch.float64 if any(x.dtype == torch.float64 for x in module.parameters()) else torch.float32
    total = _sum_of_powers(split, p, wide, own.device)
    if any("fsdp" in layout.axes for layout in held_now(module).plan.layouts.values()):
        dist.all_reduce(total, dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM, group=group)
    rest = _sum_of_powers(whole, p, wide, own.device)
    total = torch.maximum(total, rest) if p == math.inf else (total + rest) ** (1 / p)
    total = total.cpu() if own.settings.cpu_offload.offload_params else total
    locals_ = [*split, *whole]
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if not grads:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {rank} with no gradients -- returning the total norm in the "
            f"default dtype {total.dtype}",
            stacklevel=4,
        )
        return total
    for grad in locals_:
        grad.mul_(factor.to(grad.device, grad.dtype))
    return total.to(functools.reduce(torch.promote_types, [grad.dtype for grad in grads]))


def _is_split(grad: DTensor) -> bool:
    return any(placement.is_shard() for placement in grad.placements)


def _sum_of_powers(tensors: Sequence[Tensor], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The p-th power of the norm, or for the largest element that itself."""
    norms = [torch.linalg.vector_norm(x, p, dtype=dtype) for x in tensors if x.numel()]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if p == math.inf else (stacked**p).sum()
