"""What a `Trainer` goes on with: where it was, how many samples it had, random numbers, loaders of each rank."""

import gc
import io
import random
import shutil
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drawing import untyped
from torch import Tensor, nn

import shardfn as sf
from shardfn import watch
from shardfn.testing import run, run_raises


class Loader:
    """A loader with a state: of each rank its own, unless it is `alike`."""

    def __init__(self, alike: bool = False) -> None:
        self.at, self.seen = 0, torch.zeros(0, dtype=torch.int64)
        self.step = 1 if alike else dist.get_rank() + 1

    def __next__(self) -> Tensor:
        self.at += self.step
        self.seen = torch.cat([self.seen, torch.tensor([self.at])])
        return torch.full((2 * self.step, 4), float(self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": self.seen, "name": f"of {self.step}", "empty": torch.zeros(0, 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["name"] == f"of {self.step}" and state["empty"].shape == (0, 3)
        self.at, self.seen = state["at"], state["seen"]


def _trainer(ranks: int, **more: Any) -> sf.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1)).double()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return sf.apply(model, params, x.double()).square().mean()

    mesh = sf.make_mesh("cpu", fsdp=ranks)
    trainer = sf.Trainer(model, mesh, optimizer=sf.optim.adamw(0.1), loss_fn=loss_fn, src=0, ema=0.9, **more)
    torch.manual_seed(dist.get_rank())
    return trainer


def _draws() -> tuple[Any, ...]:
    gauss = random.gauss(0, 1), np.random.standard_normal()  # of which two are made at once
    return *gauss, random.random(), np.random.rand(), float(torch.rand(()))


def _goes_on(path: str) -> None:
    """A run of 3 + 2 steps, and one that is ended after 3 and begun again: equal to the bit, drawn numbers too."""
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    first, loader = _trainer(2), Loader()
    for _ in range(3):
        first.step(next(loader))
    _draws()
    first.save(path, loader=loader)
    losses = [first.step(next(loader))["loss"] for _ in range(2)]
    drawn, samples = _draws(), first.samples
    assert first.steps == 5 and loader.seen.tolist() == [n * loader.step for n in range(1, 6)]

    random.seed(9)
    np.random.seed(9)
    with warnings.catch_warnings(action="ignore"):  # of the loader, which is asked for below
        again = _trainer(2, resume=path)
    assert again.steps == 3 and again.samples == 3 * (2 + 4)
    other = Loader()
    again.load(path, loader=other)
    assert [again.step(next(other))["loss"] for _ in range(2)] == losses
    assert _draws() == drawn and other.seen.equal(loader.seen) and again.samples == samples
    for name, leaf in first.params.items():
        assert leaf.to_local().equal(again.params[name].to_local()), name


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    run(_goes_on, str(tmp_path), ranks=2)


def _begins(path: str) -> None:
    trainer = _trainer(2, resume=path)
    assert trainer.steps == 0 and trainer.samples == 0
    trainer.step(torch.ones(3, 4))
    assert trainer.samples == 6
    trainer.save(path)
    assert trainer.samples == 6


def test_resume_begins_where_there_is_nothing(tmp_path: Path) -> None:
    run(_begins, str(tmp_path / "nothing yet"), ranks=2)


def _loads_on(path: str, ranks: int) -> tuple[int, int]:
    with warnings.catch_warnings(record=True, action="always") as seen:
        trainer = _trainer(ranks, resume=path)
    said = " ".join(str(each.message) for each in seen)
    assert ("random states of 2 ranks, and 1 are here, which keep their own" in said) == (ranks == 1), said
    return trainer.steps, trainer.samples


def test_samples_go_to_other_ranks(tmp_path: Path) -> None:
    run(_begins, str(tmp_path), ranks=2)
    assert run(_loads_on, str(tmp_path), 1, ranks=1) == [(1, 6)]


