"""What a user runs: trains to a number of steps, saves, resumes, and logs losses; may be told to die.

train.py DIRECTORY STEPS [STEP ...]    # rank 1 kills itself at these steps, one in each attempt
"""

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfn as sf


def main(directory: str, steps: int, deaths: list[int]) -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = sf.make_mesh("cpu", fsdp=-1, tp=int(os.environ.get("TP", "1")))
    index, count = sf.data.rank(mesh)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (sf.apply(model, params, x) - x).square().mean()

    def log(trainer: sf.Trainer, out: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            with open(f"{directory}.log", "a") as file:
                file.write(f"{trainer.steps} {float(out['loss'])!r} {time.time()} {dist.get_world_size()}\n")

    rules = {"0.weight": "h@tp c", "0.bias": "h@tp", "2.weight": "d h@tp"} if "TP" in os.environ else {}
    options: dict[str, Any] = {"optimizer": sf.optim.adamw(1e-2), "loss_fn": loss_fn, "callbacks": [log]}
    trainer = sf.Trainer(model, mesh, sf.Policy(rules=rules), resume=directory, **options)
    while trainer.steps < steps:
        if dist.get_rank() == 1 and deaths[attempt : attempt + 1] == [trainer.steps]:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(trainer.steps))
        trainer.step(x.chunk(count)[index])
        if trainer.steps % 10 == 0:
            trainer.save(directory, keep=3)
        time.sleep(float(os.environ.get("PAUSE", "0.01")))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [*map(int, sys.argv[3:])])
