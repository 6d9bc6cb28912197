"""Threads of this process, as another one sees them."""

import codecs
import ctypes
import faulthandler
import re
import sys
from tempfile import TemporaryFile
from typing import Any, NamedTuple

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')


class Place(NamedTuple):
    """Where a frame is."""

    path: str
    line: int
    function: str


def stacks_of_threads() -> dict[int, list[Place]]:
    """By thread, where its frames are, innermost first, up to 100 of them.

    C code reads them all at once. As objects they are not safe: while one thread walks over the frames of another, that
    one goes on, and frames that it has left are other memory by then (CPython 3.11: frames without code, and crashes).
    """
    with TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().splitlines()
    stacks: dict[int, list[Place]] = {}
    here: list[Place] = []
    for line in lines:
        if found := _THREAD.match(line):
            here = stacks.setdefault(int(found[1], 16), [])
        elif found := _FRAME.fullmatch(line):
            path = codecs.decode(found[1], "unicode_escape") if "\\" in found[1] else found[1]
            here.append(Place(path, int(found[2]) if found[2].isdigit() else 0, found[3]))
    return stacks


def error_handled_by(thread: int) -> BaseException | None:
    """The error in whose `except` or `finally` a thread is."""
    current: Any = sys._current_exceptions().get(thread)
    return current[1] if isinstance(current, tuple) else current  # a tuple before Python 3.12


def interrupt(thread: int, kind: type[BaseException]) -> None:
    """Have a thread raise an error of a kind when it runs Python again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
