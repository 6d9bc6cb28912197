"""Transforms and compiled steps against the same on unsharded weights.

    python examples/benchmarks/transforms.py             # every case, about four minutes

**Transforms.** Per-sample gradients, a Hessian-vector product and a step of MAML with respect to all weights of a small
decoder, on 2 ranks, against the same program of `torch.func` on whole weights. Its floor is

    unsharded time of all samples / ranks + bytes / rate

with the unsharded program measured in turn with ours, on every rank at the same time; the bytes that a rank receives
in our program, counted; and the best rate in any round at which all ranks can pass 4 MiB on to the next one.

**Memory.** The highest resident memory of two runs of each program in a fresh process, weights included, on the rank
that takes most, less what was resident before; beside the same on whole weights, with the samples of one rank.

**Compiled steps.** A whole training step (gradient, AdamW) by `sf.jit` against the same step without it, and on one
rank against `torch.compile` of an unsharded model with torch's fused AdamW.
"""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contenders import CONTENDERS, OPTIMIZERS, Job, make_batch, make_model
from measure import QUICK, Cases, cases_or_worker, in_turn, job_of, launch, parse
from memory import status_bytes
from results import Row
from step_time import make_exchange, require_equal_losses
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from traffic import received_bytes

import shardfn as sf
from shardfn.testing import count_collectives

Tree = dict[str, Tensor]
SIZES: dict[str, Any] = {"width": 256, "layers": 4, "vocab": 1024, "batch": 4, "rounds": 8, "warmup": 2}
MEMORY_SIZES = {"width": 512, "layers": 8, "batch": 2}  # 27M parameters
BAR = 1.5
NAMES = {"samples": "per-sample gradients", "hvp": "Hessian-vector product", "maml": "a step of MAML"}
EXCHANGED = 4 * 2**20  # bytes


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    sizes = SIZES | (QUICK if quick else {})
    found: dict[str, Callable[[], list[Row]]] = {
        "transforms, 2 ranks": partial(run_transforms, sizes, "2 ranks"),
        "transforms, 2 ranks, weights kept": partial(run_transforms, sizes | {"regather": 0}, "2 ranks, weights kept"),
    }
    large = sizes if quick else sizes | MEMORY_SIZES
    for how, regather in (("", 1), (", weights kept", 0)):
        found[f"memory of transforms, 2 ranks{how}"] = partial(
            run_memory, large | {"regather": regather}, f"2 ranks{how}"
        )
    for ranks in (1, 2):
        found[f"compiled steps, {ranks} ranks"] = partial(run_compiled, ranks, sizes)
    return found


def run_transforms(options: Mapping[str, Any], how: str) -> list[Row]:
    """A row for each program."""
    seconds = launch(__file__, 2, {**options, "measures": "transforms"})
    ms = {name: [1e3 * t for t in values] for name, values in seconds.items()}
    return [
        Row(what=f"{what}, {how}", peer="its floor", unit="ms", ours=ms[name], theirs=ms[f"{name} floor"], bar=BAR)
        for name, what in NAMES.items()
    ]


def run_memory(options: Mapping[str, Any], how: str) -> list[Row]:
    """A row for each program."""
    rows = []
    for name, what in NAMES.items():
        true = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # no fragmentation, see memory.py
        peaks = [
            launch(__file__, 2, {**options, "measures": "memory", "program": program}, true)["peak"] / 1e6
            for program in (name, f"{name} unsharded")
        ]
        rows.append(Row(what=f"memory of {what}, {how}", peer="unsharded", unit="MB", ours=peaks[:1], theirs=peaks[1:]))
    return rows


def run_compiled(ranks: int, options: Mapping[str, Any]) -> list[Row]:
    """Rows for the backends of `sf.jit`."""
    seconds = launch(__file__, ranks, {**options, "measures": "compiled"})
    ms = {name: [1e3 * t for t in values] for name, values in seconds.items()}
    what = f"sf.jit, {ranks} rank{'s' * (ranks > 1)}"
    rows = [
        Row(what=f"{what}, {name}", peer="the step without it", unit="ms", ours=ms[name], theirs=ms["eager"])
        for name in ("aot_eager", "inductor")
    ]
    if ranks == 1:
        peer = "torch.compile, unsharded"
        rows.append(Row(what=f"{what}, inductor", peer=peer, unit="ms", ours=ms["inductor"], theirs=ms["torch"]))
    return rows


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> Any:
    """Seconds of every program in every round, or the peak of one."""
    kinds = {"transforms": measure_transforms, "memory": measure_memory, "compiled": measure_compiled}
    return kinds[args.measures](args, mesh)


