"""The norm of all gradients below an instance, and clipping by it. Layer 6."""

import functools
import math
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn._torch import unwrap_local
from shardfn.compat.fsdp1.instance import own_of
from shardfn.compat.sharded import held_now
from shardfn.core.engine.gradients import is_held_back
from shardfn.core.errors import ShardError

Axes = frozenset[str]  # that split a gradient


def clip_grad_norm(module: nn.Module, max_norm: float, p: float) -> Tensor:
    """Scale the gradients of shards, and of ignored parameters, to a total p-norm of at most `max_norm`.

    Returns the norm before; a gradient that several ranks have whole counts once.

    Communication: one small all-reduce an axis that splits any parameter.
    """
    own = own_of(module)
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if any(map(is_held_back, grads)):
        raise ShardError(
            "clip_grad_norm_: gradients were only added up under no_sync(), never reduced; run the last backward of a "
            "step outside of no_sync()"
        )
    wide = torch.float64 if any(x.dtype == torch.float64 for x in module.parameters()) else torch.float32
    parts: dict[Axes, list[Tensor]] = {axes: [] for axes in _splits(module)}
    for grad in grads:
        parts.setdefault(_split_axes(grad), []).append(unwrap_local(grad))
    sums = {axes: _sum_of_powers(locals_, p, wide, own.device) for axes, locals_ in parts.items()}
    total = _over_ranks(sums, own.mesh, p)
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


def _splits(module: nn.Module) -> list[Axes]:
    """The sets of axes that split parameters: the same on every rank, whichever gradients it has."""
    plan = held_now(module).plan
    found = {frozenset(axis for axis in leaf.axes if plan.axes[axis] > 1) for _, leaf in plan.leaves.values()}
    return sorted(found, key=sorted)


def _split_axes(grad: Tensor) -> Axes:
    if not isinstance(grad, DTensor):
        return frozenset()
    mesh = grad.device_mesh
    named = zip(mesh.mesh_dim_names or (), grad.placements, mesh.shape, strict=True)
    return frozenset(axis for axis, placement, size in named if placement.is_shard() and size > 1)


def _over_ranks(sums: dict[Axes, Tensor], mesh: DeviceMesh, p: float) -> Tensor:
    """The norm, from sums over this rank's parts of gradients that are split over some axes.

    Communication: one small all-reduce an axis that splits any.
    """
    op = dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM
    for axis in mesh.mesh_dim_names or ():
        split = [axes for axes in sums if axis in axes]
        if not split:
            continue
        reduced = torch.stack([sums.pop(axes) for axes in split])
        dist.all_reduce(reduced, op, group=mesh.get_group(axis))
        for axes, total in zip(split, reduced.unbind(), strict=True):
            rest = sums.get(axes - {axis})
            sums[axes - {axis}] = total if rest is None else _joined([total, rest], p)
    total = _joined(list(sums.values()), p)
    return total if p == math.inf else total ** (1 / p)


def _joined(sums: Sequence[Tensor], p: float) -> Tensor:
    return torch.stack(list(sums)).max() if p == math.inf else torch.stack(list(sums)).sum()


def _sum_of_powers(tensors: Sequence[Tensor], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The p-th power of the norm, or for the largest element that itself."""
    norms = [torch.linalg.vector_norm(x, p, dtype=dtype) for x in tensors if x.numel()]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if p == math.inf else (stacked**p).sum()
