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


def memory_of(part: Any, path: str) -> dict[str, Tensor]:
    """Memory on the host for the tensors of a state, by their paths, from its JSON part."""
    made: dict[str, Tensor] = {}

    def make(at: str, described: Mapping[str, Any]) -> Tensor:
        made[at] = torch.empty(described["tensor"], dtype=getattr(torch, described["dtype"]), device="cpu")
        return made[at]

    _built(part, path, make)
    return made


def joined(part: Any, path: str, tensors: Mapping[str, Tensor]) -> Any:
    """The state again, from its JSON part and its tensors."""
    return _built(part, path, lambda at, _: tensors[at])


def _built(part: Any, path: str, tensor: Callable[[str, Mapping[str, Any]], Tensor]) -> Any:
    """The state of a JSON part, whose tensors are `tensor(path, what JSON says of it)`."""
    if isinstance(part, list):
        return [_built(value, f"{path}.{index}", tensor) for index, value in enumerate(part)]
    if not isinstance(part, dict):
        return part
    if "tensor" in part:
        return tensor(path, part)
    if "tuple" in part:
        return tuple(_built(part["tuple"], path, tensor))
    items = part["counter"] if "counter" in part else part["dict"]
    made = {key: _built(value, f"{path}.{key}", tensor) for key, value in items}
    return Counter(made) if "counter" in part else made
