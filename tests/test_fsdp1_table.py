"""FSDP1's whole surface, one case a row: each runs on ranks and checks what a script that uses the row relies on.

A row is one argument, method, config class, policy, observed behaviour, error, import door or private name of torch's
FSDP1 1.11 to 2.13. Its status is `served` (it does what torch's does), `refused` (an error names what to use instead)
or `missing`. `ROWS` is data: the docs may print it. Known differences: parameters are `nn.Parameter(DTensor)`s under
the model's own names instead of flat pieces, and so are the values of sharded state dicts.
"""

import copy
import importlib
import inspect
import os
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from drawing import untyped
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.tensor import DTensor

from shardfn.compat import fsdp1
from shardfn.compat.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    wrap,
)
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp1._runtime_utils import _lazy_init
from shardfn.compat.fsdp1.sharded_grad_scaler import ShardedGradScaler
from shardfn.testing import assert_close, assert_trees_close, count_collectives, run

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
BF16, FP32 = torch.bfloat16, torch.float32
STATUSES = ("served", "refused", "missing")


@dataclass(frozen=True)
class Row:
    """One row: where it stands, what becomes of it here, and the function that checks this on ranks."""

    section: str
    name: str
    status: str
    note: str
    ranks: int
    case: Callable[[], None]


ROWS: dict[str, Row] = {}  # "1.2 no_sync" -> its row


def row(section: str, name: str, status: str = "served", ranks: int = 2) -> Callable[[Any], Any]:
    """Enter a case under its row; the first line of its docstring is the row's note."""

    def enter(case: Callable[[], None]) -> Callable[[], None]:
        key, note = f"{section} {name}", (case.__doc__ or "").strip().splitlines()
        assert key not in ROWS and status in STATUSES and note, key
        ROWS[key] = Row(section, name, status, note[0], ranks, case)
        return case

    return enter


# ---------------------------------------------------------------------------------------------------------------------
# The model, and how it trains


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


class Net(nn.Module):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Linear(3, 3, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])
        self.said = "hello"

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return x

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
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Any]:
    named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in named}


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
def quiet(*kinds: type[Warning]) -> Iterator[None]:
    with warnings.catch_warnings():
        for kind in kinds or (FutureWarning,):
            warnings.simplefilter("ignore", kind)
        yield


@contextmanager
def flavour(model: nn.Module, kind: StateDictType, config: Any = None, optim_config: Any = None) -> Iterator[None]:
    """`state_dict_type` without its FutureWarning, which has a row of its own."""
    with quiet(), FSDP.state_dict_type(model, kind, config, optim_config):
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


# ---------------------------------------------------------------------------------------------------------------------
# 1.1 Constructor


@row("1.1", "module")
def wraps_in_place() -> None:
    """Parameters become shards in the module itself; containers without a forward are warned about."""
    model = Net()
    fsdp = wrapped(model)
    assert isinstance(fsdp, FSDP) and fsdp.module is model
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
    assert all(isinstance(layer, FSDP) for layer in model.layers)
    trains(fsdp)

    class Many(nn.ModuleList): ...

    words = "FSDP will not all-gather parameters for containers that do not implement forward"
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)}), Many([nn.Linear(2, 2)])):
        with warned(UserWarning, words):
            FSDP(container)
    with pytest.raises(TypeError):
        FSDP(untyped(None))


