"""A `DTensor` of any layout as an ordinary tensor, by the same collectives as everything else. Layer 3.

`full_tensor()` would do it through torch's functional collectives. In them processes of torch 2.13 were seen to die on
gloo, once in thousands of calls on small tensors, of a block of memory that two threads had freed.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardfn._torch import has_no_memory, simulated, unwrap_local
from shardfn.core.collectives import gather_flat
from shardfn.core.mesh import chunk


def whole(tensor: DTensor) -> Tensor:
    """The whole tensor on every rank of its mesh, outside autograd.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> from shardfn.core.whole import whole
        >>> params = sf.shard(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> type(whole(params["weight"])).__name__
        'Tensor'

    Args:
        tensor: split evenly or not, in plain `Shard`s, or a pending sum.

    Communication: one all-gather an axis that splits it, one all-reduce an axis over which it is a sum.
    """
    placements, mesh = tensor.placements, tensor.device_mesh
    simple = all(type(p) is Shard or p.is_replicate() or p.is_partial("sum") for p in placements)
    if not simple or has_no_memory() or simulated() or mesh.get_coordinate() is None:
        return tensor.full_tensor().detach()
    shapes = [list(tensor.shape)]  # before each split
    for axis, placement in enumerate(placements):
        shape = list(shapes[-1])
        if type(placement) is Shard:
            shape[placement.dim] = chunk(shape[placement.dim], mesh.size(axis), mesh.get_local_rank(axis))[1]
        shapes.append(shape)
    local = own = unwrap_local(tensor).detach()
    for axis, placement in reversed(list(enumerate(placements))):
        if mesh.size(axis) == 1:
            continue
        if placement.is_partial():
            local = local.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(local, group=mesh.get_group(axis))
        elif type(placement) is Shard:
            local = _undone(local, placement.dim, shapes[axis][placement.dim], mesh.get_group(axis))
    return own.clone() if local is own else local


def _undone(local: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks side by side on `dim`, of which together `length` are there."""
    step = -(-length // group.size())
    rows = local.movedim(dim, 0)  # [own, ...]
    rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, step - rows.shape[0])) if rows.shape[0] < step else rows
    if not rows.numel():
        return local.new_empty([*local.shape[:dim], length, *local.shape[dim + 1 :]])
    flat = gather_flat(rows.reshape(-1), group)
    return flat.view(-1, *rows.shape[1:])[:length].movedim(0, dim).contiguous()
