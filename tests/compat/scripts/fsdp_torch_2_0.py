"""A small decoder trained, then fine-tuned with LoRA, on FSDP as in torch 2.0: hybrid, meta device, `optim_state_dict`.

torchrun --standalone --nproc-per-node 4 fsdp_torch_2_0.py result.pt
python fsdp_torch_2_0.py --reference 4 result.pt     # one process, no FSDP, the whole batch
"""

# Arguments are in the order of torch 2.0, which later stubs do not know:

import argparse
import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # pattern 1
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    _or_policy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

LENGTH, BATCH, STEPS = 10, 8, 3
LORA_TARGETS = ("qkv", "up")


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(x.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    positions: Tensor

    def __init__(self, dim: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, 128, bias=False)
        frequencies = 100.0 ** (-torch.arange(dim) / dim)
        positions = (torch.arange(LENGTH)[:, None] * frequencies).sin()
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class LoRALinear(nn.Module):
    """A frozen linear layer and a trainable update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.lora_b.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def add_lora(model: Decoder) -> Decoder:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in LORA_TARGETS and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child))
    return model


def get_batch(step: int, rank: int, world_size: int) -> Tensor:
    text = torch.tensor(list(b"peter piper picked a peck of pickled peppers; where is the peck he picked? " * 4))
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).chunk(world_size)[rank]


class Trainer:
    """The ranks, and what was measured so far."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        if sharded:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self.rank = dist.get_rank() if sharded else 0
        self.world_size = dist.get_world_size() if sharded else 1
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.step = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, float]] = []

    def train(self, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
        model.train()
        for _ in range(steps):
            self.step += 1
            batch = get_batch(self.step, self.rank, self.world_size).to(self.device)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            norm = self.clip(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mean = loss.detach().clone()
            if self.sharded:
                dist.all_reduce(mean)
            self.losses.append(mean.item() / self.world_size)
            self.norms.append(norm.item())
            if self.rank == 0:
                print(f"step {self.step} loss {self.losses[-1]:.6f} norm {self.norms[-1]:.6f}")

    def clip(self, model: Any) -> Tensor:
        if self.sharded:
            return model.clip_grad_norm_(max_norm=1.0)  # pattern 11
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)

    def barrier(self) -> None:
        if self.sharded:
            dist.barrier()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def hybrid_groups(world_size: int) -> Any:
    """Groups of two ranks that shard, and across them groups that replicate; None: torch decides."""
    if world_size < 4:
        return None
    shard, _ = dist.new_subgroups(group_size=2)
    replicate, _ = dist.new_subgroups_by_enumeration([list(range(first, world_size, 2)) for first in range(2)])
    return shard, replicate


def build(trainer: Trainer, weights: dict[str, Tensor] | None) -> Any:
    """The model with the weights of rank 0, the only one to make or read them: the others begin on the meta device."""
    if trainer.rank == 0:
        torch.manual_seed(0)
        model = Decoder()
        if weights is not None:
            model.load_state_dict(weights)
    else:
        with torch.device("meta"):
            model = Decoder()
    if not trainer.sharded:
        return model
    model = FSDP(  # pattern 2
        model,
        process_group=hybrid_groups(trainer.world_size),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),  # pattern 28
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(param_dtype=None, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
        device_id=trainer.device,
        param_init_fn=(  # pattern 19
            (lambda module: module.to_empty(device=trainer.device, recurse=False)) if trainer.rank != 0 else None
        ),
        sync_module_states=True,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    apply_activation_checkpointing(  # pattern 12
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: isinstance(module, Block),
    )
    return model


def pretrain(trainer: Trainer, folder: str) -> None:
    """From scratch; a sharded checkpoint and one file a rank."""
    model = build(trainer, None)
    optimizer = make_optimizer(model.parameters())
    trainer.train(model, optimizer, STEPS)
    if not trainer.sharded:
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, f"{folder}/plain.pt")
        return
    with FSDP.state_dict_type(  # pattern 22
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    ):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dist_cp.save_state_dict(state, dist_cp.FileSystemWriter(f"{folder}/sharded"))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):  # pattern 29
        torch.save(model.state_dict(), f"{folder}/local.{trainer.rank}.pt")