@row("1.1", "process_group", ranks=4)
def takes_a_process_group() -> None:
    """A group of ranks, by position too; or `(shard, replicate)` for hybrid strategies."""
    half = groups_of([0, 1], [2, 3])
    fsdp = FSDP(Net(), half, None, None, wrap.ModuleWrapPolicy({Block}))
    assert fsdp.world_size == 2 and fsdp.rank == dist.get_rank() % 2
    assert dist.get_process_group_ranks(fsdp.process_group) == dist.get_process_group_ranks(half)
    trains(fsdp, part=lambda x: x.chunk(2)[dist.get_rank() % 2])
    across = groups_of([0, 2], [1, 3])
    hybrid = wrapped(process_group=(half, across), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert hybrid.world_size == 2 and hybrid.emb.weight.to_local().numel() < 9
    trains(hybrid)


@row("1.1", "sharding_strategy", ranks=4)
def takes_every_strategy() -> None:
    """None is FULL_SHARD; all five train alike; one rank is NO_SHARD."""
    assert wrapped().sharding_strategy is ShardingStrategy.FULL_SHARD
    for strategy in ShardingStrategy:
        with quiet():
            fsdp = wrapped(sharding_strategy=strategy)
        assert fsdp.sharding_strategy is strategy
        whole = strategy is ShardingStrategy.NO_SHARD
        assert (fsdp.layers[0].fc.weight.to_local().numel() == 15) == whole
        trains(fsdp)
    before, os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"], "2"  # as on two machines
    try:
        hybrid = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before
    assert hybrid.world_size == 2
    trains(hybrid)
    alone = groups_of([0], [1], [2], [3])
    with quiet(UserWarning):
        fsdp = wrapped(process_group=alone)
    assert fsdp.sharding_strategy is ShardingStrategy.NO_SHARD
    trains(fsdp, part=lambda x: x)


@row("1.1", "cpu_offload")
def offloads() -> None:
    """`CPUOffload(True)` keeps shards, gradients and optimizer states on the host."""
    assert wrapped().cpu_offload == CPUOffload(offload_params=False)
    fsdp = wrapped(cpu_offload=CPUOffload(offload_params=True))
    assert fsdp.cpu_offload == CPUOffload(offload_params=True)
    trains(fsdp)
    assert all(p.device.type == "cpu" and p.grad is not None and p.grad.device.type == "cpu" for p in fsdp.parameters())


@row("1.1", "fsdp_auto_wrap_policy")
def takes_the_old_name_of_the_policy() -> None:
    """The name of torch 1.11 for `auto_wrap_policy`; both at once are an error."""
    fsdp = FSDP(Net(), fsdp_auto_wrap_policy=partial(wrap.default_auto_wrap_policy, min_num_params=40))
    assert [isinstance(layer, FSDP) for layer in fsdp.layers] == [True, True]
    with pytest.raises(TypeError, match="old name"):
        FSDP(Net(), auto_wrap_policy=wrap.always_wrap_policy, fsdp_auto_wrap_policy=wrap.always_wrap_policy)


@row("1.1", "auto_wrap_policy")
def takes_every_policy() -> None:
    """Functions asked by keyword, with the third keyword of either version, and policy objects."""
    asked = set()

    def new(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.add("nonwrapped_numel")
        return recurse or isinstance(module, Block)

    def old(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        asked.add("unwrapped_params")
        return recurse or isinstance(module, Block)

    def older(module: nn.Module, recurse: bool, unwrapped_params: int, wanted: type) -> bool:
        asked.add("partial")
        return recurse or isinstance(module, wanted)

    def keywords(**given: Any) -> bool:
        asked.add(f"**{len(given)}")
        return given["recurse"] or isinstance(given["module"], Block)

    chosen: list[Any] = [new, old, partial(older, wanted=Block), keywords, wrap.ModuleWrapPolicy({Block})]
    chosen.append(wrap.CustomPolicy(lambda module: isinstance(module, Block)))
    for policy in chosen:
        fsdp = wrapped(policy=policy)
        assert len(FSDP.fsdp_modules(fsdp)) == 3 and all(isinstance(layer, FSDP) for layer in fsdp.layers)
    assert asked == {"nonwrapped_numel", "unwrapped_params", "partial", "**3"}
    assert len(FSDP.fsdp_modules(FSDP(Net()))) == 1
    trains(wrapped(policy=old))


@row("1.1", "backward_prefetch")
def takes_backward_prefetch() -> None:
    """Kept, BACKWARD_PRE by default, None is a choice; the numbers are the same."""
    assert wrapped().backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    for choice in (None, *BackwardPrefetch):
        fsdp = wrapped(backward_prefetch=choice)
        assert fsdp.backward_prefetch is choice
        trains(fsdp)


@row("1.1", "mixed_precision")
def takes_mixed_precision() -> None:
    """None is full precision; else computes in `param_dtype` on full-precision shards."""
    assert wrapped().mixed_precision == MixedPrecision()
    assert wrapped()(mine(batch())).dtype == FP32
    with quiet(UserWarning):
        fsdp = wrapped(mixed_precision=MixedPrecision(BF16, FP32, BF16))
    assert fsdp(mine(batch())).dtype == BF16 and {p.dtype for p in fsdp.parameters()} == {FP32}


@row("1.1", "ignored_modules")
def leaves_ignored_modules_alone() -> None:
    """Their parameters stay as they are and instances inside them count; any iterable will do."""
    model = Net()
    weight = model.emb.weight
    fsdp = wrapped(model, ignored_modules=iter([model.emb]))
    assert fsdp.emb.weight is weight and not isinstance(weight, DTensor)
    assert isinstance(fsdp.layers[0].fc.weight, DTensor)
    fsdp(mine(batch())).sum().backward()
    assert weight.grad is not None
    assert "emb.weight" in fsdp.state_dict()

    model = Net()
    block = untyped(model.layers[0])
    block.fc = FSDP(block.fc)
    outer = FSDP(model, ignored_modules=[model.layers[0]])
    assert isinstance(outer.layers[0].fc.weight, DTensor) and not isinstance(outer.layers[0].out.weight, DTensor)
    assert len(FSDP.fsdp_modules(outer)) == 2
    outer(mine(batch())).sum().backward()
    assert isinstance(outer.layers[0].fc.weight.grad, DTensor)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3))


@row("1.1", "param_init_fn")
def fills_meta_tensors() -> None:
    """Called for each module with meta tensors; without it `reset_parameters()` is."""
    asked: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        asked.append(module)
        module.to_empty(device=torch.device("cpu"), recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    fsdp = FSDP(on_meta(), param_init_fn=fill)
    assert [type(m).__name__ for m in asked if list(m.parameters(recurse=False))] == ["Linear", "LayerNorm", "Linear"]
    assert all(bool((value == 0.25).all()) for value in values(fsdp).values())
    found = values(FSDP(on_meta()))
    assert not any(value.is_meta for value in found.values())
    assert_close(found["1.weight"], torch.ones(5))
    assert 0 < found["0.weight"].abs().max() < 1
    fsdp(mine(batch())).sum().backward()

    with pytest.raises(Exception, match="callable"):
        FSDP(on_meta(), param_init_fn=3)


@row("1.1", "device_id")
def takes_a_device() -> None:
    """`torch.device("cpu")` and none at all compute on the host; an index without an accelerator is an error."""
    for device in (None, torch.device("cpu")):
        fsdp = wrapped(device_id=device)
        trains(fsdp)
        if device is not None or not torch.accelerator.is_available():
            assert fsdp.compute_device == torch.device("cpu")
    if not torch.accelerator.is_available():
        with fails(RuntimeError, "FSDP needs a non-CPU accelerator device"):
            wrapped(device_id=0)


@row("1.1", "sync_module_states")
def gives_all_ranks_the_first_ones_values() -> None:
    """The first rank's parameters and buffers count, on the host too, and when the others have meta tensors."""
    model = Net(seed=5 + dist.get_rank())
    untyped(model.layers[0]).buf.mul_(1 + dist.get_rank())
    fsdp = wrapped(model, sync_module_states=True)
    assert_trees_close(values(fsdp), values(Net(seed=5)), rtol=0, atol=0)
    assert_close(fsdp.layers[0].buf, untyped(Block()).buf, rtol=0, atol=0)
    first = Net(seed=7)
    with torch.device("meta"):
        others = Net(seed=7)
    model = copy.deepcopy(first) if first_rank() else others
    fill = None if first_rank() else lambda m: m.to_empty(device=torch.device("cpu"), recurse=False)
    fsdp = wrapped(model, sync_module_states=True, param_init_fn=fill)
    assert_trees_close(values(fsdp), values(first), rtol=0, atol=0)
    assert_trees_close(dict(fsdp.named_buffers()), dict(first.named_buffers()), rtol=0, atol=0)
    trains(fsdp, first)


@row("1.1", "forward_prefetch")
def takes_forward_prefetch() -> None:
    """Kept, False by default; the numbers are the same."""
    assert wrapped().forward_prefetch is False
    fsdp = wrapped(forward_prefetch=True)
    assert fsdp.forward_prefetch is True
    trains(fsdp)


@row("1.1", "limit_all_gathers")
def takes_limit_all_gathers() -> None:
    """Kept, True by default; the numbers are the same."""
    assert wrapped().limit_all_gathers is True
    fsdp = wrapped(limit_all_gathers=False)
    assert fsdp.limit_all_gathers is False
    trains(fsdp)


@row("1.1", "use_orig_params")
def takes_use_orig_params() -> None:
    """Kept, False by default; parameters have the model's names in both, so groups by name work."""
    assert wrapped()._use_orig_params is False
    for choice in (False, True):
        fsdp = wrapped(use_orig_params=choice)
        assert fsdp._use_orig_params is choice
        assert [n for n, _ in fsdp.named_parameters()] == [n for n, _ in Net().named_parameters()]
        trains(fsdp)


@row("1.1", "ignored_parameters")
def takes_ignored_parameters() -> None:
    """The name of torch 2.0 for `ignored_states`."""
    model = Net()
    weight = model.emb.weight
    fsdp = wrapped(model, ignored_parameters=[weight])
    assert fsdp.emb.weight is weight and isinstance(fsdp.layers[0].fc.weight, DTensor)
    fsdp(mine(batch())).sum().backward()
    assert weight.grad is not None


@row("1.1", "ignored_states")
def takes_ignored_states() -> None:
    """All parameters or all modules."""
    for pick in (lambda net: [net.emb.weight], lambda net: [net.emb]):
        model = Net()
        weight = model.emb.weight
        fsdp = wrapped(model, ignored_states=pick(model))
        assert fsdp.emb.weight is weight and isinstance(fsdp.layers[0].fc.weight, DTensor)
        fsdp(mine(batch())).sum().backward()
        assert weight.grad is not None


@row("1.1", "device_mesh", ranks=4)
def takes_a_mesh() -> None:
    """1-D shards, 2-D is `(replicate, shard)`; a slice of a larger mesh too; sharded state dicts have DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = wrapped(device_mesh=init_device_mesh("cpu", (4,)))
    assert line.world_size == 4
    trains(line)
    part = wrapped(device_mesh=mesh["a"])
    assert part.world_size == 2
    trains(part, part=lambda x: x.chunk(2)[dist.get_rank() // 2])
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        hybrid = wrapped(device_mesh=mesh, sharding_strategy=strategy)
        assert hybrid.world_size == 2
        trains(hybrid)
        with flavour(hybrid, SHARDED):
            assert isinstance(hybrid.state_dict()["emb.weight"], DTensor)


@row("1.1", "order of 1.11")
def takes_the_order_of_1_11() -> None:
    """`(module, process_group, cpu_offload, fsdp_auto_wrap_policy, backward_prefetch)` by position."""
    policy = partial(wrap.default_auto_wrap_policy, min_num_params=40)
    fsdp = FSDP(Net(), None, CPUOffload(True), policy, BackwardPrefetch.BACKWARD_POST)
    assert fsdp.cpu_offload == CPUOffload(True) and fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert fsdp.sharding_strategy is ShardingStrategy.FULL_SHARD and len(FSDP.fsdp_modules(fsdp)) == 3
    trains(fsdp)
    with pytest.raises(TypeError, match="two values"):
        FSDP(Net(), None, CPUOffload(True), CPUOffload(False))


@row("1.1", "order of 1.12 to 2.13")
def takes_the_present_order() -> None:
    """`(module, process_group, sharding_strategy, cpu_offload, auto_wrap_policy, ...)` by position."""
    given: list[Any] = [None, ShardingStrategy.SHARD_GRAD_OP, CPUOffload(True), wrap.ModuleWrapPolicy({Block})]
    given += [BackwardPrefetch.BACKWARD_POST, MixedPrecision(reduce_dtype=FP32), None, None, torch.device("cpu")]
    fsdp = FSDP(Net(), *given, True, True, False, True, None, None)
    assert fsdp.sharding_strategy is given[1] and fsdp.cpu_offload == given[2]
    assert fsdp.backward_prefetch is given[4] and fsdp.mixed_precision == given[5]
    assert (fsdp.forward_prefetch, fsdp.limit_all_gathers, fsdp._use_orig_params) == (True, False, True)
    theirs = list(inspect.signature(torch_fsdp.FullyShardedDataParallel.__init__).parameters)
    assert list(inspect.signature(FSDP.__init__).parameters)[: len(theirs)] == theirs
    trains(fsdp)


# ---------------------------------------------------------------------------------------------------------------------
# 1.2 Methods


@row("1.2", "module")
def has_a_module() -> None:
    """The wrapped module; inside a wrapper for activation checkpointing, the one that it wraps."""
    model = Net()
    assert wrapped(model).module is model
    model = Net()
    outer = FSDP(checkpoint_wrapper(model))
    assert outer.module is model and isinstance(outer._fsdp_wrapped_module, ActivationWrapper)


@row("1.2", "forward")
def runs_forward() -> None:
    """Runs with whole weights, inputs by keyword too, and shards again."""
    fsdp, x = wrapped(), mine(batch())
    assert_close(fsdp(x), Net()(x), rtol=1e-5, atol=1e-6)
    assert_close(fsdp(x=x), Net()(x), rtol=1e-5, atol=1e-6)
    assert_close(fsdp.forward(x), Net()(x), rtol=1e-5, atol=1e-6)
    assert all(isinstance(p, DTensor) for p in fsdp.parameters())
    assert_close(fsdp.layers[0](x), Net().layers[0](x), rtol=1e-5, atol=1e-6)


@row("1.2", "__getattr__, __getitem__")
def forwards_attributes() -> None:
    """What the instance lacks is looked up in the module; indexing goes there too."""
    fsdp = wrapped()
    assert fsdp.said == "hello" and fsdp.greet() == "hello" and fsdp.layers[1] is fsdp.module.layers[1]
    with pytest.raises(AttributeError):
        _ = fsdp.nothing
    inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    fsdp = FSDP(inner)
    assert fsdp[1] is inner[1] and len(fsdp[:2]) == 2 and fsdp[-1] is inner[2]


@row("1.2", "check_is_root")
def knows_the_root() -> None:
    """Only the outermost is, and may find out before the first forward."""
    fsdp = wrapped()
    assert fsdp.check_is_root() is True
    assert fsdp.layers[0].check_is_root() is False
    assert fsdp._is_root is True and fsdp.layers[0]._is_root is False


@row("1.2", "fsdp_modules")
def lists_instances() -> None:
    """All in the order of `modules()`, or the outermost ones; of plain modules around them too."""
    fsdp = wrapped()
    assert FSDP.fsdp_modules(fsdp) == [fsdp, fsdp.layers[0], fsdp.layers[1]]
    assert FSDP.fsdp_modules(fsdp) == [m for m in fsdp.modules() if isinstance(m, FSDP)]
    assert FSDP.fsdp_modules(fsdp, root_only=True) == [fsdp]
    assert FSDP.fsdp_modules(nn.Sequential(fsdp), root_only=True) == [fsdp]
    assert FSDP.fsdp_modules(Net()) == []


@row("1.2", "apply")
def applies_to_whole_parameters() -> None:
    """The function sees whole parameters, and its changes stay; not inside `summon_full_params`."""
    fsdp, seen = wrapped(), {}

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen[tuple(module.weight.shape)] = type(module.weight)
            with torch.no_grad():
                module.weight.fill_(0.5)

    assert fsdp.apply(fill) is fsdp
    assert seen == {(3, 3): nn.Parameter, (5, 3): nn.Parameter, (3, 5): nn.Parameter}
    found = values(fsdp)
    assert all(bool((found[n] == 0.5).all()) for n in ("emb.weight", "layers.0.fc.weight", "layers.1.out.weight"))
    with FSDP.summon_full_params(fsdp), fails(ValueError, "expected to be in states"):
        fsdp.apply(fill)


@row("1.2", "set_state_dict_type")
def sets_the_flavour() -> None:
    """Sets it on all instances, with configs, and returns what it was."""
    fsdp = wrapped()
    with quiet():
        before = FSDP.set_state_dict_type(fsdp, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
        assert before == StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
        now = FSDP.get_state_dict_type(fsdp)
        want = StateDictSettings(SHARDED, ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig())
        assert now == want and FSDP.get_state_dict_type(fsdp.layers[1]) == want
        assert FSDP.set_state_dict_type(fsdp, LOCAL) == want
        with fails(RuntimeError, "Expected state_dict_config of type"):
            FSDP.set_state_dict_type(fsdp, FULL, ShardedStateDictConfig())
        with fails(RuntimeError, "Expected optim_state_dict_config of type"):
            FSDP.set_state_dict_type(fsdp, FULL, None, ShardedOptimStateDictConfig())


@row("1.2", "get_state_dict_type")
def tells_the_flavour() -> None:
    """`StateDictSettings` of the tree; instances that differ are an error."""
    fsdp = wrapped()
    want = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    assert FSDP.get_state_dict_type(fsdp) == want and fsdp._state_dict_type is FULL
    with quiet():
        FSDP.set_state_dict_type(fsdp.layers[0], SHARDED)
    with fails(AssertionError, "All FSDP modules must have the same state dict settings."):
        FSDP.get_state_dict_type(fsdp)


@row("1.2", "state_dict_type")
def sets_the_flavour_for_a_while() -> None:
    """A context, on the class or an instance, that restores what was, after an error too."""
    fsdp = wrapped()
    before = FSDP.get_state_dict_type(fsdp)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with quiet():
        with FSDP.state_dict_type(fsdp, FULL, config):
            assert FSDP.get_state_dict_type(fsdp).state_dict_config == config
        with fsdp.state_dict_type(fsdp, LOCAL):
            assert fsdp.layers[0]._state_dict_type is LOCAL
        with pytest.raises(KeyError), FSDP.state_dict_type(module=fsdp, state_dict_type=SHARDED):
            raise KeyError
    assert FSDP.get_state_dict_type(fsdp) == before


@row("1.2", "state_dict, load_state_dict")
def saves_and_loads() -> None:
    """A plain model's dict, both ways; the result of loading is torch's, and bad keys are its error."""
    fsdp, plain = wrapped(), Net(seed=9)
    result = fsdp.load_state_dict(plain.state_dict())
    assert str(result) == "<All keys matched successfully>"
    state = fsdp.state_dict()
    assert list(state) == list(plain.state_dict())
    assert_trees_close(dict(state), dict(plain.state_dict()), rtol=0, atol=0)
    plain.load_state_dict(state)
    short = dict(state)
    del short["emb.weight"]
    assert fsdp.load_state_dict(short, strict=False).missing_keys == ["emb.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*emb\.weight"):
        fsdp.load_state_dict(short)
    inner = fsdp.layers[0].state_dict()
    assert list(inner) == list(Block().state_dict()) and inner["fc.weight"].shape == (5, 3)


@row("1.2", "summon_full_params")
def summons() -> None:
    """A context, on the class or the instance, with whole parameters whose changes count or do not."""
    fsdp, plain = wrapped(), Net()
    for context in (FSDP.summon_full_params(fsdp), fsdp.summon_full_params(), fsdp.summon_full_params(fsdp)):
        with context:
            assert_trees_close(dict(fsdp.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=0)
    for writeback in (False, True):
        with FSDP.summon_full_params(fsdp, writeback=writeback), torch.no_grad():
            fsdp.emb.weight.fill_(2.0)
        assert bool((values(fsdp)["emb.weight"] == 2).all()) is writeback
    with FSDP.summon_full_params(fsdp, recurse=False):
        assert not isinstance(fsdp.emb.weight, DTensor) and isinstance(fsdp.layers[0].fc.weight, DTensor)
    with FSDP.summon_full_params(nn.Sequential(fsdp)):
        assert fsdp.layers[0].fc.weight.shape == (5, 3) and not isinstance(fsdp.layers[0].fc.weight, DTensor)
    with quiet(UserWarning), FSDP.summon_full_params(fsdp, offload_to_cpu=True):
        assert fsdp.emb.weight.device.type == "cpu"


@row("1.2", "named_parameters, named_buffers")
def names_parameters_and_buffers() -> None:
    """The model's own names, in its order, in and outside of `summon_full_params`."""
    fsdp, plain = wrapped(), Net()
    names, buffers = [n for n, _ in plain.named_parameters()], [n for n, _ in plain.named_buffers()]
    for context in (quiet(), FSDP.summon_full_params(fsdp)):
        with context:
            assert [n for n, _ in fsdp.named_parameters()] == names
            assert [n for n, _ in fsdp.named_buffers()] == buffers
    assert [n for n, _ in fsdp.named_parameters("a", recurse=False)] == []
    assert next(iter(fsdp.named_parameters("a")))[0] == "a.emb.weight"


@row("1.2", "no_sync")
def accumulates() -> None:
    """Gradients add up on each rank without communication, and the next backward reduces them."""
    fsdp, plain = wrapped(), Net()
    with fsdp.no_sync(), count_collectives() as counts:
        loss_of(fsdp, mine(batch(0))).backward()
    assert counts.reduce_scatter == counts.all_reduce == 0
    loss_of(fsdp, mine(batch(1))).backward()
    for step in range(2):
        loss_of(plain, batch(step)).backward()
    assert_trees_close(gradients(fsdp), gradients(plain), rtol=1e-4, atol=1e-6)
    assert all(isinstance(p.grad, DTensor) and p.grad.placements == p.placements for p in fsdp.parameters())
    with FSDP.summon_full_params(fsdp), fails(ValueError, "expected to be in states"), fsdp.no_sync():
        pass


@row("1.2", "params_with_grad")
def lists_parameters_with_gradients() -> None:
    """The parameters that have a gradient (torch 1.12 and 1.13)."""
    fsdp = wrapped()
    assert fsdp.params_with_grad == []
    fsdp(mine(batch())).sum().backward()
    assert len(fsdp.params_with_grad) == 13 and all(p.grad is not None for p in fsdp.params_with_grad)


@row("1.2", "clip_grad_norm_", ranks=4)
def clips() -> None:
    """The total norm over all ranks, whatever the strategy and p; gradients are scaled in place."""
    for p in (2.0, 1, float("inf")):
        for strategy in ShardingStrategy:
            with quiet():
                fsdp, plain = wrapped(sharding_strategy=strategy), Net()
            loss_of(fsdp, mine(batch())).backward()
            loss_of(plain, batch()).backward()
            norm, want = fsdp.clip_grad_norm_(0.1, p), nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
            assert type(norm) is Tensor and norm.dim() == 0 and norm.dtype == FP32
            assert_close(norm, want, rtol=1e-4, atol=1e-6)
            assert_trees_close(gradients(fsdp), gradients(plain), rtol=1e-4, atol=1e-6)


@row("1.2", "full_optim_state_dict")
def saves_a_full_optimizer_state() -> None:
    """By names, whole, on the first rank unless asked otherwise; others have `{}`."""
    fsdp, plain = wrapped(), Net()
    optimizer, other = trained(fsdp, plain)
    with quiet():
        state = FSDP.full_optim_state_dict(fsdp, optimizer)
        every = FSDP.full_optim_state_dict(fsdp, optimizer, None, False, None)
    assert bool(state) is first_rank()
    assert_trees_close(every["state"], by_name(plain, other), rtol=1e-3, atol=1e-5)
    if state:
        assert_trees_close(state["state"], every["state"], rtol=0, atol=0)


@row("1.2", "sharded_optim_state_dict")
def saves_a_sharded_optimizer_state() -> None:
    """By names, with DTensors."""
    fsdp, plain = wrapped(), Net()
    optimizer, other = trained(fsdp, plain)
    with quiet():
        state = FSDP.sharded_optim_state_dict(fsdp, optimizer, group=None)
    assert isinstance(state["state"]["emb.weight"]["exp_avg"], DTensor)
    assert_trees_close(state["state"], by_name(plain, other), rtol=1e-3, atol=1e-5)


@row("1.2", "shard_full_optim_state_dict")
def shards_a_full_optimizer_state() -> None:
    """From a whole state that every rank has, what `optim.load_state_dict` takes."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    with quiet():
        state = FSDP.full_optim_state_dict(fsdp, optimizer, rank0_only=False)
        made = FSDP.shard_full_optim_state_dict(state, fsdp, optim=optimizer)
    new = again(fsdp)
    new.load_state_dict(made)
    same_state(optimizer, new)


@row("1.2", "flatten_sharded_optim_state_dict")
def flattens_a_sharded_optimizer_state() -> None:
    """From a sharded state, what `optim.load_state_dict` takes; in the orders of 1.13 and 2.0."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    with quiet():
        state = FSDP.sharded_optim_state_dict(fsdp, optimizer)
        made = FSDP.flatten_sharded_optim_state_dict(state, fsdp, optimizer)
        older = FSDP.flatten_sharded_optim_state_dict(state, fsdp, list(fsdp.parameters()), optimizer)
    for one in (made, older):
        new = again(fsdp)
        new.load_state_dict(one)
        same_state(optimizer, new)


@row("1.2", "scatter_full_optim_state_dict")
def scatters_a_full_optimizer_state() -> None:
    """From a whole state that only the first rank has, what `optim.load_state_dict` takes."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    with quiet():
        state = FSDP.full_optim_state_dict(fsdp, optimizer)
        made = FSDP.scatter_full_optim_state_dict(state if first_rank() else None, fsdp, optim=optimizer)
    new = again(fsdp)
    new.load_state_dict(made)
    same_state(optimizer, new)


@row("1.2", "rekey_optim_state_dict")
def rekeys() -> None:
    """Names to ids in the order of the plain model's parameters, and back."""
    fsdp, plain = wrapped(), Net()
    optimizer, other = trained(fsdp, plain)
    with quiet():
        named = FSDP.full_optim_state_dict(fsdp, optimizer, rank0_only=False)
    ids = FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, plain)
    assert sorted(ids["state"]) == list(range(13)) and ids["param_groups"][0]["params"] == list(range(13))
    assert_trees_close(ids["state"], other.state_dict()["state"], rtol=1e-3, atol=1e-5)
    other.load_state_dict(ids)
    back = FSDP.rekey_optim_state_dict(ids, OptimStateKeyType.PARAM_NAME, plain)
    assert_trees_close(back["state"], named["state"], rtol=0, atol=0)


@row("1.2", "optim_state_dict")
def saves_an_optimizer_state() -> None:
    """In the flavour of `state_dict_type`; a state that is given, or the optimizer's own."""
    fsdp, plain = wrapped(), Net()
    optimizer, other = trained(fsdp, plain)
    want = by_name(plain, other)
    state = FSDP.optim_state_dict(fsdp, optimizer)
    assert_trees_close(state["state"], want, rtol=1e-3, atol=1e-5)
    given = FSDP.optim_state_dict(fsdp, optimizer, optimizer.state_dict(), None)
    assert_trees_close(given["state"], state["state"], rtol=0, atol=0)
    with flavour(fsdp, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        assert bool(FSDP.optim_state_dict(fsdp, optimizer)) is first_rank()
    with flavour(fsdp, SHARDED):
        sharded = FSDP.optim_state_dict(fsdp, optimizer)["state"]
    assert isinstance(sharded["emb.weight"]["exp_avg"], DTensor)
    assert_trees_close(sharded, want, rtol=1e-3, atol=1e-5)


@row("1.2", "optim_state_dict_to_load")
def loads_an_optimizer_state() -> None:
    """What `optim.load_state_dict` takes; in the orders of 2.0 and 2.1, directly too, from the first rank too."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    state = FSDP.optim_state_dict(fsdp, optimizer)
    for made in (
        FSDP.optim_state_dict_to_load(fsdp, optimizer, state),
        FSDP.optim_state_dict_to_load(state, fsdp, optimizer),
        FSDP.optim_state_dict_to_load(model=fsdp, optim=optimizer, optim_state_dict=state),
    ):
        new = again(fsdp)
        new.load_state_dict(made)
        same_state(optimizer, new)
    new = again(fsdp)
    FSDP.optim_state_dict_to_load(fsdp, new, state, False, True)
    same_state(optimizer, new)
    with flavour(fsdp, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        made = FSDP.optim_state_dict_to_load(fsdp, optimizer, state if first_rank() else {})
    new = again(fsdp)
    new.load_state_dict(made)
    same_state(optimizer, new)
    with flavour(fsdp, SHARDED):
        made = FSDP.optim_state_dict_to_load(fsdp, optimizer, FSDP.optim_state_dict(fsdp, optimizer))
    new = again(fsdp)
    new.load_state_dict(made)
    same_state(optimizer, new)


@row("1.2", "optim_state_dict_post_hook, load_optim_state_dict_pre_hook")
def has_the_hooks_of_2_0() -> None:
    """The same two under the names that torch 2.0 had for hooks."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    state = FSDP.optim_state_dict_post_hook(fsdp, optimizer, optimizer.state_dict())
    assert_trees_close(state["state"], FSDP.optim_state_dict(fsdp, optimizer)["state"], rtol=0, atol=0)
    new = again(fsdp)
    new.load_state_dict(FSDP.load_optim_state_dict_pre_hook(fsdp, optimizer, state))
    same_state(optimizer, new)


@row("1.2", "register_comm_hook")
def lets_a_hook_reduce() -> None:
    """`hook(state, grad)` under NO_SHARD, else `hook(state, full_grad, own_part)`; its result is the gradient."""
    asked: list[int] = []

    def into_parts(state: Any, full: Tensor, own: Tensor) -> None:
        asked.append(state)
        assert full.dim() == own.dim() == 1 and full.numel() == 2 * own.numel()
        with quiet():  # the name that scripts have is an old one
            dist.reduce_scatter_tensor(own, full)
        own.div_(4)

    def in_place(state: Any, grad: Tensor) -> None:
        asked.append(state)
        dist.all_reduce(grad)
        grad.div_(4)

    plain = Net()
    loss_of(plain, batch()).backward()
    want = {name: grad / 2 for name, grad in gradients(plain).items()}
    for strategy, hook in ((ShardingStrategy.FULL_SHARD, into_parts), (ShardingStrategy.NO_SHARD, in_place)):
        with quiet(FutureWarning, UserWarning):
            fsdp = wrapped(sharding_strategy=strategy)
        fsdp.register_comm_hook(7, hook)
        loss_of(fsdp, mine(batch())).backward()
        assert asked and set(asked) == {7}
        assert_trees_close(gradients(fsdp), want, rtol=1e-4, atol=1e-6)
        asked.clear()


@row("1.2", "_unshard", "refused")
def refuses_unshard() -> None:
    """An error that names `summon_full_params`."""
    with pytest.raises(AttributeError, match="summon_full_params"):
        wrapped()._unshard(async_op=True)


# ---------------------------------------------------------------------------------------------------------------------
# 1.3 Config classes


def is_torchs(*names: str) -> None:
    """These are torch's own, and pickle."""
    for name in names:
        assert getattr(fsdp1, name) is getattr(torch_fsdp, name) is pickle.loads(pickle.dumps(getattr(fsdp1, name)))


def defaults(kind: Any) -> dict[str, Any]:
    made = kind()
    assert pickle.loads(pickle.dumps(made)) == made
    return {field.name: getattr(made, field.name) for field in fields(made)}


@row("1.3", "ShardingStrategy")
def has_sharding_strategies() -> None:
    """torch's own enum: values 1 to 5."""
    is_torchs("ShardingStrategy")
    names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    assert [ShardingStrategy(value).name for value in range(1, 6)] == names


@row("1.3", "BackwardPrefetch")
def has_backward_prefetch() -> None:
    """torch's own enum."""
    is_torchs("BackwardPrefetch")
    assert [each.name for each in BackwardPrefetch] == ["BACKWARD_PRE", "BACKWARD_POST"]


@row("1.3", "CPUOffload")
def has_cpu_offload() -> None:
    """torch's own class; off by default."""
    is_torchs("CPUOffload")
    assert defaults(CPUOffload) == {"offload_params": False}


@row("1.3", "MixedPrecision")
def has_mixed_precision() -> None:
    """torch's own class, with its fields and defaults."""
    is_torchs("MixedPrecision")
    want = {"param_dtype": None, "reduce_dtype": None, "buffer_dtype": None, "keep_low_precision_grads": False}
    want |= {"cast_forward_inputs": False, "cast_root_forward_inputs": True}
    assert {k: v for k, v in defaults(MixedPrecision).items() if k != "_module_classes_to_ignore"} == want
    assert MixedPrecision()._module_classes_to_ignore == (nn.modules.batchnorm._BatchNorm,)


@row("1.3", "MixedPrecision: reduce_dtype")
def reduces_in_a_dtype() -> None:
    """Without a `reduce_dtype`, gradients are reduced in `param_dtype`; shards and gradients stay fp32."""
    sent = {}
    for name, reduce_dtype in (("none", None), ("fp32", FP32)):
        mixed = MixedPrecision(BF16, reduce_dtype, BF16)
        fsdp = wrapped(mixed_precision=mixed, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        loss = loss_of(fsdp, mine(batch()))
        with count_collectives() as counts:
            loss.backward()
        assert not counts.all_gather
        sent[name] = counts.bytes
        assert {p.grad.dtype for p in fsdp.parameters()} == {FP32}
    assert sent["fp32"] == 2 * sent["none"]


@row("1.3", "MixedPrecision: buffer_dtype")
def casts_buffers() -> None:
    """Buffers are cast at the first forward and stay so; state dicts have them as they were, `summon` does not."""
    fsdp = wrapped(mixed_precision=MixedPrecision(BF16, FP32, BF16))
    assert {b.dtype for b in fsdp.buffers()} == {FP32}
    fsdp(mine(batch()))
    assert {b.dtype for b in fsdp.buffers()} == {BF16}
    for kind in (FULL, SHARDED):
        with flavour(fsdp, kind):
            state = fsdp.state_dict()
        assert {value.dtype for value in state.values()} == {FP32}
        assert torch.equal(state["layers.0.buf"], untyped(Block()).buf)
    with FSDP.summon_full_params(fsdp):
        assert {b.dtype for b in fsdp.buffers()} == {BF16} and {p.dtype for p in fsdp.parameters()} == {FP32}


@row("1.3", "MixedPrecision: keep_low_precision_grads")
def keeps_low_precision_gradients() -> None:
    """Gradients stay in the dtype that they were reduced in."""
    mixed = MixedPrecision(BF16, BF16, BF16, keep_low_precision_grads=True)
    fsdp = wrapped(mixed_precision=mixed)
    loss_of(fsdp, mine(batch())).backward()
    assert {p.dtype for p in fsdp.parameters()} == {FP32}
    assert {p.grad.dtype for p in fsdp.parameters()} == {BF16}


class Sees(nn.Module):
    """Notes the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(3)), list[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return x * self.weight


class Two(nn.Module):
    """Notes the dtype of its input, and gives an inner module another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight, self.seen = Sees(), nn.Parameter(torch.ones(3)), list[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return self.inner((x * self.weight).float())


@row("1.3", "MixedPrecision: cast_root_forward_inputs, cast_forward_inputs")
def casts_inputs() -> None:
    """The first counts for the root only and overrides the second there; the second counts for inner ones."""
    policy = wrap.ModuleWrapPolicy({Sees})
    for root in (False, True):
        for inner in (False, True):
            model = Two()
            mixed = MixedPrecision(BF16, FP32, cast_root_forward_inputs=root, cast_forward_inputs=inner)
            FSDP(model, auto_wrap_policy=policy, mixed_precision=mixed)(mine(batch()))
            got = (model.seen, model.inner.seen)
            assert got == ([BF16 if root else FP32], [BF16 if inner else FP32]), (root, inner, got)


@row("1.3", "MixedPrecision: eval()")
def is_mixed_in_eval() -> None:
    """It counts in `eval()` too, unless FSDP_USE_FULL_PREC_IN_EVAL=1 was set at construction."""
    name, x = "FSDP_USE_FULL_PREC_IN_EVAL", mine(batch())
    mixed = MixedPrecision(BF16, FP32, BF16)
    assert os.environ.get(name) is None
    fsdp = wrapped(mixed_precision=mixed)
    assert fsdp.eval()(x).dtype == BF16
    os.environ[name] = "1"
    try:
        fsdp = wrapped(mixed_precision=mixed)
    finally:
        del os.environ[name]
    assert fsdp(x).dtype == BF16
    assert fsdp.eval()(x).dtype == FP32
    assert_close(fsdp(x), Net()(x), rtol=1e-5, atol=1e-6)
    assert fsdp.train()(x).dtype == BF16


@row("1.3", "MixedPrecision: _module_classes_to_ignore")
def keeps_norms_in_full_precision() -> None:
    """With a policy, modules of these classes are units of their own in full precision; a warning lists them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    mixed = MixedPrecision(BF16, FP32, BF16)
    with warned(UserWarning, "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped"):
        fsdp = FSDP(model, auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}), mixed_precision=mixed)
    assert [isinstance(m, FSDP) for m in model] == [True] * 3
    assert fsdp[1].mixed_precision == MixedPrecision() and fsdp[0].mixed_precision == mixed
    seen = []
    fsdp[1].module.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    fsdp(mine(batch())).float().sum().backward()
    assert [weight for _, weight in seen] == [FP32]
    assert {b.dtype for b in fsdp[1].buffers() if b.is_floating_point()} == {FP32}


@row("1.3", "StateDictType")
def has_state_dict_types() -> None:
    """torch's own enum."""
    is_torchs("StateDictType")
    assert {each.name for each in StateDictType} == {"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"}


@row("1.3", "StateDictConfig and its subclasses")
def has_state_dict_configs() -> None:
    """torch's own classes, and what they ask for: copies on the host, the first rank only."""
    is_torchs("StateDictConfig", "FullStateDictConfig", "LocalStateDictConfig", "ShardedStateDictConfig")
    assert defaults(FullStateDictConfig) == {"offload_to_cpu": False, "rank0_only": False}
    assert defaults(LocalStateDictConfig) == {"offload_to_cpu": False}
    assert defaults(ShardedStateDictConfig) == {"offload_to_cpu": False, "_use_dtensor": False}
    fsdp = wrapped()
    configs: list[tuple[StateDictType, Any]] = [(FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True))]
    configs.append((SHARDED, ShardedStateDictConfig(offload_to_cpu=True)))
    configs.append((LOCAL, LocalStateDictConfig(offload_to_cpu=True)))
    for kind, config in configs:
        with flavour(fsdp, kind, config):
            state = fsdp.state_dict()
        before = {k: v.to_local().clone() if isinstance(v, DTensor) else v.clone() for k, v in state.items()}
        with torch.no_grad():
            for tensor in (*fsdp.parameters(), *fsdp.buffers()):
                tensor.add_(1)
        for key, value in state.items():  # a copy: what is saved does not change any more
            assert value.device.type == "cpu"
            assert_close(value.to_local() if isinstance(value, DTensor) else value, before[key], rtol=0, atol=0)


@row("1.3", "OptimStateDictConfig and its subclasses")
def has_optimizer_state_configs() -> None:
    """torch's own classes; on the host by default."""
    is_torchs("OptimStateDictConfig", "FullOptimStateDictConfig", "LocalOptimStateDictConfig")
    is_torchs("ShardedOptimStateDictConfig")
    assert defaults(FullOptimStateDictConfig) == {"offload_to_cpu": True, "rank0_only": False}
    assert defaults(LocalOptimStateDictConfig) == {"offload_to_cpu": False}
    assert defaults(ShardedOptimStateDictConfig) == {"offload_to_cpu": True, "_use_dtensor": False}
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    state = FSDP.optim_state_dict(fsdp, optimizer)["state"]
    before = copy.deepcopy(state)
    loss_of(fsdp, mine(batch(2))).backward()
    optimizer.step()
    assert_trees_close(state, before, rtol=0, atol=0)


@row("1.3", "StateDictSettings")
def has_state_dict_settings() -> None:
    """torch's own class."""
    is_torchs("StateDictSettings")
    names = ["state_dict_type", "state_dict_config", "optim_state_dict_config"]
    assert [field.name for field in fields(StateDictSettings)] == names


@row("1.3", "OptimStateKeyType")
def has_optimizer_key_types() -> None:
    """torch's own enum."""
    is_torchs("OptimStateKeyType")
    assert [each.name for each in OptimStateKeyType] == ["PARAM_NAME", "PARAM_ID"]


# ---------------------------------------------------------------------------------------------------------------------
# 1.4 Policies


def units(policy: Any, model: Any = None, **kwargs: Any) -> list[str]:
    """The names of the modules that a policy wraps."""
    model = Net() if model is None else model
    fsdp = FSDP(model, auto_wrap_policy=policy, **kwargs)
    assert isinstance(fsdp, FSDP)
    return [name for name, module in fsdp.named_modules() if name and isinstance(module, FSDP)]


@row("1.4", "size_based_auto_wrap_policy")
def wraps_by_size() -> None:
    """Units of at least so many parameters; leaf and excluded classes can be given; it has torch's attributes."""
    policy = wrap.size_based_auto_wrap_policy
    assert units(partial(policy, min_num_params=40)) == ["layers.0", "layers.1"]
    assert units(partial(policy, min_num_params=1000)) == [] == units(policy)
    assert units(partial(policy, min_num_params=40, exclude_wrap_modules={Block, nn.ModuleList})) == []
    assert units(partial(policy, min_num_params=15, force_leaf_modules={Block})) == []
    assert untyped(policy).FORCE_LEAF_MODULES == {nn.MultiheadAttention}
    assert untyped(policy).EXCLUDE_WRAP_MODULES == {nn.ModuleList, nn.ModuleDict}


@row("1.4", "default_auto_wrap_policy")
def wraps_as_in_1_11() -> None:
    """`size_based_auto_wrap_policy` under its name in torch 1.11, with the third argument of then."""
    policy: Any = wrap.default_auto_wrap_policy
    assert units(partial(policy, min_num_params=40)) == ["layers.0", "layers.1"]
    assert policy(module=Block(), recurse=False, unwrapped_params=50, min_num_params=40) is True
    assert policy.FORCE_LEAF_MODULES == {nn.MultiheadAttention}
    assert policy.EXCLUDE_WRAP_MODULES == {nn.ModuleList, nn.ModuleDict}


@row("1.4", "transformer_auto_wrap_policy")
def wraps_layers() -> None:
    """Modules of the layer classes."""
    policy = partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert units(policy) == ["layers.0", "layers.1"]


@row("1.4", "lambda_auto_wrap_policy")
def wraps_by_a_function() -> None:
    """Modules of which a function says so."""
    policy = partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm))
    assert units(policy) == ["layers.0.ln", "layers.1.ln"]


@row("1.4", "_or_policy")
def wraps_by_any() -> None:
    """Modules that any of several policies wants, each asked by keyword."""
    norms = partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm))
    blocks = partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    found = units(partial(wrap._or_policy, policies=[norms, blocks]))
    assert found == ["layers.0", "layers.0.ln", "layers.1", "layers.1.ln"]


