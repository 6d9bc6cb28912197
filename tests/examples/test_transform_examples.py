"""The examples of transforms against the same programs in `torch.func` on one process."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes, run

EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # as when torchrun starts one of them

problem, dp_sgd, maml, influence, gradient_penalty, pinn = (
    importlib.import_module(name) for name in ("problem", "dp_sgd", "maml", "influence", "gradient_penalty", "pinn")
)
Tree = dict[str, Tensor]
MESHES = ({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2})


def made(mesh: DeviceMesh) -> tuple[nn.Module, sf.Params, Tree]:
    """The net, its shards, its weights on one process."""
    model = problem.make_net()
    params = sf.shard(model, mesh, sf.Policy(rules=problem.RULES))
    return model, params, {name: p.detach() for name, p in model.named_parameters()}


def mean_square(model: nn.Module, p: Tree, x: Tensor, y: Tensor) -> Tensor:
    return (functional_call(model, p, (x,)) - y).square().mean()


def inner_product(a: Tree, b: Tree) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


@on_meshes(*MESHES)
def test_private_gradients(mesh: DeviceMesh) -> None:
    model, params, plain = made(mesh)
    data = problem.make_data(8)
    found = dp_sgd.private_gradient(model, params, *sf.data.local_batch(data, mesh))
    wanted = {name: torch.zeros_like(p) for name, p in plain.items()}
    for x, y in zip(*data, strict=True):
        grads = torch.func.grad(lambda p, x, y: (functional_call(model, p, (x,)) - y).square().sum())(plain, x, y)
        factor = (dp_sgd.CLIP / (inner_product(grads, grads).sqrt() + 1e-6)).clamp(max=1)
        wanted = {name: wanted[name] + factor * g for name, g in grads.items()}
    assert_parity(sf.gather(found), wanted, tol=1e-11)
    noise = sf.gather(dp_sgd.noise_like(params, 3))
    assert torch.equal(noise["0.weight"], sf.gather(dp_sgd.noise_like(params, 3))["0.weight"])
    assert 0.5 < float(noise["0.weight"].std()) < 1.5


@on_meshes(*MESHES)
def test_meta_gradients(mesh: DeviceMesh) -> None:
    model, params, plain = made(mesh)
    x, y = maml.make_tasks(4, 6, seed=2)
    support, query = (x[:, :3], y[:, :3]), (x[:, 3:], y[:, 3:])

    def of_a_task(p: Tree, support: Any, query: Any) -> Tensor:
        grads = torch.func.grad(lambda q: mean_square(model, q, *support))(p)
        return mean_square(model, {name: p[name] - 0.05 * grads[name] for name in p}, *query)

    def plain_loss(p: Tree) -> Tensor:
        return torch.stack([of_a_task(p, (x[i, :3], y[i, :3]), (x[i, 3:], y[i, 3:])) for i in range(4)]).mean()

    local = sf.data.local_batch((support, query), mesh)
    loss, grads = sf.value_and_grad(lambda p: maml.meta_loss(model, p, *local))(params)
    wanted, wanted_loss = torch.func.grad_and_value(plain_loss)(plain)
    assert_parity({"loss": loss, **sf.gather(grads)}, {"loss": wanted_loss, **wanted}, tol=1e-11)


@on_meshes(*MESHES)
def test_influences(mesh: DeviceMesh) -> None:
    model, params, plain = made(mesh)
    data, test = problem.make_data(8), problem.make_data(2, seed=5)
    x, y = sf.data.local_batch(data, mesh)
    goal = sf.grad(lambda p: (sf.apply(model, p, test[0]) - test[1]).square().mean())(params)
    v = influence.solve(model, params, (x, y), goal, steps=4)
    found = influence.influences(model, params, x, y, v)

    gradient = torch.func.grad(lambda p: mean_square(model, p, *data))
    way = rest = torch.func.grad(lambda p: mean_square(model, p, *test))(plain)
    solution = {name: torch.zeros_like(p) for name, p in plain.items()}
    size = inner_product(rest, rest)
    for _ in range(4):
        bent = torch.func.jvp(gradient, (plain,), (way,))[1]
        bent = {name: bent[name] + influence.DAMPING * way[name] for name in way}
        length = size / inner_product(way, bent)
        solution = {name: solution[name] + length * way[name] for name in way}
        rest = {name: rest[name] - length * bent[name] for name in way}
        size, before = inner_product(rest, rest), size
        way = {name: rest[name] + size / before * way[name] for name in way}
    assert_parity(sf.gather(v), solution, tol=1e-8)
    losses = torch.func.jvp(lambda p: (functional_call(model, p, (x,)) - y).square().sum(1), (plain,), (solution,))[1]
    torch.testing.assert_close(found, -losses, rtol=1e-8, atol=1e-8)


@on_meshes(*MESHES)
def test_gradient_penalties(mesh: DeviceMesh) -> None:
    model, params, plain = made(mesh)
    data = problem.make_data(8)
    x, y = sf.data.local_batch(data, mesh)

    def plain_loss(p: Tree) -> Tensor:
        grads, loss = torch.func.grad_and_value(lambda q: mean_square(model, q, *data))(p)
        return loss + 0.3 * inner_product(grads, grads).sqrt()

    loss, grads = sf.value_and_grad(lambda p: gradient_penalty.penalized(model, p, x, y, 0.3))(params)
    wanted, wanted_loss = torch.func.grad_and_value(plain_loss)(plain)
    assert_parity({"loss": loss, **sf.gather(grads)}, {"loss": wanted_loss, **wanted}, tol=1e-11)
    gradient = torch.func.grad(lambda p: mean_square(model, p, *data))
    way = gradient(plain)
    bent = torch.func.jvp(gradient, (plain,), (way,))[1]
    found = gradient_penalty.curvature(model, params, x, y)
    torch.testing.assert_close(found, inner_product(way, bent) / inner_product(way, way), rtol=1e-11, atol=1e-11)


@on_meshes(*MESHES)
def test_what_is_left_of_an_equation(mesh: DeviceMesh) -> None:
    """Its value, and the gradient of its square: two derivatives by points, one by parameters."""
    net = pinn.make_net().double()
    params, plain = sf.shard(net, mesh, sf.Policy(rules=pinn.RULES)), dict(net.named_parameters())
    points = [x.double() for x in pinn.draw_points(0, 8)]

    def u(p: Tree, z: Tensor) -> Tensor:
        return functional_call(net, p, (z[None],))[0, 0]

    def left(p: Tree, z: Tensor) -> Tensor:
        second = torch.func.hessian(u, argnums=1)(p, z)
        return torch.func.grad(u, argnums=1)(p, z)[1] - pinn.A * second[0, 0]

    mine = sf.data.local_batch(points, mesh)
    wanted = torch.stack([left(plain, z) for z in mine[0]])
    torch.testing.assert_close(pinn.residual(net, params, mine[0]), wanted, rtol=1e-11, atol=1e-11)
    grads = sf.grad(lambda p: pinn.residual(net, p, mine[0]).square().mean())(params)
    whole = torch.func.grad(lambda p: torch.stack([left(p, z) for z in points[0]]).square().mean())(plain)
    assert_parity(sf.gather(grads), whole, tol=1e-10)


@pytest.mark.slow
def test_a_net_finds_the_temperature_of_a_rod(tmp_path: Path) -> None:
    """And leaves a picture of it."""
    errors = run(pinn.main, ["--steps", "300", "--out", str(tmp_path / "heat.png")], ranks=2)
    assert len(set(errors)) == 1 and errors[0] < 0.1
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def _learns(name: str, steps: tuple[int, int]) -> tuple[float, float]:
    module = {"dp_sgd": dp_sgd, "maml": maml, "gradient_penalty": gradient_penalty}[name]
    return float(module.main(steps[0])), float(module.main(steps[1]))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["dp_sgd", "maml", "gradient_penalty"])
def test_examples_learn(name: str) -> None:
    for early, late in run(_learns, name, (20, 40), ranks=4):
        assert late < 0.9 * early


@on_meshes({"fsdp": 2, "tp": 2})
def test_inner_products(mesh: DeviceMesh) -> None:
    _, params, plain = made(mesh)
    other = sf.tree.map(lambda p: p + 1, params)
    wanted = inner_product(plain, {name: p + 1 for name, p in plain.items()})
    torch.testing.assert_close(sf.tree.dot(params, other), wanted)
    grads = sf.grad(lambda p: sf.tree.dot(p, p) * sf.optim.global_norm(p))(params)
    norm = inner_product(plain, plain).sqrt()
    assert_parity(sf.gather(grads), {name: 3 * norm * p for name, p in plain.items()}, tol=1e-11)
    with pytest.raises(sf.ShardError, match="the second tree has no leaf"):
        sf.tree.dot(params, params.select("0.*"))
