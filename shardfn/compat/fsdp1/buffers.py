"""Buffers in `MixedPrecision.buffer_dtype`: cast at the first forward, and given back as they were. Layer 6.

A buffer that the forward does not change (positions, masks) is given back exactly, from what it was before the cast.
"""

import torch
from torch import Tensor, nn

from shardfn._torch import buffers_of
from shardfn.compat.fsdp1.instance import instance_of, instances

_MASTER = "_shardfn_buffer_before"  # on a cast buffer: what it was


def cast_buffers(module: nn.Module, low: bool) -> None:
    """Give every instance in a tree its buffers in `buffer_dtype`, or as they were; does nothing the second time."""
    outer = instance_of(module)
    if outer is None or outer.buffers_are_low == low:
        return
    for _, inside, own in instances(module):
        dtype = own.settings.mixed_precision.buffer_dtype
        own.buffers_are_low = low
        for part in _without_inner(inside, own.ignored_modules):
            table = buffers_of(part)
            for name, buffer in table.items():
                if dtype is not None and buffer is not None and buffer.is_floating_point():
                    table[name] = _cast(buffer, dtype) if low else as_before(buffer)


def as_before(buffer: Tensor) -> Tensor:
    """A buffer in the dtype that it had."""
    master = vars(buffer).get(_MASTER)
    if master is None:
        return buffer
    unchanged = master.shape == buffer.shape and master.to(buffer.dtype).equal(buffer)
    return master if unchanged else buffer.to(master.dtype)


def _cast(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    if buffer.dtype == dtype:
        return buffer
    low = buffer.to(dtype)
    vars(low)[_MASTER] = buffer
    return low


def _without_inner(module: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    """The modules that belong to an instance and to no deeper one."""
    inner = {id(one) for name, inside, _ in instances(module) if name for one in inside.modules()}
    return [one for one in module.modules() if id(one) not in inner and one not in ignored]
