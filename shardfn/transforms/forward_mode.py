"""Functions of torch by their formulas, where torch's own derivatives of derivatives fail.

In torch 2.13 the gradient of a forward-mode derivative is wrong, without an error, for layer, instance and batch
norms, and so is that of a gradient in a `vmap`. `mse_loss`, `huber_loss`, `soft_margin_loss`, `glu` and fused attention
on CPUs have no forward mode, of their gradient or at all, or no gradient of it. What torch has mended can go.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from shardfn._torch import function_modes, kinds_of_transforms
from shardfn.context import is_asked_for, order_of_derivatives
from shardfn.notation import ShardError


def as_now() -> AbstractContextManager[Any]:
    """For what is computed again later: the formulas, if they are in force now."""
    return next((mode for mode in reversed(function_modes()) if isinstance(mode, ByFormulas)), nullcontext())


def where_torch_is_wrong() -> AbstractContextManager[Any]:
    """The formulas, in a forward whose derivatives would be wrong: forward mode of torch's own, and third ones."""
    if any(isinstance(mode, ByFormulas) for mode in function_modes()):
        return nullcontext()
    if "Jvp" in kinds_of_transforms():
        return ByFormulas(FORWARD_MODE_DIFFERENTIATED if is_asked_for() else FORWARD_MODE)
    return ByFormulas(FORWARD_MODE) if order_of_derivatives() > 2 else nullcontext()


class ByFormulas(TorchFunctionMode):
    """Within it these functions are made of others: those in `FORWARD_MODE`, `MAPPED`, ..."""

    def __init__(self, formulas: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._formulas = formulas

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, out = kwargs or {}, NotImplemented
        if func in self._formulas:
            named = dict(zip(_names(func), args, strict=False)) | kwargs
            out = self._formulas[func](**{name: value for name, value in named.items() if value is not None})
        return func(*args, **kwargs) if out is NotImplemented else out


@cache
def _names(func: Callable[..., Any]) -> Sequence[str]:
    """The names of what a function of torch is given."""
    if func is F.scaled_dot_product_attention:  # written in C++, which does not say
        return "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
    return list(signature(func).parameters)


# Formulas, for what torch's functions are given, by the names that it has there, without what is None.
# `NotImplemented`: they do not hold for these arguments, but torch's own do; so for `others`, which they do not know.


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def _mse_loss(input: Tensor, target: Tensor, reduction: str = "mean", **others: Any) -> Any:
    return NotImplemented if others else _reduced((input - target).square(), reduction)


def _huber_loss(input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, **others: Any) -> Any:
    off = (input - target).abs()
    losses = torch.where(off < delta, 0.5 * off.square(), delta * (off - 0.5 * delta))
    return NotImplemented if others else _reduced(losses, reduction)


def _soft_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean", **others: Any) -> Any:
    return NotImplemented if others else _reduced(F.softplus(-target * input), reduction)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


def _normed(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """Zero mean and unit variance over dims, computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(tuple(dims), keepdim=True)
    return centered * (centered.square().mean(tuple(dims), keepdim=True) + eps).rsqrt()


def _scaled(out: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(dtype)


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return _scaled(_normed(input, range(-len(normalized_shape), 0), eps), weight, bias, input.dtype)


def _by_channel(input: Tensor, dims: Sequence[int], options: Mapping[str, Any]) -> Any:
    """Each channel, dim 1, normed over dims by what it has there, in no running mean."""
    if "running_mean" in options:
        return NotImplemented
    shape = (-1, *(1,) * (input.dim() - 2))
    weight, bias = (x if x is None else x.view(shape) for x in (options.get("weight"), options.get("bias")))
    return _scaled(_normed(input, dims, options.get("eps", 1e-5)), weight, bias, input.dtype)


def _instance_norm(input: Tensor, use_input_stats: bool = True, **options: Any) -> Any:
    return _by_channel(input, range(2, input.dim()), options) if use_input_stats else NotImplemented


def _batch_norm(input: Tensor, training: bool = False, **options: Any) -> Any:
    return _by_channel(input, [0, *range(2, input.dim())], options) if training else NotImplemented


def _batch_norm_in_forward_mode(input: Tensor, **options: Any) -> Any:
    if options.get("training") and "running_mean" in options:
        why = "the gradient of torch's forward mode of a batch norm in training is wrong"
        raise ShardError(f"jvp: {why}; call .eval() on it, or make it with track_running_stats=False")
    return _batch_norm(input, **options)


def _normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **others: Any) -> Any:
    if p != 2.0 or others:
        return NotImplemented
    square = input.square().sum(dim, keepdim=True)  # a norm has no second derivative where padding is zero
    return input / square.clamp_min(eps**2).sqrt()


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor:
    blind = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        blind = ~attn_mask.any(-1, keepdim=True)  # torch gives zeros, whose derivative has no derivative
        attn_mask = attn_mask | blind
    with sdpa_kernel(SDPBackend.MATH):  # made of operations that have derivatives of all orders
        out = F.scaled_dot_product_attention(query, key, value, attn_mask, **others)
    return out if blind is None else out.masked_fill(blind, 0)


MAPPED = {F.layer_norm: _layer_norm, F.instance_norm: _instance_norm, F.batch_norm: _batch_norm}
FORWARD_MODE: dict[Any, Callable[..., Any]] = {F.layer_norm: _layer_norm, F.instance_norm: _instance_norm}
FORWARD_MODE |= {F.mse_loss: _mse_loss, F.huber_loss: _huber_loss, F.soft_margin_loss: _soft_margin_loss}
FORWARD_MODE |= {F.glu: _glu, F.normalize: _normalize, F.scaled_dot_product_attention: _attention}
FORWARD_MODE_DIFFERENTIATED = FORWARD_MODE | {F.batch_norm: _batch_norm_in_forward_mode}
