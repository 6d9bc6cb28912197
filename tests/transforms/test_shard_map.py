"""Hand-written regions on DTensors: equal to one device, gradients included; specs that are wrong."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes
from shardfn.transforms.shard_map import shard_map

MESHES = tuple({"fsdp": f, "tp": t} for f, t in ((4, 1), (2, 2), (1, 4)))


def _tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 6), (12, 6), (6, 12), (6,)
    x, up, down, scale = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return x, up, down, scale


@on_meshes(*MESHES)
def test_a_region_equals_one_device(mesh: DeviceMesh) -> None:
    @shard_map("b@fsdp c, ff@tp c, c ff@tp, c -> b@fsdp c, c", mesh)
    def mlp(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        # `scale` and x are shared by the ranks of tp and meet what is split over it; `scale` also stays whole.
        h = torch.tanh((x * scale) @ up.T)
        out = sf.collectives.psum(h @ down.T, mesh, "tp")
        return out + scale, sf.collectives.psum(out.sum(0), mesh, "fsdp")

    def whole(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.tanh((x * scale) @ up.T) @ down.T
        return out + scale, out.sum(0)

    tensors = [x.requires_grad_() for x in _tensors()]
    wanted, sums = whole(*tensors)
    expected = torch.autograd.grad(wanted.square().sum() + sums.sin().sum(), tensors)

    placed = ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()])
    pairs = zip(tensors, placed, strict=True)
    given = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in pairs]
    out, total = mlp(*given)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(0), Replicate())
    squares = out.square().sum()
    assert isinstance(squares, DTensor)
    loss = squares.redistribute(mesh, [Replicate()] * 2) + total.sin().sum()
    grads = torch.autograd.grad(loss.to_local(), given)
    assert_parity(
        {"out": out.full_tensor().detach(), "total": total.full_tensor().detach()},
        {"out": wanted.detach(), "total": sums.detach()},
    )
    assert_parity(
        {str(i): g.full_tensor() for i, g in enumerate(grads) if isinstance(g, DTensor)},
        {str(i): g for i, g in enumerate(expected)},
    )
    assert [g.placements for g in grads if isinstance(g, DTensor)] == [tuple(p) for p in placed]


@on_meshes({"fsdp": 2, "tp": 2})
def test_leaves_of_a_tree_and_parts_of_a_batch(mesh: DeviceMesh) -> None:
    model = torch.nn.Linear(6, 12, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    params = sf.shard(model, mesh, sf.Policy(rules={"weight": "ff@tp c"}))
    columns = shard_map("b@fsdp c, ff@tp c -> b@fsdp ff@tp", mesh)(lambda x, w: x @ w.T)
    x = _tensors()[0]
    out = columns(sf.data.local_batch((x,), mesh)[0], params["weight"])
    assert sf.typeof(out) == "f64[8@fsdp 12@tp]"
    assert_parity({"out": out.full_tensor()}, {"out": x @ model.weight.detach().T})


@on_meshes({"fsdp": 2, "tp": 2})
def test_complex_values_have_the_gradients_of_one_device(mesh: DeviceMesh) -> None:
    x, scale = (torch.randn(n, 6, dtype=torch.complex128, generator=torch.Generator().manual_seed(n)) for n in (8, 1))

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).abs().square().sum()

    tensors = [x.requires_grad_(), scale.requires_grad_()]
    expected = torch.autograd.grad(norm(x, scale), tensors)
    region = shard_map("b@fsdp c, one c -> ", mesh)(lambda x, s: sf.collectives.psum(norm(x, s), mesh, "fsdp"))
    placed = [Shard(0), Replicate()], [Replicate(), Replicate()]
    given = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(tensors, placed, strict=True)]
    grads = torch.autograd.grad(region(*given).to_local(), given)
    for found, wanted in zip(grads, expected, strict=True):
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), wanted)
    total = sf.collectives.psum(x.detach().conj(), mesh, "tp")
    torch.testing.assert_close(total, 2 * x.detach().conj().resolve_conj())


@on_meshes({"fsdp": 2, "tp": 2})
def test_what_is_wrong_says_so(mesh: DeviceMesh) -> None:
    x, up, *_ = _tensors()

    def fails(spec: str, match: str, fn: Any = lambda x, w: x @ w.T, args: Any = None) -> None:
        with pytest.raises(sf.ShardError, match=match):
            shard_map(spec, mesh)(fn)(*(args or (x[:4], up[:6])))

    fails("b@fsdp c, ff@tp c", "needs one '->'")
    fails("b@fdsp c, ff@tp c -> b ff", "no 'fdsp'; did you mean 'fsdp'")
    fails("b@fsdp c, ff@tp c -> b@fsdp ff +tp", "psum it inside")
    fails("b@fsdp@tp c, ff@tp@fsdp c -> b ff", "order of the mesh")
    fails("b@fsdp c@fsdp, ff c -> b ff", "fsdp")
    fails("(b@fsdp a) c, ff c -> b ff", "one name for each dim")
    fails("b@fsdp c, ff@tp c -> b@fsdp ff@tp", "2 inputs in the spec, 1 given", args=(x,))
    fails("b@fsdp c d, ff@tp c -> b@fsdp ff@tp", r"input 0 is 'b@fsdp c d', got shape \(4, 6\)")
    fails("b@fsdp c, c@tp ff -> b@fsdp c", "c=12, and 6 before")
    fails("b@fsdp c, ff@tp c -> b@fsdp ff", "differs over 'tp'; psum or gather it")
    fails("b@fsdp c, ff@tp c -> b@fsdp ff@tp, b", "2 outputs in the spec, the function returns 1")
    fails("b@fsdp c, ff@tp c -> b", r"the function returns a tensor of shape \(4, 6\)")
    whole = distribute_tensor(up, mesh, [Replicate(), Replicate()])
    fails("b@fsdp c, ff@tp c -> b@fsdp ff@tp", "got a DTensor that is '_ _'", args=(x[:4], whole))
    with pytest.raises(TypeError, match="expected a DeviceMesh"):
        shard_map("a -> a", cast(Any, sf.MeshSpec(tp=2)))


@on_meshes({"fsdp": 1, "tp": 2})
def test_what_follows_from_the_place_of_a_rank_differs(mesh: DeviceMesh) -> None:
    """Whole gradients of a shared value of which each rank takes a part by its index."""
    place = sf.collectives.axis_index
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)

    def listed(u: Tensor) -> Tensor:
        return u.chunk(2)[place(mesh, "tp")] * 1

    def indexed(u: Tensor) -> Tensor:
        index = place(mesh, "tp")
        return u.chunk(2)[index] * 1

    def sliced(u: Tensor) -> Tensor:
        index = place(mesh, "tp")
        return u[index * 3 : 3 + 3 * index].clone()

    def narrowed(u: Tensor) -> Tensor:
        return u.narrow(0, place(mesh, "tp") * 3, 3).clone()

    def scaled(u: Tensor) -> Tensor:
        return u[:3] * (place(mesh, "tp") + 1)

    def gradient(fn: Any) -> Tensor:
        shared = distribute_tensor(weights, mesh, [Replicate(), Replicate()]).requires_grad_()
        out = shard_map("f2 -> f@tp", mesh)(fn)(shared)
        assert isinstance(out, DTensor)
        (found,) = torch.autograd.grad((out.full_tensor() * weights).sum(), shared)
        assert isinstance(found, DTensor)
        return found.full_tensor()

    def halved(u: Tensor) -> Tensor:
        return u[:3] * (torch.tensor(place(mesh, "tp")) / 1 + 1)

    torch.testing.assert_close(gradient(halved), gradient(scaled))
    for wrong in (lambda u: u[:3] * (place(mesh, "tp") / 2), lambda u: u[:3] * float(place(mesh, "tp"))):
        with pytest.raises(sf.ShardError, match="cannot be followed over ranks"):
            gradient(wrong)
    for fn in (indexed, sliced, narrowed):
        torch.testing.assert_close(gradient(fn), weights)
    torch.testing.assert_close(gradient(scaled), torch.cat([weights[:3] + 2 * weights[3:], torch.zeros(3)]).double())
    with pytest.raises(sf.ShardError, match="axis_index after chunk"):
        gradient(listed)
    with pytest.raises(sf.ShardError, match="gives another answer on each rank"):
        gradient(lambda u: u[:3] if place(mesh, "tp") == 0 else u[3:])
    with pytest.raises(sf.ShardError, match="gives another answer on each rank"):
        gradient(lambda u: u[:3] if place(mesh, "tp") else u[3:])
    assert place(mesh, "tp") in (0, 1), "an ordinary number elsewhere"


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] * b, grads[0] * a


@on_meshes({"fsdp": 2, "tp": 2})
def test_functions_that_are_not_followed_and_collectives_that_are(mesh: DeviceMesh) -> None:
    x, up, *_ = _tensors()
    split = distribute_tensor(x[:, 0], mesh, [Replicate(), Shard(0)]).requires_grad_()
    whole = distribute_tensor(x[:, 1], mesh, [Replicate(), Replicate()]).requires_grad_()
    with pytest.raises(sf.ShardError, match=r"an autograd\.Function"):
        shard_map("f@tp, f2 -> f@tp", mesh)(lambda w, u: _Times.apply(w, u[:4]))(split, whole)

    @shard_map("b c@tp, ff c@tp -> b@tp ff", mesh)
    def rows(x: Tensor, w: Tensor) -> Tensor:
        return sf.collectives.psum_scatter(x @ w.T, mesh, "tp", dim=0)

    given = [distribute_tensor(value, mesh, [Replicate(), Shard(1)]).requires_grad_() for value in (x, up)]
    out = rows(*given)
    torch.testing.assert_close(out.full_tensor(), x @ up.T)
    grads = torch.autograd.grad(out.full_tensor().square().sum(), given)
    tensors = [x.clone().requires_grad_(), up.clone().requires_grad_()]
    wanted = torch.autograd.grad((tensors[0] @ tensors[1].T).square().sum(), tensors)
    for found, right in zip(grads, wanted, strict=True):
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), right)


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 1})
def test_a_region_in_a_loss_and_in_transforms(mesh: DeviceMesh) -> None:
    x, up, down, _ = _tensors()
    model = torch.nn.Sequential(torch.nn.Linear(6, 12, bias=False), torch.nn.Linear(12, 6, bias=False)).double()
    rules = {"0.weight": "ff@tp c", "1.weight": "c ff@tp"}
    params = sf.tree.map(torch.clone, sf.shard({"0.weight": up, "1.weight": down}, mesh, sf.Policy(rules=rules)))
    del model

    @shard_map("b@fsdp c, ff@tp c, c ff@tp -> b@fsdp c", mesh)
    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return sf.collectives.psum(torch.tanh(x @ up.T) @ down.T, mesh, "tp")

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return mlp(x, p["0.weight"], p["1.weight"]).square().mean()

    def whole_loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["0.weight"].T) @ p["1.weight"].T).square().mean()

    plain = {"0.weight": up, "1.weight": down}
    (mine,) = sf.data.local_batch((x,), mesh)
    value, grads = sf.value_and_grad(loss)(params, mine)  # a scalar DTensor is the loss of all ranks
    found = {"loss": value, **sf.gather(grads)}
    assert_parity(found, {"loss": whole_loss(plain, x), **torch.func.grad(whole_loss)(plain, x)}, tol=1e-10)

    samples = sf.gather(sf.vmap(sf.grad(lambda p, x: loss(p, x[None])), in_dims=(None, 0))(params, mine))
    assert_parity(samples, torch.func.vmap(torch.func.grad(whole_loss), in_dims=(None, 0))(plain, x), tol=1e-10)
    slope = sf.jvp(lambda p: loss(p, mine), (params,), (params,))[1]
    wanted = torch.func.jvp(lambda p: whole_loss(p, x), (plain,), (plain,))[1]
    assert_parity({"slope": sf.collectives.pmean(slope, mesh, "fsdp")}, {"slope": wanted}, tol=1e-10)


@pytest.mark.parametrize("rule", ["c o", "c@fsdp o"])
@on_meshes({"fsdp": 2}, {"fsdp": 1})
def test_whose_loss_a_derivative_of_a_region_is_of(mesh: DeviceMesh, rule: str) -> None:
    """Of all ranks as `DTensor`s; a gradient by a rank's samples makes a loss of each; refused inside transforms."""
    weight, x = torch.randn(4, 3, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    mine = sf.data.local_batch(x, mesh)
    params = sf.shard({"w": weight}, mesh, sf.Policy(rules={"w": rule}))
    direction = sf.tree.map(torch.cos, params)

    @shard_map(f"b@fsdp c, {rule} -> b@fsdp o", mesh)
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ (sf.collectives.all_gather(w, mesh, "fsdp", dim=0) if "@" in rule else w))

    def loss(p: sf.Params) -> Tensor:
        return layer(mine, p["w"]).square().mean()

    def penalty(p: sf.Params) -> Tensor:
        return sf.grad(lambda x: layer(x, p["w"]).sum())(mine).square().sum(-1).mean()

    def whole_penalty(w: Tensor) -> Tensor:
        return torch.func.grad(lambda x: torch.tanh(x @ w).sum())(x).square().sum(-1).mean()

    product = sf.grad(lambda p: sf.tree.dot(sf.grad(loss)(p), direction))(params)
    gradient = torch.func.grad(lambda w: torch.tanh(x @ w).square().mean())
    assert_parity(sf.gather(product), {"w": torch.func.jvp(gradient, (weight,), (weight.cos(),))[1]}, tol=1e-10)
    assert_parity(sf.gather(sf.grad(penalty)(params)), {"w": torch.func.grad(whole_penalty)(weight)}, tol=1e-10)
    if mesh.size() > 1:
        why = r"shard_map: a gradient within .* each rank of 'fsdp' has a loss of its own"
        with pytest.raises(sf.ShardError, match=why):
            sf.hvp(loss, (params,), direction)
        with pytest.raises(sf.ShardError, match=why):
            sf.vjp(loss, params)


@on_meshes({"fsdp": 2, "tp": 1})
def test_axes_of_one_rank_do_not_matter(mesh: DeviceMesh) -> None:
    x, up, *_ = _tensors()
    columns = shard_map("b@fsdp c, ff@tp c -> b@fsdp ff@tp", mesh)(lambda x, w: x @ w.T)
    for placement in (Replicate(), Shard(0), Shard(1)):
        weight = distribute_tensor(up, mesh, [Replicate(), placement])
        torch.testing.assert_close(columns(*sf.data.local_batch((x,), mesh), weight).full_tensor(), x @ up.T)