def measure_transforms(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, list[float]]:
    """Ours, the unsharded ones on the samples of all ranks, and the floors made of these."""
    job, ranks = job_of(args), mesh.size()
    programs = {**_sharded(job, mesh, bool(args.regather)), **_unsharded(job, mesh, ranks)}
    moved = {}
    with sdpa_kernel(SDPBackend.MATH):  # the only one with forward mode on CPUs
        for name in NAMES:
            programs[name](0)
            with count_collectives() as counts:
                programs[name](0)
            moved[name] = received_bytes(counts, ranks)
        seconds = in_turn({**programs, "exchange": make_exchange(EXCHANGED // 4)}, args.rounds, args.warmup)
    rate = EXCHANGED / min(seconds["exchange"])
    for name in NAMES:
        seconds[f"{name} floor"] = [t / ranks + moved[name] / rate for t in seconds[f"{name} unsharded"]]
    return seconds


def _loss(logits_of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of a batch `[batch, tokens]`, or of one sample `[tokens]`."""
    logits = logits_of(x if x.dim() > 1 else x[None])
    return cross_entropy(logits.flatten(0, 1), x.flatten())


def _sharded(job: Job, mesh: DeviceMesh, regather: bool) -> dict[str, Callable[[int], object]]:
    model, x = make_model(job), make_batch(job, 0, mesh)
    params = sf.shard(model, mesh, sf.Policy(regather=regather))
    model.to("meta")  # the tree has the weights now
    inner = sf.optim.sgd(0.1)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return _loss(partial(sf.apply, model, p), x)

    def adapted(p: sf.Params, x: Tensor) -> Tensor:
        updates, _ = inner.update(sf.grad(loss)(p, x), inner.init(p), p)
        return loss(sf.optim.apply_updates(p, updates), x)

    return {
        "samples": lambda _: sf.vmap(sf.grad(loss), in_dims=(None, 0))(params, x),
        "hvp": lambda _: sf.hvp(loss, (params, x), params),
        "maml": lambda _: sf.grad(adapted)(params, x),
    }


def _unsharded(job: Job, mesh: DeviceMesh, ranks: int) -> dict[str, Callable[[int], object]]:
    """On the samples of so many ranks."""
    model, x = make_model(job), torch.cat([make_batch(job, 0, mesh)] * ranks)
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(p: Tree, x: Tensor) -> Tensor:
        return _loss(lambda ids: functional_call(model, p, (ids,)), x)

    gradient = torch.func.grad(loss)

    def adapted(p: Tree, x: Tensor) -> Tensor:
        grads = gradient(p, x)
        return loss({name: p[name] - 0.1 * grads[name] for name in p}, x)

    return {
        "samples unsharded": lambda _: torch.func.vmap(gradient, in_dims=(None, 0))(params, x),
        "hvp unsharded": lambda _: torch.func.jvp(lambda p: gradient(p, x), (params,), (params,)),
        "maml unsharded": lambda _: torch.func.grad(adapted)(params, x),
    }


def measure_memory(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, float]:
    """Bytes at the peak of one program, on the rank that takes most."""
    job = job_of(args)

    def run(job: Job) -> None:
        unsharded = args.program.endswith("unsharded")
        programs = _unsharded(job, mesh, 1) if unsharded else _sharded(job, mesh, bool(args.regather))
        for number in range(2):
            programs[args.program](number)

    with sdpa_kernel(SDPBackend.MATH):
        run(replace(job, width=64, layers=2, vocab=64, head=32))
        gc.collect()
        before = status_bytes("VmRSS")
        run(job)
    peak = torch.tensor(float(status_bytes("VmHWM") - before))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {"peak": float(peak)}


def measure_compiled(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, list[float]]:
    """The same step by each backend and without one, and `torch.compile` on one rank."""
    job = job_of(args)
    steps: dict[str, Callable[[Tensor], Tensor]] = {"eager": CONTENDERS["shardfn"](job, mesh).step}
    for backend in ("aot_eager", "inductor"):
        steps[backend] = _compiled(job, mesh, backend)
    if mesh.size() == 1:
        steps["torch"] = _compiled_unsharded(job)
    losses: dict[str, list[float]] = {name: [] for name in steps}
    actions = {
        name: lambda n, name=name, step=step: losses[name].append(float(step(make_batch(job, n, mesh))))
        for name, step in steps.items()
    }
    seconds = in_turn(actions, args.rounds, args.warmup)
    require_equal_losses(losses)
    return seconds


def _compiled(job: Job, mesh: DeviceMesh, backend: str) -> Callable[[Tensor], Tensor]:
    model, optimizer = make_model(job), OPTIMIZERS[job.optimizer][0]
    params = sf.shard(model, mesh, sf.Policy())
    state = optimizer.init(params)

    def step(params: sf.Params, state: Any, x: Tensor) -> Any:
        loss, grads = sf.value_and_grad(lambda p: sf.cross_entropy(sf.apply(model, p, x), x))(params)
        return *optimizer.step(params, grads, state), loss

    fast = sf.jit(step, backend=backend)

    def run(x: Tensor) -> Tensor:
        nonlocal params, state
        params, state, loss = fast(params, state, x)
        return loss

    return run


def _compiled_unsharded(job: Job) -> Callable[[Tensor], Tensor]:
    model = make_model(job)
    optimizer = OPTIMIZERS[job.optimizer][1](model.parameters())
    compiled: nn.Module = torch.compile(model)

    def run(x: Tensor) -> Tensor:
        loss = cross_entropy(compiled(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, measures="transforms", regather=1, program="samples")


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    cases_or_worker(read_options(argv), cases, measure)


if __name__ == "__main__":
    main()
