"""Runs under `python -m shardfn.run`, and the losses that they log."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path


class Launched:
    """A launcher that runs in the background."""

    def __init__(self, *arguments: str, by: Sequence[str] = (), **env: str) -> None:
        """`by`: a command that begins it; with variables of the environment."""
        command = [*(by or [sys.executable, "-m", "shardfn.run"]), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | env
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)

    def end(self, seconds: float = 400) -> tuple[int, str]:
        """Its status, and what it and its ranks have printed."""
        try:
            output, _ = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        return self.process.returncode, output

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [*map(int, children.read_text().split())] if children.exists() else []


def until(holds: Callable[[], object], seconds: float = 200) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


class Log:
    """Losses, as rank 0 has written them; what a restart computes again counts."""

    def __init__(self, directory: Path) -> None:
        self._path = Path(f"{directory}.log")

    def _rows(self) -> list[list[str]]:
        return [line.split() for line in self._path.read_text().splitlines()] if self._path.exists() else []

    @property
    def step(self) -> int:
        """The last one."""
        return int(self._rows()[-1][0]) if self._rows() else 0

    @property
    def losses(self) -> list[float]:
        """Of all steps."""
        return [*{int(step): float(loss) for step, loss, *_ in self._rows()}.values()]

    @property
    def longest_pause(self) -> float:
        """Seconds between two lines."""
        times = [float(row[2]) for row in self._rows()]
        return max(later - earlier for earlier, later in pairwise(times))

    @property
    def ranks(self) -> list[int]:
        """How many there were, one after the other."""
        return [ranks for ranks, _ in groupby(int(row[3]) for row in self._rows())]
