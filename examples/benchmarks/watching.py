"""What it costs that ranks watch one another: a step with and without, and the thread that does it.

    python examples/benchmarks/watching.py

Each step of a Llama of transformers on 2 x 2 ranks is taken within `sf.collectives.watch` and outside of it, in turn.
The thread's share is the CPU time that Linux counts for it over all rounds, against the time that passed.
"""

import argparse
import os
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import llama
import torch
from measure import Cases, cases_or_worker, in_turn, launch, parse
from results import Row
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    return {"a step that is watched, 2 x 2": partial(run_step, quick)}


def run_step(quick: bool) -> list[Row]:
    """The step, and the thread."""
    options: dict[str, Any] = llama.STEP | {"rounds": 40} | (llama.TINY if quick else {})
    found = launch(__file__, 4, options)
    step = Row(
        what="a step that is watched, 2 x 2",
        peer="one that is not",
        unit="ms",
        ours=found["watched"],
        theirs=found["alone"],
        bar=1.01,
    )
    thread = Row(
        what="CPU of the thread that watches",
        peer="all time",
        unit="s",
        ours=[found["thread"]],
        theirs=[found["passed"]],
        bar=0.01,
    )
    return [step, thread]


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Milliseconds of both, and seconds of the thread."""
    contender = llama.shardfn(args, mesh)
    x = torch.randint(args.vocab, (1, args.tokens), generator=torch.Generator().manual_seed(sf.data.rank(mesh)[0]))

    def step(watched: bool, round_: int) -> None:
        with sf.collectives.watch(mesh) if watched else nullcontext():
            contender.differentiate(x)
            contender.update()

    step(True, 0)  # the thread is there from now on
    began, before = time.monotonic(), _seconds_of_watcher()
    both = in_turn({"watched": partial(step, True), "alone": partial(step, False)}, args.rounds, args.warmup)
    passed, thread = time.monotonic() - began, _seconds_of_watcher() - before
    return {name: [1000 * x for x in seconds] for name, seconds in both.items()} | {"passed": passed, "thread": thread}


def _seconds_of_watcher() -> float:
    """CPU time of the thread, in hundredths of a second."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "shardfn watcher")
    fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, **llama.STEP)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    cases_or_worker(read_options(argv), cases, measure)


if __name__ == "__main__":
    main()
