"""Units with settings of their own, and parameters that stay out of the tree, against one process."""

from typing import Any

import pytest
import torch
from models import decoder, policy, token_loss, tokens
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn.testing import assert_parity, count_collectives, on_meshes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 5)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        for layer in (*self.layers, self.head):
            x = layer(x)
            self.seen.append(x.dtype)
        return x


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _step(model: nn.Module, mesh: DeviceMesh, chosen: sf.Policy) -> tuple[Any, ...]:
    params = sf.shard(model, mesh, chosen)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    (local,) = sf.data.local_batch((x,), mesh)
    loss, grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, local)
    return loss, sf.gather(grads), x


@on_meshes({"fsdp": 4}, {"replicate": 2, "fsdp": 2})
def test_each_unit_is_freed_as_it_says(mesh: DeviceMesh) -> None:
    units = {
        "layers.*": {},
        "layers.1": {"regather": False},
        nn.Linear: {"regather": False},
        "layers.2": {"regather": 2},
    }
    model = _net()
    plan = sf.plan(model, mesh, sf.Policy(units=units))
    assert [(unit.name, unit.regather) for unit in plan.units] == [
        ("layers.0", False),
        ("layers.1", False),
        ("layers.2", 2),
        ("head", False),
    ]
    with count_collectives() as kept:
        loss, grads, x = _step(model, mesh, sf.Policy(units={"layers.*": {}, "layers.1": {"regather": False}}))
    with count_collectives() as freed:
        _step(model, mesh, sf.Policy(units="layers.*"))
    assert kept.all_gather == freed.all_gather - 1
    wanted = model(x).square().mean()
    wanted.backward()
    assert_parity(
        {"loss": loss, **grads}, {"loss": wanted, **{n: p.grad for n, p in model.named_parameters()}}, tol=1e-6
    )


@on_meshes({"fsdp": 4})
def test_a_unit_with_a_dtype_of_its_own_casts_at_its_borders(mesh: DeviceMesh) -> None:
    model = _net()
    low = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    units = {"layers.*": {}, "layers.1": low | {"output_dtype": torch.float32}, "head": low}
    loss, grads, _ = _step(model, mesh, sf.Policy(units=units))
    assert model.seen == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
    assert all(grad.dtype == torch.float32 for grad in grads.values()) and loss.isfinite()
    buckets = [bucket for unit in sf.plan(model, mesh, sf.Policy(units=units)).units for bucket in unit.buckets]
    assert [(b.dtype, b.reduce_dtype) for b in buckets][1::2] == [(torch.bfloat16, torch.float32)] * 2
    quiet = sf.Policy(units={"layers.0": low | {"cast_inputs": False}})
    with pytest.raises(RuntimeError, match="same dtype"):
        _step(model, mesh, quiet)


@on_meshes({"fsdp": 4}, {"replicate": 2, "fsdp": 2})
def test_the_root_is_freed_too(mesh: DeviceMesh) -> None:
    """What no other unit holds; a whole model, even."""
    model, gathers = _net(), []
    expected = _step(model, mesh, sf.Policy(units=()))
    for regather in (False, True, 2):
        for units in ({"layers.*": {}}, {}):
            chosen = sf.Policy(units={**units, "": {"regather": regather}})
            with count_collectives() as counts:
                loss, grads, _ = _step(model, mesh, chosen)
            gathers.append(counts.all_gather)
            assert_parity([loss, grads], [*expected[:2]])
            planned = sf.plan(model, mesh, chosen)
            assert planned.units[0].name == "" and planned.units[0].regather == regather
    (kept, alone), (freed, freed_alone), (part, part_alone) = zip(gathers[::2], gathers[1::2], strict=True)
    assert freed - kept == freed_alone - alone == part - kept == part_alone - alone == 1


@on_meshes({"fsdp": 4})
def test_a_unit_reduces_in_a_dtype_of_its_own(mesh: DeviceMesh) -> None:
    model = _net()
    _, exact, _ = _step(model, mesh, sf.Policy(units="layers.*"))
    units = {"layers.*": {}, "layers.1": {"reduce_dtype": torch.bfloat16}}
    _, found, _ = _step(model, mesh, sf.Policy(units=units))
    for name, grad in exact.items():
        error = float((found[name] - grad).norm() / grad.norm())
        assert (1e-4 < error < 2e-2) if name.startswith("layers.1.") else error < 1e-6, (name, error)


