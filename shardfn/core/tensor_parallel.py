"""Parallel forwards derived from the rules of a module's weights, and the loss on split logits. Layer 4.

A weight W of a linear is [out, in]. A compute axis on an out factor makes it column-parallel, on an in factor
row-parallel; on the vocab factor of an embedding the lookup is masked. [Note: varying and invariant] is in
`engine/variance.py`.

    column   x [.., in]     -> pvary (once a tensor) -> x @ W.T + b            -> [.., out@tp]
    row      x [.., in@tp]  -> x @ W.T -> psum -> + b                          -> [.., out]
    lookup   ids [..]       -> masked rows of W [vocab@tp, c] -> psum          -> [.., c]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import has_no_memory, outside_transforms, values_of
from shardfn.core import collectives
from shardfn.core.engine.binding import Forward
from shardfn.core.engine.variance import Variance
from shardfn.core.errors import ShardError
from shardfn.core.layout import Layout
from shardfn.core.mesh import MeshSpec
from shardfn.core.model import ModuleInfo
from shardfn.core.pattern import first_match
from shardfn.core.plan import Plan
from shardfn.core.spec import parse


@dataclass(frozen=True)
class Adjustments:
    """What a run without data added to the derivation, see [Note: varying and invariant].

    `vary`: parameters and module outputs that need a `pvary`, with the axis; `gather`: column-parallel modules whose
    output is gathered because it leaves `apply`. `splits`: if any dropout module is called on a split activation,
    all calls of such modules, by path and number, with the axis of each dim ("" for none); None when no dim explains
    the size.
    """

    vary: frozenset[tuple[str, str]] = frozenset()
    gather: frozenset[str] = frozenset()
    splits: frozenset[tuple[str, int, tuple[str, ...] | None]] = frozenset()

    def axes_of(self, source: str) -> list[str]:
        """The axes over which a source needs a `pvary`."""
        return sorted(axis for name, axis in self.vary if name == source)


class ComputeAxes:
    """The collectives over compute axes of one call; tells `Variance`, when there is one, what they did."""

    def __init__(
        self,
        mesh: DeviceMesh | MeshSpec,
        sizes: Mapping[str, int],
        coords: Mapping[str, int],
        variance: Variance | None = None,
    ) -> None:
        self.mesh, self.sizes, self.coords = mesh, sizes, coords
        self._variance = variance
        self.bytes_moved = 0  # counted in a run without data: received by each rank in a forward and a backward
        # An input read by several column-parallel linears is varied once, so that they share one backward all-reduce.
        # The values hold the same storage as the keys, not the keys: an entry goes when its input does.
        self._varied: dict[str, WeakIdKeyDictionary] = {}

    def forget(self) -> None:
        """Another call begins: what was varied belongs to the graph of the one before."""
        self._varied.clear()

    def vary(self, x: Tensor, axis: str) -> Tensor:
        """Identity on an invariant tensor; its backward is an all-reduce over `axis`."""
        if self._variance is not None and axis in self._variance.tag(x).axes:
            self._variance.refuse(
                f"an input that is already split over '{axis}' meets a weight that splits its output over it"
            )
        cache = self._varied.setdefault(axis, WeakIdKeyDictionary())
        if x not in cache:
            with torch.set_grad_enabled(x.requires_grad or torch.is_grad_enabled()):  # also used outside a no_grad
                cache[x] = collectives.pvary(x, self.mesh, axis)
            self._count(x, axis, 2 if x.requires_grad else 0)
        return cache[x]

    def total(self, x: Tensor, axis: str) -> Tensor:
        """The sum over `axis`, the same on all its ranks."""
        self._count(x, axis, 2)
        return collectives.psum(x, self.mesh, axis)

    def join(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """The parts of all ranks of `axis` side by side, the same on all its ranks."""
        self._count(x, axis, self.sizes[axis])
        return collectives.all_gather_invariant(x, self.mesh, axis, dim)

    def note_source(self, out: Any, source: str, split_by: str | None = None) -> Any:
        """Tell the run without data where a module's output comes from."""
        if self._variance is not None and isinstance(out, Tensor):
            tag = self._variance.tag(out)
            added = frozenset([split_by]) if split_by is not None else frozenset()
            self._variance.mark(out, replace(tag, source=source, split_by=tag.split_by | added))
        return out

    def _count(self, x: Tensor, axis: str, parts: int) -> None:
        """Add `parts (W - 1) / W` times the bytes of x: 2 for an all-reduce, W for an all-gather of shards."""
        if self._variance is not None:
            size = self.sizes[axis]
            self.bytes_moved += parts * (size - 1) * x.numel() * x.element_size() // size


