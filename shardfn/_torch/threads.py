"""Threads of this process, as another one sees them."""

import ctypes
import sys
from types import FrameType
from typing import Any


def frames_of_threads() -> dict[int, FrameType]:
    """By thread, the frame that it is in."""
    return sys._current_frames()


def error_handled_by(thread: int) -> BaseException | None:
    """The error in whose `except` or `finally` a thread is."""
    current: Any = sys._current_exceptions().get(thread)
    return current[1] if isinstance(current, tuple) else current  # a tuple before Python 3.12


def interrupt(thread: int, kind: type[BaseException]) -> None:
    """Have a thread raise an error of a kind when it runs Python again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
