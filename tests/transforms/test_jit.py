"""Whole steps as one graph: equal to eager ones, gathered and gathered again, recorded once, refused with a reason."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import decoder, policy, tokens
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.testing import assert_trees_close, on_meshes
from shardfn.transforms.jit import jit

MESHES = tuple({"fsdp": f, "tp": t} for f, t in ((4, 1), (2, 2), (1, 4)))


class Counted:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph

    def count(self, operation: str) -> int:
        """How often an operation occurs in all graphs."""
        return sum(operation in str(node.target) for graph in self.graphs for node in graph.graph.nodes)


class Training:
    """A decoder, an optimizer with a schedule, clipping, an average, and microbatches."""

    def __init__(
        self, mesh: DeviceMesh, dropout: float = 0.0, microbatches: int = 1, layers: int = 2, **fields: Any
    ) -> None:
        self.model = decoder(kv=1 if mesh.size(1) > 2 else 2, dtype=torch.float32, layers=layers)
        self.dropout, self.microbatches = nn.Dropout(dropout), microbatches
        rate = sf.optim.warmup_cosine(1e-2, 2, 8)
        # A large eps: the gradient of a key's bias is zero, and without it the step would have the size of rounding.
        self.optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(rate, eps=1e-3))
        params = sf.shard(self.model, mesh, policy(**fields))
        self.state = params, self.optimizer.init(params), sf.tree.map(torch.clone, params)
        self.mesh = mesh

    def loss(self, params: sf.Params, x: Tensor, y: Tensor) -> Tensor:
        return sf.cross_entropy(self.dropout(sf.apply(self.model, params, x)), y)

    def step(self, params: Any, state: Any, average: Any, x: Tensor, y: Tensor) -> Any:
        """One update of all."""
        parts = zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True)
        several = self.microbatches > 1
        found = [sf.value_and_grad(self.loss, reduce=None if several else "mean")(params, *part) for part in parts]
        loss = torch.stack([loss for loss, _ in found]).mean()
        grads = sf.tree.map(lambda *gs: reduce(add, gs) / len(gs), *(grads for _, grads in found))
        grads = sf.reduce_grads(grads)
        params, state = self.optimizer.step(params, grads, state)
        return params, state, sf.tree.lerp(average, params, 0.1), loss

    def train(
        self, step: Callable[..., Any], steps: int = 4
    ) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        """Losses, and what becomes of the weights and of their average."""
        torch.manual_seed(5)
        losses = []
        state = self.state
        for i in range(steps):
            *state, loss = step(*state, *sf.data.local_batch(tokens(i, batch=4 * max(self.microbatches, 3)), self.mesh))
            losses.append(float(loss))
        return losses, sf.gather(state[0]), sf.gather(state[2])


def _same(mesh: DeviceMesh, backend: Any, tol: float, **fields: Any) -> None:
    eager, compiled = Training(mesh, **fields), Training(mesh, **fields)
    wanted, found = eager.train(eager.step), compiled.train(jit(compiled.step, backend=backend))
    for mine, other in zip(found, wanted, strict=True):
        assert_trees_close(mine, other, rtol=tol, atol=tol)


@on_meshes(*MESHES)
def test_a_step_equals_the_eager_one(mesh: DeviceMesh) -> None:
    backend = Counted()
    _same(mesh, backend, 1e-6, layers=2 if mesh.size(0) == mesh.size(1) else 1)
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("fields", [{"regather": False, "dropout": 0.5}, {"microbatches": 2}], ids=str)
@on_meshes({"fsdp": 2, "tp": 2})
def test_other_steps_equal_the_eager_ones(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    _same(mesh, "aot_eager" if "dropout" in fields else Counted(), 1e-6, layers=1, **fields)


@on_meshes({"fsdp": 2, "tp": 1}, timeout=800)
def test_inductor(mesh: DeviceMesh) -> None:
    _same(mesh, "inductor", 1e-6, layers=1)


class _Uneven(nn.Module):
    """A layer whose weights have different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6, dtype=torch.float64), nn.Linear(6, 10, dtype=torch.float64)
        self.down = nn.Linear(10, 6, bias=False, dtype=torch.float64)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


