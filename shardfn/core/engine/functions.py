"""What functions of torch do in a run without data that is not seen in their operations. Layer 3."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn._torch import HOOKING
from shardfn.core.engine.paired import Apart, sizes_of
from shardfn.core.engine.variance import Variance

_ASKING = {Tensor.is_contiguous}
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__reduce_ex__, torch.equal}
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class Functions(TorchFunctionMode):
    """Does a function in each world by itself where torch decides by a size that differs; see [Note: paired sizes].

    What is made of numbers begins on the CPU, so that a run without data sees of which. Lists become known tensors, and
    known tensors lists. A hook is told of.
    """

    def __init__(self, run: Variance) -> None:
        super().__init__()
        self._run, self._worlds = run, run.worlds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HOOKING:
            self._run.hooked(args[0])
        if func in _READING:
            self._run.read(*args[: 1 + (func is torch.equal)])
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], tuple | list):
            args = (args[0], _of_tensors(args[1]), *args[2:])
        if func in _ASKING and self._worlds.at == "both":
            return self._apart(func, args, kwargs)
        numbers = self._run.numbers if self._worlds.at != "one" else None
        draws = numbers.draws if numbers is not None else 0
        before, self._worlds.in_torch = self._worlds.in_torch, True
        try:
            out = self._done(func, args, kwargs)
        except Apart:
            self._worlds.in_torch = before
            out = self._apart(func, args, kwargs)
        finally:
            self._worlds.in_torch = before
        if numbers is not None:
            numbers.note(func, args, kwargs, out, draws)
        kind = type(out)
        if kind is Tensor or kind is bool:
            return out
        return sizes_of(out, self._run.sources(args))

    def _apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._run.function_in_each_world(partial(self._done, func, args, kwargs), (args, kwargs))

    def _done(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func is Tensor.tolist and (known := self._run.as_list(args[0])) is not None:
            return known
        where = args[0].device if func is Tensor.new_tensor else kwargs.get("device")
        numbers = func in _OF_NUMBERS and not (func is not Tensor.new_tensor and args and isinstance(args[0], Tensor))
        if not numbers or where is None or torch.device(where).type != "meta":
            return func(*args, **kwargs)
        plain = {key: x for key, x in kwargs.items() if key != "requires_grad"} | {"device": "cpu"}
        held = func(*args, **plain)
        out = held.to("meta")
        self._run.values.note(out, held, made=True)
        return out.requires_grad_(kwargs.get("requires_grad", False))


def _of_tensors(index: Any) -> Any:
    """An index with tensors for the lists of numbers in it, of which a run without data sees what is in them."""
    if isinstance(index, tuple):
        return tuple(_of_tensors(at) if isinstance(at, list) else at for at in index)
    plain = bool(index) and all(type(at) is int for at in index)
    return torch.tensor(index).to("meta") if plain else index
