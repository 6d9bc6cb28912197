"""Some of the kills of `kills.py`: in a process of its own, which forks."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _kill(*options: str) -> dict[str, int]:
    script = Path(__file__).with_name("kills.py")
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # as in a shell
    command = [sys.executable, str(script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_every_day() -> None:
    assert _kill("--seconds", "12")["ended"] >= 3


@pytest.mark.slow
def test_more() -> None:
    assert _kill("50", "--seed", "1") == {"ended": 50}