@on_meshes({"fsdp": 2}, {"fsdp": 2, "tp": 2})
def test_gradients_where_leaves_of_a_bucket_differ_in_shape(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Uneven(), _Uneven())
    split = {"*.up.weight": "ff@tp c@fsdp", "*.up.bias": "ff@tp", "*.down.weight": "c@fsdp ff@tp"}
    rules = split if "tp" in (mesh.mesh_dim_names or ()) else {}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, units=["*"], regather=True))
    step = jit(sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean()), backend=Counted())
    for seed in range(2):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        loss, grads = step(params, sf.data.local_batch(x, mesh))
        wanted = model(x).square().mean()
        expected = dict(zip(params, torch.autograd.grad(wanted, [model.get_parameter(n) for n in params]), strict=True))
        assert_trees_close({"loss": loss, **sf.gather(grads)}, {"loss": wanted, **expected}, rtol=1e-10, atol=1e-12)


@on_meshes({"fsdp": 2, "tp": 1})
def test_units_are_gathered_again_and_only_then(mesh: DeviceMesh) -> None:
    gathers = {}
    for regather in (True, False):
        training, backend = Training(mesh, regather=regather), Counted()
        training.train(jit(training.step, backend=backend), steps=1)
        gathers[regather] = backend.count("all_gather_into_tensor")
    units = len(training.model.layers)
    assert gathers[True] == gathers[False] + units


