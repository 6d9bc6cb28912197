"""Whether costs grow with the size of the job: each case against itself on a smaller one.

    python examples/benchmarks/scaling.py                # every case, about a minute

    layers   host time added per layer (see host_time.py) with 64 layers, against 8
    plan     time to plan 100 weights for 4096 ranks, against 8
    shard    time to shard them, on a mesh of 4096 ranks and on one of 8 within the same process group

One process, rank 0 of torch's fake process group, in seconds of its own CPU
time; sharding without the copies that only that group makes (`fake.copying_seconds`).
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import process_time

import torch
from contenders import CONTENDERS, Job, make_batch
from fake import copying_seconds, start_fake
from host_time import RANKS, added_ms
from measure import Cases, finish, in_turn, job_of, launch, make_mesh, parse, report
from results import Row
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf

SIZES = {"width": 64, "vocab": 64, "head": 32, "tokens": 8, "rounds": 15}
LAYERS = (8, 64)
WORLDS = (8, 4096)
BAR = 1.15


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    return {"scaling, layers": partial(run_layers, quick), "scaling, ranks": partial(run_ranks, quick)}


def run_layers(quick: bool) -> list[Row]:
    """Added host time per layer, deep against shallow."""
    few, many = (2, 4) if quick else LAYERS
    seconds = launch(__file__, 0, SIZES | {"few": few, "many": many} | ({"rounds": 2} if quick else {}))
    added = {n: added_ms(seconds[f"shardfn {n}"], seconds[f"unsharded {n}"], n) for n in (few, many)}
    what = f"host time added per layer, {many} layers"
    return [Row(what=what, peer=f"{few} layers", unit="ms", ours=added[many], theirs=added[few], bar=BAR)]


def run_ranks(quick: bool) -> list[Row]:
    """Time to plan and to shard, on many ranks against few."""
    few, many = WORLDS
    seconds = launch(__file__, 0, {"few": few, "many": many, "weights": 100, "rounds": 2 if quick else SIZES["rounds"]})
    rows = []
    for verb in ("plan", "shard"):
        ours, theirs = ([1e3 * t for t in seconds[f"{verb} {ranks}"]] for ranks in (many, few))
        what = f"{verb} of 100 weights, {many} ranks"
        rows.append(Row(what=what, peer=f"{few} ranks", unit="ms", ours=ours, theirs=theirs, bar=BAR))
    return rows


def measure_layers(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of forward and backward of a shallow and a deep model, sharded and not."""
    start_fake(RANKS)
    mesh, job = make_mesh("fsdp=-1"), job_of(args)
    actions: dict[str, Callable[[int], object]] = {}
    for layers in (args.few, args.many):
        of_depth = Job(**{**vars(job), "layers": layers})
        for name in ("shardfn", "unsharded"):
            run = CONTENDERS[name](of_depth, mesh).differentiate
            actions[f"{name} {layers}"] = lambda round_, run=run: run(make_batch(job, round_, mesh))
    return in_turn(actions, args.rounds, args.warmup, process_time)


def measure_ranks(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds to plan and to shard a mapping of weights on few and on many ranks."""
    start_fake(args.many)
    values = {f"w{i}": torch.randn(args.many, 8) for i in range(args.weights)}
    meshes = {n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("fsdp",)) for n in (args.few, args.many)}
    actions: dict[str, Callable[[int], object]] = {}
    for ranks, mesh in meshes.items():
        actions[f"plan {ranks}"] = partial(_plan, values, ranks)
        actions[f"shard {ranks}"] = partial(_shard, values, mesh)
    seconds = in_turn(actions, args.rounds, args.warmup, process_time)
    for ranks, mesh in meshes.items():
        copying = copying_seconds(partial(_shard, values, mesh, 0), mesh)
        seconds[f"shard {ranks}"] = [second - copying for second in seconds[f"shard {ranks}"]]
    return seconds


def _plan(values: Mapping[str, torch.Tensor], ranks: int, round_: int) -> None:
    sf.plan(values, sf.MeshSpec(fsdp=ranks), sf.Policy())


def _shard(values: Mapping[str, torch.Tensor], mesh: DeviceMesh, round_: int) -> None:
    sf.shard(values, mesh, sf.Policy())


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, **SIZES, few=LAYERS[0], many=LAYERS[1], weights=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    args = read_options(argv)
    if not args.worker:
        report(cases(args.quick))
        return
    finish(args, measure_ranks(args) if args.weights else measure_layers(args))


if __name__ == "__main__":
    main()
