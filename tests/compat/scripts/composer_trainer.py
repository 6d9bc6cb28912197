"""The manner of Composer: modules say how they are wrapped, an optimizer older than the shards, monoliths are loaded.

torchrun --standalone --nproc-per-node 2 composer_trainer.py result.pt     # rank r writes result.pt.r
"""

import functools
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

STEPS, WORDS, WIDTH = 4, 21, 10


class LowPrecisionLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class MPTBlock(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.norm_1, self.norm_2 = LowPrecisionLayerNorm(WIDTH), LowPrecisionLayerNorm(WIDTH)
        self.Wqkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        self.out_proj._is_residual = self.down_proj._is_residual = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(self.norm_1(x)).chunk(3, -1)
        x = x + self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))


class MPTModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(MPTBlock(depth) for depth in range(3))
        self.norm_f = LowPrecisionLayerNorm(WIDTH)
        self.blocks[2]._fsdp_wrap = True
        for index, module in enumerate(self.modules()):  # weights do not depend on which module is filled first
            module._seed = 1000 * seed + index

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), self.wte.weight)  # tied

    def param_init_fn(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3, generator=torch.Generator().manual_seed(module._seed))
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
            if getattr(module, "_is_residual", False):
                with torch.no_grad():
                    module.weight.div_(6**0.5)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, MPTBlock):
            return {"sharding_strategy": "SHARD_GRAD_OP"} if module is self.blocks[0] else True
        return False

    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        return isinstance(module, MPTBlock) and module.depth != 1


class ComposerModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model: Any = MPTModel(seed)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["input_ids"])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def param_init_fn(obj: Any, module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    obj.param_init_fn(module)


def prepare_fsdp_module(model: ComposerModel, optimizer: torch.optim.Optimizer) -> None:
    """Wrap each child of the model, and give its parameters to the optimizer, which loses those that it had."""
    kwargs: dict[str, Any] = {
        "mixed_precision": MixedPrecision(torch.float32, torch.float32, torch.float32),
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "device_id": torch.device("cpu"),
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "use_orig_params": True,
    }
    for name, obj in list(model.named_children()):

        def wraps(module: nn.Module, recurse: bool, nonwrapped_numel: int, obj: Any = obj) -> bool | dict[str, Any]:
            if recurse:
                return True
            given = bool(getattr(module, "_fsdp_wrap", False)) or obj.fsdp_wrap_fn(module)
            if isinstance(given, dict):
                module._fsdp_kwargs_dict = {**given}
            return bool(given)

        wrapped = FSDP(
            obj,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=wraps,
            param_init_fn=functools.partial(param_init_fn, obj),
            **kwargs,
        )
        apply_activation_checkpointing(
            wrapped,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
            check_fn=obj.activation_checkpointing_fn,
        )
        setattr(model, name, wrapped)
    defaults = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model.parameters()), **defaults})


def apply_gradient_clipping(model: nn.Module, threshold: float) -> list[float]:
    roots = [module for module in model.modules() if isinstance(module, FSDP) and module.check_is_root()]
    return [root.clip_grad_norm_(max_norm=threshold).item() for root in roots]


class State:
    def __init__(self, seed: int) -> None:
        with torch.device("meta"):
            self.model = ComposerModel(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5)
        prepare_fsdp_module(self.model, self.optimizer)
        self.timestamp = 0

    def state_dict(self, full: bool) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=full, cpu_offload=not full)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizers": {"AdamW": optimizer}, "timestamp": self.timestamp}

    def load_state_dict(self, state: dict[str, Any], full: bool) -> None:
        options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full, strict=True)
        set_model_state_dict(self.model, state["model"], options=options)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizers"]["AdamW"], options=options)
        self.timestamp = state["timestamp"]

    def train(self, found: dict[str, Any]) -> None:
        self.model.train()
        for _ in range(STEPS):
            torch.manual_seed(10 * self.timestamp + dist.get_rank())
            micro_batches = [{"input_ids": ids} for ids in torch.randint(0, WORDS, (6, 8)).split((4, 2))]
            for index, batch in enumerate(micro_batches):
                last = index == len(micro_batches) - 1
                with nullcontext() if last else self.model.model.no_sync():
                    loss = self.model.loss(self.model(batch), batch) * (len(batch["input_ids"]) / 6)
                    loss.backward()
                    found["losses"].append(loss.item())
            found["norms"].append(apply_gradient_clipping(self.model, 0.5))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.timestamp += 1


def main(out: str) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"losses": [], "norms": []}
    folder, monolith = Path(f"{out}.sharded"), Path(f"{out}.monolith")
    state = State(0)
    state.train(found)
    dcp.save({"state": state.state_dict(full=False)}, checkpoint_id=folder)
    whole = state.state_dict(full=True)
    if dist.get_rank() == 0:
        torch.save({"state": whole}, monolith)
    dist.barrier()

    state = State(1)  # other weights, until the checkpoint is loaded
    loaded = {"state": state.state_dict(full=False)}
    dcp.load(loaded, checkpoint_id=folder)
    state.load_state_dict(loaded["state"], full=False)
    state.train(found)

    state = State(2)
    empty = {"state": {"model": {}, "optimizers": {"AdamW": {}}, "timestamp": STEPS}}
    loaded = torch.load(monolith) if dist.get_rank() == 0 else empty
    state.load_state_dict(loaded["state"], full=True)
    state.train(found)
    found["end"] = state.state_dict(full=True)
    found["monolith"] = torch.load(monolith)
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, f"{out}.whole")
        found["sharded"] = torch.load(f"{out}.whole", weights_only=False)
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
