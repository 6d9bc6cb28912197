"""Section 1.4. Wrap policies."""

from functools import partial
from typing import Any

import pytest
from drawing import untyped
from torch import nn

from fsdp1_rows.common import BF16, Block, Net, batch, mine, row, trains, wrapped
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp1 import MixedPrecision, ShardingStrategy, wrap


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
