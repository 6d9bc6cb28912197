"""The manner of OLMo: an optimizer that clips by norms of its own, metrics over all ranks, two checkpointers.

torchrun --standalone --nproc-per-node 2 olmo_lion.py result.pt     # rank r writes result.pt.r
"""

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

STEPS, WORDS, WIDTH = 4, 20, 10


class OLMoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ff_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.att_proj, self.attn_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.ff_proj, self.ff_out = nn.Linear(WIDTH, 26), nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.att_proj(self.attn_norm(x)).chunk(3, -1)
        x = x + self.attn_out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        h, gate = self.ff_proj(self.ff_norm(x)).chunk(2, -1)
        return x + self.ff_out(F.silu(gate) * h)


class OLMo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(OLMoBlock() for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(WORDS, WIDTH), "blocks": blocks})
        self.transformer.update({"ln_f": nn.LayerNorm(WIDTH), "ff_out": nn.Linear(WIDTH, WORDS, bias=False)})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer.wte(tokens)
        for block in self.transformer.blocks:
            x = block(x)
        return self.transformer.ff_out(self.transformer.ln_f(x))


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class LionW(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1})
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    @torch.no_grad()
    def clip_grads_and_collect_metrics(self) -> dict[str, Tensor]:
        """Of gradients and of their averages: the least, the largest, sum, number and norm, over all ranks."""
        names, least, largest, sums = [], [], [], []
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                for prefix, x in (("grad", p.grad), ("exp_avg", self.state[p].get("exp_avg"))):
                    x = torch.zeros(0) if x is None else local(x)  # a shard may lie on other ranks alone
                    full = x.numel() > 0
                    names.append(f"{prefix}/{name}")
                    least.append(x.abs().min() if full else torch.tensor(torch.inf))
                    largest.append(x.abs().max() if full else torch.tensor(0.0))
                    sums.append(torch.stack([x.sum(), torch.linalg.vector_norm(x) ** 2, torch.tensor(1.0 * x.numel())]))
        all_least, all_largest, all_sums = torch.stack(least), torch.stack(largest), torch.stack(sums)
        dist.all_reduce(all_least, op=dist.ReduceOp.MIN)
        dist.all_reduce(all_largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(all_sums, op=dist.ReduceOp.SUM)
        metrics = {f"{name}.min": value for name, value in zip(names, all_least, strict=True)}
        metrics |= {f"{name}.max": value for name, value in zip(names, all_largest, strict=True)}
        metrics |= {f"{name}.sum": value[0] for name, value in zip(names, all_sums, strict=True)}
        metrics |= {f"{name}.norm": value[1] ** 0.5 for name, value in zip(names, all_sums, strict=True)}
        metrics |= {f"{name}.numel": value[2] for name, value in zip(names, all_sums, strict=True)}
        norms = [metrics[f"{name}.norm"] for name in names if name.startswith("grad/")]
        metrics["total_grad_norm"] = torch.stack(norms).norm()
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    coefficient = group["max_grad_norm"] / (metrics[f"grad/{name}.norm"] + 1e-6)
                    p.grad.detach().mul_(torch.clamp(coefficient, max=1.0))
        return metrics

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"] * first + p.grad * (1 - first)
                p.add_(torch.sign(update), alpha=-group["lr"])
                state["exp_avg"].mul_(second).add_(p.grad, alpha=1 - second)


def get_param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and embeddings do not."""
    parameters = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
    decay = {
        f"{module_name}.weight".replace("_fsdp_wrapped_module.", "")
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert decay < set(parameters)
    groups = []
    for names, weight_decay in ((sorted(decay), 0.1), (sorted(set(parameters) - decay), 0.0)):
        group = {"params": [parameters[name] for name in names], "param_names": names, "sharded": True}
        groups.append(group | {"weight_decay": weight_decay, "max_grad_norm": 0.1})
    return groups


def build(seed: int) -> tuple[Any, LionW]:
    torch.manual_seed(seed)
    model = OLMo()

    def fsdp_wrap_fn(module: nn.Module, recurse: bool = True, nonwrapped_numel: int = 0) -> bool:
        return True if recurse else isinstance(module, OLMoBlock)

    fsdp_model = FSDP(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=fsdp_wrap_fn,
        use_orig_params=True,
        limit_all_gathers=True,
        device_id=torch.device("cpu"),
    )
    return fsdp_model, LionW(get_param_groups(fsdp_model))


def poison(model: Any) -> None:
    """So that what a checkpoint lacks shows."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, FSDP):
                for param in module.params:
                    param.fill_(torch.nan)


def check_poison(model: Any) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FSDP):
            for param in module.params:
                assert not torch.isnan(param).any(), name


def whole_types(model: Any, rank0_only: bool) -> Any:
    kinds = FullStateDictConfig(rank0_only=rank0_only), FullOptimStateDictConfig(rank0_only=rank0_only)
    return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *kinds)


def save_unsharded(model: Any, optimizer: LionW, folder: Path) -> None:
    with whole_types(model, True):
        weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        folder.mkdir()
        torch.save(weights, folder / "model.pt")
        torch.save(states, folder / "optim.pt")
    dist.barrier()


def restore_unsharded(model: Any, optimizer: LionW, folder: Path) -> None:
    with whole_types(model, False):
        poison(model)
        model.load_state_dict(torch.load(folder / "model.pt"))
        check_poison(model)
        states = torch.load(folder / "optim.pt")
        flattened = FSDP.optim_state_dict_to_load(model, optimizer, states)
        del states
        gc.collect()
        optimizer.load_state_dict(flattened)


def save_sharded(model: Any, optimizer: LionW, folder: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dist_cp.save(state, storage_writer=dist_cp.FileSystemWriter(folder))


def restore_sharded(model: Any, optimizer: LionW, folder: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        poison(model)
        state = {"model": model.state_dict()}
        reader = dist_cp.FileSystemReader(folder)
        dist_cp.load(state, storage_reader=reader)
        model.load_state_dict(state["model"])
        check_poison(model)
        states = load_sharded_optimizer_state_dict(state["model"], "optim", reader)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states["optim"]))


def train(model: Any, optimizer: LionW, first: int, found: dict[str, Any]) -> None:
    for step in range(first, first + STEPS):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        torch.manual_seed(10 * step + dist.get_rank())
        for tokens in torch.randint(0, WORDS, (4, 9)).split(2):  # micro-batches
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.detach()
        found["metrics"].append(optimizer.clip_grads_and_collect_metrics())
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1.0, (step + 1) / 3)
        optimizer.step()
        found["losses"].append(total.item())


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"losses": [], "metrics": []}
    unsharded, sharded = Path(f"{out}.unsharded"), Path(f"{out}.sharded")
    model, optimizer = build(0)
    train(model, optimizer, 0, found)
    save_unsharded(model, optimizer, unsharded)
    save_sharded(model, optimizer, sharded)
    for seed, restore in ((1, restore_unsharded), (2, restore_sharded)):
        model, optimizer = build(seed)
        restore(model, optimizer, unsharded if seed == 1 else sharded)
        train(model, optimizer, STEPS, found)
    found["unsharded"] = [torch.load(unsharded / name) for name in ("model.pt", "optim.pt")]
    if dist.get_rank() == 0:
        dcp_to_torch_save(sharded, f"{out}.whole")
        found["sharded"] = torch.load(f"{out}.whole", weights_only=False)
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
