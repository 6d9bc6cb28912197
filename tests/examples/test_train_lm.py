"""The main job `examples/train_lm.py`: its text, batches, baseline, model; then the whole of it on four ranks."""

import importlib
import importlib.util
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.testing import RankError, run, run_raises

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # as when torchrun starts it

model = importlib.import_module("lm.model")
report = importlib.import_module("lm.report")
options = importlib.import_module("lm.options")
text = importlib.import_module("lm.text")
train_lm = importlib.import_module("train_lm")

RAMP = torch.arange(1000).remainder(251).to(torch.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def _write_sources(root: Path, count: int = 60) -> None:
    for number in range(count):
        path = root / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def f{number}(x):\n    return x + {number}\n" * 8)


def test_every_file_is_on_exactly_one_side(tmp_path: Path) -> None:
    _write_sources(tmp_path)
    corpus = text.load_corpus(tmp_path)
    train, valid = (bytes(side.tolist()) for side in (corpus.train, corpus.valid))
    for relative in text.source_files(tmp_path):
        source = (tmp_path / relative).read_bytes()
        assert (source in valid, source in train) == (text.is_validation(relative), not text.is_validation(relative))
    sizes = [(tmp_path / name).stat().st_size + 1 for name in text.source_files(tmp_path)]
    assert len(train) + len(valid) == sum(sizes)


def test_split_depends_on_the_relative_path_alone(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        _write_sources(tmp_path / name)
    assert text.load_corpus(tmp_path / "here").digest == text.load_corpus(tmp_path / "there").digest
    (tmp_path / "there" / "package0" / "module0.py").write_text("changed = True\n")
    assert text.load_corpus(tmp_path / "here").digest != text.load_corpus(tmp_path / "there").digest


def test_split_is_the_same_in_every_process() -> None:
    assert [number for number in range(60) if text.is_validation(f"m{number}.py")] == [6, 31]


def test_skipped_folders_are_left_out(tmp_path: Path) -> None:
    for folder in ("json", "site-packages/numpy", "json/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    assert text.source_files(tmp_path) == ["json/a.py"]


def test_too_little_text_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"too few.*{tmp_path}"):
        text.load_corpus(tmp_path)


def test_the_standard_library_is_there() -> None:
    corpus = text.load_corpus()
    assert len(corpus.train) > 1_000_000
    assert 0.02 < len(corpus.valid) / len(corpus.train) < 0.25
    assert b"def main(" in bytes(corpus.train.tolist())


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def test_targets_are_the_next_bytes() -> None:
    inputs, targets = text.Batches(RAMP, batch=4, length=9)(11)
    assert inputs.shape == targets.shape == (4, 9)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs[:, -1] + 1) % 251, targets[:, -1])


def test_an_epoch_visits_every_window_once() -> None:
    batches = text.Batches(torch.arange(121).to(torch.uint8), batch=3, length=10)
    for epoch in range(3):
        firsts = torch.cat([batches(epoch * 4 + step)[0][:, 0] for step in range(4)])
        assert sorted(firsts.tolist()) == list(range(0, 120, 10))
    assert not torch.equal(batches(0)[0], batches(4)[0])


def test_batches_depend_on_step_and_seed_alone() -> None:
    before = [text.Batches(RAMP, 4, 7, seed=1)(step)[0] for step in range(80)]
    torch.manual_seed(99)
    after = text.Batches(RAMP.clone(), 4, 7, seed=1)
    assert all(torch.equal(after(step)[0], before[step]) for step in reversed(range(80)))
    assert not torch.equal(text.Batches(RAMP, 4, 7, seed=2)(0)[0], before[0])


def test_validation_windows_are_spread_and_whole() -> None:
    batches = text.validation_batches(RAMP, windows=9, batch=4, length=7)
    assert [tuple(x.shape) for x, _ in batches] == [(4, 7), (4, 7)]
    assert batches[0][0][0, 0] == RAMP[0]
    assert batches[-1][1][-1, -1] == RAMP[-1]
    with pytest.raises(ValueError, match="3 windows of 7 by 4"):
        text.validation_batches(RAMP, windows=3, batch=4, length=7)


def _local_rows(argv: list[str]) -> tuple[int, list[list[int]]]:
    """Which part of the data this rank has, and its inputs."""
    given = options.parse(argv)
    mesh = sf.make_mesh("cpu", **given.mesh)
    return sf.data.rank(mesh)[0], train_lm.local(text.Batches(RAMP, given.batch, 7)(3), mesh)[0].tolist()


