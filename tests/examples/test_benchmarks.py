"""The benchmarks in `examples/benchmarks/`: rows and ratios, every contender and worker at tiny sizes, the driver."""

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_script

import shardfn as sf
from shardfn.testing import Collectives, run

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))  # as when python starts one of them

collectives, contenders, driver, gpu, host_time, llama, measure, memory, results, step_time, traffic, transforms = (
    importlib.import_module(name)
    for name in (
        "collectives contenders run gpu host_time llama measure memory results step_time traffic transforms".split()
    )
)
Row = results.Row

TINY = "--width 64 --layers 2 --vocab 64 --head 16 --tokens 8 --rounds 3 --warmup 1".split()


def _row(ours: list[float], theirs: list[float], bar: float | None = None) -> Any:
    return Row(what="step", peer="FSDP2", unit="ms", ours=ours, theirs=theirs, bar=bar)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def test_ratio_is_the_median_of_the_rounds() -> None:
    assert _row([1.0, 2.0, 9.0], [2.0, 2.0, 3.0]).quartiles == (0.75, 1.0, 2.0)
    assert _row([3.0], [2.0]).quartiles == (1.5, 1.5, 1.5)


def test_a_bar_is_met_up_to_what_is_shown() -> None:
    assert _row([1.0], [1.0]).met is None
    assert _row([1.004], [1.0], bar=1.0).met is True
    assert _row([1.006], [1.0], bar=1.0).met is False


def test_table_has_figures_ratio_and_bar() -> None:
    lines = results.markdown([_row([1.0, 2.0, 9.0], [2.0, 2.0, 1234.0], 0.5), _row([0.25], [1.0])]).splitlines()
    assert lines[2] == "| step | FSDP2 | 2 ms | 2 ms | 0.50 (0.25 to 0.75) | 0.50 | yes |"
    assert lines[3] == "| step | FSDP2 | 0.25 ms | 1 ms | 0.25 |  |  |"


def test_files_have_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    files = results.save(tmp_path / "out", "bench", [_row([1.0, 2.0], [2.0, 2.0], 0.5)], {"torch": "2"}, "| a |")
    assert [path.name for path in files] == ["bench.json", "bench.md"]
    saved = json.loads(files[0].read_text())
    assert saved["about"] == {"torch": "2"}
    assert saved["rows"][0]["ours"] == [1.0, 2.0]
    assert saved["rows"][0]["met"] is False
    assert files[1].read_text().endswith("| a |\n")


def test_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert results.draw(tmp_path / "bench.png", [_row([1.0, 2.0], [2.0, 2.0], 0.5), _row([1.0], [2.0])])
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def test_every_round_has_every_action_once() -> None:
    calls: list[tuple[int, str]] = []
    actions = {name: lambda round_, name=name: calls.append((round_, name)) for name in "abc"}
    seconds = measure.in_turn(actions, rounds=4, warmup=2)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4, "c": 4}
    assert [sorted(calls[3 * n : 3 * n + 3]) for n in range(6)] == [[(n, name) for name in "abc"] for n in range(6)]
    assert len({tuple(name for _, name in calls[3 * n : 3 * n + 3]) for n in range(6)}) > 1


def test_a_failed_case_is_told_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    row = _row([1.0], [2.0])
    rows, tables, failed = measure.run_cases({"bad": lambda: 1 / 0, "row": lambda: [row], "table": lambda: "| a |"})
    assert (rows, tables, failed) == ([row], ["| a |"], ["bad"])
    assert "division by zero" in capsys.readouterr().err


def test_what_a_worker_said_is_in_the_error() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with [12]:.*unrecognized arguments: --nonsense=1"):
        measure.launch(str(BENCHMARKS / "traffic.py"), 1, {"nonsense": 1})


# ---------------------------------------------------------------------------------------------------------------------
# Workers, on real ranks


def _measure(module: str, argv: Sequence[str]) -> Any:
    """What one rank of a worker finds."""
    script = importlib.import_module(module)
    args = script.read_options(argv)
    mesh = measure.make_mesh(args.mesh)
    return script.measure(args, mesh) if module != "collectives" else script.measure(args)


@pytest.mark.parametrize(
    ("mesh", "names"),
    [("fsdp=2", "shardfn,fsdp2,fsdp1,ddp,floor"), ("fsdp=1,tp=2", "shardfn,tp"), ("fsdp=2,tp=2", "shardfn,fsdp2")],
)
def test_all_contenders_take_the_same_steps(mesh: str, names: str) -> None:
    ranks = 4 if mesh == "fsdp=2,tp=2" else 2
    found = run(_measure, "step_time", [*TINY, "--mesh", mesh, "--contenders", names], ranks=ranks)
    for name in names.split(","):
        assert len(found[0][name]) == 3
        assert min(found[0][name]) > 0


def test_other_losses_are_refused() -> None:
    step_time.require_equal_losses({"a": [1.0, 2.0], "b": [1.0005, 2.0]})
    with pytest.raises(SystemExit, match="the losses of round 1 differ"):
        step_time.require_equal_losses({"a": [1.0, 2.0], "b": [1.0, 2.01]})


def test_the_floor_moves_what_the_plan_moves() -> None:
    job = contenders.Job(width=64, layers=3, vocab=64, head=16)
    plan = sf.plan(contenders.make_model(job), sf.MeshSpec(fsdp=4), sf.Policy())
    assert step_time.received_bytes(job, ranks=4) == plan.comm_bytes


