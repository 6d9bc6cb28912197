"""The manner of torchtune's recipes: adapters beside frozen weights, shards filled one by one, steps in the backward.

torchrun --standalone --nproc-per-node 2 torchtune_lora.py result.pt     # rank r writes result.pt.r
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS, WORDS, WIDTH = 4, 19, 10


class LoRALinear(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, wide), requires_grad=False)
        self.lora_a, self.lora_b = nn.Linear(wide, 3, bias=False), nn.Linear(3, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + 2 * self.lora_b(self.lora_a(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sa_norm, self.qkv, self.out = nn.RMSNorm(WIDTH), LoRALinear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp_norm, self.w1, self.w2 = nn.RMSNorm(WIDTH), LoRALinear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.sa_norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.w2(F.silu(self.w1(self.mlp_norm(x))))


class TransformerDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def shard_model(model: nn.Module, conditions: list[Callable[[str, nn.Module], bool]]) -> None:
    count = 0
    for name, module in reversed(list(model.named_modules())):
        if any(condition(name, module) for condition in conditions):
            fully_shard(module, reshard_after_forward=True)
            count += 1
    assert count, "no layer was sharded"
    fully_shard(model, reshard_after_forward=True)


def load_from_full_model_state_dict(model: nn.Module, full: dict[str, Tensor], strict: bool, send: bool) -> Any:
    """Whole weights that every rank has, or that rank 0 sends one by one."""
    sharded = {}
    for name, like in model.state_dict().items():
        if name not in full:
            continue
        whole = full[name] if dist.get_rank() == 0 or not send else torch.empty(like.size(), dtype=like.dtype)
        if send:
            dist.broadcast(whole, src=0, group=like.device_mesh.get_group())
        value = distribute_tensor(whole, like.device_mesh, like.placements)
        sharded[name] = nn.Parameter(value, requires_grad="lora" in name)
    return model.load_state_dict(sharded, strict=strict, assign=True)


def gather_cpu_state_dict(model: nn.Module, trainable_only: bool = False) -> dict[str, Tensor]:
    found = {}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, value in model.state_dict().items():
        if not trainable_only or name in trainable:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                found[name] = whole.cpu()
    return found


def get_full_optimizer_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own = optimizer.state_dict()
    states: dict[Any, dict[str, Any]] = {}
    for key, values in own["state"].items():
        wholes = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in values.items()}
        if dist.get_rank() == 0:
            states[key] = {name: x.cpu() for name, x in wholes.items()}
    return {"param_groups": own["param_groups"], "state": states} if dist.get_rank() == 0 else {}


def load_from_full_optimizer_state_dict(optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
    _init_optim_state(optimizer)
    own = optimizer.state_dict()
    for mine, theirs in zip(own["param_groups"], full["param_groups"], strict=True):
        mine.update({key: value for key, value in theirs.items() if key != "params"})
    for key, values in own["state"].items():
        for name, like in values.items():
            value = full["state"][key][name]
            sharded = isinstance(like, DTensor)
            values[name] = distribute_tensor(value, like.device_mesh, like.placements) if sharded else value
    optimizer.load_state_dict(own)


def make_base() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in TransformerDecoder().state_dict().items() if "lora" not in name}
    return {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make_lora() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in TransformerDecoder().state_dict().items() if "lora" in name}
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def build(base: dict[str, Tensor], lora: dict[str, Tensor], send: bool) -> nn.Module:
    with torch.device("meta"):
        model = TransformerDecoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    shard_model(model, [lambda name, module: isinstance(module, Layer), lambda name, module: name == "output"])
    load_from_full_model_state_dict(model, base, strict=False, send=send)
    load_from_full_model_state_dict(model, lora, strict=False, send=send)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(0, WORDS, (3, 8))
    labels = tokens.roll(-1, 1)
    labels[:, -1 - dist.get_rank() :] = -100  # ranks have different numbers of tokens
    return tokens, labels


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, found: dict[str, Any]) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(first, first + STEPS):
        total, number = torch.zeros(()), torch.zeros(())
        for part in range(2):  # gradient accumulation
            tokens, labels = batch(2 * step + part)
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()
            total += loss.detach()
            number += (labels != -100).sum()
        dist.all_reduce(total)
        dist.all_reduce(number)
        scale = dist.get_world_size() / number  # a sum over ranks, where FSDP averages
        torch._foreach_mul_([parameter.grad for parameter in trainable], scale)
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found["losses"].append((total / number).item())
        found["norms"].append(norm.full_tensor().item())


def step_in_backward(model: nn.Module, found: dict[str, Any]) -> None:
    """One optimizer a parameter, which steps as soon as its gradient is there."""
    trainable = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2, eps=1e-5) for parameter in trainable}
    order: list[str] = []

    def step(parameter: Tensor) -> None:
        order.append(trainable[parameter])
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in trainable:
        parameter.register_post_accumulate_grad_hook(step)
    for index in range(STEPS):
        tokens, labels = batch(100 + index)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        found["losses"].append(loss.item())
        assert all(parameter.grad is None for parameter in trainable)
    found["stepped"] = sorted(order)


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"losses": [], "norms": [], "saved": []}
    make = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5, fused=False)
    model = build(make_base(), make_lora(), send=False)
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    train(model, optimizer, 0, found)
    saved = gather_cpu_state_dict(model), gather_cpu_state_dict(model, True), get_full_optimizer_state_dict(optimizer)
    if dist.get_rank() == 0:
        torch.save(saved, f"{out}.checkpoint")
    dist.barrier()

    weights, lora, states = torch.load(f"{out}.checkpoint")
    found["saved"].append([weights, lora, states])
    base = {name: value for name, value in weights.items() if "lora" not in name}
    model = build(base, lora, send=True)
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    load_from_full_optimizer_state_dict(optimizer, states)
    train(model, optimizer, STEPS, found)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    found["saved"].append([gather_cpu_state_dict(model), states])

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = build(base, lora, send=True)
    weights = found["saved"][-1][0]  # rank 0 alone has them
    set_model_state_dict(model, dict(weights), options=options)
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(states), options=options)
    train(model, optimizer, 2 * STEPS, found)
    step_in_backward(model, found)
    found["saved"].append(gather_cpu_state_dict(model))
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
