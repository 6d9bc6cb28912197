"""Worlds of forked ranks, any of which may be killed, and what became of each of them.

A world is forked from a parent that has imported everything and has no process group. Its ranks share a `Board`: their
process numbers, and flags by which one of them, or the parent, waits for another.
"""

import mmap
import os
import pickle
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

GROUP_SECONDS = 15  # a collective waits so long for a rank that is not there
PATIENCE = 30.0  # and a rank that has not ended after so many seconds hangs
NOBODY = 65534


class Board:
    """Numbers that all processes of a world see."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def __getitem__(self, place: int) -> int:
        return struct.unpack_from("q", self._memory, 8 * place)[0]

    def __setitem__(self, place: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, value)

    def wait_for(self, place: int, seconds: float = GROUP_SECONDS) -> bool:
        """Until the number at a place is not 0."""
        until = time.monotonic() + seconds
        while not self[place] and time.monotonic() < until:
            os.sched_yield()
        return bool(self[place])


FLAGS = 64  # the first place on a board after the numbers of processes


@dataclass(frozen=True)
class Rank:
    """A process of a world, as it knows itself."""

    rank: int
    ranks: int
    mesh: DeviceMesh | None
    board: Board

    def kill(self, victim: int) -> None:
        """SIGKILL a rank, and go on when it is no more, if this is another one."""
        pid = self.board[victim]
        os.kill(pid, signal.SIGKILL)
        while _runs(pid):
            os.sched_yield()


@dataclass(frozen=True)
class Ended:
    """How a rank has ended: `done` with a value, `error` with its text, `killed`, or `hang`."""

    how: str
    value: Any = None
    text: str = ""
    kind: str = ""
    is_exception: bool = True  # and not a BaseException, which nobody catches
    where: str = ""


class World:
    """Ranks that run a function."""

    def __init__(
        self, ranks: int, run: Callable[..., Any], *args: Any, group: bool = True, board: Board | None = None
    ) -> None:
        self.board, self.began = board or Board(), time.monotonic()
        self._scratch = Path(tempfile.mkdtemp(prefix="faults-world-"))
        self._scratch.chmod(0o755)
        self._ends: dict[int, Ended] = {}
        sys.stdout.flush()
        self.pids = [self._fork(rank, ranks, run, args, group) for rank in range(ranks)]

    def _fork(self, rank: int, ranks: int, run: Callable[..., Any], args: tuple[Any, ...], group: bool) -> int:
        pid = os.fork()
        if pid:
            return pid
        log = os.open(self._scratch / f"log-{rank}", os.O_WRONLY | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = os.open(self._scratch / f"end-{rank}", os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            self.board[rank] = os.getpid()
            end = Ended("done", run(self._begun(rank, ranks, group), *args))
        except BaseException as error:
            where = "".join(traceback.format_exception(error))
            end = Ended("error", None, str(error), type(error).__name__, isinstance(error, Exception), where)
            print(where, file=sys.stderr)
        os.write(result, pickle.dumps(end))
        os._exit(0)

    def _begun(self, rank: int, ranks: int, group: bool) -> Rank:
        if not group:
            return Rank(rank, ranks, None, self.board)
        store: Any = vars(dist)["FileStore"](str(self._scratch / "store"), ranks)
        os.chmod(self._scratch / "store", 0o666)
        seconds = timedelta(seconds=GROUP_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=seconds)
        return Rank(rank, ranks, init_device_mesh("cpu", (ranks,)), self.board)

    def wait(self, patience: float = PATIENCE) -> list[Ended]:
        """How all ranks have ended."""
        until = time.monotonic() + patience
        while len(self._ends) < len(self.pids) and time.monotonic() < until:
            for rank, pid in enumerate(self.pids):
                if rank not in self._ends and os.waitpid(pid, os.WNOHANG)[0] == pid:
                    self._ends[rank] = self._end_of(rank)
            time.sleep(0.005)
        for rank in {*range(len(self.pids))} - self._ends.keys():
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
            self._ends[rank] = Ended("hang", text=f"rank {rank} has not ended after {patience} seconds")
        shutil.rmtree(self._scratch, ignore_errors=True)
        return [self._ends[rank] for rank in range(len(self.pids))]

    def _end_of(self, rank: int) -> Ended:
        path = self._scratch / f"end-{rank}"
        data = path.read_bytes() if path.exists() else b""
        return pickle.loads(data) if data else Ended("killed")


def in_world(ranks: int, run: Callable[..., Any], *args: Any, group: bool = True) -> list[Ended]:
    """Run a function on so many ranks."""
    return World(ranks, run, *args, group=group).wait()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
