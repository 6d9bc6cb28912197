"""What many steps leave behind: resident memory, threads and open files of 2,000 steps on two ranks.

    python examples/benchmarks/soak.py

A step is forward, backward and AdamW of a small decoder. The figure is what resident memory grows by in the second
half, with a bar of 1 MiB; threads and open files must not become more.
"""

import argparse
import gc
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import CONTENDERS, make_batch
from measure import Cases, cases_or_worker, job_of, launch, parse
from memory import status_bytes
from results import Row
from torch.distributed.device_mesh import DeviceMesh

SIZES = {"width": 64, "layers": 4, "vocab": 64, "head": 32, "tokens": 8}
RANKS = 2
STEPS = 2000


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    return {"soak": partial(run_soak, 40 if quick else STEPS)}


def run_soak(steps: int) -> list[Row]:
    """Growth in the second half, of memory and of what a process may leak besides."""
    found = launch(__file__, RANKS, SIZES | {"steps": steps})
    grown = max(found["bytes"], 0.0) / 2**20
    what = f"memory grown in the second half of {steps} steps, {RANKS} ranks"
    rows = [Row(what=what, peer="1 MiB", unit="MiB", ours=[grown], theirs=[1.0], bar=1.0)]
    for kind in ("threads", "files"):
        ours, theirs = ([found[f"{kind} {when}"]] for when in ("after", "before"))
        rows.append(Row(what=f"{kind} after them", peer="half-way", unit="", ours=ours, theirs=theirs, bar=1.0))
    return rows


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, float]:
    """What the second half of the steps adds, on the rank where it is most."""
    job = job_of(args)
    step = CONTENDERS["shardfn"](job, mesh).step
    seen = []
    for number in range(args.steps):
        if number in (args.steps // 2, args.steps - 1):
            gc.collect()
            seen.append([status_bytes("VmRSS"), threading.active_count(), len(os.listdir("/proc/self/fd")), tasks()])
        step(make_batch(job, number, mesh))
    most = torch.tensor(seen, dtype=torch.float64)
    growth = (most[1] - most[0]).clone()
    dist.all_reduce(growth, dist.ReduceOp.MAX)
    before = most[0]
    return {
        "bytes": float(growth[0]),
        "threads before": float(before[1] + before[3]),
        "threads after": float(before[1] + before[3] + growth[1] + growth[3]),
        "files before": float(before[2]),
        "files after": float(before[2] + growth[2]),
    }


def tasks() -> int:
    """Threads of this process that the system knows of: gloo's are none of Python's."""
    return len(list(Path("/proc/self/task").iterdir()))


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, **SIZES, steps=STEPS)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the case, or be its worker."""
    cases_or_worker(read_options(argv), cases, measure)


if __name__ == "__main__":
    main()
