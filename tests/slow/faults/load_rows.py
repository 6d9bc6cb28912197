"""Rows 41, 45 and 46: meshes; N ranks that save and M that load; and what `sf.Trainer` adds to other rows."""

import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import (
    CLEAR,
    HANG,
    LOST,
    NONE,
    OK,
    OLDER,
    UNCLEAR,
    WRONG,
    Bench,
    Plan,
    Result,
    caught,
    clear,
    group_works,
    hashes_of,
    require_saved,
    shortened,
    worst,
)
from kill_rows import in_one
from libraries import Contender, blank_tree, whole_tree
from storage_rows import Damage, load_any
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from worlds import Ended, Rank, World, in_world

import shardfn as sf

Row = Callable[[Contender, int], Result]
MESHES = {"1": (1,), "2": (2,), "3": (3,), "4": (4,), "2x2": (2, 2)}
TOLERANCE = 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# Meshes


def wrong_meshes(rank: Rank) -> list[Ended]:
    """What is wrong with a mesh, or a rule for one; a model without memory stays so."""
    data, compute = sf.make_mesh("cpu", fsdp=2), sf.make_mesh("cpu", tp=2)
    with torch.device("meta"):
        model, attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 1)
    heads = {"in_proj_weight": "(three heads@tp d) c", "in_proj_bias": "(three heads@tp d)"}
    heads |= {"out_proj.weight": "c (heads@tp d)"}

    def refuse(_: Any) -> None:
        raise AssertionError("memory was made before the error")

    calls: list[Callable[[], Any]] = [
        lambda: sf.make_mesh("cpu", fsdp=3),
        lambda: sf.shard(model, data, sf.Policy(rules={"weight": "f@tp c"}), init=refuse),
        lambda: sf.shard(attention, compute, sf.Policy(rules=heads, sizes={"d": 8, "three": 3}), init=refuse),
    ]
    return [caught(call) for call in calls]


def refused_meshes(contender: Contender, seed: int) -> Result:
    """Row 41."""
    if contender.name != "shardfn":
        return Result(NONE, True, why="has no meshes of its own")
    began = time.monotonic()
    ends = in_world(2, wrong_meshes)
    seconds = time.monotonic() - began
    if bad := [end for end in ends if end.how != "done"]:
        return Result(HANG if bad[0].how == "hang" else UNCLEAR, False, seconds, shortened(bad[0]))
    results: list[Result] = []
    for words, *of_ranks in zip((["fsdp=3"], ["tp", "weight"], ["heads"]), *(end.value for end in ends), strict=True):
        if any(end.how == "done" for end in of_ranks):
            results.append(Result(WRONG, False, seconds, f"accepted: {words}"))
        else:
            is_clear, why = clear(of_ranks, words, lines=100)  # a plan lists every problem, by design
            results.append(Result(CLEAR if is_clear else UNCLEAR, is_clear, seconds, why))
    return worst(results)


# ---------------------------------------------------------------------------------------------------------------------
# N to M


def model_of(seed: int = 0, width: int = 8, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small model, whose parts are uneven on 3 ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def trainer_of(shape: tuple[int, ...], model: nn.Module) -> sf.Trainer:
    """A trainer on a mesh of this shape."""
    axes = dict(zip(("fsdp", "tp"), shape, strict=False))
    rules = {"0.weight": "f@tp a", "0.bias": "f@tp", "2.weight": "c f@tp"} if "tp" in axes else {}

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (sf.apply(model, params, x) - y).square().mean()

    mesh = sf.make_mesh("cpu", **axes)
    return sf.Trainer(model, mesh, sf.Policy(rules=rules), optimizer=sf.optim.adamw(1e-2), loss_fn=loss)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(12, n, generator=draw, dtype=torch.float64) for n in (6, 3))
    return x, y


