"""Scripts in the style of torch 1.11 to 2.13, and of hfai, train on our classes as one process trains without them.

Each script in `scripts` imports a class from torch or haiscale and has two ways to reach ours: its import lines are
changed, or the import switch runs it unchanged. Those in the manner of public scripts (`PUBLIC`) run with torch's class
too, and find the same on each rank: losses, norms, and what they saved.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from launch import run_script
from torch import Tensor

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = SCRIPTS.parents[2]
# How far float rounding may move a loss or a weight: two scripts compute in float64, the others in float32.
TOLERANCES = {
    "fsdp_torch_1_11": 1e-9,
    "fsdp_torch_1_13": 1e-9,
    "fsdp_torch_2_0": 1e-4,
    "fsdp_torch_2_13": 1e-4,
    "fsdp_torch_2_13_fully_shard": 1e-4,
    "fsdp2_prefetching": 1e-4,
    "ray_fsdp2": 1e-4,
    "haiscale_gpt": 1e-4,
}
# The others need no reference of one process. Torch's FSDP1 can take norms in float32 only.
PUBLIC = {
    "llama_recipes": 1e-5,
    "t5_summarize": 1e-9,
    "fsdp2_checkpointer": 1e-9,
    "torchtitan_llama": 1e-9,
    "olmo_lion": 1e-9,
    "dinov2_teacher": 1e-5,
    "audiocraft_musicgen": 1e-9,
    "torchtune_lora": 1e-9,
    "lightning_strategy": 1e-5,
    "composer_trainer": 1e-5,
}
WAYS = ["import", "import", "switch", "switch"] * 2
DOORS = {"torch.distributed.fsdp": "shardfn.compat.fsdp1", "haiscale.fsdp": "shardfn.compat.hfai"}
# How processes of torch 2.13 may end on gloo, after everything: scripts of torch alone did in 5 of 27 runs here.
ENDS_BADLY = "terminate called without an active exception"


def _with_our_imports(source: str) -> str:
    """The script with its import lines changed, and nothing else."""
    return "".join(map(_changed_line, source.splitlines(keepends=True)))


def _changed_line(line: str) -> str:
    door = next((door for door in DOORS if line.startswith((f"from {door}", f"import {door}"))), None)
    return line if door is None else line.replace(door, DOORS[door], 1)


def _changed(name: str, folder: Path) -> Path:
    path = folder / f"{name}.py"
    path.write_text(_with_our_imports((SCRIPTS / path.name).read_text()))
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Call with a script's name and a number of ranks: what one process finds with the plain model.

    The copy with changed imports serves here, too: names of old versions are in it, and nothing is wrapped.
    """

    @cache
    def run(name: str, ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        run_script([str(_changed(name, folder)), "--reference", str(ranks), str(folder / "result.pt")], 0, folder)
        return torch.load(folder / "result.pt")

    return run


def _assert_close(found: Any, expected: Any, tolerance: float, where: str) -> None:
    if isinstance(expected, Tensor):
        assert type(found) is Tensor, f"{where}: {type(found)}"
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, dict):
        assert sorted(found) == sorted(expected), where
        for key, value in expected.items():
            _assert_close(found[key], value, tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            _assert_close(found[index], value, tolerance, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(("name", "way"), [*zip(TOLERANCES, WAYS, strict=True)])
def test_script_trains_as_one_process_does(name: str, way: str, tmp_path: Path, reference: Any) -> None:
    """By changed imports, or by `python -m shardfn.compat script.py`; on two ranks, or on four."""
    ranks = 2 + 2 * (list(TOLERANCES).index(name) % 2)
    by_import = [str(_changed(name, tmp_path))]
    script = by_import if way == "import" else ["-m", "shardfn.compat", str(SCRIPTS / f"{name}.py")]
    run_script([*script, str(tmp_path / "result.pt")], ranks, tmp_path)
    _require_right(name, tmp_path, reference(name, ranks))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_script_finds_what_it_does_with_torchs_class(name: str, tmp_path: Path) -> None:
    """Unchanged, then with changed imports."""
    torchs, ours = tmp_path / "torchs", tmp_path / "ours"
    torchs.mkdir()
    ours.mkdir()
    run_script([str(SCRIPTS / f"{name}.py"), "result.pt"], 2, torchs)
    run_script([str(_changed(name, ours)), "result.pt"], 2, ours)
    for rank in range(2):
        expected, found = (torch.load(folder / f"result.pt.{rank}") for folder in (torchs, ours))
        _assert_close(found, expected, PUBLIC[name], f"rank {rank}: ")
        assert {"losses"} < set(expected)


def test_torchrun_starts_a_script(tmp_path: Path, reference: Any) -> None:
    """By itself, in processes that have imported nothing; the others are forked, which is faster."""
    name = "fsdp_torch_2_13_fully_shard"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "shardfn.compat", str(SCRIPTS / f"{name}.py"), str(tmp_path / "result.pt")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    wrote = ENDS_BADLY in done.stderr and (tmp_path / "result.pt").exists()
    assert done.returncode == 0 or wrote, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    _require_right(name, tmp_path, reference(name, 2))


def _require_right(name: str, folder: Path, expected: Any) -> None:
    found = torch.load(folder / "result.pt")
    assert sorted(found) == sorted(expected)
    for what, value in expected.items():
        _assert_close(found[what], value, TOLERANCES[name], what)
    assert expected["losses"][-1] < expected["losses"][0]


FAILS = """
import torch.distributed as dist
dist.init_process_group("gloo")
assert dist.get_rank() != 1, "of rank one"
dist.barrier()
"""


def test_a_script_that_fails_on_one_rank_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(FAILS)
    monkeypatch.setattr(launch, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match="of rank one"):
        run_script([str(tmp_path / "script.py")], 2, tmp_path)


def test_only_import_lines_change() -> None:
    for name in [*TOLERANCES, *PUBLIC]:
        source = (SCRIPTS / f"{name}.py").read_text().splitlines()
        changed = _with_our_imports("\n".join(source)).splitlines()
        lines = [(old, new) for old, new in zip(source, changed, strict=True) if old != new]
        assert lines
        assert all(new == _changed_line(old) and old.startswith(("from ", "import ")) for old, new in lines)
