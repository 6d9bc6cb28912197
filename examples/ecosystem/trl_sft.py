"""TRL: supervised fine-tuning of a language model, by its SFTTrainer.

torchrun --standalone --nproc-per-node 2 -m shardfn.compat examples/ecosystem/trl_sft.py --fsdp 2
"""

from accelerate import FullyShardedDataParallelPlugin
from common import VOCABULARY, Tells, Told, arguments_of, make_model, on_cpus, options, text
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number; the texts are tokens already."""
    words = {str(number): number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), unk_token="0", pad_token="0", eos_token="1"
    )


def main() -> None:
    """Train, save, and go on from there."""
    asked, told = options(__doc__), Told()
    arguments = SFTConfig(**arguments_of(asked))
    on_cpus(FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args))
    texts = Dataset.from_dict({"input_ids": [text(number).tolist() for number in range(64)]})
    for begin in (None, str(asked.directory / "checkpoint-4")):
        trainer = SFTTrainer(
            make_model(), arguments, train_dataset=texts, processing_class=make_tokenizer(), callbacks=[Tells(told)]
        )
        trainer.train(resume_from_checkpoint=begin)
    told.write(asked)


if __name__ == "__main__":
    main()