def expected() -> dict[str, torch.Tensor]:
    """Parameters after four steps of torch's AdamW, in one process."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    for step in range(4):
        x, y = batch_of(step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


def train(trainer: sf.Trainer, steps: range) -> None:
    """Some steps."""
    for step in steps:
        trainer.step(*sf.data.local_batch(batch_of(step), trainer.mesh))


def save_half(_: Rank, folder: Path, shape: tuple[int, ...]) -> None:
    """Two steps, and a checkpoint."""
    trainer = trainer_of(shape, model_of())
    train(trainer, range(2))
    trainer.save(folder)


def go_on(_: Rank, folders: dict[str, Path], shape: tuple[int, ...]) -> dict[str, float]:
    """Two more steps from each checkpoint, and how far that is from one process."""
    apart: dict[str, float] = {}
    reference = expected()
    for name, folder in folders.items():
        trainer = trainer_of(shape, model_of(1))
        trainer.load(folder)
        train(trainer, range(2, 4))
        whole = sf.gather(trainer.params)
        apart[name] = max(float((whole[n] - x).abs().max() / x.abs().max()) for n, x in reference.items())
    return apart


def _not_done(end: Ended, what: str) -> Result:
    return Result(HANG if end.how == "hang" else LOST, False, why=f"{what}: {shortened(end)}")


def resumed(contender: Contender, seed: int) -> Result:
    """Row 45 of shardfn: any number of ranks goes on from any other."""
    return in_one(_resumed, contender, seed)


def _resumed(bench: Bench) -> Result:
    began, folders = time.monotonic(), {name: bench.folder / name for name in MESHES}
    for name, shape in MESHES.items():
        for end in in_world(torch.Size(shape).numel(), save_half, folders[name], shape):
            if end.how != "done":
                return _not_done(end, f"saving on {name}")
    for name, shape in MESHES.items():
        for end in in_world(torch.Size(shape).numel(), go_on, folders, shape):
            if end.how != "done":
                return _not_done(end, f"loading on {name}")
            if far := {n: x for n, x in end.value.items() if not x <= TOLERANCE}:
                return Result(WRONG, False, time.monotonic() - began, f"on {name} from {far}")
    return Result(OK, True, time.monotonic() - began)


def save_on(rank: Rank, bench: Bench, step: int, shape: tuple[int, ...]) -> None:
    """Save a tree that lies on a mesh."""
    mesh = init_device_mesh("cpu", shape)
    bench.contender.save(bench.folder, step, bench.contender.pack(whole_tree(step), mesh))


def load_on(rank: Rank, bench: Bench, paths: list[tuple[int, Path]], shape: tuple[int, ...]) -> list[int]:
    """The steps whose trees are not bit for bit what was saved."""
    mesh, contender = init_device_mesh("cpu", shape), bench.contender
    wrong: list[int] = []
    for step, path in paths:
        read = contender.local(contender.load(path, contender.pack(blank_tree(), mesh)))
        if hashes_of(read) != hashes_of(contender.local(contender.pack(whole_tree(step), mesh))):
            wrong.append(step)
    return wrong


def resharded(contender: Contender, seed: int) -> Result:
    """Row 45 of libraries that do not train: a tree is saved by N ranks, and loaded by M, bit for bit."""

    def row(bench: Bench) -> Result:
        began, saved = time.monotonic(), list[tuple[int, Path]]()
        for step, shape in enumerate(MESHES.values(), 1):
            for end in in_world(torch.Size(shape).numel(), save_on, bench, step, shape):
                assert end.how == "done", end.where
            path = bench.contender.path(bench.folder, step)
            aside = bench.root / f"step-{step:08d}"
            path.rename(aside)
            saved.append((step, aside))
        for name, shape in MESHES.items():
            for end in in_world(torch.Size(shape).numel(), load_on, bench, saved, shape):
                if end.how != "done":
                    return _not_done(end, f"loading on {name}")
                if end.value:
                    return Result(WRONG, False, why=f"on {name}, what was saved by {[*MESHES][end.value[0] - 1]}")
        return Result(OK, True, time.monotonic() - began)

    return in_one(row, contender, seed)


def n_to_m(contender: Contender, seed: int) -> Result:
    """Row 45."""
    found = resharded(contender, seed)
    return worst([found, resumed(contender, seed)]) if contender.name == "shardfn" else found


# ---------------------------------------------------------------------------------------------------------------------
# What one rank sees


def hide_newest(folder: Path) -> None:
    """This process does not see the newest step in a listing."""
    glob = Path.glob

    def listed(self: Path, pattern: str, **options: Any) -> Any:
        found = sorted(glob(self, pattern, **options))
        return found[:-1] if self == folder else found

    vars_of: Any = Path
    vars_of.glob = listed


def load_listed(rank: Rank, bench: Bench, by_trainer: bool) -> tuple[Ended, bool, bool]:
    """Load the newest, which one rank does not see: how it went, whether it is right, whether ranks can talk."""
    if rank.rank == 1:
        hide_newest(bench.folder)
    if by_trainer:
        trainer = trainer_of((2,), model_of(1))
        end = caught(lambda: trainer.load(bench.folder) and trainer.steps)
        return end, end.value == 2, group_works(rank)
    end, right = load_any(rank, bench, attempts=1)[0]
    return end, right, group_works(rank)


def train_and_save(_: Rank, folder: Path) -> None:
    """Two checkpoints."""
    trainer = trainer_of((2,), model_of())
    for step in range(2):
        train(trainer, range(step, step + 1))
        trainer.save(folder)


def listed_otherwise(contender: Contender, seed: int) -> Result:
    """Row 46: each rank lists, as torchtitan's ranks do; Trainer.load does by itself."""
    if contender.overwrites:
        return Result(NONE, True, why="one directory: nothing is listed")

    def of(by_trainer: bool) -> Callable[[Bench], Result]:
        def row(bench: Bench) -> Result:
            if by_trainer:
                in_world(2, train_and_save, bench.folder)
            else:
                require_saved(bench, Plan((1, 2)))
            world = World(2, load_listed, bench, by_trainer)
            ends = world.wait()
            seconds = time.monotonic() - world.began
            if bad := [end for end in ends if end.how != "done"]:
                return Result(HANG if bad[0].how == "hang" else UNCLEAR, False, seconds, shortened(bad[0]))
            if all(right and works for _, right, works in (end.value for end in ends)):
                return Result(OK, True, seconds)
            if any(end.value[0].how == "done" for end in ends):
                return Result(WRONG, False, seconds, "ranks have loaded different steps")
            is_clear, why = clear([end.value[0] for end in ends], [r"step-0*1\b", r"step-0*2\b"])
            decides = "the first rank does not decide" * by_trainer
            return Result(CLEAR if is_clear else UNCLEAR, is_clear and not by_trainer, seconds, why or decides)

        return row

    trainer = [of(True)] if contender.name == "shardfn" else []
    return worst([in_one(row, contender, seed) for row in (of(False), *trainer)])


