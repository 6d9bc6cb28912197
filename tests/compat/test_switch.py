"""The import switch: what it puts into torch's modules, and takes out again."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.fsdp

from shardfn.compat import __main__ as command
from shardfn.compat import fsdp1, fsdp2, switch
from shardfn.compat.fsdp1 import _runtime_utils, sharded_grad_scaler, wrap

SCRIPT = """
import sys
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import default_auto_wrap_policy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
print(FullyShardedDataParallel.__module__, ShardedGradScaler.__module__, sys.argv[1:], __name__)
"""
FOUND = "shardfn.compat.fsdp1.wrapper shardfn.compat.fsdp1.sharded_grad_scaler"


FSDP1 = ("FullyShardedDataParallel",)
FSDP2 = ("fully_shard", "FSDPModule", "register_fsdp_forward_method")
POLICIES = ("default_auto_wrap_policy", "ConfigAutoWrap", "ParamExecOrderWrapPolicy")
PUT: tuple[tuple[str, ModuleType, tuple[str, ...]], ...] = (
    ("fsdp", fsdp1, FSDP1),
    ("fsdp", fsdp2, (*FSDP2, "share_comm_ctx")),
    ("fsdp.fully_sharded_data_parallel", fsdp1, FSDP1),
    ("fsdp._fully_shard", fsdp2, (*FSDP2, "share_comm_ctx")),
    ("fsdp._fully_shard._fully_shard", fsdp2, (*FSDP2, "share_comm_ctx")),
    ("_composable.fsdp", fsdp2, (*FSDP2, "share_comm_ctx")),
    ("_composable.fsdp.fully_shard", fsdp2, FSDP2),
    ("fsdp.wrap", wrap, POLICIES),
    ("fsdp.sharded_grad_scaler", sharded_grad_scaler, ("ShardedGradScaler",)),
    ("fsdp._runtime_utils", _runtime_utils, ("_lazy_init",)),
)


def _found() -> dict[tuple[str, str], Any]:
    """What torch's modules have under the names that are ours while the switch is on; None where there is nothing."""
    modules = ((path, importlib.import_module(f"torch.distributed.{path}"), names) for path, _, names in PUT)
    return {(path, name): getattr(module, name, None) for path, module, names in modules for name in names}


def test_on_and_off() -> None:
    ours = {(path, name): getattr(module, name) for path, module, names in PUT for name in names}
    theirs = _found()
    assert not any(theirs[key] is ours[key] for key in ours)
    switch.on()
    try:
        switch.on()
        assert _found() == ours
    finally:
        switch.off()
    assert _found() == theirs
    assert not hasattr(importlib.import_module("torch.distributed.fsdp.wrap"), "default_auto_wrap_policy")


def _output(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_a_script_is_run_with_the_switch_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])
    try:
        command.main([str(tmp_path / "script.py"), "a"])
        assert sys.path[0] == str(tmp_path)
    finally:
        switch.off()
    assert capsys.readouterr().out.strip() == f"{FOUND} ['a'] __main__"


@pytest.mark.slow
@pytest.mark.everyday(1)
def test_two_more_ways_to_turn_it_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "with_import.py").write_text(f"import shardfn.compat.auto\n{SCRIPT}")
    wanted = f"{FOUND} ['a', '--b'] __main__"
    assert _output(tmp_path, "-m", "shardfn.compat", "-m", "script", "a", "--b") == wanted
    assert _output(tmp_path, "with_import.py", "a", "--b") == wanted


