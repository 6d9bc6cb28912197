"""Logits that leave `apply` split over the vocabulary: what may be done with them, and what is an error. Layer 3.

done on the part of each rank    dtypes, numbers added and multiplied, tanh, clamp; slices, masks and reshapes of the
                                 other dims
done by their own methods        `to_local`, `full_tensor`, `redistribute`
a `ShardError`                   the rest, which would mix a part with whole tensors, or take it for the whole
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shardfn._torch import dtensor_spec, wrap_local
from shardfn.core import collectives
from shardfn.core.errors import ShardError

# What the part of this rank says, which is what autograd knows; and what the `DTensor` says, beside all properties.
_OF_PART = frozenset("requires_grad grad_fn is_leaf _version is_inference".split())
_WHOLE = frozenset(
    "size dim ndimension numel nelement stride element_size get_device untyped_storage storage_offset __len__ "
    "__format__".split()
)
_POINTWISE = frozenset(
    "add sub subtract rsub mul multiply div divide true_divide neg negative tanh clamp clip float double half "
    "bfloat16 to type detach data clone contiguous alias".split()
)


class SplitLogits(DTensor):
    """A `DTensor` split over one axis, of which operations see the part that this rank has, or nothing.

    `own` is that part, with its history in autograd and in transforms; the `DTensor` around has none. `origin`
    names the module and the rule that left it split.
    """

    own: Tensor
    origin: Callable[[], str]

    @classmethod
    def of(cls, own: Tensor, mesh: DeviceMesh, dim: int, origin: Callable[[], str]) -> "SplitLogits":
        """The parts of all ranks of a mesh with one axis as one tensor."""
        shape = (*own.shape[:dim], own.shape[dim] * mesh.size(), *own.shape[dim + 1 :])
        made = wrap_local(own.detach(), dtensor_spec(mesh, [Shard(dim)], shape, own.dtype), kind=cls)
        assert isinstance(made, cls)
        made.own, made.origin = own, origin
        return made

    @property
    def split_dim(self) -> int:
        """The dim of which each rank has a part."""
        (placement,) = self.placements
        assert isinstance(placement, Shard)
        return placement.dim

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's part."""
        return self.own if grad_placements is None else self._plain().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """All of it, on every rank: one all-gather."""
        if grad_placements is not None:
            return self._plain().full_tensor(grad_placements=grad_placements)
        return collectives.all_gather_invariant(self.own, self.device_mesh, axis_of(self), self.split_dim)

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any) -> DTensor:
        """An ordinary `DTensor` laid out otherwise."""
        return self._plain().redistribute(device_mesh, placements, **options)

    def _plain(self) -> DTensor:
        placed: list[Placement] = list(self.placements)
        shape, stride = self.shape, self.stride()
        return DTensor.from_local(
            self.own.contiguous(), self.device_mesh, placed, run_check=False, shape=shape, stride=stride
        )

    def __tensor_flatten__(self) -> Any:
        """What Dynamo asks for, which would lose the history of `own`."""
        raise ShardError(
            "torch.compile: split logits cannot enter a compiled function. Pass an ordinary DTensor, "
            "logits.redistribute(placements=logits.placements), or compile the whole step by sf.jit"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it with the parts, if that is right."""
        kwargs, name = kwargs or {}, _name(func)
        x = next(leaf for leaf in (*args, *kwargs.values(), *_inner(args)) if isinstance(leaf, SplitLogits))
        if name in _OF_PART and x is args[0]:
            return func(x.own, *args[1:], **kwargs)
        pointwise = name.strip("_") in _POINTWISE
        if name in _WHOLE or name.lstrip("_").startswith("is_") or (_is_property(func) and not pointwise):
            return super().__torch_function__(func, types, args, kwargs)
        adapted = _adapted(x, name, args, kwargs)
        if adapted is None:
            raise _refusal(x, name)
        out = func(*adapted, **kwargs)
        if not isinstance(out, Tensor) or out.device != x.own.device:
            raise _refusal(x, name)
        if out is x.own:
            return x
        return SplitLogits.of(out, x.device_mesh, x.split_dim if pointwise else out.dim() - 1, x.origin)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What reaches this went past `__torch_function__`, and would know nothing of `own`."""
        x = next((leaf for leaf in (*args, *_inner(args)) if isinstance(leaf, SplitLogits)), None)
        if x is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        raise _refusal(x, str(func))


def axis_of(x: DTensor) -> str:
    """The name of the only axis of its mesh."""
    return (x.device_mesh.mesh_dim_names or ("",))[0]


def _is_property(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def _name(func: Any) -> str:
    """The name of a function, or of the property that it gets."""
    if not _is_property(func):
        return getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__


def _inner(args: Any) -> list[Any]:
    """What lists and tuples among the arguments hold."""
    return [leaf for arg in args if isinstance(arg, list | tuple) for leaf in arg]


def _refusal(x: SplitLogits, name: str) -> ShardError:
    dim, here = x.split_dim, x.own.shape[x.split_dim]
    return ShardError(
        f"{name}: {x.origin()}: each rank has {here} of {x.shape[dim]} along dim {dim}, and '{name}' needs all of "
        "them or mixes them with whole tensors. Compute the loss by sf.cross_entropy(logits, targets), gather them by "
        "logits.full_tensor(), or drop that entry, and they are gathered"
    )


def _adapted(x: SplitLogits, name: str, args: Any, kwargs: Any) -> "tuple[Any, ...] | None":
    """The arguments for the part of this rank; None when the operation on parts is not that on the whole."""
    if name.strip("_") in _POINTWISE:
        plain = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor) and not _alike(arg, x)]
        return None if plain else tuple(arg.own if isinstance(arg, SplitLogits) else arg for arg in args)
    change = _CHANGES.get(name)
    if change is None or args[0] is not x or x.split_dim != x.dim() - 1:
        return None
    changed = change(x, args[1:], kwargs)
    return None if changed is None else (x.own, *changed)


