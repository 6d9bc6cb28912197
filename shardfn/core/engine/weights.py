"""What modules find in the place of parameters: weights that are looked up when they are read, or DTensors. Layer 3.

A DTensor is what `parallelize_module` made of a parameter. Stored, it is split over the data axes too. What is gathered
is this rank's part over the other axes, as of any split weight; here it becomes a DTensor over those axes again, and
torch's own rules and hooks do the rest.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfn._torch import (
    DTensorSpec,
    differentiates_from_local,
    dtensor_spec,
    parameters_of,
    set_tables,
    unwrap_local,
    waited,
    wrap_local,
)
from shardfn.core.errors import ShardError
from shardfn.core.mesh import Grid, part_of
from shardfn.core.plan import Plan


class LazyWeights(dict[str, Any]):
    """The `_parameters` of a copy: looks a weight up when it is read.

    Missing biases stay None, and what the tree leaves out (`Policy.ignore`) is the tensor of the module itself.
    """

    def __init__(
        self,
        names: Mapping[str, str | None],
        fetch: Callable[[str], Tensor],
        own: Mapping[str, Tensor | None] = MappingProxyType({}),
    ) -> None:
        """`names[attribute]` is what `fetch` gets; without a name it is what the module's own table `own` has there."""
        super().__init__(names)
        self._fetch, self._own = fetch, own

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        if name is None:
            return self._own.get(attribute)
        return self._fetch(name)

    def __setitem__(self, attribute: str, value: Any) -> None:
        raise ShardError(
            f"apply: a forward assigns the parameter '{attribute}'; parameters come from the tree: change the tree, or "
            "assign a plain tensor under another name"
        )

    def get(self, attribute: str, default: Any = None) -> Any:
        return self[attribute] if attribute in self else default

    def items(self) -> Any:
        own = self._own.get
        return ((attr, own(attr) if name is None else self._fetch(name)) for attr, name in super().items())

    def values(self) -> Any:
        return (weight for _, weight in self.items())

    def gathered(self) -> dict[str, Tensor | None]:
        """An ordinary table of them."""
        return {attribute: self[attribute] for attribute in self}


@contextmanager
def plain_weights(module: nn.Module) -> Iterator[None]:
    """Within it, `module` and those in it hold their weights as any module does."""
    lazy = [(m, table) for m in module.modules() if type(table := parameters_of(m)) is LazyWeights]
    try:
        for owner, table in lazy:
            set_tables(owner, parameters=table.gathered())
        yield
    finally:
        for owner, table in lazy:
            set_tables(owner, parameters=table)


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