@pytest.mark.parametrize("contender", ["shardfn", "fsdp2"])
def test_memory_is_measured(contender: str) -> None:
    peaks = run(_measure, "memory", [*TINY, "--steps", "2", "--contender", contender], ranks=2)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("contender", "ranks"), [("shardfn", 2), ("shardfn", 1), ("torch", 1)])
def test_memory_of_a_loss_is_measured(contender: str, ranks: int, dtype: str) -> None:
    options = ["--vocab", "64", "--tokens", "16", "--mesh", f"tp={ranks}", "--dtype", dtype, "--contender", contender]
    peaks = run(_measure, "loss", options, ranks=ranks)
    assert len(set(peaks)) == 1


def test_memory_floor_counts_shards_units_and_what_autograd_saves() -> None:
    job = contenders.Job(width=64, layers=4, vocab=32, head=16, tokens=8, meta=True)
    model = contenders.make_model(job)
    layer = 4 * sum(param.numel() for param in model.layers[0].parameters())
    total = 4 * sum(param.numel() for param in model.parameters())
    assert memory.floor_bytes(job, ranks=2) == 2 * total / 2 + 3 * layer
    saved = memory.floor_bytes(job, ranks=1000) - total / 1000 - 3 * layer
    assert 4 * 8 * 64 * 4 * 10 < saved < 4 * 8 * 64 * 4 * 40  # 4 layers keep some tens of [8 tokens, 64] each


def test_traffic_is_no_less_than_the_least() -> None:
    found = run(_measure, "traffic", TINY, ranks=2)[0]
    assert found["bytes"] >= found["least bytes"] > 0
    assert found["collectives"] > 0


def test_a_soak_counts_what_stays() -> None:
    found = run(_measure, "soak", [*TINY, "--steps", "6"], ranks=2)[0]
    assert found["threads after"] >= found["threads before"] > 1
    assert found["files before"] > 2 and abs(found["bytes"]) < 2**26


def test_received_bytes_follow_from_what_is_offered() -> None:
    offered = {
        "all_gather": 10,
        "reduce_scatter": 40,
        "all_to_all": 40,
        "all_reduce": 4,
        "send": 9,
        "receive": 7,
        "other": 0,
    }
    assert traffic.received_bytes(Collectives(bytes_of=offered), ranks=4) == 30 + 30 + 30 + 6 + 7


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ways_to_move_a_bucket_move_it(ranks: int) -> None:
    found = run(_measure, "collectives", ["--kib", "64", "--rounds", "2", "--warmup", "0"], ranks=ranks)[0]
    assert set(found["64"]) == set(collectives.WAYS)


def _move_wrongly(verb: str) -> None:
    bucket = collectives.Bucket(1024)
    way = next(name for name in collectives.WAYS if name.startswith(verb))
    collectives.WAYS[way](bucket)
    (bucket.whole if verb == "gather" else bucket.reduced)[0, 0] += 1
    with pytest.raises(SystemExit, match="wrong values"):
        bucket.check(way)


@pytest.mark.parametrize("verb", ["gather", "reduce"])
def test_wrong_values_are_found(verb: str) -> None:
    run(_move_wrongly, verb, ranks=2)


# ---------------------------------------------------------------------------------------------------------------------
# Fake ranks, the driver


def test_host_time_is_measured_on_fake_ranks() -> None:
    (row,) = host_time.run_mesh("fsdp=16,tp=4", quick=True)
    assert len(row.ours) == len(row.theirs) == 2
    rows = host_time.run_adamw(quick=True)
    assert [row.peer for row in rows][1:] == ["on plain local tensors"]
    assert min(x for row in rows for x in (*row.ours, *row.theirs)) > 0


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a process that has imported torch; those of the first test above are not."""

    def launch(script: str, ranks: int, options: Mapping[str, Any], environ: object = None) -> Any:
        run_script(measure.worker(script, options, tmp_path / "found.json"), ranks, tmp_path)
        return json.loads((tmp_path / "found.json").read_text())

    for module in (transforms, llama, traffic):
        monkeypatch.setattr(module, "launch", launch)


@pytest.mark.usefixtures("forked")
def test_transforms_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = transforms.run_transforms(transforms.SIZES | measure.QUICK, "2 ranks")
    assert [row.what for row in rows] == [f"{what}, 2 ranks" for what in transforms.NAMES.values()]
    assert all(min(*row.ours, *row.theirs) > 0 for row in rows)
    monkeypatch.setattr(transforms, "NAMES", dict(list(transforms.NAMES.items())[:1]))
    memory_of = transforms.run_memory(transforms.SIZES | measure.QUICK, "2 ranks")
    assert len(memory_of) == 1 and all(min(*row.ours, *row.theirs) > 0 for row in memory_of)


@pytest.mark.usefixtures("forked")
def test_the_driver_makes_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver.main(["--quick", "--only", "bytes", "gpu", "--out", str(tmp_path)])
    shown = capsys.readouterr()
    assert "| bytes received in a step, 2 ranks, width 512 | least |" in shown.out
    assert "of 3 bars met" in shown.out
    assert torch.cuda.is_available() or "no CUDA device" in shown.err
    assert json.loads((tmp_path / "quick.json").read_text())["about"]["torch"] == torch.__version__


def test_every_group_has_cases_of_its_own() -> None:
    for quick in (False, True):
        names = [name for group in driver.GROUPS.values() for name in group(quick)]
        assert len(names) == len(set(names))


@pytest.mark.usefixtures("forked")
def test_ways_to_split_a_llama_train_alike() -> None:
    """The worker fails where losses differ."""
    rows = llama.run_step(quick=True)
    assert [row.peer for row in rows] == ["parallelize_module + fully_shard", "transformers' own", "without"]