def parallel_forwards(
    plan: Plan, axes: ComputeAxes, weight: Callable[[str], Tensor], adjust: Adjustments
) -> dict[str, Forward]:
    """Module path -> forward, for every module that owns a parameter split over a compute axis of several ranks."""
    forwards: dict[str, Forward] = {}
    for module in plan.info.modules:
        custom = first_match(plan.policy.compute, [module.name])
        if custom is not None:
            forwards[module.name] = _custom(module, plan, axes.mesh, weight, plan.policy.compute[custom])
        elif any(plan.compute_axes(plan.layouts[name]) for _, name in module.params):
            names = dict(module.params)
            layout = plan.layouts[names["weight"]]
            if module.kind == "linear":
                forwards[module.name] = _linear(module, layout, names.get("bias"), plan, axes, weight, adjust)
            elif module.kind == "embedding":
                forwards[module.name] = _embedding(module, layout, plan, axes, weight)
    return forwards


class Layouts(dict[str, Layout]):
    """How the weights of a module lie, by attribute, and the `mesh` for collectives."""

    def __init__(self, layouts: Mapping[str, Layout], mesh: DeviceMesh | MeshSpec) -> None:
        super().__init__(layouts)
        self.mesh = mesh


def _custom(
    module: ModuleInfo, plan: Plan, mesh: DeviceMesh | MeshSpec, weight: Callable[[str], Tensor], fn: Forward
) -> Forward:
    layouts = Layouts({attribute: plan.layouts[name] for attribute, name in module.params}, mesh)

    def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        local = {attribute: weight(layout.name) for attribute, layout in layouts.items()}
        return fn(own, local, layouts, *args, **kwargs)

    return forward


def _linear(
    module: ModuleInfo,
    layout: Layout,
    bias_name: str | None,
    plan: Plan,
    axes: ComputeAxes,
    weight: Callable[[str], Tensor],
    adjust: Adjustments,
) -> Forward:
    """Column-parallel, row-parallel or both, by the axes on the out and in dims of the weight."""
    columns, rows = plan.compute_axes(layout, 0), plan.compute_axes(layout, 1)
    gathers = module.name in adjust.gather
    act = first_match(plan.policy.acts, [module.name])
    out_features = layout.shape[0]
    if gathers and len(layout.leaves) > 1:
        raise ShardError(
            f"apply: the fused output of {module.name!r} leaves the model split over {columns}; split it first"
        )

    def forward(own: nn.Module, x: Tensor) -> Any:
        w = weight(layout.name)  # [out/columns, in/rows]
        bias = weight(bias_name) if bias_name is not None else None
        _check_features(module.name, layout, x, w, rows)
        for axis in columns:
            x = axes.vary(x, axis)
        if not rows:
            y = F.linear(x, w, bias)
        else:
            y = F.linear(x, w)
            for axis in rows:
                y = axes.total(y, axis)
            y = y if bias is None else y + bias  # after the sum, or it would count once a rank
        y = axes.note_source(y, f"module {module.name}", module.name if columns else None)
        if act is not None and columns:
            return _as_split_logits(y, plan.policy.acts[act], module.name, columns, axes, out_features)
        if gathers:
            for axis in reversed(columns):
                y = axes.join(y, axis, -1)
            y = y[..., :out_features]
        return y

    return forward


def _check_features(name: str, layout: Layout, x: Tensor, w: Tensor, rows: Sequence[str]) -> None:
    if x.shape[-1] != w.shape[1]:
        why = f" over {', '.join(rows)}" if rows else ""
        raise ShardError(
            f"apply: {name!r} got an input of {x.shape[-1]} features; rule '{layout.rule}' leaves {w.shape[1]} of "
            f"{layout.shape[1]} here{why}. The layer that produces it must be split alike: use the same name and "
            "axis in its "
            f"rule, and sizes taken from the tensors, not from the configuration, in between."
        )


def _as_split_logits(
    y: Tensor, act: str, name: str, columns: Sequence[str], axes: ComputeAxes, features: int
) -> Tensor:
    """Logits as a DTensor over the compute axes, so that using them as whole ones is an error, never a wrong number."""
    wanted = [axis for axis in columns if axis in parse(act).expand(y.dim()).dims[-1].factors[-1].axes]
    if wanted != list(columns) or len(columns) != 1:
        raise ShardError(
            f"apply: Policy.acts asks for '{act}' at {name!r}, whose last dim is split over {', '.join(columns)}"
        )
    if y.shape[-1] * axes.sizes[columns[0]] != features:
        raise ShardError(
            f"apply: Policy.acts at {name!r}: logits over a padded dim cannot stay split; drop the entry or the padding"
        )
    if y.is_meta:
        return y
    shape = torch.Size((*y.shape[:-1], features))
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    assert isinstance(axes.mesh, DeviceMesh)
    mesh = axes.mesh[columns[0]]
    return DTensor.from_local(y.contiguous(), mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)


