"""Ways to go apart, and slow runs that do not, of `divergence/go_apart.py`: in a process of its own, which forks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _said(*arguments: str) -> str:
    script = Path(__file__).parent / "divergence" / "go_apart.py"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_every_day() -> None:
    """Of each kind one: journals that differ, an error that is caught, an end, a barrier."""
    ways = "saves_alone,raises_in_forward-fsdp2,has_no_more_batches-trainer,waits_at_a_barrier-fsdp2"
    assert _said("--only", ways, "--at-once", "4").startswith("4/4")


@pytest.mark.slow
def test_all_ways() -> None:
    assert _said("--at-once", "2").startswith("34/34")


@pytest.mark.slow
def test_healthy_runs() -> None:
    assert _said("--healthy", "6", "--at-once", "10").startswith("20/20")
