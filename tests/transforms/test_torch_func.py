"""Every transform, alone and nested, against `torch.func` on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from derivatives import CASES, MESHES, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes
from shardfn.transforms.forward_mode import FORWARD_MODE_DIFFERENTIATED, ByFormulas


@pytest.mark.everyday(1)
@pytest.mark.one_mesh
@on_meshes(*MESHES)
@pytest.mark.parametrize("first", range(6))
def test_transforms_equal_one_process(mesh: DeviceMesh, first: int) -> None:
    at = Program(mesh, regather=mesh["fsdp"].size() != 2)  # weights are kept until the backward on the second mesh
    with sdpa_kernel(SDPBackend.MATH):
        for case in CASES[first::6]:
            try:
                case(at)
            except Exception as error:
                error.add_note(f"in {case.__name__}")
                raise


@on_meshes({"fsdp": 2, "tp": 1})
def test_trees_from_outside_of_a_transform(mesh: DeviceMesh) -> None:
    """A direction that a function closes over has the layout that the lowered tree has."""
    torch.manual_seed(2)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    p, x = sf.shard(net, mesh, sf.Policy()), torch.randn(4, 3, dtype=torch.float64)
    d = sf.tree.map(torch.ones_like, p)
    directions = sf.tree.map(lambda *a: torch.stack(a), d, d)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(net, p, x).square().mean()

    wanted = sf.jvp(lambda q, d: sf.hvp(loss, (q, x), d), (p, d), (d, sf.tree.zeros_like(d)))[1]
    found = sf.jvp(lambda q: sf.hvp(loss, (q, x), d), (p,), (d,))[1]
    assert_parity(sf.gather(found), sf.gather(wanted), tol=1e-12)
    each = sf.vmap(lambda q, d: sf.hvp(loss, (q, x), d), in_dims=(None, 0))
    del each, directions
    with pytest.raises(sf.ShardError, match=r"another structure than primals: \('Params', 'Tensor'\) and"):
        sf.jvp(loss, (p,), (d, x))
    other = sf.shard(net, mesh, sf.Policy(default="replicate"))
    with pytest.raises(sf.ShardError, match="another layout"):
        sf.jvp(lambda q: sf.hvp(loss, (q, x), other), (p,), (d,))


@on_meshes({"fsdp": 2}, {"fsdp": 2, "tp": 2})
def test_second_derivatives_by_inputs(mesh: DeviceMesh) -> None:
    """By `torch.func` alone: nobody asks for those of the shards, and torch fills in zeros of the whole shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    rules = {"0.weight": "o@tp i@fsdp", "1.weight": "o@fsdp i@tp"} if "tp" in (mesh.mesh_dim_names or ()) else {}
    params = sf.shard(model, mesh, sf.Policy(rules=rules))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).double()

    def twice(fn: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.func.grad(lambda x: torch.func.grad(lambda x: fn(x).pow(3).mean())(x).square().sum())(x)

    assert_parity(twice(lambda x: sf.apply(model, params, x)), twice(model), tol=1e-12)


_X, _Y = (torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
_GAIN = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda h: F.layer_norm(h, (8,), _GAIN, _GAIN, eps=0.1).sin(),
    "layer_norm of two dims": lambda h: F.layer_norm(h, (4, 8)).sin(),
    "instance_norm": lambda h: F.instance_norm(h, weight=_GAIN[:4], bias=_GAIN[:4]).sin(),
    "batch_norm": lambda h: F.batch_norm(h, None, None, _GAIN[:4], _GAIN[:4], training=True).sin(),
    "glu": lambda h: F.glu(h).sin(),
    "normalize": lambda h: F.normalize(h, dim=-1).sin(),
    "mse_loss": lambda h: F.mse_loss(h.sin(), _Y),
    "mse_loss, none": lambda h: F.mse_loss(h.sin(), _Y, reduction="none"),
    "huber_loss": lambda h: F.huber_loss(h, _Y, reduction="sum", delta=0.7),
    "soft_margin_loss": lambda h: F.soft_margin_loss(h, _Y.sign()),
    "attention": lambda h: F.scaled_dot_product_attention(h, h.sin(), h.cos(), is_causal=True),
    "attention, scaled": lambda h: F.scaled_dot_product_attention(h, h.sin(), h.cos(), _X[:, :, :4], scale=0.3),
    "attention, masked": lambda h: F.scaled_dot_product_attention(h, h.sin(), h, _X[:, :, :4] > 0),
    "attention, nothing seen": lambda h: F.scaled_dot_product_attention(h, h.sin(), h, torch.ones(4, 4).tril(-1) > 0),
    "attention, groups": lambda h: F.scaled_dot_product_attention(
        h.view(2, 4, 2, 4), h.view(2, 4, 2, 4)[:, :2].sin(), h.view(2, 4, 2, 4)[:, :2], enable_gqa=True
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_formulas(name: str) -> None:
    """Values are torch's, and both orders of second derivatives those of differences."""

    def loss(h: Tensor) -> Tensor:
        return (FUNCTIONS[name](h) * _Y.flatten()[0]).square().sum()

    v, step = _Y.cos(), 1e-5

    def gradient(h: Tensor) -> Tensor:
        h = h.detach().requires_grad_()
        return torch.autograd.grad(loss(h), h)[0]

    wanted = (gradient(_X + step * v) - gradient(_X - step * v)) / (2 * step)
    plain = FUNCTIONS[name](_X)
    with ByFormulas(FORWARD_MODE_DIFFERENTIATED):
        torch.testing.assert_close(FUNCTIONS[name](_X), plain)
        forward_last = torch.func.jvp(torch.func.grad(loss), (_X,), (v,))[1]
        forward_first = torch.func.grad(lambda h: torch.func.jvp(loss, (h,), (v,))[1])(_X)
    for found in (forward_last, forward_first):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


class NormByHand(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        centered = input - input.mean(-1, keepdim=True)
        return centered * (centered.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


def test_third_derivatives_of_a_norm() -> None:
    found = []
    for norm in (nn.LayerNorm(4), NormByHand(4)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 1)).double()
        params, x = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy()), torch.randn(3, 4, dtype=torch.float64)

        def loss(p: sf.Params, model: nn.Module = model, x: Tensor = x) -> Tensor:
            return sf.apply(model, p, x).square().mean()

        def slope(of: Any) -> Any:
            return lambda p: sf.optim.global_norm(sf.grad(of)(p)).square()

        found.append(sf.gather(sf.grad(slope(slope(loss)))(params)))
    assert_parity(*found, tol=1e-10)


OF_TORCH: dict[str, Any] = {  # derivatives by the inputs, one sample a row
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "jacfwd": lambda f, x: torch.func.vmap(torch.func.jacfwd(lambda z: f(z[None])[0]))(x),
    "hessian": lambda f, x: torch.func.vmap(torch.func.hessian(lambda z: f(z[None])[0]))(x),
    "jacfwd twice": lambda f, x: torch.func.vmap(torch.func.jacfwd(torch.func.jacfwd(lambda z: f(z[None])[0])))(x),
    "jacrev twice": lambda f, x: torch.func.vmap(torch.func.jacrev(torch.func.jacrev(lambda z: f(z[None])[0])))(x),
}


@pytest.mark.parametrize("way", OF_TORCH)
def test_torchs_own_transforms_of_a_norm_in_a_loss(way: str) -> None:
    """Of which torch's own gradients are wrong: those of a forward mode, and third ones (2.13)."""
    torch.manual_seed(0)
    norms = (nn.LayerNorm(4), NormByHand(4))
    first, last = nn.Linear(4, 4), nn.Linear(4, 2)
    model, by_hand = (nn.Sequential(first, norm, nn.Tanh(), last).double() for norm in norms)
    params, x = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy()), torch.randn(3, 4, dtype=torch.float64)
    found = sf.value_and_grad(lambda p: OF_TORCH[way](lambda z: sf.apply(model, p, z), x).square().mean())(params)
    wanted = OF_TORCH[way](by_hand, x).square().mean()
    wanted.backward()
    assert_parity({"loss": found[0]}, {"loss": wanted.detach()}, tol=1e-12)
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in by_hand.named_parameters()}
    assert_parity(sf.gather(found[1]), grads, tol=1e-10)


@on_meshes({"fsdp": 2}, {"fsdp": 1})
def test_norms_in_a_vmap_that_is_differentiated(mesh: DeviceMesh) -> None:
    """A penalty on gradients of samples; torch 2.13 has its gradient wrong for norms with weights."""
    torch.manual_seed(0)
    batch_norm = nn.BatchNorm1d(3, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Unflatten(-1, (3, 2)), batch_norm, nn.Flatten(-2))
    model = nn.Sequential(model, nn.Unflatten(-1, (2, 3)), nn.InstanceNorm1d(2, affine=True)).double()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    params, x = sf.shard(model, mesh, sf.Policy()), torch.randn(4, 5, 4, dtype=torch.float64)

    def squared(p: sf.Params, x: Tensor) -> Tensor:
        grads = sf.grad(lambda p: sf.apply(model, p, x).sin().sum())(p)
        return sf.tree.dot(grads, grads)

    def penalty(p: sf.Params, x: Tensor) -> Tensor:
        return sf.vmap(squared, in_dims=(None, 0))(p, x).mean()

    plain = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    outs = [torch.func.functional_call(model, plain, (each,)).sin().sum() for each in x]
    each = [g for out in outs for g in torch.autograd.grad(out, [*plain.values()], create_graph=True)]
    wanted = torch.autograd.grad(torch.stack([g.square().sum() for g in each]).sum() / len(x), [*plain.values()])
    found = sf.gather(sf.grad(penalty)(params, sf.data.local_batch(x, mesh)))
    assert_parity(found, dict(zip(plain, wanted, strict=True)), tol=1e-9)


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 1})
def test_arithmetic_on_a_tree_that_is_closed_over_says_what_to_write(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 2)
    params = sf.shard(model, mesh, sf.Policy(rules={"weight": "o@tp c@fsdp", "bias": "o@tp"}))
    one, still = torch.ones(()), sf.tree.zeros_like(params)

    def scaled(rate: Tensor, p: sf.Params) -> Tensor:
        return sf.apply(model, sf.tree.map(lambda w: rate * w, p), torch.ones(1, 4)).sum()

    with pytest.raises(sf.ShardError, match=r"(?s)jvp: .*Pass the tree to sf\.jvp as an argument"):
        sf.jvp(lambda rate: scaled(rate, params), (one,), (one,))
    out, slope = sf.jvp(scaled, (one, params), (one, still))
    assert_parity({"slope": slope}, {"slope": out})
    with pytest.raises(sf.ShardError, match=r'(?s)vjp: .*sf\.gather\(params\)\["name"\]'):
        sf.vjp(lambda x: (x @ params["weight"].T).sum(), torch.ones(1, 4))


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 1})
def test_a_function_of_none_of_the_leaves_is_refused(mesh: DeviceMesh) -> None:
    model, x = nn.Linear(4, 2), torch.ones(1, 4)
    p = sf.shard(model, mesh, sf.Policy())

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return model(x).square().sum()

    for verb, call in {
        "jvp": lambda: sf.jvp(lambda p: (loss(p, x), None), (p,), (p,), has_aux=True),
        "vjp": lambda: sf.vjp(lambda p: {"a": model(x), "n": 1}, p),
        "hvp": lambda: sf.hvp(loss, (p, x), p),
    }.items():
        with pytest.raises(sf.ShardError, match=rf"{verb}: the loss depends on none of the 2 leaves.*not model\(x\)"):
            call()
    _, slope = sf.jvp(loss, (p, x), (p, torch.ones_like(x)))  # which depends on x
    assert slope != 0
    out, pull = sf.vjp(lambda x, p: sf.jvp(lambda x: model(x), (x,), (x,))[1], x, p)
    assert pull(torch.ones_like(out))[1]["weight"].full_tensor().abs().sum() == 0  # a part of it depends on x


def test_primals_and_tangents_are_tuples() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"jvp: primals and tangents are tuples, one entry an argument, not list"):
        sf.jvp(torch.sin, (x,), [x])
    with pytest.raises(TypeError, match=r"hvp: primals are the tuple \(params, \*batch\), .*, not Tensor"):
        sf.hvp(torch.sum, x, x)
