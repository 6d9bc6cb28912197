"""Memory of tensors: which storage they share, and operations on many of them at once."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch._C._functorch as functorch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed.tensor import DTensor
from torch.utils import _python_dispatch


def holds_data(x: Any) -> bool:
    """Whether it is a tensor with values of its own: it is no transform's, no recording's and no simulation's."""
    return type(x) in (Tensor, torch.nn.Parameter) and not functorch.is_functorch_wrapped_tensor(x)


def storage_key(x: Tensor) -> int:
    """The same number for tensors of one storage, and another one for every other storage in use.

    Of a DTensor, it is that of what is around its part, which `x.data = value` replaces.
    """
    storage = x.untyped_storage()
    return storage._cdata if isinstance(x, fake_tensor.FakeTensor | DTensor) else storage.data_ptr()


# Whether a tensor is one around others, without memory of its own: a DTensor, or what a collective is to fill.
wraps: Callable[[Tensor], bool] = _python_dispatch.is_traceable_wrapper_subclass


def foreach(operation: str) -> Callable[..., Any]:
    """The fused form of an operation over lists of tensors, `foreach("add_")`: what torch's own optimizers call."""
    return getattr(torch, f"_foreach_{operation}")


copy_each = foreach("copy_")  # (into, from_)
# chunk_cat(tensors, dim, W, out=[W, n]): each tensor cut into W on a dim, the i-th parts of all side by side in row i.
chunk_cat: Callable[..., Any] = torch.__dict__["_chunk_cat"]


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")  # the tensor that a view belongs to


# How many tensors and handles refer to the storage with an address.
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
# Where a storage itself is, with or without memory; another one may be there when this one is gone.
address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def fused(rule: str) -> Callable[..., None]:
    """The kernel of torch's optimizers that updates a list of tensors of one device in place, `fused("adamw")`.

    With the functions of `torch.optim`, that need a counter per parameter, small parameters take twice as long.
    """
    return getattr(torch, f"_fused_{rule}_")


# Make a blank tensor one over a storage: (blank, storage, where it begins there, shape, strides).
set_storage: Callable[..., Tensor] = Tensor.set_


def tensor_over(address: int, numel: int, like: Tensor) -> Tensor:
    """A flat tensor over memory that others own, with dtype and device of `like`; they must outlive its use."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, like.device, numel * like.element_size())
    return set_storage(like.new_empty(0), storage, 0, (numel,))