@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tp=2", "tp=4"])
def test_data_ranks_share_out_the_batch_and_tp_neighbours_have_the_same(mesh: str) -> None:
    rows = run(_local_rows, ["--mesh", mesh, "--batch", "8"])
    parts = dict(rows)
    assert all(part == parts[index] for index, part in rows)
    whole = text.Batches(RAMP, 8, 7)(3)[0].tolist()
    assert [row for _, part in sorted(parts.items()) for row in part] == whole


# ---------------------------------------------------------------------------------------------------------------------
# Bigram table


def test_bigram_loss_is_what_counting_by_hand_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    train, valid = (torch.randint(0, 5, (length,), generator=generator).to(torch.uint8) for length in (300, 90))
    batches = text.validation_batches(valid, windows=4, batch=2, length=20)
    pairs = list(zip(train.tolist(), train.tolist()[1:], strict=False))
    nats = []
    for x, y in batches:
        for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True):
            nats.append(-math.log((pairs.count((a, b)) + 0.5) / (sum(first == a for first, _ in pairs) + 0.5 * 256)))
    loss = text.bigram_loss(text.bigram_counts(train), batches, smoothing=0.5)
    assert loss == pytest.approx(sum(nats) / len(nats), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Model


def test_logits_have_the_shape_of_the_text() -> None:
    decoder = model.Decoder(model.ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ff=48))
    assert decoder(torch.zeros(3, 11, dtype=torch.long)).shape == (3, 11, 256)


def test_the_future_does_not_reach_the_past() -> None:
    torch.manual_seed(0)
    decoder = model.Decoder(model.ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ff=48))
    tokens = torch.randint(0, 256, (2, 12))
    changed = torch.cat((tokens[:, :7], (tokens[:, 7:] + 1) % 256), dim=1)
    before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax() > 1e-3


def test_attention_sees_order_but_not_absolute_position() -> None:
    angles = model.rotary_angles(9, 8, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 9, 8)
    scores = model.rotate(q, angles)[0, 0] @ model.rotate(k, angles)[0, 0].T
    torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:])
    assert (scores[0, 0] - scores[1, 0]).abs() > 1e-3


def test_half_the_heads_alone_are_half_the_sum() -> None:
    """What tensor parallelism relies on: attention with its first heads plus attention with the others is all of it."""
    torch.manual_seed(0)
    config = model.ModelConfig(dim=32, heads=4, kv_heads=2)
    whole, x, angles = model.Attention(config), torch.randn(2, 5, 32), model.rotary_angles(5, 8, torch.device("cpu"))
    total = torch.zeros_like(x)
    for half in (0, 1):
        part = model.Attention(config)
        for name in ("wq", "wk", "wv"):
            getattr(part, name).weight = torch.nn.Parameter(getattr(whole, name).weight.chunk(2)[half])
        part.wo.weight = torch.nn.Parameter(whole.wo.weight.chunk(2, dim=1)[half])
        total = total + part(x, angles)
    torch.testing.assert_close(total, whole(x, angles))


