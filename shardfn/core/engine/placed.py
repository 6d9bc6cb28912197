"""Weights that modules use as DTensors, because `parallelize_module` made them such. Layer 3.

Stored, such a parameter is split over the data axes too. What is gathered is this rank's part over the other axes, as
of any split weight; here it becomes a DTensor over those axes again, and torch's own rules and hooks do the rest.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfn._torch import DTensorSpec, dtensor_spec, unwrap_local, waited, wrap_local
from shardfn.core.mesh import Grid, part_of
from shardfn.core.plan import Plan


def placed_specs(plan: Plan, grid: Grid) -> Mapping[str, DTensorSpec]:
    """Parameter -> mesh, placements and whole shape of the DTensor that modules use."""
    found: dict[str, DTensorSpec] = {}
    for name, layout in plan.layouts.items():
        if layout.placed is not None:
            axes = tuple(axis for axis, _ in layout.placed)
            placements = [Replicate() if dim is None else Shard(dim) for _, dim in layout.placed]
            found[name] = dtensor_spec(part_of(grid.mesh, axes), placements, layout.shape, plan.compute_dtypes[name])
    return found


class AsPlaced(torch.autograd.Function):
    """This rank's part as a DTensor.

    forward   [part] -> DTensor
    backward  d DTensor, of any placements -> (summed, gathered or cut) -> d [part]
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return wrap_local(part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        assert isinstance(grad, DTensor)
        if grad.placements != ctx.spec.placements:
            grad = grad.redistribute(ctx.spec.mesh, ctx.spec.placements)
        if torch.is_grad_enabled():  # somebody differentiates the gradient
            return grad.to_local(), None
        return waited(unwrap_local(grad)), None
