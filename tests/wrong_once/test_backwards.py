"""Backwards and hooks of the user's on values that ranks use in shares, of which each was a wrong number once."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes

Backward = Callable[[Tensor, Tensor], Any]  # of what was saved, and of the gradient
POLICY = sf.Policy(rules={"up.weight": "f@tp c", "up.bias": "f@tp", "down.weight": "c f@tp"})
SPLIT = sf.MeshSpec(fsdp=1, tp=2)


def _zeroed(x: Tensor, grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[x.abs() > 1] = 0
    return grad


def _recomputed(x: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = F.layer_norm(F.gelu(x).tanh().softmax(-1), (8,)).sigmoid()
    return torch.autograd.grad(y, x, grad)[0]


LINEAR: dict[str, Backward] = {
    "as it is": lambda x, grad: grad,
    "reversed": lambda x, grad: -0.1 * grad,
    "masked": lambda x, grad: grad * (x.abs() < 1),
    "where": lambda x, grad: torch.where(x > 0, grad, 0.0),
    "where not": lambda x, grad: torch.where(x > 0, torch.zeros_like(grad), grad),
    "filled": lambda x, grad: grad.masked_fill(x > 0, 0),
    "zeroed": _zeroed,
    "none": lambda x, grad: None,
    "zeros": lambda x, grad: torch.zeros_like(grad),
    "softmax": lambda x, grad: x * (grad - (grad * x).sum(-1, keepdim=True)),
    "in place": lambda x, grad: grad.clone().mul_(x).transpose(0, 1).contiguous().t(),
    "product": lambda x, grad: (grad @ x.t()) @ x,
    "recomputed": _recomputed,
}
NOT_LINEAR: dict[str, tuple[Backward, str]] = {
    "clamped": (lambda x, grad: grad.clamp(-1e-3, 1e-3), "clamp of a sum"),
    "cubed": (lambda x, grad: grad**3, "pow of a sum"),
    "signs": (lambda x, grad: grad.sign(), "sign of a sum"),
    "normed": (lambda x, grad: grad / grad.norm(), "norm of a sum"),
    "filled": (lambda x, grad: grad.masked_fill(x > 0, 1), "masked_fill of a sum"),
    "added to": (lambda x, grad: grad + 1, "add of a sum"),
    "constant": (lambda x, grad: torch.ones_like(grad), "adds numbers to it"),
    "asked": (lambda x, grad: grad if grad.sum() > 0 else -grad, "cannot be run without data"),
}


@cache
def _function(backward_of: Backward) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward_of(ctx.saved_tensors[0], *grads)

    return Function


class Two(torch.autograd.Function):
    """Several results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 1, x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + grads[1] / 8


class Apart(nn.Module):
    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        return self.do(x)


class Model(nn.Module):
    """`y`, which all ranks have, meets what they split, after something is done to it."""

    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enter: nn.Module = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        y = self.do(self.enter(x))
        return self.down(torch.tanh(self.up(x)) * y.mean(-1, keepdim=True))


class Elsewhere(Model):
    """Where every rank has all of the gradient, or the gradient of its own part."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        return self.do(self.down(self.do(torch.tanh(self.up(self.do(y)))))) + self.do(y)


def _cubing(x: Tensor) -> Tensor:
    return _function(NOT_LINEAR["cubed"][0]).apply(x)


def _hooked(x: Tensor) -> Tensor:
    x = x.sin()
    x.register_hook(lambda grad: grad**3)
    return x


def _assert_same(mesh: DeviceMesh, model: nn.Module) -> None:
    model.double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    params = sf.shard(model, mesh, POLICY)
    grads = sf.grad(lambda p: sf.apply(model, p, x).square().sum())(params)
    model(x).square().sum().backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    assert_parity(sf.gather(grads), wanted)


def _planned(model: nn.Module) -> sf.Plan:
    return sf.plan(model, SPLIT, POLICY, example=torch.randn(4, 8, requires_grad=True))


@pytest.mark.everyday(6)
@pytest.mark.parametrize("name", LINEAR)
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_linear_backward_may_have_parts_of_a_gradient(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    _assert_same(mesh, Model(_function(LINEAR[name]).apply))


@on_meshes({"fsdp": 1, "tp": 2})
def test_so_may_one_of_several_results(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    _assert_same(mesh, Model(lambda x: torch.add(*Two.apply(x))))


class Scaled(torch.autograd.Function):
    """A shared value meets split ones where no value says that a gradient will be asked for."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, h: Tensor) -> Tensor:
        doubled = y * 4 / 2
        ctx.save_for_backward(doubled, h)
        return doubled * h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        doubled, h = ctx.saved_tensors
        return 2 * (grads[0] * h).sum(-1, keepdim=True), grads[0] * doubled


class Meeting(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Scaled.apply(self.enter(x).mean(-1, keepdim=True), torch.tanh(self.up(x))))


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_shared_value_may_meet_split_ones_in_a_function(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    _assert_same(mesh, Meeting(torch.sin))


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_another_backward_is_refused(name: str) -> None:
    backward, why = NOT_LINEAR[name]
    with pytest.raises(sf.ShardError, match=f"the backward of .*Function .*{why}"):
        _planned(Model(_function(backward).apply))
    with pytest.raises(sf.ShardError, match=f"the backward of .*Function .*{why}"):
        _planned(Model(lambda x: _function(backward).apply(x * 2).sin()))


def _hooked_later(x: Tensor) -> Tensor:
    y = x.sin()
    x.register_hook(lambda grad: grad**3)
    return y


def _kept(x: Tensor) -> Tensor:
    x.retain_grad()
    return x


@pytest.mark.parametrize("hooks", [_hooked, _hooked_later, _kept])
def test_a_hook_on_what_ranks_use_in_shares_is_refused(hooks: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(sf.ShardError, match=r"a hook on a value that ranks of 'tp' use in shares.*\n.*a module of its"):
        _planned(Model(hooks))


def _cubed_by_hook(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if grad is None else grad**3 for grad in into)


def test_so_is_a_hook_of_a_module_that_returns_it() -> None:
    model = Model(torch.sin)
    model.enter.register_full_backward_hook(_cubed_by_hook)
    with pytest.raises(sf.ShardError, match="a hook on a value that ranks of 'tp' use in shares"):
        _planned(model)


@pytest.mark.parametrize("do", [_cubing, _hooked])
@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_a_module_of_its_own_serves(mesh: DeviceMesh, do: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    _assert_same(mesh, Model(Apart(do)))
    _assert_same(mesh, Model(nn.Sequential(nn.Tanh(), Apart(do))))


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_sequential_serves_a_module_that_has_hooks(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Model(torch.sin)
    model.enter.register_full_backward_hook(_cubed_by_hook)
    model.enter = nn.Sequential(model.enter)
    _assert_same(mesh, model)


@pytest.mark.parametrize("do", [_cubing, _hooked])
@on_meshes({"fsdp": 1, "tp": 2})
def test_whole_gradients_and_those_of_parts_may_go_anywhere(mesh: DeviceMesh, do: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Elsewhere(do)
    for module in (model.up, model.down):
        module.register_full_backward_hook(_cubed_by_hook)
    _assert_same(mesh, model)
