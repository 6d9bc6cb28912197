"""Section 1.1. The constructor: every argument of every version."""

import copy
import inspect
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from drawing import untyped
from ranks import quiet
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp1_rows.common import (
    BF16,
    FP32,
    SHARDED,
    Block,
    Net,
    batch,
    fails,
    first_rank,
    flavour,
    groups_of,
    mine,
    row,
    trains,
    values,
    warned,
    wrapped,
)
from shardfn.compat.fsdp1 import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, wrap
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.testing import assert_close, assert_trees_close


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
        with quiet(FutureWarning):
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
    for device in (None, torch.device("cpu"), torch.device("cpu", 1)):
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
