"""The main job: train a byte-level decoder on Python's own standard library over a 2 x 2 (fsdp, tp) mesh.

    make train                                                               # set-up, then the next line
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py            # 4 ranks on CPU, about two minutes
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --mesh fsdp=4      # on from the same checkpoints
    torchrun --standalone --nproc-per-node 8 examples/train_lm.py --device cuda      # NCCL

What is the same without sharding is in `lm/`. Stopped at any time, the same command goes on from the last checkpoint.
"""

from argparse import Namespace
from collections.abc import Sequence

import torch
from lm import options, report, text
from lm.model import Decoder, ModelConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf

# What each weight is split on: heads, hidden features and the vocabulary over tp, the residual width over fsdp.
RULES = {
    "emb.weight": "vocab@tp c@fsdp",
    "layers.*.attn.wq.weight": "(heads@tp d) c@fsdp",
    "layers.*.attn.{wk,wv}.weight": "(kv@tp d) c@fsdp",
    "layers.*.attn.wo.weight": "c@fsdp (heads@tp d)",
    "layers.*.mlp.{w1,w3}.weight": "ff@tp c@fsdp",
    "layers.*.mlp.w2.weight": "c@fsdp ff@tp",
    "head.weight": "vocab@tp c@fsdp",
}


def build(run: Namespace, mesh: DeviceMesh) -> sf.Trainer:
    """The trainer of a new model, or of the newest checkpoint, from whatever mesh it was saved on."""
    torch.manual_seed(run.seed)  # equal weights on every mesh
    model = Decoder(ModelConfig(**{name: getattr(run, name) for name in ("dim", "layers", "heads", "kv_heads", "ff")}))
    policy = sf.Policy(rules=RULES, sizes={"d": model.head_dim})
    rate = sf.optim.warmup_cosine(run.lr, run.steps // 10, run.steps, floor=run.lr / 50)
    optimizer = sf.optim.adamw(rate, b2=0.95, weight_decay=0.1)

    def loss_fn(params: sf.Params, inputs: Tensor, targets: Tensor) -> Tensor:
        return sf.cross_entropy(sf.apply(model, params, inputs), targets)

    folder = run.out / "checkpoints"
    return sf.Trainer(model, mesh, policy, optimizer=optimizer, loss_fn=loss_fn, clip=1.0, resume=folder)


def local(batch: tuple[Tensor, Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """This rank's rows of a global batch, on its device; tp neighbours get the same ones."""
    return [x.to(mesh.device_type) for x in sf.data.local_batch(batch, mesh)]


@torch.no_grad()
def sample(trainer: sf.Trainer, run: Namespace, written: bytes = b"def ", temperature: float = 0.8) -> str:
    """Code that the model writes: all ranks compute every byte together and draw it alike."""
    generator = torch.Generator().manual_seed(run.seed)
    for _ in range(run.sample):
        context = torch.tensor([list(written[-run.length :])], device=trainer.mesh.device_type)
        logits = trainer(context)[0, -1].float().cpu()
        written += bytes([int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))])
    return written.decode(errors="replace")


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, then report; return the final losses in nats per byte. Every rank calls this."""
    run = options.parse(argv)
    mesh = sf.make_mesh(run.device, **run.mesh)
    corpus = text.load_corpus(run.text)
    options.open_folder(run, corpus.digest)
    batches = text.Batches(corpus.train, run.batch, run.length, run.seed)
    validation = text.validation_batches(corpus.valid, run.valid, run.batch, run.length)
    bigram = text.bigram_loss(text.bigram_counts(corpus.train), validation)
    trainer = build(run, mesh)
    history, bar = report.History(run.out, trainer, bigram), sf.Progress(run.steps)
    trainer.callbacks += [history, bar]
    try:
        while trainer.steps < run.steps:
            trainer.step(*local(batches(trainer.steps), mesh))
            if trainer.steps % run.every == 0 or trainer.steps == run.steps:
                history.add(valid=float(trainer.evaluate_all(local(x, mesh) for x in validation)["loss"]))
                trainer.save(run.out / "checkpoints", keep=2)
    finally:  # also when it is stopped
        bar.close()
        history.close()
    losses = {"valid": float(trainer.evaluate_all(local(x, mesh) for x in validation)["loss"]), "bigram": bigram}
    history.print_report(losses, sample(trainer, run))
    return losses


if __name__ == "__main__":
    main()
