"""Comparisons of tensors and trees, whole, on all ranks, that raise and say what differs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardfn.comm import whole


def assert_close(
    actual: torch.Tensor | float,
    expected: torch.Tensor | float,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    name: str = "",
) -> None:
    """Require two tensors of equal shape and dtype to be close.

    Elementwise, `|actual - expected| <= atol + rtol * |expected|`. NaN equals nothing. `DTensor`s are compared as full
    tensors, which is a collective: call it on every rank.

        >>> import torch
        >>> from shardfn.testing import assert_close
        >>> assert_close(torch.ones(2) / 3, torch.tensor([0.333333, 0.333333]), rtol=1e-5, atol=0)

    Args:
        actual: the tensor, or number, to check.
        expected: what it should be.
        rtol: relative tolerance; with atol, both or neither. Default: that of `torch.testing.assert_close`.
        atol: absolute tolerance.
        name: what to call it in the message.

    Raises:
        AssertionError: shapes, dtypes or values differ; the message has the largest differences and where they are.
    """
    __tracebackhide__ = True
    problem = _difference(_full(actual), _full(expected), rtol, atol)
    if problem:
        raise AssertionError(f"{name}: {problem}" if name else problem)


def assert_trees_close(actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Require two trees to have the same leaves, each close as in `assert_close`.

    Trees are mappings and sequences, nested or not, of tensors and numbers; `None` counts as absent. Trees without
    leaves are refused, since comparing nothing always succeeds.

        >>> import torch
        >>> from shardfn.testing import assert_trees_close
        >>> assert_trees_close({"w": torch.ones(2)}, {"w": torch.ones(2)}, rtol=0, atol=0)

    Args:
        actual: the tree to check.
        expected: what it should be.
        rtol: see `assert_close`.
        atol: see `assert_close`.

    Raises:
        AssertionError: keys, shapes, dtypes or values differ; the message names each leaf with its largest difference.
        TypeError: a leaf is neither a tensor nor a number.
    """
    __tracebackhide__ = True
    pairs = _pair_leaves(actual, expected, "assert_trees_close")
    _raise_problems((name, _difference(a, b, rtol, atol)) for name, a, b in pairs)


def assert_parity(actual: Any, expected: Any, *, tol: float = 1e-12) -> None:
    """Require every leaf to equal its reference in norm.

    In float64, `|a - b| <= tol * max(|b|, 1e-3 * |all of expected|)` with Euclidean norms. Meant for gradients and
    parameters against an unsharded reference: sums in another order change elements that almost cancel by much more
    than their size, and leave norms alone. The second term is for leaves whose true value is zero. NaN and infinity
    never pass; integers and booleans must be equal. Trees are those of `assert_trees_close`; a single tensor is a tree
    too.

        >>> import torch
        >>> from shardfn.testing import assert_parity
        >>> w = torch.ones(2, dtype=torch.float64)
        >>> assert_parity({"w": w * 3 / 3}, {"w": w})

    Args:
        actual: the tree to check.
        expected: the reference.
        tol: the largest relative error; 1e-12 is for float64, where float32 needs about 1e-5.

    Raises:
        AssertionError: keys, shapes, dtypes or values differ; the message names each leaf with its error, the limit
            and the worst element.
        TypeError: a leaf is neither a tensor nor a number.
    """
    __tracebackhide__ = True
    pairs = _pair_leaves(actual, expected, "assert_parity")
    total = math.hypot(*(_norm(b) for _, _, b in pairs if b.dtype.is_floating_point or b.dtype.is_complex))
    _raise_problems((name, _disparity(a, b, tol, 1e-3 * total)) for name, a, b in pairs)


def _full(value: Any) -> Any:
    value = whole(value) if isinstance(value, DTensor) else value
    return value.detach() if isinstance(value, torch.Tensor) else value


def _leaves(tree: Any, path: str, caller: str) -> dict[str, torch.Tensor]:
    if tree is None:
        return {}
    if isinstance(tree, torch.Tensor):
        return {path or "tensor": _full(tree)}
    if isinstance(tree, int | float | complex):
        wide = {float: torch.float64, complex: torch.complex128}  # torch would make them float32 and complex64
        return {path or "number": torch.tensor(tree, dtype=wide.get(type(tree)))}
    if not isinstance(tree, Mapping | list | tuple):
        why = f"{path or 'the tree'} is a {type(tree).__name__}"
        raise TypeError(f"{caller}: {why}; trees are mappings, lists and tuples of tensors and numbers.")
    leaves: dict[str, torch.Tensor] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        below = _leaves(value, f"{path}/{key}" if path else str(key), caller)
        if leaves.keys() & below.keys():
            raise TypeError(f"{caller}: two leaves are called {min(leaves.keys() & below.keys())!r}")
        leaves.update(below)
    return leaves


def _pair_leaves(actual: Any, expected: Any, caller: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    __tracebackhide__ = True
    a, b = _leaves(actual, "", caller), _leaves(expected, "", caller)
    missing, extra = [name for name in b if name not in a], [name for name in a if name not in b]
    if missing or extra:
        raise AssertionError(f"{caller}: keys differ: missing {_listed(missing)}, unexpected {_listed(extra)}")
    if not b:
        raise AssertionError(f"{caller}: both trees are empty; comparing nothing always succeeds")
    return [(name, a[name], b[name]) for name in b]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def _difference(actual: Any, expected: Any, rtol: float | None, atol: float | None) -> str:
    """What torch.testing has to say about two tensors; empty when they are close."""
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=False, check_device=False)
    except AssertionError as error:
        return str(error).strip()
    return ""


def _disparity(actual: torch.Tensor, expected: torch.Tensor, tol: float, floor: float) -> str:
    """Why `actual` is not `expected` in norm; empty when it is."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return _difference(actual, expected, 0.0, 0.0)
    a, b = _as_float64(actual), _as_float64(expected)
    for what, x in (("actual", a), ("expected", b)):
        if not x.isfinite().all():
            return f"{what} has {int((~x.isfinite()).sum())} elements that are NaN or infinite, of {x.numel()}"
    error, limit = _norm(a - b), tol * max(_norm(b), floor)
    if not a.numel() or (error <= limit and math.isfinite(limit)):
        return ""
    gap = (a - b).abs()
    index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    return (
        f"|actual - expected| = {error:.3g} > {limit:.3g} = {tol:g} * max(|expected| = {_norm(b):.3g}, {floor:.3g}); "
        f"largest difference {float(gap.max()):.3g} at {index}: {a[index].item():.6g} instead of {b[index].item():.6g}"
    )


def _as_float64(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().to(torch.complex128 if x.dtype.is_complex else torch.float64)


def _norm(x: torch.Tensor) -> float:
    """The Euclidean norm in float64, where squares neither overflow nor vanish."""
    x = _as_float64(x)
    largest = float(x.abs().max()) if x.numel() else 0.0
    return largest * float(torch.linalg.vector_norm(x / largest)) if largest else 0.0


def _raise_problems(pairs: Iterable[tuple[str, str]]) -> None:
    """Raise what is wrong with leaves, by their names, where it is not empty."""
    __tracebackhide__ = True
    if problems := [f"{name}: {problem}" for name, problem in pairs if problem]:
        count = f"{len(problems)} leaves differ" if len(problems) > 1 else "1 leaf differs"
        more = [f"... and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise AssertionError("\n".join([count, *problems[:8], *more]))
