"""Peak resident memory of training, shards included, against FSDP2 and against the least that it can be.

    python examples/benchmarks/memory.py                # every case, about five minutes

A peak cannot be taken in turn, so every contender trains in fresh processes of its own, with plain SGD, which keeps
no state. No rank ever has the whole model. A rank's figure is the highest resident memory that Linux saw
(`VmHWM`), less what was resident after imports, the start of the process group and a step of a tiny model, which loads
whatever is loaded late; a case's figure is that of its largest rank. Twice:

    as it is      with glibc's own thresholds, which keep freed blocks in the heap
    true bytes    with `MALLOC_MMAP_THRESHOLD_=65536`: larger blocks return to the system when they are freed

The floor is the shards of the parameters, three gathered units of the largest (weights and gradients of one, weights
of the next), and the larger of two things of which one grows as the other shrinks: the shards of the gradients, and
the activations that autograd saves without sharding, parameters left out.
"""

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Job, fill_, make_batch, make_model
from measure import Cases, finish, job_of, launch, make_mesh, parse, report
from results import Row
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

SIZES = {"width": 768, "layers": 10, "vocab": 2048, "tokens": 64, "optimizer": "sgd", "meta": True}  # 75M parameters


@dataclass(frozen=True)
class Case:
    """How blocks are allocated; how many steps, in how many fresh starts; peers with their bars."""

    what: str
    environ: Mapping[str, str]
    steps: int
    rounds: int
    bars: Mapping[str, float | None]


CASES = [
    Case("as it is", {}, 8, 2, {"fsdp2": 0.60}),
    # Slow, since every block is paid for with page faults; nothing accumulates, so that few steps do.
    Case("true bytes", {"MALLOC_MMAP_THRESHOLD_": "65536"}, 4, 1, {"fsdp2": 1.00, "floor": 1.25}),
]


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    return {
        f"memory, {case.what}, {ranks} ranks": partial(run_case, case, ranks, quick)
        for ranks in (2, 4)
        for case in CASES
    }


def run_case(case: Case, ranks: int, quick: bool) -> list[Row]:
    """A row for each peer of a case."""
    options: dict[str, Any] = SIZES | ({"width": 128, "layers": 2, "head": 32, "vocab": 256} if quick else {})
    measured = ["shardfn", *(peer for peer in case.bars if peer != "floor")]
    peaks: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(1 if quick else case.rounds):
        for name in measured:
            peaks[name].append(
                launch(__file__, ranks, options | {"contender": name, "steps": case.steps}, case.environ)["peak"]
            )
    peaks["floor"] = [floor_bytes(Job(**options), ranks)] * len(peaks["shardfn"])
    return [
        Row(
            what=f"memory, {case.what}, {ranks} ranks",
            peer={"fsdp2": "FSDP2", "floor": "its floor"}[peer],
            unit="MB",
            ours=[peak / 1e6 for peak in peaks["shardfn"]],
            theirs=[peak / 1e6 for peak in peaks[peer]],
            bar=bar,
        )
        for peer, bar in case.bars.items()
    ]


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> float:
    """Bytes that training takes at its peak, on the rank that takes most."""
    job = job_of(args)
    train(args.contender, replace(job, width=64, layers=2, vocab=64, head=32), mesh, steps=2)
    gc.collect()
    before = status_bytes("VmRSS")
    train(args.contender, job, mesh, args.steps)
    peak = torch.tensor(float(status_bytes("VmHWM") - before))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak)


def train(contender: str, job: Job, mesh: DeviceMesh, steps: int) -> None:
    """Some steps, after which nothing is left."""
    step = CONTENDERS[contender](job, mesh).step
    for number in range(steps):
        loss = float(step(make_batch(job, number, mesh)))
        assert loss == loss, f"the loss of step {number} is {loss}"


def status_bytes(field: str) -> int:
    """A line of Linux's account of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def floor_bytes(job: Job, ranks: int) -> float:
    """The least that training can take, as above."""
    model = make_model(job).to_empty(device="cpu")
    for module in model.modules():
        fill_(module)
    units = [4 * sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    total = 4 * sum(p.numel() for p in model.parameters())
    whole = sum(sorted([*units, total - sum(units)])[-3:])
    return total / ranks + whole + max(total / ranks, saved_bytes(job, model))


def saved_bytes(job: Job, model: torch.nn.Module) -> int:
    """Bytes of what autograd saves in a forward, parameters left out."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    found: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return saved

    x = torch.zeros(job.batch, job.tokens, dtype=torch.long)
    with saved_tensors_hooks(note, lambda saved: saved):
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    del loss  # until here it keeps every storage, so that no address was found twice
    return sum(found.values())


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, **SIZES, contender="shardfn", steps=8)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    args = read_options(argv)
    if not args.worker:
        report(cases(args.quick))
        return
    mesh = make_mesh(args.mesh)
    finish(args, {"peak": measure(args, mesh)})


if __name__ == "__main__":
    main()
