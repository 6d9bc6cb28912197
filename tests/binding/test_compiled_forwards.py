"""`torch.compile` of units: one graph for all of a class, gathers outside, memory freed as ever."""

import time
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from models import decoder, policy, tokens
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.engine.runtime import runtime_of
from shardfn.layout.mesh import grid_of
from shardfn.testing import on_meshes

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Buffer(torch.ones(WIDTH))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return x + gain * self.scale * self.down(torch.tanh(self.up(self.norm(x + self.shift))))


class Breaking(Block):
    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        x = super().forward(x, gain=gain)
        torch._dynamo.graph_break()
        return torch.sin(x)


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # every layer's input needs a gradient, which a graph depends on
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, gain=0.5)
        return self.head(x)


def stack(block: type[nn.Module] = Block) -> Stack:
    torch.manual_seed(0)
    return Stack(block).double()


def batch(mesh: DeviceMesh) -> Tensor:
    generator = torch.Generator().manual_seed(sf.data.rank(mesh)[0])
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


def differentiate(model: nn.Module, params: sf.Params, x: Tensor) -> tuple[Tensor, sf.Params]:
    return sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())(params)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compile_here(model: Stack, how: str) -> sf.Policy:
    """Ask for compiled layers in one of three ways."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for index, layer in enumerate(model.layers):
        if how == "module":
            layer.compile(backend="aot_eager", fullgraph=True)
        elif how == "wrapped":
            model.layers[index] = cast(nn.Module, torch.compile(layer, backend="aot_eager", fullgraph=True))
    return sf.Policy(compile={"backend": "aot_eager", "fullgraph": True} if how == "policy" else False)


def as_without(name: str) -> str:
    return name.replace("_orig_mod.", "")


def check_steps(mesh: DeviceMesh, how: str, **fields: Any) -> None:
    """Gradients as without compile, over steps that change the weights; one graph for all layers."""
    model, eager, x = stack(), stack(), batch(mesh)
    compiled = compile_here(model, how)
    params = sf.shard(model, mesh, compiled | sf.Policy(**fields))
    plain = sf.shard(eager, mesh, sf.Policy(**fields))
    for _ in range(3):
        (loss, grads), (wanted, want) = differentiate(model, params, x), differentiate(eager, plain, x)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad.to_local(), want[as_without(name)].to_local(), rtol=1e-12, atol=1e-12)
        params = sf.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        plain = sf.tree.map(lambda p, g: p - 0.1 * g, plain, want)
    assert graphs() == 1
    with torch.no_grad():
        torch.testing.assert_close(sf.apply(model, params, x), sf.apply(eager, plain, x), rtol=1e-12, atol=1e-12)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2})
@pytest.mark.parametrize("how", ["policy", "module", "wrapped"])
def test_one_graph_for_all_layers(mesh: DeviceMesh, how: str) -> None:
    check_steps(mesh, how)


@pytest.mark.slow
@on_meshes({"fsdp": 3, "tp": 1})
@pytest.mark.parametrize("fields", [{"regather": False}, {"reduce_dtype": torch.float32}])
def test_compiled_layers_under_other_policies(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    check_steps(mesh, "policy", **fields)


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 1})
def test_inductor(mesh: DeviceMesh) -> None:
    """The default backend, whose graphs save views of weights of their own choice."""
    model, eager, x = stack(), stack(), batch(mesh)
    torch._dynamo.reset()
    params, plain = sf.shard(model, mesh, sf.Policy(compile=True)), sf.shard(eager, mesh, sf.Policy())
    (loss, grads), (wanted, want) = differentiate(model, params, x), differentiate(eager, plain, x)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.to_local(), want[name].to_local(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 1})
@pytest.mark.parametrize("how", ["policy", "module"])
def test_saved_weights_of_compiled_units_are_freed(mesh: DeviceMesh, how: str) -> None:
    model, x = stack(), batch(mesh)
    params = sf.shard(model, mesh, compile_here(model, how))
    sf.apply(model, params, x)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    tree = sf.Params(leaves, params.plan, params.mesh, params.buffers)
    out = sf.apply(model, tree, x)
    pool = runtime_of(params.plan, grid_of(mesh, params.plan.roles.storage)).pool
    largest = max(buffer.flat.numel() for buffer in pool.buffers())
    time.sleep(0.5)  # the backend may hold a buffer for a moment
    found = [buffer.free for buffer in pool.buffers() if buffer.flat.numel() == largest]
    assert found, [b.flat.numel() for b in pool.buffers()]
    assert all(found), found
    out.sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())


@on_meshes({"fsdp": 2, "tp": 1})
def test_compiled_units_inside_a_transform(mesh: DeviceMesh) -> None:
    model, eager, x = stack(), stack(), batch(mesh)
    params = sf.shard(model, mesh, compile_here(model, "policy"))
    plain = sf.shard(eager, mesh, sf.Policy())
    found = torch.func.grad(lambda y: sf.apply(model, params, y).sum())(x)
    wanted = torch.func.grad(lambda y: sf.apply(eager, plain, y).sum())(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 2})
def test_compiled_units_over_tp(mesh: DeviceMesh) -> None:
    """Linears that are split over a compute axis end a graph; what is between them is compiled."""
    model, eager = decoder(), decoder()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, _ = tokens()
    params = sf.shard(model, mesh, policy() | sf.Policy(compile={"backend": "aot_eager"}))
    plain = sf.shard(eager, mesh, policy())
    (loss, grads), (wanted, want) = (
        sf.value_and_grad(lambda p, m=m: sf.cross_entropy(sf.apply(m, p, x), x))(tree)
        for m, tree in ((model, params), (eager, plain))
    )
    assert graphs() > 0
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.to_local(), want[name].to_local(), rtol=1e-12, atol=1e-12)


@on_meshes({"fsdp": 1, "tp": 1})
def test_options_reach_the_compiler(mesh: DeviceMesh) -> None:
    """`fullgraph` makes a break an error, however it was asked for."""
    for how in ("policy", "module", "wrapped"):
        model = stack(Breaking)
        params = sf.shard(model, mesh, compile_here(model, how))
        with pytest.raises(Unsupported):
            sf.apply(model, params, batch(mesh))


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2})
@pytest.mark.parametrize("how", ["policy", "module", "wrapped"])
@pytest.mark.parametrize("first", [True, False])
def test_hooks_inside_a_unit_are_its_own(mesh: DeviceMesh, how: str, first: bool) -> None:
    """Units of one class share their graph, unless a hook waits in one of them."""
    model, eager, x = stack(), stack(), batch(mesh)
    for each in (model, eager):
        block: Any = each.layers[0 if first else 1]
        block.up.register_forward_hook(lambda module, args, out: 2 * out)
        block.register_forward_hook(lambda module, args, out: out + 1)
    params, plain = sf.shard(model, mesh, compile_here(model, how)), sf.shard(eager, mesh, sf.Policy())
    for _ in range(3):
        (loss, grads), (wanted, want) = differentiate(model, params, x), differentiate(eager, plain, x)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad.to_local(), want[as_without(name)].to_local(), rtol=1e-12, atol=1e-12)
    assert graphs() == 2


@on_meshes({"fsdp": 2})
def test_a_hook_inside_a_unit_or_of_the_unit_itself(mesh: DeviceMesh) -> None:
    """Without the other: one inside is in a graph of its unit alone, and the graph of all goes without the unit's."""
    x = batch(mesh)
    for inside, count in ((True, 2), (False, 1)):
        model, eager = stack(), stack()
        for each in (model, eager):
            block: Any = each.layers[1]
            (block.up if inside else block).register_forward_hook(lambda module, args, out: 2 * out)
        params, plain = sf.shard(model, mesh, compile_here(model, "policy")), sf.shard(eager, mesh, sf.Policy())
        found, wanted = sf.apply(model, params, x), sf.apply(eager, plain, x)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert graphs() == count


