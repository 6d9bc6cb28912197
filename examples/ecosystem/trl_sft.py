"""TRL: supervised fine-tuning of a language model, by its SFTTrainer.

torchrun --standalone --nproc-per-node 2 -m shardfn.compat examples/ecosystem/trl_sft.py --fsdp 2
"""

from accelerate import FullyShardedDataParallelPlugin
from common import Tells, Told, arguments_of, make_model, on_cpus, options, text
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Train, save, and go on from there."""
    asked, told = options(__doc__), Told()
    arguments = SFTConfig(**arguments_of(asked))
    on_cpus(FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args))
    texts = Dataset.from_dict({"input_ids": [text(number).tolist() for number in range(64)]})
    for begin in (None, str(asked.directory / "checkpoint-4")):
        trainer = SFTTrainer(make_model(), arguments, train_dataset=texts, callbacks=[Tells(told)])
        trainer.train(resume_from_checkpoint=begin)
    told.write(asked)


if __name__ == "__main__":
    main()
