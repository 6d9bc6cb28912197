"""Collectives of torch inside transforms are refused by name; ours are not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import on_meshes


@on_meshes({"fsdp": 2, "tp": 1})
def test_a_collective_of_torch_is_named(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    params, x = sf.shard(model, mesh, sf.Policy()), torch.ones(3, 4)
    group = mesh.get_group("fsdp")

    def loss(total: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
        def of(p: sf.Params, x: Tensor) -> Tensor:
            value = sf.apply(model, p, x).square().mean()
            result = total(value)
            return value if result is None else result

        return of

    def transforms(fn: Callable[..., Tensor]) -> list[Callable[[], Any]]:
        return [
            lambda: sf.vmap(fn, in_dims=(None, 0))(params, x),
            lambda: sf.jvp(lambda p: fn(p, x), (params,), (params,)),
            lambda: sf.vjp(lambda p: fn(p, x), params),
            lambda: sf.hvp(fn, (params, x), params),
            lambda: sf.vmap(sf.grad(fn), in_dims=(None, 0))(params, x),
        ]

    raw, pure = "torch.distributed.all_reduce", "_functional_collectives.all_reduce"
    for total, name in ((dist.all_reduce, raw), (lambda v: functional.all_reduce(v, "sum", group), pure)):
        for transform in transforms(loss(total)):
            with pytest.raises(sf.ShardError, match=f"calls .*{name.rpartition('.')[0]}.*Use sf.collectives"):
                transform()
    samples, *others, gradients = transforms(loss(lambda v: v + sf.collectives.pmean(v.detach(), mesh, "fsdp")))
    for transform in others:
        transform()
    for transform in (samples, gradients):
        with pytest.raises(sf.ShardError, match=r"an sf\.vmap goes on whose samples"):
            transform()
    with pytest.raises(sf.ShardError, match="all_reduce"):  # after the run of a function with the same code
        transforms(loss(dist.all_reduce))[1]()
    # Outside of transforms everything is allowed.
    value, _ = sf.value_and_grad(loss(lambda v: dist.all_reduce(v.detach())))(params, x)
    assert value.dim() == 0


def test_errors_of_the_function_itself_stay() -> None:
    def broken(x: Tensor) -> Tensor:
        return x @ x.new_zeros(7, 7)

    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        sf.vjp(broken, torch.ones(3, 4))
    assert not isinstance(caught.value, sf.ShardError)


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 1})
def test_what_a_part_of_a_leaf_cannot_tell_is_refused(mesh: DeviceMesh) -> None:
    """The first run of a function is watched; where leaves are whole everything is allowed."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    rules = {"0.weight": "f@tp c@fsdp", "2.weight": "_@fsdp f@tp"}
    params, x = sf.shard(model, mesh, sf.Policy(rules=rules)), torch.ones(2, 6)
    samples = torch.ones(4, 1, 6)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    def clipped(p: sf.Params, x: Tensor) -> sf.Params:
        return sf.tree.map(lambda g: g / (1 + g.norm()), sf.grad(loss)(p, x))

    def stepped(p: sf.Params) -> Tensor:
        return loss(sf.tree.map(lambda w, g: torch.clamp(w - 0.1 * g, -1, 1), p, sf.grad(loss)(p, x)), x)

    wrong: list[Callable[[], Any]] = [
        lambda: sf.jvp(lambda p: torch.stack([w.square().sum() for w in p.values()]).sum(), (params,), (params,)),
        lambda: sf.hvp(lambda p: loss(p, x) + p["0.weight"].abs().mean(), (params,), params),
        lambda: sf.vjp(lambda p: x @ p["0.weight"].T, params),
        lambda: sf.jvp(lambda p: (p["0.weight"] * 2)[0], (params,), (params,)),
        lambda: sf.vmap(clipped, in_dims=(None, 0))(params, samples),
    ]
    for at, call in enumerate(wrong):
        if mesh.size() == 1 or (at == 4 and mesh["fsdp"].size() > 1):  # gradients of samples are whole over data axes
            call()
            continue
        with pytest.raises(sf.ShardError, match=r"of '0.weight' would be that of this rank's part.*sf.gather"):
            call()
    sf.jvp(stepped, (params,), (params,))
    sf.vjp(lambda p: 2 * p["0.weight"][None, ..., :], params)
    sf.jvp(lambda p: loss(p, x) + sf.tree.dot(p, p) + sf.gather(p)["0.weight"].norm(), (params,), (params,))
    sf.vmap(sf.grad(loss), in_dims=(None, 0))(params, samples)


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 2, "tp": 2}, {"replicate": 2, "fsdp": 2})
def test_what_data_ranks_share_comes_into_a_loss_by_a_pvary(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(8, 4, dtype=torch.float64)
    params, local = sf.shard(model, mesh, sf.Policy()), sf.data.local_batch(x, mesh)
    axes = [axis for axis in ("replicate", "fsdp") if axis in (mesh.mesh_dim_names or ())]

    def loss(p: sf.Params, x: Tensor, varied: Any) -> Tensor:
        out = sf.apply(model, p, x)
        mean = out.mean(0)
        for axis in axes:
            mean = sf.collectives.pmean(mean, mesh, axis)
        for axis in varied:
            mean = sf.collectives.pvary(mean, mesh, axis)
        return ((out - mean) ** 4).mean()

    out = model(x)
    wanted = torch.autograd.grad(((out - out.mean(0)) ** 4).mean(), list(model.parameters()))
    found = sf.gather(sf.grad(loss)(params, local, axes))
    for grad, right in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(grad, right)
    for varied in (axes[1:], []):
        with pytest.raises(sf.ShardError, match=rf"what psum over '{axes[0]}' gives.*pvary\(x, mesh, '{axes[0]}'\)"):
            sf.grad(loss)(params, local, varied)
    alone = sf.grad(lambda x: sf.collectives.psum(x, mesh, "fsdp").sum())(x)  # of no tree: nobody takes a mean
    torch.testing.assert_close(alone, torch.ones_like(x))
    if mesh["fsdp"].size() > 1:
        for differentiate in (
            lambda: sf.hvp(loss, (params, local, axes), params),
            lambda: sf.vjp(lambda p: loss(p, local, axes), params),
        ):
            with pytest.raises(sf.ShardError, match=r"pmean: a gradient within .* whether a pvary follows"):
                differentiate()
        slope = sf.jvp(lambda p: loss(p, local, axes), (params,), (params,))[1]
        torch.testing.assert_close(sf.collectives.pmean(slope, mesh, "fsdp").isfinite(), torch.tensor(True))
        with pytest.raises(sf.ShardError, match=r"pmean|psum: an sf\.vmap goes on whose samples or members lie on"):
            sf.vmap(lambda p, x: loss(p, x[None], axes), in_dims=(None, 0))(params, local)


class Keeps(nn.Module):
    """Reaches a weight, or a buffer that its forward writes, in another way than through its module."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        weight, seen = self.up.weight, self.seen
        self.kept, self.seens = [weight], [seen]
        self.listed = nn.ParameterList([weight])
        self.ways: dict[str, Callable[[Tensor], Tensor]] = {
            "list": lambda x: F.linear(x, self.kept[0]),
            "cell": lambda x: x @ weight.mT,
            "partial": partial(F.linear, weight=weight),
            "buffer": lambda x: F.linear(x, self.up.weight) * self.seens[0],
            "parameter list": lambda x: F.linear(x, self.listed[0]),
            "read of a size": lambda x: F.linear(x, self.up.weight) * self.kept[0].shape[0] * self.kept[0].numel(),
        }
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.down(self.ways[self.way](x))


@pytest.mark.parametrize("trains", [False, True])
@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 2})
def test_tensors_of_the_model_that_a_forward_has_kept_are_refused(mesh: DeviceMesh, trains: bool) -> None:
    x = torch.ones(2, 4)
    rules = {"up.weight": "f@tp c", "listed.0": "f@tp c", "down.weight": "c f@tp"}
    for way in (way for way in Keeps("").ways if not (trains and way == "buffer")):
        model = Keeps(way)
        policy = sf.Policy(rules=rules)
        if trains:
            call: Callable[[Tensor], Tensor] = sf.Trainer(model, mesh, policy)
        else:
            call = partial(sf.apply, model, sf.shard(model, mesh, policy))
        if way in ("list", "cell", "partial", "buffer"):
            name = "seen" if way == "buffer" else "up.weight"
            with pytest.raises(sf.ShardError, match=rf"computes with '{name}' of the model as it was.*ParameterList"):
                [call(x) for _ in range(2)]
        else:
            one = Keeps(way)
            for _ in range(2):
                torch.testing.assert_close(call(x), one(x))