@pytest.mark.parametrize(
    ("argv", "match"),
    [([], "usage: python -m shardfn.compat"), (["-m"], "usage"), (["-x"], "usage"), (["no.py"], "no file 'no.py'")],
)
def test_a_command_that_means_nothing(argv: list[str], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        command.main(argv)


SPAWNS = """
import multiprocessing

def found(queue):
    from torch.distributed.fsdp import FullyShardedDataParallel
    queue.put(FullyShardedDataParallel.__module__)

if __name__ == "__main__":
    for way in ("spawn", "forkserver"):
        context = multiprocessing.get_context(way)
        queue = context.Queue()
        process = context.Process(target=found, args=(queue,))
        process.start()
        print(queue.get(timeout=600))
        process.join()
"""


@pytest.mark.slow
def test_processes_that_a_script_spawns(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWNS)
    assert _output(tmp_path, "-m", "shardfn.compat", "script.py").split() == ["shardfn.compat.fsdp1.wrapper"] * 2


DOORS = """
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed._composable.fsdp import fully_shard as old
from torch.distributed.fsdp._fully_shard import fully_shard as private
from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard as inner
from torch.distributed._composable.fsdp.fully_shard import fully_shard as older
from hfai.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel as ours
from hfai.distributed.fsdp.warp import size_based_auto_wrap_policy
from hfai.distributed.fsdp.wrap import size_based_auto_wrap_policy as same
from haiscale.fsdp import FullyShardedDataParallel as haiscale
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.distributed import TorchFullyShardedDataParallel as other
import hfai.distributed as dist
import torch.distributed
assert fully_shard is old is private and ours is haiscale and same is size_based_auto_wrap_policy
assert TorchFullyShardedDataParallel is other and dist.get_world_size is torch.distributed.get_world_size
print(fully_shard.__module__, ours.__module__, TorchFullyShardedDataParallel.__module__, FSDPModule.__module__)
"""


@pytest.mark.slow
def test_every_door(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DOORS)
    found = _output(tmp_path, "-m", "shardfn.compat", "script.py").split()
    assert found == [
        "shardfn.compat.fsdp2.fully_sharded",
        "shardfn.compat.hfai.wrapper",
        "shardfn.compat.megatron",
        "shardfn.compat.fsdp2.fully_sharded",
    ]


def test_doors_are_closed_again() -> None:
    theirs = torch.distributed.fsdp.fully_shard
    switch.on()
    try:
        assert importlib.import_module("haiscale.fsdp").BackwardPrefetch is torch.distributed.fsdp.BackwardPrefetch
        assert torch.distributed.fsdp.fully_shard is fsdp2.fully_shard
        assert importlib.util.find_spec("megatron.core.models") is None
    finally:
        switch.off()
    assert torch.distributed.fsdp.fully_shard is theirs
    for name in ("haiscale", "haiscale.fsdp", "hfai", "megatron"):
        assert name not in sys.modules and importlib.util.find_spec(name.split(".")[0]) is None


LATE = """
from hfai.distributed.fsdp import FullyShardedDataParallel as theirs
import shardfn.compat.auto
from hfai.distributed.fsdp import FullyShardedDataParallel as ours
from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap
from torch.distributed.checkpoint import state_dict
print(theirs, ours.__module__, state_dict.FSDP.__module__, optimizer_overlap.FullyShardedDataParallel.__module__)
"""


@pytest.mark.slow
def test_on_after_a_door_was_imported_and_before_what_knows_the_classes(tmp_path: Path) -> None:
    """An installed hfai's class is found no more; parts of torch that look at its class keep that."""
    folder = tmp_path / "hfai" / "distributed" / "fsdp"
    folder.mkdir(parents=True)
    for inside in (folder.parents[1], folder.parent):
        (inside / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("FullyShardedDataParallel = 'theirs'\n")
    (tmp_path / "script.py").write_text(LATE)
    torchs = "torch.distributed.fsdp.fully_sharded_data_parallel"
    assert _output(tmp_path, "script.py").split() == ["theirs", "shardfn.compat.hfai.wrapper", torchs, torchs]


@pytest.mark.slow
def test_an_installed_package_keeps_its_other_modules(tmp_path: Path) -> None:
    folder = tmp_path / "megatron" / "core" / "distributed"
    folder.mkdir(parents=True)
    for inside in (folder.parents[1], folder.parent, folder):
        (inside / "__init__.py").write_text("")
    (folder.parent / "other.py").write_text("VALUE = 3\n")
    (folder / "__init__.py").write_text(
        "from .torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel\n"
    )
    (folder / "torch_fully_sharded_data_parallel.py").write_text("raise AssertionError\n")
    (tmp_path / "script.py").write_text(
        "from megatron.core.distributed import TorchFullyShardedDataParallel\nfrom megatron.core.other import VALUE\n"
        "print(TorchFullyShardedDataParallel.__module__, VALUE)\n"
    )
    assert _output(tmp_path, "-m", "shardfn.compat", "script.py") == "shardfn.compat.megatron 3"


def test_names_that_were_imported_before_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.__dict__.update(shard_it=torch.distributed.fsdp.fully_shard, fully_shard=fsdp2.fully_shard)
    monkeypatch.setitem(sys.modules, "__main__", script)
    try:
        with pytest.warns(UserWarning, match=r"stay torch's: shard_it\. Import shardfn.compat.auto first"):
            switch.on()
    finally:
        switch.off()
