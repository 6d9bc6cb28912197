"""Megatron-core's wrapper, driven as its `get_model` drives it, with objects of the same shape."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_objects import WRAP, Model, Special, TransformerLayer
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn.comm import buckets
from shardfn.compat.common.sharded_module import current_shards
from shardfn.compat.fsdp2 import FSDPModule
from shardfn.compat.megatron import TorchFullyShardedDataParallel
from shardfn.testing import assert_trees_close, run

CONFIG = SimpleNamespace(transformer_impl="transformer_engine", recompute_granularity=None)


def _model() -> Model:
    return Model().double()


def _trains() -> None:
    plain, whole = _model(), _model()
    vars(whole.special.weight)["my_attr"] = 7
    model: Any = TorchFullyShardedDataParallel(
        config=SimpleNamespace(transformer_impl="transformer_engine", recompute_granularity="full"),
        ddp_config=SimpleNamespace(reshard_after_forward=True),
        module=whole,
        sub_modules_to_wrap=WRAP,
        disable_bucketing=True,
    )
    names = {type(each).__name__ for each in model.modules() if isinstance(each, FSDPModule)}
    assert names == {"FSDPModel", "FSDPTransformerLayer", "FSDPColumnParallelLinear", "FSDPSpecial"}
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    for step in range(3):
        x = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(step)).double()
        with model.no_sync():
            model(x[dist.get_rank()]).square().mean().backward()
        plain(x.flatten(0, 1)).square().mean().backward()
        model.start_grad_sync()
        model.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.zero_grad_buffer()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict()) and "output_layer._extra_state" in state
    assert next(name for name, _ in model.named_parameters()) == "module.layers.0.up.weight"
    found = {name: buckets.whole(value) for name, value in state.items() if isinstance(value, DTensor)}
    expected = {name: value.detach() for name, value in plain.named_parameters()}
    assert_trees_close(found, expected, rtol=0, atol=1e-9)
    assert model.load_state_dict({}) is None
    assert vars(model.module.special.weight)["my_attr"] == 7
    assert all(getattr(parameter, "is_torch_fsdp2_param", False) for parameter in model.parameters())


@pytest.mark.everyday(2)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_trains_as_one_process(ranks: int) -> None:
    run(_trains, ranks=ranks)


def _options() -> None:
    local = SimpleNamespace(transformer_impl="local", recompute_granularity=None)
    model: Any = TorchFullyShardedDataParallel(local, SimpleNamespace(reshard_after_forward=False), _model(), WRAP)
    assert not isinstance(model.module.output_layer, FSDPModule) and isinstance(model.module.special, FSDPModule)
    assert (model.config, model.process_group) == (local, dist.group.WORLD) and model.device_mesh.size() == 2
    model.scale_gradients(2.0)
    model.broadcast_params()
    assert list(model.state_dict_for_save_checkpoint(prefix="a.")) == list(model.state_dict(prefix="a."))
    given: dict[str, Any] = {}
    model.state_dict("b.", False, given)
    assert "b.special.weight" in given
    default = TorchFullyShardedDataParallel(CONFIG, SimpleNamespace(), _model())
    units = {type(each).__name__ for each in default.modules() if isinstance(each, FSDPModule)}
    assert units == {"FSDPModel", "FSDPSpecial"}
    place = "megatron.core.transformer.transformer_layer"
    with patch.dict(sys.modules, {place: SimpleNamespace(TransformerLayer=TransformerLayer)}):  # as if installed
        default = TorchFullyShardedDataParallel(CONFIG, SimpleNamespace(), _model())
    units = {type(each).__name__ for each in default.modules() if isinstance(each, FSDPModule)}
    assert units == {"FSDPModel", "FSDPTransformerLayer", "FSDPSpecial"}
    bad = _model()
    bad.special.__dict__["_fsdp_modules"] = ["Special"]
    with pytest.raises(sf.ShardError, match="_fsdp_modules of 'special' lists 'Special', which is no class of modules"):
        TorchFullyShardedDataParallel(CONFIG, SimpleNamespace(), bad, WRAP)
    assert not any(isinstance(parameter, DTensor) for parameter in bad.parameters())
    for wrong in (Special, 5, None, "Special"):
        bad.special.__dict__["_fsdp_modules"] = wrong
        with pytest.raises(sf.ShardError, match=r"_fsdp_modules of 'special' is .*, no list of classes"):
            TorchFullyShardedDataParallel(CONFIG, SimpleNamespace(), bad, WRAP)
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        TorchFullyShardedDataParallel(CONFIG, SimpleNamespace(), default.module, ())


def test_options_and_what_is_refused() -> None:
    run(_options, ranks=2)


class _Nested(TransformerLayer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TransformerLayer()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x))


def _nested() -> None:
    """Inner modules are sharded first: they are units of the plan, and what both share is fully_shard's ValueError."""
    whole, tied = _model(), _model()
    whole.layers[1] = _Nested().double()
    model: Any = TorchFullyShardedDataParallel(CONFIG, SimpleNamespace(), whole, WRAP)
    units = [unit.name for unit in current_shards(model.module).plan.units]
    assert units == ["layers.0", "layers.1", "layers.1.inner", "special", "output_layer"]
    tied.layers[1] = nested = _Nested().double()
    nested.inner.up.weight = nested.up.weight
    with pytest.raises(ValueError, match=r"'up\.weight' is shared with a parameter already managed"):
        TorchFullyShardedDataParallel(CONFIG, SimpleNamespace(), tied, WRAP)


def test_units_inside_units() -> None:
    run(_nested, ranks=2)