def _saves_loader(path: str, alike: bool) -> None:
    trainer, loader = _trainer(2), Loader(alike)
    trainer.step(next(loader))
    trainer.save(path, loader=loader)


def _loads_loader(path: str, alike: bool, ranks: int) -> int:
    loader = Loader(alike)
    with warnings.catch_warnings(action="ignore"):  # of random states
        _trainer(ranks).load(path, loader=loader)
    return loader.at


def test_a_state_that_is_the_same_on_all_ranks_goes_to_any_number(tmp_path: Path) -> None:
    run(_saves_loader, str(tmp_path), True, ranks=2)
    assert run(_loads_loader, str(tmp_path), True, 3, ranks=3) == [1, 1, 1]


def test_one_of_each_rank_does_not(tmp_path: Path) -> None:
    run(_saves_loader, str(tmp_path), False, ranks=2)
    match = "the state of 'loader' is that of each of 2 ranks, and 1 are here; load it without loader="
    run_raises(sf.ShardError, _loads_loader, str(tmp_path), False, 1, match=match, ranks=1)
    assert run(_loads_loader, str(tmp_path), False, 2, ranks=2) == [1, 2]


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1)).load(tmp_path)


class Refuses(Loader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not mine")
        super().load_state_dict(state)


def _refuses_on_a_rank(path: str) -> None:
    trainer = _trainer(2)
    trainer.step(torch.ones(2, 4))
    trainer.save(path, loader=Loader())
    trainer.step(torch.ones(2, 4))
    state = torch.get_rng_state()
    try:
        trainer.load(path, loader=Refuses())
    finally:
        assert trainer.steps == 2 and torch.get_rng_state().equal(state)


def test_a_loader_that_refuses_on_a_rank_is_an_error_of_all(tmp_path: Path) -> None:
    errors = run_raises(ValueError, _refuses_on_a_rank, str(tmp_path), match="not mine", ranks=2)
    assert "rank 1 of [1] failed, so no rank goes on" in errors[0]


def _of_two_dtypes(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).bfloat16())
    trainer = sf.Trainer(model, sf.make_mesh("cpu", fsdp=2), sf.Policy())
    made = [torch.optim.AdamW(trainer.parameters(), 0.1) for _ in range(2)]
    for parameter in trainer.parameters():
        parameter.grad = torch.ones_like(parameter)
    made[0].step()
    trainer.save(path, optimizer=made[0])
    trainer.load(path, optimizer=made[1])
    for one, other in zip(*(optimizer.state.values() for optimizer in made), strict=True):
        assert one["exp_avg"].dtype == other["exp_avg"].dtype and one["exp_avg"].to_local().equal(
            other["exp_avg"].to_local()
        )


def test_an_optimizer_of_two_dtypes(tmp_path: Path) -> None:
    run(_of_two_dtypes, str(tmp_path), ranks=2)


def test_what_is_kept_is_in_the_directory_that_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1))
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        for trainer.steps in (1, 2):
            trainer.save(tmp_path / place / "run")
    monkeypatch.chdir(tmp_path / "a")
    trainer.steps = 3
    saving = trainer.save("run", keep=1, async_=True)
    monkeypatch.chdir(tmp_path / "b")
    saving.wait()
    assert [x.name for x in (tmp_path / "a" / "run").iterdir()] == ["step-00000003"]
    assert len([*(tmp_path / "b" / "run").iterdir()]) == 2


def test_what_cannot_be_kept_is_an_error_before_anything_is_saved(tmp_path: Path) -> None:
    trainer = sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1))
    for wrong in ({"keep": 0}, {"keep": 1.5}, {"keep": "1"}, {"keep": 1, "keep_every": 0}):
        with pytest.raises(sf.ShardError, match=r"keeps nothing, nor this one; write keep(_every)?=1 or more"):
            trainer.save(tmp_path / "run", **untyped(wrong))
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    with pytest.raises(sf.ShardError, match="is a file; give a checkpoint"):
        sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1), resume=tmp_path / "file")


