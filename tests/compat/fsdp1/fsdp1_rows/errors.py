"""Section 1.6. Errors and warnings."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import quiet
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.tensor import DTensor

from fsdp1_rows.common import (
    BF16,
    FP32,
    FULL,
    LOCAL,
    SHARDED,
    Net,
    again,
    fails,
    first_rank,
    flavour,
    groups_of,
    row,
    trained,
    trains,
    warned,
    wrapped,
)
from shardfn.compat.fsdp1 import (
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    wrap,
)
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.testing import assert_trees_close


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
    with quiet(FutureWarning):
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
    with quiet(FutureWarning):
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
    with (
        quiet(FutureWarning),
        fails(RuntimeError, words),
        FSDP.state_dict_type(wrapped(), FULL, LocalStateDictConfig()),
    ):
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
    with quiet(FutureWarning):
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
    with quiet(FutureWarning):
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
