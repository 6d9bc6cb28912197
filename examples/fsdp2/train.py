"""The FSDP2 workflow, block by block, on shardfn's engine: change the import of `fully_shard` and it runs on torch's.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2/train.py --out runs/fsdp2
    torchrun --standalone --nproc-per-node 2 examples/fsdp2/train.py --out runs/fsdp2 --steps 20   # on from there

The model is made on the meta device, sharded from the inside out, filled part by part and trained with gradient
accumulation. Checkpoints are written by torch.distributed.checkpoint, asynchronously, and load on any number of ranks.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from shardfn.compat.fsdp2 import MixedPrecisionPolicy, fully_shard

PARTS = 2  # microbatches of a step


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[.., width] -> [.., width]"""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Bytes -> logits of the next byte."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, 256]"""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AppState(Stateful):
    """What a checkpoint holds: model, optimizer and the number of steps, by the names of parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """Shards, which torch.distributed.checkpoint saves from every rank."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put what was read back into model and optimizer."""
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"]
        )
        self.step = int(state_dict["step"])


def init_distributed(device: str) -> DeviceMesh:
    """Process group, device and mesh of torchrun's environment."""
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    if device != "cpu":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))


def build_model_meta(mesh: DeviceMesh, bf16: bool) -> Model:
    """A model that is never whole anywhere but on the meta device."""
    with torch.device("meta"):
        model = Model()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": precision} if bf16 else {})
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=mesh.device_type)
    fill_(model)
    return model


def fill_(model: nn.Module) -> None:
    """The same values on any mesh: every rank draws each parameter whole, and keeps its part."""
    generator = torch.Generator().manual_seed(0)
    shards: dict[str, Any] = dict(model.named_parameters())
    full = {}
    for name, shard in shards.items():
        whole = torch.randn(shard.shape, generator=generator) * 0.05
        whole = torch.ones_like(whole) if name.endswith("norm.weight") else whole
        full[name] = distribute_tensor(whole.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)
    model.load_state_dict(full)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """After sharding: an optimizer of the parameters from before would train nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch_of(step: int, mesh: DeviceMesh) -> Tensor:
    """[batch, length] of this rank, from a batch of 16 that does not depend on the number of ranks."""
    ids = torch.randint(97, 123, (16, 13), generator=torch.Generator().manual_seed(step)).sort(dim=1).values
    return ids.chunk(mesh.size())[mesh.get_local_rank()].to(mesh.device_type)


def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """One update; gradients are reduced with the last microbatch. Returns the mean loss over all ranks."""
    total = torch.zeros((), device=ids.device)
    for number, part in enumerate(ids.chunk(PARTS)):
        model.set_requires_gradient_sync(number == PARTS - 1)
        loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1).float(), part[:, 1:].flatten()) / PARTS
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def checkpoint_save(state: AppState, folder: Path, group: dist.ProcessGroup | None) -> Any:
    """Start to write; training goes on. Returns what to wait for."""
    return dcp.async_save({"app": state}, checkpoint_id=str(folder / f"step-{state.step}"), process_group=group)


def checkpoint_load(state: AppState, folder: Path) -> None:
    """Go on from the newest checkpoint, if there is one."""
    found = [path for path in folder.glob("step-*") if (path / ".metadata").is_file()]
    if found:
        newest = max(found, key=lambda path: int(path.name.removeprefix("step-")))
        dcp.load({"app": state}, checkpoint_id=str(newest))


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save, export."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"), help="folder of checkpoints and model.pt")
    parser.add_argument("--steps", type=int, default=10, help="in all")
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    args = parser.parse_args(argv)
    mesh = init_distributed(args.device)
    writers = dist.new_group(backend="gloo")  # what writes in the background must not meet the training's collectives
    model = build_model_meta(mesh, args.bf16)
    state = AppState(model, build_optimizer(model))
    checkpoint_load(state, args.out)
    writing, losses = None, []
    while state.step < args.steps:
        loss = train_step(model, state.optimizer, batch_of(state.step, mesh))
        state.step += 1
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {state.step}  loss {losses[-1]:.6f}")
        if state.step % args.every == 0:
            if writing is not None:
                writing.result()
            writing = checkpoint_save(state, args.out, writers)
    if writing is not None:
        writing.result()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"model": full, "losses": losses}, args.out / "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
