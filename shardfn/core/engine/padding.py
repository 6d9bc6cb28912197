"""What operations make of padding, which is zero in weights: where it stays so, and where it is no number. Layer 3.

A padded head divided by its norm is 0 / 0, and NaN times a weight of zero is NaN: in what the head is added to, and in
the gradient of what it was made of. What an operation does element by element it is asked on one element, and
autograd for derivatives there.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import argument_names, base_name, is_mutable, pytree
from shardfn.core.engine.records import MOVES, tensors_of

Zero = Callable[[Tensor], bool]  # whether a tensor is zero in padding

_PRODUCTS = {"mm", "bmm", "mv", "dot", "_grouped_mm"}
_SUMS = {"addmm", "baddbmm", "addmv"}  # of a tensor and a product
_KEEPING = MOVES | set(
    "sum mean amax amin max min prod var std var_mean linalg_vector_norm norm cumsum cumprod index index_select gather "
    "flip roll tril triu native_dropout view_as_real view_as_complex reshape flatten unflatten _conj "
    "_fused_rms_norm".split()
)


def after(func: Any, args: Any, kwargs: Any, zero: Zero, twice: bool = False) -> tuple[bool, bool]:
    """Whether the result of an operation is zero in padding, and whether it or a derivative is no number there.

    `twice`: the gradient may be differentiated, too.
    """
    inputs = tensors_of((args, kwargs))
    if not any(map(zero, inputs)):
        return False, False
    name = base_name(func).rstrip("_")
    named = dict(zip(argument_names(func), args, strict=False)) | kwargs
    if name in ("native_layer_norm", "native_group_norm", "_fused_rms_norm") and named.get("eps") == 0:
        return False, True
    if name in _KEEPING:
        breaks = name not in MOVES and _has_no_derivative(func, args, kwargs, zero, twice)
        return all(zero(x) for x in inputs if x.is_floating_point() or x.is_complex()), breaks
    by_chance = torch.Tag.nondeterministic_seeded in func.tags
    if (torch.Tag.pointwise in func.tags or is_mutable(func)) and not by_chance:
        stays, breaks = _of_one_element(func, args, kwargs, zero)
        return stays, breaks or _has_no_derivative(func, args, kwargs, zero, twice)
    if name in _PRODUCTS:
        return True, False
    if name in _SUMS:
        return zero(inputs[0]) and any(map(zero, inputs[1:])), False
    if name == "convolution":
        return all(zero(x) for x in inputs[1:]), False
    return name.startswith("_scaled_dot_product") and zero(inputs[2]), False


def _of_one_element(func: Any, args: Any, kwargs: Any, zero: Zero) -> tuple[bool, bool]:
    """Whether zero stays zero, by two numbers for what else there is; and is no number, which another value is."""

    def made(padding: float, other: float) -> Tensor:
        def number(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            value = padding if zero(x) else other if x.is_floating_point() or x.is_complex() else round(other)
            return torch.tensor(value, dtype=torch.float64 if x.is_floating_point() else x.dtype)

        return tensors_of(func(*pytree.tree_map(number, args), **kwargs))[0]

    try:
        found, again, elsewhere = (made(*at).item() for at in ((0.0, 0.7), (0.0, 0.3), (0.9, 0.7)))
    except (RuntimeError, NotImplementedError, IndexError):  # no operation on one element
        return False, False
    return not found and not again, isfinite(abs(elsewhere)) and not isfinite(abs(found))


def _has_no_derivative(func: Any, args: Any, kwargs: Any, zero: Zero, twice: bool) -> bool:
    """Whether a derivative that may be asked for is no number where padding is zero."""
    asked: list[Tensor] = []

    def few(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dtype = torch.float64 if x.is_floating_point() else x.dtype
        value = 0 if zero(x) else 0.7 if dtype.is_floating_point or dtype.is_complex else 1
        made = torch.full([min(n, 2) for n in x.shape], value, dtype=dtype)
        if zero(x) and x.requires_grad:
            asked.append(made.requires_grad_())
            made = made * 1  # which may be written to
        return made

    def breaks() -> bool:
        found, wanted = tensors_of(func(*pytree.tree_map(few, args), **kwargs))[:1], asked
        for _ in range(1 + twice):
            if not (asked and any(x.requires_grad for x in found)):
                return False
            factors = [torch.ones_like(x.real, requires_grad=True) for x in found]
            total = torch.stack([(x.real * factor).sum() for x, factor in zip(found, factors, strict=True)]).sum()
            grads = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
            found = [grad for grad in grads if grad is not None]
            if not all(grad.isfinite().all() for grad in found):
                return True
            wanted = [*asked, *factors]  # the gradient is a function of what comes back to the result, too
        return False

    with ThreadPoolExecutor(1) as alone:  # a thread has none of the modes of this one, below which there is no autograd
        try:
            return alone.submit(breaks).result()
        except (RuntimeError, NotImplementedError, IndexError):  # not for these sizes
            return False
