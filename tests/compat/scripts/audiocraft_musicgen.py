"""The manner of audiocraft: a class derived from FSDP's, state dicts switched between local and full, a model average.

torchrun --standalone --nproc-per-node 2 audiocraft_musicgen.py result.pt     # rank r writes result.pt.r
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS, CARDINALITY, CODEBOOKS, WIDTH = 4, 13, 2, 10


class StreamingTransformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.in_proj, self.out_proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 30), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.linear1, self.linear2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_proj(self.norm1(x)).chunk(3, -1)
        x = x + self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class ConditioningProvider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output_proj = nn.Linear(5, WIDTH)

    def forward(self, condition: Tensor) -> Tensor:
        return self.output_proj(condition).unsqueeze(1)


class LMModel(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.condition_provider = ConditioningProvider()
        self.emb = nn.ModuleList(nn.Embedding(CARDINALITY + 1, WIDTH) for _ in range(CODEBOOKS))
        self.layers = nn.ModuleList(StreamingTransformerLayer() for _ in range(2))
        self.out_norm = nn.LayerNorm(WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, CARDINALITY, bias=False) for _ in range(CODEBOOKS))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, codes: Tensor, condition: Tensor) -> Tensor:
        x = sum(emb(codes[:, k]) for k, emb in enumerate(self.emb)) + self.condition_provider(condition)
        for layer in self.layers:
            x = layer(x)
        return torch.stack([linear(self.out_norm(x)) for linear in self.linears], 1)

    @torch.no_grad()
    def generate(self, condition: Tensor, length: int) -> Tensor:
        model = self.__dict__.get("_fsdp", self)  # not `self`, which would go round the wrapper
        codes = torch.full((len(condition), CODEBOOKS, 1), CARDINALITY)
        for _ in range(length):
            codes = torch.cat([codes, model(codes, condition)[:, :, -1:].argmax(-1)], -1)
        return codes


def is_sharded_tensor(x: Any) -> bool:
    return isinstance(x, ShardedTensor)


def purge_fsdp(model: FSDP) -> None:
    """Drop whole weights that are kept from a forward, since the shards have changed."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        if handle and handle._get_padded_unsharded_flat_param().untyped_storage().size() > 0:
            _reshard(module, handle, True)


class FSDPFixStateDict(FSDP):
    """State dicts without flat parameters, which are written in place when they are loaded."""

    @staticmethod
    def _name_without_fsdp_prefix(name: str) -> str:
        from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

        return ".".join(part for part in name.split(".") if part != FSDP_WRAPPED_MODULE)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = dict(super().state_dict(*args, **kwargs))
        return {key: value for key, value in state.items() if not is_sharded_tensor(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._state_dict_type is StateDictType.FULL_STATE_DICT:
            super().load_state_dict(state)
            purge_fsdp(self)
            return
        current = dict(super().state_dict())
        for key, value in state.items():
            key = FSDPFixStateDict._name_without_fsdp_prefix(key)
            if key not in current:
                raise RuntimeError(f"Unknown state key {key}")
            current[key].copy_(value)
        purge_fsdp(self)


@contextmanager
def switch_to_full_state_dict(models: list[FSDP]) -> Iterator[None]:
    for model in models:
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True))
    try:
        yield
    finally:
        for model in models:
            FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)


def wrap_with_fsdp(model: LMModel) -> Any:
    wrapped = FSDPFixStateDict(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=MixedPrecision(torch.float64, torch.float64, torch.float64),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({StreamingTransformerLayer, ConditioningProvider}),
    )
    FSDP.set_state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT)
    for module in FSDP.fsdp_modules(wrapped):
        module._fsdp_wrapped_module.__dict__["_fsdp"] = module
    return wrapped


class ModuleDictEMA:
    """An average of the local state of some models."""

    def __init__(self, models: dict[str, Any], decay: float) -> None:
        self.models, self.decay, self.count = models, decay, 0
        self.state: dict[str, dict[str, Tensor]] = {name: {} for name in models}
        self.step()

    def step(self) -> None:
        self.count += 1
        weight = 1 - min(self.decay, (1 + self.count) / (10 + self.count))
        for name, model in self.models.items():
            for key, value in model.state_dict().items():
                if key not in self.state[name] or not value.is_floating_point():
                    self.state[name][key] = value.detach().clone()
                else:
                    self.state[name][key].sub_(weight * (self.state[name][key] - value))


@contextmanager
def swap_state_dict(model: Any, state: dict[str, Tensor]) -> Iterator[None]:
    old = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    try:
        yield
    finally:
        model.load_state_dict(old)


def run_step(model: Any, seed: int) -> Tensor:
    torch.manual_seed(seed)
    codes, condition = torch.randint(0, CARDINALITY, (3, CODEBOOKS, 7)), torch.randn(3, 5)
    logits = model(codes[..., :-1], condition)
    return F.cross_entropy(logits.flatten(0, 2), codes[..., 1:].flatten())


def full(model: Any) -> dict[str, Tensor]:
    with switch_to_full_state_dict([model]):
        return {key: value.clone() for key, value in model.state_dict().items()}


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = wrap_with_fsdp(LMModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    ema = ModuleDictEMA({"model": model}, 0.6)
    found: dict[str, Any] = {"losses": [], "valid": [], "swapped": [], "codes": [], "saved": []}
    for epoch in range(2):
        model.train()
        for step in range(STEPS):
            loss = run_step(model, 100 * epoch + 10 * step + dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.step()
            found["losses"].append(loss.item())
        model.eval()
        with torch.no_grad():
            found["valid"].append(run_step(model, 7 + dist.get_rank()).item())
            with swap_state_dict(model, ema.state["model"]):
                found["swapped"].append(run_step(model, 7 + dist.get_rank()).item())
                found["saved"].append(full(model))
            found["valid"].append(run_step(model, 7 + dist.get_rank()).item())
        found["codes"].append(model.generate(torch.linspace(-1, 1, 10).view(2, 5), 4))
        found["saved"].append(full(model))
        found["parts"] = sum(value.numel() for key, value in model.state_dict().items() if key != "calls")
    other = torch.tensor(found.pop("parts"))
    dist.all_reduce(other)  # that each number of the model is in the file of one rank
    found["numbers"] = other.item()
    if dist.get_rank() == 0:
        torch.save({"best_state": {"model": found["saved"][-1]}}, f"{out}.best")
    dist.barrier()
    with switch_to_full_state_dict([model]):
        model.load_state_dict(torch.load(f"{out}.best")["best_state"]["model"])
    found["last"] = run_step(model, 9 + dist.get_rank()).item()
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