def resume_sharded(trainer: Trainer, folder: str) -> None:
    """On from the sharded checkpoint; a whole one on rank 0."""
    model = build(trainer, None)
    optimizer = make_optimizer(model.parameters())
    if trainer.sharded:
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)  # pattern 23
        reader = dist_cp.FileSystemReader(f"{folder}/sharded")
        state = {"model": model.state_dict()}
        dist_cp.load_state_dict(state, reader)
        model.load_state_dict(state["model"])
        found = load_sharded_optimizer_state_dict(state["model"], "optim", reader)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(found["optim"], model, optimizer))
    else:
        state = torch.load(f"{folder}/plain.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
    trainer.train(model, optimizer, STEPS)
    if not trainer.sharded:
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, f"{folder}/full.pt")
        return
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),  # pattern 24
    )
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)  # pattern 13
    if trainer.rank == 0:
        torch.save({"model": weights, "optim": states}, f"{folder}/full.pt")


def resume_full(trainer: Trainer, folder: str) -> None:
    """On from the whole checkpoint, which only rank 0 reads; gradients are looked at."""
    full = torch.load(f"{folder}/full.pt") if trainer.rank == 0 else {"model": None, "optim": {}}
    model = build(trainer, full["model"])
    optimizer = make_optimizer(model.parameters())
    if trainer.sharded:
        with FSDP.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True),
            FullOptimStateDictConfig(rank0_only=True),
        ):
            states = FSDP.optim_state_dict_to_load(full["optim"], model, optimizer)  # pattern 14, in torch 2.0's order
    else:
        states = full["optim"]
    optimizer.load_state_dict(states)
    trainer.train(model, optimizer, STEPS)
    record_gradients(trainer, model, optimizer)
    trainer.train(model, optimizer, 1)
    weights = model.state_dict()
    if trainer.rank == 0:
        torch.save(weights, f"{folder}/base.pt")


def record_gradients(trainer: Trainer, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Norms of whole gradients of one batch."""
    batch = get_batch(999, trainer.rank, trainer.world_size).to(trainer.device)
    F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    if trainer.sharded:
        with FSDP.summon_full_params(model, with_grads=True):  # pattern 9
            trainer.gradients.append(gradient_norms(model))
    else:
        trainer.gradients.append(gradient_norms(model))
    optimizer.zero_grad()


def gradient_norms(model: nn.Module) -> dict[str, float]:
    prefix = "_checkpoint_wrapped_module."
    named = ((name.replace(prefix, ""), p.grad) for name, p in model.named_parameters())
    return {name: grad.norm().item() for name, grad in named if grad is not None}


def resume_local(trainer: Trainer, folder: str) -> None:
    """The first weights again, each rank's part from its own file."""
    model = build(trainer, None)
    if trainer.sharded:
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):  # pattern 29
            model.load_state_dict(torch.load(f"{folder}/local.{trainer.rank}.pt"))
    else:
        model.load_state_dict(torch.load(f"{folder}/plain.pt")["model"])
    trainer.train(model, make_optimizer(model.parameters()), 1)


def finetune(trainer: Trainer, folder: str) -> dict[str, Tensor]:
    """Low-rank updates of frozen weights; units are blocks and, in them, what is trainable."""
    torch.manual_seed(trainer.rank)  # rank 0 decides
    model: Any = Decoder()
    if trainer.rank == 0:
        model.load_state_dict(torch.load(f"{folder}/base.pt"))
    model = add_lora(model)

    def trainable_leaf(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return not list(module.named_children()) and weight is not None and weight.requires_grad

    if trainer.sharded:
        lambda_policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=trainable_leaf)  # pattern 25
        transformer_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        model = FSDP(
            model,
            auto_wrap_policy=functools.partial(_or_policy, policies=[lambda_policy, transformer_policy]),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            device_id=trainer.device,
            sync_module_states=True,
        )
    optimizer = make_optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
    trainer.train(model, optimizer, STEPS)
    if trainer.sharded:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            states = FSDP.optim_state_dict(model, optimizer)
            assert all("lora_" in name for name in states["state"]), sorted(states["state"])
            states = FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=states)  # pattern 14
    else:
        states = optimizer.state_dict()
    optimizer = make_optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
    optimizer.load_state_dict(states)
    trainer.train(model, optimizer, STEPS)
    return model.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP as in torch 2.0")
    parser.add_argument("out")
    parser.add_argument("--reference", type=int, metavar="RANKS", help="one process, without FSDP")
    args = parser.parse_args()
    trainer = Trainer(not args.reference)
    folder = f"{args.out}.checkpoints"
    os.makedirs(folder, exist_ok=True)
    for phase in (pretrain, resume_sharded, resume_full, resume_local):
        phase(trainer, folder)
        trainer.barrier()
    weights = finetune(trainer, folder)
    if trainer.rank == 0:
        result = {"losses": trainer.losses, "norms": trainer.norms, "gradients": trainer.gradients[0]}
        torch.save(result | {"params": weights}, args.out)
    if trainer.sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