@row("1.4", "_module_wrap_policy")
def wraps_classes_by_function() -> None:
    """Modules of these classes."""
    assert units(partial(wrap._module_wrap_policy, module_classes={Block})) == ["layers.0", "layers.1"]


@row("1.4", "always_wrap_policy")
def wraps_everything() -> None:
    """Every module below the root, and a warning for containers; the root is the constructor's."""
    assert wrap.always_wrap_policy("anything", here=1) is True
    assert units(wrap.always_wrap_policy, nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))) == [
        "0",
        "1",
        "1.0",
    ]
    with pytest.warns(UserWarning, match="containers that do not implement forward"):
        assert units(wrap.always_wrap_policy)[:3] == ["emb", "layers", "layers.0"]


@row("1.4", "ModuleWrapPolicy")
def wraps_classes() -> None:
    """Modules of these classes; it can be called too; a shared module is visited once."""
    policy = wrap.ModuleWrapPolicy({nn.Linear, Block})
    assert len(units(policy)) == 7
    assert policy(Block(), False, 3) is True and policy(nn.LayerNorm(3), False, 3) is False
    model: Any = Net()
    model.layers[1] = model.layers[0]
    fsdp = FSDP(model, auto_wrap_policy=wrap.ModuleWrapPolicy([Block]))
    assert len(FSDP.fsdp_modules(fsdp)) == 2 and isinstance(fsdp.layers[0], FSDP)
    plain: Any = Net()
    plain.layers[1] = plain.layers[0]
    trains(fsdp, plain)