# ---------------------------------------------------------------------------------------------------------------------
# Rows 29 to 32 and 42 to 44 with a trainer


def fall_back(rank: Rank, folder: Path, width: int, dtype: torch.dtype) -> tuple[Ended, bool]:
    """Load the newest: what it comes to, and whether the model is as it was."""
    trainer = trainer_of((2,), model_of(1, width, dtype))
    before = hashes_of({name: x.detach().to_local() for name, x in trainer.params.items()})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        end = caught(lambda: trainer.load(folder).name)
    after = hashes_of({name: x.detach().to_local() for name, x in trainer.params.items()})
    return Ended(end.how, (end.value, [str(w.message) for w in told]), end.text, end.kind), before == after


def by_trainer(row: Row, damage: Damage | None = None, width: int = 8, dtype: torch.dtype = torch.float64) -> Row:
    """A row, and for shardfn also Trainer.load: it falls back from what is damaged, and refuses what does not fit."""

    def of_trainer(bench: Bench) -> Result:
        in_world(2, train_and_save, bench.folder)
        newest, other = bench.contender.all(bench.folder)
        if damage is not None:
            damage(newest, other, random.Random(bench.seed), bench.contender.data)
        world = World(2, fall_back, bench.folder, width, dtype)
        ends = world.wait()
        seconds = time.monotonic() - world.began
        if bad := [end for end in ends if end.how != "done"]:
            return Result(HANG if bad[0].how == "hang" else UNCLEAR, False, seconds, shortened(bad[0]))
        if damage is None:
            is_clear, why = clear([end.value[0] for end in ends], [r"params\.", r"step-\d+"])
            if not all(end.value[1] for end in ends):
                return Result(WRONG, False, seconds, "Trainer.load has changed the model, and raises")
            return Result(CLEAR if is_clear else UNCLEAR, is_clear, seconds, f"Trainer.load: {why}" * bool(why))
        read, told = ends[0].value[0].value or (None, [])
        if {end.value[0].how for end in ends} != {"done"} or (read != other.name) != (read == newest.name):
            return Result(LOST, False, seconds, f"Trainer.load: {shortened(ends[0].value[0])}")
        if read == other.name and not any("damaged" in x or "missing" in x or "bytes" in x for x in told):
            return Result(UNCLEAR, False, seconds, f"Trainer.load falls back without a word: {told}")
        return Result(OK if read == newest.name else OLDER, True, seconds)

    def both(contender: Contender, seed: int) -> Result:
        trainer = [in_one(of_trainer, contender, seed)] if contender.name == "shardfn" else []
        return worst([row(contender, seed), *trainer])

    return both
