"""The import switch: what it puts into torch's modules, and takes out again."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp
from torch.distributed.fsdp import fully_sharded_data_parallel, wrap

from shardfn.compat import __main__ as command
from shardfn.compat import fsdp1, switch

SCRIPT = """
import sys
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import default_auto_wrap_policy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
print(FullyShardedDataParallel.__module__, ShardedGradScaler.__module__, sys.argv[1:], __name__)
"""
FOUND = "shardfn.compat.fsdp1.wrapper shardfn.compat.fsdp1.sharded_grad_scaler"


def test_on_and_off() -> None:
    theirs = torch.distributed.fsdp.FullyShardedDataParallel
    switch.on()
    try:
        switch.on()
        assert torch.distributed.fsdp.FullyShardedDataParallel is fsdp1.FullyShardedDataParallel
        assert fully_sharded_data_parallel.FullyShardedDataParallel is fsdp1.FullyShardedDataParallel
        assert hasattr(wrap, "default_auto_wrap_policy")
    finally:
        switch.off()
    assert torch.distributed.fsdp.FullyShardedDataParallel is theirs
    assert fully_sharded_data_parallel.FullyShardedDataParallel is theirs
    assert not hasattr(wrap, "default_auto_wrap_policy")


def _output(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_three_ways_to_turn_it_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "with_import.py").write_text(f"import shardfn.compat.auto\n{SCRIPT}")
    wanted = f"{FOUND} ['a', '--b'] __main__"
    assert _output(tmp_path, "-m", "shardfn.compat", "script.py", "a", "--b") == wanted
    assert _output(tmp_path, "-m", "shardfn.compat", "-m", "script", "a", "--b") == wanted
    assert _output(tmp_path, "with_import.py", "a", "--b") == wanted


@pytest.mark.parametrize(
    ("argv", "match"),
    [([], "usage: python -m shardfn.compat"), (["-m"], "usage"), (["-x"], "usage"), (["no.py"], "no file 'no.py'")],
)
def test_a_command_that_means_nothing(argv: list[str], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        command.main(argv)
