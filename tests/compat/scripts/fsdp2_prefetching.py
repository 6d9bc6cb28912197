"""FSDP2 with explicit prefetching, mixed precision, an inspection of the model and a checkpoint to resume from.

torchrun --standalone --nproc-per-node 4 fsdp2_prefetching.py result.pt
python fsdp2_prefetching.py --reference 4 result.pt     # one process, no FSDP, the whole batch
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

BATCH, WIDTH, LAYERS, STEPS, AHEAD = 8, 12, 5, 4, 2
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.output(x)

    def reset_parameters(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            whole = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data.copy_(torch.ones(parameter.shape) if name.endswith("norm.weight") else whole)


def shard(model: Transformer, **options: MixedPrecisionPolicy) -> None:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + AHEAD])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - AHEAD) : index][::-1])


def inspect(model: Transformer, low: bool) -> None:
    assert isinstance(model, FSDPModule)
    assert isinstance(model, Transformer)
    for parameter in model.parameters():
        assert parameter.placements == (Shard(0),)
        assert parameter.dtype == torch.float32
    model.unshard()
    for parameter in model.parameters(recurse=False):
        assert parameter.dtype == (torch.bfloat16 if low else torch.float32)
    model.reshard()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, world_size: int) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        if isinstance(model, FSDPModule):
            model.unshard(async_op=True)
        loss = (model(x).float() - x.roll(1, 1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="fully_shard with explicit prefetching")
    parser.add_argument("out")
    parser.add_argument("--reference", type=int, metavar="RANKS", help="one process, without FSDP")
    args = parser.parse_args()
    sharded = not args.reference
    if sharded:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    path = os.path.join(os.path.dirname(os.path.abspath(args.out)), "state.pt")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    first = Transformer()
    first.reset_parameters(0)
    with torch.device("meta" if sharded else "cpu"):
        model = Transformer()
    if sharded:
        shard(model)
        model.to_empty(device="cpu")
        set_model_state_dict(
            model, first.state_dict(), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        inspect(model, low=False)
    else:
        model.load_state_dict(first.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    losses = train(model, optimizer, range(STEPS), rank, world_size)
    saved = {"model": get_model_state_dict(model, options=options)}
    saved["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save(saved, path)
    if sharded:
        dist.barrier()

    model = Transformer()
    if sharded:
        shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    state = torch.load(path, mmap=True)
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=full)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=full)
    losses += train(model, optimizer, range(STEPS, 2 * STEPS), rank, world_size)
    params = get_model_state_dict(model, options=options)

    if sharded:  # in lower precision it trains too
        low = Transformer()
        shard(low, mp_policy=MixedPrecisionPolicy(**BF16))
        inspect(low, low=True)
        lower = train(low, torch.optim.Adam(low.parameters(), lr=1e-2), range(2), rank, world_size)
        assert all(map(torch.isfinite, torch.tensor(lower)))
    if rank == 0:
        torch.save({"losses": losses, "params": params}, args.out)
    if sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