@row("1.4", "CustomPolicy")
def wraps_with_arguments() -> None:
    """A function that says no, yes, or with which other arguments; anything else is an error."""

    def choose(module: nn.Module) -> Any:
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, Block) else False

    fsdp = wrapped(policy=wrap.CustomPolicy(choose))
    assert [m.sharding_strategy.name for m in FSDP.fsdp_modules(fsdp)] == ["FULL_SHARD"] + ["SHARD_GRAD_OP"] * 2
    trains(fsdp)
    mixed = wrap.CustomPolicy(lambda m: {"mixed_precision": MixedPrecision(BF16)} if isinstance(m, Block) else False)
    assert wrapped(policy=mixed).layers[0].mixed_precision.param_dtype == BF16
    with pytest.raises(ValueError, match="should return False/True or a kwarg dict"):
        wrapped(policy=wrap.CustomPolicy(untyped(lambda module: 3)))


@row("1.4", "_Policy")
def takes_policies_of_its_own() -> None:
    """A subclass says for each module which arguments it gets."""

    class Mine(wrap._Policy):
        def _run_policy(self, root_module: Any, ignored_modules: Any, root_kwargs: Any) -> Any:
            assert root_kwargs["sharding_strategy"] is ShardingStrategy.SHARD_GRAD_OP
            return {m: dict(root_kwargs) for m in root_module.modules() if isinstance(m, nn.LayerNorm)}

    assert units(Mine(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP) == ["layers.0.ln", "layers.1.ln"]


@row("1.4", "enable_wrap, wrap")
def wraps_by_hand() -> None:
    """`wrap` does nothing outside of `enable_wrap`, and inside it wraps with its arguments."""
    plain = nn.Linear(3, 3)
    assert wrap.wrap(plain) is plain
    strategy = ShardingStrategy.SHARD_GRAD_OP
    with wrap.enable_wrap(wrapper_cls=FSDP, sharding_strategy=strategy):
        one, two = wrap.wrap(nn.Linear(3, 3)), wrap.wrap(nn.Linear(3, 3), sharding_strategy=ShardingStrategy.FULL_SHARD)
        with pytest.raises(NotImplementedError), wrap.enable_wrap(wrapper_cls=FSDP):
            pass
    assert isinstance(one, FSDP) and one.sharding_strategy is strategy
    assert isinstance(two, FSDP) and two.sharding_strategy is ShardingStrategy.FULL_SHARD
    fsdp = FSDP(nn.Sequential(one, two))
    fsdp(mine(batch())).sum().backward()
    assert len(FSDP.fsdp_modules(fsdp)) == 3 and len(FSDP.fsdp_modules(fsdp, root_only=True)) == 1


@row("1.4", "_recursive_wrap, _wrap, ConfigAutoWrap, ParamExecOrderWrapPolicy")
def has_the_inner_functions() -> None:
    """torch's own functions take our class; the names of 1.11 and 1.13 are there."""
    model = Net()
    made, numel = wrap._recursive_wrap(
        model, partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}), FSDP, set(), set()
    )
    assert made is model and numel == 96 and all(isinstance(layer, FSDP) for layer in model.layers)
    with pytest.raises(AssertionError, match="is already wrapped by"):
        wrap._recursive_wrap(model, wrap.always_wrap_policy, FSDP, set(), set())
    trains(FSDP(model))
    assert isinstance(wrap._wrap(nn.Linear(3, 3), FSDP), FSDP)
    config: Any = wrap.ConfigAutoWrap
    with config(wrapper_cls=FSDP):
        assert isinstance(wrap.wrap(nn.Linear(3, 3)), FSDP)
    blocks = partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert units(wrap.ParamExecOrderWrapPolicy(init_policy=blocks)) == ["layers.0", "layers.1"]


