"""Wrappers around wrappers, in every order, as torch's FSDP1 class has them: losses, and parameters after two steps.

A row is an expression. Modules are `b`, a block, and `m`, one that is shared; `S(x,y)` is a Sequential. Wrappers are

    F G N   FSDP: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD         C R O   checkpoint_wrapper, one that is reentrant, offload
    P       torch.compile, in place                           D       DDP, beside instances
    L       a frozen block with an adapter, as PEFT makes them
"""

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name

from shardfn.compat.fsdp1 import FullyShardedDataParallel
from shardfn.testing import run

INSIDE = "b C(b) F(b) C(F(b)) F(C(b)) R(F(b)) F(R(b)) O(F(b)) F(O(b))".split()
ROWS = [f"{outer}({inner})" for outer, inner in product("CRO", ["F(b)"])] + [f"F({x}(b))" for x in "CRO"]
ROWS += [f"F(S({x},{y}))" for x in INSIDE[1:] for y in ("b", x)]
ROWS += [f"S({x},{x})" for x in INSIDE if "F" in x]
ROWS += [f"F({outer}(S({x},b)))" for outer, x in product("CRO", INSIDE)]
ROWS += [f"{outer}(F(S({x},b)))" for outer, x in product("CRO", ("F(b)", "F(C(b))"))]
ROWS += [f"F(S({x}(b),b))" for x in "GN"] + [f"{x}(S(F(C(b)),C(F(b))))" for x in "GN"] + ["F(C(S(G(b),N(b))))"]
ROWS += ["F(S(m,m))", "F(S(C(m),C(m)))", "F(C(S(m,m)))", "F(S(m,F(b),m))", "F(C(F(S(m,F(b),m))))"]
ROWS += ["F(P(b))", "P(F(b))", "F(S(P(F(b)),b))", "F(S(F(P(b)),C(F(P(b)))))"]
ROWS += ["S(F(b),D(b))", "F(L(b))", "F(S(L(b),b))", "F(S(F(L(b)),L(F(b))))", "F(C(L(b)))", "F(L(C(b)))"]
ROWS += ["S(D(L(b)),F(L(b)))", "F(C(S(F(L(b)),b)))", "F(S(P(F(L(b))),b))", "G(S(F(L(b)),b))", "F(S(N(L(b)),b))"]
EVERYDAY = "F(S(F(L(b)),L(F(b)))) F(C(b)) S(F(C(b)),F(C(b))) F(C(S(F(b),b))) F(O(S(F(C(b)),b)))".split()
EVERYDAY += ["C(F(S(F(b),b)))", "F(C(S(m,m)))"]
STRATEGIES = {"F": "FULL_SHARD", "G": "SHARD_GRAD_OP", "N": "NO_SHARD"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Adapted(nn.Module):
    """A module whose parameters are frozen, and a low-rank product beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base.requires_grad_(False), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def _compiled(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def _model(row: str, fsdp: Callable[..., nn.Module]) -> nn.Module:
    """The module that a row says."""

    def sharded(strategy: str) -> Callable[[nn.Module], nn.Module]:
        how = ShardingStrategy[strategy]
        return lambda module: fsdp(module, sharding_strategy=how, device_id=torch.device("cpu"), use_orig_params=True)

    torch.manual_seed(0)
    names: dict[str, Any] = {letter: sharded(strategy) for letter, strategy in STRATEGIES.items()}
    names |= {"S": nn.Sequential, "P": _compiled, "O": wrappers.offload_wrapper, "C": wrappers.checkpoint_wrapper}
    reentrant = wrappers.CheckpointImpl.REENTRANT
    names |= {"L": Adapted, "D": nn.parallel.DistributedDataParallel}
    names["R"] = lambda module: wrappers.checkpoint_wrapper(module, checkpoint_impl=reentrant)
    return eval(row.replace("b", "Block()"), {"Block": Block, "m": Block(), **names})


def _trained(row: str, fsdp: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and whole parameters after them, by names without those of wrappers."""
    model = _model(row, fsdp)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), list[float]()
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = model(x.requires_grad_()).square().mean()  # a reentrant checkpoint asks for that
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with fsdp.summon_full_params(model):
        return losses, {clean_tensor_name(name): p.detach().clone() for name, p in model.named_parameters()}


def _alike(rows: list[str]) -> dict[str, str]:
    """What differs from torch's class, by row."""
    problems = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            expected, wanted = _trained(row, TorchFSDP)
            try:
                losses, params = _trained(row, FullyShardedDataParallel)
            except Exception as error:
                problems[row] = f"{type(error).__name__}: {error}"
                continue
            if params.keys() != wanted.keys() or not torch.allclose(torch.tensor(losses), torch.tensor(expected)):
                problems[row] = f"{losses}, {sorted(params)} instead of {expected}, {sorted(wanted)}"
            elif not all(torch.allclose(params[name], wanted[name], atol=1e-6) for name in wanted):
                problems[row] = "parameters differ"
    return problems


def test_there_are_rows_enough() -> None:
    assert len(set(ROWS)) == len(ROWS) >= 60 and set(EVERYDAY) <= set(ROWS)


def test_a_few_rows_are_as_torchs() -> None:
    assert run(_alike, EVERYDAY, ranks=2) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_row_is_as_torchs(part: int) -> None:
    rows = [row for row in ROWS if row not in EVERYDAY][part::8]
    assert run(_alike, rows, ranks=2) == [{}, {}]
