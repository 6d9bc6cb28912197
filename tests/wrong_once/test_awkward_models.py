"""Models that do what derivations and caches tend to forget; each was a wrong number or a hang once."""

import dataclasses
import types
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes, run_raises

RULES = {"up.weight": "f@tp c", "down.weight": "c f@tp"}
MESHES = ({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})


class MLP(nn.Module):
    """The parts that the models below put together."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate = nn.Linear(8, 8), nn.Linear(8, 16)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.flag = "plain"
        self.aux: Any = None

    def forward(self, x: Tensor, mode: str | None = None) -> Any:
        return self.down(self.hidden(self.enter(x), mode))

    def hidden(self, x: Tensor, mode: str | None) -> Tensor:
        h = torch.tanh(self.up(x))
        return h * self.scale if mode == "scaled" else h


class Frozen(MLP):
    """A unit read first under no_grad, then with gradients."""

    def forward(self, x: Tensor, mode: str | None = None) -> Any:
        with torch.no_grad():
            bias = self.enter(x).mean(-1, keepdim=True) * 0.1
        return super().forward(x + bias)


class Gated(MLP):
    """An input of column-parallel layers that is read first under no_grad."""

    def forward(self, x: Tensor, mode: str | None = None) -> Any:
        x = self.enter(x)
        with torch.no_grad():
            gate = self.gate(x).sigmoid()
        return self.down(self.up(x) * gate)


class Twice(torch.autograd.Function):
    """A product that autograd does not see."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(h, scale)
        return h * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        h, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * h).sum()


class Custom(MLP):
    def hidden(self, x: Tensor, mode: str | None) -> Tensor:
        out: Tensor = Twice.apply(torch.tanh(self.up(x)), self.scale)
        return out


class Assigned(MLP):
    """A split value written into a part of a tensor."""

    def forward(self, x: Tensor, mode: str | None = None) -> Any:
        h = self.up(self.enter(x))
        out = x.new_zeros(*h.shape[:-1], h.shape[-1] + 1)
        out[..., 1:] = h
        return out


@dataclasses.dataclass
class Output:
    """A container that torch does not know."""

    hidden: Tensor


class Contained(MLP):
    def forward(self, x: Tensor, mode: str | None = None) -> Any:
        return Output(self.up(self.enter(x)))


def _make(kind: type[MLP]) -> MLP:
    torch.manual_seed(3)
    return kind().double()


def _policy(model: MLP) -> sf.Policy:
    gate = {"gate.weight": "f@tp c"} if isinstance(model, Gated) else {}
    return sf.Policy(rules=RULES | gate)


def _loss(out: Any) -> Tensor:
    return (out.hidden if isinstance(out, Output) else out).square().mean()


def _check(model: MLP, params: sf.Params, *args: Any) -> None:
    mesh = params.mesh
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (local,) = sf.data.local_batch((x,), mesh)
    loss, grads = sf.value_and_grad(lambda p: _loss(sf.apply(model, p, local, *args)))(params)
    reference = _make(type(model))
    expected = _loss(reference(x, *args))
    expected.backward()
    named = reference.named_parameters()
    assert_parity({"loss": loss}, {"loss": expected.detach()})
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}
    assert_parity(sf.gather(grads), wanted, tol=1e-11)


@pytest.mark.everyday(7)
@pytest.mark.parametrize("kind", [MLP, Frozen, Gated, Custom, Assigned, Contained])
@on_meshes({"fsdp": 4, "tp": 1}, *MESHES)
def test_equal_to_one_process(mesh: DeviceMesh, kind: type[MLP]) -> None:
    model = _make(kind)
    _check(model, sf.shard(model, mesh, _policy(model)))


@on_meshes(*MESHES)
def test_another_way_through_the_forward_is_looked_at_again(mesh: DeviceMesh) -> None:
    model = _make(MLP)
    params = sf.shard(model, mesh, _policy(model))
    _check(model, params, "plain")
    _check(model, params, "scaled")