@pytest.mark.everyday(1)
def test_what_is_drawn_twice_differs() -> None:
    drawn = jit(lambda x: (torch.rand(4) + x, torch.rand(4) + x), backend="eager")
    torch.manual_seed(3)
    first, second = drawn(torch.zeros(4))
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4)) and torch.equal(second, torch.rand(4))


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_what_makes_another_graph(mesh: DeviceMesh) -> None:
    backend = Counted()
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    params = sf.shard(model, mesh, sf.Policy())
    fast = jit(lambda p, x, scale=1.0: sf.apply(model, p, x * scale), backend=backend)
    x = torch.ones(3, 4)
    for expected, call in (
        (1, lambda: fast(params, x)),
        (1, lambda: fast(sf.tree.map(torch.clone, params), 2 * x)),
        (2, lambda: fast(params, torch.ones(5, 4))),
        (3, lambda: fast(params, x, 2.0)),
        (3, lambda: fast(params, x, 2.0)),
        (4, lambda: fast(params, x, 2)),
    ):
        call()
        assert len(backend.graphs) == expected
    model.eval()
    assert torch.equal(fast(params, x), sf.apply(model, params, x))
    assert len(backend.graphs) == 5


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_tensors_from_elsewhere_are_looked_up_and_buffers_written(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    params = sf.shard(model, mesh, sf.Policy())
    factor, x = torch.tensor(1.0), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    fast = jit(lambda p: sf.apply(model, p, x) * factor, backend="aot_eager")
    first = fast(params)
    mean = params.buffers["1.running_mean"].clone()
    assert params.buffers["1.num_batches_tracked"] == 1
    assert mean.abs().sum() > 0
    factor.fill_(3.0)
    torch.testing.assert_close(fast(params), 3 * first)
    assert params.buffers["1.num_batches_tracked"] == 2
    assert not torch.equal(params.buffers["1.running_mean"], mean)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_what_cannot_be_recorded_says_so(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    params, x = sf.shard(model, mesh, sf.Policy()), torch.ones(3, 4)

    def branch(p: sf.Params) -> Tensor:
        out = sf.apply(model, p, x).sum()
        return out if out > 0 else -out

    def number(p: sf.Params) -> Tensor:
        return x * sf.apply(model, p, x).sum().item()

    def masked(p: sf.Params) -> Tensor:
        out = sf.apply(model, p, x)
        return out[out > 0]

    def called(p: sf.Params) -> Tensor:
        return torch.from_numpy(sf.apply(model, p, x).numpy())

    def printed(p: sf.Params) -> None:
        print(f"{sf.apply(model, p, x).sum():.3f}")

    lines = {branch: "if out > 0", number: ".item()", masked: "out[out > 0]", called: ".numpy()", printed: "print(f"}
    for step, line in lines.items():
        with pytest.raises(sf.ShardError, match="needs the value of a tensor") as caught:
            jit(step, backend="aot_eager")(params)
        assert line in str(caught.value)
        assert "test_jit.py" in str(caught.value)

    def unfinished(p: sf.Params) -> Tensor:
        return sf.apply(model, p, x.clone().requires_grad_()).sum()

    with pytest.raises(sf.ShardError, match="requires a gradient"):
        jit(unfinished, backend="aot_eager")(params)
    with pytest.raises(sf.ShardError, match="inside a transform"):
        torch.func.grad(lambda y: jit(lambda y: y.sum(), backend="aot_eager")(y))(x)
    jitted = jit(lambda p: sf.apply(model, p, x).square().sum(), backend="aot_eager")
    with pytest.raises(sf.ShardError, match="has no derivative, and is in a function that is differentiated"):
        sf.value_and_grad(lambda p: jitted(p) + sf.apply(model, p, x).sum())(params)

    optimizer = sf.optim.adamw(lambda step: 0.1)
    grads = sf.tree.zeros_like(params)

    def twice(p: sf.Params, state: Any) -> Any:
        return optimizer.step(*optimizer.step(p, grads, state)[:1], grads, optimizer.step(p, grads, state)[1])

    with pytest.raises(sf.ShardError, match="function of Python"):
        jit(twice, backend="aot_eager")(params, optimizer.init(params))
    torch.testing.assert_close(sf.apply(model, params, x), model(x))  # and all goes on


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5)
        return checkpoint(lambda v: F.dropout(v * self.weight, 0.5) + F.dropout(v, 0.1), x, use_reentrant=False)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1})
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_recomputation_draws_what_was_drawn(mesh: DeviceMesh, backend: str) -> None:
    model = _Recomputed()
    params, x = sf.shard(model, mesh, sf.Policy()), torch.ones(64)

    def step(p: sf.Params) -> Any:
        def loss(p: sf.Params) -> Any:
            out = sf.apply(model, p, x)
            return out.sum(), out.detach()

        (_, out), grads = sf.value_and_grad(loss, has_aux=True)(p)
        return out, grads

    fast, seen = jit(step, backend=backend), set()
    state = torch.get_rng_state()
    for _ in range(3):
        out, grads = fast(params)
        grad = grads["weight"].full_tensor()
        dropped = out - grad  # of the second summand: 1.11 or 0, times the first dropout
        assert torch.isin(dropped.mul(0.9).round(decimals=3), torch.tensor([0.0, 1.0, 2.0])).all()
        assert 0 < int((grad > 0).sum()) < 64
        seen.add(tuple(grad.tolist()))
    assert len(seen) == 3, "and other numbers in every call"
    assert backend == "inductor" or not torch.equal(state, torch.get_rng_state())


