"""What the engine does between forward and backward: overlap, errors, one order, memory that is used again."""

import dataclasses
import gc
import pickle
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import decoder, policy, tokens
from ranks import in_place
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.comm import flat_memory
from shardfn.engine import reductions, runtime
from shardfn.engine.runtime import runtime_of
from shardfn.layout.mesh import grid_of
from shardfn.testing import assert_parity, count_collectives, on_meshes, run, run_raises

WIDTH = 6


class Stack(nn.Module):
    """Layers that can be run in any order, with a bomb in any of them, forward or backward."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, way: Any = None, bomb: tuple[str, int] | None = None) -> Tensor:
        for place, index in enumerate(range(len(self.layers)) if way is None else way):
            x = torch.tanh(self.layers[index](x))
            if bomb == ("forward", place):
                raise ArithmeticError("bomb")
            if bomb == ("backward", place):
                x = _Bomb.apply(x)
        return self.head(x)


class _Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("bomb")


def eventually(holds: Callable[[], bool]) -> bool:
    """The backend may hold a buffer for a moment after its work is done."""
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def unwrap(tensor: Any) -> Tensor:
    return tensor.to_local().detach()


def shared_by_calls(params: sf.Params) -> Any:
    return runtime_of(params.plan, grid_of(params.mesh, params.plan.roles.storage))


def make(mesh: DeviceMesh, **fields: Any) -> tuple[Stack, sf.Params, Any, Tensor]:
    torch.manual_seed(0)
    model = Stack().double()
    params = sf.shard(model, mesh, sf.Policy(**fields))
    step = sf.value_and_grad(lambda p, x, *rest: sf.apply(model, p, x, *rest).square().mean())
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(sf.data.rank(mesh)[0]))
    return model, params, step, x


def same(a: sf.Params, b: sf.Params) -> None:
    for name, leaf in sf.gather(a).items():
        torch.testing.assert_close(leaf, sf.gather(b)[name], rtol=1e-12, atol=1e-14)


def decoder_on_a_rank(axes: dict[str, int], message: int) -> None:
    mesh = sf.make_mesh("cpu", **axes)
    model, batch = decoder(), sf.data.local_batch(tokens(), mesh)
    differentiate = sf.value_and_grad(lambda p, x, y: sf.cross_entropy(sf.apply(model, p, x), y))
    params = sf.shard(model, mesh, policy())
    expected = differentiate(params, *batch)
    in_place(message)
    try:
        params = sf.shard(model, mesh, policy())  # a plan of its own, which decides anew how things travel
        for _ in range(3):
            with count_collectives() as counts:
                loss, grads = differentiate(params, *batch)
            torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0)
            assert counts.send > 0
            same(grads, expected[1])
    finally:
        in_place(None)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"fsdp": 2, "tp": 1}, 0),
        ({"fsdp": 3, "tp": 1}, 200),
        ({"fsdp": 2, "tp": 2}, 200),
        ({"replicate": 2, "fsdp": 2, "tp": 1}, 0),
    ],
)
def test_gradients_are_those_of_collectives_when_leaves_travel_in_place(axes: dict[str, int], message: int) -> None:
    ranks = 1
    for size in axes.values():
        ranks *= size
    run(decoder_on_a_rank, axes, message, ranks=ranks)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2}, {"replicate": 2, "fsdp": 2})
@pytest.mark.parametrize("regather", [True, False])
def test_an_exception_leaves_nothing_behind(mesh: DeviceMesh, regather: bool) -> None:
    _, params, step, x = make(mesh, regather=regather)
    expected = step(params, x)
    runtime = shared_by_calls(params)
    for kind in ("forward", "backward"):
        for place in range(4):
            with pytest.raises(ArithmeticError, match="bomb"):
                step(params, x, None, (kind, place))
            if kind == "forward":
                assert not runtime.in_flight
            for _ in range(2):
                loss, grads = step(params, x)
                assert not runtime.in_flight
                assert float(loss) == float(expected[0])
                same(grads, expected[1])


@on_meshes({"fsdp": 4}, {"replicate": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2})
def test_a_part_kept_over_neighbours(mesh: DeviceMesh) -> None:
    _, params, step, x = make(mesh)
    expected = step(params, x)
    _, params, step, x = make(mesh, regather=2)
    gathers = []
    for _ in range(3):
        with count_collectives() as counts:
            loss, grads = step(params, x)
        assert float(loss) == float(expected[0])
        same(grads, expected[1])
        gathers.append(counts.all_gather)
    assert gathers[-1] == 8, "five units, and three again: the first layer's weight is not needed"


@on_meshes({"fsdp": 4})
def test_neighbours_send_each_other_halves(mesh: DeviceMesh) -> None:
    sent = {}
    for regather in (True, 2):
        _, params, step, x = make(mesh, regather=regather)
        step(params, x)
        with count_collectives() as counts:
            step(params, x)
        sent[regather] = counts.bytes_of["all_gather"]
    assert sent[2] > sent[True], "and four ranks quarters"


@on_meshes({"fsdp": 4}, timeout=20)
def test_neighbours_whatever_groups_there_are(mesh: DeviceMesh) -> None:
    dist.new_group([1, 2])  # torch counts one more on two of the four ranks, and would name the next group by that
    _, params, step, x = make(mesh, regather=2)
    _, want, same_step, _ = make(mesh)
    assert float(step(params, x)[0]) == float(same_step(want, x)[0])


@on_meshes({"fsdp": 2})
def test_any_order_that_all_ranks_share(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    full = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ways = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2], [0, 0, 1, 1], [2], [0, 1, 2, 3], [0, 1, 2, 3]]
    for way in ways:
        _, grads = step(params, x, way)
        out = torch.func.functional_call(model, full, (x, way)).square().mean()
        wanted = torch.autograd.grad(out, list(full.values()), allow_unused=True)
        for name, grad in zip(full, wanted, strict=True):
            mine = torch.zeros_like(full[name]) if grad is None else grad
            torch.testing.assert_close(
                sf.gather(grads)[name], sf.collectives.pmean(mine, mesh, "fsdp"), rtol=1e-12, atol=1e-14
            )


@on_meshes({"fsdp": 2})
def test_what_a_hook_reads_in_a_backward_is_freed_after_it(mesh: DeviceMesh) -> None:
    """Weights of a unit that has no gradients, whose arrival frees those of others; the graph is kept."""
    frozen = nn.Linear(WIDTH, WIDTH)
    frozen.requires_grad_(False)
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in (nn.Linear(WIDTH, WIDTH), frozen)))
    model.append(nn.Linear(WIDTH, WIDTH))
    sums = []
    frozen.register_full_backward_hook(lambda module, into, out: sums.append(float(frozen.weight.sum())))
    params = sf.shard(model, mesh, sf.Policy(units=["0", "1", "2"]))
    trained = sf.tree.map(lambda leaf: leaf.detach(), params)
    for name, leaf in trained.items():
        leaf.requires_grad_(not name.startswith("1."))
    loss = sf.apply(model, trained, torch.randn(3, WIDTH)).square().mean()
    loss.backward(retain_graph=True)
    torch.testing.assert_close(sums, [float(frozen.weight.sum())])
    buffers = shared_by_calls(params).pool.buffers
    assert eventually(lambda: all(buffer.free for buffer in buffers()))
    assert loss.requires_grad


def agreements_on_a_rank() -> list[int]:
    """How often the ranks met at the store, in each of some steps and evaluations."""
    mesh = sf.make_mesh("cpu", fsdp=2)
    model, params, step, x = make(mesh)
    asked = shared_by_calls(params).order
    seen = []
    for _ in range(4):
        step(params, x)
        with torch.no_grad():
            sf.apply(model, params, x)
        seen.append(asked.asked)
    return seen


def test_a_known_order_is_not_asked_for() -> None:
    for seen in run(agreements_on_a_rank, ranks=2):
        assert seen[0] > 0 and len(set(seen)) == 1


def another_order_on_a_rank(learnt: str, ways: list[list[int]]) -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    runtime.__dict__["_PATIENCE"] = 2.0
    _, params, step, x = make(mesh)
    for way in {"nothing": [], "one way": [None] * 3, "both ways": [*ways, *ways]}[learnt]:
        step(params, x, way)
    step(params, x, ways[dist.get_rank()])


@pytest.mark.everyday(2)
@pytest.mark.parametrize("learnt", ["nothing", "one way", "both ways"])
@pytest.mark.parametrize(
    ("ways", "match"),
    [
        ([[0, 1, 2, 3], [1, 0, 2, 3]], r"rank \d is about to gather 'layers.\d'"),
        ([[0, 1, 2, 3], [0, 1, 3, 2]], r"rank \d is about to gather"),
        ([[0, 1, 2, 3], [0, 1, 2]], r"rank \d is about to"),
    ],
)
def test_another_order_on_one_rank_is_an_error_on_all(learnt: str, ways: list[list[int]], match: str) -> None:
    # Where one way is known, only the rank that takes another one asks, and waits in vain.
    both = "" if learnt == "one way" else r".*, rank \d is about to"
    run_raises(sf.ShardError, another_order_on_a_rank, learnt, ways, ranks=2, match=match + both)


@on_meshes({"fsdp": 2})
def test_gradients_of_a_bucket_used_in_several_calls_add_up(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    twice = sf.value_and_grad(lambda p, x: sum(sf.apply(model, p, x).square().mean() for _ in range(3)))
    loss, grads = step(params, x)
    for _ in range(2):
        more, tripled = twice(params, x)
        torch.testing.assert_close(more, 3 * loss)
        same(tripled, sf.tree.map(lambda g: 3 * g, grads))


@on_meshes({"fsdp": 2})
def test_a_penalty_on_the_shards_adds_to_what_the_engine_reduced(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    _, grads = step(params, x)

    def with_penalty(p: Any, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean() + sum(w.square().sum().full_tensor() for w in p.values())

    _, more = sf.value_and_grad(with_penalty)(params, x)
    same(more, sf.tree.map(lambda g, w: g + 2 * w, grads, params))


@on_meshes({"fsdp": 2})
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_loss_that_differentiates_gets_its_gradients(mesh: DeviceMesh, create_graph: bool) -> None:
    model, params, step, x = make(mesh)
    _, expected = step(params, x)
    inner: list[Tensor] = []

    def with_inner(p: Any, x: Tensor) -> Tensor:
        loss = sf.apply(model, p, x).square().mean()
        again = sf.apply(model, p, x).square().mean()
        inner[:] = torch.autograd.grad(again, list(p.values()), create_graph=create_graph)
        return loss

    for _ in range(2):
        _, grads = sf.value_and_grad(with_inner)(params, x)
        same(grads, expected)
        same(params.like(zip(params, (g.detach() for g in inner), strict=True)), expected)


def working(params: sf.Params) -> sf.Params:
    """The same tree, with leaves that ask for `.grad`."""
    return sf.tree.map(lambda leaf: leaf.detach().requires_grad_(), params)


@on_meshes({"fsdp": 2}, {"replicate": 2, "fsdp": 2})
def test_backward_adds_to_grad_while_it_goes_on(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    _, want = step(params, x)
    tree = working(params)
    in_flight: list[int] = []
    reduce = reductions.Reductions.reduce

    def noted(self: Any, *args: Any) -> None:
        in_flight.append(len(self._in_flight))
        reduce(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions.Reductions, "reduce", noted)
        for times in (1, 2):
            sf.apply(model, tree, x).square().mean().backward()
            for name, leaf in tree.items():
                assert leaf.grad is not None and leaf.grad.placements == leaf.placements
                torch.testing.assert_close(unwrap(leaf.grad), times * unwrap(want[name]), rtol=1e-12, atol=1e-12)
    assert len(in_flight) == 10 and max(in_flight) >= 1
    assert not shared_by_calls(params).accumulations


@on_meshes({"fsdp": 2})
def test_who_waits_for_a_gradient_gets_it_at_once(mesh: DeviceMesh) -> None:
    """A hook of a leaf, `inputs=`, `autograd.grad`, and a leaf that another tensor was made of."""
    model, params, step, x = make(mesh)
    _, want = step(params, x)

    def loss(tree: sf.Params) -> Tensor:
        return sf.apply(model, tree, x).square().mean()

    def check(name: str, found: Tensor | None) -> None:
        assert found is not None
        torch.testing.assert_close(unwrap(found), unwrap(want[name]), rtol=1e-12, atol=1e-12)

    tree, seen = working(params), []
    tree["layers.1.weight"].register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    tree["layers.2.bias"].register_hook(lambda grad: 2 * grad)
    loss(tree).backward()
    assert len(seen) == 1
    check("layers.1.weight", seen[0])
    check("layers.2.bias", tree["layers.2.bias"].grad / 2)
    check("layers.2.weight", tree["layers.2.weight"].grad)
    check("layers.0.weight", tree["layers.0.weight"].grad)

    tree = working(params)
    loss(tree).backward(inputs=[tree["layers.1.weight"], tree["head.bias"]])
    assert [name for name, leaf in tree.items() if leaf.grad is not None] == ["layers.1.weight", "head.bias"]
    check("layers.1.weight", tree["layers.1.weight"].grad)
    (found,) = torch.autograd.grad(loss(tree), [tree["layers.3.weight"]])
    check("layers.3.weight", found)

    tree = working(params)
    loss(sf.tree.map(lambda leaf: 1.0 * leaf, tree)).backward()
    check("layers.0.bias", tree["layers.0.bias"].grad)


@on_meshes({"fsdp": 2})
def test_a_backward_that_failed_can_be_run_again(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    _, want = step(params, x)
    tree, bombs = working(params), [True]

    def fails_once(grad: Tensor) -> None:
        if bombs and bombs.pop():
            raise ArithmeticError("bomb")

    hook = model.layers[1].register_forward_hook(lambda module, args, out: out.register_hook(fails_once) and None)
    loss = sf.apply(model, tree, x).square().mean()
    hook.remove()
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    loss.backward()
    for name, leaf in tree.items():
        torch.testing.assert_close(unwrap(leaf.grad), unwrap(want[name]), rtol=1e-12, atol=1e-12)


@on_meshes({"fsdp": 2})
def test_grad_that_lies_elsewhere(mesh: DeviceMesh) -> None:
    """A loss on the DTensors leaves a replicated `.grad`; a leaf that is replaced meanwhile keeps its own."""
    model, params, step, x = make(mesh)
    _, want = step(params, x)
    tree = working(params)
    loss = sf.apply(model, tree, x).square().mean() + tree["layers.1.weight"].sum().full_tensor()
    before = tree["layers.0.weight"]
    tree["layers.0.weight"] = before.detach().requires_grad_()
    loss.backward()
    found = tree["layers.1.weight"].grad
    assert found is not None and found.placements == params["layers.1.weight"].placements
    torch.testing.assert_close(unwrap(found), unwrap(want["layers.1.weight"]) + 1, rtol=1e-12, atol=1e-12)
    assert tree["layers.0.weight"].grad is None and before.grad is not None


@on_meshes({"fsdp": 2})
def test_an_exception_in_a_backward_leaves_grad_alone(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    _, want = step(params, x)
    tree = working(params)
    with pytest.raises(ArithmeticError):
        sf.apply(model, tree, x, None, ("backward", 1)).square().mean().backward()
    assert all(leaf.grad is None for leaf in tree.values())
    sf.apply(model, tree, x).square().mean().backward()
    assert not shared_by_calls(params).accumulations
    for name, leaf in tree.items():
        torch.testing.assert_close(unwrap(leaf.grad), unwrap(want[name]), rtol=1e-12, atol=1e-12)


@on_meshes({"fsdp": 2})
def test_frozen_units_are_let_go_when_the_backward_is_over(mesh: DeviceMesh) -> None:
    """No gradient of theirs ever arrives; the graph stays, and would keep what was gathered again for it."""
    model, _, _, x = make(mesh)
    for layer in model.layers:
        layer.requires_grad_(False)
    params = sf.shard(model, mesh, sf.Policy())
    x.requires_grad_()
    loss = sf.apply(model, params, x).square().mean()
    loss.backward(retain_graph=True)
    whole = WIDTH * WIDTH + 2  # a weight of 36, and a bias from the next multiple of 64 bytes on
    assert eventually(lambda: all(b.free for b in shared_by_calls(params).pool.buffers() if b.flat.numel() >= whole))
    assert x.grad is not None and loss.requires_grad


@on_meshes({"fsdp": 2})
def test_hooks_of_a_user_and_retained_graphs(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    _, expected = step(params, x)
    seen: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        seen.append(saved.numel())
        return saved.clone()

    def hooked(p: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            return sf.apply(model, p, x).square().mean()

    same(sf.value_and_grad(hooked)(params, x)[1], expected)
    assert seen, "the hooks around apply see what is saved outside of it"
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    tree = params.like(leaves)
    loss = sf.apply(model, tree, x).square().mean()
    for retain in (True, True, False):
        grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=retain)
        same(params.like(zip(leaves, grads, strict=True)), expected)


def through_checkpoint(model: Stack, kind: str, reentrant: bool) -> Any:
    def call(p: Any, x: Tensor) -> Tensor:
        if kind == "around":
            out = checkpoint(lambda x: sf.apply(model, p, x), x, use_reentrant=False)
        else:
            out = sf.apply(_Checkpointed(model, kind, reentrant), p, x)
        assert isinstance(out, Tensor)
        return out.square().mean()

    return call


class _Checkpointed(nn.Module):
    """The same names as Stack, with checkpoints around each unit, across two, or inside."""

    def __init__(self, model: Stack, kind: str, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.head, self.kind, self.reentrant = model.layers, model.head, kind, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        layers = list(self.layers)
        if self.kind == "unit":
            for layer in layers:
                x = self._kept(lambda x, layer=layer: torch.tanh(layer(x)), x)
        else:
            for a, b in zip(layers[::2], layers[1::2], strict=True):
                x = self._kept(lambda x, a=a, b=b: torch.tanh(b(torch.tanh(a(x)))), x)
        return self.head(x)

    def _kept(self, fn: Any, x: Tensor) -> Tensor:
        out = checkpoint(fn, x, use_reentrant=self.reentrant)
        assert isinstance(out, Tensor)
        return out


@on_meshes({"fsdp": 2})
@pytest.mark.parametrize(("kind", "reentrant"), [("unit", False), ("across", False), ("around", False)])
def test_checkpoints_of_units(mesh: DeviceMesh, kind: str, reentrant: bool) -> None:
    model, params, step, x = make(mesh)
    _, expected = step(params, x)
    checkpointed = sf.value_and_grad(through_checkpoint(model, kind, reentrant))
    for _ in range(3):
        with count_collectives() as counts:
            _, grads = checkpointed(params, x)
        same(grads, expected)
        assert counts.all_gather <= 2 * 4 + 4, "each unit once in the forward and once in the backward"


@on_meshes({"fsdp": 2})
def test_autocast_and_views(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks.children():
                weight = block.weight
                assert isinstance(weight, Tensor)
                x = x @ weight.t()[:, : WIDTH // 2] @ weight[1 : 1 + WIDTH // 2] + x * weight.diagonal()
            return x

    model = Transposed()
    params = sf.shard(model, mesh, sf.Policy())
    full = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).float().square().mean())(params, x)
            out = torch.func.functional_call(model, full, (x,)).float().square().mean()
        wanted = torch.autograd.grad(out, list(full.values()))
        assert_parity(dict(sf.gather(grads)), dict(zip(full, wanted, strict=True)))
        torch.testing.assert_close(loss, out.detach())


@on_meshes({"fsdp": 2})
def test_no_grad_gathers_once_and_keeps_nothing(mesh: DeviceMesh) -> None:
    model, params, _, x = make(mesh)
    with torch.no_grad():
        for _ in range(3):
            with count_collectives() as counts:
                out = sf.apply(model, params, x)
            torch.testing.assert_close(out, model(x), rtol=1e-12, atol=0)
            assert counts.all_gather <= 5 + 2
    runtime = shared_by_calls(params)
    gc.collect()
    assert all(buffer.free for buffer in runtime.pool.buffers())


@on_meshes({"fsdp": 2})
def test_memory_is_used_again_and_a_kept_weight_keeps_its_values(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    kept: list[Tensor] = []

    def keep(module: nn.Module, _: Any, out: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        kept.append(module.weight.detach())

    hook = model.get_submodule("layers.1").register_forward_hook(keep)
    expected = step(params, x)
    before = kept[0].clone()
    hook.remove()
    runtime = shared_by_calls(params)
    pool = runtime.pool
    sizes = []
    for _ in range(6):
        _, grads = step(params, x)
        same(grads, expected[1])
        sizes.append(len(pool.buffers()))
    assert sizes[5] <= sizes[2] + 2, f"new buffers every step: {sizes}"
    assert torch.equal(kept[0], before)


class Complex(nn.Module):
    """Saves views of a weight in another dtype, and one whose sign is turned when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.children():
            weight = block.weight
            assert isinstance(weight, Tensor)
            turned = torch.view_as_complex(weight)
            x = (x * turned).real + x * turned.conj().imag
        return x


