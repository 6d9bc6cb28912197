"""`value_and_grad` and `grad`: arguments, auxiliary results, reductions, what a loss may do with a tree."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from drawing import Axes, hold_for_all, mesh_of
from hypothesis import strategies as st
from models import decoder, policy, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import assert_parity, assert_trees_close, count_collectives, on_meshes


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()


@dataclass(frozen=True)
class Net:
    """An embedding, gated layers and a head, of any sizes, on any mesh of up to 4 ranks, laid out in any way."""

    seed: int
    axes: Axes
    vocab: int
    width: int
    hidden: tuple[int, ...]
    layouts: tuple[str, str, str]  # of the embedding, of what goes up and of what comes down
    bias: bool
    tied: bool
    fields: tuple[tuple[str, Any], ...]

    @property
    def ranks(self) -> int:
        return int(torch.tensor([size for _, size in self.axes]).prod())

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return _Net(self.vocab, self.width, self.hidden, self.bias, self.tied).double()

    def policy(self) -> sf.Policy:
        emb, up, down = self.layouts
        rules = {"emb.weight": emb, "**.gate.weight": up, "**.up.weight": up, "**.down.weight": down}
        return sf.Policy(rules=rules, **dict(self.fields))


class _Gated(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias), nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


class _Net(nn.Module):
    def __init__(self, vocab: int, width: int, hidden: Sequence[int], bias: bool, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(_Gated(width, size, bias) for size in hidden)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(width, vocab, bias)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@st.composite
def nets(draw: st.DrawFn) -> Net:
    """Rules ask with `?`, so that any sizes go on any mesh; each hidden size has a rule of its own, by `_`."""
    size = st.integers(1, 9)
    first, second = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2)]))
    data, compute = draw(st.sampled_from([("fsdp", "tp"), ("dp", "model"), ("replicate", "tp")]))
    shard = "" if data == "replicate" else f"@{data}"
    axes = ((data, first), (compute, second)) if draw(st.booleans()) else ((compute, second), (data, first))
    emb = draw(st.sampled_from([f"vocab@{compute}? c{shard}", f"vocab{shard} c", "vocab c"]))
    wide = draw(st.sampled_from([f"_@{compute}? c{shard}", f"_@{compute}? c"]))
    down = draw(st.sampled_from([f"c{shard} _@{compute}?", f"c _@{compute}?"]))
    units = draw(st.sampled_from(["auto", (), ("layers.*", "layers.*.down")]))
    regather = draw(st.booleans())
    hidden = tuple(draw(st.lists(size, min_size=1, max_size=3)))
    layouts = (emb, wide, down)
    return Net(
        draw(st.integers(0, 99)),
        axes,
        draw(size),
        draw(size),
        hidden,
        layouts,
        draw(st.booleans()),
        draw(st.booleans()),
        (("units", units), ("regather", regather)),
    )


def equal_to_one_process(net: Net) -> None:
    model, reference, mesh = net.model(), net.model(), mesh_of(net.axes)
    params = sf.shard(model, mesh, net.policy())
    generator = torch.Generator().manual_seed(net.seed)
    ids = torch.randint(0, net.vocab, (12, 2), generator=generator)
    weights = torch.rand(12, 2, net.vocab, dtype=torch.float64, generator=generator)

    def loss_fn(p: sf.Params, ids: Tensor, weights: Tensor) -> Tensor:
        return (sf.apply(model, p, ids).tanh() * weights).mean()

    loss, grads = sf.value_and_grad(loss_fn)(params, *sf.data.local_batch((ids, weights), mesh))
    ref = (reference(ids).tanh() * weights).mean()
    ref.backward()
    assert {n: g.placements for n, g in grads.items()} == {n: p.placements for n, p in params.items()}
    named = reference.named_parameters(remove_duplicate=False)
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}
    assert_parity({"loss": loss, **sf.gather(grads)}, {"loss": ref.detach(), **expected}, tol=1e-11)


def test_loss_and_gradients_equal_one_process() -> None:
    hold_for_all(equal_to_one_process, nets(), share=0.5)


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


_TP = sf.Policy(rules={"0.weight": "ff@tp c@fsdp", "2.weight": "_@fsdp ff@tp"})


@on_meshes({"fsdp": 3, "tp": 1}, {"fsdp": 1, "tp": 3})
def test_aux_argnums_and_sum(mesh: DeviceMesh) -> None:
    model, reference = _model(), _model()
    params = sf.shard(model, mesh, _TP)
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (local,) = sf.data.local_batch((x,), mesh)
    shift = {"b": torch.zeros(2, dtype=torch.float64)}

    def loss_fn(scale: float, p: sf.Params, shift: dict[str, Tensor], x: Tensor) -> tuple[Tensor, str]:
        return (sf.apply(model, p, x) + shift["b"]).square().mean() * scale, "aux"

    (loss, aux), (grads, shift_grads) = sf.value_and_grad(loss_fn, argnums=(1, 2), has_aux=True, reduce="sum")(
        2.0, params, shift, local
    )
    ref_shift = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ref = (reference(x) + ref_shift).square().mean() * 2.0
    ref.backward()
    ranks = mesh["fsdp"].size()
    assert aux == "aux"
    assert_parity({"loss": loss}, {"loss": ref.detach()})
    assert_parity(sf.gather(grads), {name: g * ranks for name, g in _grads(reference).items()})
    if ranks == 1:
        assert ref_shift.grad is not None
        assert_parity(shift_grads, {"b": ref_shift.grad})
    only, aux = sf.grad(loss_fn, argnums=1, has_aux=True, reduce="sum")(2.0, params, shift, local)
    assert aux == "aux"
    assert_parity(sf.gather(only), sf.gather(grads), tol=0)


@on_meshes({"fsdp": 2, "tp": 2}, {"replicate": 2, "fsdp": 2})
def test_a_loss_may_gather_and_calculate_on_the_tree(mesh: DeviceMesh) -> None:
    model, reference = _model(), _model()
    params = sf.shard(model, mesh, _TP if "tp" in (mesh.mesh_dim_names or ()) else sf.Policy())
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (local,) = sf.data.local_batch((x,), mesh)

    def penalty(tree: Any) -> Tensor:
        return sum((value.square().sum() for value in tree.values()), torch.zeros((), dtype=torch.float64))

    def loss_fn(p: sf.Params, x: Tensor) -> Tensor:
        return (
            sf.apply(model, p, x).square().mean() + penalty(sf.gather(p, "*.weight")) + p["0.bias"].sum().full_tensor()
        )

    loss, grads = sf.value_and_grad(loss_fn)(params, local)
    weights = {n: p for n, p in reference.named_parameters() if n.endswith("weight")}
    ref = reference(x).square().mean() + penalty(weights) + reference.get_parameter("0.bias").sum()
    ref.backward()
    assert_parity({"loss": loss}, {"loss": ref.detach()})
    assert {n: g.placements for n, g in grads.items()} == {n: p.placements for n, p in params.items()}
    assert_parity(sf.gather(grads), _grads(reference))


@on_meshes({"fsdp": 2, "tp": 2})
def test_leaves_without_a_gradient_have_zeros(mesh: DeviceMesh) -> None:
    model = decoder()
    params = sf.shard(model, mesh, policy())
    x, _ = sf.data.local_batch(tokens(), mesh)
    for reduce in ("mean", None):
        grads = sf.grad(lambda p: sf.gather(p, "norm.weight")["norm.weight"].sum(), reduce=reduce)(params)
        assert list(grads) == list(params)
        assert all(not g.to_local().any() for n, g in grads.items() if n != "norm.weight")
        frozen = grads["adapter.weight"].to_local()
        assert frozen.untyped_storage().nbytes() <= 8
        assert_trees_close(
            sf.gather(sf.reduce_grads(grads), "norm.weight"), {"norm.weight": torch.ones(10, dtype=torch.float64)}
        )
    assert params["emb.weight"].requires_grad is False
    assert x.shape == (6, 5)


@on_meshes({"fsdp": 2})
def test_second_order_through_the_gathered_weights(mesh: DeviceMesh) -> None:
    model, reference = _model(), _model()
    params = sf.shard(model, mesh, sf.Policy(units=("0", "2")))
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def inner(p: sf.Params) -> Tensor:
        working = p.like((name, leaf) for name, leaf in p.items())
        loss = sf.apply(model, working, x).square().sum()
        grads: Any = torch.autograd.grad(loss, list(working.values()), create_graph=True)
        return torch.stack([g.square().sum().full_tensor() for g in grads]).sum()

    got = sf.grad(inner)(params)
    loss = reference(x).square().sum()
    grads = torch.autograd.grad(loss, list(reference.parameters()), create_graph=True)
    torch.stack([g.square().sum() for g in grads]).sum().backward()
    assert {n: g.placements for n, g in got.items()} == {n: p.placements for n, p in params.items()}
    assert_parity(sf.gather(got), _grads(reference), tol=1e-10)


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 3, "tp": 1})
def test_sums_and_means_nest(mesh: DeviceMesh) -> None:
    """A sum over ranks is the mean times their number, at every level."""
    model, reference = _model(), _model()
    params = sf.shard(model, mesh, _TP)
    whole = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (x,) = sf.data.local_batch((whole,), mesh)
    ranks = mesh.size(0)
    plain = {name: p.detach() for name, p in reference.named_parameters()}

    def loss(p: sf.Params) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    def plain_loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(reference, p, (whole,)).square().mean()

    def plain_square(p: dict[str, Tensor]) -> Tensor:
        return plain_loss(p).square()

    wanted = torch.func.grad(plain_square)(plain)
    squared = sf.grad(lambda p: sf.value_and_grad(loss, reduce="sum")(p)[0].square())
    assert_parity(sf.gather(squared(params)), wanted, tol=1e-11)
    twice = {name: ranks * g for name, g in wanted.items()}
    again = sf.grad(lambda p: sf.value_and_grad(loss)(p)[0].square(), reduce="sum")(params)
    assert_parity(sf.gather(again), twice, tol=1e-11)
    inner = sf.grad(lambda p: sf.tree.dot(sf.grad(loss, reduce="sum")(p), params))(params)
    gradient = torch.func.grad(plain_loss)
    second = torch.func.jvp(gradient, (plain,), (plain,))[1]
    assert_parity(sf.gather(inner), {name: ranks * g for name, g in second.items()}, tol=1e-11)


@on_meshes({"fsdp": 2, "tp": 2})
def test_gathered_trees_to_the_second_order(mesh: DeviceMesh) -> None:
    params = sf.shard(_model(), mesh, _TP)
    plain = {name: p.detach() for name, p in _model().named_parameters()}

    def loss(p: sf.Params) -> Tensor:
        full = sf.gather(p)
        return (full["0.weight"].sum() ** 3 * full["2.weight"]).square().mean()

    def plain_loss(p: dict[str, Tensor]) -> Tensor:
        return (p["0.weight"].sum() ** 3 * p["2.weight"]).square().mean()

    wanted = torch.func.jvp(torch.func.grad(plain_loss), (plain,), (plain,))[1]
    assert_parity(sf.gather(sf.hvp(loss, (params,), params)), wanted, tol=1e-10)
    assert_parity(sf.gather(sf.grad(lambda p: sf.tree.dot(sf.grad(loss)(p), params))(params)), wanted, tol=1e-10)
    each = sf.vmap(lambda p, x: loss(sf.tree.map(lambda w: w * x, p)), in_dims=(None, 0))(params, torch.ones(2))
    torch.testing.assert_close(each, plain_loss(plain).expand(2), rtol=1e-10, atol=1e-10)


@on_meshes({"fsdp": 2, "tp": 1})
def test_trees_in_a_dict(mesh: DeviceMesh) -> None:
    model = _model()
    params = sf.shard(model, mesh, _TP)
    x = torch.randn(3, 6, dtype=torch.float64) + torch.distributed.get_rank()
    count = torch.tensor(1.0 + torch.distributed.get_rank())

    def loss(p: sf.Params, q: sf.Params) -> sf.data.Mean:
        return sf.data.Mean((sf.apply(model, p, x) - sf.apply(model, q, 2 * x)).square().sum(), count)

    other = sf.tree.map(lambda w: w + 1, params)
    wanted_loss, wanted = sf.value_and_grad(loss, argnums=(0, 1))(params, other)
    both = {"p": params, "q": [other, 3], "n": torch.ones(2)}
    found_loss, found = sf.value_and_grad(lambda b: loss(b["p"], b["q"][0]))(both)
    torch.testing.assert_close(found_loss, wanted_loss)
    assert_trees_close(dict(found["p"]), dict(wanted[0]))
    assert_trees_close(dict(found["q"][0]), dict(wanted[1]))
    assert found["q"][1] == 3 and torch.equal(found["n"], torch.zeros(2))


class _Gates(nn.Module):
    """Values and the learnt gates that weigh them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def _gated(out: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of gated squares, and of the gates."""
    value, gate = out.unbind(-1)
    return (value.square() * gate.sigmoid()).sum(), gate.sigmoid().sum()


@pytest.mark.slow
@pytest.mark.everyday(1)
@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_a_mean_with_a_learnt_count(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _Gates().double()
    params = sf.shard(model, mesh, sf.Policy(rules={"up.weight": "ff@tp c@fsdp", "down.weight": "_ ff@tp"}))
    plain = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(8, 6, dtype=torch.float64)
    (local,) = sf.data.local_batch((x,), mesh)

    def loss_fn(p: sf.Params, x: Tensor) -> sf.data.Mean:
        return sf.data.Mean(*_gated(sf.apply(model, p, x)))

    def reference(p: dict[str, Tensor], x: Tensor = x) -> Tensor:
        total, count = _gated(torch.func.functional_call(model, p, (x,)))
        return total / count

    wanted, value = torch.func.grad_and_value(reference)(plain)
    loss, grads = sf.value_and_grad(loss_fn)(params, local)
    assert_parity({"loss": loss, **sf.gather(grads)}, {"loss": value, **wanted}, tol=1e-11)
    second = torch.func.jvp(torch.func.grad(reference), (plain,), (plain,))[1]
    assert_parity(sf.gather(sf.hvp(loss_fn, (params, local), params)), second, tol=1e-11)
    nested = sf.grad(lambda p: sf.tree.dot(sf.grad(loss_fn)(p, local), params))
    assert_parity(sf.gather(nested(params)), second, tol=1e-11)
    assert_parity(sf.gather(sf.jit(nested, backend="aot_eager")(params)), second, tol=1e-11)
    each = sf.vmap(sf.grad(loss_fn), in_dims=(None, 0))(params, local[:, None])
    wanted = torch.func.vmap(torch.func.grad(reference), in_dims=(None, 0))(plain, x[:, None])
    assert_parity(sf.gather(each), wanted, tol=1e-11)
    below = sf.grad(lambda p: sf.data.Mean((total := _gated(sf.apply(model, p, local)))[0], -total[1]))(params)
    assert_parity(sf.gather(below), {name: -g for name, g in torch.func.grad(reference)(plain).items()}, tol=1e-11)


@on_meshes({"fsdp": 2, "tp": 2})
def test_only_a_learnt_count_is_communicated_in_a_backward(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 1)
    params = sf.shard(model, mesh, sf.Policy())
    x = torch.ones(3, 4)

    def loss_with(count: Any) -> Any:
        return lambda p: sf.data.Mean((out := sf.apply(model, p, x)).sum(), out.sum() if count is None else count)

    found = {}
    for count in (3, 3.0, True, torch.tensor(3), torch.tensor(True), None):
        sf.grad(loss_with(count))(params)  # the first calls compare batches
        sf.grad(loss_with(count))(params)
        with count_collectives() as counts:
            sf.value_and_grad(loss_with(count))(params)
        found[str(count)] = counts.total
    learnt = found.pop("None")
    assert set(found.values()) == {learnt - 1}, found


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 2})
def test_totals_and_counts_of_leaves(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _Gates().double()
    params = sf.shard(model, mesh, sf.Policy(rules={"up.weight": "ff@tp c@fsdp", "down.weight": "_ ff@tp"}))
    plain = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(8, 6, dtype=torch.float64)
    (local,) = sf.data.local_batch((x,), mesh)
    ranks = mesh["fsdp"].size()

    def norm(p: Any) -> Tensor:
        return p["up.weight"].square().sum()

    by_leaf = sf.grad(lambda p: sf.data.Mean(_gated(sf.apply(model, p, local))[0], norm(p)))(params)
    wanted = torch.func.grad(lambda p: _gated(torch.func.functional_call(model, p, (x,)))[0] / (ranks * norm(p)))(plain)
    assert_parity(sf.gather(by_leaf), wanted, tol=1e-11)
    of_leaf = sf.grad(lambda p: sf.data.Mean(norm(p), _gated(sf.apply(model, p, local))[1]))(params)
    wanted = torch.func.grad(lambda p: ranks * norm(p) / _gated(torch.func.functional_call(model, p, (x,)))[1])(plain)
    assert_parity(sf.gather(of_leaf), wanted, tol=1e-11)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_plain_tensors_that_are_multiplied_with_leaves(mesh: DeviceMesh) -> None:
    """A learnt step size, and a mixture of two trees: gradients are plain, and their mean is that of one process."""
    torch.manual_seed(0)
    model, other = _Gates().double(), _Gates().double()
    rules = sf.Policy(rules={"up.weight": "ff@tp c@fsdp", "down.weight": "_ ff@tp"})
    params, others = sf.shard(model, mesh, rules), sf.shard(other, mesh, rules)
    plain, plain_others = ({name: p.detach() for name, p in m.named_parameters()} for m in (model, other))
    x = torch.randn(8, 6, dtype=torch.float64)
    (local,) = sf.data.local_batch((x,), mesh)
    rate = {"log": torch.tensor(-1.0, dtype=torch.float64), "mix": torch.tensor([0.3, 0.8], dtype=torch.float64)}

    def loss(p: sf.Params) -> Tensor:
        return sf.apply(model, p, local).square().mean()

    def plain_loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, p, (x,)).square().mean()

    def objective(rate: dict[str, Tensor], p: sf.Params) -> Tensor:
        adapted = sf.tree.map(lambda w, g: w - rate["log"].exp() * g, p, sf.grad(loss)(p))
        mixed = sf.tree.map(lambda a, b: rate["mix"][0] * a + rate["mix"][1] * b, adapted, others)
        return loss(mixed) * rate["log"].cos() + (rate["mix"][0] * p["up.weight"]).sum().full_tensor()

    def reference(rate: dict[str, Tensor], p: dict[str, Tensor]) -> Tensor:
        grads = torch.func.grad(plain_loss)(p)
        adapted = {name: w - rate["log"].exp() * grads[name] for name, w in p.items()}
        mixed = {name: rate["mix"][0] * w + rate["mix"][1] * plain_others[name] for name, w in adapted.items()}
        return plain_loss(mixed) * rate["log"].cos() + (rate["mix"][0] * p["up.weight"]).sum()

    def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        assert {type(g) for g in found.values()} == {Tensor}
        assert_parity({n: sf.collectives.pmean(g, mesh, "fsdp") for n, g in found.items()}, wanted, tol=1e-11)

    wanted, wanted_params = torch.func.grad(reference, argnums=(0, 1))(rate, plain)
    same(sf.grad(objective)(rate, params), wanted)
    found, grads = sf.grad(objective, argnums=(0, 1))(rate, params)
    same(found, wanted)
    assert_parity(sf.gather(grads), wanted_params, tol=1e-11)
    _, pull, *_ = sf.vjp(lambda r: loss(sf.tree.map(lambda w: r["log"] * w, params)), rate)
    scaled = torch.func.grad(lambda r: plain_loss({n: r["log"] * w for n, w in plain.items()}))(rate)
    same(pull(torch.ones((), dtype=torch.float64))[0], scaled)
    mixed = sf.grad(lambda r: loss(sf.tree.lerp(params, others, r["log"])))(rate)
    lerp = torch.func.grad(lambda r: plain_loss({n: w.lerp(plain_others[n], r["log"]) for n, w in plain.items()}))
    same(mixed, lerp(rate))
    second = torch.func.grad(torch.func.grad(lambda a: plain_loss({n: a.exp() * w for n, w in plain.items()})))
    twice = sf.grad(sf.grad(lambda a: loss(sf.tree.map(lambda w: a.exp() * w, params))))
    same({"log": twice(rate["log"])}, {"log": second(rate["log"])})


@on_meshes({"fsdp": 2})
def test_pending_gradients_have_no_products_with_plain_tensors(mesh: DeviceMesh) -> None:
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    params = sf.shard(model, mesh, sf.Policy())

    def loss(a: Tensor, p: sf.Params) -> Tensor:
        return sf.apply(model, sf.tree.map(lambda w: a * w.detach(), p), x).sum()

    with pytest.raises(sf.ShardError, match="a plain tensor is multiplied with leaves; use reduce='mean'"):
        sf.grad(loss, argnums=(0, 1), reduce=None)(torch.tensor(2.0), params)
    assert sf.grad(loss, argnums=(0, 1))(torch.tensor(2.0), params)[0].dim() == 0


@pytest.mark.everyday(9)
@pytest.mark.parametrize(
    "name", ["sum", "norm", "product", "whole", "gathered", "forward", "inner value", "dot", "several products"]
)
@on_meshes({"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 2})
def test_plain_losses_with_leaves_say_what_to_write(mesh: DeviceMesh, name: str) -> None:
    model, x = _model(), torch.ones(4, 6, dtype=torch.float64)
    params = sf.shard(model, mesh, _TP)

    def plain(p: sf.Params) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    losses = {
        "sum": lambda p: plain(p) + p["0.weight"].square().sum(),
        "norm": lambda p: plain(p) + p["0.weight"].norm(),
        "product": lambda p: plain(p) * p["0.bias"].sum(),
        "whole": lambda p: (plain(p) * p["0.bias"].sum()).full_tensor(),
        "gathered": lambda p: sf.gather(p)["0.bias"].sum() + p["0.bias"].sum(),
        "forward": lambda p: (x @ p["0.weight"].T).sum(),
        "inner value": lambda p: sf.value_and_grad(plain)(p)[0] + p["0.bias"].sum(),
        "dot": lambda p: sf.tree.dot(p, p) + p["0.bias"].sum(),
        "several products": lambda p: sf.data.Mean(plain(p), plain(p) * p["0.bias"].sum()),
    }
    with pytest.raises(sf.ShardError, match=r'(?s)value_and_grad: the function .* from sf\.gather\(params\)\["name"\]'):
        sf.grad(losses[name])(params)
    trainer = sf.Trainer(model, mesh, _TP, optimizer=sf.optim.sgd(0.1), loss_fn=lambda p: losses[name](p))
    with pytest.raises(sf.ShardError, match=r'from sf\.gather\(params\)\["name"\]'):
        trainer.step()
    sf.grad(lambda p: plain(p) * sf.gather(p)["0.bias"].sum() + sf.tree.dot(p, p))(params)  # as it says


@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_plain_tensors_meet_leaves_inside_transforms(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _Gates().double()
    params = sf.shard(model, mesh, sf.Policy(rules={"up.weight": "ff@tp c@fsdp", "down.weight": "_ ff@tp"}))
    plain = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(8, 6, dtype=torch.float64)
    (local,) = sf.data.local_batch((x,), mesh)
    rate = torch.tensor(0.3, dtype=torch.float64)

    def loss(p: sf.Params) -> Tensor:
        return sf.apply(model, p, local).square().mean()

    def plain_loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, p, (x,)).square().mean()

    def adapted(rate: Tensor, p: sf.Params) -> Tensor:
        new = sf.tree.map(lambda w, g: (w - rate.exp() * g) * (1 - rate), p, sf.grad(loss)(p))
        return loss(new) + sf.tree.dot(new, new) + rate.square()

    def reference(rate: Tensor, p: dict[str, Tensor]) -> Tensor:
        grads = torch.func.grad(plain_loss)(p)
        new = {name: (w - rate.exp() * grads[name]) * (1 - rate) for name, w in p.items()}
        return plain_loss(new) + torch.stack([w.square().sum() for w in new.values()]).sum() + rate.square()

    wanted, wanted_params = torch.func.grad(reference, argnums=(0, 1))(rate, plain)
    found, grads = sf.vjp(adapted, rate, params)[1](torch.ones_like(rate))
    (closed,) = sf.vjp(lambda r: adapted(r, params), rate)[1](torch.ones_like(rate))
    second = torch.func.grad(torch.func.grad(reference))(rate, plain)
    inner = sf.grad(adapted)
    still, ones = sf.tree.zeros_like(params), torch.ones_like(rate)
    found = {
        "vjp": found,
        "closed over": closed,
        "torch's": torch.func.grad(lambda r: adapted(r, params))(rate),
        "jvp of grad": sf.jvp(inner, (rate, params), (ones, still))[1],
    }
    means = {name: sf.collectives.pmean(g, mesh, "fsdp") for name, g in found.items()}
    assert_parity(means, {**dict.fromkeys(found, wanted), "jvp of grad": second}, tol=1e-11)
    assert_parity(sf.gather(grads), wanted_params, tol=1e-11)
    each = sf.vmap(sf.grad(lambda r, p: loss(sf.tree.map(lambda w: r * w, p))), in_dims=(0, None))(
        rate.expand(2), params
    )
    one = torch.func.grad(lambda r: plain_loss({name: r * w for name, w in plain.items()}))(rate)
    assert_parity({"each": sf.collectives.pmean(each, mesh, "fsdp")}, {"each": one.expand(2)}, tol=1e-11)


_MAX: dict[str, Any] = {"reduce": "max"}


def test_plain_trees_differentiate_too() -> None:
    loss, grads = sf.value_and_grad(lambda p: (p["w"] * p["w"]).sum())({"w": torch.arange(3.0), "n": torch.ones(2)})
    assert loss.item() == 5.0
    assert_trees_close(grads, {"w": 2 * torch.arange(3.0), "n": torch.zeros(2)})


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda p: sf.value_and_grad(lambda p: p["w"])(p), sf.ShardError, r"must be a scalar.*shape \(3,\)"),
        (lambda p: sf.value_and_grad(lambda p: 3.0)(p), sf.ShardError, "not float"),
        (lambda p: sf.value_and_grad(lambda p: p["w"].sum(), argnums=1)(p), TypeError, "argnums=1, but there are 1"),
        (lambda p: sf.value_and_grad(lambda p: p["w"].sum(), **_MAX)(p), ValueError, "'mean', 'sum' or None"),
        (lambda p: sf.value_and_grad(lambda p: p["w"].sum())({"w": torch.arange(3)}), TypeError, "no floating tensor"),
    ],
)
def test_bad_calls(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call({"w": torch.arange(3.0)})


class _Rotates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).real * self.scale


@on_meshes({"fsdp": 2})
def test_complex_parameters_have_gradients(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = _Rotates(), torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    params = sf.shard(model, mesh, sf.Policy())
    grads = sf.grad(lambda p: sf.apply(model, p, x).square().mean())(params)
    model(x).square().mean().backward()
    assert_parity(sf.gather(grads), {name: param.grad for name, param in model.named_parameters()})


@on_meshes({"fsdp": 1})
def test_a_leaf_that_the_plan_does_not_know_is_an_error(mesh: DeviceMesh) -> None:
    params = sf.shard(nn.Linear(4, 1), mesh, sf.Policy())
    params["zzz"] = params["weight"]
    with pytest.raises(sf.ShardError, match="has a leaf 'zzz', which its plan does not know"):
        sf.grad(lambda p: p["weight"].sum())(params)


Nested = Callable[[Any, Any, Any, Any], Tensor]  # (value_and_grad, forward, parameters, samples) -> loss of the samples


def _grad(of: Any, fn: Any, **options: Any) -> Callable[..., Any]:
    return lambda *args: of(fn, **options)(*args)[1]


def _by_an_argument(of: Any, f: Any, p: Any, x: Tensor) -> Tensor:
    return _grad(of, lambda p, x: f(p, x).sum(), argnums=1)(p, x).square().mean()


def _closed_over(of: Any, f: Any, p: Any, x: Tensor) -> Tensor:
    value, slope = of(lambda x: f(p, x).square().sum())(x)
    return (slope.square().sum() + value) / len(x)


def _with_aux(of: Any, f: Any, p: Any, x: Tensor) -> Tensor:
    def loss(scale: Tensor) -> tuple[Tensor, Tensor]:
        out = f(p, x * scale)
        return out.square().mean(), out.tanh()

    (value, aux), slope = of(loss, has_aux=True)(torch.ones((), dtype=x.dtype))
    return value + slope + aux.mean()


def _aux_alone(of: Any, f: Any, p: Any, x: Tensor) -> Tensor:
    def loss(shift: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        moved = (x + shift["s"]).exp()
        return moved.mean(), f(p, moved).mean()

    (value, aux), slopes = of(loss, has_aux=True)({"s": torch.zeros(6, dtype=x.dtype)})
    return value + aux + slopes["s"].sum()


def _laplacian(of: Any, f: Any, p: Any, x: Tensor) -> Tensor:
    def second(x: Tensor) -> Tensor:
        return _grad(of, lambda x: f(p, x).exp().sum())(x).square().sum()

    return _grad(of, second)(x).mean()


def _other_parameters(of: Any, f: Any, p: Any, x: Tensor) -> Tensor:
    fixed = sf.tree.map(torch.detach, p)
    value, grads = of(lambda q: (f(q, x) * f(p, x)).mean())(fixed)
    return value.square() + sf.tree.dot(grads, fixed)


def _of_a_container(of: Any, f: Any, p: Any, x: Tensor) -> Tensor:
    both = {"shift": torch.zeros(6, dtype=x.dtype), "scale": [torch.ones((), dtype=x.dtype)]}
    grads = _grad(of, lambda both, p: f(p, (x + both["shift"]) * both["scale"][0]).square().mean())(both, p)
    return (grads["shift"].sum() + grads["scale"][0]) * 2


_NESTED: tuple[Nested, ...] = (
    _by_an_argument,
    _closed_over,
    _with_aux,
    _aux_alone,
    _laplacian,
    _other_parameters,
    _of_a_container,
)


def _plain_value_and_grad(fn: Any, argnums: int = 0, has_aux: bool = False) -> Any:
    swapped = torch.func.grad_and_value(fn, argnums=argnums, has_aux=has_aux)
    return lambda *args: swapped(*args)[::-1]


def _same_as_one_process(mesh: DeviceMesh, program: Nested, model: nn.Module, around: Any = lambda fn: fn) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    params = sf.shard(model, mesh, _TP)
    (local,) = sf.data.local_batch((x,), mesh)
    outer = sf.value_and_grad(lambda p, x: program(sf.value_and_grad, partial(sf.apply, model), p, x))
    loss, grads = around(outer)(params, local)
    plain = {name: p.detach() for name, p in model.named_parameters()}
    forward = partial(torch.func.functional_call, model)
    wanted, named = _plain_value_and_grad(
        lambda p: program(_plain_value_and_grad, lambda p, x: forward(p, (x,)), p, x)
    )(plain)
    found = {"loss": loss, **sf.gather(grads)}
    assert_parity(
        {k: v.reconcile() if hasattr(v, "reconcile") else v for k, v in found.items()},
        {"loss": wanted, **named},
        tol=1e-11,
    )
    assert not loss.requires_grad and not any(g.requires_grad for g in grads.values())


@on_meshes({"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}, {"fsdp": 4, "tp": 1})
def test_inner_derivatives_by_something_else_stay_connected(mesh: DeviceMesh) -> None:
    for program in _NESTED:
        try:
            _same_as_one_process(mesh, program, _model())
        except AssertionError as error:
            error.add_note(f"in {program.__name__}")
            raise


def test_inner_derivatives_in_a_simulation_and_in_a_graph() -> None:
    with sf.simulate(fsdp=2, tp=2) as mesh:
        _same_as_one_process(mesh, _by_an_argument, _model())
        _same_as_one_process(mesh, _with_aux, _model())
    mesh = sf.make_mesh("cpu", fsdp=1, tp=1)
    _same_as_one_process(mesh, _by_an_argument, _model(), partial(sf.jit, backend="aot_eager"))
    _same_as_one_process(mesh, _closed_over, _model(), partial(sf.jit, backend="aot_eager"))


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_derivative_by_inputs_is_connected_to_what_torch_differentiates(mesh: DeviceMesh) -> None:
    model, reference = _model(), _model()
    trainer = sf.Trainer(model, mesh, _TP)
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (local,) = sf.data.local_batch((x,), mesh)
    params = trainer.params

    def energy(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).sum()

    for slope in (sf.grad(lambda _, x: trainer(x).sum(), argnums=1), sf.grad(energy, argnums=1)):
        trainer.zero_grad()
        slope(params, local).square().mean().backward()
        reference.zero_grad()
        torch.func.grad(lambda x: reference(x).sum())(x).square().mean().backward()
        found = sf.gather(params.like((name, leaf.grad) for name, leaf in params.items()))
        assert_parity(
            found,
            {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()},
            tol=1e-11,
        )
    with torch.no_grad():
        assert not sf.grad(lambda x: trainer(x).sum())(local).requires_grad


@on_meshes({"fsdp": 2, "tp": 1})
def test_what_only_a_loss_closes_over_keeps_no_graph(mesh: DeviceMesh) -> None:
    """Nobody differentiates a step: its gradients are reduced on their way, and its graph is let go of."""
    model, teacher = _model(), _model()
    params = sf.shard(model, mesh, _TP)
    x = torch.randn(4, 6, dtype=torch.float64)

    def loss(p: sf.Params) -> Tensor:
        return (sf.apply(model, sf.tree.map(lambda w: w * 1, p), x) - teacher(x)).square().mean()

    for reduce in ("mean", None):
        value, grads = sf.value_and_grad(loss, reduce=reduce)(params)
        assert not value.requires_grad and not any(g.requires_grad for g in grads.values())
    inner = sf.grad(lambda p: sf.apply(model, p, x).square().mean(), reduce=None)
    found: list[sf.Params] = []

    def first_order(p: sf.Params) -> Tensor:
        found.append(inner(sf.tree.map(torch.detach, p)))
        return loss(p)

    sf.grad(first_order)(params)
    assert not any(g.requires_grad for g in found[0].values())


def test_a_loss_that_is_the_leaf_itself() -> None:
    assert sf.grad(lambda x: x)(torch.tensor(2.0)) == 1


_SPLIT = sf.Policy(rules={"0.weight": "ff@tp@fsdp c", "2.weight": "_ ff@tp@fsdp"})


@pytest.mark.slow
@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}, {"fsdp": 4, "tp": 1})
def test_reshard_is_differentiable(mesh: DeviceMesh) -> None:
    model = decoder(kv=1 if mesh.size(1) > 2 else 2)
    params, (x, y) = sf.shard(model, mesh, policy()), sf.data.local_batch(tokens(), mesh)
    whole = sf.policies.gathered(policy())

    def loss(p: sf.Params) -> Tensor:
        return sf.cross_entropy(sf.apply(model, p, x), y)

    def moved(p: sf.Params) -> Tensor:
        other = sf.reshard(p, whole)
        return (
            loss(other)
            + sf.gather(sf.reshard(other, sf.Policy(default="replicate")), "norm.weight")["norm.weight"].sum()
        )

    def plain(p: sf.Params) -> Tensor:
        return loss(p) + sf.gather(p, "norm.weight")["norm.weight"].sum()

    found, wanted = (sf.value_and_grad(fn)(params) for fn in (moved, plain))
    assert {n: g.placements for n, g in found[1].items()} == {n: p.placements for n, p in params.items()}
    assert_parity({"loss": found[0], **sf.gather(found[1])}, {"loss": wanted[0], **sf.gather(wanted[1])}, tol=1e-11)
    second = [sf.grad(lambda p, fn=fn: sf.tree.dot(sf.grad(fn)(p), params))(params) for fn in (moved, plain)]
    assert_parity(*map(sf.gather, second), tol=1e-10)
    both = sf.grad(lambda p: loss(p) + sf.tree.dot(sf.grad(loss)(sf.reshard(p, whole)), sf.reshard(params, whole)))(
        params
    )
    assert_parity(
        sf.gather(both),
        sf.gather(sf.tree.map(torch.add, sf.grad(loss)(params), sf.hvp(loss, (params,), params))),
        tol=1e-10,
    )


@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2})
def test_reshard_to_another_mesh_is_differentiable(mesh: DeviceMesh) -> None:
    other, model = sf.make_mesh("cpu", dp=4), _model()
    params = sf.shard(model, mesh, _TP)

    def square(p: sf.Params) -> Tensor:
        return sf.optim.global_norm(sf.reshard(p, sf.Policy(), other)).square()

    for layout in (_TP, _SPLIT):
        tree = sf.reshard(params, layout)
        assert_parity(sf.gather(sf.grad(square)(tree)), {n: 2 * w for n, w in sf.gather(params).items()}, tol=1e-12)


def test_reshard_in_a_graph_is_differentiable() -> None:
    model, x = _model(), torch.randn(4, 6, dtype=torch.float64)
    params = sf.shard(model, sf.make_mesh("cpu", fsdp=1, tp=1), _TP)

    def loss(p: sf.Params, to: sf.Policy) -> Tensor:
        return sf.apply(model, sf.reshard(p, to), x).square().mean()

    found = sf.jit(lambda p: sf.grad(loss)(p, sf.policies.gathered(_TP)), backend="aot_eager")(params)
    assert_parity(sf.gather(found), sf.gather(sf.grad(loss)(params, _TP)), tol=1e-12)


def _inside(verb: str, p: sf.Params, grads: sf.Params) -> Any:
    optimizers = {
        "sgd.step": sf.optim.sgd(0.1),
        "from_torch.step": sf.optim.from_torch(torch.optim.SGD, lr=0.1),
        "chain.step": sf.optim.chain(sf.optim.sgd(0.1), sf.optim.schedule(lambda step: 1.0)),
        "schedule.step": sf.optim.schedule(lambda step: 1.0),
    }
    if verb in optimizers:
        return optimizers[verb].step(p, grads, optimizers[verb].init(p))[0]
    if verb == "shard":
        return sf.shard(sf.gather(p), p.mesh, sf.Policy())
    if verb == "reduce_grads":
        return sf.reduce_grads({"2.bias": sf.gather(p)["2.bias"]}, like=p)
    return sf.gather(p, to="cpu" if verb.endswith("'cpu')") else "rank0")


_INSTEAD = {
    "sgd.step": "Write updates, state = optimizer.update",
    "from_torch.step": "Write updates, state = optimizer.update",
    "chain.step": "Write updates, state = optimizer.update",
    "schedule.step": "Write updates, state = optimizer.update",
    "shard": "Shard a tree outside",
    "reduce_grads": "Have gradients reduced as they are made",
    "gather(to='cpu')": r"Write sf.gather\(params\)",
    "gather(to='rank0')": r"Write sf.gather\(params\)",
}


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 1})
def test_what_has_no_derivative_is_refused_where_one_is_asked_for(mesh: DeviceMesh) -> None:
    model, x = _model(), torch.randn(4, 6, dtype=torch.float64)
    params = sf.shard(model, mesh, _TP)
    fixed = sf.tree.map(torch.clone, params)

    def loss(p: sf.Params) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    def of(verb: str, used: sf.Params | None = None) -> Any:
        def fn(p: sf.Params) -> Tensor:
            made = sf.tree.map(lambda w: w * 1, p) if used is None else used
            _inside(verb, made, made)
            return loss(p)

        return fn

    one = torch.ones((), dtype=torch.float64)
    for verb, instead in _INSTEAD.items():
        for differentiate in (
            lambda fn: sf.grad(fn)(params),
            lambda fn: sf.vjp(fn, params)[1](one),
            lambda fn: sf.jvp(fn, (params,), (params,)),
            lambda fn: sf.grad(lambda p: sf.vmap(lambda s: fn(p) * s)(one[None]).sum())(params),
            lambda fn: torch.func.grad(fn)(params),
        ):
            with pytest.raises(sf.ShardError, match=f"^{re.escape(verb)}.* has no derivative.*{instead}"):
                differentiate(of(verb))
        sf.grad(of(verb, fixed))(params)  # what nobody differentiates
        _inside(verb, fixed, fixed)
    with pytest.raises(sf.ShardError, match=r"^reshard: a transform goes on.*reshard it before"):
        sf.vjp(lambda p: loss(sf.reshard(p, sf.Policy())), params)
    with torch.no_grad():
        sf.gather(sf.Trainer(model, mesh, _TP).params, to="cpu")


@on_meshes({"fsdp": 2, "tp": 2})
def test_what_has_no_derivative_is_for_trees_that_ask_outside_of_losses(mesh: DeviceMesh) -> None:
    model, x = _model(), torch.randn(4, 6, dtype=torch.float64)
    trainer = sf.Trainer(model, mesh, _TP)
    grads = sf.grad(lambda p: sf.apply(model, p, x).square().mean())(trainer.params)
    assert all(g.requires_grad for g in grads.values())
    for verb in sorted(_INSTEAD.keys() - {"shard"}):
        _inside(verb, trainer.params, grads)
    student = sf.shard(_model(), mesh, _TP)
    sf.grad(lambda p: sf.apply(_model(), p, x).mean() + sf.gather(trainer.params, to="cpu")["2.bias"].sum())(student)


@on_meshes({"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 2})
def test_a_loss_that_uses_no_leaf_is_an_error(mesh: DeviceMesh) -> None:
    model, x = _model(), torch.randn(4, 6, dtype=torch.float64)
    params = sf.shard(model, mesh, _TP)
    shift = torch.zeros(6, dtype=torch.float64)

    def forgets(p: sf.Params, *_: Any) -> Tensor:
        return model(x).square().mean()

    def uses(p: sf.Params) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    for differentiate in (
        sf.value_and_grad(forgets),
        sf.grad(forgets, reduce=None),
        sf.grad(lambda p: torch.zeros(())),
        lambda p: sf.grad(forgets, argnums=(0, 1))(p, shift),
        lambda p: sf.grad(lambda both: forgets(both["p"]))({"p": p}),
        lambda p: sf.vmap(sf.grad(forgets), in_dims=(None, 0))(p, x),
    ):
        with pytest.raises(
            sf.ShardError, match=r"depends on none of the \d leaves.*sf.apply\(model, params, x\), not mod"
        ):
            differentiate(params)
    inner = sf.grad(lambda p: uses(p) + sf.optim.global_norm(sf.grad(forgets)(p)).square())(params)
    assert_parity(sf.gather(inner), sf.gather(sf.grad(uses)(params)))
    for fn in (
        lambda p, s: uses(p) + 0 * s.sum(),
        lambda p, s: uses(p),
        lambda p, s: s.sum(),
        lambda p, s: 0 * uses(p),
    ):
        sf.grad(fn, argnums=(0, 1))(params, shift)
    assert sf.grad(lambda p, s: uses(p), argnums=1)(params, shift).eq(0).all()
    assert sf.vmap(sf.grad(lambda p, x: uses(p) * x.sum()), in_dims=(None, 0))(params, x)["2.bias"].shape[1:] == (2,)
    spec = sf.MeshSpec(fsdp=1, tp=1)
    assert "depends on none" in str(sf.check(model, spec, _TP, forgets, x))


@on_meshes({"fsdp": 2})
def test_what_an_inner_derivative_was_made_for_asks_for_nothing_outside(mesh: DeviceMesh) -> None:
    model = _model()
    params, x = sf.shard(model, mesh, sf.Policy()), torch.ones(2, 6, dtype=torch.float64)

    def outer(t: Tensor) -> Tensor:
        inner = sf.grad(lambda p: sf.apply(model, p, x).square().mean() * t)(params)
        return sf.tree.dot(inner, inner)

    value, slope = sf.value_and_grad(outer)(torch.tensor(2.0, dtype=torch.float64))
    assert not value.requires_grad and not slope.requires_grad
    torch.testing.assert_close(slope, value)  # value is a square of t, which is 2


@on_meshes({"fsdp": 1})
def test_a_value_that_is_written_over_is_torchs_own_error(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)

    def loss(p: Any) -> Tensor:
        y = sf.apply(model, p, torch.ones(2, 4)).exp()  # whose result its derivative needs
        return y.add_(1).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        sf.grad(loss)(sf.shard(model, mesh, sf.Policy()))
    assert "sf.hvp" not in str(caught.value)


@on_meshes({"fsdp": 2})
def test_a_loss_of_what_is_gathered_is_averaged(mesh: DeviceMesh) -> None:
    model = nn.Linear(2, 2, bias=False)
    params, own = sf.shard(model, mesh, sf.Policy()), mesh.get_local_rank("fsdp") + 1
    value, _ = sf.value_and_grad(lambda t: sf.gather(params)["weight"].square().sum() * t * own)(torch.ones(()))
    torch.testing.assert_close(value, 1.5 * model.weight.detach().square().sum())
