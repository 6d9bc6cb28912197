"""What Lightning, accelerate, audiocraft, fms, litgpt and Prodigy do with the class: as with torch's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Optimizer

import shardfn as sf
from shardfn.compat.fsdp1 import FullyShardedDataParallel as Ours
from shardfn.testing import on_meshes

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def reset_parameters(self) -> None:
        """Of parameters that its children have."""
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def training_step(self, x: Tensor, scale: float) -> Tensor:
        return self(x).square().sum() * scale


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def _steps(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def an_optimizer_made_before(kind: Any) -> Any:
    """As `accelerator.prepare(model, optimizer)` has it."""
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    return _steps(kind(model, device_id=CPU, use_orig_params=True), optimizer)


def a_closure_that_reduces(kind: Any) -> Any:
    """Gradients that were held back are reduced by the backward of the closure."""
    model = kind(_model(), device_id=CPU, use_orig_params=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(X).square().mean().backward()

    def closure() -> float:
        loss = model(X).square().mean()
        loss.backward()
        return float(loss)

    return optimizer.step(closure), float(model(X).square().mean())


def a_forward_for_one_call(kind: Any) -> Any:
    """With other arguments than those of the class."""
    block: Any = _model()[0]
    model, forward = kind(block, device_id=CPU), block.forward

    def step(x: Tensor, scale: float) -> Tensor:
        block.forward = forward
        return block.training_step(x, scale)

    block.forward = step
    return float(model(X, 0.5)), float(model(X).sum())


def whether_it_was_wrapped(kind: Any) -> Any:
    block = _model()
    model = kind(block, device_id=CPU)
    return model != block, model != model


def values_of_an_init_function(units: Any, kind: Any) -> Any:
    """It is called with the modules themselves, in the order of torch, also with those that have no parameters."""
    with torch.device("meta"):
        model = _model().append(nn.LayerNorm(8))  # which is in no unit
    modules, called = [*model.modules()], list[int]()

    def init(module: nn.Module) -> None:
        called.append(modules.index(module))
        if isinstance(module, Block | nn.LayerNorm):
            module.to_empty(device=CPU)
            module.reset_parameters()
        if isinstance(module, Block):
            for linear in (module.up, module.down):
                nn.init.zeros_(linear.bias)

    torch.manual_seed(1)
    options = {"param_init_fn": init, "auto_wrap_policy": ModuleWrapPolicy(units) if units else None}
    return called, _whole(kind, kind(model, device_id=CPU, use_orig_params=True, **options))


def values_of_their_own_reset(kind: Any) -> Any:
    """Put on the instance, as a `partial` of the module."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    for index in (0, 2):
        linear: Any = model[index]
        linear.reset_parameters = partial(_fill, linear)
    torch.manual_seed(1)
    policy = ModuleWrapPolicy({nn.Linear})
    return _whole(kind, kind(model, device_id=CPU, use_orig_params=True, auto_wrap_policy=policy))


def _fill(linear: nn.Linear) -> None:
    nn.init.normal_(linear.weight)
    nn.init.ones_(linear.bias)


def _whole(kind: Any, model: nn.Module) -> dict[str, Tensor]:
    with kind.summon_full_params(model):
        named = {name.replace("_fsdp_wrapped_module.", ""): x for name, x in model.named_parameters()}
        return {name: x.detach().clone() for name, x in named.items()}


def a_state_dict_that_is_written(kind: Any, flavour: StateDictType) -> Any:
    """Local ones are the parameters, sharded ones are as they were."""
    model = kind(_model(), device_id=CPU, use_orig_params=True)
    _steps(model, SGD(model.parameters(), lr=0.1))
    with kind.state_dict_type(model, flavour), torch.no_grad():
        for key, value in model.state_dict().items():
            if not key.endswith("_flat_param"):
                shards = value.local_shards() if hasattr(value, "local_shards") else []
                (shards[0].tensor if shards else getattr(value, "_local_tensor", value)).fill_(2.0)
    return _whole(kind, model)


