"""Checkpoints, timed in turn with torch.distributed.checkpoint; saves in the background; what grows with ranks.

    python examples/benchmarks/checkpoints.py        # every case, about two minutes

Two ranks save and load 400 MB of float32 in 95 matrices and 95 vectors, hashes included, to the same disk. What a save
in the background blocks is compared with a copy of the same shards to host memory, and steps of training while one goes
on with other steps. Safetensors are read into shards by one rank, beside a read of the file's bytes. The last table is
made in one process: the manifest of so many ranks with 200 leaves each.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake import copying_seconds, start_fake
from measure import Cases, finish, in_turn, launch, make_mesh, parse, report
from results import Row
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.checkpoint import manifest, saves
from shardfn.checkpoint.hashed_files import Piece
from shardfn.checkpoint.leaves import SavedLeaf
from shardfn.checkpoint.manifest import HashedFile
from shardfn.checkpoint.storages import LocalDirectory
from shardfn.comm import empty_shards
from shardfn.layout import grid_of
from shardfn.params import NewTree

SIZE, LAYERS = 1024, 95
SECONDS = {"save": 1.10, "load": 1.10, "call": 1.05, "step": 1.05, "read": 1 / 0.9}  # bars
MANIFESTS = (8, 64, 512, 4096)


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    found: dict[str, Any] = {"checkpoints": partial(run_case, quick), "save, 4096 ranks": partial(run_many, quick)}
    return found | {"manifests": partial(run_manifests, quick)}


def run_case(quick: bool) -> list[Row]:
    """Rows of two ranks, and of one that reads safetensors."""
    options: dict[str, Any] = {"size": 64, "layers": 3, "rounds": 2, "warmup": 1, "over": 1} if quick else {}
    found = launch(__file__, 2, options) | launch(__file__, 0, options | {"part": "read"})
    megabytes = f"{found.pop('bytes') / 1e6:.0f} MB"
    whats = {
        "save": (f"save {megabytes}, 2 ranks", "DCP"),
        "load": (f"load {megabytes}, 2 ranks", "DCP"),
        "call": ("call of a save in the background", "a copy of the shards"),
        "step": ("step while it goes on", "other steps"),
        "read": (f"load_safetensors of {megabytes}, one rank", "reading the bytes"),
    }
    return [
        Row(what=what, peer=peer, unit="ms", ours=_ms(found[key]), theirs=_ms(found[f"{key}, peer"]), bar=SECONDS[key])
        for key, (what, peer) in whats.items()
    ]


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * x for x in seconds]


def run_many(quick: bool) -> list[Row]:
    """A row: what a rank that is not the first does of a save, by itself, among many and among few."""
    options: dict[str, Any] = {"part": "many"} | ({"layers": 3, "rounds": 2, "warmup": 1} if quick else {})
    many, few = (launch(__file__, 0, options | {"world": world})["seconds"] for world in (4096, 8))
    what, peer = "a rank of 4096 that is not the first, 32 MB to save, CPU", "one of 8"
    return [Row(what=what, peer=peer, unit="ms", ours=_ms(many), theirs=_ms(few), bar=1.2)]


def run_manifests(quick: bool) -> str:
    """A table: seconds in which the first rank makes, writes and reads the manifest of so many ranks."""
    lines = ["| ranks | parts | manifest | written in | read in |", "| --- | --- | --- | --- | --- |"]
    for ranks in MANIFESTS[:2] if quick else MANIFESTS:
        leaves = [SavedLeaf((f"layers.{i}.weight",), (ranks, 8), torch.float32, "", []) for i in range(200)]
        everyone: list[saves.Written] = []
        for rank in range(ranks):
            boxes = [
                (x.names[0], ((rank, 1), (0, 8)), Piece(n * 2000, 2000, n * 2000 + 700)) for n, x in enumerate(leaves)
            ]
            everyone.append((f"{0:016x}_{rank}.distcp", HashedFile(400_000, ("0" * 64,)), boxes, []))
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            made, metadata = saves.manifest_of(f"{0:016x}", {}, leaves, everyone)
            place = LocalDirectory(folder)
            place.put(".metadata", metadata)
            place.put(manifest.NAME, made.text().encode())
            written = time.perf_counter() - begin
            begin = time.perf_counter()
            manifest.read_manifest(place)
            read, size = time.perf_counter() - begin, place.size(manifest.NAME)
        lines.append(f"| {ranks} | {200 * ranks:,} | {size / 1e6:.1f} MB | {written:.2g} s | {read:.2g} s |")
    return "\n".join(lines)


def measure(args: argparse.Namespace, mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Seconds of each action in every round."""
    model = nn.Sequential(*(nn.Linear(args.size, args.size) for _ in range(args.layers)))
    params = sf.shard(model, mesh, sf.Policy(), src=0)
    plain, host = dict(params), [torch.zeros_like(x.to_local()) for x in params.values()]

    def clear(path: Path) -> Path:
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return path

    def theirs(round_: int) -> None:
        state_dict_saver.save(plain, checkpoint_id=folder / f"theirs-{round_}")

    actions: dict[str, Any] = {
        "save": lambda n: sf.checkpoint.save(folder / f"ours-{n}", {"p": params}),
        "save, peer": theirs,
    }
    seconds = in_turn(actions, args.rounds, args.warmup)
    ours, last = folder / f"ours-{args.rounds}", folder / f"theirs-{args.rounds}"
    seconds |= in_turn(
        {
            "load": lambda _: sf.checkpoint.load(ours, {"p": params}),
            "load, peer": lambda _: state_dict_loader.load(plain, checkpoint_id=last),
        },
        args.rounds,
        args.warmup,
    )
    found: dict[str, list[float]] = {"call": [], "call, peer": [], "step": [], "step, peer": []}
    small, x = model[:4], torch.randn(args.size // 8, args.size)
    weights = sf.shard(small, mesh, sf.Policy(), src=0)
    step = sf.value_and_grad(lambda p: sf.apply(small, p, x).square().mean())
    for round_ in range(args.warmup + args.rounds):
        saving: list[Any] = []
        times = {"call, peer": _timed(partial(_copy, host, params)), "step, peer": _timed(partial(step, weights))}
        begin = partial(sf.checkpoint.save, clear(folder / "async"), {"p": params}, async_=True)
        times["call"] = _timed(lambda begin=begin, saving=saving: saving.append(begin()))
        times["step"] = _timed(partial(step, weights))
        if saving[0].done() and not args.over:
            raise AssertionError("the save was over before the step was")
        saving[0].wait()
        if round_ >= args.warmup:
            for name, value in times.items():
                found[name].append(value)
    return seconds | found | {"bytes": sum(x.numel() * 4 for x in params.values())}


def _copy(host: Sequence[Tensor], params: sf.Params) -> None:
    for mine, leaf in zip(host, params.values(), strict=True):
        mine.copy_(leaf.detach().to_local())


def _timed(action: Any) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure_reading(args: argparse.Namespace, mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Seconds of reading safetensors into shards, and of reading the bytes of the file."""
    model = nn.Sequential(*(nn.Linear(args.size, args.size) for _ in range(args.layers)))
    file = folder / "model.safetensors"
    sf.checkpoint.save_safetensors(file, model, sf.shard(model, mesh, sf.Policy()))

    def read(_: int) -> None:
        with file.open("rb", buffering=0) as opened:
            view = torch.empty(file.stat().st_size, dtype=torch.uint8).numpy().data  # new memory, as of shards
            while len(view):
                view = view[opened.readinto(view) :]

    actions = {"read": lambda _: sf.checkpoint.load_safetensors(file, model, mesh, sf.Policy()), "read, peer": read}
    return in_turn(actions, args.rounds, args.warmup)


def measure_many(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of CPU time of a rank among fake ones, which send what it has sent itself."""
    start_fake(args.world, rank=1)
    with torch.device("meta"):
        model = nn.ParameterList([nn.Parameter(torch.empty(args.world, 2**17)) for _ in range(min(args.layers, 64))])
    mesh = sf.make_mesh("cpu", fsdp=args.world)
    plan = sf.plan(model, mesh, sf.Policy())
    grid = grid_of(mesh, plan.roles.storage)
    params = NewTree(plan, mesh, grid, empty_shards(plan, grid), {}).wrapped()  # nobody has one of them whole
    saves.of_first = lambda value: value  # which the first one would send
    seconds: list[float] = []

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.process_time()
            sf.checkpoint.save(LocalDirectory(folder), {"p": params})
            seconds.append(time.process_time() - begin)

    copying = copying_seconds(save, mesh)  # which no host does
    for _ in range(args.rounds + args.warmup):
        save()
    dist.destroy_process_group()
    return {"seconds": [x - copying for x in seconds[args.warmup + 1 :]]}


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, size=SIZE, layers=LAYERS, part="save", over=0, world=8)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be a worker of one."""
    args = read_options(argv)
    if not args.worker:
        report(cases(args.quick))
        return
    if args.part == "many":
        finish(args, measure_many(args))
        return
    mesh = make_mesh("fsdp=-1")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    found = (measure if args.part == "save" else measure_reading)(args, mesh, Path(shared[0]))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0])
    finish(args, found)


if __name__ == "__main__":
    main()
