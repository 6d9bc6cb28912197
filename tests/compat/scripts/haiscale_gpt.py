"""A small GPT trained through the `haiscale.fsdp` pattern of hfai's public script.

torchrun --standalone --nproc-per-node 4 haiscale_gpt.py result.pt
python haiscale_gpt.py --reference 4 result.pt     # one process, no FSDP, the whole batch
"""

import argparse
import os
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from haiscale.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch import Tensor
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

BATCH, LENGTH, STEPS = 8, 12, 6


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, 2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def get_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    text = torch.tensor(list(b"she sells sea shells by the sea shore; the shells she sells are sea shells. " * 3))
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).chunk(world_size)[rank]
    return windows[:, :-1], windows[:, 1:]


def loss_of(gpt: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
    inputs, targets = get_batch(step, rank, world_size)
    return F.cross_entropy(gpt(inputs).flatten(0, 1), targets.flatten())


def train(gpt: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, world_size: int) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(gpt, step, rank, world_size)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return losses


def wrap(gpt: nn.Module) -> nn.Module:
    policy = partial(size_based_auto_wrap_policy, min_num_params=1000)
    return FullyShardedDataParallel(gpt, auto_wrap_policy=policy, backward_prefetch=BackwardPrefetch.BACKWARD_POST)


def main() -> None:
    parser = argparse.ArgumentParser(description="GPT as with haiscale")
    parser.add_argument("out")
    parser.add_argument("--reference", type=int, metavar="RANKS", help="one process, without FSDP")
    args = parser.parse_args()
    sharded = not args.reference
    if sharded:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    torch.manual_seed(0)
    gpt = wrap(GPT()) if sharded else GPT()
    if rank == 0:
        print(gpt)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2, eps=1e-5)
    losses = train(gpt, optimizer, range(STEPS), rank, world_size)

    folder = os.path.dirname(os.path.abspath(args.out))
    with gpt.summon_full_params() if sharded else nullcontext():
        if rank == 0:
            state = gpt.module.state_dict() if sharded else gpt.state_dict()
            torch.save({"model": state}, os.path.join(folder, "gpt.pt"))
    torch.save({"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(folder, f"{rank}.pt"))
    if sharded:
        dist.barrier()

    torch.manual_seed(1)  # another GPT, which goes on from there
    gpt = wrap(GPT()) if sharded else GPT()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2, eps=1e-5)
    whole = torch.load(os.path.join(folder, "gpt.pt"), map_location="cpu")
    with gpt.summon_full_params() if sharded else nullcontext():
        (gpt.module if sharded else gpt).load_state_dict(whole["model"])
    own = torch.load(os.path.join(folder, f"{rank}.pt"), map_location="cpu", weights_only=False)
    gpt.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    losses += train(gpt, optimizer, range(STEPS, 2 * STEPS), rank, world_size)
    with torch.no_grad():
        valid = loss_of(gpt, 1000, rank, world_size)
        if sharded:
            dist.all_reduce(valid)
    with gpt.summon_full_params() if sharded else nullcontext():
        params = {name: value.clone() for name, value in gpt.state_dict().items()} if rank == 0 else {}
    if rank == 0:
        torch.save({"losses": losses, "valid": valid.item() / world_size, "params": params}, args.out)
    if sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
