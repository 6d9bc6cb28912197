"""What a step reports of itself, and `Progress`, which shows it."""

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.stateful import progress
from shardfn.stateful.progress import Clock
from shardfn.testing import on_meshes


def _trainer(optimizer: Any, *callbacks: Any, mesh: DeviceMesh | None = None) -> sf.Trainer:
    model = nn.Linear(4, 1)
    mesh = mesh if mesh is not None else sf.make_mesh("cpu", fsdp=1)

    def loss_fn(params: sf.Params, x: torch.Tensor) -> torch.Tensor:
        return sf.apply(model, params, x).square().mean()

    return sf.Trainer(model, mesh, optimizer=optimizer, loss_fn=loss_fn, callbacks=callbacks, src=0)


def _halved(step: int) -> float:
    return 0.5**step


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        (sf.optim.adamw(_halved), [1.0, 0.5, 0.25]),
        (sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.sgd(_halved)), [1.0, 0.5, 0.25]),
        (sf.optim.chain(sf.optim.sgd(0.1), sf.optim.schedule(_halved)), [0.1, 0.05, 0.025]),
        (sf.optim.masked(sf.optim.lion(_halved), "weight"), [1.0, 0.5, 0.25]),
        (sf.optim.from_torch(torch.optim.AdamW, lr=_halved), [1.0, 0.5, 0.25]),
        (sf.optim.from_torch(torch.optim.AdamW), [1e-3] * 3),
        (sf.optim.chain(sf.optim.clip_by_global_norm(1.0)), [None] * 3),
    ],
)
def test_a_step_reports_the_rate_of_its_update(optimizer: Any, rates: list[float | None]) -> None:
    trainer = _trainer(optimizer)
    assert [trainer.step(torch.ones(2, 4))["lr"] for _ in rates] == rates


def test_time_between_steps_counts_and_evaluations_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    clock, seconds = Clock(), []
    for before, within in ((5.0, 1.0), (2.0, 3.0)):
        now[0] += before  # the first time before a step is that of the set-up
        clock.begin()
        now[0] += within
        seconds.append(clock.seconds())
    clock.pause()
    now[0] += 100.0
    clock.begin()
    now[0] += 1.0
    assert [*seconds, clock.seconds()] == [1.0, 5.0, 1.0]


def test_what_is_no_step_pauses_the_clock(tmp_path: Path) -> None:
    trainer = _trainer(sf.optim.sgd(0.1))
    for act in (lambda: trainer.evaluate(torch.ones(2, 4)), lambda: trainer.save(tmp_path)):
        trainer.step(torch.ones(2, 4))
        assert trainer._clock._last is not None
        act()
        assert trainer._clock._last is None


def test_lines_where_nobody_looks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []

    def more(trainer: sf.Trainer, out: dict[str, Any]) -> str:
        shown.append(trainer.steps)
        return f"{trainer.samples} samples"

    trainer = _trainer(sf.optim.sgd(0.25), sf.Progress(4, more=more))
    trainer.step(torch.zeros(2, 4))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    trainer.step(torch.zeros(2, 4))
    monkeypatch.setattr(progress, "_PAUSE", 1000.0)
    for _ in range(3):  # the last one is beyond the end
        trainer.step(torch.zeros(2, 4))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"] and shown == [2, 4]
    assert lines[-1].endswith("tokens/s  lr 0.25  8 samples")


def test_a_bar_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    bars: list[Any] = []

    class Bar(tqdm.tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trainer = _trainer(sf.optim.sgd(0.25), sf.Progress(5))
    trainer.steps = 2  # it goes on
    for _ in range(3):
        trainer.step(torch.ones(2, 4))
    (bar,) = bars
    assert (bar.n, bar.total, bar.disable) == (5, 5, True), "closed when it is full"
    assert "tokens/s  lr 0.25" in bar.postfix


@on_meshes({"fsdp": 2})
def test_one_rank_shows_it(mesh: DeviceMesh) -> None:
    trainer, shown = _trainer(sf.optim.sgd(0.1), sf.Progress(1), mesh=mesh), io.StringIO()
    with redirect_stdout(shown):
        trainer.step(torch.ones(2, 4))
    assert shown.getvalue().startswith("step 1/1  loss") == (mesh.get_rank() == 0)
