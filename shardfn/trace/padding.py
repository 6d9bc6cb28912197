"""What operations make of padding, which is zero in weights: where it stays so, and where it is no number.

A padded head divided by its norm is 0 / 0, and NaN times a weight of zero is NaN: in what the head is added to, and in
the gradient of what it was made of. What an operation does element by element it is asked on one element, and
autograd for derivatives there.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardfn._torch import base_name, is_mutable, named_arguments, pytree
from shardfn.layout import Part
from shardfn.trace.meta_values import tensors_of
from shardfn.trace.operations import ADDED_TO, MOVES, PRODUCTS
from shardfn.trace.paired_sizes import local_of, whole_of

PartsOf = Callable[[Tensor], Mapping[str, Part]]  # by axis, what is known of a tensor
Zero = Callable[[Tensor], bool]  # whether a tensor is zero in padding

_KEEPING = MOVES | set(
    "sum mean amax amin max min prod var std var_mean linalg_vector_norm norm cumsum cumprod index index_select gather "
    "flip roll tril triu native_dropout view_as_real view_as_complex reshape flatten unflatten _conj "
    "_fused_rms_norm".split()
)


def after(func: Any, args: Any, kwargs: Any, zero: Zero, wanted: Zero, asked_for: str = "") -> tuple[bool, bool]:
    """Whether the result of an operation is zero in padding, and whether it or a derivative is no number there.

    `wanted`: whether a tensor has a gradient. `asked_for`: which derivatives are besides, see `derivatives_asked_for`.
    """
    inputs = tensors_of((args, kwargs))
    name = base_name(func).rstrip("_")
    named = named_arguments(func, args, kwargs)
    if name in ("native_layer_norm", "native_group_norm", "_fused_rms_norm") and named.get("eps") == 0:
        return False, True
    if name in _KEEPING:
        breaks = name not in MOVES and _has_no_derivative(func, args, kwargs, zero, wanted, asked_for)
        return all(zero(x) for x in inputs if x.is_floating_point() or x.is_complex()), breaks
    by_chance = torch.Tag.nondeterministic_seeded in func.tags
    if (torch.Tag.pointwise in func.tags or is_mutable(func)) and not by_chance:
        stays, breaks = _of_one_element(func, args, kwargs, zero)
        return stays, breaks or _has_no_derivative(func, args, kwargs, zero, wanted, asked_for)
    if name in PRODUCTS:
        return True, False
    if name in ADDED_TO:
        return zero(inputs[0]) and any(map(zero, inputs[1:])), False
    if name == "convolution":
        return all(zero(x) for x in inputs[1:]), False
    return name.startswith("_scaled_dot_product") and zero(inputs[2]), False


def repeated_otherwise(inputs: Sequence[Tensor], results: Sequence[Tensor], parts_of: PartsOf) -> str:
    """Why padded heads meet those of others, if they do: they are repeated more or less often than on one rank."""
    parts = [(x, part) for x in inputs for part in parts_of(x).values() if part.alone and part.second is None]
    heads = [(local_of(x).shape[part.dim], whole_of(x).shape[part.dim]) for x, part in parts]
    once = [local_of(x).numel() * whole_of(y).numel() for x, y in zip(inputs, results, strict=False)]
    again = [local_of(y).numel() * whole_of(x).numel() for x, y in zip(inputs, results, strict=False)]
    alike = len(dict(heads)) == len(set(heads)) and not (heads and once != again)
    return "" if alike else "heads are not repeated as on one rank: pad queries and keys alike"


def _of_one_element(func: Any, args: Any, kwargs: Any, zero: Zero) -> tuple[bool, bool]:
    """Whether zero stays zero, for two values of the other inputs; and whether only zero gives no number."""

    def made(padding: float, other: float) -> Tensor:
        def number(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            value = padding if zero(x) else other if x.is_floating_point() or x.is_complex() else round(other)
            return torch.tensor(value, dtype=torch.float64 if x.is_floating_point() else x.dtype)

        return tensors_of(func(*pytree.tree_map(number, args), **kwargs))[0]

    try:
        first, again, elsewhere = (made(*at).item() for at in ((0.0, 0.7), (0.0, 0.3), (0.9, 0.7)))
    except (RuntimeError, NotImplementedError, IndexError):  # no operation on one element
        return False, False
    return not first and not again, isfinite(abs(elsewhere)) and not isfinite(abs(first))


def _has_no_derivative(func: Any, args: Any, kwargs: Any, zero: Zero, asks: Zero, asked_for: str) -> bool:
    """Whether a derivative that is asked for is no number where padding is zero; the tangent is zero there, too."""
    wanted: list[Tensor] = []

    def dual(x: Tensor, tangent: Tensor) -> Tensor:
        # Below the level of forward mode that is on in all threads; what is made may be written to.
        return forward_ad.make_dual(x, tangent) if asked_for in ("jvp", "hvp") else x * 1

    def few(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dtype = torch.float64 if x.is_floating_point() else x.dtype
        value = 0 if zero(x) else 0.7 if dtype.is_floating_point or dtype.is_complex else 1
        sample = torch.full([min(n, 2) for n in x.shape], value, dtype=dtype)
        if not (zero(x) and asks(x)):
            return sample
        wanted.append(sample.requires_grad_())
        return dual(sample, torch.zeros_like(sample))

    def breaks() -> bool:
        values = tensors_of(func(*pytree.tree_map(few, args), **kwargs))[:1]
        if not _are_finite(_tangents(values)):
            return True
        for _ in range(2 if asked_for == "reverse" else 1):
            if not (wanted and any(x.requires_grad for x in values)):
                return False
            factors = [torch.ones_like(x.real, requires_grad=True) for x in values]
            scaled = [x.real * dual(by, by.detach()) for x, by in zip(values, factors, strict=True)]
            total = torch.stack([x.sum() for x in scaled]).sum()
            grads = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
            values = [grad for grad in grads if grad is not None]
            if not _are_finite(values) or (asked_for == "hvp" and not _are_finite(_tangents(values))):
                return True
            wanted.extend(factors)  # the gradient is a function of what comes back to the result, too
        return False

    with ThreadPoolExecutor(1) as alone:  # a thread has none of the modes of this one, below which there is no autograd
        try:
            return alone.submit(breaks).result()
        except (RuntimeError, NotImplementedError, IndexError):  # not for these sizes
            return False


def _tangents(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tangent for x in tensors if (tangent := forward_ad.unpack_dual(x).tangent) is not None]


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)