def _saves_apart(path: str) -> None:
    first, loader = _trainer(2), Loader()
    first.step(next(loader))
    mine = sf.checkpoint.LocalDirectory(f"{path}/{dist.get_rank()}")
    with pytest.raises(sf.ShardError, match="mean nothing to a LocalDirectory"):
        first.save(mine, keep=1)
    assert first.save(mine, loader=loader) is mine
    dist.barrier()
    if dist.get_rank() == 0:
        for rank in range(2):
            shutil.copytree(f"{path}/{rank}", f"{path}/whole", dirs_exist_ok=True)
    dist.barrier()
    again, other = _trainer(2), Loader()
    again.load(f"{path}/whole", loader=other)
    assert again.steps == 1 and again.samples == 2 + 4
    torch.manual_seed(dist.get_rank())
    went_on = first.step(next(loader))["loss"]
    torch.manual_seed(dist.get_rank())
    assert again.step(next(other))["loss"] == went_on


def test_each_rank_may_save_where_it_alone_is(tmp_path: Path) -> None:
    run(_saves_apart, str(tmp_path), ranks=2)


def test_an_average_that_nobody_asks_for_is_told(tmp_path: Path) -> None:
    mesh = sf.make_mesh("cpu", fsdp=1)
    adamw = sf.optim.adamw(0.1)
    sf.Trainer(nn.Linear(2, 2), mesh, optimizer=adamw, ema=0.9).save(tmp_path)
    with pytest.warns(UserWarning, match="'ema.bias' is in it and was not asked for"):
        sf.Trainer(nn.Linear(2, 2), mesh, optimizer=adamw, resume=tmp_path)


def test_other_generators_of_numpy_are_an_error(tmp_path: Path) -> None:
    trainer, numbers = sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1)), untyped(np.random)
    own = numbers.get_bit_generator()
    numbers.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(sf.ShardError, match="NumPy's global generator is none of its own kind"):
            trainer.save(tmp_path / "run")
    finally:
        numbers.set_bit_generator(own)
    trainer.save(tmp_path / "run")


def _saves_something_else_on_a_rank(path: str) -> None:
    more = {"log": Loader(alike=True)} if dist.get_rank() == 0 else {}
    _trainer(2).save(path, **untyped(more))


def test_ranks_that_save_other_states_are_an_error(tmp_path: Path) -> None:
    match = r"ranks differ: rank 0 has the states \['log'\]; rank 1 has the states \[\]"
    run_raises(sf.ShardError, _saves_something_else_on_a_rank, str(tmp_path), match=match, ranks=2)


def _ends(trainer: sf.Trainer) -> str:
    """SIGTERM came to a rank: what the step prints."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(watch, "asked_to_stop", lambda _: True)
        with pytest.raises(SystemExit) as stopped:
            trainer.step(torch.ones(2, 4))
    assert stopped.value.code == 75
    return printed.getvalue()


def _end(path: str) -> list[str]:
    """What is printed where another trainer would resume, too, and where none would."""
    one, other = _trainer(2, resume=f"{path}/one"), _trainer(2, resume=f"{path}/other")
    said = [_ends(one)]
    assert not Path(path, "other").exists() and other.steps == 0
    del one, other
    gc.collect()
    one = _trainer(2, resume=f"{path}/one")
    assert one.steps == 1
    return [*said, _ends(one)]


def test_a_line_says_which_trainer_is_saved_at_the_end(tmp_path: Path) -> None:
    (two, alone), others = run(_end, str(tmp_path), ranks=2)
    for said, step in ((two, 1), (alone, 2)):
        assert f"saved '{tmp_path}/one/step-{step:08}', and all ranks end with status 75" in said
    assert "other Trainers with resume= were not" in two and "other" not in alone.replace(str(tmp_path), "")
    assert others == ["", ""]