# ---------------------------------------------------------------------------------------------------------------------
# 1.5 What scripts observe


@row("1.5", "repr")
def prints_as_torch() -> None:
    """Nested `FullyShardedDataParallel((_fsdp_wrapped_module): ...`, as torch prints it."""
    fsdp, plain = wrapped(), Net()
    text = re.sub(r"\s+", " ", repr(fsdp))
    assert text.startswith("FullyShardedDataParallel( (_fsdp_wrapped_module): Net( (emb): Linear(")
    assert "(layers): ModuleList( (0-1): 2 x FullyShardedDataParallel( (_fsdp_wrapped_module): Block( (fc)" in text
    assert "FullyShardedDataParallel" not in repr(plain)


@row("1.5", "named_parameters() outside summon")
def has_sharded_parameters() -> None:
    """Differs: `nn.Parameter(DTensor)`s of global shape under the model's names instead of 1-D pieces."""
    for choice in (False, True):
        fsdp, plain = wrapped(use_orig_params=choice), Net()
        got, want = dict(fsdp.named_parameters()), dict(plain.named_parameters())
        assert list(got) == list(want) and {n: p.shape for n, p in got.items()} == {n: p.shape for n, p in want.items()}
        assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in got.values())
        held = torch.tensor(sum(p.to_local().numel() for p in got.values()))
        assert held < 105
        dist.all_reduce(held)
        assert held == 105 == sum(p.numel() for p in got.values())


