"""Section 1.3. Config classes and enums."""

import copy
import os
import pickle
from dataclasses import fields
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from drawing import untyped
from torch import Tensor, nn
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
    flavour,
    loss_of,
    mine,
    row,
    trained,
    warned,
    wrapped,
)
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
from shardfn.testing import assert_close, assert_trees_close, count_collectives


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
