"""The only file that touches private or version-dependent torch names.

Everything here is resolved once, at import, and used elsewhere under one name. Layer 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

__all__ = ["DTensorSpec", "pytree"]

# torch 2.13 renamed these two; the old names warn on every call, the new ones are absent before.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_single: Callable[..., Any] = dist.all_to_all_single

# A store for a world of one; exported by torch.distributed, but not declared.
HashStore: Callable[[], Any] = dist.__dict__["HashStore"]

# What torch imports at the first backward or DTensor operation: 1.3 s in every process that did not import it before.
LAZY_MODULES = ("torch._dynamo",)


def materialized(x: torch.Tensor) -> torch.Tensor:
    """x with memory behind it: forward mode hands over ZeroTensors, which a collective cannot read or fill."""
    return x.clone() if not torch.compiler.is_compiling() and x._is_zerotensor() else x


def traces_first_order() -> bool:
    """Whether the graph being traced is at most one `func.grad` deep. Answered while tracing, a constant of the graph.

    In a graph (torch 2.13) the tangent of an `autograd.Function` without `jvp` is zero, `vmap` runs its collective on
    an undefined value, and its second derivative is that of a constant: all without an error.
    """
    kinds = [level.key() for level in get_interpreter_stack() or ()]
    return len(kinds) <= 1 and all(kind == TransformType.Grad for kind in kinds)


# What `torch.compiler.assume_constant_result` does, without the 0.7 s that importing Dynamo takes.
traces_first_order.__dict__["_dynamo_marked_constant"] = True


# DTensor from a local tensor without a check or a collective: 125 us for 50 leaves against 1 382 us for `from_local`.
# `from_local` also infers a wrong global shape for uneven shards. Checked with 2.11 and 2.13.


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The metadata of a contiguous DTensor of global `shape`."""
    size = torch.Size(shape)
    stride, strides = 1, []
    for length in reversed(size):
        strides.append(stride)
        stride *= max(length, 1)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(size, tuple(reversed(strides)), dtype))


def wrap_local(local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """A DTensor around this rank's part; no copy, no communication, outside autograd."""
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = dtensor_spec(spec.mesh, spec.placements, meta.shape, local.dtype)
    return DTensor(local, spec, requires_grad=requires_grad)


def unwrap_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, no autograd; 1 us against 232 us for `to_local`; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """`local` with the mesh, placements and global shape of `like`; a plain `local` when `like` is plain."""
    return wrap_local(local, like._spec) if isinstance(like, DTensor) else local


def in_transform() -> bool:
    """Whether a `torch.func` transform is active; saved-tensor hooks are forbidden there."""
    return bool(get_interpreter_stack())


# The tables of an nn.Module: what `torch.func.functional_call` swaps too, without a public way to reach them.


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module owns directly, including absent ones (None)."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers that a module owns directly, including absent ones (None)."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The direct children of a module."""
    return module._modules


def set_tables(module: nn.Module, **tables: dict[str, Any]) -> None:
    """Replace `parameters`, `buffers` or `modules` of a module, without the checks of its attributes."""
    module.__dict__.update({f"_{name}": table for name, table in tables.items()})


def refresh_flat_weights(rnn: nn.RNNBase) -> None:
    """RNNs read their weights from a list made when they were built; make it from their attributes."""
    rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]


def drop_flat_weights(rnn: nn.RNNBase) -> None:
    """Let go of the weights in that list."""
    rnn._flat_weights = []


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


IncompatibleKeys = nn.modules.module._IncompatibleKeys


def foreach(operation: str) -> Callable[..., Any]:
    """The fused form of an operation over lists of tensors, `foreach("add_")`: what torch's own optimizers call."""
    return getattr(torch, f"_foreach_{operation}")


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that a view belongs to."""
    return tensor._base
