"""Step time against PyTorch's own ways to train, and against the least that a step can take.

    python examples/benchmarks/step_time.py                # every case, about five minutes
    torchrun --standalone --nproc-per-node 2 examples/benchmarks/step_time.py --worker --tokens 64

A step is forward, backward and AdamW. All contenders of a case train in the same processes and take their steps in
turn; their losses must agree to 1e-3, or the case fails. The floor of a step is

    compute + update / ranks + bytes / rate

with the forward and backward of one rank alone and its AdamW update, both measured in turn with the others while all
ranks do the same; the bytes that each rank must receive, two gathers and one reduction of every layer, one of each for
the rest; and the best rate, in any round, at which all ranks can pass 16 MiB on to the next one.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Job, make_batch, make_model
from measure import QUICK, Cases, cases_or_worker, in_turn, job_of, launch, parse
from results import Row
from torch.distributed.device_mesh import DeviceMesh

PEERS = {
    "fsdp2": "FSDP2",
    "fsdp1": "FSDP1",
    "shardfn": "shardfn's functions",
    "ddp": "DDP",
    "tp": "parallelize_module",
    "floor": "its floor",
}
EXCHANGED = 16 * 2**20  # bytes


@dataclass(frozen=True)
class Case:
    """One run of the worker: on how many ranks, with which options; peers with their bars (None: none)."""

    what: str
    ranks: int
    options: dict[str, Any]
    bars: Mapping[str, float | None]
    ours: str = "shardfn"


CASES = [
    Case("2 ranks", 2, {"tokens": 64}, {"fsdp2": 0.57, "fsdp1": None, "ddp": None, "floor": 1.15}),
    Case("2 ranks, FSDP1's class", 2, {"tokens": 64}, {"shardfn": 1.03, "fsdp2": 0.60}, ours="shardfn_fsdp1"),
    Case("2 ranks, FSDP2's class", 2, {"tokens": 64}, {"fsdp2": 0.60}, ours="shardfn_fsdp2"),
    Case("2 ranks, FSDP2's class", 2, {"tokens": 512}, {"fsdp2": 0.76}, ours="shardfn_fsdp2"),
    Case("2 x 2 (fsdp, tp), FSDP2's class", 4, {"tokens": 64, "mesh": "fsdp=2,tp=2"}, {"fsdp2": 1.0}, "shardfn_fsdp2"),
    Case("2 ranks", 2, {"tokens": 512}, {"fsdp2": 0.74, "floor": 1.15}),
    Case("4 ranks", 4, {"tokens": 64}, {"fsdp2": 0.66, "floor": 1.15}),
    Case("2 x 2 (fsdp, tp)", 4, {"tokens": 64, "mesh": "fsdp=2,tp=2"}, {"fsdp2": 0.50}),
    Case("1 x 2 (fsdp, tp)", 2, {"tokens": 64, "mesh": "fsdp=1,tp=2"}, {"tp": None}),
]


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    found = {}
    for case in CASES:
        options = case.options | (QUICK | {"tokens": case.options["tokens"] // 8} if quick else {})
        what = f"step, {case.what}, 1 x {options['tokens']} tokens"
        found[what] = partial(run_case, what, case, options)
    return found


def run_case(what: str, case: Case, options: Mapping[str, Any]) -> list[Row]:
    """A row for each peer of a case."""
    names = ",".join([case.ours, *case.bars])
    seconds = launch(__file__, case.ranks, {**options, "contenders": names})
    times = {name: [1e3 * t for t in values] for name, values in seconds.items()}
    over = " + parallelize_module" if "tp=2" in str(options.get("mesh")) else ""
    return [
        Row(
            what=what,
            peer=PEERS[peer] + (over if peer == "fsdp2" else ""),
            unit="ms",
            ours=times[case.ours],
            theirs=times[peer],
            bar=bar,
        )
        for peer, bar in case.bars.items()
    ]


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, list[float]]:
    """Seconds of every contender in every round, and of the floor when it is one of them."""
    job, names = job_of(args), args.contenders.split(",")
    losses: dict[str, list[float]] = {name: [] for name in names if name != "floor"}
    actions: dict[str, Callable[[int], object]] = {}
    for name in losses:
        step = CONTENDERS[name](job, mesh).step
        actions[name] = lambda n, name=name, step=step: losses[name].append(float(step(make_batch(job, n, mesh))))
    if "floor" in names:
        alone = CONTENDERS["unsharded"](job, mesh)
        actions["compute"] = lambda n: alone.differentiate(make_batch(job, n, mesh))
        actions["update"] = lambda n: alone.update()
        actions["exchange"] = make_exchange(EXCHANGED // 4)
    seconds = in_turn(actions, args.rounds, args.warmup)
    require_equal_losses(losses)
    if "floor" in names:
        ranks, rate = mesh.size(), EXCHANGED / min(seconds["exchange"])
        moving = received_bytes(job, ranks) / rate
        halves = zip(seconds["compute"], seconds["update"], strict=True)
        seconds["floor"] = [compute + update / ranks + moving for compute, update in halves]
    return seconds


def make_exchange(numel: int) -> Callable[[int], None]:
    """An action: every rank sends float32 elements to the next rank and receives as many from the one before."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    out, into = torch.ones(numel), torch.zeros(numel)
    assert group is not None

    def exchange(round_: int) -> None:
        works = [group.recv([into], (rank - 1) % ranks, 0), group.send([out], (rank + 1) % ranks, 0)]
        for work in works:
            work.wait()

    return exchange


def received_bytes(job: Job, ranks: int) -> float:
    """Bytes of weights and gradients that each rank must receive in a step when everything is split over all ranks."""
    model = make_model(job)
    layers = sum(param.numel() for param in model.layers.parameters())
    rest = sum(param.numel() for param in model.parameters()) - layers
    return 4 * (ranks - 1) / ranks * (3 * layers + 2 * rest)


def require_equal_losses(losses: Mapping[str, list[float]]) -> None:
    """Fail when contenders do not train alike."""
    for round_, of_round in enumerate(zip(*losses.values(), strict=True)):
        if max(of_round) - min(of_round) > 1e-3 * max(of_round):
            raise SystemExit(f"the losses of round {round_} differ: {dict(zip(losses, of_round, strict=True))}")


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, contenders="shardfn,fsdp2,floor")


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    cases_or_worker(read_options(argv), cases, measure)


if __name__ == "__main__":
    main()