class Held(nn.Module):
    """Takes its input out of an object that is no pytree."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, held: SimpleNamespace) -> Tensor:
        return self.down(self.up(held.x).relu())


@on_meshes({"fsdp": 1, "tp": 2})
def test_tensors_in_an_object_that_is_no_pytree(mesh: DeviceMesh) -> None:
    model = Held()
    params = sf.shard(model, mesh, sf.Policy(rules={"up.weight": "h@tp c", "down.weight": "c h@tp"}))
    step = sf.value_and_grad(lambda p, x: sf.apply(model, p, SimpleNamespace(x=x)).square().mean())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    assert_trees_close(jit(step, backend="aot_eager")(params, x), step(params, x))


@pytest.mark.everyday(1)
def test_tensors_from_elsewhere_are_written_when_the_graph_runs() -> None:
    """And only then: recording them changes nothing, nor does it know their values."""
    count, average = torch.zeros(()), torch.zeros(2)

    def step(x: Tensor) -> Tensor:
        average.mul_(0.5).add_(x, alpha=0.5)
        return x.sum() * count.add_(1)

    fast = jit(step, backend="aot_eager")
    assert [float(fast(torch.ones(2))) for _ in range(3)] == [2.0, 4.0, 6.0]
    assert float(count) == 3 and torch.equal(average, torch.full((2,), 0.875))

    def refused(x: Tensor) -> Tensor:
        count.add_(1)
        return x * count.item()

    with pytest.raises(sf.ShardError, match=r"count\.item\(\)` needs the value of a tensor"):
        jit(refused, backend="aot_eager")(torch.ones(2))
    assert float(count) == 3


@pytest.mark.everyday(1)
def test_arguments_that_change_without_a_new_object() -> None:
    def added(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a.add_(1)
        return a * 1, b * 2

    fast = jit(added, backend="aot_eager")
    fast(torch.zeros(3), torch.zeros(3))
    x = torch.zeros(3)
    assert torch.equal(fast(x, x.detach())[1], torch.full((3,), 2.0)), "one memory"
    x = torch.zeros(6)
    assert torch.equal(fast(x[:3], x[3:])[1], torch.zeros(3)), "side by side"
    x = torch.zeros(4)
    with pytest.raises(sf.ShardError, match="shares a part of its memory"):
        fast(x[:3], x[1:])
    text = torch.arange(6.0)
    read = jit(lambda a, b: a * b, backend="aot_eager")
    assert torch.equal(read(text[:-1], text[1:]), text[:-1] * text[1:]), "the inputs and targets of a language model"

    divided = jit(lambda x, s: torch.ones(2) / (x * s), backend="aot_eager")
    assert float(divided(torch.ones(2), 0.0)[0]) == float("inf") == -float(divided(torch.ones(2), -0.0)[0])
    for value in ([1.0], {"a": 1}, (1, "x"), None):
        jit(lambda x, s: x * 1, backend="aot_eager")(torch.ones(1), value)
    for value in (bytearray(b"1"), {1, 2}, torch.ones(3).numpy()):
        with pytest.raises(sf.ShardError, match="may change, and a graph would not know"):
            jit(lambda x, s: x * 1, backend="aot_eager")(torch.ones(1), value)


_AROUND: dict[str, Any] = {}


@pytest.mark.parametrize("kept", ["a list", "a tree", "an average"])
def test_what_a_step_leaves_around_it_is_refused(kept: str) -> None:
    model, losses = nn.Linear(4, 2), list[Tensor]()
    params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())

    def step(x: Tensor) -> Tensor:
        nonlocal params
        loss, grads = sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())(params)
        if kept == "a list":
            losses.append(loss)
        elif kept == "a tree":
            params = sf.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        else:
            _AROUND["average"] = loss
        return loss

    name = {"a list": "losses", "a tree": "params", "an average": "_AROUND"}[kept]
    with pytest.raises(sf.ShardError, match=rf"the step has put something into '{name}', .* Return it"):
        jit(step, backend="aot_eager")(torch.ones(3, 4))
    _AROUND.clear()


@pytest.mark.parametrize("rate", [0.1, sf.optim.warmup_cosine(0.1, warmup=2, total=8)])
def test_a_state_that_is_not_taken_counts_as_it_does_eagerly(rate: Any) -> None:
    optimizer, x = sf.optim.adamw(rate), torch.linspace(-1, 1, 24).reshape(6, 4)

    def losses(compile_: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        state = optimizer.init(params)

        def step(params: sf.Params, state: Any, x: Tensor) -> Tensor:
            loss, grads = sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())(params)
            optimizer.step(params, grads, state)
            return loss

        run = jit(step, backend="aot_eager") if compile_ else step
        return [float(run(params, state, x)) for _ in range(6)] + [float(state.step)]

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)