@on_meshes({"fsdp": 2})
def test_saved_views_in_another_dtype(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Complex().double()
    full = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    out = torch.func.functional_call(model, full, (x,)).square().mean()
    wanted = dict(zip(full, torch.autograd.grad(out, list(full.values())), strict=True))
    for regather in (True, False):
        params = sf.shard(model, mesh, sf.Policy(regather=regather))
        _, grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, x)
        assert_parity(dict(sf.gather(grads)), wanted)


class Shared(nn.Module):
    """One unit used twice in a row, and nothing before it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x).tanh()).tanh()


@on_meshes({"fsdp": 2})
def test_a_unit_used_twice_in_a_row(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Shared()
    params = sf.shard(model, mesh, sf.Policy(units=["block"]))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5), requires_grad=True)
    step = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())
    _, expected = step(params, x)
    for _ in range(2):
        same(step(params, x)[1], expected)


@on_meshes({"fsdp": 1})
def test_reused_copies_follow_the_model(mesh: DeviceMesh) -> None:
    model, params, _, x = make(mesh)
    for factor in (2.0, 3.0, 4.0, 5.0):

        def patched(self: Any, x: Tensor, factor: float = factor) -> Tensor:
            return factor * x

        model.head.forward = MethodType(patched, model.head)
        assert torch.equal(sf.apply(model, params, x), model(x))
        del model.head.__dict__["forward"]
        torch.testing.assert_close(sf.apply(model, params, x), model(x))


class Configurable(nn.Module):
    """A forward that follows everything that can be changed on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop, self.power, self.steps, self.plus = nn.Dropout(0.5), 1.0, [0, 1], 100.0
        self.shift, self.minus = nn.Buffer(torch.zeros(WIDTH)), 0.0
        del self.minus

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = self.layers[step](x) ** self.power + self.shift
        x = x - self.minus if hasattr(self, "minus") else x
        return self.drop(self.scaled(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x


class Reconfigured(Configurable):
    """Another helper under the same forward."""

    def scaled(self, x: Tensor) -> Tensor:
        return 3 * x


CHANGES: dict[str, Any] = {
    "an attribute": lambda model: setattr(model, "power", 2.0),
    "a list": lambda model: setattr(model, "steps", [2, 0]),
    "the mode": lambda model: model.eval(),
    "an attribute of a torch module": lambda model: setattr(model.drop, "p", 0.0),
    "a child": lambda model: setattr(model, "drop", nn.Identity()),
    "a hook": lambda model: model.layers[1].register_forward_hook(lambda module, args, out: 2 * out),
    "a name": lambda model: (delattr(model, "plus"), setattr(model, "minus", 100.0)),
    "a class": lambda model: setattr(model, "__class__", Reconfigured),
    "another method": lambda model: setattr(model.drop, "forward", torch.tanh),
    "an activation": lambda model: setattr(model, "drop", nn.GELU()),
}


@pytest.mark.everyday(10)
@on_meshes({"fsdp": 1})
@pytest.mark.parametrize("change", list(CHANGES))
def test_every_change_of_a_model_is_followed(mesh: DeviceMesh, change: str) -> None:
    """Copies that serve again are those of the model as it is."""
    model = Configurable()
    params, x = sf.shard(model, mesh, sf.Policy()), torch.randn(4, WIDTH)
    for _ in range(3):
        sf.apply(model, params, x)
    CHANGES[change](model)
    torch.manual_seed(3)
    out = sf.apply(model, params, x)
    torch.manual_seed(3)
    torch.testing.assert_close(out, model(x))


class Assigning(nn.Module):
    """Changes its own modules in every way that a forward may."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.LeakyReLU(0.1), nn.Linear(WIDTH, WIDTH)
        self.first: Any = True
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if hasattr(self, "first"):
            del self.first
        elif isinstance(self.act, nn.LeakyReLU) and self.act.negative_slope < 0.3:
            self.act.negative_slope += 0.1
        else:
            self.act = nn.Tanh()
        return self.act(self.linear(x))


@on_meshes({"fsdp": 1})
def test_what_a_forward_changes_stays_changed(mesh: DeviceMesh) -> None:
    model, plain = Assigning(), Assigning()
    plain.load_state_dict(model.state_dict())
    params, x = sf.shard(model, mesh, sf.Policy()), torch.randn(4, WIDTH)
    for _ in range(6):
        torch.testing.assert_close(sf.apply(model, params, x), plain(x))
    assert isinstance(model.act, nn.Tanh) and model.calls == 6 and not hasattr(model, "first")


class Peeking(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) @ self.layers[1].weight


@on_meshes({"fsdp": 2})
def test_a_unit_that_is_not_called_is_let_go_at_the_end(mesh: DeviceMesh) -> None:
    model = Peeking()
    params = sf.shard(model, mesh, sf.Policy(units=["layers.*"]))
    loss = sf.apply(model, working(params), torch.randn(4, WIDTH)).sum()
    assert loss.requires_grad
    assert eventually(lambda: all(buffer.free for buffer in shared_by_calls(params).pool.buffers()))


@on_meshes({"fsdp": 2}, {"fsdp": 1, "tp": 2})
def test_a_plan_stays_plain_data(mesh: DeviceMesh) -> None:
    model, params, step, x = make(mesh)
    again = sf.shard(model, mesh, params.plan.policy).plan
    before = pickle.dumps(params.plan)
    for _ in range(3):
        _, grads = step(params, x)
        params = sf.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    for plan in (params.plan, params.plan.with_reduction("sum")):
        assert not hasattr(plan, "__dict__")
        assert plan == again and hash(plan) == hash(again)
        assert pickle.loads(pickle.dumps(plan)) == plan
    assert len(pickle.dumps(params.plan)) == len(before)
    assert params.plan.with_reduction("sum").with_reduction("mean") is params.plan
    fields = [field.name for field in dataclasses.fields(params.plan)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(params.plan, next(iter(fields)), "sum")


@on_meshes({"fsdp": 1})
def test_copies_of_a_model_go_with_it(mesh: DeviceMesh) -> None:
    model, params, _, x = make(mesh)
    for _ in range(3):
        sf.apply(Stack().double(), params, x)
        sf.apply(model, params, x)
    gc.collect()
    places = grid_of(params.mesh, params.plan.roles.storage)
    assert list(params.plan.home.once(("models", places), dict)) == [id(model)]


def growth_on_a_rank() -> int:
    """Bytes of the pool after many steps."""
    mesh = sf.make_mesh("cpu", fsdp=2)
    _, params, step, x = make(mesh)
    optimizer = sf.optim.adamw(1e-3)
    state = optimizer.init(params)
    runtime = shared_by_calls(params)
    pool = runtime.pool
    sizes = []
    for _ in range(40):
        _, grads = step(params, x)
        params, state = optimizer.step(params, grads, state)
        sizes.append(sum(buffer.storage.nbytes() for buffer in pool.buffers()))
    # the backend may hold a buffer for a moment after its work is done, and another one is made then
    assert sorted(sizes[20:])[10] <= sorted(sizes[:20])[10], sizes
    assert max(sizes) <= 3 * min(sizes), sizes
    return sizes[-1]


def test_the_pool_does_not_grow() -> None:
    run(growth_on_a_rank, ranks=2)


@pytest.mark.parametrize("chosen", [sf.policies.ddp(), sf.Policy()], ids=["ddp", "fsdp"])
@on_meshes({"fsdp": 1}, {"fsdp": 2})
def test_weights_that_are_the_shards_themselves_count_changes(mesh: DeviceMesh, chosen: sf.Policy) -> None:
    """An operation on a DTensor leaves no trace in its local part, and hooks of autograd none of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)])[0], nn.Tanh(), nn.Linear(4, 4))
    trainer, x = sf.Trainer(model, mesh, chosen), torch.ones(2, 4)
    out = trainer(x).square().mean()
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(2)
    if mesh.size() == 1 or chosen.default == "replicate":
        with pytest.raises(RuntimeError, match="modified by an inplace operation: a weight of shape"):
            out.backward()


