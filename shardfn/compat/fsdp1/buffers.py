"""Buffers in `MixedPrecision.buffer_dtype`: cast at the first forward, and given back as they were. Layer 6.

A buffer that the forward does not change (positions, masks) is given back exactly, from what it was before the cast.
"""

import torch
from torch import Tensor

_MASTER = "_shardfn_buffer_before"  # on a cast buffer: what it was


def as_before(buffer: Tensor) -> Tensor:
    """A buffer in the dtype that it had."""
    master = vars(buffer).get(_MASTER)
    if master is None:
        return buffer
    unchanged = master.shape == buffer.shape and master.to(buffer.dtype).equal(buffer)
    return master if unchanged else buffer.to(master.dtype)


def cast(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer in another dtype, which knows what it was."""
    if buffer.dtype == dtype:
        return buffer
    low = buffer.to(dtype)
    vars(low)[_MASTER] = buffer
    return low