def _alike(other: Tensor, x: SplitLogits) -> bool:
    return isinstance(other, SplitLogits) and other.shape == x.shape and other.device_mesh == x.device_mesh


def _index(x: SplitLogits, args: Any, kwargs: Any) -> "tuple[Any, ...] | None":
    """An index that leaves the last dim alone."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(isinstance(entry, SplitLogits) for entry in index):
        return None
    dims = [_dims_of(entry) for entry in index]
    at = next((i for i, entry in enumerate(index) if entry is Ellipsis), None)
    before = sum(dims) if at is None else sum(dims[:at])
    if before >= x.dim() or (at is not None and sum(dims[at + 1 :])):  # the last entry that takes a dim is of the last
        last = next(i for i in reversed(range(len(index))) if dims[i])
        if not (isinstance(index[last], slice) and index[last] == slice(None)):
            return None
    return (args[0],)


def _dims_of(entry: Any) -> int:
    """How many dims an entry of an index takes."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def _reshape(x: SplitLogits, args: Any, kwargs: Any) -> "tuple[Any, ...] | None":
    """A shape whose last size is that of the vocabulary."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    if kwargs or not shape or not all(isinstance(size, int) for size in shape):
        return None
    *others, last = shape
    if last == -1 and prod(others) * x.shape[-1] == x.numel():
        last = x.shape[-1]
    return ((*others, x.own.shape[-1]),) if last == x.shape[-1] else None


def _flatten(x: SplitLogits, args: Any, kwargs: Any) -> "tuple[Any, ...] | None":
    """Dims before the last."""
    given = dict(zip(("start_dim", "end_dim"), args, strict=False)) | kwargs
    return args if given.get("end_dim", -1) % x.dim() < x.dim() - 1 else None


_CHANGES: Mapping[str, Callable[[SplitLogits, Any, Any], "tuple[Any, ...] | None"]] = {
    "__getitem__": _index,
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _flatten,
}
