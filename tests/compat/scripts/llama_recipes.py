"""The manner of Llama's recipes: frozen layers, two wrap policies, and one function for each kind of checkpoint.

torchrun --standalone --nproc-per-node 2 llama_recipes.py result.pt     # rank r writes result.pt.r
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR

STEPS, ACCUMULATION, WORDS, WIDTH = 4, 2, 23, 10


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 17, bias=False), nn.Linear(WIDTH, 17, bias=False)
        self.down = nn.Linear(17, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.input_norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(3))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def freeze_layers(model: Llama, count: int) -> None:
    for index, layer in enumerate(model.layers):
        if index < count:
            layer.requires_grad_(False)


def fsdp_auto_wrap_policy() -> Any:
    """Decoder layers, and trainable leaves of their own, such as adapters."""

    def is_trainable_leaf(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return not list(module.named_children()) and weight is not None and weight.requires_grad

    leaves = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_trainable_leaf)
    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer})
    return functools.partial(_or_policy, policies=[leaves, layers])


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    model = Llama()
    freeze_layers(model, 1)
    return FSDP(
        model,
        auto_wrap_policy=fsdp_auto_wrap_policy(),
        mixed_precision=None,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
    )


def save_model_and_optimizer_sharded(model: Any, optimizer: Any, folder: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dist_cp.save(state, storage_writer=dist_cp.FileSystemWriter(folder), planner=DefaultSavePlanner())


def load_model_sharded(model: Any, folder: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dist_cp.load(state, storage_reader=dist_cp.FileSystemReader(folder), planner=DefaultLoadPlanner())
        model.load_state_dict(state["model"])


def save_full(model: Any, optimizer: Any, path: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        weights = model.state_dict()
    states = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optim": states}, path)


def train(model: Any, optimizer: Any, scheduler: Any, first: int, found: dict[str, Any]) -> None:
    model.train()
    for step in range(first, first + STEPS):
        for part in range(ACCUMULATION):
            torch.manual_seed(100 * step + 10 * part + dist.get_rank())
            tokens = torch.randint(0, WORDS, (3, 8))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATION
            loss.backward()
            found["losses"].append(loss.item())
        found["norms"].append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    found["rates"].append(scheduler.get_last_lr())


@torch.no_grad()
def evaluate(model: Any) -> list[float]:
    model.eval()
    torch.manual_seed(99 + dist.get_rank())
    tokens = torch.randint(0, WORDS, (4, 8))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    loss /= dist.get_world_size()
    return [loss.item(), loss.exp().item()]


def main(out: str) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "eval": []}
    folder, full = Path(f"{out}.sharded"), Path(f"{out}.full")
    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-5)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.85)
    train(model, optimizer, scheduler, 0, found)
    found["eval"].append(evaluate(model))
    save_model_and_optimizer_sharded(model, optimizer, folder)
    save_full(model, optimizer, full)
    dist.barrier()

    model = build(1)  # other weights, until the checkpoint is loaded
    load_model_sharded(model, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-5)
    states = torch.load(full)["optim"] if dist.get_rank() == 0 else None
    optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(states, model))
    train(model, optimizer, StepLR(optimizer, step_size=1, gamma=0.85), STEPS, found)
    found["eval"].append(evaluate(model))
    found["full"] = torch.load(full)
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, f"{out}.whole")
        found["sharded"] = torch.load(f"{out}.whole", weights_only=False)
    found["end"] = model.state_dict()
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