def _embedding(
    module: ModuleInfo, layout: Layout, plan: Plan, axes: ComputeAxes, weight: Callable[[str], Tensor]
) -> Forward:
    """Rows of a split table: each rank looks up the ids that it has, and the sum is the row."""
    vocab, columns = plan.compute_axes(layout, 0), plan.compute_axes(layout, 1)

    def forward(own: Any, ids: Tensor) -> Tensor:
        if own.max_norm is not None or own.scale_grad_by_freq or own.sparse:
            raise ShardError(
                f"apply: {module.name!r} splits its table by '{layout.rule}'; max_norm, scale_grad_by_freq and "
                "sparse need it whole"
            )
        w = weight(layout.name)  # [vocab/axes, c/columns]
        _require_ids(module.name, ids, layout.shape[0])
        first = _first_row(axes, vocab, w.shape[0])
        here = ids - first
        elsewhere = (here < 0) | (here >= w.shape[0])
        padding = None if own.padding_idx is None else own.padding_idx - first
        inside = padding is not None and 0 <= padding < w.shape[0]
        rows = F.embedding(here.masked_fill(elsewhere, 0), w, padding if inside else None)
        if vocab:
            rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        for axis in vocab:
            rows = axes.total(rows, axis)
        for axis in reversed(columns):
            rows = axes.join(rows, axis, -1)
        return axes.note_source(rows, f"module {module.name}")

    return forward


def _require_ids(where: str, ids: Tensor, size: int, ignore: int | None = None) -> None:
    """On the CPU, as torch does there: an id that no rank has would silently be a row of zeros."""
    if ids.device.type != "cpu" or has_no_memory():
        return
    with outside_transforms():
        for own in values_of(ids):
            known = own if ignore is None else own[own != ignore]
            if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < size:
                raise IndexError(
                    f"{where}: index out of range: ids from {int(known.min())} to {int(known.max())}, size {size}"
                )


def _first_row(axes: ComputeAxes, names: Sequence[str], rows: int) -> int:
    """The index of this rank's first row when the axes `names` split a table, outermost first, into parts of `rows`."""
    index = 0
    for axis in names:
        index = index * axes.sizes[axis] + axes.coords[axis]
    return index * rows


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    """Cross entropy of logits [..., vocab] and targets [...], also when the logits are split over the vocabulary.

    Split logits are the `DTensor` that `Policy(acts={"head": "b s vocab@tp"})` leaves; the full ones never exist.

        >>> import torch, shardfn as sf
        >>> sf.cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)).exp().round().item()
        4.0

    Args:
        logits: any floating dtype; computed in float32 at least.
        targets: class indices, any integer dtype.
        ignore_index: targets that do not count.
        reduction: `"mean"` over the targets that count, `"sum"`, or `"none"` (shape of `targets`, ignored ones 0).
        label_smoothing: weight of the uniform distribution, 0 to 1.

    Returns:
        a scalar, or one loss a target.

    Raises:
        ShardError: shapes that do not fit; logits split over another dim.

    Communication: for split logits three all-reduces of one number a target over the axis (maximum, sum, target).
    """
    if tuple(logits.shape[:-1]) != tuple(targets.shape):
        raise ShardError(
            f"cross_entropy: logits {tuple(logits.shape)} need targets {tuple(logits.shape[:-1])}, not "
            f"{tuple(targets.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy(reduction={reduction!r}): 'mean', 'sum' or 'none'")
    targets = targets.long()
    if not isinstance(logits, DTensor):
        flat = logits.reshape(-1, logits.shape[-1])
        flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        losses = F.cross_entropy(
            flat, targets.reshape(-1), ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        ).view(targets.shape)
    else:
        losses = _split_cross_entropy(logits, targets, ignore_index, label_smoothing)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _split_cross_entropy(logits: DTensor, targets: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    """log(sum(exp)) - logit of the target, each a sum over the ranks of the vocabulary's axis."""
    mesh, placements = logits.device_mesh, logits.placements
    if len(placements) != 1 or not placements[0].is_shard(logits.dim() - 1):
        raise ShardError(f"cross_entropy: logits must be split over their last dim by one axis, not {placements}")
    axis = (mesh.mesh_dim_names or ("",))[0]
    vocab = logits.shape[-1]
    _require_ids("cross_entropy", targets, vocab, ignore_index)
    local = logits.to_local(grad_placements=[Shard(logits.dim() - 1)])  # [..., vocab/axis]
    local = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    largest = local.detach().amax(-1)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    shifted = local - largest.unsqueeze(-1)
    log_sum = collectives.psum(shifted.exp().sum(-1), mesh, axis).log()
    here = targets - collectives.axis_index(mesh, axis) * local.shape[-1]
    elsewhere = (here < 0) | (here >= local.shape[-1])
    picked = shifted.gather(-1, here.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    losses = log_sum - collectives.psum(picked.masked_fill(elsewhere, 0), mesh, axis)
    if smoothing:
        mean = collectives.psum(shifted.sum(-1), mesh, axis) / vocab
        losses = (1 - smoothing) * losses + smoothing * (log_sum - mean)
    return losses.masked_fill(targets == ignore_index, 0)
