"""Time that the host spends on sharding, per layer and step, at 64 ranks.

    python examples/benchmarks/host_time.py                # every case, about a minute

One process is rank 0 of torch's fake process group, in which collectives move no data between ranks; the model is tiny
and every contender computes what one rank would, so that what remains is Python and dispatch. The figure of a
contender is its forward and backward less that of the model without sharding (with heads and hidden features of one
rank, where tp splits them), over the number of layers, in seconds of this process's own
CPU time. No optimizer: AdamW is a case of its own, on 300 small tensors.
Copies that only the fake process group makes are left out (`fake.copying_seconds`).
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import process_time
from typing import Any

import torch
from contenders import CONTENDERS, make_batch
from fake import copying_seconds, start_fake
from measure import Cases, finish, in_turn, job_of, launch, make_mesh, parse, report
from results import Row
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf

SIZES: dict[str, Any] = {"width": 128, "layers": 32, "vocab": 256, "head": 32, "tokens": 8, "rounds": 20}
TINY = {"layers": 2, "rounds": 2, "warmup": 1}
RANKS = 64
# mesh -> (peer, bar)
MESHES = {"fsdp=64": ("FSDP2", 0.50), "fsdp=16,tp=4": ("FSDP2 + parallelize_module", 0.33)}
ADAMW_BAR = 0.40


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    of_meshes = {f"host time, {mesh}": partial(run_mesh, mesh, quick) for mesh in MESHES}
    return {**of_meshes, "host time, AdamW": partial(run_adamw, quick)}


def run_mesh(mesh: str, quick: bool) -> list[Row]:
    """Added time per layer on one mesh, beside the peer's."""
    options: dict[str, Any] = SIZES | {"mesh": mesh} | (TINY if quick else {})
    seconds = launch(__file__, 0, options)
    alone = seconds["unsharded"]
    added = {name: added_ms(seconds[name], alone, options["layers"]) for name in ("shardfn", "fsdp2")}
    peer, bar = MESHES[mesh]
    what = f"host time added per layer, {mesh}"
    return [Row(what=what, peer=peer, unit="ms", ours=added["shardfn"], theirs=added["fsdp2"], bar=bar)]


def added_ms(seconds: list[float], unsharded: list[float], layers: int) -> list[float]:
    """Milliseconds per layer that sharding adds, round by round."""
    return [1e3 * (mine - alone) / layers for mine, alone in zip(seconds, unsharded, strict=True)]


def run_adamw(quick: bool) -> list[Row]:
    """One update, beside the fastest of torch's own on the same DTensors; and that, beside itself on plain tensors."""
    options = SIZES | {"tensors": 10 if quick else 300} | (TINY if quick else {})
    seconds = launch(__file__, 0, options)
    times = {name: [1e3 * second for second in values] for name, values in seconds.items()}
    ours = times.pop("shardfn")
    plain = times.pop("plain")
    peer = min(times, key=lambda name: statistics.median(times[name]))
    what = f"host time, AdamW on {options['tensors']} parameters"
    on_classes = f"host time, torch's fused AdamW on {options['tensors']} parameters of the classes"
    return [
        Row(what=what, peer=f"torch, {peer}", unit="ms", ours=ours, theirs=times[peer], bar=ADAMW_BAR),
        Row(what=on_classes, peer="on plain local tensors", unit="ms", ours=times["fused"], theirs=plain),
    ]


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, list[float]]:
    """Seconds of forward and backward of every contender in every round, less what the fake group copies."""
    job = job_of(args)
    actions: dict[str, Callable[[int], object]] = {}
    copying: dict[str, float] = {}
    for name in args.contenders.split(","):
        run = CONTENDERS[name](job, mesh).differentiate
        actions[name] = lambda round_, run=run: run(make_batch(job, round_, mesh))
        actions[name](0)  # the first call exchanges more
        copying[name] = copying_seconds(partial(actions[name], 0), mesh)
    seconds = in_turn(actions, args.rounds, args.warmup, process_time)
    return {name: [second - copying[name] for second in seconds[name]] for name in seconds}


def measure_adamw(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, list[float]]:
    """Seconds of an AdamW update in every round."""
    values = {f"w{i}": torch.randn(64, 16) for i in range(args.tensors)}
    params = sf.shard(values, mesh, sf.Policy())
    grads = sf.shard({name: torch.randn_like(value) for name, value in values.items()}, mesh, sf.Policy())
    optimizer = sf.optim.adamw(1e-4)
    state = optimizer.init(params)

    def ours(round_: int) -> None:
        nonlocal params, state
        params, state = optimizer.step(params, grads, state)

    actions: dict[str, Callable[[int], object]] = {"shardfn": ours}
    kinds: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "default": {}}
    kinds["plain"] = kinds["fused"]
    for kind, options in kinds.items():
        kept = [*params.values(), *grads.values()]
        copies = [(leaf.to_local() if kind == "plain" else leaf).detach().clone() for leaf in kept]
        weights = [*map(nn.Parameter, copies[: len(params)])]
        for weight, grad in zip(weights, copies[len(params) :], strict=True):
            weight.grad = grad
        torch_optimizer = torch.optim.AdamW(weights, 1e-4, **options)
        actions[kind] = lambda round_, step=torch_optimizer.step: step()
    return in_turn(actions, args.rounds, args.warmup, process_time)


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, **SIZES, mesh=f"fsdp={RANKS}", contenders="shardfn,fsdp2,unsharded", tensors=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    args = read_options(argv)
    if not args.worker:
        report(cases(args.quick))
        return
    start_fake(RANKS)
    mesh = make_mesh(args.mesh)
    finish(args, measure_adamw(args, mesh) if args.tensors else measure(args, mesh))


if __name__ == "__main__":
    main()
