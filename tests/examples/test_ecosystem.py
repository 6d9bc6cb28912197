"""`examples/ecosystem`: Fabric, accelerate, transformers' Trainer and TRL, on our classes and on torch's.

Losses and norms of each step, what they find after going on from a checkpoint, and every tensor of the checkpoints are
the same.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from drawing import untyped
from launch import run_script
from torch import Tensor
from torch.distributed.checkpoint import format_utils
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.utils import _pytree as pytree

SCRIPTS = Path(__file__).parents[2] / "examples" / "ecosystem"
TOLERANCE = 1e-6
OURS, TORCHS = ["-m", "shardfn.compat"], [str(Path(__file__).with_name("on_cpus.py"))]


def _found(how: list[str], script: str, fsdp: int, directory: Path) -> list[dict[str, Any]]:
    """What each of two ranks has told."""
    directory.mkdir()
    run_script([*how, str(SCRIPTS / script), "--fsdp", str(fsdp), "--directory", str(directory)], 2, directory)
    return [json.loads((directory / f"told.{rank}.json").read_text()) for rank in range(2)]


def _saved(directory: Path, scratch: Path) -> dict[str, Any]:
    """Checkpoint -> path in it -> what is there, of all that torch.distributed.checkpoint has written."""
    found = {}
    for metadata in sorted(directory.rglob(".metadata")):
        format_utils.dcp_to_torch_save(metadata.parent, scratch)
        leaves = pytree.tree_leaves_with_path(torch.load(scratch, weights_only=False))
        found[str(metadata.parent.relative_to(directory))] = {pytree.keystr(path): leaf for path, leaf in leaves}
    return found


@pytest.mark.eco
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("script", ["fabric.py", "accelerate_loop.py", "transformers_trainer.py", "trl_sft.py"])
def test_a_recipe_finds_what_it_does_with_torchs_class(script: str, fsdp: int, tmp_path: Path) -> None:
    torchs, ours = (_found(how, script, fsdp, tmp_path / name) for how, name in ((TORCHS, "torchs"), (OURS, "ours")))
    for expected, found in zip(torchs, ours, strict=True):
        assert expected["class"].startswith("torch.") and found["class"].startswith("shardfn.")
        assert len(found["rows"]) == 12
        torch.testing.assert_close(torch.tensor(found["rows"]), torch.tensor(expected["rows"]), rtol=TOLERANCE, atol=0)
    expected, found = (_saved(tmp_path / name, tmp_path / "scratch") for name in ("torchs", "ours"))
    assert found.keys() == expected.keys() and found
    for checkpoint, leaves in expected.items():
        assert found[checkpoint].keys() == leaves.keys()
        for path, leaf in leaves.items():
            if isinstance(leaf, Tensor):
                where = f"{checkpoint}: {path}"
                torch.testing.assert_close(
                    found[checkpoint][path], leaf, rtol=1e-5, atol=1e-6, msg=lambda m, where=where: f"{where}: {m}"
                )


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_reads_the_file_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    page = (SCRIPTS.parents[1] / "docs" / "howto" / "ecosystem.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    if version == 1:
        text = text.replace("fsdp_version: 2", "fsdp_version: 1").replace("forward: true", "forward: FULL_SHARD")
    (tmp_path / "fsdp.yaml").write_text(text)
    script = ["-m", "shardfn.compat", "train.py"]
    arguments = launch_command_parser().parse_args(["--config_file", str(tmp_path / "fsdp.yaml"), *script])
    arguments, *_ = untyped(_validate_launch_command)(arguments)
    assert (arguments.module, arguments.training_script) == (True, script[1])
    for name, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "false")  # which the first version wants a GPU for
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.transformer_cls_names_to_wrap) == (version, ["LlamaDecoderLayer"])
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.sharding_strategy == (ShardingStrategy.FULL_SHARD if version == 1 else None)
