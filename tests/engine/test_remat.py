"""Units that compute again inside transforms: memory, numbers drawn, what they are given, what they cannot do."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

import shardfn as sf
from shardfn.comm.packing import AxisCollective
from shardfn.testing import assert_parity, on_meshes, run

LAYERS, WIDTH = 12, 64


def _largest_live_bytes(regather: bool, transform: str) -> tuple[int, int]:
    """(most bytes of gathered weights alive at once, bytes of a unit)."""
    mesh = sf.make_mesh("cpu", fsdp=2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    params = sf.shard(model, mesh, sf.Policy(regather=regather))
    peak = 0
    original = AxisCollective.gather

    def counted(self: AxisCollective, shards: Any, dtype: torch.dtype, buffers: Any) -> Any:
        nonlocal peak
        made = yield from original(self, shards, dtype, buffers)
        peak = max(peak, sum(b.storage.nbytes() for b in buffers.buffers() if not b.free))
        return made

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    x = torch.randn(3, WIDTH)
    AxisCollective.gather = counted
    try:
        for _ in range(2):
            if transform == "grad":
                torch.func.grad(loss)(params, x)
            else:
                sf.hvp(loss, (params, x), params)
    finally:
        AxisCollective.gather = original
    return peak, WIDTH * WIDTH * 4 + 256 + 64  # weight, bias, a gap


@pytest.mark.parametrize(("transform", "units"), [("grad", 4), ("hvp", 8)])
def test_no_full_tree_is_alive_with_regather(transform: str, units: int) -> None:
    for peak, unit in run(_largest_live_bytes, True, transform, ranks=2):
        assert unit <= peak <= units * unit
    for peak, unit in run(_largest_live_bytes, False, transform, ranks=2):
        assert peak >= LAYERS * unit


class _Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_meshes({"fsdp": 2})
def test_the_same_numbers_are_drawn_again(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _Dropout().double()
    params, x = sf.shard(model, mesh, sf.Policy()), torch.randn(4, 6, dtype=torch.float64)
    step = sf.value_and_grad(lambda p: sf.apply(model, p, x).square().sum())
    torch.manual_seed(5)
    _, wanted = step(params)
    after = torch.rand(1)
    for _ in range(2):
        torch.manual_seed(5)
        found = torch.func.grad(lambda p: sf.apply(model, p, x).square().sum())(params)
        assert_parity(sf.gather(found), sf.gather(wanted), tol=1e-12)
        assert torch.equal(torch.rand(1), after), "computing again leaves the generator as it was"


class _Unit(nn.Module):
    """Takes and returns trees, passes an input on, makes integers, keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, state: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        x = torch.tanh(self.linear(state["x"])) * scale
        return {"x": x, "same": state["x"], "count": state["count"] + 1, "name": "unit", "best": x.argmax(-1)}


class _Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit() for _ in range(3))
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": self.first(x), "count": 0}
        scale = state["x"].detach().abs().mean() + x.sum().sigmoid()
        for unit in (*self.units, self.units[0]):
            state = unit(state, scale=scale)
        assert state["count"] == 4 and state["name"] == "unit" and not state["best"].is_floating_point()
        return state["x"] + state["same"]


class _Borrower(nn.Module):
    """Each unit also uses a weight that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6, bias=False)
        self.units = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for unit in self.units:
            unit.__dict__["shared"] = self.shared
            unit.__class__ = _Borrowing

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class _Borrowing(nn.Linear):
    shared: nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input) + self.shared(input))


@on_meshes({"fsdp": 2})
@pytest.mark.parametrize("kind", [_Units, _Borrower])
def test_any_unit_is_differentiated(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    params = sf.shard(model, mesh, sf.Policy(units="units.*"))
    plain = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(4, 6, dtype=torch.float64)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    def plain_loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x,)).square().mean()

    for _ in range(2):
        assert_parity(sf.gather(torch.func.grad(loss)(params, x)), torch.func.grad(plain_loss)(plain, x), tol=1e-11)
    gradient = torch.func.grad(plain_loss)
    wanted = torch.func.jvp(lambda p: gradient(p, x), (plain,), (plain,))[1]
    assert_parity(sf.gather(sf.hvp(loss, (params, x), params)), wanted, tol=1e-11)
    found = torch.func.grad(lambda x: loss(params, x))(x)
    torch.testing.assert_close(found, torch.func.grad(lambda x: plain_loss(plain, x))(x), rtol=1e-11, atol=1e-11)


@on_meshes({"fsdp": 2})
def test_values_and_tangents_are_computed_together_once(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    params, x = sf.shard(model, mesh, sf.Policy(units="*")), torch.randn(4, 6, dtype=torch.float64)
    plain = {name: p.detach() for name, p in model.named_parameters()}
    calls: list[Any] = []
    model[0].register_forward_hook(lambda module, args, out: calls.append(out))
    for found, wanted in (
        (
            lambda: sf.jvp(lambda p: sf.apply(model, p, x), (params,), (params,)),
            lambda: torch.func.jvp(lambda p: functional_call(model, p, (x,)), (plain,), (plain,)),
        ),
        (
            lambda: torch.func.jvp(lambda x: sf.apply(model, params, x), (x,), (x,)),
            lambda: torch.func.jvp(lambda x: functional_call(model, plain, (x,)), (x,), (x,)),
        ),
    ):
        pair, times = found(), len(calls)
        torch.testing.assert_close(pair, wanted(), rtol=1e-12, atol=1e-12)
        assert 2 * times == len(calls) == 2
        calls.clear()


class _Stateful(nn.Module):
    """A linear that does something behind the back of its arguments and results."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 6)
        self.aux: Any = None
        self.given: Any = None
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Any, feats: list[Tensor]) -> Any:
        if self.kind == "opaque":
            return _Box(torch.tanh(self.linear(x.x)))
        y = torch.tanh(self.linear(x))
        match self.kind:
            case "attribute":
                self.aux = y.square().mean()
            case "list":
                feats.append(y)
            case "buffer":
                self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
                y = y - self.mean
            case "captured":
                y = y * self.given
            case _:
                pass
        return y


