"""The shape of Ray Train's FSDP2 example: `train_func(config)`, whose context torchrun gives instead of Ray.

torchrun --standalone --nproc-per-node 4 ray_fsdp2.py result.pt
python ray_fsdp2.py --reference 4 result.pt     # one process, no FSDP, the whole batch
"""

import argparse
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

EPOCHS, BATCHES, BATCH = 4, 2, 8


class VisionTransformer(nn.Module):
    """[batch, 1, 8, 8] -> [batch, 4]"""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=4, stride=4)
        layers = [nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        self.encoder = nn.Module()
        self.encoder.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder.layers(x).mean(1))


class AppState(Stateful):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int = 0) -> None:
        self.model, self.optimizer, self.epoch = model, optimizer, epoch

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )
        self.epoch = state_dict["epoch"]


def get_context() -> SimpleNamespace:
    """What `ray.train.get_context()` has."""
    started = dist.is_initialized()
    return SimpleNamespace(
        get_world_rank=lambda: dist.get_rank() if started else 0,
        get_world_size=lambda: dist.get_world_size() if started else 1,
        get_local_rank=lambda: int(os.environ.get("LOCAL_RANK", 0)),
    )


def shard_model(model: VisionTransformer) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (get_context().get_world_size(),), mesh_dim_names=("data_parallel",))
    offload = CPUOffloadPolicy() if device == "cuda" else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in model.encoder.layers.children():
        fully_shard(block, mesh=mesh, reshard_after_forward=True, offload_policy=offload, mp_policy=precision)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, offload_policy=offload, mp_policy=precision)


def get_batch(number: int) -> tuple[Tensor, Tensor]:
    context = get_context()
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(BATCH, 1, 8, 8, generator=generator)
    labels = images.unflatten(2, (2, 4)).unflatten(4, (2, 4)).mean((3, 5)).flatten(1).argmax(1)
    rank, world_size = context.get_world_rank(), context.get_world_size()
    return images.chunk(world_size)[rank], labels.chunk(world_size)[rank]


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    context = get_context()
    torch.manual_seed(0)
    model = VisionTransformer()
    if config["sharded"]:
        shard_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"], eps=1e-5)
    state = AppState(model, optimizer)
    if config["resume"]:
        dcp.load({"app": state}, checkpoint_id=config["folder"])
    losses = []
    for epoch in range(state.epoch, config["epochs"]):
        for number in range(BATCHES):
            images, labels = get_batch(number)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            if config["sharded"]:
                dist.all_reduce(mean)
            losses.append(mean.item() / context.get_world_size())
        state.epoch = epoch + 1
        dcp.save({"app": state}, checkpoint_id=config["folder"])
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"losses": losses, "params": full}


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 as in Ray Train's example")
    parser.add_argument("out")
    parser.add_argument("--reference", type=int, metavar="RANKS", help="one process, without FSDP")
    args = parser.parse_args()
    sharded = not args.reference
    if sharded:
        dist.init_process_group("gloo")
    folder = os.path.join(os.path.dirname(os.path.abspath(args.out)), "checkpoint")
    config = {"sharded": sharded, "learning_rate": 5e-3, "folder": folder}
    first = train_func({**config, "epochs": EPOCHS - 1, "resume": False})
    found = train_func({**config, "epochs": EPOCHS, "resume": True})
    if not sharded or dist.get_rank() == 0:
        torch.save({"losses": first["losses"] + found["losses"], "params": found["params"]}, args.out)
    if sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