def _refused(kind: str) -> None:
    mesh = sf.make_mesh("cpu", fsdp=2, tp=2)
    data, tp = mesh.get_local_rank("fsdp"), mesh.get_local_rank("tp")
    model = _make(MLP)
    params = sf.shard(model, mesh, _policy(model))
    x: Any = torch.ones(4, 8, dtype=torch.float64)
    if kind == "patched":
        model.up.forward = types.MethodType(lambda self, x: 2 * F.linear(x, self.weight), model.up)
        sf.apply(model, params, x)
    elif kind == "argument":
        sf.apply(model, params, x, "scaled" if tp else None)
    elif kind == "mode":
        sf.apply(model.train(bool(tp)), params, x)
    elif kind == "shape":
        sf.apply(model, params, x[:, : 8 - data])
    elif kind == "keyword":
        sf.apply(model, params, x, **({"mod": None} if data else {}))
    elif kind == "leaves":
        sf.apply(model, params.select("up.*") if data else params, x)
    elif kind == "dtensor":
        sf.apply(model, params, params["up.weight"])


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("patched", "has another forward than when its plan was made"),
        ("argument", "inputs differ between ranks along 'tp'"),
        ("mode", "inputs differ between ranks along 'tp'"),
        ("shape", "failed in 'enter'|other ranks cannot use their inputs"),
        ("leaves", "the tree lacks|other ranks cannot use their inputs"),
        ("dtensor", "is a DTensor"),
    ],
)
def test_refused_on_every_rank(kind: str, match: str) -> None:
    run_raises(sf.ShardError, _refused, kind, match=match, ranks=4, timeout=30)


def test_a_wrong_keyword_on_one_data_rank_stops_all() -> None:
    run_raises(Exception, _refused, "keyword", match="mod|other ranks cannot use", ranks=4, timeout=30)


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight: Any = layer.weight
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)
            x = layer(x)
        return x


@on_meshes({"fsdp": 2})
def test_a_gathered_weight_written_in_forward_is_an_error(mesh: DeviceMesh) -> None:
    model = nn.Sequential(Clamped())
    params = sf.shard(model, mesh, sf.Policy(units="0"))
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="was changed in place by the forward"):
        sf.value_and_grad(lambda p: sf.apply(model, p, x).sum())(params)


def _out_of_range(kind: str) -> None:
    mesh = sf.make_mesh("cpu", fsdp=1, tp=2)
    model = nn.Sequential(nn.Embedding(8, 4))
    params = sf.shard(model, mesh, sf.Policy(rules={"0.weight": "vocab@tp c"}))
    sf.apply(model, params, torch.tensor([[1, 8]]))


def test_ids_that_no_rank_has_are_an_error() -> None:
    run_raises(IndexError, _out_of_range, "embedding", match="index out of range: ids from 1 to 8, size 8", ranks=2)


