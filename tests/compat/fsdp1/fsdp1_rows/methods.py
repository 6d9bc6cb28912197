"""Section 1.2. Methods, properties and statics."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import quiet
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.distributed.tensor import DTensor

from fsdp1_rows.common import (
    FP32,
    FULL,
    LOCAL,
    SHARDED,
    Block,
    Net,
    again,
    batch,
    by_name,
    fails,
    first_rank,
    flavour,
    gradients,
    loss_of,
    mine,
    row,
    same_state,
    trained,
    values,
    wrapped,
)
from shardfn.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
)
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.testing import assert_close, assert_trees_close, count_collectives


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
    with quiet(FutureWarning):
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
    with quiet(FutureWarning):
        FSDP.set_state_dict_type(fsdp.layers[0], SHARDED)
    with fails(AssertionError, "All FSDP modules must have the same state dict settings."):
        FSDP.get_state_dict_type(fsdp)


@row("1.2", "state_dict_type")
def sets_the_flavour_for_a_while() -> None:
    """A context, on the class or an instance, that restores what was, after an error too."""
    fsdp = wrapped()
    before = FSDP.get_state_dict_type(fsdp)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with quiet(FutureWarning):
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
    for context in (quiet(FutureWarning), FSDP.summon_full_params(fsdp)):
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
            with quiet(FutureWarning):
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
    with quiet(FutureWarning):
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
    with quiet(FutureWarning):
        state = FSDP.sharded_optim_state_dict(fsdp, optimizer, group=None)
    assert isinstance(state["state"]["emb.weight"]["exp_avg"], DTensor)
    assert_trees_close(state["state"], by_name(plain, other), rtol=1e-3, atol=1e-5)


@row("1.2", "shard_full_optim_state_dict")
def shards_a_full_optimizer_state() -> None:
    """From a whole state that every rank has, what `optim.load_state_dict` takes."""
    fsdp = wrapped()
    optimizer, _ = trained(fsdp, Net())
    with quiet(FutureWarning):
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
    with quiet(FutureWarning):
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
    with quiet(FutureWarning):
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
    with quiet(FutureWarning):
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
        with quiet(FutureWarning):  # the name that scripts have is an old one
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