@row("1.5", "named_buffers()")
def has_buffers() -> None:
    """Differs: the model's names without prefix; whole and ordinary tensors."""
    fsdp, plain = wrapped(), Net()
    assert_trees_close(dict(fsdp.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)
    assert not any(isinstance(b, DTensor) for b in fsdp.buffers())


@row("1.5", "types of m.module and m.layers[0]")
def has_both_types() -> None:
    """`module` is the plain one; an inner unit is an instance, and of the class that it wraps too."""
    fsdp = wrapped()
    assert type(fsdp.module) is Net and not isinstance(fsdp.module, FSDP)
    assert type(fsdp.layers[0]).__name__ == "FullyShardedDataParallel" and isinstance(fsdp.layers[0], FSDP)
    assert isinstance(fsdp.layers[0], Block) and type(fsdp.layers[0].module) is Block


@row("1.5", "state_dict()")
def has_full_state_dicts() -> None:
    """The plain model's: whole ordinary tensors on every rank, buffers too, non-persistent ones not."""
    fsdp, plain = wrapped(), Net()
    trained(fsdp, plain)
    state = fsdp.state_dict()
    assert list(state) == list(plain.state_dict()) and "layers.0.np" not in state and "layers.0.buf" in state
    assert {type(value) for value in state.values()} == {Tensor}
    assert not any(value.requires_grad for value in state.values())
    assert_trees_close(dict(state), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    with count_collectives() as counts:
        fsdp.state_dict()
    assert counts.total > 0


@row("1.5", "SHARDED_STATE_DICT")
def has_sharded_state_dicts() -> None:
    """Clean names, DTensors, buffers ordinary; no communication; they load again."""
    fsdp, plain = wrapped(), Net()
    with flavour(fsdp, SHARDED), count_collectives() as counts:
        state = fsdp.state_dict()
    assert counts.total == 0 and list(state) == list(plain.state_dict())
    assert all(isinstance(value, DTensor) != key.endswith("buf") for key, value in state.items())
    other = wrapped(Net(seed=9))
    with flavour(other, SHARDED):
        assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert_trees_close(values(other), values(plain), rtol=0, atol=0)


@row("1.5", "LOCAL_STATE_DICT")
def has_local_state_dicts() -> None:
    """Differs: this rank's parts as ordinary tensors, under the model's names; no communication; they load again."""
    fsdp, plain = wrapped(), Net()
    with flavour(fsdp, LOCAL), count_collectives() as counts:
        state = fsdp.state_dict()
    assert counts.total == 0 and list(state) == list(plain.state_dict())
    assert {type(value) for value in state.values()} == {Tensor}
    for name, parameter in fsdp.named_parameters():
        assert torch.equal(state[name], parameter.to_local()), name
    other = wrapped(Net(seed=9))
    with flavour(other, LOCAL):
        other.load_state_dict(state)
    assert_trees_close(values(other), values(plain), rtol=0, atol=0)


@row("1.5", "FULL_STATE_DICT with rank0_only")
def has_full_state_dicts_on_the_first_rank() -> None:
    """All keys on the first rank, an empty dict on the others; on the host too."""
    fsdp, plain = wrapped(), Net()
    for host in (False, True):
        with flavour(fsdp, FULL, FullStateDictConfig(offload_to_cpu=host, rank0_only=True)):
            state = fsdp.state_dict()
        assert list(state) == (list(plain.state_dict()) if first_rank() else [])
        if state:
            assert_trees_close(dict(state), dict(plain.state_dict()), rtol=0, atol=0)


@row("1.5", "gradients after no_sync()")
def has_whole_gradients_after_no_sync() -> None:
    """Of full shape, and of this rank's loss alone."""
    fsdp, plain = wrapped(use_orig_params=True), Net()
    with fsdp.no_sync():
        loss_of(fsdp, mine(batch())).backward()
    loss_of(plain, mine(batch())).backward()
    want = gradients(plain)
    for name, parameter in fsdp.named_parameters():
        grad = parameter.grad
        own = grad.to_local() if isinstance(grad, DTensor) else grad
        assert_close(own, want[name], rtol=1e-4, atol=1e-6, name=name)


@row("1.5", "gradients after a synced backward")
def has_sharded_gradients() -> None:
    """The mean over ranks, sharded as the parameters are."""
    fsdp, plain = wrapped(), Net()
    loss_of(fsdp, mine(batch())).backward()
    loss_of(plain, batch()).backward()
    for parameter in fsdp.parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
        assert parameter.grad.to_local().shape == parameter.to_local().shape
    assert_trees_close(gradients(fsdp), gradients(plain), rtol=1e-4, atol=1e-6)


@row("1.5", "clip_grad_norm_")
def returns_a_norm() -> None:
    """A 0-dim float32 tensor; float64 for float64 gradients."""
    for dtype in (FP32, torch.float64):
        fsdp = wrapped(Net().to(dtype))
        fsdp(mine(batch()).to(dtype)).sum().backward()
        norm = fsdp.clip_grad_norm_(1.0)
        assert type(norm) is Tensor and norm.dim() == 0 and norm.dtype == dtype


@row("1.5", "names inside summon_full_params")
def summons_plain_parameters() -> None:
    """Clean names and full shapes, of the instance and of its module."""
    fsdp, plain = wrapped(), Net()
    want = {n: p.shape for n, p in plain.named_parameters()}
    with FSDP.summon_full_params(fsdp):
        for module in (fsdp, fsdp.module):
            assert {n: p.shape for n, p in module.named_parameters()} == want
            assert all(type(p) is nn.Parameter for p in module.parameters())


@row("1.5", "state_dict() inside summon_full_params")
def has_state_dicts_inside_summon() -> None:
    """Clean keys and whole tensors of the instance and of its module; on one rank alone too."""
    fsdp, plain = wrapped(), Net()
    with FSDP.summon_full_params(fsdp), count_collectives() as counts:
        if first_rank():
            for module in (fsdp, fsdp.module):
                state = module.state_dict()
                assert list(state) == list(plain.state_dict())
                assert not any(isinstance(value, DTensor) for value in state.values())
                assert_trees_close(dict(state), dict(plain.state_dict()), rtol=0, atol=0)
    assert counts.total == 0


@row("1.5", "summon_full_params(rank0_only=True, writeback=False)")
def summons_on_the_first_rank() -> None:
    """The other ranks keep their shards."""
    fsdp = wrapped()
    with FSDP.summon_full_params(fsdp, rank0_only=True, writeback=False):
        assert isinstance(fsdp.emb.weight, DTensor) is not first_rank()
        assert isinstance(fsdp.layers[1].fc.weight, DTensor) is not first_rank()
    trains(fsdp)


@row("1.5", "summon_full_params(with_grads=True)")
def summons_gradients() -> None:
    """Whole gradients with `use_orig_params`, NotImplementedError without."""
    fsdp, plain = wrapped(use_orig_params=True), Net()
    loss_of(fsdp, mine(batch())).backward()
    loss_of(plain, batch()).backward()
    with FSDP.summon_full_params(fsdp, with_grads=True):
        got = {n: p.grad for n, p in fsdp.named_parameters()}
        assert_trees_close(got, {n: p.grad for n, p in plain.named_parameters()}, rtol=1e-4, atol=1e-6)
        fsdp.emb.weight.grad.mul_(2)
    assert_close(gradients(fsdp)["emb.weight"], 2 * gradients(plain)["emb.weight"], rtol=1e-4, atol=1e-6)
    with pytest.raises(NotImplementedError), FSDP.summon_full_params(wrapped(), with_grads=True):
        pass


@row("1.5", "summon_full_params(writeback=True, rank0_only=True)")
def refuses_to_write_back_from_one_rank() -> None:
    """NotImplementedError, with torch's words."""
    words = "writeback=True and rank0_only=True is not supported yet"
    with fails(NotImplementedError, words), FSDP.summon_full_params(wrapped(), rank0_only=True):
        pass


@row("1.5", "optim_state_dict FULL")
def has_full_optimizer_states() -> None:
    """`{"state": {name: {...}}, "param_groups": [...]}`: whole ordinary tensors on the host of all ranks."""
    fsdp, plain = wrapped(), Net()
    optimizer, other = trained(fsdp, plain)
    state = FSDP.optim_state_dict(fsdp, optimizer)
    names = [n for n, _ in plain.named_parameters()]
    assert set(state) == {"state", "param_groups"} and set(state["state"]) == set(names)
    assert state["param_groups"][0]["params"] == names and state["param_groups"][0]["lr"] == 0.01
    one = state["state"]["emb.weight"]
    assert {k: tuple(v.shape) for k, v in one.items()} == {"step": (), "exp_avg": (3, 3), "exp_avg_sq": (3, 3)}
    assert {type(v) for v in one.values()} == {Tensor} and {v.device.type for v in one.values()} == {"cpu"}
    assert_trees_close(state["state"], by_name(plain, other), rtol=1e-3, atol=1e-5)


@row("1.5", "optim_state_dict SHARDED")
def has_sharded_optimizer_states() -> None:
    """`exp_avg` a DTensor, `step` a tensor."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    with flavour(fsdp, SHARDED):
        one = FSDP.optim_state_dict(fsdp, optimizer)["state"]["layers.0.fc.weight"]
    assert isinstance(one["exp_avg"], DTensor) and one["exp_avg"].shape == (5, 3)
    assert type(one["step"]) is Tensor and float(one["step"]) == 2


@row("1.5", "optim_state_dict_to_load")
def has_loadable_optimizer_states() -> None:
    """Ids from 0 for `optim.load_state_dict`, each value with the layout of its parameter."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    made = FSDP.optim_state_dict_to_load(fsdp, optimizer, FSDP.optim_state_dict(fsdp, optimizer))
    assert sorted(made["state"]) == list(range(13)) and made["param_groups"][0]["params"] == list(range(13))
    for index, parameter in enumerate(fsdp.parameters()):
        moment = made["state"][index]["exp_avg"]
        assert moment.placements == parameter.placements and moment.to_local().shape == parameter.to_local().shape


@row("1.5", "full_optim_state_dict")
def has_full_optimizer_states_on_the_first_rank() -> None:
    """Whole on the first rank, `{}` on the others."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    with quiet():
        state = FSDP.full_optim_state_dict(fsdp, optimizer)
    assert (set(state) == {"state", "param_groups"}) if first_rank() else (state == {})


@row("1.5", "rekey_optim_state_dict(PARAM_ID)")
def rekeys_in_order() -> None:
    """Ids in the order of the plain model's `parameters()`."""
    fsdp, plain = wrapped(), Net()
    optimizer, _ = trained(fsdp, plain)
    named = FSDP.optim_state_dict(fsdp, optimizer)
    ids = FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, plain)
    for index, (name, _) in enumerate(plain.named_parameters()):
        assert torch.equal(ids["state"][index]["exp_avg"], named["state"][name]["exp_avg"]), name


@row("1.5", "fsdp_modules, check_is_root")
def counts_instances() -> None:
    """3 in all, 1 root; only the root is one."""
    fsdp = wrapped()
    assert len(FSDP.fsdp_modules(fsdp)) == 3 and len(FSDP.fsdp_modules(fsdp, root_only=True)) == 1
    assert fsdp.check_is_root() and not fsdp.layers[0].check_is_root()


@row("1.5", "attributes")
def has_attributes() -> None:
    """Those of torch's class, with its values."""
    fsdp = wrapped()
    assert fsdp._is_root is None and fsdp.layers[0]._is_root is None
    assert (fsdp.rank, fsdp.world_size) == (dist.get_rank(), 2) and fsdp.process_group.size() == 2
    assert fsdp.sharding_strategy is ShardingStrategy.FULL_SHARD and fsdp.mixed_precision == MixedPrecision()
    assert fsdp.cpu_offload == CPUOffload() and isinstance(fsdp.compute_device, torch.device)
    assert fsdp.training_state is TrainingState.IDLE and fsdp.limit_all_gathers and not fsdp.forward_prefetch
    assert fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_PRE and fsdp._state_dict_type is FULL
    assert fsdp._use_orig_params is False and fsdp._device_mesh is not None
    fsdp(mine(batch()))
    assert fsdp._is_root is True and fsdp.layers[0]._is_root is False
    with FSDP.summon_full_params(fsdp):
        assert fsdp.training_state is TrainingState.SUMMON_FULL_PARAMS


@row("1.5", "inner no_sync() and clip_grad_norm_")
def refuses_on_inner_instances() -> None:
    """RuntimeError, before the first forward too."""
    fsdp = wrapped()
    with fails(RuntimeError, "`no_sync()` on inner FSDP instances is not supported."), fsdp.layers[0].no_sync():
        pass
    with fails(RuntimeError, "`clip_grad_norm_()` should only be called on the root FSDP instance"):
        fsdp.layers[0].clip_grad_norm_(1.0)


@row("1.5", "load_state_dict(full)")
def loads_full_state_dicts() -> None:
    """`<All keys matched successfully>`, and the values are there."""
    fsdp = wrapped()
    assert str(fsdp.load_state_dict(Net(seed=4).state_dict())) == "<All keys matched successfully>"
    assert_trees_close(values(fsdp), values(Net(seed=4)), rtol=0, atol=0)


@row("1.5", "MixedPrecision(bf16, fp32, bf16)")
def has_the_dtypes_of_torch() -> None:
    """Output bf16, shards and gradients fp32, buffers bf16 after a forward and fp32 in the state dict."""
    fsdp = wrapped(mixed_precision=MixedPrecision(BF16, FP32, BF16))
    out = fsdp(mine(batch()))
    out.sum().backward()
    assert out.dtype == BF16 and {p.dtype for p in fsdp.parameters()} == {FP32}
    assert {p.grad.dtype for p in fsdp.parameters()} == {FP32} and fsdp.layers[0].buf.dtype == BF16
    assert fsdp.state_dict()["layers.0.buf"].dtype == FP32


@row("1.5", "get_model_state_dict(fsdp)")
def works_with_torchs_state_dicts() -> None:
    """Clean names, DTensors, whatever the flavour is."""
    fsdp = wrapped()
    for context in (quiet(), flavour(fsdp, LOCAL)):
        with context:
            state = get_model_state_dict(fsdp)
        assert set(state) == set(Net().state_dict()) and isinstance(state["emb.weight"], DTensor)
        assert not isinstance(state["emb.weight"], ShardedTensor)


# ---------------------------------------------------------------------------------------------------------------------
# 1.6 Errors and warnings


@row("1.6", "process_group and device_mesh")
def refuses_two_ways_at_once() -> None:
    """ValueError."""
    mesh = init_device_mesh("cpu", (2,))
    with fails(ValueError, "Cannot pass both process_group and device_mesh at the same time. Please just pass only"):
        FSDP(Net(), process_group=mesh.get_group(), device_mesh=mesh)


@row("1.6", "hybrid without groups")
def refuses_hybrid_without_groups() -> None:
    """ValueError for both hybrid strategies."""
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        words = f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        with fails(ValueError, words):
            FSDP(Net(), sharding_strategy=strategy)


@row("1.6", "hybrid with one group")
def refuses_hybrid_with_one_group() -> None:
    """ValueError."""
    words = "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] but"
    for given in (dist.group.WORLD, (dist.group.WORLD, None)):
        with fails(ValueError, words):
            wrapped(process_group=given, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@row("1.6", "hybrid with a 1-D mesh")
def refuses_hybrid_with_one_dim() -> None:
    """ValueError."""
    with fails(ValueError, "Expected device_mesh to have ndim=2 but got"):
        wrapped(device_mesh=init_device_mesh("cpu", (2,)), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@row("1.6", "ignored_modules and ignored_states")
def refuses_both_ignored() -> None:
    """ValueError."""
    words = "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
    model = Net()
    with fails(ValueError, words):
        FSDP(model, ignored_modules=[model.emb], ignored_states=[model.emb])


@row("1.6", "mixed ignored_states")
def refuses_mixed_ignored_states() -> None:
    """ValueError."""
    model = Net()
    words = "ignored_states expects all nn.Parameter or all nn.Module list elements but got types"
    with fails(ValueError, words):
        FSDP(model, ignored_states=[model.emb, model.emb.weight])


@row("1.6", "ignored_modules of other types")
def refuses_other_ignored_types() -> None:
    """ValueError."""
    with fails(ValueError, "ignored_modules expects nn.Module list elements but got types"):
        FSDP(Net(), ignored_modules=["emb"])


@row("1.6", "ignored_modules that is no iterable")
def refuses_what_is_no_iterable() -> None:
    """TypeError."""
    with fails(TypeError, "`ignored_modules` should be an iterable of `torch.nn.Module`s but got"):
        FSDP(Net(), ignored_modules=3)


@row("1.6", "ignored_modules with FSDP modules")
def refuses_to_ignore_instances() -> None:
    """ValueError."""
    model = Net()
    model.emb = FSDP(model.emb)
    with fails(ValueError, "`ignored_modules` should not include FSDP modules"):
        FSDP(model, ignored_modules=[model.emb])


@row("1.6", "ignoring the top-level module")
def warns_when_all_is_ignored() -> None:
    """UserWarning."""
    model = Net()
    words = (
        "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all parameters "
        "being ignored"
    )
    with warned(UserWarning, words):
        fsdp = FSDP(model, ignored_modules=[model])
    assert not any(isinstance(p, DTensor) for p in fsdp.parameters())


class Placed(nn.Module):
    """Claims parameters on devices that this machine need not have."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.claimed = [torch.device(device) for device in devices]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for index, device in enumerate(self.claimed):
            parameter = _Elsewhere(torch.zeros(2))
            parameter.claimed = device
            yield f"p{index}", parameter

    def parameters(self, recurse: bool = True) -> Any:
        return (parameter for _, parameter in self.named_parameters())


class _Elsewhere(nn.Parameter):
    claimed: torch.device

    device: Any = property(lambda self: self.claimed)


@row("1.6", "parameters on several devices")
def refuses_several_devices() -> None:
    """RuntimeError."""
    with fails(RuntimeError, "FSDP only supports single device modules but got params on"):
        FSDP(Placed("cuda:0", "cuda:1"))


@row("1.6", "parameters on host and device")
def refuses_host_and_device() -> None:
    """RuntimeError, when there is no `device_id`."""
    with fails(RuntimeError, "To support a module with both CPU and GPU params, please pass in device_id argument."):
        FSDP(Placed("cpu", "cuda:0"))


@row("1.6", "scalar parameters")
def refuses_scalars() -> None:
    """ValueError that names it."""
    model: Any = Net()
    model.layers[1].scale = nn.Parameter(torch.tensor(1.0))
    words = "FSDP doesn't support scalar parameters. Change {} to a 1D tensor with numel equal to 1."
    with fails(ValueError, words.format("layers.1.scale")):
        FSDP(model)
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with fails(ValueError, words.format("scale")):
        FSDP(model)


@row("1.6", "device_id elsewhere")
def refuses_another_device() -> None:
    """ValueError, when parameters are on another device."""
    with fails(ValueError, "Inconsistent compute device and `device_id` on rank"):
        FSDP(Placed("cuda:0"), device_id=torch.device("cuda:1"))


@row("1.6", "wrapping twice with a policy")
def refuses_to_wrap_twice() -> None:
    """ValueError."""
    model = Net()
    model.emb = FSDP(model.emb)
    with fails(ValueError, "FSDP auto wrapping requires modules to not already have FSDP applied but found"):
        wrapped(model)


@row("1.6", "mixed precision, a policy and batch norm")
def warns_of_norms() -> None:
    """UserWarning that lists the classes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    words = (
        "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has submodules "
        "of type:"
    )
    with pytest.warns(UserWarning, match="^" + re.escape(words) + "(.|\n)*BatchNorm"):
        FSDP(model, auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}), mixed_precision=MixedPrecision(BF16))


@row("1.6", "one rank")
def warns_of_one_rank() -> None:
    """UserWarning, for each strategy that would shard."""
    alone = groups_of([0], [1])
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        words = f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1."
        with warned(UserWarning, words):
            FSDP(Net(), alone, strategy)
    with quiet():
        FSDP(Net(), alone, ShardingStrategy.NO_SHARD)


@row("1.6", "NO_SHARD")
def warns_of_no_shard() -> None:
    """FutureWarning."""
    words = "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` "
    with warned(FutureWarning, words + "instead."):
        FSDP(Net(), sharding_strategy=ShardingStrategy.NO_SHARD)


@row("1.6", "reset_parameters() fails")
def warns_of_reset_parameters() -> None:
    """UserWarning, and the error itself."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    with (
        warned(UserWarning, "Unable to call `reset_parameters()` for module on meta device with error"),
        pytest.raises(AttributeError, match="reset_parameters"),
    ):
        FSDP(Bare())


@row("1.6", "frozen and trainable in one unit")
def tells_of_mixed_units() -> None:
    """ValueError without `use_orig_params`, UserWarning with it."""
    words = "has both parameters with requires_grad=True and False."

    def partly_frozen() -> Net:
        model: Any = Net()
        model.layers[0].fc.requires_grad_(False)
        return model

    with pytest.raises(ValueError, match=words):
        wrapped(partly_frozen())
    with pytest.warns(UserWarning, match=words):
        fsdp = wrapped(partly_frozen(), use_orig_params=True)
    trains(fsdp, partly_frozen())
    assert fsdp.layers[0].fc.weight.grad is None


@row("1.6", "inner no_sync()")
def refuses_inner_no_sync() -> None:
    """RuntimeError."""
    words = "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
    with fails(RuntimeError, words), wrapped().layers[1].no_sync():
        pass


@row("1.6", "inner clip_grad_norm_()")
def refuses_inner_clipping() -> None:
    """RuntimeError."""
    with fails(RuntimeError, "`clip_grad_norm_()` should only be called on the root FSDP instance"):
        wrapped().layers[1].clip_grad_norm_(1.0)


@row("1.6", "clip_grad_norm_() without gradients")
def warns_without_gradients() -> None:
    """UserWarning, and a norm of 0 in float32."""
    with warned(UserWarning, f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients"):
        norm = wrapped().clip_grad_norm_(1.0)
    assert norm.dtype == FP32 and float(norm) == 0


@row("1.6", "summon: writeback and rank0_only")
def refuses_writeback_from_one_rank() -> None:
    """NotImplementedError."""
    words = "writeback=True and rank0_only=True is not supported yet"
    with fails(NotImplementedError, words), FSDP.summon_full_params(wrapped(), writeback=True, rank0_only=True):
        pass


@row("1.6", "summon: offload_to_cpu and NO_SHARD")
def refuses_offload_of_whole_parameters() -> None:
    """NotImplementedError."""
    with quiet():
        fsdp = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    with (
        quiet(UserWarning),
        fails(NotImplementedError, "offload_to_cpu=True and NO_SHARD is not supported yet"),
        FSDP.summon_full_params(fsdp, offload_to_cpu=True),
    ):
        pass


@row("1.6", "summon: with_grads")
def refuses_gradients_without_orig_params() -> None:
    """NotImplementedError, without `use_orig_params` or with `offload_to_cpu`."""
    for orig, host in ((False, False), (True, True)):
        words = f"with_grads=True, use_orig_params={orig}, offload_to_cpu={host} is not supported yet"
        fsdp = wrapped(use_orig_params=orig)
        with (
            quiet(UserWarning),
            fails(NotImplementedError, words),
            FSDP.summon_full_params(fsdp, with_grads=True, offload_to_cpu=host),
        ):
            pass


@row("1.6", "summon: offload_to_cpu on all ranks")
def warns_of_copies() -> None:
    """UserWarning, with the words that torch has."""
    words = "offload_to_cpu=True and rank0_only=False may result in theunsharded parameters being redundantly copied"
    with warned(UserWarning, words), FSDP.summon_full_params(wrapped(), offload_to_cpu=True):
        pass


@row("1.6", "not idle")
def refuses_when_not_idle() -> None:
    """ValueError of `apply` and `no_sync`; torch has an AssertionError for a second `summon_full_params`."""
    fsdp = wrapped()
    with FSDP.summon_full_params(fsdp):
        with fails(ValueError, "expected to be in states"):
            fsdp.apply(lambda module: None)
        with pytest.raises((ValueError, AssertionError)), FSDP.summon_full_params(fsdp):
            pass
    assert fsdp.training_state is TrainingState.IDLE


@row("1.6", "register_comm_hook on an inner instance")
def refuses_inner_hooks() -> None:
    """AssertionError."""
    fsdp = wrapped()
    with fails(AssertionError, "register_comm_hook can only be called on a root instance."):
        fsdp.layers[0].register_comm_hook(None, print)


@row("1.6", "register_comm_hook and hybrid strategies", ranks=4)
def refuses_hybrid_hooks() -> None:
    """AssertionError."""
    mesh = init_device_mesh("cpu", (2, 2))
    fsdp = wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with fails(AssertionError, "Communication hook is not supported for hybrid strategies"):
        fsdp.register_comm_hook(None, print)


@row("1.6", "register_comm_hook twice")
def refuses_two_hooks() -> None:
    """AssertionError."""
    fsdp = wrapped()
    fsdp.register_comm_hook(None, print)
    with fails(AssertionError, "A communication hook is already registered"):
        fsdp.register_comm_hook(None, print)


@row("1.6", "register_comm_hook with no function")
def refuses_hooks_that_are_no_functions() -> None:
    """ValueError."""
    with fails(ValueError, "The communication hook must be callable but got"):
        wrapped().register_comm_hook(None, 3)


@row("1.6", "state dict config of another flavour")
def refuses_other_configs() -> None:
    """RuntimeError that names both classes."""
    words = f"Expected state_dict_config of type {FullStateDictConfig} but got {LocalStateDictConfig}"
    with quiet(), fails(RuntimeError, words), FSDP.state_dict_type(wrapped(), FULL, LocalStateDictConfig()):
        pass


@row("1.6", "state_dict_type")
def warns_of_state_dict_type() -> None:
    """FutureWarning of both functions."""
    words = (
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. Please use APIs, get_state_dict() "
        "and set_state_dict()"
    )
    fsdp = wrapped()
    with warned(FutureWarning, words), FSDP.state_dict_type(fsdp, FULL):
        pass
    with warned(FutureWarning, words):
        FSDP.set_state_dict_type(fsdp, FULL)


@row("1.6", "instances with several flavours")
def refuses_several_flavours() -> None:
    """AssertionError."""
    fsdp = wrapped()
    with quiet():
        FSDP.set_state_dict_type(fsdp.layers[0], SHARDED)
        with fails(AssertionError, "All FSDP modules should have the same state_dict_type."):
            FSDP.set_state_dict_type(fsdp, LOCAL)


@row("1.6", "LOCAL_STATE_DICT and device_mesh")
def refuses_local_state_dicts_with_a_mesh() -> None:
    """RuntimeError."""
    fsdp = wrapped(device_mesh=init_device_mesh("cpu", (2,)))
    words = "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT."
    with flavour(fsdp, LOCAL), fails(RuntimeError, words):
        fsdp.state_dict()


@row("1.6", "state dicts under NO_SHARD")
def warns_of_full_state_dicts() -> None:
    """UserWarning, and whole ordinary tensors."""
    with quiet():
        fsdp = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    words = "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned."
    with flavour(fsdp, SHARDED), warned(UserWarning, words):
        state = fsdp.state_dict()
    assert_trees_close(dict(state), dict(Net().state_dict()), rtol=0, atol=0)
    assert {type(value) for value in state.values()} == {Tensor}


@row("1.6", "old names for optimizer states")
def warns_of_old_names() -> None:
    """FutureWarning that names the new one, of all five."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    words = "``FullyShardedDataParallel.{}``is being deprecated and is replaced by ``FullyShardedDataParallel.{}``."
    save, load = "optim_state_dict", "optim_state_dict_to_load"
    with warned(FutureWarning, words.format("full_optim_state_dict", save)):
        full = FSDP.full_optim_state_dict(fsdp, optimizer, rank0_only=False)
    with warned(FutureWarning, words.format("sharded_optim_state_dict", save)):
        sharded = FSDP.sharded_optim_state_dict(fsdp, optimizer)
    with warned(FutureWarning, words.format("shard_full_optim_state_dict", load)):
        FSDP.shard_full_optim_state_dict(full, fsdp, optim=optimizer)
    with warned(FutureWarning, words.format("flatten_sharded_optim_state_dict", load)):
        FSDP.flatten_sharded_optim_state_dict(sharded, fsdp, optimizer)
    with warned(FutureWarning, words.format("scatter_full_optim_state_dict", load)):
        FSDP.scatter_full_optim_state_dict(full if first_rank() else None, fsdp, optim=optimizer)


@row("1.6", "optim_input")
def warns_of_optim_input() -> None:
    """FutureWarning, and it is used."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = FSDP.full_optim_state_dict(fsdp, optimizer, list(fsdp.parameters()), rank0_only=False)
    words = "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13."
    assert any(w.category is FutureWarning and str(w.message).startswith(words) for w in caught)
    assert_trees_close(state["state"], FSDP.optim_state_dict(fsdp, optimizer)["state"], rtol=0, atol=0)


@row("1.6", "rekey with keys of two kinds")
def refuses_two_kinds_of_keys() -> None:
    """ValueError."""
    state = {"state": {"emb.weight": {}, 1: {}}, "param_groups": [{"params": ["emb.weight", 1]}]}
    with fails(ValueError, "Invalid parameter keys: "):
        FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, Net())


@row("1.6", "no optimizer state dict")
def refuses_what_is_no_optimizer_state() -> None:
    """ValueError."""
    fsdp = wrapped()
    with fails(ValueError, "`optim_state_dict` must have the keys"):
        FSDP.optim_state_dict_to_load(fsdp, again(fsdp), {"emb.weight": {}})


# ---------------------------------------------------------------------------------------------------------------------
# 1.7 Import doors


def same_names(door: str, theirs: str, names: list[str]) -> None:
    ours, torchs = importlib.import_module(f"shardfn.compat.fsdp1{door}"), importlib.import_module(theirs)
    for name in names:
        if name == "FullyShardedDataParallel":
            assert getattr(ours, name) is FSDP
        else:
            assert getattr(ours, name) is getattr(torchs, name), name


FSDP2 = ["CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "fully_shard", "MixedPrecisionPolicy"]
FSDP2 += ["OffloadPolicy", "register_fsdp_forward_method", "UnshardHandle", "share_comm_ctx"]


@row("1.7", "torch.distributed.fsdp")
def opens_the_main_door() -> None:
    """All of FSDP1's names in `__all__`; only the class is ours."""
    same_names("", "torch.distributed.fsdp", [name for name in torch_fsdp.__all__ if name not in FSDP2])


@row("1.7", "torch.distributed.fsdp: FSDP2's names")
def opens_the_main_door_for_fsdp2() -> None:
    """FSDP2's names are there too, for scripts that import both from one place."""
    for name in FSDP2:
        assert hasattr(fsdp1, name), name


@row("1.7", "torch.distributed.fsdp: FlatParameter")
def has_no_flat_parameter() -> None:
    """torch's own, for `isinstance`, which is False of every parameter here."""
    assert fsdp1.FlatParameter is torch_fsdp.FlatParameter
    assert not any(isinstance(parameter, fsdp1.FlatParameter) for parameter in FSDP(Net()).parameters())


@row("1.7", ".fully_sharded_data_parallel")
def opens_the_class_door() -> None:
    """The same classes."""
    names = [name for name in torch_fsdp.__all__ if name not in FSDP2]
    same_names(".fully_sharded_data_parallel", "torch.distributed.fsdp.fully_sharded_data_parallel", names)


@row("1.7", ".wrap")
def opens_the_wrap_door() -> None:
    """torch's own policies."""
    theirs = importlib.import_module("torch.distributed.fsdp.wrap")
    names = [*theirs.__all__, "_or_policy", "_module_wrap_policy", "_recursive_wrap", "_wrap", "_ConfigAutoWrap"]
    same_names(".wrap", "torch.distributed.fsdp.wrap", names)


@row("1.7", ".api")
def opens_the_api_door() -> None:
    """torch's own enums and config classes."""
    theirs = importlib.import_module("torch.distributed.fsdp.api")
    same_names(".api", "torch.distributed.fsdp.api", list(theirs.__all__))


@row("1.7", ".sharded_grad_scaler")
def opens_the_scaler_door() -> None:
    """The scaler works on the shards: a step, and an overflow on one rank that all ranks skip."""
    fsdp = wrapped()
    optimizer, scaler = torch.optim.SGD(fsdp.parameters(), 0.1), ShardedGradScaler(device="cpu", init_scale=8.0)
    before = values(fsdp)
    scaler.scale(loss_of(fsdp, mine(batch()))).backward()
    scaler.step(optimizer)
    scaler.update()
    plain = Net()
    loss_of(plain, batch()).backward()
    want = {n: before[n] - 0.1 * g for n, g in gradients(plain).items()}
    assert_trees_close(values(fsdp), want, rtol=1e-4, atol=1e-6)
    before = values(fsdp)
    optimizer.zero_grad()
    scaler.scale(loss_of(fsdp, mine(batch()))).backward()
    if first_rank():
        fsdp.emb.weight.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert_trees_close(values(fsdp), before, rtol=0, atol=0)
    assert scaler.get_scale() == 4.0


@row("1.7", "checkpoint_wrapper")
def works_with_checkpoint_wrappers() -> None:
    """torch's wrappers for activation checkpointing inside or outside of units; names stay clean."""
    check = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    fsdp = wrapped()
    apply_activation_checkpointing(fsdp, checkpoint_wrapper_fn=check, check_fn=lambda m: isinstance(m, Block))
    trains_with_clean_names(fsdp)
    model = Net()
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=check, check_fn=lambda m: isinstance(m, Block))
    trains_with_clean_names(wrapped(model))
    model = Net()
    model.layers[0] = offload_wrapper(model.layers[0])
    trains_with_clean_names(wrapped(model))


