"""Which modules have a parallel forward, and those of convolutions, norms and attention.

Those of linears and tables are in `linears.py`. Channels are dim 1 of activations here.

    convolution, columns   x [b, in, ..]     -> pvary -> conv(x, W, b)        -> [b, out@tp, ..]
    convolution, rows      x [b, in@tp, ..]  -> conv(x, W) -> psum -> + b     -> [b, out, ..]
    convolution, groups    x [b, in@tp, ..]  -> conv(x, W, b)                 -> [b, out@tp, ..]
    norm                   x [b, ch@tp, ..]  -> norm                          -> [b, ch@tp, ..]
    attention              x [b, s, c]       -> pvary -> heads here -> psum   -> [b, s, c]
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfn._torch import padding_widths
from shardfn.binding import Forward, weight_now
from shardfn.layout import Part, Plan, class_name, class_of, even, is_in, shallow_copy
from shardfn.notation import ShardError
from shardfn.parallel.compute_axes import ComputeAxes
from shardfn.parallel.linears import FORWARDS, Layer, custom_forward, splits


def parallel_forwards(plan: Plan, axes: ComputeAxes) -> dict[str, Forward]:
    """Module path -> forward, for every module that owns a parameter split over a compute axis of several ranks."""
    forwards: dict[str, Forward] = {}
    split = {module.name for module in plan.info.modules if splits(plan, module)}
    for module in plan.info.modules:
        layer = Layer(module, plan, axes)
        if module.name in plan.forwards:
            forwards[module.name] = custom_forward(layer, plan.forwards[module.name])
        elif module.kind in _FORWARDS and module.name in split:
            forwards[module.name] = _FORWARDS[module.kind](layer)
        elif module.kind == "attention" and axes.drops is not None:
            if not any(is_in(name, module.name) for name in plan.info.ignored):
                forwards[module.name] = _seeded(_attention(layer))
        elif module.forward == class_name(nn.TransformerEncoder):
            forwards[module.name] = _encoder
        elif module.forward == class_name(nn.TransformerEncoderLayer) and any(is_in(x, module.name) for x in split):
            forwards[module.name] = _unfused
    return forwards


# -- convolutions -----------------------------------------------------------------------------------------------------


def _convolution(layer: Layer) -> Forward:
    """Column-parallel, row-parallel or group by group, by the axes on the out and in dims of the weight."""
    layout, parts = layer.layout("weight"), layer.parts("weight")
    columns, rows = layer.sides()
    space = len(layout.shape) - 2
    odd = set(parts) - {*columns, *rows}

    def forward(module: Any, x: Tensor, output_size: Any = None) -> Tensor:
        if odd or output_size is not None:
            raise layer.refuse("'output_size' and a split kernel are not served; split channels only")
        w, bias = weight_now(layout.name), layer.local("bias")
        dim, groups = x.dim() - space - 1, module.groups
        x = layer.own_part(x, {axis: parts[axis].at(dim) for axis in rows})
        if groups > 1:
            x, groups = layer.own_part(x, _grouped(layer, module, columns, rows, dim)), groups // layer.ways(columns)
        else:
            x = layer.entered(x, columns)
        y = _convolved(module, x, w, None if rows else bias, groups, space)
        y = layer.total(y, rows)
        if rows and bias is not None:
            y = y + bias.view(-1, *[1] * space)  # after the sum, or it would count once a rank
        return layer.made(y, columns, dim, parts)

    return forward


def _grouped(layer: Layer, module: Any, columns: Sequence[str], rows: Sequence[str], dim: int) -> dict[str, Part]:
    """The part of its input that a convolution in groups needs for this rank's groups.

    Raises:
        ShardError: a rank would have parts of groups.
    """
    ways = layer.ways(columns)
    pieces = [run[0] for axis in columns for run in layer.parts("weight")[axis].runs]
    if rows or module.groups % ways or len(columns) > 1 or pieces != [1]:
        why = f"a convolution in groups={module.groups} is split between whole groups: by one axis that"
        raise layer.refuse(f"{why} divides their number, on the first dim, 'ch@{(*columns, *rows)[0]} ...'")
    return {axis: even(dim, module.in_channels // ways) for axis in columns}


def _convolved(module: Any, x: Tensor, w: Tensor, bias: Tensor | None, groups: int, space: int) -> Tensor:
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        transposed = getattr(F, f"conv_transpose{space}d")
        return transposed(x, w, bias, module.stride, module.padding, module.output_padding, groups, module.dilation)
    padding: Any = module.padding
    if module.padding_mode != "zeros":
        x, padding = F.pad(x, padding_widths(module), mode=module.padding_mode), 0
    return getattr(F, f"conv{space}d")(x, w, bias, module.stride, padding, module.dilation, groups)


# -- norms ------------------------------------------------------------------------------------------------------------


Norm = Callable[[Layer, Any, dict[str, Part], Tensor, Tensor, Tensor | None], Tensor]


def _norm(normed: Norm, layer: Layer) -> Forward:
    """A norm of this rank's channels, with the weight and bias for them."""
    parts = layer.parts("weight")

    def forward(module: Any, x: Tensor) -> Tensor:
        w, bias = weight_now(layer.layout("weight").name), layer.local("bias")
        x = layer.own_part(x, {axis: part.at(1) for axis, part in parts.items()})
        return layer.made(normed(layer, module, parts, x, w, bias), list(parts), 1, parts)

    return forward


