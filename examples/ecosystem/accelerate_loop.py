"""Accelerate: `prepare(model, optimizer, ...)`, then a loop as ever.

    torchrun --standalone --nproc-per-node 2 -m shardfn.compat examples/ecosystem/accelerate_loop.py --fsdp 2

On GPUs `accelerate launch` with a config, or `Accelerator(fsdp_plugin=...)`, is all there is to it.
"""

from accelerate import FullyShardedDataParallelPlugin
from common import Told, batches, make_model, on_cpus, options
from torch.optim import AdamW


def main() -> None:
    """Train, save, and go on from there."""
    asked, told = options(__doc__), Told()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=asked.fsdp,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        use_orig_params=True,
    )
    accelerator = on_cpus(plugin)  # on GPUs: Accelerator(fsdp_plugin=plugin)
    model = make_model()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))

    def train(first: int, last: int) -> None:
        for ids in batches(first, last, accelerator.process_index, asked.ranks):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            told.step(loss.detach(), norm)

    train(0, 4)
    accelerator.save_state(str(asked.directory / "step-4"))
    train(4, 8)
    accelerator.load_state(str(asked.directory / "step-4"))
    train(4, 8)
    told.write(asked)
    accelerator.end_training()


if __name__ == "__main__":
    main()
