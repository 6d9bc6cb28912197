"""The FSDP2 workflow example, on ours and on torch's `fully_shard`, resumed on other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_script

from shardfn.testing import assert_close, assert_trees_close

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "fsdp2" / "train.py"


def _run(script: Path, folder: Path, ranks: int, *options: str) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "model.pt").unlink(missing_ok=True)
    run_script([str(script), "--out", str(folder), *options], ranks, folder)
    return torch.load(folder / "model.pt")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _run(EXAMPLE, tmp_path_factory.mktemp("one"), 1)


def test_trains_as_one_process(tmp_path: Path, one_process: Any) -> None:
    found = _run(EXAMPLE, tmp_path, 2)
    assert_close(torch.tensor(found["losses"]), torch.tensor(one_process["losses"]), rtol=0, atol=1e-4)
    assert_trees_close(found["model"], one_process["model"], rtol=0, atol=1e-4)
    assert found["losses"][-1] < found["losses"][0]


def test_goes_on_with_other_ranks(tmp_path: Path, one_process: Any) -> None:
    on_four = _run(EXAMPLE, tmp_path, 4, "--steps", "5")
    found = _run(EXAMPLE, tmp_path, 2)
    assert len(found["losses"]) == 5
    assert_close(torch.tensor(on_four["losses"]), torch.tensor(one_process["losses"][:5]), rtol=0, atol=1e-4)
    assert_close(torch.tensor(found["losses"]), torch.tensor(one_process["losses"][5:]), rtol=0, atol=1e-4)
    assert_trees_close(found["model"], one_process["model"], rtol=0, atol=1e-4)


def test_checkpoints_of_torch_load_and_ours_load_there(tmp_path: Path, one_process: Any) -> None:
    theirs = tmp_path / "theirs.py"
    theirs.write_text(
        EXAMPLE.read_text().replace("from shardfn.compat.fsdp2 import", "from torch.distributed.fsdp import")
    )
    for first, then, folder in ((theirs, EXAMPLE, tmp_path / "a"), (EXAMPLE, theirs, tmp_path / "b")):
        _run(first, folder, 2, "--steps", "5")
        found = _run(then, folder, 2)
        assert_close(torch.tensor(found["losses"]), torch.tensor(one_process["losses"][5:]), rtol=0, atol=1e-4)
        assert_trees_close(found["model"], one_process["model"], rtol=0, atol=1e-4)


def test_lower_precision(tmp_path: Path) -> None:
    found = _run(EXAMPLE, tmp_path, 2, "--bf16")
    assert found["losses"][-1] < found["losses"][0]
    assert all(value.dtype == torch.float32 for value in found["model"].values())
