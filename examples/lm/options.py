"""The options of the main job, and the folder of a run, which holds one run only."""

import argparse
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist

from lm.model import ModelConfig

# A checkpoint goes on only under the settings that decide what its weights mean and which bytes come next.
SETTINGS = ("dim", "layers", "heads", "kv_heads", "ff", "batch", "length", "seed")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--help` prints them with their defaults."""
    parser = argparse.ArgumentParser(description="Train a byte-level decoder on Python's own standard library.")
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


def open_folder(options: argparse.Namespace, digest: str) -> None:
    """Make the run's folder, or check that the one that is there has the same settings, and text of the same digest.

    Raises:
        ValueError: it was not, on every rank alike.
    """
    rank0, path = dist.get_rank() == 0, options.out / "run.json"
    if options.fresh and rank0:
        shutil.rmtree(options.out / "checkpoints", ignore_errors=True)
        path.unlink(missing_ok=True)
    dist.barrier()
    now = {name: getattr(options, name) for name in SETTINGS} | {"text": digest}
    then = json.loads(path.read_text()) if path.exists() else now
    changed = [f"{name} was {then.get(name)!r}, is {value!r}" for name, value in now.items() if then.get(name) != value]
    if changed:
        raise ValueError(f"{options.out} holds another run: {'; '.join(changed)}. Use --fresh or another --out.")
    dist.barrier()  # everybody has read before anybody writes
    if rank0:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now))
