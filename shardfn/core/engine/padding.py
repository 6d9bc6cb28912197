"""What operations make of padding, which is zero in weights: where it stays so, and where it is no number. Layer 3.

A padded head divided by its norm is 0 / 0, and NaN times a weight of zero is NaN: in what the head is added to, and in
the gradient of what it was made of. What an operation does element by element it is asked on one element.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import argument_names, base_name, is_mutable, pytree
from shardfn.core.engine.records import MOVES, tensors_of

Zero = Callable[[Tensor], bool]  # whether a tensor is zero in padding

_TINY, _STEEP, _JUMP = 1e-300, 1e10, 0.01  # a step has a gradient of zero
_PRODUCTS = {"mm", "bmm", "mv", "dot", "_grouped_mm"}
_SUMS = {"addmm", "baddbmm", "addmv"}  # of a tensor and a product
_KEEPING = MOVES | set(
    "sum mean amax amin max min prod var std var_mean linalg_vector_norm norm cumsum cumprod index index_select gather "
    "flip roll tril triu native_dropout view_as_real view_as_complex reshape flatten unflatten _conj "
    "_fused_rms_norm".split()
)
_NOT_BY_VALUE = {"hypot", "xlogy"}  # which have a value where their gradient has none


def after(func: Any, args: Any, kwargs: Any, zero: Zero, twice: bool = False) -> tuple[bool, bool]:
    """Whether the result of an operation is zero in padding, and whether it or its gradient is no number there.

    `twice`: the gradient may be differentiated, too.
    """
    inputs = tensors_of((args, kwargs))
    if not any(map(zero, inputs)):
        return False, False
    name = base_name(func).rstrip("_")
    named = dict(zip(argument_names(func), args, strict=False)) | kwargs
    if name in ("native_layer_norm", "native_group_norm", "_fused_rms_norm") and named.get("eps") == 0:
        return False, True
    if twice and name == "linalg_vector_norm" and inputs[0].requires_grad:  # whose gradient torch defines at zero
        return True, True
    if name in _KEEPING:
        return all(zero(x) for x in inputs if x.is_floating_point() or x.is_complex()), False
    by_chance = torch.Tag.nondeterministic_seeded in func.tags
    if (torch.Tag.pointwise in func.tags or is_mutable(func)) and not by_chance:
        return _of_one_element(func, args, kwargs, zero)
    if name in _PRODUCTS:
        return True, False
    if name in _SUMS:
        return zero(inputs[0]) and any(map(zero, inputs[1:])), False
    if name == "convolution":
        return all(zero(x) for x in inputs[1:]), False
    return name.startswith("_scaled_dot_product") and zero(inputs[2]), False


def _of_one_element(func: Any, args: Any, kwargs: Any, zero: Zero) -> tuple[bool, bool]:
    """The same, tried with what is in padding and with other numbers there, and two others for what is not zero."""

    def made(padding: float, other: float) -> Tensor:
        def number(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            value = padding if zero(x) else other if x.is_floating_point() or x.is_complex() else round(other)
            return torch.tensor(value, dtype=torch.float64 if x.is_floating_point() else x.dtype)

        return tensors_of(func(*pytree.tree_map(number, args), **kwargs))[0]

    try:
        found, again, elsewhere, near = (made(*at).item() for at in ((0.0, 0.7), (0.0, 0.3), (0.9, 0.7), (_TINY, 0.7)))
    except (RuntimeError, NotImplementedError, IndexError):  # no operation on one element
        return False, False
    inputs = tensors_of((args, kwargs))
    has_gradient = any(x.requires_grad and zero(x) for x in inputs)
    alone = base_name(func) in _NOT_BY_VALUE and all(map(zero, inputs))
    steep = _STEEP * _TINY < abs(near - found) < _JUMP
    breaks = isfinite(abs(elsewhere)) and not isfinite(abs(found))
    return not found and not again, breaks or (has_gradient and (steep or alone))