def _batch_norm(layer: Layer, module: Any, parts: dict[str, Part], x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Statistics are of each channel alone; running ones, which every rank has whole, are gathered when they change."""
    mean, var = module.running_mean, module.running_var  # [ch], whole on every rank
    writes = module.training and module.track_running_stats and mean is not None
    known: list[Any] = [mean, var] if writes or not module.training else [None, None]
    local: list[Any] = [None if s is None else layer.own_part(s.detach(), parts, " statistics").clone() for s in known]
    momentum, batches = module.momentum, module.num_batches_tracked
    if writes and batches is not None:
        batches.add_(1)
        momentum = 1.0 / float(batches) if momentum is None else momentum
    y = F.batch_norm(x, local[0], local[1], w, bias, module.training or mean is None, momentum or 0.0, module.eps)
    if writes:
        new = torch.stack(local)  # [2, ch@tp]
        for axis, part in reversed(parts.items()):
            new = layer.axes.join(new, axis, 1, part.runs)
        with torch.no_grad():
            for buffer, value in zip(known, new, strict=True):
                buffer.copy_(value)
    return y


def _group_norm(layer: Layer, module: Any, parts: dict[str, Part], x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Whole groups on each rank."""
    ways, groups = layer.ways(list(parts)), module.num_groups
    pieces = [outer for part in parts.values() for outer, _ in part.runs]
    if groups % ways or pieces != [1] * len(parts):
        why = f"num_groups={groups} must be whole groups for each of {ways} ranks, {groups} % {ways} = {groups % ways}"
        how = "or leave the norm whole and gather what is before it, as by Policy(acts={'conv': 'b f ...'})"
        raise layer.refuse(f"{why}; choose another, {how}")
    y = F.group_norm(x, groups // ways, w, bias, module.eps)
    for axis, part in parts.items():
        layer.axes.note_part(y, axis, part.at(1))
    return y


def _instance_norm(
    layer: Layer, module: Any, parts: dict[str, Part], x: Tensor, w: Tensor, bias: Tensor | None
) -> Tensor:
    """Each sample and channel by itself."""
    space = next(n for n, cls in _INSTANCES.items() if isinstance(module, cls))
    if module.track_running_stats or x.dim() != space + 2:
        raise layer.refuse("track_running_stats=True and inputs without a batch dim are not served")
    return F.instance_norm(x, weight=w, bias=bias, eps=module.eps)


_INSTANCES = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


# -- attention --------------------------------------------------------------------------------------------------------


def _attention(layer: Layer) -> Forward:
    """`nn.MultiheadAttention` with this rank's heads; the plan has seen that all of its weights are split alike."""
    inner = [name for name, _ in layer.module.params if name.endswith("proj_weight")]
    axes_of_heads = list(layer.parts(inner[0]))

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if axes_of_heads:
            _check_heads(layer, module, axes_of_heads, inner)
        if is_causal and attn_mask is None:
            raise ShardError(f"apply: {layer.name!r} got is_causal=True, which says what attn_mask is, and none")
        alone = query.dim() == 2
        inputs = [query, key, value]  # which may be one tensor
        known = {id(x): layer.entered(x, axes_of_heads, f" input {at}") for at, x in reversed(list(enumerate(inputs)))}
        q, k, v = _projected(layer, module, [known[id(x)] for x in inputs], alone)  # [b, h@tp, s, d]
        mask = _merged(layer, module, axes_of_heads, attn_mask, key_padding_mask, q)
        drops = module.dropout if module.training else 0.0
        seeded = layer.axes.drops if drops else None
        if need_weights or seeded is not None:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            shares = (scores if mask is None else scores + mask).softmax(-1)
            shares = F.dropout(shares, drops) if seeded is None else seeded(layer.name, shares, drops, axes_of_heads)
            out = shares @ v
            weights = _weights(layer, module, axes_of_heads, shares, average_attn_weights) if need_weights else None
        else:
            out, weights = F.scaled_dot_product_attention(q, k, v, mask, drops), None
        y = F.linear(out.transpose(1, 2).flatten(2), weight_now(layer.layout("out_proj.weight").name))
        y = y.squeeze(0) if alone else y if module.batch_first else y.transpose(0, 1)
        y = layer.total(y, axes_of_heads)
        bias = layer.local("out_proj.bias")
        y = y if bias is None else y + bias
        return layer.made(y, (), 0, {}), weights if weights is None or not alone else weights.squeeze(0)

    return forward


def _seeded(forward: Forward) -> Forward:
    """An attention with whole weights under a `dropout_seed`, if it drops and has no keys of its own."""

    def chosen(own: Any, *args: Any, **kwargs: Any) -> Any:
        adds = own.bias_k is not None or own.bias_v is not None or own.add_zero_attn
        plain = adds or not own.training or not own.dropout
        return (class_of(own).forward if plain else forward)(own, *args, **kwargs)

    return chosen


def _check_heads(layer: Layer, module: Any, split: Sequence[str], inner: Sequence[str]) -> None:
    """Whether each rank has whole heads of queries, keys and values.

    Raises:
        ShardError: it has not, or the module adds keys of its own.
    """
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise layer.refuse("add_bias_kv and add_zero_attn are not served with split heads; leave its weights whole")
    ways = layer.ways(split)
    fused = 3 if len(inner) == 1 else 1
    size = module.embed_dim // ways
    wanted = dict.fromkeys(inner, fused) | {"out_proj.weight": 1}
    wanted |= {"in_proj_bias": 3} if module.in_proj_bias is not None else {}
    runs = {name: [part.runs for part in layer.parts(name).values()] for name in wanted}
    whole = runs == {name: [((count, size),)] for name, count in wanted.items()}
    if module.num_heads % ways or not whole:
        axis = split[0]
        raise layer.refuse(
            f"each of {ways} ranks must have whole heads of {module.num_heads}, {module.num_heads} % {ways} = "
            f"{module.num_heads % ways}, of queries, keys and values, by one axis: in_proj_weight '(3 heads@{axis} d) "
            f"_', in_proj_bias '(3 heads@{axis} d)' (of kdim or vdim: q_proj_weight '(heads@{axis} d) _' and so on), "
            f"out_proj.weight '_ (heads@{axis} d)', with Policy(sizes={{'heads': {module.num_heads}}})"
        )


def _projected(layer: Layer, module: Any, inputs: Sequence[Tensor], alone: bool) -> list[Tensor]:
    """Queries, keys and values by this rank's heads, [b, heads, s, d]."""
    fused, bias = layer.local("in_proj_weight"), layer.local("in_proj_bias")
    names = (f"{x}_proj_weight" for x in "qkv")
    weights = [weight_now(layer.layout(x).name) for x in names] if fused is None else fused.chunk(3)
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    heads = []
    for x, w, b in zip(inputs, weights, biases, strict=True):
        x = x.unsqueeze(0) if alone else x if module.batch_first else x.transpose(0, 1)
        heads.append(F.linear(x, w, b).unflatten(-1, (-1, module.head_dim)).transpose(1, 2))
    return heads


def _merged(
    layer: Layer, module: Any, split: Sequence[str], mask: Tensor | None, padding: Tensor | None, q: Tensor
) -> Tensor | None:
    """What is added to scores [b, heads, t, s], of masks that hide (bool) or are added."""
    merged: Tensor | None = None
    shared = [x for x in (mask if mask is not None and mask.dim() == 2 else None, padding) if x is not None]
    for axis in split:
        for x in shared:
            layer.axes.require_whole(x, axis, "its masks")
    if mask is not None:
        merged = _added(mask, q.dtype)
        if mask.dim() == 3:  # [b * heads, t, s]
            merged = merged.unflatten(0, (-1, module.num_heads))
            parts = {axis: even(1, module.num_heads // layer.plan.axes[axis]) for axis in split}
            merged = layer.own_part(merged, parts, " attn_mask")
        elif mask.is_floating_point():
            merged = layer.entered(merged, split, " attn_mask")
    if padding is not None:
        hides = _added(padding, q.dtype).view(-1, 1, 1, padding.shape[-1])
        merged = hides if merged is None else merged + hides
    return merged


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add."""
    return mask if mask.dtype != torch.bool else torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _weights(layer: Layer, module: Any, split: Sequence[str], weights: Tensor, averaged: bool) -> Tensor:
    """The attention weights that the module returns: of all heads."""
    if averaged:
        weights = weights.sum(1) / module.num_heads
    of = f"{layer.name} weights"
    for axis in split:
        weights = layer.axes.total(weights, axis, of) if averaged else layer.axes.join(weights, axis, 1)
    return weights


# -- layers with a fused forward --------------------------------------------------------------------------------------


def _unfused(own: Any, *args: Any, **kwargs: Any) -> Any:
    """An encoder layer that calls its children, also when nothing needs a gradient."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return class_of(own).forward(own, *args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _encoder(own: Any, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    """An encoder that makes no nested tensor, but zeros of padding, ahead of its norm, where torch's would."""
    inner, pads = shallow_copy(own, {}, {}), src_key_padding_mask
    inner.use_nested_tensor = False
    plain = torch.is_grad_enabled() or torch.is_autocast_enabled() or own.layers[0].training or mask is not None
    fused = torch.backends.mha.get_fastpath_enabled() and own.use_nested_tensor and not torch.compiler.is_compiling()
    if plain or not fused or pads is None or src.dim() != 3:
        return class_of(own).forward(inner, src, mask, pads, is_causal)
    inner.norm = None
    at_end = (pads.bool().int().cummax(1).values == pads.bool()).all()  # torch looks at all sequences together
    out = class_of(own).forward(inner, src, mask, pads, is_causal).masked_fill((pads.bool() & at_end)[..., None], 0)
    return out if own.norm is None else own.norm(out)


_FORWARDS: dict[str, Callable[[Layer], Forward]] = {**FORWARDS, "attention": _attention}  # by the kind of a module
_FORWARDS |= {"convolution": _convolution, "transposed convolution": _convolution}
_NORMS = {"batch norm": _batch_norm, "group norm": _group_norm, "instance norm": _instance_norm}
_FORWARDS |= {kind: partial(_norm, normed) for kind, normed in _NORMS.items()}
