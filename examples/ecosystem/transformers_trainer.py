"""transformers' Trainer: `fsdp` and `fsdp_config` as in its documentation.

torchrun --standalone --nproc-per-node 2 -m shardfn.compat examples/ecosystem/transformers_trainer.py --fsdp 2
"""

from typing import Any

from accelerate import FullyShardedDataParallelPlugin
from common import Tells, Told, arguments_of, make_model, on_cpus, options, text
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Texts(Dataset[dict[str, Any]]):
    """Made-up ones."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": text(index), "labels": text(index)}


def main() -> None:
    """Train, save, and go on from there."""
    asked, told = options(__doc__), Told()
    arguments = TrainingArguments(**arguments_of(asked))
    on_cpus(FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args))
    for begin in (None, str(asked.directory / "checkpoint-4")):
        trainer = Trainer(make_model(), arguments, train_dataset=Texts(), callbacks=[Tells(told)])
        trainer.train(resume_from_checkpoint=begin)
    told.write(asked)


if __name__ == "__main__":
    main()
