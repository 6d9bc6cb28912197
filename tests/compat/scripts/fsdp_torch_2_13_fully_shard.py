"""A byte-level MLP trained with `fully_shard`, whose names a script imports from the same place as FSDP1's.

torchrun --standalone --nproc-per-node 4 fsdp_torch_2_13_fully_shard.py result.pt
python fsdp_torch_2_13_fully_shard.py --reference 4 result.pt     # one process, no FSDP, the whole batch
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # pattern 1
from torch.distributed.tensor import DTensor

CONTEXT, BATCH, STEPS = 6, 16, 5


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ByteMLP(nn.Module):
    def __init__(self, dim: int = 9, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, dim)
        self.layers = nn.ModuleList(Block(CONTEXT * dim) for _ in range(layers))
        self.head = nn.Linear(CONTEXT * dim, 128)

    def forward(self, context: Tensor) -> Tensor:
        x = self.embed(context).flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def get_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    text = torch.tensor(list(b"a proper copper coffee pot; red lorry, yellow lorry; unique new york. " * 4))
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(text) - CONTEXT, (BATCH,), generator=generator)
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).chunk(world_size)[rank]
    return windows[:, :-1], windows[:, -1]


def shard(model: ByteMLP, device: torch.device, offload: OffloadPolicy) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))  # pattern 10
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(  # pattern 7
            layer, mesh=mesh, mp_policy=mp_policy, offload_policy=offload, reshard_after_forward=True
        )
    fully_shard(model, mesh=mesh, mp_policy=mp_policy, offload_policy=offload, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.layers[0], FSDPModule)
    assert not isinstance(model, FSDP)


def main() -> None:
    parser = argparse.ArgumentParser(description="fully_shard as in torch 2.13")
    parser.add_argument("out")
    parser.add_argument("--reference", type=int, metavar="RANKS", help="one process, without FSDP")
    args = parser.parse_args()
    sharded = not args.reference
    if sharded:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank() if sharded else 0
    world_size = dist.get_world_size() if sharded else 1
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = ByteMLP().to(device)
    if sharded:
        shard(model, device, CPUOffloadPolicy() if torch.cuda.is_available() else OffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = get_batch(step, rank, world_size)
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if sharded:
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        norms.append(norm.item())
        if rank == 0:
            print(f"step {step} loss {losses[-1]:.6f} norm {norms[-1]:.6f}")
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"losses": losses, "norms": norms, "params": weights}, args.out)
    if sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
