"""State dicts of other objects (torch optimizers, schedulers, scalers) as tensors and JSON. Layer 4.

    {"step": tensor, "lr": 0.1}   ->   {"name.step": tensor}  and  {"dict": [["step", {"tensor": ...}], ["lr", 0.1]]}

A checkpoint must not need pickle to be read, and its tensors are resharded when they are. So tensors go where those of
trees go, and the rest into a JSON file beside them.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (int, float, str, bool, type(None))


def split(state: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON part of a state; its tensors go into `tensors`, by their paths.

    Raises:
        TypeError: something that is neither a tensor, a number, a string nor a container of these.
    """
    if isinstance(state, Tensor):
        if path in tensors:
            raise TypeError(f"checkpoint: two values of a state have the path '{path}'; rename one")
        tensors[path] = state
        return {"tensor": list(state.shape), "dtype": str(state.dtype).removeprefix("torch.")}
    if isinstance(state, Mapping):
        if odd := [key for key in state if not isinstance(key, _PLAIN)]:
            raise TypeError(f"checkpoint: '{path}' has the key {odd[0]!r}; keys are numbers and strings")
        items = [[key, split(value, f"{path}.{key}", tensors)] for key, value in state.items()]
        return {"counter" if isinstance(state, Counter) else "dict": items}
    if isinstance(state, list | tuple):
        items = [split(value, f"{path}.{index}", tensors) for index, value in enumerate(state)]
        return {"tuple": items} if isinstance(state, tuple) else items
    if isinstance(state, _PLAIN):
        return state
    raise TypeError(
        f"checkpoint: '{path}' is a {type(state).__name__}; it holds tensors, numbers, strings and containers"
    )


def tensors_like(part: Any, path: str, like: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Memory for the tensors of a state, by their paths: `like(path, meta tensor)` makes each."""
    if isinstance(part, list):
        found = [tensors_like(value, f"{path}.{index}", like) for index, value in enumerate(part)]
    elif isinstance(part, dict) and "tensor" in part:
        meta = torch.empty(part["tensor"], dtype=getattr(torch, part["dtype"]), device="meta")
        return {path: like(path, meta)}
    elif isinstance(part, dict) and "tuple" not in part:
        found = [tensors_like(value, f"{path}.{key}", like) for key, value in part.get("dict", ())]
    elif isinstance(part, dict):
        found = [tensors_like(value, f"{path}.{index}", like) for index, value in enumerate(part["tuple"])]
    else:
        found = []
    return {key: value for each in found for key, value in each.items()}


def joined(part: Any, path: str, tensors: Mapping[str, Tensor]) -> Any:
    """The state again, from its JSON part and its tensors."""
    if isinstance(part, list):
        return [joined(value, f"{path}.{index}", tensors) for index, value in enumerate(part)]
    if isinstance(part, dict) and "tensor" in part:
        return tensors[path]
    if isinstance(part, dict) and "counter" in part:
        return Counter(dict(part["counter"]))
    if isinstance(part, dict) and "dict" in part:
        return {key: joined(value, f"{path}.{key}", tensors) for key, value in part["dict"]}
    if isinstance(part, dict):
        return tuple(joined(value, f"{path}.{index}", tensors) for index, value in enumerate(part["tuple"]))
    return part
