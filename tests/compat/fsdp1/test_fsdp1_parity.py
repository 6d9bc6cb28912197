"""FSDP1's class against DistributedDataParallel, on the same ranks: the same losses and parameters for ten steps."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.testing import assert_parity, run

STEPS = 10
STRATEGIES = list(ShardingStrategy)
CASES = ("nested", "auto-wrapped", "frozen", "tied", "BatchNorm", "mixed precision", "no_sync", "CPU offload")
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class Block(nn.Module):
    """Awkward sizes: nothing divides 4."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6) if batch_norm else nn.LayerNorm(6)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.emb = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(Block(case == "BatchNorm") for _ in range(3))
        self.head = nn.Linear(6, 6, bias=False)
        if case == "tied":
            self.head.weight = self.emb.weight
        if case == "frozen":
            self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _net(case: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    return Net(case).to(dtype)


def _wrapped(case: str, strategy: ShardingStrategy, use_orig_params: bool, dtype: torch.dtype) -> Any:
    """The model as a script would wrap it."""
    model = _net(case, dtype)
    given: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    if strategy in HYBRID:
        given["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    if case == "CPU offload":
        given["cpu_offload"] = CPUOffload(offload_params=True)
    if case == "mixed precision":
        given["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated
        if case == "nested":
            for i, layer in enumerate(model.layers):
                model.layers[i] = FSDP(layer, **given)
            return FSDP(model, **given)
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **given)


def _batch(step: int, dtype: torch.dtype) -> Tensor:
    """This rank's part of a batch."""
    x = torch.randn(4 * dist.get_world_size(), 6, dtype=dtype, generator=torch.Generator().manual_seed(step))
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def _losses(model: Any, optimizer: Any, case: str, dtype: torch.dtype) -> list[float]:
    """The mean loss over ranks of every step."""
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = 3 if case == "no_sync" else 1
        total = torch.zeros(())
        for part in range(parts):
            with model.no_sync() if part < parts - 1 else nullcontext():
                loss = model(_batch(step * parts + part, dtype)).float().square().mean() / parts
                loss.backward()
            total = total + loss.detach()
        model.clip_grad_norm_(0.5) if isinstance(model, FSDP) else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        dist.all_reduce(total)
        found.append(float(total) / dist.get_world_size())
    return found


class _LowPrecision(nn.Module):
    """Mixed precision by hand: a forward with weights in bfloat16, whose gradients reach the float32 ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        low = {name: p.to(torch.bfloat16) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, low, (x.to(torch.bfloat16),))


def _compare(case: str, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    dtype = torch.float32 if case == "mixed precision" else torch.float64
    model = _wrapped(case, strategy, use_orig_params, dtype)
    plain = _net(case, dtype)
    inner = _LowPrecision(plain) if case == "mixed precision" else plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it
        reference = DistributedDataParallel(inner, broadcast_buffers=False)
    mine, theirs = (torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2) for m in (model, reference))
    losses, wanted = _losses(model, mine, case, dtype), _losses(reference, theirs, case, dtype)
    tol = 1e-5 if case == "mixed precision" else 1e-12
    assert_parity({"losses": torch.tensor(losses)}, {"losses": torch.tensor(wanted)}, tol=1e-5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "When using ..NO_SHARD")
        state = model.state_dict()
    own = plain.state_dict()
    assert list(state) == list(own)
    floats = [name for name in own if own[name].is_floating_point()]
    assert_parity({name: state[name] for name in floats}, {name: own[name] for name in floats}, tol=tol)
    assert all(torch.equal(state[name], own[name]) for name in own if name not in floats)


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_those_of_ddp(case: str, turn: int) -> None:
    """With three of the five strategies, and with `use_orig_params`, which changes nothing here, in turn."""
    index = 3 * CASES.index(case) + turn
    run(_compare, case, STRATEGIES[index % len(STRATEGIES)], bool(index % 2), ranks=4)