class _Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Parent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.units: Any = nn.ModuleList(_Stateful(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        feats: list[Tensor] = []
        out: Any = _Box(x) if self.kind == "opaque" else x
        for unit in self.units:
            unit.given = x.sum().sigmoid()
            out = unit(out, feats)
        out = out.x if self.kind == "opaque" else out
        extra = [unit.aux for unit in self.units if unit.aux is not None] + [f.square().mean() for f in feats]
        return out.square().mean() + sum(extra)


@on_meshes({"fsdp": 2})
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("attribute", "keeps a tensor in an attribute"),
        ("buffer", "keeps a tensor in an attribute or a buffer"),
        ("list", "changes a list or dict that it was given"),
        ("opaque", "an argument of _Box, which may hold a tensor"),
        ("captured", "reads a tensor with a derivative that is no argument"),
    ],
)
def test_what_cannot_be_computed_again_is_an_error(mesh: DeviceMesh, kind: str, match: str) -> None:
    torch.manual_seed(0)
    model = _Parent(kind).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    params = sf.shard(model, mesh, sf.Policy(units="units.*"))
    with pytest.raises(sf.ShardError, match=match):
        torch.func.grad(lambda x: sf.apply(model, params, x))(x)
    if kind != "buffer":  # which no transform of torch's may change
        kept = sf.reshard(params, sf.Policy(units="units.*", regather=False))
        plain = {name: p.detach() for name, p in model.named_parameters()}
        found = torch.func.grad(lambda p: sf.apply(model, p, x))(kept)
        wanted = torch.func.grad(lambda p: functional_call(model, p, (x,)))(plain)
        assert_parity(sf.gather(found), wanted, tol=1e-11)
    sf.grad(lambda p: sf.apply(model, p, x))(params)


class _Drawn(nn.Module):
    """A unit whose factor is of what Python code draws, counts or keeps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.calls, self.seen = kind, nn.Linear(6, 6), 0, list[int]()
        self.generator, self.counts = torch.Generator().manual_seed(3), itertools.count(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        factors: dict[str, Callable[[], Any]] = {
            "a counter": lambda: self.calls,
            "a list": lambda: len(self.seen),
            "random": random.random,
            "numpy.random": np.random.rand,
            "a generator": lambda: torch.rand(6, generator=self.generator, dtype=x.dtype),
            "an iterator": lambda: next(self.counts),
        }
        return x + self.linear(x).tanh() * factors[self.kind]()


@on_meshes({"fsdp": 2})
@pytest.mark.parametrize("kind", ["a counter", "a list", "random", "numpy.random", "a generator", "an iterator"])
def test_python_has_the_same_state_again(mesh: DeviceMesh, kind: str) -> None:
    """A Hessian-vector product with units that compute again, and what they leave behind."""

    def after(product: Callable[[nn.Module, Callable[[Any, Any], Tensor]], Any]) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        units = [_Drawn(kind), _Drawn(kind)]
        model = nn.Sequential(*units).double()
        found = product(model, lambda out, x: (out - x).square().mean())
        kept = [(unit.calls, unit.seen, unit.generator.get_state().tolist()) for unit in units]
        return found, [kept, random.random(), np.random.rand()]

    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def ours(model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> Any:
        params = sf.shard(model, mesh, sf.Policy(units="*"))
        ones = sf.tree.map(torch.ones_like, params)
        return sf.gather(sf.hvp(lambda p: loss(sf.apply(model, p, x), x), (params,), ones))

    def of_one(model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> Any:
        params = {name: p.detach() for name, p in model.named_parameters()}
        ones = {name: torch.ones_like(p) for name, p in params.items()}
        gradient = torch.func.grad(lambda p: loss(functional_call(model, p, (x,)), x))
        return torch.func.jvp(gradient, (params,), (ones,))[1]

    if kind == "an iterator":
        with pytest.raises(sf.ShardError, match=r"takes items from a count, .* a unit computes again"):
            after(ours)
        return
    (found, state), (wanted, state_of_one) = after(ours), after(of_one)
    assert_parity(found, wanted, tol=1e-11)
    assert state == state_of_one


@on_meshes({"fsdp": 2})
def test_hooks_and_autocast(mesh: DeviceMesh) -> None:
    """Hooks inside a unit see what they would see; casts are those of the first run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
    params, x = sf.shard(model, mesh, sf.Policy()), torch.randn(4, 6)
    plain = {name: p.detach() for name, p in model.named_parameters()}
    seen: list[Tensor] = []
    inner: Any = model[0]
    hook = inner[0].register_forward_hook(lambda module, args, out: seen.append(out.square().mean()))

    def with_seen(p: Any, call: Any) -> Tensor:
        seen.clear()
        return call(p) + torch.stack(seen).sum()

    found = torch.func.grad(lambda p: with_seen(p, lambda p: sf.apply(model, p, x).sum()))(params)
    wanted = torch.func.grad(lambda p: with_seen(p, lambda p: functional_call(model, p, (x,)).sum()))(plain)
    assert_parity(sf.gather(found), wanted, tol=1e-5)
    hook.remove()

    def cast(p: sf.Params) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return sf.apply(model, p, x).float().sum()

    again, kept = (torch.func.grad(cast)(tree) for tree in (params, sf.reshard(params, sf.Policy(regather=False))))
    assert_parity(sf.gather(again), sf.gather(kept), tol=1e-2)
