"""Peak memory of the loss alone, forward and backward: logits split over the vocabulary against whole ones.

    python examples/benchmarks/loss.py                  # every case, two minutes

A rank starts with its part of the logits of 512 tokens and 131072 classes, and ends with their gradient. Its figure is
the highest resident memory that Linux saw, less what was resident with the logits there and a tiny loss computed, on
the largest rank. Peers have whole logits on one rank: `F.cross_entropy` of them in float32, and `sf.cross_entropy`.
Blocks return to the system when they are freed, as in `memory.py`.
"""

import argparse
import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import Cases, cases_or_worker, launch, parse
from memory import status_bytes
from results import Row
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import shardfn as sf

SIZES = {"vocab": 131072, "tokens": 512}
DTYPES = ("float32", "bfloat16")


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    return {f"loss, {dtype}": partial(run_case, dtype, quick) for dtype in DTYPES}


def run_case(dtype: str, quick: bool) -> list[Row]:
    """Split over 2 and 4 ranks against either peer."""
    options: dict[str, Any] = (SIZES | ({"vocab": 4096, "tokens": 64} if quick else {})) | {"dtype": dtype}
    environ = {"MALLOC_MMAP_THRESHOLD_": "65536"}

    def peak(contender: str, ranks: int) -> float:
        return launch(__file__, ranks, options | {"contender": contender, "mesh": f"tp={ranks}"}, environ) / 1e6

    peers = {"`F.cross_entropy`, 1 rank": peak("torch", 1), "`sf.cross_entropy`, 1 rank": peak("shardfn", 1)}
    rows = []
    for ranks in (2, 4):
        ours = peak("shardfn", ranks)
        what = f"loss of {dtype} logits, tp={ranks}"
        bar = 1 / ranks + 0.1
        rows += [Row(what=what, peer=p, unit="MB", ours=[ours], theirs=[its], bar=bar) for p, its in peers.items()]
    return rows


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> float:
    """Bytes that the loss takes at its peak, on the rank that takes most."""
    step(args.contender, mesh, *make(mesh, 8, 64, getattr(torch, args.dtype)))
    logits, targets = make(mesh, args.tokens, args.vocab, getattr(torch, args.dtype))
    gc.collect()
    before = status_bytes("VmRSS")
    step(args.contender, mesh, logits, targets)
    peak = torch.tensor(float(status_bytes("VmHWM") - before))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak)


def make(mesh: DeviceMesh, tokens: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's part of the logits, and the targets, made without a larger tensor."""
    logits = torch.empty(tokens, vocab // mesh["tp"].size(), dtype=dtype).normal_()
    return logits.requires_grad_(), torch.arange(tokens) * 37 % vocab


def step(contender: str, mesh: DeviceMesh, logits: Tensor, targets: Tensor) -> None:
    """A loss and its gradient."""
    if contender == "torch":
        loss = F.cross_entropy(logits.float(), targets)
    elif mesh["tp"].size() == 1:
        loss = sf.cross_entropy(logits, targets)
    else:
        loss = sf.cross_entropy(DTensor.from_local(logits, mesh["tp"], [Shard(1)], run_check=False), targets)
    loss.backward()
    assert loss.isfinite() and logits.grad is not None


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, **SIZES, contender="shardfn", dtype="float32")


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    cases_or_worker(read_options(argv), cases, measure)


if __name__ == "__main__":
    main()