@pytest.mark.parametrize("sizes", [{"dim": 30, "heads": 4}, {"dim": 12, "heads": 4}, {"heads": 8, "kv_heads": 3}])
def test_sizes_that_do_not_fit_raise(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"heads="):
        model.ModelConfig(**sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Report


def test_history_forgets_what_the_checkpoint_has_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    assert report.read_history(path, 5) == []
    records = [{"step": step, "loss": 1.0 / step} for step in range(1, 9)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with path.open("a") as file:
        file.write('{"step": 9, "lo')
    assert report.read_history(path, 6) == records[:6]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()[:8]] == list(range(1, 9))


def test_curve_falls_as_the_losses_do() -> None:
    lines = report.curve([4.0, 3.0, 2.0, 1.0], width=2, height=3).splitlines()
    assert lines == [" 3.50 |*", " 2.50 |", " 1.50 | *"]
    assert report.curve([float("nan")]) == "(no losses)"
    assert report.curve([2.0, 2.0]).count("*") == 2


# ---------------------------------------------------------------------------------------------------------------------
# The whole of it, tiny


def _job(out: Path, *more: str) -> list[str]:
    """Options of a run of six steps with a checkpoint every second one, on the sources beside its folder."""
    tiny = "--dim 32 --layers 2 --heads 4 --kv-heads 4 --ff 48 --batch 8 --length 16 --valid 16 --sample 6"
    steps = "--steps 6 --every 2 --lr 0.01"
    return [*tiny.split(), *steps.split(), "--text", str(out.parent / "sources"), "--out", str(out), *more]


def _losses(out: Path) -> list[dict[str, Any]]:
    return report.read_history(out / "losses.jsonl", 1000)


def _die_in_step(number: int, argv: list[str]) -> None:
    """Run the job; rank 1 ends without a word when step `number` begins."""
    step = sf.Trainer.step

    def dying_step(trainer: sf.Trainer, *batch: Any) -> dict[str, Any]:
        if trainer.steps == number - 1 and os.environ["RANK"] == "1":
            os._exit(1)
        return step(trainer, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sf.Trainer, "step", dying_step)
        train_lm.main(argv)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on 2 x 2 that nothing disturbed."""
    out = tmp_path_factory.mktemp("lm") / "run"
    (out.parent / "sources").mkdir()
    _write_sources(out.parent / "sources")
    run(train_lm.main, _job(out))
    return out


def _copy(finished: Path, name: str, last: int) -> Path:
    """A folder of its own that looks as if the run had been stopped after the checkpoint of step `last`."""
    out = finished.parent / name
    shutil.copytree(finished, out)
    for path in (out / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > last:
            shutil.rmtree(path)
    return out


@pytest.mark.slow
def test_a_run_leaves_losses_checkpoints_and_pictures(finished: Path) -> None:
    records = _losses(finished)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "valid" in record] == [2, 4, 6]
    assert records[0]["loss"] > records[-1]["loss"]
    assert sorted(path.name[-1] for path in (finished / "checkpoints").iterdir()) == ["4", "6"]
    assert "ff@tp c@fsdp" in (finished / "layout.txt").read_text()
    if importlib.util.find_spec("matplotlib"):
        for name in ("losses.png", "layout.png"):
            assert (finished / name).read_bytes().startswith(b"\x89PNG")


def test_a_killed_run_goes_on_as_if_nothing_had_happened(finished: Path) -> None:
    out = finished.parent / "killed"
    with pytest.raises(RankError):
        run(_die_in_step, 6, _job(out))
    pictures = ["layout.png", "losses.png"] if report.can_draw() else []
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == sorted(
        ["layout.txt", "losses.jsonl", "run.json", *pictures]
    )
    assert [record["step"] for record in _losses(out)][:4] == [1, 2, 3, 4]
    run(train_lm.main, _job(out))
    assert _losses(out) == _losses(finished)


@pytest.mark.slow
@pytest.mark.everyday(1)
@pytest.mark.parametrize("mesh", ["fsdp=4", "tp=4"])
def test_a_checkpoint_goes_on_on_another_mesh(finished: Path, mesh: str) -> None:
    out = _copy(finished, f"on {mesh}", last=4)
    results = run(train_lm.main, _job(out, "--mesh", mesh))
    assert all(result == results[0] for result in results)
    assert _losses(out)[:4] == _losses(finished)[:4]
    for record, expected in zip(_losses(out)[4:], _losses(finished)[4:], strict=True):
        assert record == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_finished_run_only_reports(finished: Path) -> None:
    out = _copy(finished, "again", last=6)
    results = run(train_lm.main, _job(out))
    assert results[0]["valid"] == _losses(finished)[-1]["valid"]
    assert _losses(out) == _losses(finished)


@pytest.mark.slow
def test_fresh_starts_over(finished: Path) -> None:
    out = _copy(finished, "fresh", last=6)
    run(train_lm.main, _job(out, "--fresh", "--steps", "2", "--seed", "1"))
    assert [record["step"] for record in _losses(out)] == [1, 2]


def test_another_model_in_the_same_folder_raises_on_every_rank(finished: Path) -> None:
    run_raises(ValueError, train_lm.main, _job(finished, "--ff", "64"), match="ff was 48, is 64.*--fresh")


def test_mesh_is_read_with_both_axes() -> None:
    assert options.parse_mesh("fsdp=4") == {"fsdp": 4, "tp": 1}
    assert options.parse_mesh("fsdp=-1,tp=2") == {"fsdp": -1, "tp": 2}


@pytest.mark.parametrize("value", ["dp=4", "fsdp", "fsdp=0", "fsdp=2,tp=x", ""])
def test_mesh_that_means_nothing_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--mesh", value])
    assert "is not fsdp=N or tp=N" in capsys.readouterr().err


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    shown = capsys.readouterr().out
    for option in ("--device", "--mesh", "--out", "--fresh", "--steps", "--every", "--sample"):
        assert option in shown


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    report.draw_curve(tmp_path / "losses.png", [{"step": 1, "loss": 2.0}], bigram=2.4)
    assert not report.can_draw() and not list(tmp_path.iterdir())
