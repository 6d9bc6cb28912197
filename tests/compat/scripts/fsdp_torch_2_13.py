"""A small decoder trained with FSDP1 as in torch 2.13: device meshes, `CustomPolicy`, torch's state-dict functions.

torchrun --standalone --nproc-per-node 4 fsdp_torch_2_13.py result.pt
python fsdp_torch_2_13.py --reference 4 result.pt     # one process, no FSDP, the whole batch
"""

# `torch.distributed.checkpoint` has no `__all__`:

import argparse
import os
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
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # pattern 1
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.func import functional_call

LENGTH, BATCH, STEPS = 10, 8, 3


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, dim)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    positions: Tensor

    def __init__(self, dim: int = 17, heads: int = 1, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, dim)
        self.register_buffer("positions", torch.randn(LENGTH, dim, generator=torch.Generator().manual_seed(5)))
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def get_batch(step: int, rank: int, world_size: int) -> Tensor:
    text = torch.tensor(list(b"how much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 4))
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).chunk(world_size)[rank]


class Trainer:
    """The ranks, and what was measured so far."""

    def __init__(self, reference: int | None) -> None:
        self.sharded = reference is None
        if self.sharded:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self.rank = dist.get_rank() if self.sharded else 0
        # One process without FSDP computes what each rank would, in turn: each rank's gradient is rounded to bfloat16.
        self.parts = 1 if reference is None else reference
        self.world_size = dist.get_world_size() if self.sharded else self.parts
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.step = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.names: list[list[str]] = []

    def train(self, model: Any, optimizer: torch.optim.Optimizer, steps: int, dtype: torch.dtype | None = None) -> None:
        """Train; `dtype` is what a model without FSDP computes in."""
        scaler = ShardedGradScaler(device=self.device.type, init_scale=2.0**12, enabled=self.sharded)  # pattern 20
        for _ in range(steps):
            self.step += 1
            total = torch.zeros((), device=self.device)
            for part in range(self.parts):
                rank = self.rank if self.sharded else part
                batch = get_batch(self.step, rank, self.world_size).to(self.device)
                inputs, targets = batch[:, :-1], batch[:, 1:]
                logits = model(inputs) if self.sharded or dtype is None else computed_in(model, inputs, dtype)
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / self.parts
                scaler.scale(loss).backward()
                total += loss.detach()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # pattern 11
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if self.sharded:
                dist.all_reduce(total)
                total /= self.world_size
            self.losses.append(total.item())
            self.norms.append(norm.item())
            if self.rank == 0:
                print(f"step {self.step} loss {self.losses[-1]:.6f} norm {self.norms[-1]:.6f}")


def computed_in(model: nn.Module, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """The forward of a plain model with its weights and buffers cast."""
    cast = {name: value.to(dtype) for name, value in (*model.named_parameters(), *model.named_buffers())}
    return functional_call(model, cast, (inputs,))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """No weight decay for what has one dim, which FSDP may have hidden: go by names."""
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "")  # pattern 18
        (no_decay if "norm" in name or name.endswith("bias") else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)


def which_units(module: nn.Module) -> bool | dict[str, Any]:
    """Blocks are units; the head is one that keeps its weights between forward and backward."""
    if isinstance(module, nn.Linear) and module.out_features == 128:
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    return isinstance(module, Block)


def check_units(trainer: Trainer, model: nn.Module, count: int) -> None:
    if not trainer.sharded:
        return
    units = FSDP.fsdp_modules(model)  # pattern 26
    assert len(units) == count, units
    assert [module for module in model.modules() if isinstance(module, FSDP)] == units  # pattern 3
    assert FSDP.fsdp_modules(model, root_only=True) == [model]


def one_mesh(trainer: Trainer, folder: str) -> None:
    """From scratch on a mesh of one dim, units by `CustomPolicy`; a full and a sharded checkpoint."""
    torch.manual_seed(0)
    model: Any = Decoder().to(trainer.device)
    if trainer.sharded:
        mesh = init_device_mesh(trainer.device.type, (trainer.world_size,), mesh_dim_names=("fsdp",))  # pattern 10
        model = FSDP(
            model,
            device_mesh=mesh,
            auto_wrap_policy=CustomPolicy(which_units),
            device_id=trainer.device,
            use_orig_params=True,
        )
    check_units(trainer, model, 5)
    optimizer = make_optimizer(model)
    trainer.train(model, optimizer, STEPS)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # pattern 15
    states = get_optimizer_state_dict(model, optimizer, options=options)
    if trainer.rank == 0:
        torch.save({"model": weights, "optim": states}, f"{folder}/full.pt")
    trainer.train(model, optimizer, STEPS)
    sharded = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(sharded, checkpoint_id=f"{folder}/sharded")  # pattern 22


def hybrid_mesh(trainer: Trainer) -> DeviceMesh:
    shape = (trainer.world_size // 2, 2)
    return init_device_mesh(trainer.device.type, shape, mesh_dim_names=("replicate", "shard"))


def hybrid_from_full(trainer: Trainer, folder: str) -> None:
    """On from the full checkpoint, which rank 0 reads, on a mesh of two dims."""
    torch.manual_seed(1)
    model: Any = Decoder().to(trainer.device)
    if trainer.sharded:
        model = FSDP(
            model,
            device_mesh=hybrid_mesh(trainer),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy([Block]),
            device_id=trainer.device,
            use_orig_params=True,
        )
    check_units(trainer, model, 4)
    optimizer = make_optimizer(model)
    full = torch.load(f"{folder}/full.pt") if trainer.rank == 0 else {"model": {}, "optim": {}}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=trainer.sharded)
    set_model_state_dict(model, full["model"], options=options)  # pattern 16
    set_optimizer_state_dict(model, optimizer, full["optim"], options=options)
    trainer.train(model, optimizer, STEPS)


def mixed_from_sharded(trainer: Trainer, folder: str) -> dict[str, Any]:
    """On from the sharded checkpoint, in bfloat16."""
    torch.manual_seed(2)
    model: Any = Decoder()
    if trainer.sharded:
        bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
        model = FSDP(
            model,
            device_mesh=hybrid_mesh(trainer),
            sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
            mixed_precision=bf16,  # pattern 4
            auto_wrap_policy=ModuleWrapPolicy([Block]),
            device_id=trainer.device,
            use_orig_params=True,
        )
    optimizer = make_optimizer(model)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/sharded")  # pattern 22
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    trainer.train(model, optimizer, STEPS, torch.bfloat16)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP1 as in torch 2.13")
    parser.add_argument("out")
    parser.add_argument("--reference", type=int, metavar="RANKS", help="one process, without FSDP")
    args = parser.parse_args()
    trainer = Trainer(args.reference)
    folder = f"{args.out}.checkpoints"
    os.makedirs(folder, exist_ok=True)
    one_mesh(trainer, folder)
    if trainer.sharded:
        dist.barrier()
    hybrid_from_full(trainer, folder)
    weights = mixed_from_sharded(trainer, folder)
    if trainer.rank == 0:
        torch.save({"losses": trainer.losses, "norms": trainer.norms, "params": weights}, args.out)
    if trainer.sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