def test_a_callable_gives_settings_and_the_rest_keep_the_policys() -> None:
    model = _net()
    chosen = sf.Policy(
        units=lambda name, _: {"regather": False} if name == "layers.0" else name == "layers.1", regather=2
    )
    plan = sf.plan(model, sf.MeshSpec(fsdp=4), chosen)
    assert {unit.name: unit.regather for unit in plan.units} == {"": False, "layers.0": False, "layers.1": 2}
    assert plan != sf.plan(model, sf.MeshSpec(fsdp=4), sf.Policy(units=["layers.0", "layers.1"], regather=2))


@pytest.mark.parametrize(
    ("units", "kind", "match"),
    [
        ({"layers.0": {"offload": "cpu"}}, TypeError, r"units=\{'layers.0': \{'offload': ...\}\}\): a unit may have"),
        ({"layers.0": True}, TypeError, r"units=\{'layers.0': ...\}\) takes a mapping of settings, not bool"),
        ({"": {"compute_dtype": torch.float32}}, TypeError, r"units=\{'': \{'compute_dtype': ...\}\}\): what no other"),
        ({"layers.0": {"regather": -2}}, ValueError, r"regather=-2"),
        ({"layers.0": {"compute_dtype": "bf16"}}, TypeError, r"compute_dtype=...\) takes a floating torch.dtype"),
        ({"layers.9": {}}, sf.ShardError, r"'layers.9' matches no module"),
        ({"layers.0": {"regather": 3}}, sf.ShardError, r"must divide fsdp=4, 4 % 3 = 1"),
    ],
)
def test_settings_that_mean_nothing(units: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        sf.plan(_net(), sf.MeshSpec(fsdp=4), sf.Policy(units=units))


@pytest.mark.everyday(1)
@on_meshes()
def test_ignored_parameters_stay_the_modules_own(mesh: DeviceMesh) -> None:
    model, reference = decoder(), decoder()
    chosen = policy() | sf.Policy(ignore=["layers.1.norm1.**", "norm.weight"])
    params = sf.shard(model, mesh, chosen)
    ignored = params.plan.info.ignored
    assert ignored and not any(name in params for name in ignored)
    x, y = tokens(0)
    loss, grads = sf.value_and_grad(lambda p, x, y: token_loss(sf.apply(model, p, x), y))(
        params, *sf.data.local_batch((x, y), mesh)
    )
    wanted = token_loss(reference(x), y)
    wanted.backward()
    named = dict(reference.named_parameters(remove_duplicate=False))
    assert_parity({"loss": loss}, {"loss": wanted})
    held = {n: grad for n, grad in sf.gather(grads).items() if "wk.bias" not in n and named[n].grad is not None}
    assert_parity(held, {name: named[name].grad for name in held})
    assert not any(isinstance(model.get_parameter(name), DTensor) for name in ignored)
    token_loss(sf.apply(model, params, sf.data.local_batch(x, mesh)), sf.data.local_batch(y, mesh)).backward()
    assert all(model.get_parameter(name).grad is not None for name in ignored), "autograd reaches them as ever"


def test_a_pattern_to_ignore_that_matches_nothing() -> None:
    with pytest.raises(sf.ShardError, match=r"Policy.ignore: 'layer.0.\*\*' matches no parameter; did you mean"):
        sf.plan(_net(), sf.MeshSpec(fsdp=2), sf.Policy(ignore="layer.0.**"))


def test_settings_of_a_wrapper_are_those_of_what_it_holds() -> None:
    """The class is that of what the wrapper for activation checkpointing holds, and the path that of the wrapper."""
    model = nn.Sequential(*(checkpoint_wrapper(nn.Linear(4, 4)) for _ in range(3)))
    for path in ("2", "2._checkpoint_wrapped_module"):
        made = sf.plan(model, sf.MeshSpec(fsdp=2), sf.Policy(units={nn.Linear: {}, path: {"regather": False}}))
        assert [unit.regather for unit in made.units] == [True, True, False]
    units = {"2": {"regather": False}, "2._checkpoint_wrapped_module": {"regather": 2}}
    made = sf.plan(model, sf.MeshSpec(fsdp=4), sf.Policy(units=units))
    assert [unit.regather for unit in made.units if unit.name] == [2]
