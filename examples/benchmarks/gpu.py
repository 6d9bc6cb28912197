"""Step time and peak memory on one CUDA device, against FSDP2.

    python examples/benchmarks/gpu.py                # every case; says so where there is no CUDA device

A decoder of 0.9B parameters, computed in bfloat16, with AdamW, eager and with every layer compiled: alone (a world of
one rank), and as rank 0 of eight fake ones (`fake.py`), which has an eighth of the shards and moves the gathered
weights through the same buffers as a real one, without the network. The contenders train one after the other, several
times over, each alone on the device; a step ends when the device is done.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from contenders import CONTENDERS, make_batch
from fake import start_fake
from measure import Cases, finish, job_of, launch, make_mesh, parse, report
from results import Row
from torch.distributed.device_mesh import DeviceMesh

SIZES = {"width": 2048, "layers": 16, "vocab": 32000, "head": 128, "batch": 4, "tokens": 1024}
OPTIONS = {"meta": True, "bf16": True, "rounds": 3, "warmup": 5}
TINY = {"width": 256, "layers": 2, "vocab": 256, "tokens": 64, "rounds": 2, "steps": 2}
WORLDS = {1: "world 1", 8: "rank 0 of 8"}
BAR = 1.00


def cases(quick: bool) -> Cases:
    """What to run, by name; nothing without a CUDA device."""
    if not torch.cuda.is_available():
        print("gpu: there is no CUDA device here", file=sys.stderr)
        return {}
    return {
        f"gpu, {world}, {'compiled' if compiled else 'eager'}": partial(run_case, ranks, compiled, quick)
        for ranks, world in WORLDS.items()
        for compiled in (False, True)
    }


def run_case(ranks: int, compiled: bool, quick: bool) -> list[Row]:
    """A row for the time of a step and one for the memory."""
    options: dict[str, Any] = SIZES | OPTIONS | (TINY if quick else {})
    found = launch(__file__, 0, options | {"ranks": ranks, "compiled": compiled})
    ours, theirs = found["shardfn"], found["fsdp2"]
    how = f"{WORLDS[ranks]}, {'compiled' if compiled else 'eager'}"
    return [
        Row(what=f"GPU {what}, {how}", peer="FSDP2", unit=unit, ours=ours[unit], theirs=theirs[unit], bar=BAR)
        for what, unit in (("step", "ms"), ("peak memory", "GB"))
    ]


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, dict[str, list[float]]]:
    """Contender -> milliseconds of a step and gigabytes at the peak, one of each a round."""
    found: dict[str, dict[str, list[float]]] = {name: {"ms": [], "GB": []} for name in ("shardfn", "fsdp2")}
    for _ in range(args.rounds):
        for name, figures in found.items():
            step_ms, peak_gb = train(name, args, mesh)
            figures["ms"].append(step_ms)
            figures["GB"].append(peak_gb)
    return found


def train(contender: str, args: argparse.Namespace, mesh: DeviceMesh) -> tuple[float, float]:
    """Milliseconds of a step (median) and gigabytes at the peak, of which nothing is left afterwards."""
    job = job_of(args)
    step = CONTENDERS[contender](job, mesh).step
    batches = [make_batch(job, number, mesh) for number in range(args.warmup + args.steps)]
    milliseconds: list[float] = []
    for number, batch in enumerate(batches):
        if number == args.warmup:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(batch)
        torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 1e9
    del step
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return statistics.median(milliseconds[args.warmup :]), peak


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, **SIZES | OPTIONS, ranks=1, steps=20)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    args = read_options(argv)
    if not args.worker:
        report(cases(args.quick))
        return
    if args.ranks > 1:
        start_fake(args.ranks)
    finish(args, measure(args, make_mesh("fsdp=-1", "cuda")))


if __name__ == "__main__":
    main()
