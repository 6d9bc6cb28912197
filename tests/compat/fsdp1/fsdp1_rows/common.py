"""The model that rows wrap, how it trains, and what they ask of it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Stack
from ranks import quiet
from rows import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardfn.comm.buckets import whole
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp1 import StateDictType, wrap
from shardfn.testing import assert_close, assert_trees_close

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
BF16, FP32 = torch.bfloat16, torch.float32
TABLE = Table()
row = TABLE.row


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)
        self.ln = nn.LayerNorm(5)
        self.out = nn.Linear(5, 3)
        self.register_buffer("buf", torch.tensor([1.001, 1.002, 1.003]))
        self.register_buffer("np", torch.full((3,), 1.003), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.ln(self.fc(x)).tanh()) * self.buf * self.np


class Net(Stack):
    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(3, 3, bias=False), Block(), Block())
        self.said = "hello"

    def greet(self) -> str:
        return self.said


def wrapped(model: Any = None, policy: Any = "blocks", **kwargs: Any) -> Any:
    """`Net` with a unit for each block, or what is given."""
    chosen = wrap.ModuleWrapPolicy({Block}) if policy == "blocks" else policy
    return FSDP(Net() if model is None else model, auto_wrap_policy=chosen, **kwargs)


def batch(step: int = 0) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(100 + step))


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Name -> whole value of the parameters, without any API of FSDP."""
    return {n: whole(p) if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Any]:
    named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return {n: whole(g) if isinstance(g, DTensor) else g for n, g in named}


def trained(
    model: Any, reference: nn.Module, steps: int = 2, part: Callable[[Tensor], Tensor] = mine
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Train both with AdamW, one on its part of each batch, the other on all; their optimizers."""
    own, other = (torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01) for m in (model, reference))
    for step in range(steps):
        for one, optimizer, x in ((model, own, part(batch(step))), (reference, other, batch(step))):
            optimizer.zero_grad()
            loss_of(one, x).backward()
            optimizer.step()
    return own, other


def trains(model: Any, reference: nn.Module | None = None, **kwargs: Any) -> None:
    """Require that a wrapped model trains as the plain one does in one process."""
    reference = Net() if reference is None else reference
    trained(model, reference, **kwargs)
    assert_trees_close(values(model), values(reference), rtol=1e-4, atol=1e-5)


def fails(kind: type[Exception], words: str) -> Any:
    """An error of exactly this class that opens with these words."""
    return _Fails(kind, words)


class _Fails:
    def __init__(self, kind: type[Exception], words: str) -> None:
        self.kind, self.words = kind, words

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert kind is self.kind, f"expected {self.kind.__name__}, got {kind and kind.__name__}: {error}"
        assert str(error).startswith(self.words), str(error)
        return True


def warned(kind: type[Warning], words: str) -> Any:
    """A warning of this class that opens with these words."""
    return pytest.warns(kind, match="^" + re.escape(words))


@contextmanager
def flavour(model: nn.Module, kind: StateDictType, config: Any = None, optim_config: Any = None) -> Iterator[None]:
    """`state_dict_type` without its FutureWarning, which has a row of its own."""
    with quiet(FutureWarning), FSDP.state_dict_type(model, kind, config, optim_config):
        yield


def first_rank() -> bool:
    return dist.get_rank() == 0


def groups_of(*rows: list[int]) -> Any:
    """This rank's group of those that the rows name."""
    return dist.new_subgroups_by_enumeration(list(rows))[0]


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The states of a plain model's optimizer under the names of its parameters."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def same_state(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> None:
    """Require equal states of two optimizers of the same parameters, laid out in the same way."""
    assert one.state and one.state.keys() == two.state.keys()
    for parameter, had in one.state.items():
        got = two.state[parameter]
        assert had.keys() == got.keys()
        for what, value in had.items():
            assert type(value) is type(got[what]), what
            assert_close(got[what], value, rtol=0, atol=0, name=what)


def again(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)
