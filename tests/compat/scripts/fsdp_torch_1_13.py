"""A small decoder trained with FSDP as in torch 1.13: `transformer_auto_wrap_policy`, `full_optim_state_dict`.

torchrun --standalone --nproc-per-node 4 fsdp_torch_1_13.py result.pt
python fsdp_torch_1_13.py --reference 4 result.pt    # one process, no FSDP, the whole batch
"""

import argparse
import contextlib
import functools
import math
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # pattern 1
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

LENGTH, BATCH, STEPS, ACCUMULATE = 12, 8, 4, 2


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(dim // self.heads)
        x = x + self.proj((scores.masked_fill(~mask, -1e9).softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder whose head is tied to its embedding."""

    mask: Tensor

    def __init__(self, dim: int = 18, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, dim), nn.Parameter(torch.randn(LENGTH, dim) * 0.02)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, 128, bias=False)
        self.lm_head.weight = self.tokens.weight
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.lm_head(self.norm(x))


def get_batch(step: int, rank: int, world_size: int) -> Tensor:
    """This rank's windows of a text, one byte longer than the model reads."""
    text = torch.tensor(list(b"she sells sea shells by the sea shore; the shells she sells are sea shells. " * 4))
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).chunk(world_size)[rank]


class Run:
    """What the functions below share: the ranks, the device, whether FSDP is used."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        if sharded:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self.rank = dist.get_rank() if sharded else 0
        self.world_size = dist.get_world_size() if sharded else 1
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def mean(self, value: Tensor) -> float:
        value = value.detach().clone()
        if self.sharded:
            dist.all_reduce(value)
        return value.item() / self.world_size


def train(run: Run, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of some steps, each of `ACCUMULATE` micro-batches."""
    scaler = ShardedGradScaler(init_scale=2.0**10)  # pattern 20
    losses, norms = [], []
    model.train()
    for step in steps:
        optimizer.zero_grad()
        total = torch.zeros((), device=run.device)
        for micro in range(ACCUMULATE):
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last or not run.sharded else model.no_sync():  # pattern 27
                batch = get_batch(ACCUMULATE * step + micro, run.rank, run.world_size).to(run.device)
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / ACCUMULATE
                scaler.scale(loss).backward()
                total += loss.detach()
        scaler.unscale_(optimizer)
        if isinstance(model, FSDP):  # pattern 3
            norm = model.clip_grad_norm_(0.5)  # pattern 11
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(run.mean(total))
        norms.append(norm.item())
        if run.rank == 0:
            print(f"step {step} loss {losses[-1]:.6f} norm {norms[-1]:.6f}")
    return losses, norms


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def full_state(run: Run, model: nn.Module) -> dict[str, Tensor]:
    """The whole weights on rank 0, nothing elsewhere."""
    if not run.sharded:
        return {name: value.clone() for name, value in model.state_dict().items()}
    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)  # pattern 6
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):  # pattern 5
        return model.state_dict()


def weight_norms(run: Run, model: Any) -> dict[str, float]:
    """Norms of all weights, for the log."""
    with FSDP.summon_full_params(model, writeback=False) if run.sharded else contextlib.nullcontext():  # pattern 9
        return {name: parameter.norm().item() for name, parameter in model.named_parameters()}


def pretrain(run: Run, path: str) -> dict[str, Any]:
    """From scratch: SHARD_GRAD_OP, a unit a block; save the weights and the optimizer by names and by ids."""
    torch.manual_seed(0)
    model: Any = Decoder().to(run.device)
    if run.sharded:
        model = FSDP(
            model,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            auto_wrap_policy=functools.partial(  # pattern 8
                transformer_auto_wrap_policy, transformer_layer_cls={Block}
            ),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            cpu_offload=CPUOffload(offload_params=False),
            device_id=run.device,
            limit_all_gathers=True,
        )
    optimizer = make_optimizer(model)
    losses, norms = train(run, model, optimizer, range(STEPS))
    weights = full_state(run, model)
    states = FSDP.full_optim_state_dict(model, optimizer) if run.sharded else {}  # pattern 30
    if run.rank == 0:
        plain_model = Decoder()
        if run.sharded:
            by_id = FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, plain_model)  # pattern 30
            make_optimizer(plain_model).load_state_dict(by_id)
        else:
            by_id = optimizer.state_dict()
        torch.save({"model": weights, "optim": states, "optim_by_id": by_id}, path)
    else:
        assert weights == {}
        assert states == {}
    return {"losses": losses, "norms": norms, "weight_norms": weight_norms(run, model)}


def resume(run: Run, path: str) -> tuple[dict[str, Any], nn.Module, torch.optim.Optimizer]:
    """On from the checkpoint: FULL_SHARD, rank 0 gives away the optimizer state."""
    torch.manual_seed(1)
    model: Any = Decoder()
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    if run.sharded:
        full_precision = MixedPrecision(
            param_dtype=torch.float64, reduce_dtype=torch.float64, buffer_dtype=torch.float64
        )
        model = FSDP(
            model,
            None,
            ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            mixed_precision=full_precision,  # pattern 4
            device_id=run.device,
        )
    optimizer = make_optimizer(model)
    if run.sharded:
        states = checkpoint["optim"] if run.rank == 0 else None
        optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(states, model, optim=optimizer))  # pattern 30
    else:
        optimizer.load_state_dict(checkpoint["optim_by_id"])
    losses, norms = train(run, model, optimizer, range(STEPS, 2 * STEPS))
    with FSDP.summon_full_params(model, recurse=False) if run.sharded else contextlib.nullcontext(), torch.no_grad():
        model.positions.mul_(0.5)  # only what is the root's own is whole
    return {"losses": losses, "norms": norms, "weight_norms": weight_norms(run, model)}, model, optimizer


def finish(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], nn.Module]:
    """On with other units, from states that every rank has, the optimizer's by ids in between."""
    if run.sharded:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            weights = model.state_dict()
        states = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    else:
        weights, states = model.state_dict(), optimizer.state_dict()
    torch.manual_seed(2)
    model = Decoder()
    if run.sharded:
        states = FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, model)
        states = FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_NAME, model)
        my_policy = functools.partial(size_based_auto_wrap_policy, min_num_params=2000)  # pattern 21
        model = FSDP(model.to(run.device), auto_wrap_policy=my_policy)
    model.load_state_dict(weights)
    optimizer = make_optimizer(model)
    if run.sharded:
        states = FSDP.shard_full_optim_state_dict(states, model, optim=optimizer)  # pattern 30
    optimizer.load_state_dict(states)
    losses, norms = train(run, model, optimizer, range(2 * STEPS, 3 * STEPS))
    return {"losses": losses, "norms": norms, "weight_norms": weight_norms(run, model)}, model


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP as in torch 1.13")
    parser.add_argument("out")
    parser.add_argument("--reference", type=int, metavar="RANKS", help="one process, without FSDP")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    run = Run(not args.reference)
    path = f"{args.out}.checkpoint"
    phases = [pretrain(run, path)]
    if run.sharded:
        dist.barrier()
    found, model, optimizer = resume(run, path)
    phases.append(found)
    found, model = finish(run, model, optimizer)
    phases.append(found)
    weights = full_state(run, model)
    if run.rank == 0:
        result = {what: [value for phase in phases for value in phase[what]] for what in ("losses", "norms")}
        result["weight_norms"] = [phase["weight_norms"] for phase in phases]
        torch.save(result | {"params": weights}, args.out)
    if run.sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
