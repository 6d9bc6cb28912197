"""Runs of a `Trainer` that save, keep some of what they have saved, and go on from it, by a model of the directory."""

import shutil
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from drawing import Turn, hold_in_turn
from hypothesis import strategies as st
from torch import nn

import shardfn as sf
from shardfn.checkpoint import directories

SHARE = 0.1  # of the usual number of examples


@dataclass(frozen=True)
class Saved:
    """A save after so many steps, and what stays."""

    steps: int
    keep: int | None
    every: int | None


@dataclass(frozen=True)
class Loaded:
    """Going on from the newest checkpoint, or from the last but one whose newest is damaged."""

    damaged: bool


@dataclass(frozen=True)
class Run:
    """What a run on so many ranks does in a directory, after another one."""

    ranks: int
    does: tuple[Saved | Loaded, ...]
    before: tuple[Saved | Loaded, ...] = ()


SAVES = st.builds(Saved, st.integers(0, 7), st.none() | st.integers(1, 3), st.none() | st.integers(1, 4))
DOES = st.lists(st.one_of(SAVES, SAVES, st.builds(Loaded, st.booleans())), min_size=1, max_size=6).map(tuple)
RANKS = st.sampled_from([1, 2, 3])


@st.composite
def runs(draw: st.DrawFn) -> tuple[Run, Run]:
    first = Run(draw(RANKS), draw(DOES))
    return first, Run(draw(RANKS), draw(DOES), before=first.does)


class Model:
    """What must be in a directory: the number of each step's checkpoint, and which are damaged."""

    def __init__(self, does: Sequence[Saved | Loaded]) -> None:
        self.there: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.count = 0
        for each in does:
            self.after(each)

    def after(self, does: Saved | Loaded) -> None:
        self.count += 1
        if isinstance(does, Saved):
            self.there[does.steps] = self.count
            self.damaged.discard(does.steps)
            old = sorted(step for step in self.there if step <= does.steps)[: -does.keep] if does.keep else []
            for step in old:
                if does.every is None or step % does.every:
                    del self.there[step]
        elif does.damaged and self.there:
            self.damaged.add(max(self.there))
        self.damaged &= self.there.keys()

    @property
    def newest(self) -> int | None:
        """The step from which a run goes on."""
        return max(self.there.keys() - self.damaged, default=None)


def trees_of(trainer: sf.Trainer) -> list[sf.Params]:
    state, average = trainer.optimizer_state, trainer.ema
    assert average is not None
    return [trainer.params, state.mu, state.nu, average]


def filled(trainer: sf.Trainer, number: int) -> None:
    """Every number of its parameters, of its optimizer and of its average is the same."""
    for tree in trees_of(trainer):
        for leaf in tree.values():
            with torch.no_grad():
                leaf.fill_(number)


def number_of(trainer: sf.Trainer) -> int:
    """It; none but one."""
    found = {x for tree in trees_of(trainer) for value in sf.gather(tree).values() for x in value.flatten().tolist()}
    assert len(found) == 1, found
    return int(found.pop())


def damage(checkpoint: Path) -> None:
    """Change a byte of every file with numbers."""
    for file in checkpoint.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def goes_on(trainer: sf.Trainer, where: Path, model: Model) -> None:
    """From the newest that is whole, and if there is none not at all."""
    if model.newest is not None:
        path = trainer.load(where)
        assert path.name == directories.STEP.format(model.newest) and trainer.steps == model.newest
        assert number_of(trainer) == model.there[model.newest]
    else:
        with pytest.raises(sf.checkpoint.Damaged if model.there else FileNotFoundError):
            trainer.load(where)


def a_run_in_a_directory(folder: str, turn: Turn) -> None:
    run: Run = turn.case
    where, model = Path(folder) / str(turn.number), Model(run.before)
    mesh, net = sf.make_mesh("cpu", fsdp=run.ranks), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    trainer = sf.Trainer(net, mesh, optimizer=sf.optim.adamw(0.1), ema=0.9)
    for does in run.does:
        model.after(does)
        if isinstance(does, Saved):
            trainer.steps = does.steps
            filled(trainer, model.count)
            later = max(model.there) > does.steps and dist.get_rank() == 0
            with pytest.warns(UserWarning, match="of a later step") if later else nullcontext():
                path = trainer.save(where, keep=does.keep, keep_every=does.every)
            assert directories.is_checkpoint(path)
        else:
            if dist.get_rank() == 0 and does.damaged and model.there and max(model.there) not in already(where):
                damage(where / directories.STEP.format(max(model.there)))
            dist.barrier()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that one is damaged
                goes_on(trainer, where, model)
        assert [int(path.name[5:]) for path in directories.steps(where)] == sorted(model.there, reverse=True)
        dist.barrier()


def already(where: Path) -> set[int]:
    """The steps whose checkpoints are damaged: another change might make them whole again."""
    found = set[int]()
    for path in directories.steps(where):
        try:
            sf.checkpoint.verify(path)
        except sf.checkpoint.Damaged:
            found.add(int(path.name[5:]))
    return found


@pytest.mark.law("P10")
def test_runs_go_on_from_what_they_keep(tmp_path: Path) -> None:
    law = partial(a_run_in_a_directory, str(tmp_path))
    hold_in_turn([law, law], runs(), share=SHARE)
    shutil.rmtree(tmp_path)
