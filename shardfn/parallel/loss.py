"""Cross entropy of logits that are whole, or split over the vocabulary; and the logits that are split.

The loss is computed in float32 at least, by pieces.

    logits  [.., v]      -> stats [k, ..]        by pieces of targets: no other tensor is as large as the logits
    stats   [k, ..]      -> all-gather [W, k, ..] -> losses [..]      for split logits the one collective

`stats` are of the part v of the vocabulary that this rank has: the largest logit, log(sum(exp(logit - largest))), the
logit of the target less the largest (anything, where another rank has the target), with smoothing also the sum of the
logits less the largest. Relative to the largest they are exact where logits are large and losses small.

[Note: pieces]
Autograd keeps the logits, the target's index and the stats; the backward computes exp again, piece by piece, straight
into a gradient of the logits' dtype. That way is for eager first derivatives. Inside transforms, in graphs and for
second derivatives the same numbers come from ordinary operations, which torch differentiates, maps and fuses.

Logits that leave `apply` split over the vocabulary are `SplitLogits`; what may be done with them, and what is an error:

done on the part of each rank    dtypes, numbers added and multiplied, tanh, clamp; slices, masks and reshapes of the
                                 other dims
done by their own methods        `to_local`, `full_tensor`, `redistribute`
a `ShardError`                   the rest, which would mix a part with whole tensors, or take it for the whole
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardfn._torch import dtensor_spec, has_no_memory, in_transform, wrap_local
from shardfn.comm import accumulation_dtype, collectives
from shardfn.notation import ShardError
from shardfn.parallel.linears import require_ids

_PIECES = 32  # a piece is this part of the logits,
_LEAST = 2**19  # or so many elements


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of logits [..., vocab] and targets [...], also when the logits are split over the vocabulary.

    Split logits are the `DTensor` that `Policy(acts={"head": "b s vocab@tp"})` leaves, or a slice or reshape of its
    other dims; the full ones never exist. Nor does a float32 copy of bfloat16 logits: they are taken piece by piece,
    and the backward computes them again, into a gradient of their dtype.

        >>> import torch, shardfn as sf
        >>> sf.cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)).exp().round().item()
        4.0

    Args:
        logits: any floating dtype; computed in float32 at least.
        targets: class indices, any integer dtype.
        ignore_index: targets that do not count.
        reduction: `"mean"` over the targets that count (nan when there are none), `"sum"`, or `"none"` (shape of
            `targets`, ignored ones 0).
        label_smoothing: weight of the uniform distribution, 0 to 1.
        z_loss: adds `z_loss * logsumexp(logits)**2` to the loss of each target that counts, which keeps logits from
            growing (PaLM, https://arxiv.org/abs/2204.02311, takes 1e-4).

    Returns:
        a scalar, or one loss a target; float64 for float64 logits, else float32.

    Raises:
        ShardError: shapes that do not fit; targets that are no whole numbers, or a `DTensor`; logits split over
            another dim.
        IndexError: on the CPU, a target that is no class. Elsewhere, and in graphs, its loss is nan.

    Communication: for split logits one all-gather over the axis, of three numbers a target, four with smoothing;
    nothing in the backward.
    """
    _require_fitting(logits, targets)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy(reduction={reduction!r}): 'mean', 'sum' or 'none'")
    targets, size = targets.long(), logits.shape[-1]
    require_ids("cross_entropy", targets, size, ignore_index)
    local, ranks, rank = logits, 1, 0
    if isinstance(logits, DTensor):
        here = None if isinstance(logits, SplitLogits) else [Shard(logits.dim() - 1)]
        local, ranks = logits.to_local(grad_placements=here), logits.device_mesh.size()  # [.., vocab/axis]
        rank = collectives.axis_index(logits.device_mesh, axis_of(logits))
    part = local.shape[-1]
    stats = _stats(local, (targets - rank * part).clamp(0, part - 1), label_smoothing != 0).unsqueeze(0)
    if isinstance(logits, DTensor):
        stats = collectives.all_gather_invariant(stats, logits.device_mesh, axis_of(logits), 0)  # [W, k, ..]
    log_sum, largest, picked, mean = _combined(stats, (targets // part).clamp(0, ranks - 1), part)
    losses = log_sum - picked
    if mean is not None:
        losses = (1 - label_smoothing) * losses + label_smoothing * (log_sum - mean)
    if z_loss:
        losses = losses + z_loss * (largest + log_sum).square()
    losses = losses.masked_fill((targets < 0) | (targets >= size), torch.nan).masked_fill(targets == ignore_index, 0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _require_fitting(logits: Tensor, targets: Tensor) -> None:
    if tuple(logits.shape[:-1]) != tuple(targets.shape):
        why = f"cross_entropy: logits {tuple(logits.shape)} need targets {tuple(logits.shape[:-1])}"
        raise ShardError(f"{why}, not {tuple(targets.shape)}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ShardError(f"cross_entropy: targets are class indices, not {targets.dtype}")
    if isinstance(targets, DTensor):
        raise ShardError("cross_entropy: targets are plain tensors, not DTensors; pass targets.to_local()")
    if isinstance(logits, DTensor):
        placements = logits.placements
        if len(placements) != 1 or not placements[0].is_shard(logits.dim() - 1):
            raise ShardError(f"cross_entropy: logits must be split over their last dim by one axis, not {placements}")


def _combined(stats: Tensor, owner: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of the whole vocabulary: log(sum(exp)), the largest logit, that of the target, the mean; all less the largest.

    The largest one is a constant that cancels out, here and in derivatives.
    """
    of_ranks = stats[:, 0].detach()  # [W, ..]
    largest = of_ranks.amax(0)
    less = of_ranks - largest
    log_sum = torch.logsumexp(stats[:, 1] + less, 0)
    picked = (stats[:, 2] + less).gather(0, owner.unsqueeze(0)).squeeze(0)
    mean = None
    if stats.shape[1] > 3:
        mean = (stats[:, 3] + less * part).sum(0) / (part * stats.shape[0])
    return log_sum, largest, picked, mean


def _stats(x: Tensor, index: Tensor, total: bool) -> Tensor:
    """[.., v] -> [k, ..]; see [Note: pieces]."""
    graph = torch.compiler.is_compiling() or in_transform() or has_no_memory()
    plain = graph or forward_ad.unpack_dual(x).tangent is not None
    return (_plain_stats if plain else _Stats.apply)(x, index, total)


def _plain_stats(x: Tensor, index: Tensor, total: bool) -> Tensor:
    """The same by ordinary operations."""
    x = x.to(accumulation_dtype(x.dtype))
    limits = torch.finfo(x.dtype)
    largest = x.detach().amax(-1).clamp_min(limits.min)  # a part that is masked out, -inf, has no share, not nan
    less = x - largest.unsqueeze(-1)
    log_sum = less.exp().sum(-1).clamp_min(limits.tiny).log()
    picked = less.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return torch.stack([largest, log_sum, picked, *([less.sum(-1)] if total else [])])


class _Stats(torch.autograd.Function):
    """
    |          | in                                | out                        |
    |----------|-----------------------------------|----------------------------|
    | forward  | `[.., v]`, indices `[..]` below v | `[k, ..]`, float32 at least |
    | backward | `[k, ..]`                         | `[.., v]` of the dtype in  |
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, total: bool) -> Tensor:
        dtype = accumulation_dtype(x.dtype)
        stats = torch.empty((3 + total, *index.shape), dtype=dtype, device=x.device)
        for at in _pieces(index.shape, x.shape[-1]):
            stats[(slice(None), *at)] = _plain_stats(x[at], index[at], total)
        ctx.save_for_backward(x, index, stats)
        return stats

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, index, stats = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody will differentiate this
            again = _plain_stats(x, index, len(stats) > 3)
            return *torch.autograd.grad(again, x, grads, create_graph=True), None, None
        return _gradient(x, index, stats, grads[0]), None, None


def _gradient(x: Tensor, index: Tensor, stats: Tensor, cotangent: Tensor) -> Tensor:
    """exp(x - largest - log_sum) times one cotangent, plus that of the target in its place, plus that of the sum."""
    grad = torch.empty_like(x)
    for at in _pieces(index.shape, x.shape[-1]):
        largest, log_sum, *_ = stats[(slice(None), *at)].unsqueeze(-1)
        _, of_log_sum, of_picked, *of_sum = cotangent[(slice(None), *at)].unsqueeze(-1)
        piece = grad[at].copy_(x[at]) if x.dtype == stats.dtype else x[at].to(stats.dtype)
        piece.sub_(largest).sub_(log_sum).exp_().mul_(of_log_sum)
        piece.scatter_add_(-1, index[at].unsqueeze(-1), of_picked)
        if of_sum:
            piece.add_(of_sum[0])
        if x.dtype != stats.dtype:
            grad[at].copy_(piece)
    return grad


def _pieces(shape: Sequence[int], width: int) -> Iterator[tuple[slice | int, ...]]:
    """Indices of views that cut targets of a shape and any strides, of `width` logits each, into pieces."""
    if not shape:
        yield ()
        return
    most = max(1, max(prod(shape) * width // _PIECES, _LEAST) // width)
    inner = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = next(dim for dim, size in enumerate(inner) if size <= most)  # the others are taken one by one
    rows = most // max(inner[cut], 1)
    for before in product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], rows):
            yield (*before, slice(start, start + rows))


# -- split logits ------------------------------------------------------------------------------------------------------

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

    `local` is that part, a part of `split_dim`, with its history in autograd and in transforms; the `DTensor` around
    has none. `origin` names the module and the rule that left it split.
    """

    local: Tensor
    split_dim: int
    origin: Callable[[], str]

    @classmethod
    def of(cls, local: Tensor, mesh: DeviceMesh, dim: int, origin: Callable[[], str]) -> "SplitLogits":
        """The parts of all ranks of a mesh with one axis as one tensor."""
        shape = (*local.shape[:dim], local.shape[dim] * mesh.size(), *local.shape[dim + 1 :])
        split = wrap_local(local.detach(), dtensor_spec(mesh, [Shard(dim)], shape, local.dtype), kind=cls)
        assert isinstance(split, cls)
        split.local, split.split_dim, split.origin = local, dim, origin
        return split

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's part."""
        return self.local if grad_placements is None else self._plain().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """All of it, on every rank: one all-gather."""
        if grad_placements is not None:
            return self._plain().full_tensor(grad_placements=grad_placements)
        return collectives.all_gather_invariant(self.local, self.device_mesh, axis_of(self), self.split_dim)

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any) -> DTensor:
        """An ordinary `DTensor` laid out otherwise."""
        return self._plain().redistribute(device_mesh, placements, **options)

    def _plain(self) -> DTensor:
        where = self.device_mesh, self.placements
        layout = {"shape": self.shape, "stride": self.stride()}
        return DTensor.from_local(self.local.contiguous(), *where, run_check=False, **layout)

    def __tensor_flatten__(self) -> Any:
        """What Dynamo asks for, which would lose the history of `own`."""
        why = "torch.compile: split logits cannot enter a compiled function. Compile the whole step by sf.jit, or pass"
        raise ShardError(f"{why} an ordinary DTensor, logits.redistribute(placements=logits.placements)")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it with the parts, if that is right."""
        kwargs, name = kwargs or {}, _name(func)
        x = next(leaf for leaf in (*args, *kwargs.values(), *_inner(args)) if isinstance(leaf, SplitLogits))
        if name in _OF_PART and x is args[0]:
            return func(x.local, *args[1:], **kwargs)
        pointwise = name.strip("_") in _POINTWISE
        if name in _WHOLE or name.lstrip("_").startswith("is_") or (_is_property(func) and not pointwise):
            return super().__torch_function__(func, types, args, kwargs)
        adapted = _adapted(x, name, args, kwargs)
        if adapted is None:
            raise _refusal(x, name)
        out = func(*adapted, **kwargs)
        if not isinstance(out, Tensor) or out.device != x.local.device:
            raise _refusal(x, name)
        if out is x.local:
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
    dim, here = x.split_dim, x.local.shape[x.split_dim]
    return ShardError(
        f"{name}: {x.origin()}: each rank has {here} of {x.shape[dim]} along dim {dim}, and '{name}' needs all of "
        "them or mixes them with whole tensors. Compute the loss by sf.cross_entropy(logits, targets), gather them by "
        "logits.full_tensor(), or drop that entry, and they are gathered"
    )


def _adapted(x: SplitLogits, name: str, args: Any, kwargs: Any) -> "tuple[Any, ...] | None":
    """The arguments for the part of this rank; None when the operation on parts is not that on the whole."""
    if name.strip("_") in _POINTWISE:
        for other in (*args, *kwargs.values()):
            alike = isinstance(other, SplitLogits) and (other.shape, other.device_mesh) == (x.shape, x.device_mesh)
            if isinstance(other, Tensor) and not alike:
                return None
        return tuple(arg.local if isinstance(arg, SplitLogits) else arg for arg in args)
    change = _CHANGES.get(name)
    if change is None or args[0] is not x or x.split_dim != x.dim() - 1:
        return None
    changed = change(x, args[1:], kwargs)
    return None if changed is None else (x.local, *changed)


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
    return ((*others, x.local.shape[-1]),) if last == x.shape[-1] else None


def _flatten(x: SplitLogits, args: Any, kwargs: Any) -> "tuple[Any, ...] | None":
    """Dims before the last."""
    dims = dict(zip(("start_dim", "end_dim"), args, strict=False)) | kwargs
    return args if dims.get("end_dim", -1) % x.dim() < x.dim() - 1 else None


_CHANGES = {"__getitem__": _index, "reshape": _reshape, "view": _reshape, "flatten": _flatten}
