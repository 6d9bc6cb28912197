"""Collectives that are not ours, inside transforms: found, and refused by name. Layer 1.

Those of `torch.distributed` have no derivative and no mapped form. Under `vmap` they give unreduced or uninitialised
data, under `jvp` a tangent of zero, under `grad` a gradient without the other ranks: all of that without an error.
"""

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from itertools import islice
from pathlib import Path
from types import CellType, FrameType
from typing import Any

import torch

from shardfn._torch import AS_TENSORS, TorchDispatchMode
from shardfn.core.errors import ShardError

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_WATCHES: ContextVar[bool] = ContextVar("watches", default=False)
# What was watched, once, since every operation pays for it: by code, which functions made again and again share.
_WATCHED: set[tuple[Any, ...]] = set()


def ours_only(verb: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first run inside a transform may use collectives of `sf.collectives` and of trees only.

    Raises:
        ShardError: in that run, another one, by the name under which it was called.
    """

    code = _codes(func)

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _WATCHES.get() or code in _WATCHED:
            return func(*args, **kwargs)
        token = _WATCHES.set(True)
        try:
            with _Refusing(verb):
                out = func(*args, **kwargs)
        except RuntimeError as error:  # some of them torch refuses itself, without their name
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            if isinstance(error, ShardError) or (name := _called_as(reversed(frames))) is None:
                raise
            raise _refused(verb, name) from error
        finally:
            _WATCHES.reset(token)
        if code[0] is not None:
            _WATCHED.add(code)
        return out

    return call


def _codes(func: Any, depth: int = 4) -> tuple[Any, ...]:
    """The code of a function, and of the functions that it closes over."""
    func = inspect.unwrap(func) if callable(func) else func
    cells = [cell.cell_contents for cell in getattr(func, "__closure__", None) or () if cell != CellType()]
    inner = [_codes(value, depth - 1) for value in cells if depth and callable(value)]
    return getattr(func, "__code__", getattr(func, "__name__", None)), *inner


def _refused(verb: str, name: str) -> ShardError:
    return ShardError(
        f"{verb}: the function calls {name}, which has no derivative and no mapped form: results would be wrong in "
        f"silence. Use sf.collectives (psum, pmean, all_gather, ...), or communicate outside"
    )


class _Refusing(TorchDispatchMode):
    def __init__(self, verb: str) -> None:
        super().__init__()
        self._verb = verb

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES and (name := _called_as(islice(_callers(), 3, None))) is not None:
            raise _refused(self._verb, name)
        return AS_TENSORS.get(func, func)(*args, **(kwargs or {}))


def _called_as(frames: Iterable[FrameType]) -> str | None:
    """The function of torch.distributed that code outside of torch called, innermost frame first; None for our code."""
    name = None
    for frame in frames:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "__torch_function__":  # a mode that hands on what others call
            continue
        if not file.startswith(_TORCH):
            return None if file.startswith(_OURS) else name
        if f"{_TORCH}/distributed/" in file and frame.f_code.co_name != "wrapper":
            module = str(frame.f_globals.get("__name__", "torch.distributed"))
            name = f"{module.replace('.distributed_c10d', '')}.{frame.f_code.co_name}"
    return None


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
