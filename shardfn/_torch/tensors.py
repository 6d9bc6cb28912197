"""Tensors: their versions; DTensors around local tensors and back, many at a time, without torch's checks of each."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from math import prod
from operator import attrgetter, eq, is_
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, _api, _redistribute
from torch.distributed.tensor._api import _FromTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

_flattened: Callable[..., DeviceMesh | None] = _redistribute._get_flattened_mesh_by_layout


def _flattened_or_none(mesh: DeviceMesh, dims: tuple[int, ...]) -> DeviceMesh | None:
    """None for axes in another order than the root mesh's, as ours are; torch 2.11 raises (`p.sum().full_tensor()`)."""
    try:
        return _flattened(mesh, dims)
    except KeyError:
        return None  # then each axis has a collective of its own


if torch.__version__ < "2.13":
    _redistribute._get_flattened_mesh_by_layout = _flattened_or_none

# DTensor from a local tensor without a check or a collective: 125 us for 50 leaves against 1 382 us for `from_local`.
# `from_local` also infers a wrong global shape for uneven shards. Checked with 2.11 and 2.13.


def dtensor_spec(mesh: DeviceMesh, placed: Sequence[Placement], size: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """The metadata of a contiguous DTensor of a global size."""
    strides = tuple(prod(max(length, 1) for length in size[at + 1 :]) for at in range(len(size)))
    return DTensorSpec(mesh, tuple(placed), tensor_meta=TensorMeta(torch.Size(size), strides, dtype))


def wrap_local(local: Tensor, spec: DTensorSpec, kind: type[DTensor] = DTensor) -> DTensor:
    """A DTensor, or one of the class `kind`, around this rank's part; no copy, no communication, outside autograd."""
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = dtensor_spec(spec.mesh, spec.placements, meta.shape, local.dtype)
    return DTensor.__new__(kind, local, spec, requires_grad=False)  # its __init__ does nothing, in 1.3 us


def unwrap_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, no autograd; 1 us against 232 us for `to_local`; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a tensor's numbers, row after row: its memory, where it has them so.

    `contiguous()` leaves one number with a stride of 2 as it is, which `view(torch.uint8)` refuses (torch 2.13).
    """
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


# Mesh, placements, global shape and dtype of a DTensor.
spec_of: Callable[[Any], DTensorSpec] = attrgetter("_spec")


def move_to_mesh(tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Have a DTensor, the same object, say that its local part lies so on another mesh."""
    meta = tensor._spec.tensor_meta
    assert meta is not None
    tensor._spec = dtensor_spec(mesh, placements, meta.shape, meta.dtype)


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """`local` with the mesh, placements and global shape of `like`; a plain `local` when `like` is plain."""
    return wrap_local(local, like._spec) if isinstance(like, DTensor) else local


class _FromLocal(_FromTorchTensor):
    """`DTensor.from_local`, of whose backward torch (2.13) cuts the graph where it moves data."""

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        if grad_output is None or not torch.is_grad_enabled():
            return _FromTorchTensor.backward(ctx, grad_output)
        wanted = getattr(ctx, "grad_placements", None)
        if wanted is None:
            name = "forward_input_placements" if hasattr(ctx, "forward_input_placements") else "previous_placement"
            wanted = [Replicate() if placement.is_partial() else placement for placement in getattr(ctx, name)]
        grad_input = grad_output.redistribute(grad_output.device_mesh, wanted).to_local()
        return grad_input, *[None] * (len(ctx.needs_input_grad) - 1)


def differentiates_from_local() -> None:
    """From now on gradients of gradients by inputs of `parallelize_module`'s modules are those of one process.

    Needless when `torch.distributed.tensor._api._FromTorchTensor.backward` has a graph, too. Where other backwards of
    DTensor have none either (before torch 2.13), they are an error.
    """
    _api._FromTorchTensor = _FromLocal
    moves: Any = _redistribute.Redistribute, _api._ToTorchTensor
    for one in moves if not hasattr(_redistribute, "NestedRedistribute") else ():
        if not hasattr(one.backward, "__wrapped__"):
            one.backward = staticmethod(_without_graph(one.backward))


def _without_graph(backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def call(ctx: Any, grad_output: Any) -> Any:
        if torch.is_grad_enabled() and grad_output is not None and grad_output.requires_grad:
            why = "DTensor's backward has no graph before torch 2.13, so that a gradient of it would be wrong"
            raise NotImplementedError(f"a model that parallelize_module has split: {why}. Split it by rules instead")
        return backward(ctx, grad_output)

    return call


# Many leaves at a time: `map` in C takes 30 ns a leaf.

_local_of = attrgetter("_local_tensor")
_dtype_of: Callable[[Any], torch.dtype] = attrgetter("_local_tensor.dtype")
_shape_of = attrgetter("shape")
_layout_of = attrgetter("mesh", "placements", "tensor_meta.shape")


def unwrap_locals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`unwrap_local` of each."""
    return list(map(_local_of, tensors)) if set(map(type, tensors)) == {DTensor} else list(map(unwrap_local, tensors))


def fresh_leaves(leaves: Sequence[DTensor], ask: Collection[bool]) -> list[DTensor]:
    """New DTensors over the same local parts, outside autograd; whether each asks for a gradient."""
    new, locals_ = DTensor.__new__, map(Tensor.detach, map(_local_of, leaves))
    rows = zip(locals_, map(spec_of, leaves), ask, strict=True)
    return [new(DTensor, local, spec, requires_grad=asks) for local, spec, asks in rows]


def with_locals(likes: Sequence[Tensor], locals_: Sequence[Tensor]) -> list[Tensor]:
    """`with_local` of each pair; the dtypes are those of `likes`."""
    if set(map(type, likes)) != {DTensor}:
        return list(map(with_local, likes, locals_))
    new, specs = DTensor.__new__, map(spec_of, likes)
    return [new(DTensor, local, spec, requires_grad=False) for local, spec in zip(locals_, specs, strict=True)]


def dtypes_of(tensors: Collection[Tensor]) -> list[torch.dtype]:
    """The dtype of each; twice as fast as asking when all are DTensors."""
    return list(map(_dtype_of, tensors)) if set(map(type, tensors)) == {DTensor} else [x.dtype for x in tensors]


def same_layouts(these: Sequence[Tensor], those: Sequence[Any]) -> bool:
    """Whether tensors are alike pair by pair: DTensors of one layout and shape, or plain tensors of one shape."""
    kinds = {*map(type, these), *map(type, those)}
    if kinds == {DTensor}:
        ours, theirs = list(map(spec_of, these)), list(map(spec_of, those))
        return all(map(is_, ours, theirs)) or all(map(eq, map(_layout_of, ours), map(_layout_of, theirs)))
    return kinds <= {Tensor, nn.Parameter} and all(map(eq, map(_shape_of, these), map(_shape_of, those)))


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; not counted for one made under `torch.inference_mode()`."""
    return 0 if tensor.is_inference() else tensor._version


# `version_of` of a tensor that autograd saves, which is none of inference mode.
version_of_saved: Callable[[Tensor], int] = attrgetter("_version")


def call_parameters(tensors: Iterable[Tensor]) -> None:
    """Let `isinstance(x, nn.Parameter)` hold of tensors that stand for parameters."""
    for tensor in tensors:
        tensor._is_param = True


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """`version_of` of each."""
    try:
        return list(map(version_of_saved, tensors))
    except RuntimeError:  # one is of inference mode
        return list(map(version_of, tensors))
