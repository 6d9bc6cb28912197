"""Runs that save in a loop and are killed at a random moment: nothing that was acknowledged is lost, or torn.

    python tests/slow/kills.py                 # 60 kills
    python tests/slow/kills.py 200 --seed 7    # any number

A run of one or two ranks trains nothing: after step n all numbers of its tree are n. It begins where the newest
checkpoint left off, saves, and acknowledges each save on a pipe, to a new directory each time or over the same one, in
the background or not.
SIGKILL hits one rank or all of them; one that is left has to end with an error by itself. What is loaded then is at
least the last step that was acknowledged, whole, and the next run goes on from it: over all kills of a seed it is one
directory, with all that dead runs have left in it.

Half of the runs train, by a `Trainer(resume=)` with dropout, AdamW and an average: where one goes on, each rank has to
the bit what it has at that step in a run that nobody disturbed.
"""

import argparse
import hashlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardfn as sf

PATIENCE = 20.0  # seconds in which the rank that is left ends
SIZE = 50_000  # numbers of the largest leaf: a save takes some milliseconds


def tree_of(step: int, mesh: Any) -> dict[str, Any]:
    """A tree whose numbers are all the same."""
    model = nn.Sequential(nn.Linear(SIZE // 10, 10), nn.Linear(10, 3))
    filled = sf.tree.map(lambda x: torch.full_like(x, step), sf.shard(model, mesh, sf.Policy()))
    return {"params": filled, "step": step, "plain": torch.full((7,), float(step))}


def _begin(rank: int, ranks: int, store: str) -> None:
    if ranks > 1:
        shared: Any = vars(dist)["FileStore"](store, ranks)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks, timeout=timedelta(seconds=10))


def saves(rank: int, ranks: int, folder: Path, store: str, overwrite: bool, async_: bool, acknowledge: int) -> None:
    """What one rank of a run does, until it is killed."""
    _begin(rank, ranks, store)
    mesh = sf.make_mesh("cpu", fsdp=ranks)
    torch.manual_seed(0)
    last, step = sf.checkpoint.latest(folder), 0
    if last is not None:
        step = sf.checkpoint.load(last, tree_of(0, mesh))["step"]
    while True:
        step += 1
        name = "step-00000000" if overwrite else f"step-{step:08d}"
        done = sf.checkpoint.save(folder / name, tree_of(step, mesh), overwrite=overwrite, async_=async_)
        if async_:
            done.wait()
        if rank == 0:
            os.write(acknowledge, step.to_bytes(4, "little"))


LAST = 150  # a run that trains has so many steps
OTHER_BITS = 2**31  # what one says that does not go on where it was


def trains(rank: int, ranks: int, folder: Path, store: str, known: Path, async_: bool, acknowledge: int) -> None:
    """What one rank of a run does that trains, until it is killed; without a directory it notes what it has."""
    _begin(rank, ranks, store)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (sf.apply(model, params, x) - x.sum(1, keepdim=True)).square().mean()

    mesh = sf.make_mesh("cpu", fsdp=ranks)
    resume = None if folder == known else folder
    torch.manual_seed(rank)
    trainer = sf.Trainer(
        model, mesh, optimizer=sf.optim.adamw(0.01), loss_fn=loss_fn, src=0, ema=0.9, clip=1.0, resume=resume
    )
    if resume is not None and trainer.steps:
        at_that_step = (known / f"{ranks}-{rank}").read_text().split()[trainer.steps - 1]
        if _digest(trainer) != at_that_step:
            os.write(acknowledge, OTHER_BITS.to_bytes(4, "little"))
    while trainer.steps < LAST:
        trainer.step(torch.sin(torch.arange(12.0).view(3, 4) + 3.0 * trainer.samples + rank) + 0.1 * torch.randn(3, 4))
        if resume is None:
            with (known / f"{ranks}-{rank}").open("a") as file:
                file.write(f"{_digest(trainer)}\n")
            continue
        done = trainer.save(folder, keep=2, async_=async_)
        if async_:
            done.wait()
        if rank == 0:
            os.write(acknowledge, trainer.steps.to_bytes(4, "little"))


def _digest(trainer: sf.Trainer) -> str:
    """The hash of what this rank has."""
    state = trainer.optimizer_state
    parts = [x for tree in (trainer.params, trainer.ema, state.mu, state.nu) for x in (tree or {}).values()]
    data = [x.detach().to_local().numpy().tobytes() for x in parts] + [torch.get_rng_state().numpy().tobytes()]
    return hashlib.sha256(b"".join(data)).hexdigest()


def undisturbed() -> Path:
    """What each rank of runs of one and two has after each step."""
    known = Path(tempfile.mkdtemp())
    for ranks in (1, 2):
        store = tempfile.mktemp()
        pids = [_forked(trains, rank, ranks, known, store, known, False, 0) for rank in range(ranks)]
        for pid in pids:
            os.waitpid(pid, 0)
    return known


def one_kill(
    draw: random.Random, folder: Path, overwrite: bool, acknowledged: int, known: Path | None = None, ranks: int = 0
) -> tuple[str, int]:
    """Begin a run, kill it: (what came of it, the step that is there)."""
    ranks, alone, async_ = ranks or draw.choice((1, 2)), draw.random() < 0.5, draw.random() < 0.5
    reading, writing = os.pipe()
    store = tempfile.mktemp()
    run, how = (saves, overwrite) if known is None else (trains, known)
    pids = [_forked(run, rank, ranks, folder, store, how, async_, writing) for rank in range(ranks)]
    os.close(writing)
    time.sleep(draw.uniform(0.05, 0.6) if ranks == 1 else draw.uniform(0.2, 1.2))
    victims = [draw.choice(pids)] if alone else pids
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    outcome = "ended" if _all_end(pids) else "HANG"
    while select.select([reading], [], [], 0)[0] and (data := os.read(reading, 4)):
        if (said := int.from_bytes(data, "little")) == OTHER_BITS:
            outcome = "OTHER BITS"
        else:
            acknowledged = said
    os.close(reading)
    path, found = sf.checkpoint.latest(folder), 0
    if path is not None and known is not None:
        sf.checkpoint.verify(path)
        found = int(path.name[5:])
    elif path is not None:
        blank = {"params": {"0": {"weight": torch.empty(10, SIZE // 10)}}, "step": 0, "plain": torch.empty(7)}
        sf.checkpoint.verify(path)
        read = sf.checkpoint.load(path, blank, unexpected="ignore")
        found = read["step"]
        if not all((x == found).all() for x in (read["plain"], *read["params"]["0"].values())):
            return "TORN", found
    return outcome if found >= acknowledged else f"LOST {acknowledged}, {found} is there", found


def _forked(run: Any, *args: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            run(*args)
        finally:
            os._exit(1)
    return pid


def _all_end(pids: Sequence[int]) -> bool:
    """Whether all processes end, within the time that they have."""
    until, left = time.monotonic() + PATIENCE, set(pids)
    while left and time.monotonic() < until:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == pid}
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not left


def kills(count: int, seed: int, seconds: float = float("inf")) -> Counter[str]:
    """What came of so many kills, or of as many as there are in so many seconds."""
    draw, outcomes = random.Random(seed), Counter[str]()
    steps = {tempfile.mkdtemp(): 0 for _ in range(4)}  # new names, and the same one; one rank that trains, and two
    known, begin = undisturbed(), time.monotonic()
    for _ in range(count):
        if time.monotonic() - begin > seconds:
            break
        which = draw.randrange(4)
        folder = [*steps][which]
        training = (known, which - 1) if which > 1 else (None, 0)
        outcome, steps[folder] = one_kill(draw, Path(folder), which == 1, steps[folder], *training)
        outcomes[outcome] += 1
        for old in sorted(Path(folder).glob("step-*"))[:-2]:
            shutil.rmtree(old)
        if which > 1 and steps[folder] > LAST - 50:  # another run
            shutil.rmtree(folder)
            Path(folder).mkdir()
            steps[folder] = 0
    for folder in (*steps, known):
        shutil.rmtree(folder)
    return outcomes


def main() -> int:
    """Print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "checkpoint.load: ignored")  # which is asked for
    torch.set_num_threads(1)  # ranks are forked, and a pool of threads that has begun does not go on in them
    outcomes = kills(options.count, options.seed, options.seconds)
    print(dict(outcomes))
    return 0 if set(outcomes) <= {"ended"} else 1


if __name__ == "__main__":
    sys.exit(main())
