"""Ranks that run a function as the main script of a process, to its very end: what each says last, and when.

They are forked from a parent that has imported everything, meet over torchrun's variables, and end as Python does: an
error goes to `sys.excepthook`, then what was registered with `atexit` runs.
"""

import atexit
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Exit:
    """How a rank has ended."""

    code: int | None  # minus a signal; None: it had to be killed by the parent
    seconds: float  # after the fault, or after the beginning
    output: str

    @property
    def verdict(self) -> str:
        """The error that ended it, without the rows on each rank."""
        found = re.findall(r"(?:ShardError[:,]|had to be ended:) (.*)", self.output)
        return found[-1] if found else ""


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Scripts:
    """A world of them."""

    def __init__(self, ranks: int, main: Callable[..., Any], *args: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="scripts-"))
        self.began = time.monotonic()
        sys.stdout.flush()
        port = free_port()
        self.pids = [self._fork(rank, ranks, port, main, args) for rank in range(ranks)]
        self._exits: dict[int, Exit] = {}

    def _fork(self, rank: int, ranks: int, port: int, main: Callable[..., Any], args: Sequence[Any]) -> int:
        pid = os.fork()
        if pid:
            return pid
        log = os.open(self.folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), FAULT=str(self.folder / "fault"))
        code = 0
        try:
            main(rank, *args)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            code = 1
            sys.excepthook(type(error), error, error.__traceback__)
        threads: Any = threading
        threads._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def over(self, patience: float, victims: Sequence[int] = ()) -> bool:
        """Whether all have ended; after so many seconds, or when only victims are left, the others are killed."""
        for rank in self._running():
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self._exits[rank] = self._exit(rank, os.waitstatus_to_exitcode(status))
        if time.monotonic() - self.began < patience and not self._running() <= {*victims}:
            return False
        for rank in self._running():
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
            self._exits[rank] = self._exit(rank, None)
        return True

    def _running(self) -> set[int]:
        return {*range(len(self.pids))} - self._exits.keys()

    def exits(self) -> list[Exit]:
        """How all have ended, once it is over."""
        shutil.rmtree(self.folder, ignore_errors=True)
        return [self._exits[rank] for rank in range(len(self.pids))]

    def _exit(self, rank: int, code: int | None) -> Exit:
        fault = self.folder / "fault"
        since = fault.stat().st_mtime if fault.exists() else time.time() - (time.monotonic() - self.began)
        return Exit(code, time.time() - since, (self.folder / f"log-{rank}").read_text(errors="replace"))


def note_fault() -> None:
    """From now on seconds count."""
    Path(os.environ["FAULT"]).touch()