@on_meshes({"fsdp": 2})
def test_activations_count_changes(mesh: DeviceMesh) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            y = self.layers[1](x)
            x.mul_(2)
            return y

    torch.manual_seed(0)
    out = sf.Trainer(Writes(), mesh)(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
        out.sum().backward()


@pytest.mark.parametrize("chosen", [sf.policies.ddp(), sf.Policy()], ids=["ddp", "fsdp"])
@on_meshes({"fsdp": 2})
def test_a_forward_without_a_backward_leaves_nothing(mesh: DeviceMesh, chosen: sf.Policy) -> None:
    def forward() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Sigmoid())
        sf.Trainer(model, mesh, chosen)(torch.ones(19, 5)).exp().sum()

    forward()
    gc.collect()
    shapes = [tuple(x.shape) for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    assert not [shape for shape in shapes if shape in ((19, 5), (5, 5))]


# What a warm step may do; see "What a step looks up" in docs/design.md. These may only fall.
OBJECTS = 32  # a unit, between forward and backward
CALLS, SWITCHES, MEMORY = 384, 203, 4


@on_meshes({"fsdp": 2})
def test_a_warm_step_makes_few_calls(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    params = sf.shard(model, mesh, sf.Policy(units=["*"]))
    step, x = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().sum()), torch.randn(4, 8)
    files: list[str] = []
    made: list[int] = []
    counts: list[tuple[int, int, int]] = []
    apart = flat_memory.apart

    def counting(numel: int, *args: Any, **kwargs: Any) -> Tensor:
        made.append(numel)
        return apart(numel, *args, **kwargs)

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "shardfn" in frame.f_code.co_filename:
            files.append(frame.f_code.co_filename)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_memory, "apart", counting)
        for _ in range(9):
            files.clear()
            made.clear()
            sys.setprofile(note)
            try:
                step(params, x)
            finally:
                sys.setprofile(None)
            counts.append((len(files), sum(a != b for a, b in pairwise(files)), len(made)))
    # The least of each: on a busy machine a buffer is free a little later, and another one is made.
    calls, switches, memory = map(min, zip(*counts[3:], strict=True))
    assert calls <= CALLS and switches <= SWITCHES and memory <= MEMORY, counts


