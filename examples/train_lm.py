"""The main job: train a byte-level decoder on Python's own standard library over a 2 x 2 (fsdp, tp) mesh.

    make train                                                               # set-up, then the next line
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py            # 4 ranks on CPU, about two minutes
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --mesh fsdp=4      # on from the same checkpoints
    torchrun --standalone --nproc-per-node 8 examples/train_lm.py --device cuda      # NCCL

`lm/` holds what is the same without sharding: the model, the text, the report. What shardfn does is in this file:
`RULES` says how each weight is laid out, `build` makes a `Trainer` of model, mesh and rules, `train` calls its step.
Killed at any time, the same command goes on from the last checkpoint, with the bytes that come next.
"""

import argparse
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from lm import report, text
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
PROMPT, TEMPERATURE = b"def ", 0.8
CHECKPOINTS_KEPT = 2
# A checkpoint goes on only under the settings that decide what its weights mean and which bytes come next.
SETTINGS = ("dim", "layers", "heads", "kv_heads", "ff", "batch", "length", "seed")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--help` prints them with their defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, sizes = parser.add_argument, ModelConfig()

    def number(flag: str, default: float, what: str) -> None:
        add(flag, type=type(default), default=default, help=f"{what} (default: %(default)s)")

    add("--device", default="cpu", choices=("cpu", "cuda"), help="gloo on CPU (default), NCCL on CUDA")
    add("--mesh", type=parse_mesh, default="fsdp=-1,tp=2", help="axis sizes, -1: all ranks left (default: %(default)s)")
    add("--out", type=Path, default=Path("runs/lm"), help="folder of all it writes (default: %(default)s)")
    add("--fresh", action="store_true", help="delete the checkpoints in --out and start over")
    add("--text", type=Path, help="folder of *.py files (default: Python's own standard library)")
    number("--dim", sizes.dim, "width of the residual stream")
    number("--layers", sizes.layers, "number of blocks")
    number("--heads", sizes.heads, "query heads")
    number("--kv-heads", sizes.kv_heads, "key and value heads")
    number("--ff", sizes.ff, "hidden features of SwiGLU")
    number("--steps", 250, "optimizer steps in all")
    number("--batch", 32, "windows in one step, over all ranks")
    number("--length", 64, "bytes in a window")
    number("--lr", 5e-3, "peak learning rate: up over a tenth of the steps, then down on a cosine")
    number("--seed", 0, "of the weights, the batches and the sample")
    number("--every", 50, "steps from one checkpoint and validation to the next")
    number("--valid", 256, "windows of validation text")
    number("--sample", 200, "bytes of code to generate at the end")
    with redirect_stdout(sys.stdout if os.environ.get("RANK", "0") == "0" else io.StringIO()):  # --help, once
        return parser.parse_args(argv)


def parse_mesh(value: str) -> dict[str, int]:
    """Read `fsdp=2,tp=2`; an axis that is left out has one rank, so that the rules hold on every mesh."""
    axes = {"fsdp": 1, "tp": 1}
    for part in value.split(","):
        name, _, size = part.partition("=")
        if name not in axes or not re.fullmatch(r"-1|[1-9]\d*", size):
            raise argparse.ArgumentTypeError(f"{part!r} is not fsdp=N or tp=N")
        axes[name] = int(size)
    return axes


@dataclass(frozen=True)
class Job:
    """One run on one mesh: what every function below works on."""

    options: argparse.Namespace
    mesh: DeviceMesh
    corpus: text.Corpus
    trainer: sf.Trainer
    bigram: float  # nats per byte of the table that the model has to beat

    @property
    def rank0(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.mesh.get_rank() == 0

    def local(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a global batch, on its device; tp neighbours get the same ones."""
        inputs, targets = sf.data.local_batch(batch, self.mesh)
        return inputs.to(self.mesh.device_type), targets.to(self.mesh.device_type)


# ---------------------------------------------------------------------------------------------------------------------
# What calls shardfn


def build(options: argparse.Namespace, mesh: DeviceMesh) -> sf.Trainer:
    """Return the trainer of a new model: equal weights on every mesh, since they come from the seed alone."""
    torch.manual_seed(options.seed)
    sizes = {name: getattr(options, name) for name in ("dim", "layers", "heads", "kv_heads", "ff")}
    model = Decoder(ModelConfig(**sizes))

    def loss_fn(params: sf.Params, inputs: Tensor, targets: Tensor) -> Tensor:
        return sf.cross_entropy(sf.apply(model, params, inputs), targets)

    policy = sf.Policy(rules=RULES, sizes={"d": model.head_dim})
    rate = sf.optim.warmup_cosine(options.lr, options.steps // 10, options.steps, floor=options.lr / 50)
    optimizer = sf.optim.adamw(rate, b2=0.95, weight_decay=0.1)
    return sf.Trainer(model, mesh, policy, optimizer=optimizer, loss_fn=loss_fn, clip=1.0)


def train(job: Job) -> list[report.Record]:
    """Go on from the last checkpoint to `--steps`; return a record of every step since the very first one."""
    options, trainer = job.options, job.trainer
    batches = text.Batches(job.corpus.train, options.batch, options.length, options.seed)
    records = resume(job)
    bar = sf.Progress(options.steps)
    trainer.callbacks.append(bar)
    try:
        while trainer.steps < options.steps:
            out = trainer.step(*job.local(batches(trainer.steps)))
            records.append({"step": trainer.steps, "loss": float(out["loss"])})
            if trainer.steps % options.every == 0 or trainer.steps == options.steps:
                records[-1]["valid"] = validate(job)
                save(job, records)
    finally:  # also when it is stopped
        bar.close()
        if job.rank0 and records:
            report.draw_curve(options.out / "losses.png", records, job.bigram)
    return records


def validate(job: Job) -> float:
    """Return the mean loss over the validation windows, each data rank computing its rows of every batch."""
    return float(job.trainer.evaluate_all(map(job.local, validation(job.corpus, job.options)))["loss"])


def validation(corpus: text.Corpus, options: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Return the validation windows, the same for the model and for the table it is compared with."""
    return text.validation_batches(corpus.valid, options.valid, options.batch, options.length)


@torch.no_grad()
def sample(job: Job) -> str:
    """Return code the model writes after `PROMPT`: all ranks compute every byte together and draw it alike."""
    generator = torch.Generator().manual_seed(job.options.seed)
    written = list(PROMPT)
    for _ in range(job.options.sample):
        context = torch.tensor([written[-job.options.length :]], device=job.mesh.device_type)
        logits = job.trainer(context)[0, -1].float().cpu()
        written.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
    return bytes(written).decode(errors="replace")


# ---------------------------------------------------------------------------------------------------------------------
# Folders: one per run, one per checkpoint


def open_run(options: argparse.Namespace, mesh: DeviceMesh, corpus: text.Corpus) -> None:
    """Make the run's folder, or check that the one that is there was made with the same settings.

    Raises:
        ValueError: it was not, on every rank alike.
    """
    rank0, path = mesh.get_rank() == 0, options.out / "run.json"
    if options.fresh and rank0:
        shutil.rmtree(options.out / "checkpoints", ignore_errors=True)
        path.unlink(missing_ok=True)
    dist.barrier()
    now = {name: getattr(options, name) for name in SETTINGS} | {"text": corpus.digest}
    then = json.loads(path.read_text()) if path.exists() else now
    changed = [f"{name} was {then.get(name)!r}, is {value!r}" for name, value in now.items() if then.get(name) != value]
    if changed:
        raise ValueError(f"{options.out} holds another run: {'; '.join(changed)}. Use --fresh or another --out.")
    dist.barrier()  # everybody has read before anybody writes
    if rank0:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now))


def save(job: Job, records: Sequence[report.Record]) -> None:
    """Write a checkpoint in a folder of its own and the losses so far, then delete all but the newest checkpoints."""
    folder = job.options.out / "checkpoints"
    job.trainer.save(folder)
    if job.rank0:
        report.write_history(job.options.out / "losses.jsonl", records)
        for path in sorted(folder.glob("step-*"))[:-CHECKPOINTS_KEPT]:
            shutil.rmtree(path)


def resume(job: Job) -> list[report.Record]:
    """Load the newest checkpoint, from whatever mesh it was saved on; return the losses that led to it."""
    folder = job.options.out / "checkpoints"
    if sf.checkpoint.latest(folder) is None:
        return []
    path = job.trainer.load(folder)
    if job.rank0:
        print(f"going on from {path}", flush=True)
    return report.read_history(job.options.out / "losses.jsonl", job.trainer.steps)


# ---------------------------------------------------------------------------------------------------------------------


def draw_layouts(job: Job) -> None:
    """Leave pictures of who owns what in the run's folder."""
    out, params = job.options.out, job.trainer.params
    (out / "layout.txt").write_text(sf.visualize(params))
    if report.can_draw():
        sf.visualize(params, file=out / "layout.png")


def print_report(job: Job, records: list[report.Record], valid: float, code: str) -> None:
    """Print what the run came to."""
    out, params = job.options.out, job.trainer.params
    print(f"\nTraining loss, nats per byte\n{report.curve([record['loss'] for record in records])}")
    print(f"\nWho owns what (more in {out}/layout.txt)\n{sf.visualize(params, 'layers.0.mlp.w1.weight')}")
    print(f"\nWritten by the model\n{'-' * 72}\n{code}\n{'-' * 72}")
    print(f"validation loss    {valid:.3f} nats per byte")
    print(f"byte bigram table  {job.bigram:.3f} nats per byte, counted on the same training text")
    pictures = f"pictures: {out}/losses.png, {out}/layout.png"
    print(pictures if report.can_draw() else "no pictures: matplotlib is not installed")


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, then report; return the final losses in nats per byte. Every rank calls this."""
    began = time.monotonic()
    options = parse(argv)
    mesh = sf.make_mesh(options.device, **options.mesh)
    corpus = text.load_corpus(options.text)
    open_run(options, mesh, corpus)
    bigram = text.bigram_loss(text.bigram_counts(corpus.train), validation(corpus, options))
    job = Job(options, mesh, corpus, build(options, mesh), bigram)
    if job.rank0:
        draw_layouts(job)
    records = train(job)
    valid = validate(job)
    code = sample(job)
    if job.rank0:
        print_report(job, records, valid, code)
        print(f"took {time.monotonic() - began:.0f} s")
    return {"valid": valid, "bigram": bigram}


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
