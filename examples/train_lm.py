"""The main job: train a byte-level decoder on Python's own standard library over a 2 x 2 (fsdp, tp) mesh.

    make train                                                                # 4 CPU ranks, about five minutes with set-up
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py             # the same without the set-up
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --mesh fsdp=4       # goes on from the same checkpoints
    torchrun --standalone --nproc-per-node 8 examples/train_lm.py --device cuda       # NCCL

`lm/` holds what is the same without sharding: the model, the text, the report. Whatever shardfn does is in this file:
`RULES` says how each weight is laid out, `build` turns model, mesh and rules into a `Trainer`, and `train` calls its step.
Killed at any time, the same command goes on from the last checkpoint, with the bytes that come next.
"""

import argparse
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from lm import report, text
from lm.model import Decoder, ModelConfig

# What each weight is split on: heads, hidden features and the vocabulary over tp, the model's width over fsdp.
RULES = {
    "emb.weight": "vocab@tp c@fsdp",
    "layers.*.attn.wq.weight": "(heads@tp d) c@fsdp",
    "layers.*.attn.{wk,wv}.weight": "(kv@tp d) c@fsdp",
    "layers.*.attn.wo.weight": "c@fsdp (heads@tp d)",
    "layers.*.mlp.{w1,w3}.weight": "ff@tp c@fsdp",
    "layers.*.mlp.w2.weight": "c@fsdp ff@tp",
    "head.weight": "vocab@tp c@fsdp",
}


MODEL_HELP = {"dim": "width of the residual stream", "layers": "blocks", "heads": "query heads",
              "kv_heads": "key and value heads", "ff": "hidden features of SwiGLU"}  # fmt: skip
CHECKPOINT = re.compile(r"step-(\d{6})")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--help` prints them with their defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    where = parser.add_argument_group("where it runs")
    where.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="gloo on CPU, NCCL on CUDA")
    where.add_argument("--mesh", type=parse_mesh, default="fsdp=-1,tp=2", help="axis sizes; -1 is all ranks that are left")
    where.add_argument("--out", type=Path, default=Path("runs/lm"), help="folder of checkpoints, losses and pictures")
    where.add_argument("--fresh", action="store_true", help="delete what is in --out and start over")
    where.add_argument("--text", type=Path, help="folder of *.py files (default: Python's own standard library)")
    model = parser.add_argument_group("model")
    for field in fields(ModelConfig):
        if field.name != "vocab":
            model.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default, help=MODEL_HELP[field.name])
    job = parser.add_argument_group("training")
    job.add_argument("--steps", type=int, default=300, help="optimizer steps")
    job.add_argument("--batch", type=int, default=16, help="windows in one step, over all ranks")
    job.add_argument("--length", type=int, default=64, help="bytes in a window")
    job.add_argument("--lr", type=float, default=4e-3, help="peak learning rate; up over a tenth of the steps, down on a cosine")
    job.add_argument("--seed", type=int, default=0, help="of weights, batches and the sample")
    job.add_argument("--every", type=int, default=50, help="steps from one checkpoint and validation to the next")
    job.add_argument("--valid", type=int, default=256, help="windows of validation text")
    job.add_argument("--sample", type=int, default=200, help="bytes of code to generate at the end")
    return parser.parse_args(argv)


def parse_mesh(value: str) -> dict[str, int]:
    """Read `fsdp=2,tp=2`; an axis that is not named has one rank, so that the rules hold on every mesh."""
    axes = {"fsdp": 1, "tp": 1}
    for part in value.split(","):
        name, _, size = part.partition("=")
        if name not in axes or not re.fullmatch(r"-1|[1-9]\d*", size):
            raise argparse.ArgumentTypeError(f"{part!r} is not fsdp=N or tp=N")
        axes[name] = int(size)
    return axes


def schedule(options: argparse.Namespace) -> Callable[[int], float]:
    """Return step -> learning rate: up over a tenth of the steps, down to a fiftieth of the peak on a cosine."""
    warm = max(options.steps // 10, 1)

    def rate(step: int) -> float:
        done = min(max(step - warm, 0) / max(options.steps - warm, 1), 1.0)
        return options.lr * min((step + 1) / warm, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))

    return rate


def build(options: argparse.Namespace, mesh: DeviceMesh) -> sf.Trainer:
    """Return the trainer of a new model: the same weights on every mesh, since they come from the seed alone."""
    torch.manual_seed(options.seed)
    model = Decoder(ModelConfig(dim=options.dim, layers=options.layers, heads=options.heads, kv_heads=options.kv_heads, ff=options.ff))

    def loss_fn(params: sf.Params, inputs: Tensor, targets: Tensor) -> Tensor:
        return sf.cross_entropy(sf.apply(model, params, inputs), targets)

    policy = sf.Policy(rules=RULES, sizes={"heads": options.heads, "kv": options.kv_heads})
    optimizer = sf.optim.adamw(lr=schedule(options), betas=(0.9, 0.95), weight_decay=0.1)
    return sf.Trainer(model, mesh, policy, optimizer=optimizer, loss_fn=loss_fn, clip=1.0)
