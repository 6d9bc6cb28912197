"""What a rank tells the others of itself: how far it is, where it stands, what went wrong."""

import json
import os
import socket
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from shardfn import _torch
from shardfn.comm import CALLS, Entry, Line

_ROOT, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
# Code in which a thread that stands waits for other ranks.
_WAITS = tuple(
    os.path.join(*path)
    for path in (
        (_TORCH, "distributed", "distributed_c10d.py"),
        (_TORCH, "distributed", "_functional_collectives.py"),
        (_ROOT, "comm", ""),
        (_ROOT, "_torch", "groups.py"),
        (_ROOT, "engine", "runtime.py"),
    )
)
_CALLS_OF_C = os.path.join(_TORCH, "_ops.py")
_OURS = (_TORCH, _ROOT)
_NOT_USERS = (*_OURS, os.path.dirname(os.__file__), "<frozen")
_OF_BACKWARDS = (_ROOT, os.path.join(_TORCH, "autograd"), os.path.join(_TORCH, "optim"))
_SHOWN = 12  # frames of a stack


@dataclass
class Record:
    """One rank, as it says of itself."""

    rank: int
    coordinates: str
    host: str
    process: int
    tick: int = 0
    moves: int = 0  # all that it has begun
    counts: dict[str, int] = field(default_factory=dict)  # of that, by who does the same
    marks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # of its journals: numbers and hashes
    entries: dict[str, list[Entry]] = field(default_factory=dict)  # of the line for which it was asked
    doing: str = ""  # a call of a trainer, in which it is
    last: list[str] = field(default_factory=list)  # what it wrote in its journals
    calls: dict[str, str] = field(default_factory=dict)  # of what torch recorded, while it waits, by group and number
    waits: str | None = None  # the collective in which its thread stands
    at: list[str] = field(default_factory=list)  # its stack, innermost first
    timeout: float = float("inf")  # seconds, after which it waits no longer
    broke: str | None = None  # what it left by an error, and has not done since
    failed: str | None = None  # the same, or an error that it handles, as long as it does nothing else
    ended: str | None = None  # how the process did
    asks: bool = False  # its communication has failed
    awaits: bool = False  # it waits to hear whether all end, see `stops`
    terminated: bool = False  # it got a signal to end
    steps: int = 0  # how many calls it has made after which it may, see `stops`
    answer: int = 0  # of those after which all may

    def dumps(self) -> bytes:
        """For `loads`."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> "Record":
        """What `dumps` made."""
        return cls(**json.loads(data))

    @property
    def name(self) -> str:
        """How it is called in messages."""
        return f"rank {self.rank} ({self.coordinates})"

    @property
    def progress(self) -> Any:
        """What changes as long as it goes on."""
        return self.moves, self.waits, self.at, self.failed, self.ended


@cache
def this_host() -> str:
    """The same for processes that see each other's numbers."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def state_of(record: Record) -> str:
    """ "gone", "stopped" or "runs": how the process of a rank is; "unknown" on another host."""
    if record.host != this_host():
        return "unknown"
    try:
        kind = Path(f"/proc/{record.process}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": "stopped", "Z": "gone", "X": "gone"}.get(kind, "runs")
    except (FileNotFoundError, ProcessLookupError):
        return "gone" if Path("/proc/self").exists() else "unknown"


def counts_of(lines: Mapping[str, Line], messages: Mapping[str, int]) -> dict[str, int]:
    """How many collectives this process has begun, and things that are in its journals.

    `messages`: how many calls of a group were none.
    """
    counts = {key: line.count for key, line in lines.items()}
    for (name, ranks), count in _torch.numbers_of_calls().items():
        key = f"group {name} {ranks[0]} {crc32(repr(ranks).encode())}"
        counts |= {key: count - messages.get(name, 0), f"{key} ours": CALLS[name]}
    return counts


def look_at(thread: int) -> tuple[str | None, list[str]]:
    """In which collective a thread waits, if it does, and its stack, innermost first.

    A backward on an accelerator runs in a thread of torch's: then it is that one's.
    """
    now = _torch.stacks_of_threads()
    own = now.pop(thread, [])
    for stack in (own, *filter(_is_of_backward, now.values())):
        if (waits := _waits_in(stack)) is not None:
            return waits, _places(stack)
    return None, _places(own)


def _is_of_backward(stack: Sequence[_torch.Place]) -> bool:
    """Whether a thread was begun by torch: one of Python's has a function of `threading` at the bottom."""
    return bool(stack) and stack[-1].path != threading.__file__


def _waits_in(stack: Iterable[_torch.Place]) -> str | None:
    name = ""
    for path, _, function in stack:
        if path == _CALLS_OF_C:
            continue
        if not path.startswith(_WAITS):
            return name or None
        name = function
    return name or None


def _places(frames: Iterable[tuple[str, int, str]]) -> list[str]:
    """`file:line in function` of code that is the user's, or of any if none is."""
    known = [(path, f"{os.path.basename(path)}:{line} in {name}") for path, line, name in frames]
    return [place for path, place in known if not path.startswith(_NOT_USERS)][:_SHOWN] or [p for _, p in known][
        :_SHOWN
    ]


def described(error: BaseException) -> str:
    """An error, and where it came from, in a line."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = _places((frame.filename, frame.lineno or 0, frame.name) for frame in frames)
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}" + "".join(f", at {place}" for place in places[:1])


def broken_off(thread: int) -> str | None:
    """An error that a thread handles now, in the user's code, if it left a forward, a backward or a step by it."""
    error = _torch.error_handled_by(thread)
    if error is None or _torch.is_of_peers(error):
        return None
    paths = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    caught_outside = bool(paths) and not paths[0].startswith(_OURS)
    return (
        f"what the others do by {described(error)}"
        if caught_outside and any(path.startswith(_OF_BACKWARDS) for path in paths)
        else None
    )
