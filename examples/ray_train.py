"""Trains the ViT of `vit.py` under Ray Train: FSDP x tensor parallel, on as many workers as there are.

    pip install "shardfn[ray,hf]"
    python examples/ray_train.py

A worker that dies is replaced; where there is no place for it, training goes on with fewer. `--workers 2 4`: at least
2, at most 4. Each worker reports the files that it wrote, and Ray puts them together in its storage, which may be an
object store.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import Tensor
from vit import make_images, make_model

import shardfn as sf

BATCH = 48  # which 2, 3 and 4 ranks can divide


def train(config: dict[str, Any]) -> None:
    """What each worker does; Ray has started the process group."""
    torch.set_default_dtype(getattr(torch, config["dtype"]))
    workers = ray.train.get_context().get_world_size()
    mesh = sf.make_mesh("cpu", fsdp=-1, tp=2 if workers % 2 == 0 else 1)
    model = make_model()

    def loss_fn(params: sf.Params, images: Tensor, labels: Tensor) -> Tensor:
        return sf.cross_entropy(sf.apply(model, params, pixel_values=images).logits, labels)

    policy = sf.policies.from_transformers(model, sequence_parallel=True)
    trainer = sf.Trainer(model, mesh, policy, optimizer=sf.optim.adamw(2e-3), loss_fn=loss_fn, clip=1.0)
    if (found := ray.train.get_checkpoint()) is not None:
        with found.as_directory() as directory:
            trainer.load(directory)
    while trainer.steps < config["steps"]:
        out = trainer.step(*sf.data.local_batch(make_images(BATCH, seed=trainer.steps), mesh))
        if trainer.steps % config["save_every"] == 0:
            told = {"step": trainer.steps, "loss": float(out["loss"]), "workers": workers}
            with tempfile.TemporaryDirectory() as mine:
                trainer.save(sf.checkpoint.LocalDirectory(mine))
                ray.train.report(told, ray.train.Checkpoint.from_directory(mine))


def main(argv: Sequence[str] | None = None) -> ray.train.Result:
    """Begin, or go on where a run of this name has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, nargs=2, default=(4, 4), metavar=("LEAST", "MOST"))
    parser.add_argument("--storage", default=str(Path("runs/ray").absolute()), help="a path or URI that all nodes see")
    parser.add_argument("--dtype", default="float32", help="float64: the same losses on other numbers of workers")
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args(argv)
    least, most = options.workers
    return TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "save_every": options.save_every, "dtype": options.dtype},
        scaling_config=ray.train.ScalingConfig(
            num_workers=most if least == most else (least, most), resources_per_worker={"CPU": 0.5}
        ),
        run_config=ray.train.RunConfig(
            name="vit", storage_path=options.storage, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()


if __name__ == "__main__":
    for _, metrics in main().best_checkpoints:
        print("step {step:3}: loss {loss:.3f}, on {workers} workers".format(**metrics))
