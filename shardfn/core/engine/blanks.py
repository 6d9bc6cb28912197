"""Inputs of a run without data: meta tensors in their places, and caches that are filled in it. Layer 3."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn._torch import holds_data, pytree
from shardfn.core.engine.binding import is_cache
from shardfn.core.engine.values import Values


def tensors_in(tree: Any, depth: int, in_caches: bool = False) -> Iterator[Tensor]:
    """Every tensor of a tree, and of the objects in it that torch does not know as containers; caches are left out."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__"):
            if in_caches if is_cache(leaf) else not isinstance(leaf, type | Callable):
                yield from tensors_in(dict(vars(leaf)), depth - 1, in_caches)


def to_meta(tree: Any, values: Values | None = None) -> Any:
    """A tree with every tensor on the meta device, without data; gradients are asked for as before.

    Integers and booleans are noted in `values`. Caches, which a forward fills, are copied; two that are one stay one.
    """
    caches: dict[int, Any] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _blank(leaf, values)
        return _copied(leaf, lambda x: _blank(x, values), caches) if is_cache(leaf) else leaf

    return pytree.tree_map(move, tree)


def _blank(x: Tensor, values: Values | None) -> Tensor:
    # Not `empty_like`, whose result would belong to the transform that `x` belongs to.
    blank = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if values is not None and not x.is_meta and holds_data(x):
        values.note(blank, x)
    return blank.requires_grad_(x.requires_grad)


def snapshot(cache: Any) -> Any:
    """A cache as it is now, for a later run without data: its integers, which are lengths, keep their values."""
    return _copied(cache, lambda x: _blank(x, None) if x.is_floating_point() else x.clone(), {})


def _copied(value: Any, of_tensor: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    with _Copying(of_tensor):
        return deepcopy(value, known)


class _Copying(TorchFunctionMode):
    """Within it `deepcopy` makes something else of every tensor."""

    def __init__(self, of_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._of_tensor = of_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._of_tensor(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