@on_meshes({"fsdp": 2})
def test_a_forward_keeps_few_objects_for_its_backward(mesh: DeviceMesh) -> None:
    """Python's collector follows each until the backward: of a saved tensor, that alone."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), *(nn.Tanh() for _ in range(8))) for _ in range(8)))
    params = sf.shard(model, mesh, sf.Policy(units=["*"]))
    kept: list[float] = []

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        gc.collect()
        before = len(gc.get_objects())
        out = sf.apply(model, p, x)
        kept.append((len(gc.get_objects()) - before) / len(model))
        return out.square().sum()

    for _ in range(4):
        sf.value_and_grad(loss)(params, torch.randn(4, 8))
    assert kept[-1] <= OBJECTS, kept


@on_meshes({"fsdp": 2})
def test_two_trees_of_one_plan_in_turn(mesh: DeviceMesh) -> None:
    """What a gather remembers of where shards lie is asked for again."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    one = sf.shard(model, mesh, sf.Policy())
    other, _ = sf.optim.clip(one, 0.5 * float(sf.optim.global_norm(one)))  # its shards lie side by side, too
    for _ in range(3):
        out, halved = (sf.apply(model, tree, x) for tree in (one, other))
        torch.testing.assert_close(2 * halved, out, rtol=1e-4, atol=1e-4)