class _SparseRows(nn.Module):
    """Embeddings with sparse gradients, in a unit and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(3, 4, sparse=True))
        self.emb, self.head = nn.Embedding(12, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.emb(ids) + self.inner(ids % 3)).square().mean()


@on_meshes({"fsdp": 2})
@pytest.mark.parametrize("reduce", ["mean", None])
def test_sparse_gradients_become_dense(mesh: DeviceMesh, reduce: Any) -> None:
    torch.manual_seed(0)
    model, ids = _SparseRows().double(), torch.arange(8)
    params = sf.shard(model, mesh, sf.Policy(units=["inner"]))
    grads = sf.grad(lambda p: sf.apply(model, p, ids), reduce=reduce)(params)
    model(ids).backward()
    want = {name: param.grad.to_dense() for name, param in model.named_parameters() if param.grad is not None}
    assert_parity(sf.gather(sf.reduce_grads(grads) if reduce is None else grads), want)


class SharedToo(MLP):
    """A value that is used by each rank for its own part, and that leaves the model too."""

    def forward(self, x: Tensor, mode: str | None = None) -> Any:
        seen = self.enter(x)
        return self.down(torch.tanh(self.up(x)) * seen.mean(-1, keepdim=True)), seen


@on_meshes(*MESHES)
def test_a_shared_value_that_leaves_the_model_counts_once(mesh: DeviceMesh) -> None:
    model, reference = _make(SharedToo), _make(SharedToo)
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (local,) = sf.data.local_batch((x,), mesh)

    def loss_of(outputs: Any) -> Tensor:
        return outputs[0].square().mean() + outputs[1].square().mean()

    loss, grads = sf.value_and_grad(lambda p: loss_of(sf.apply(model, p, local)))(params)
    expected = loss_of(reference(x))
    expected.backward()
    assert_parity({"loss": loss}, {"loss": expected.detach()})
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()}
    assert_parity(sf.gather(grads), wanted, tol=1e-11)


class Named(dict[str, Any]):
    """As libraries make outputs."""

    __getattr__ = dict.__getitem__


class Rows(list[Any]): ...


class Pair(tuple[Any, ...]): ...


class Queue(deque[Any]): ...


class Lists(defaultdict[str, Any]): ...


@dataclasses.dataclass(slots=True)
class Slotted:
    hidden: Any


class OfSlots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


def _noted(on: Any, x: Tensor) -> Any:
    on.seen = x
    return on


def _first(held: Any) -> Any:
    return next(iter(held))


# What holds a tensor, and how it is taken out.
HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "Named": (lambda h: Named(hidden=h), lambda held: held.hidden),
    "Rows": (lambda h: Rows([h]), _first),
    "Pair": (lambda h: Pair([h]), _first),
    "Queue": (lambda h: Queue([h]), _first),
    "Lists": (lambda h: Lists(list, hidden=h), lambda held: held["hidden"]),
    "OrderedDict in a dict": (lambda h: {"a": Named(hidden=[h])}, lambda held: held["a"].hidden[0]),
    "Slotted": (Slotted, lambda held: held.hidden),
    "OfSlots": (OfSlots, lambda held: held.hidden),
    "set": (lambda h: {h}, _first),
    "frozenset": (lambda h: frozenset([h]), _first),
    "key": (lambda h: {h: 1}, _first),
    "proxy": (lambda h: types.MappingProxyType({1: h}), lambda held: held[1]),
    "values": (lambda h: {1: h}.values(), _first),
    "items": (lambda h: {1: h}.items(), lambda held: _first(held)[1]),
    "zip": (lambda h: zip([h], strict=True), lambda held: next(held)[0]),
    "reversed": (lambda h: reversed([h]), next),
    "enumerate": (lambda h: enumerate([h]), lambda held: next(held)[1]),
    "iterator": (lambda h: iter((h,)), next),
    "closure": (lambda h: lambda: h, lambda held: held()),
    "default": (lambda h: lambda x=h: x, lambda held: held()),
    "partial": (lambda h: partial(torch.mul, h), lambda held: held(1)),
    "method": (lambda h: h.clone, lambda held: held()),
    "beside itself": (lambda h: (h, lambda: h), lambda held: held[0] + held[1]()),
    "attribute": (lambda h: _noted(h.new_ones(3), h), lambda held: held.seen),
}


class Holding(MLP):
    """Returns or keeps split features in a holder."""

    holds: Callable[[Tensor], Any]

    def forward(self, x: Tensor, mode: str | None = None) -> Any:
        h = self.up(self.enter(x))
        if mode != "keeps":
            return type(self).holds(h)
        self.kept = type(self).holds(h)
        return h.sum()


@pytest.mark.everyday(11)
@pytest.mark.parametrize("name", HOLDERS)
@on_meshes({"fsdp": 1, "tp": 2})
def test_what_is_in_any_holder_is_whole(mesh: DeviceMesh, name: str) -> None:
    holds, taken = HOLDERS[name]
    model = _make(type("Holds", (Holding,), {"holds": holds}))
    params, reference = sf.shard(model, mesh, sf.Policy(rules=RULES)), _make(type(model))
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss, grads = sf.value_and_grad(lambda p: taken(sf.apply(model, p, x)).square().mean())(params)
    expected = taken(reference(x)).square().mean()
    expected.backward()
    assert_parity({"loss": loss}, {"loss": expected.detach()})
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()}
    assert_parity(sf.gather(grads), wanted, tol=1e-11)
    sums = sf.apply(model, params, x, "keeps"), reference(x, "keeps")
    kept = taken(model.kept), taken(reference.kept)
    assert_parity({"sum": sums[0], "kept": kept[0]}, {"sum": sums[1].detach(), "kept": kept[1].detach()})


class InAnObject(SharedToo):
    def forward(self, x: Tensor, mode: str | None = None) -> Any:
        return Named(zip(("out", "seen"), super().forward(x), strict=True))


def test_what_cannot_be_replaced_in_an_object_is_refused() -> None:
    """A shared value counts once in gradients, and logits that stay split become `SplitLogits`."""
    mesh, x = sf.MeshSpec(fsdp=1, tp=2), torch.ones(4, 8, dtype=torch.float64)
    with pytest.raises(sf.ShardError, match=r"use in shares leaves the forward in an object .*dict"):
        sf.plan(_make(InAnObject), mesh, sf.Policy(rules=RULES), example=x)
    model = _make(type("Holds", (Holding,), {"holds": lambda h: Named(hidden=h)}))
    with pytest.raises(sf.ShardError, match="its output split over 'tp', and it leaves the forward in an object"):
        sf.plan(model, mesh, sf.Policy(rules=RULES, acts={"up": "... f@tp"}), example=x)


def test_a_size_of_a_rank_in_an_object_is_refused() -> None:
    model = _make(type("Holds", (Holding,), {"holds": lambda h: Named(size=h.shape[-1])}))
    with pytest.raises(sf.ShardError, match="8 leaves the forward, which is 16 on one rank"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), sf.Policy(rules=RULES), example=torch.ones(4, 8).double())


class Raw(nn.Module):
    """Computes with its weights by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.wide)), self.narrow)