@on_meshes({"fsdp": 2})
def test_a_recurrent_unit_keeps_no_weights(mesh: DeviceMesh) -> None:
    """Dynamo leaves it as it is; its list of weights holds the gathered ones during the forward only, then its own."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.LSTM(4, 4, batch_first=True)).double()
    params = sf.shard(model, mesh, sf.Policy(units=["0"], compile={"backend": "aot_eager"}))
    zeros = sf.tree.map(lambda leaf: 0 * leaf, params)
    lists: list[Any] = []

    def note(module: Any, args: Any, out: Any) -> None:
        lists.append(list(module._flat_weights))

    model[0].register_forward_hook(note)
    assert float(sf.apply(model, zeros, torch.ones(2, 3, 4, dtype=torch.float64))[0].abs().max()) == 0
    (after,) = lists
    assert list(map(id, after)) == list(map(id, dict.values(model[0]._parameters)))


@on_meshes({"fsdp": 1, "tp": 1})
def test_a_compiled_module_that_holds_units(mesh: DeviceMesh) -> None:
    model = stack()
    params = sf.shard(model, mesh, sf.Policy())
    model.compile()
    with pytest.raises(sf.ShardError, match=r"'\(the model\)' is compiled and holds unit 'layers\.0'.*Policy\(compile"):
        sf.apply(model, params, batch(mesh))


@on_meshes({"fsdp": 1, "tp": 1})
def test_a_model_that_is_one_unit(mesh: DeviceMesh) -> None:
    """It has no unit in it, and so is compiled itself."""
    model, x = stack(), batch(mesh)
    params = sf.shard(model, mesh, sf.Policy(units=()) | compile_here(model, "policy"))
    torch.testing.assert_close(sf.apply(model, params, x), model(x))
    assert graphs() == 1


def test_wrong_options() -> None:
    with pytest.raises(TypeError, match=r"Policy\(compile=\{'mod': ...\}\): torch.compile has fullgraph"):
        sf.Policy(compile={"mod": "max-autotune"})
    with pytest.raises(TypeError, match=r"True, False, or a mapping"):
        sf.Policy(**dict[str, Any](compile="max-autotune"))


def test_a_module_that_is_compiled_between_two_calls_is_compiled() -> None:
    model, x = stack(), torch.randn(2, WIDTH, dtype=torch.float64)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy(units=[Block]))
    with torch.no_grad():
        wanted = sf.apply(model, params, x)
        model.layers[1].compile(backend=count)
        assert sf.apply(model, params, x).equal(wanted) and len(graphs) == 1
        vars(model.layers[1])["_compiled_call_impl"] = None
        torch._dynamo.reset()
        assert sf.apply(model, params, x).equal(wanted) and len(graphs) == 1
