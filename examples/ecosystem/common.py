"""What the scripts of this folder share: a small Llama, made-up texts, arguments, and what they found."""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

VOCABULARY, LENGTH = 64, 16


def make_model() -> LlamaForCausalLM:
    """Two layers, the same on every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def text(number: int) -> Tensor:
    """Tokens `[LENGTH]`, each one more than the one before, modulo something."""
    first, step = number % 7 + 1, number % 5 + 1
    return (first + step * torch.arange(LENGTH)) % (VOCABULARY - 1) + 1


def batches(first: int, last: int, rank: int, ranks: int, size: int = 4) -> Iterator[Tensor]:
    """What a rank has in each of some steps: `[size, LENGTH]`."""
    for step in range(first, last):
        begin = (step * ranks + rank) * size
        yield torch.stack([text(number) for number in range(begin, begin + size)])


def on_cpus(plugin: FullyShardedDataParallelPlugin) -> Accelerator:
    """The first `Accelerator` decides for all that follow, and on CPUs it takes DDP, plugin or not.

    On GPUs this is not needed.
    """
    accelerator = Accelerator(cpu=True)
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


class Told:
    """Losses and norms, for who compares two runs."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def step(self, *numbers: Any) -> None:
        """Those of a step."""
        self.rows.append([float(number) for number in numbers])

    def write(self, asked: argparse.Namespace) -> None:
        """Into a file of each rank."""
        rank = os.environ["RANK"]
        told = {"class": fully_shard.__module__, "rows": self.rows}
        (asked.directory / f"told.{rank}.json").write_text(json.dumps(told))
        if rank == "0":
            print(f"{told['class']}: loss {self.rows[0][0]:.3f} -> {self.rows[-1][0]:.3f}")


def options(about: str | None) -> argparse.Namespace:
    """`fsdp`, `directory`, and how many `ranks` there are."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", type=int, choices=(1, 2), default=2, help="1: FullyShardedDataParallel")
    parser.add_argument("--directory", type=Path, default=Path("runs/ecosystem"), help="for checkpoints")
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    asked.ranks = int(os.environ["WORLD_SIZE"])
    return asked


def arguments_of(asked: argparse.Namespace) -> dict[str, Any]:
    """For `TrainingArguments`."""
    return {
        "output_dir": str(asked.directory),
        "max_steps": 8,
        "save_steps": 4,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "fsdp": True,
        "fsdp_config": {
            "version": asked.fsdp,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "sync_module_states": asked.fsdp == 1 and torch.accelerator.is_available(),  # which accelerate wants for it
        },
    }


class Tells(TrainerCallback):
    """Keeps what a Trainer logs."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """A step."""
        if "loss" in logs:
            self._told.step(logs["loss"], logs["grad_norm"])
