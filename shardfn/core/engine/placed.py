"""Weights that modules use as DTensors, because `parallelize_module` made them such. Layer 3.

Stored, such a parameter is split over the data axes too. What is gathered is this rank's part over the other axes, as
of any split weight; here it becomes a DTensor over those axes again, and torch's own rules and hooks do the rest.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfn._torch import DTensorSpec, differentiates_from_local, dtensor_spec, unwrap_local, waited, wrap_local
from shardfn.core.mesh import Grid, part_of
from shardfn.core.plan import Plan


def placed_specs(plan: Plan, grid: Grid) -> Mapping[str, tuple[DTensorSpec, frozenset[int]]]:
    """Parameter -> mesh, placements and whole shape of the DTensor that modules use, and which axes split the batch."""
    found: dict[str, tuple[DTensorSpec, frozenset[int]]] = {}
    for name, layout in plan.layouts.items():
        if layout.placed is not None:
            axes = tuple(axis for axis, _ in layout.placed)
            placements = [Replicate() if dim is None else Shard(dim) for _, dim in layout.placed]
            spec = dtensor_spec(part_of(grid.mesh, axes), placements, layout.shape, plan.compute_dtypes[name])
            found[name] = spec, frozenset(at for at, axis in enumerate(axes) if axis in plan.roles.data)
    if found:
        differentiates_from_local()
    return found


class AsPlaced(torch.autograd.Function):
    """This rank's part as a DTensor.

    forward   [part] -> DTensor
    backward  d DTensor, of any placements -> (summed, gathered or cut) -> d [part]

    Along the axes in `data`, ranks have other samples, and gradients of their own: those are reduced as of any weight.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: DTensorSpec, data: frozenset[int]) -> DTensor:
        ctx.spec, ctx.data = spec, data
        return wrap_local(part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        assert isinstance(grad, DTensor)
        own = (at in ctx.data and placement.is_partial("sum") for at, placement in enumerate(grad.placements))
        wanted = [x if keep else y for keep, x, y in zip(own, grad.placements, ctx.spec.placements, strict=True)]
        if list(grad.placements) != wanted:
            grad = grad.redistribute(ctx.spec.mesh, wanted)
        if torch.is_grad_enabled():  # somebody differentiates the gradient
            return grad.to_local(), None, None
        return waited(unwrap_local(grad)), None, None