class TwoWays(nn.Module):
    """A value that two modules with split weights read."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first, self.second = nn.Linear(8, 8), Raw(), Raw()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.first(x) + self.second(x)


def _varied_by_hand(own: Any, local: Any, layouts: Any, x: Tensor) -> Tensor:
    return sf.collectives.psum(Raw.forward(own, sf.collectives.pvary(x, layouts.mesh, "tp")), layouts.mesh, "tp")


def _entered(own: Any, local: Any, layouts: Any, x: Tensor) -> Tensor:
    return sf.collectives.psum(Raw.forward(own, layouts.entered(x, "tp", 0)), layouts.mesh, "tp")


def _varied_twice(own: Any, local: Any, layouts: Any, x: Tensor) -> Tensor:
    return _varied_by_hand(own, local, layouts, sf.collectives.pvary(x, layouts.mesh, "tp"))


_BOTH = {"{first,second}.wide": RULES["up.weight"], "{first,second}.narrow": RULES["down.weight"]}


@on_meshes(*MESHES)
def test_a_value_that_varies_is_not_varied_again(mesh: DeviceMesh) -> None:
    """Its gradient would be added up over the ranks a second time."""
    torch.manual_seed(3)
    model = TwoWays().double()
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (local,) = sf.data.local_batch((x,), mesh)
    model(x).square().mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for second in (_entered, _varied_by_hand):
        params = sf.shard(model, mesh, sf.Policy(rules=_BOTH, compute={"second": second}))
        grads = sf.grad(lambda p: sf.apply(model, p, local).square().mean())(params)
        assert_parity(sf.gather(grads), wanted, tol=1e-11)
    twice = sf.shard(model, mesh, sf.Policy(rules=_BOTH, compute={"second": _varied_twice}))
    with pytest.raises(sf.ShardError, match="in 'second': pvary over 'tp' of a value that varies over it"):
        sf.apply(model, twice, local)


class Pending(nn.Module):
    """A sum that is still pending, whole in size."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16, 16))
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.linear(F.linear(x, self.wide), self.narrow))


def test_a_pending_sum_is_not_sliced() -> None:
    rules = {"wide": "f@tp c", "narrow": "_ f@tp", "down.weight": "c f@tp"}
    with pytest.raises(sf.ShardError, match="in 'down': its input is a sum over 'tp' that is still pending"):
        sf.plan(Pending(), sf.MeshSpec(fsdp=1, tp=2), sf.Policy(rules=rules), example=torch.empty(4, 8))
