"""The manner of torchtitan: a grouped last unit, norms in two calls, and stateful containers in one checkpoint.

torchrun --standalone --nproc-per-node 2 torchtitan_llama.py result.pt     # rank r writes result.pt.r
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

STEPS, MICRO_BATCHES, WORDS, WIDTH, WIDE = 4, 2, 18, 9, torch.float64


class Block(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.std = 0.3 / (depth + 1) ** 0.5
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wkv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.wo, self.w1 = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 14, bias=False)
        self.w2, self.w3 = nn.Linear(14, WIDTH, bias=False), nn.Linear(WIDTH, 14, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        k, v = self.wkv(h).chunk(2, -1)
        x = x + self.wo(F.scaled_dot_product_attention(self.wq(h), k, v, is_causal=True))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))

    def init_weights(self) -> None:
        self.attention_norm.reset_parameters()
        self.ffn_norm.reset_parameters()
        for linear in (self.wq, self.wkv, self.wo, self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(linear.weight, mean=0.0, std=self.std)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("scales", self.precompute_scales())
        self.layers = nn.ModuleDict({str(depth): Block(depth) for depth in range(3)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def precompute_scales(self) -> Tensor:
        return torch.linspace(0.5, 1.5, WIDTH, dtype=WIDE)

    def init_weights(self) -> None:
        self.scales = self.precompute_scales()
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=0.2, a=-0.6, b=0.6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens) * self.scales
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def apply_ac(model: Transformer) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))


def apply_fsdp(model: Transformer, dp_mesh: DeviceMesh, policy: str = "default") -> None:
    """Embeddings, blocks, and together what comes last, which is used again at once."""
    config: dict[str, Any] = {"mesh": dp_mesh, "mp_policy": MixedPrecisionPolicy(WIDE, WIDE)}
    reshard = {"always": True, "never": False, "default": True}[policy]
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=reshard)
    for block in model.layers.values():
        fully_shard(block, **config, reshard_after_forward=reshard)
    fully_shard([model.norm, model.output], **config, reshard_after_forward=policy == "always")
    fully_shard(model, **config)


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total_norm = nn.utils.get_total_norm(grads, 2.0, error_if_nonfinite=True, foreach=True)
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach=True)
    return total_norm


class ModelWrapper(Stateful):
    def __init__(self, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts

    def state_dict(self) -> dict[str, Any]:
        return {key: value for part in self.model_parts for key, value in get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load = functools.partial(
            set_model_state_dict, model_state_dict=state_dict, options=StateDictOptions(strict=False)
        )
        list(map(load, self.model_parts))


class OptimizersContainer(torch.optim.Optimizer, Stateful):
    def __init__(self, model_parts: list[nn.Module], **kwargs: Any) -> None:
        self.model_parts = model_parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), **kwargs) for part in model_parts]
        super().__init__([parameter for part in model_parts for parameter in part.parameters()], kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        pairs = zip(self.model_parts, self.optimizers, strict=True)
        found = [get_optimizer_state_dict(part, optimizer, options=options) for part, optimizer in pairs]
        return {key: value for each in found for key, value in each.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, optim_state_dict=state_dict, options=options)


class TrainState(Stateful):
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])


class Trainer:
    def __init__(self, seed: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        with torch.device("meta"):
            self.model = Transformer()
        apply_ac(self.model)
        apply_fsdp(self.model, mesh)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights()
            # On CPUs torch draws the same numbers for each part of a DTensor, which nobody wants.
            whole = Transformer()
            torch.manual_seed(seed)
            whole.init_weights()
            for shard, value in zip(self.model.parameters(), whole.parameters(), strict=True):
                shard.copy_(distribute_tensor(value, shard.device_mesh, shard.placements))
        self.model.train()
        self.optimizers = OptimizersContainer([self.model], lr=2e-2, betas=(0.9, 0.95), eps=1e-5, foreach=True)
        self.schedulers = [LambdaLR(each, lambda step: min(1.0, (step + 1) / 3)) for each in self.optimizers.optimizers]
        self.train_state = TrainState()
        self.states = {
            "model": ModelWrapper([self.model]),
            "optimizer": self.optimizers,
            "lr_scheduler": self.schedulers[0],
            "train_state": self.train_state,
        }

    def train(self, steps: int, found: dict[str, Any]) -> None:
        for _ in range(steps):
            self.train_state.step += 1
            self.optimizers.zero_grad()
            total = torch.zeros((), dtype=WIDE)
            for index in range(MICRO_BATCHES):
                torch.manual_seed(100 * self.train_state.step + 10 * index + dist.get_rank())
                tokens = torch.randint(0, WORDS, (2, 8))
                logits = self.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES
                del logits
                loss.backward()
                total += loss.detach()
            norm = clip_grad_norm_(self.model.parameters(), 0.7)
            self.optimizers.step()
            self.schedulers[0].step()
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
            found["losses"].append(total.item())
            found["norms"].append(norm.item())
            found["rates"].append(self.schedulers[0].get_last_lr())


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(WIDE)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    folder = Path(f"{out}.checkpoint")
    trainer = Trainer(0)
    assert isinstance(trainer.model, FSDPModule)
    trainer.train(STEPS, found)
    dcp.save(trainer.states, checkpoint_id=folder / "step-4")
    trainer = Trainer(1)  # other weights, until the checkpoint is loaded
    dcp.load(trainer.states, checkpoint_id=folder / "step-4")
    trainer.train(STEPS, found)
    dcp.save(trainer.states, checkpoint_id=folder / "step-8")
    dcp.save(trainer.states["model"].state_dict(), checkpoint_id=folder / "weights")  # the last: weights alone
    if dist.get_rank() == 0:
        for name in ("step-4", "step-8", "weights"):
            dcp_to_torch_save(folder / name, f"{out}.whole")
            found[name] = torch.load(f"{out}.whole", weights_only=False)
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
