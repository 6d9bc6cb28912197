"""Section 1.5. What scripts observe."""

import re

import pytest
import torch
import torch.distributed as dist
from ranks import quiet
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.tensor import DTensor

from fsdp1_rows.common import (
    BF16,
    FP32,
    FULL,
    LOCAL,
    SHARDED,
    Block,
    Net,
    batch,
    by_name,
    fails,
    first_rank,
    flavour,
    gradients,
    loss_of,
    mine,
    row,
    trained,
    trains,
    values,
    wrapped,
)
from shardfn.compat.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
)
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.testing import assert_close, assert_trees_close, count_collectives


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
    with quiet(FutureWarning):
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
    for context in (quiet(FutureWarning), flavour(fsdp, LOCAL)):
        with context:
            state = get_model_state_dict(fsdp)
        assert set(state) == set(Net().state_dict()) and isinstance(state["emb.weight"], DTensor)
        assert not isinstance(state["emb.weight"], ShardedTensor)