def trains_with_clean_names(fsdp: Any) -> None:
    plain = Net()
    trained(fsdp, plain)
    state = fsdp.state_dict()
    assert list(state) == list(plain.state_dict())
    assert_trees_close(dict(state), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# 1.8 Private names


@row("1.8", "_fsdp_wrapped_module")
def has_the_wrapped_module() -> None:
    """A property; replacing it in names does nothing."""
    model = Net()
    fsdp = wrapped(model)
    assert fsdp._fsdp_wrapped_module is model and isinstance(fsdp.layers[0]._fsdp_wrapped_module, Block)
    names = [n.replace("_fsdp_wrapped_module.", "") for n, _ in fsdp.named_parameters()]
    assert names == [n for n, _ in Net().named_parameters()]


@row("1.8", "_handle, _handles, flat_param, _flat_param", "refused")
def refuses_flat_parameters() -> None:
    """AttributeError that names what to use instead; `hasattr` is False."""
    fsdp = wrapped()
    for name in ("_handle", "_handles", "flat_param", "_flat_param", "_all_handles"):
        assert not hasattr(fsdp, name)
        with pytest.raises(AttributeError, match="summon_full_params"):
            getattr(fsdp.layers[0], name)


@row("1.8", "_lazy_init")
def initialises_lazily() -> None:
    """Makes a module the root now."""
    fsdp = wrapped()
    assert fsdp._is_root is None
    assert _lazy_init(fsdp, fsdp) is fsdp
    assert fsdp._is_root is True and fsdp.layers[0]._is_root is False


@row("1.8", "_is_root")
def tells_the_root() -> None:
    """None before the first forward, then whether it is; it can be set."""
    fsdp = wrapped()
    assert fsdp._is_root is None
    fsdp(mine(batch()))
    assert fsdp._is_root is True and fsdp.layers[0]._is_root is False
    fsdp._is_root = None
    assert fsdp._is_root is None
    fsdp(mine(batch()))
    assert fsdp._is_root is True


@row("1.8", "_state_dict_type")
def tells_the_state_dict_type() -> None:
    """The flavour now."""
    fsdp = wrapped()
    assert fsdp._state_dict_type is FULL
    with flavour(fsdp, LOCAL):
        assert fsdp._state_dict_type is LOCAL and fsdp.layers[0]._state_dict_type is LOCAL


@row("1.8", "_use_orig_params")
def tells_use_orig_params() -> None:
    """As it was given."""
    assert wrapped()._use_orig_params is False and wrapped(use_orig_params=True).layers[0]._use_orig_params is True


@row("1.8", "compute_device")
def tells_the_device() -> None:
    """Where it computes."""
    assert wrapped(device_id=torch.device("cpu")).compute_device == torch.device("cpu")


@row("1.8", "_has_params")
def tells_whether_it_has_parameters() -> None:
    """Whether there are any of its own unit."""
    fsdp = wrapped(nn.Sequential(Block()))
    assert fsdp[0]._has_params is True and FSDP(nn.ReLU())._has_params is False
    assert fsdp._has_params is False


# ---------------------------------------------------------------------------------------------------------------------
# The tests


@pytest.mark.parametrize("key", list(ROWS))
def test_row(key: str) -> None:
    run(ROWS[key].case, ranks=ROWS[key].ranks)


def test_every_argument_method_and_name_of_torch_has_a_row() -> None:
    theirs = torch_fsdp.FullyShardedDataParallel
    listed = {section: " ".join(r.name for r in ROWS.values() if r.section == section) for section in "1.1 1.2".split()}
    arguments = set(inspect.signature(theirs.__init__).parameters) - {"self"}
    methods = {name for name in vars(theirs) if not name.startswith("_")} - {"training_state"}
    assert [name for name in sorted(arguments) if name not in listed["1.1"]] == []
    assert [name for name in sorted(methods) if name not in listed["1.2"]] == []


def test_no_row_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counter(each.status for each in ROWS.values())
    with capsys.disabled():
        print("\nFSDP1, rows:", ", ".join(f"{counts[status]} {status}" for status in STATUSES))
    assert counts["missing"] == 0, [key for key, each in ROWS.items() if each.status == "missing"]
