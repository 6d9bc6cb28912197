"""What forwards may do with padded heads, which are zero: what is no number there was one nowhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes
from shardfn.trace import padding

Change = Callable[[Tensor], Tensor]

REFUSED: dict[str, tuple[str, Change]] = {
    "norm": ("div", lambda x: x / x.norm(dim=-1, keepdim=True)),
    "norm in place": ("div", lambda x: x.clone().div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True))),
    "norm without a graph": ("div", lambda x: x / x.detach().float().norm(dim=-1, keepdim=True)),
    "rms": ("rsqrt", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "root": ("sqrt", lambda x: x / (x.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6)),
    "root in place": ("sqrt", lambda x: x / (x.pow(2).sum(-1, keepdim=True).sqrt_() + 1e-6)),
    "power": ("pow", lambda x: x.sign() * x.abs().pow(0.5)),
    "deviation": ("div", lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)),
    "largest": ("div", lambda x: x / x.abs().amax(-1, keepdim=True)),
    "share": ("div", lambda x: F.relu(x) / F.relu(x).sum(-1, keepdim=True)),
    "chosen": ("div", lambda x: torch.where(x.norm(dim=-1, keepdim=True) > 0, x / x.norm(dim=-1, keepdim=True), x)),
    "logarithm": ("log", lambda x: x.abs().log()),
    "inverse": ("reciprocal", lambda x: 1 / (x + 0.0)),
    "hypotenuse": ("hypot", lambda x: torch.hypot(x, x)),
    "entropy": ("xlogy", lambda x: torch.xlogy(x, x)),
    "layer_norm": ("native_layer_norm", lambda x: F.layer_norm(x, (4,), eps=0.0)),
    "normalize": ("div", lambda x: F.normalize(x, dim=-1, eps=0.0)),
}
EQUAL: dict[str, Change] = {
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12),
    "largest": lambda x: x / torch.maximum(x.abs().amax(-1, keepdim=True), x.new_tensor(1e-6)),
    "root": lambda x: x / x.pow(2).sum(-1, keepdim=True).clamp_min(1e-12).sqrt(),
    "deviation": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5),
    "share": lambda x: (F.elu(x) + 1) / (F.elu(x) + 1).sum(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1) / x.exp().sum(-1, keepdim=True),
    "steps": lambda x: x * (x.sign() + x.ceil() + torch.where(x > 0, x, -x)) + torch.atan2(x, x),
    "gates": lambda x: torch.tanh(x / 3) * torch.sigmoid(x) / torch.sigmoid(x) + torch.log1p(x.abs()).pow(1.5),
    "root without a graph": lambda x: x * (1 + x.detach().abs().sqrt()),
    "similarity": lambda x: x * F.cosine_similarity(x, x, dim=-1).unsqueeze(-1),
}


class Attention(nn.Module):
    """Three heads, of which two ranks have four."""

    def __init__(self, change: Change, at: str = "qk") -> None:
        super().__init__()
        self.enter, self.gain = nn.Linear(8, 8), nn.Parameter(torch.rand(4))
        self.q, self.k, self.v, self.o = (nn.Linear(*sizes) for sizes in [(8, 12)] * 3 + [(12, 8)])
        self.change, self.at = change, at

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        heads = {name: getattr(self, name)(x).unflatten(-1, (-1, 4)).transpose(1, 2) for name in "qkv"}
        q, k, v = (self.change(y) * self.gain if name in self.at else y for name, y in heads.items())
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o((self.change(out) if "o" in self.at else out).transpose(1, 2).flatten(2))


def _policy(padded: bool = True) -> sf.Policy:
    rules = {"{q,k,v}.weight": "(heads@tp d) c@fsdp", "o.weight": "c (heads@tp d)"}
    return sf.Policy(rules=rules, sizes={"d": 4}, pad={"heads": 4} if padded else {})


@pytest.mark.everyday(5)
@pytest.mark.parametrize("at", ["q", "vo"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_in_padding_is_refused(name: str, at: str) -> None:
    operation, change = REFUSED[name]
    model, x = Attention(change, at), torch.randn(2, 5, 8)
    with pytest.raises(sf.ShardError, match=rf"{operation} of zeros, which .*'tp'.* padding.*\n.*clamp_min"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), _policy(), example=x)
    sf.plan(model, sf.MeshSpec(fsdp=1, tp=3), _policy(padded=False), example=x)


def test_a_frozen_model_is_refused_for_its_values() -> None:
    model = Attention(REFUSED["norm"][1]).requires_grad_(False)
    with pytest.raises(sf.ShardError, match="div of zeros"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), _policy(), example=torch.randn(2, 5, 8))


NO_SECOND = {"norm": "linalg_vector_norm", "deviation": "std", "similarity": "linalg_vector_norm"}
NO_SECOND |= {"normalize": "linalg_vector_norm", "gates": "pow", "steps": "atan2"}


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", EQUAL)
@on_meshes({"fsdp": 1, "tp": 2})
@sdpa_kernel(SDPBackend.MATH)
def test_second_derivatives_are_those_of_one_rank_or_refused(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(EQUAL[name], "qk").double(), torch.randn(2, 5, 8, dtype=torch.float64)
    params, whole = sf.shard(model, mesh, _policy()), {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().sum()

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x,)).square().sum()

    def penalty(p: sf.Params) -> Tensor:
        return sf.grad(partial(loss, p))(x).square().sum()

    def plain_penalty(p: dict[str, Tensor]) -> Tensor:
        return torch.func.grad(partial(plain, p))(x).square().sum()

    def product() -> sf.Params:
        return sf.hvp(loss, (params, x), params)

    first = sf.grad(loss)
    assert len(first(params, x)) == len(sf.vmap(first, in_dims=(None, 0))(params, x[:, None])) == len(params)
    refused = rf"{NO_SECOND.get(name)} of zeros, (.|\n)*of a norm has no gradient"
    if name in NO_SECOND:
        for again in (penalty, lambda p: sf.tree.dot(first(p, x), params)):
            with pytest.raises(sf.ShardError, match=refused):
                sf.grad(again)(params)
    else:
        assert_parity(sf.gather(sf.grad(penalty)(params)), torch.func.grad(plain_penalty)(whole), tol=1e-11)
    if name not in ("normalize", *set(EQUAL) - set(NO_SECOND)):  # of normalize forward mode has a formula of its own
        with pytest.raises(sf.ShardError, match="of zeros, which are in"):
            sf.grad(lambda p: sf.tree.dot(sf.hvp(loss, (p, x), params), p))(params)
    if name in ("gates", "steps"):
        with pytest.raises(sf.ShardError, match=refused):
            product()
    else:
        _, wanted, *_ = torch.func.jvp(torch.func.grad(partial(plain, x=x)), (whole,), (whole,))
        assert_parity(sf.gather(product()), wanted, tol=1e-11)


def test_what_is_zero_for_some_numbers_only_is_not_zero() -> None:
    """A zero to the power of an integer is one where that is zero, too."""
    zeros, powers = torch.zeros(3), torch.tensor([0, 1, 2])
    padded: tuple[Any, Any] = lambda x: x is zeros, lambda x: False
    assert padding.after(torch.ops.aten.pow.Tensor_Tensor, (zeros, powers), {}, *padded) == (False, False)
    assert padding.after(torch.ops.aten.mul.Tensor, (zeros, powers), {}, *padded) == (True, False)


@pytest.mark.everyday(5)
@pytest.mark.parametrize("name", EQUAL)
@on_meshes({"fsdp": 1, "tp": 2})
def test_other_heads_are_those_of_one_rank(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(EQUAL[name], "qk").double(), torch.randn(2, 5, 8, dtype=torch.float64)
    params = sf.shard(model, mesh, _policy())
    grads = sf.grad(lambda p: sf.apply(model, p, x).square().sum())(params)
    model(x).square().sum().backward()
    assert_parity(sf.gather(grads), {name: p.grad for name, p in model.named_parameters()})
