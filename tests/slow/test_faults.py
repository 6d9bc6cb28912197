"""Rows of `faults/faults.py`, of shardfn alone: in a process of its own, which forks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _survived(rows: str) -> str:
    """What is said at the end of these rows."""
    script = Path(__file__).parent / "faults" / "faults.py"
    command = [sys.executable, str(script), "--only", "shardfn", "--rows", rows]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # as `make faults` has it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("shardfn: survived"))


def test_every_day() -> None:
    """Both ranks killed where it matters most, a full disk, a pickle."""
    assert _survived("1,10,27,34").startswith("shardfn: survived 4/4")


@pytest.mark.slow
def test_all() -> None:
    assert "38/38" in _survived("1-18,26-37,41-48")  # the others are in test_divergence.py and run/test_run.py
