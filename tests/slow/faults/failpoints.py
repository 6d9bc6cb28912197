"""Places in a save where something happens: an operation on a file, the n-th one whose path matches.

What is watched is the process's own `os` functions, and functions of a contender that `watch_writes` wraps; nothing in
a contender knows of it. Events: `making` and `reading` (before a directory or file is), `wrote` (in the middle of the
writes to a file), `syncing` (the file is cut to half for that moment, so that this is the middle of a file which is
synced once), `synced`, `renaming`, `renamed` (with the new name), `removing`.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """The n-th event of such kinds whose path matches."""

    kinds: str
    pattern: str
    count: int = 1


class _Armed:
    """What this process waits for."""

    point: Point | None = None
    fire: Callable[[], object] | None = None
    left = 0


_ARMED = _Armed()
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def arm(point: Point, fire: Callable[[], object]) -> None:
    """Do something at a point, once."""
    _ARMED.point, _ARMED.fire, _ARMED.left = point, fire, point.count


def disarm() -> None:
    """Nothing happens any more."""
    _ARMED.point = _ARMED.fire = None


def is_at(kind: str, path: object) -> bool:
    """Whether such an event would be counted."""
    point = _ARMED.point
    return point is not None and kind in point.kinds.split() and re.search(point.pattern, str(path)) is not None


def event(kind: str, path: object) -> None:
    """Something is being done to a file."""
    if is_at(kind, path):
        _ARMED.left -= 1
        if _ARMED.left == 0 and _ARMED.fire is not None:
            fire = _ARMED.fire
            disarm()
            fire()


def _audited(name: str, args: tuple[Any, ...]) -> None:
    if _ARMED.point is None:
        return
    if name == "open" and isinstance(args[0], str):
        mode, flags = args[1] or "", args[2]
        made = (any(x in mode for x in "wxa+") if mode else flags & _WRITES) and not args[0].startswith("/proc")
        event("making" if made else "reading", args[0])
    elif name == "os.mkdir":
        event("making", args[0])
    elif name in ("os.remove", "os.rmdir"):
        event("removing", args[0])


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def watch() -> None:
    """Watch the operations on files of this process from now on."""
    sys.addaudithook(_audited)
    fsync, pwrite = os.fsync, os.pwrite

    def fsynced(descriptor: int) -> None:
        path = _path_of(descriptor)
        if is_at("syncing", path) and os.path.isfile(path):
            _in_the_middle(descriptor, path)
        fsync(descriptor)
        event("synced", path)

    def pwritten(descriptor: int, data: Any, at: int) -> int:
        if is_at("wrote", path := _path_of(descriptor)):
            half = pwrite(descriptor, memoryview(data)[: max(1, len(data) // 2)], at)
            event("wrote", path)
            return half  # who calls it writes the rest
        return pwrite(descriptor, data, at)

    def watched(rename: Callable[..., Any]) -> Callable[..., None]:
        def renamed(old: Any, new: Any, **others: Any) -> None:
            event("renaming", new)
            rename(old, new, **others)
            event("renamed", new)

        return renamed

    system: Any = os
    system.fsync, system.pwrite = fsynced, pwritten
    system.rename, system.replace = watched(os.rename), watched(os.replace)


def _in_the_middle(descriptor: int, path: str) -> None:
    """Cut a file to its first half while something happens."""
    with open(path, "rb") as file:
        data = file.read()
    os.truncate(path, len(data) // 2)
    event("syncing", path)
    other = os.open(path, os.O_WRONLY)  # the first one may append
    os.pwrite(other, data[len(data) // 2 :], len(data) // 2)
    os.close(other)