def whether_parameters_are_flattened(kind: Any) -> Any:
    model = kind(_model(), device_id=CPU, use_orig_params=True)
    return all(hasattr(p, "_fsdp_flattened") for p in model.parameters())


HABITS: dict[str, Callable[[Any], Any]] = {
    "an optimizer made before": an_optimizer_made_before,
    "a closure that reduces": a_closure_that_reduces,
    "a forward for one call": a_forward_for_one_call,
    "whether it was wrapped": whether_it_was_wrapped,
    "an init function": partial(values_of_an_init_function, None),
    "an init function of units": partial(values_of_an_init_function, {Block}),
    "their own reset": values_of_their_own_reset,
    "a local state dict": partial(a_state_dict_that_is_written, flavour=StateDictType.LOCAL_STATE_DICT),
    "a sharded state dict": partial(a_state_dict_that_is_written, flavour=StateDictType.SHARDED_STATE_DICT),
    "whether parameters are flattened": whether_parameters_are_flattened,
}


@on_meshes({"fsdp": 2})
@pytest.mark.filterwarnings("ignore")
def test_habits_of_libraries_are_as_with_torchs_class(mesh: DeviceMesh) -> None:
    for name, habit in HABITS.items():
        ours, torchs = habit(Ours), habit(torch.distributed.fsdp.FullyShardedDataParallel)
        torch.testing.assert_close(ours, torchs, msg=lambda why, name=name: f"{name}: {why}")


def _own_experts(kind: Any, wrapped: bool) -> list[float]:
    """Each rank has an expert of its own: wrapped over a group of one, or left out."""
    model, rank = _model(), dist.get_rank()
    for p in model[1].parameters():
        p.data += rank
    options: dict[str, Any] = {"device_id": CPU, "use_orig_params": True}
    if wrapped:
        groups = [dist.new_group([one]) for one in range(2)]
        model[1] = kind(model[1], process_group=groups[rank], **options)
    else:
        options["ignored_modules"] = [model[1]]
    model = kind(model, **options)
    return _steps(model, SGD(model.parameters(), lr=0.01))


@on_meshes({"fsdp": 2})
@pytest.mark.filterwarnings("ignore")
def test_experts_of_one_rank_are_left_out(mesh: DeviceMesh) -> None:
    with pytest.raises(sf.ShardError, match=r"what a rank has by itself is not wrapped, but left out: ignored_modules"):
        _own_experts(Ours, wrapped=True)
    want = _own_experts(torch.distributed.fsdp.FullyShardedDataParallel, wrapped=True)
    torch.testing.assert_close(_own_experts(Ours, wrapped=False), want)


@on_meshes({"fsdp": 2})
def test_ranks_that_ignore_different_modules_are_told(mesh: DeviceMesh) -> None:
    model = _model()
    with pytest.raises(sf.ShardError, match=r"ranks have different models or policies"):
        Ours(model, device_id=CPU, ignored_modules=[model[dist.get_rank()]])(X)


@on_meshes({"fsdp": 2})
def test_tied_weights_on_meta_stay_tied(mesh: DeviceMesh) -> None:
    """Torch's class initializes and trains them apart, silently."""
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        layers[1].weight = layers[0].weight
    model = Ours(layers, device_id=CPU, use_orig_params=True)
    _steps(model, SGD(model.parameters(), lr=0.1))
    with Ours.summon_full_params(model):
        named = dict(model.named_parameters(remove_duplicate=False))
    assert named["0.weight"] is named["1.weight"]
    assert len([*model.parameters()]) == 2


@on_meshes({"fsdp": 2})
def test_a_closure_that_reduces_nothing_is_refused(mesh: DeviceMesh) -> None:
    model = Ours(_model(), device_id=CPU, use_orig_params=True)
    with model.no_sync():
        model(X).sum().backward()
    with pytest.raises(sf.ShardError, match="only added up under no_sync"):
        SGD(model.parameters(), lr=0.1).step(lambda: 0.0)
