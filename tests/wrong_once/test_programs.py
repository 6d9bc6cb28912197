"""What random programs found that is nobody's alone: each was a wrong number, a crash or an error that said nothing."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes


class MLP(nn.Module):
    """`f` hidden features, split over tp."""

    def __init__(self, f: int = 16) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, f), nn.RMSNorm(8), nn.Linear(f, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


RULES = {"up.weight": "f@tp c@fsdp", "down.weight": "c@fsdp f@tp"}
X = torch.randn(8, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def mlp(f: int = 16) -> MLP:
    torch.manual_seed(0)
    return MLP(f).double()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def square(tree: Any) -> Tensor:
    """Of the norm of a whole tree."""
    return torch.stack([x.square().sum() for x in tree.values()]).sum()


@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, timeout=60)
def test_norms_are_differentiated_where_a_part_is_empty_or_zero(mesh: DeviceMesh) -> None:
    """Six rows are 2, 2, 2 and 0: the fourth rank's norm depended on nothing, and the others waited in the backward.

    The second derivative of a square at zero is 2; that of the square of a norm was 0.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    nn.init.zeros_(model.get_parameter("0.bias"))
    rules = {"0.weight": "f@tp c", "0.bias": "f@tp", "2.weight": "c f@tp"} if mesh.size(1) > 1 else {}
    params, whole, norm = sf.shard(model, mesh, sf.Policy(rules=rules)), weights(model), sf.optim.global_norm
    batch = X[:, 0, :6]
    (x,) = sf.data.local_batch((batch,), mesh)

    def loss(p: sf.Params) -> Tensor:
        return (sf.apply(model, p, x) - x).square().mean()

    def plain(p: dict[str, Tensor]) -> Tensor:
        return (functional_call(model, p, (batch,)) - batch).square().mean()

    def penalized(p: sf.Params) -> Tensor:
        value, grads = sf.value_and_grad(loss)(p)
        return value + norm(grads).square()

    def clipped(p: sf.Params) -> Tensor:
        grads, size = sf.optim.clip(sf.grad(loss)(p), 0.1)
        return loss(sf.tree.map(torch.sub, p, grads)) + size

    def plain_clipped(p: dict[str, Tensor]) -> Tensor:
        grads = torch.func.grad(plain)(p)
        size = square(grads).sqrt()
        return plain({name: p[name] - 0.1 / (size + 1e-6) * grads[name] for name in p}) + size

    ones, along = sf.tree.map(torch.ones_like, params), {name: torch.ones_like(w) for name, w in whole.items()}
    programs: list[tuple[Any, Any]] = [
        (lambda p: norm(sf.grad(loss)(p)).square(), lambda p: square(torch.func.grad(plain)(p))),
        (penalized, lambda p: plain(p) + square(torch.func.grad(plain)(p))),
        (lambda p: loss(p) + norm(p).square(), lambda p: plain(p) + square(p)),
        (lambda p: norm(p.select("0.*")), lambda p: square({n: p[n] for n in ("0.weight", "0.bias")}).sqrt()),
        (clipped, plain_clipped),
    ]
    for ours, theirs in programs:
        gradient = torch.func.grad(theirs)
        assert_parity(sf.gather(sf.grad(ours)(params)), gradient(whole), tol=1e-11)
        product = torch.func.jvp(gradient, (whole,), (along,))[1]
        assert_parity(sf.gather(sf.hvp(ours, (params,), ones)), product, tol=1e-11)
        slope = sf.collectives.pmean(sf.jvp(ours, (params,), (ones,))[1], mesh, "fsdp")
        assert_parity(slope, torch.func.jvp(theirs, (whole,), (along,))[1], tol=1e-11)


@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_tree_functions_leave_padding_zero(mesh: DeviceMesh) -> None:
    """A cosine of zero is one: modules would compute with features that are not there, and norms would count them."""
    model = mlp(6)
    params = sf.shard(model, mesh, sf.Policy(rules=RULES, pad={"f": 4}))
    (x,) = sf.data.local_batch((X,), mesh)
    cosines = {name: w.cos() for name, w in weights(model).items()}
    mapped = sf.tree.map(torch.cos, params)
    assert_parity(sf.apply(model, mapped, x), functional_call(model, cosines, (x,)), tol=1e-12)
    square = torch.stack([w.square().sum() for w in cosines.values()]).sum()
    assert_parity(sf.tree.dot(mapped, mapped), square, tol=1e-12)

    def loss(p: sf.Params) -> Tensor:
        return sf.apply(model, sf.tree.map(torch.cos, p), x).square().mean()

    def plain(p: dict[str, Tensor]) -> Tensor:
        return functional_call(model, {name: w.cos() for name, w in p.items()}, (X,)).square().mean()

    assert_parity(sf.gather(sf.grad(loss)(params)), torch.func.grad(plain)(weights(model)), tol=1e-10)
    stacked = sf.tree.map(lambda w: torch.stack([w.cos(), w.sin()]), params)
    products = sf.vmap(lambda v, p: sf.hvp(loss, (p,), v), in_dims=(0, None))(stacked, params)
    assert_parity(
        sf.gather(products)["up.weight"][0], sf.gather(sf.hvp(loss, (params,), mapped))["up.weight"], tol=1e-9
    )


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 2, "tp": 2})
def test_a_direction_of_a_frozen_leaf_of_a_unit_with_a_plain_input(mesh: DeviceMesh) -> None:
    """The direction is a derivative around the gradient, which is not by that leaf."""
    model = nn.Sequential(mlp(), nn.Linear(8, 8).double())
    model[0].up.requires_grad_(False)
    rules = {f"0.{name}": rule for name, rule in RULES.items()}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, units=["0"]))
    (x,) = sf.data.local_batch((X,), mesh)
    found = sf.hvp(lambda p: sf.apply(model, p, x).square().mean(), (params,), sf.tree.map(torch.cos, params))
    whole = weights(model)

    def gradient(p: dict[str, Tensor]) -> dict[str, Tensor]:
        return torch.func.grad(lambda q: functional_call(model, q, (X,)).square().mean())(p)

    _, product, *_ = torch.func.jvp(gradient, (whole,), ({name: w.cos() for name, w in whole.items()},))
    trained = {name: product[name] for name, p in model.named_parameters() if p.requires_grad}
    assert_parity({name: each for name, each in sf.gather(found).items() if name in trained}, trained, tol=1e-11)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 8) / 3), nn.Parameter(torch.randn(8, 16) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T


@sf.register(Own)
def own_forward(module: Own, local: dict[str, Tensor], layouts: Any, x: Tensor) -> Tensor:
    mesh = layouts.mesh
    x = sf.collectives.pvary(x, mesh, "tp")
    return sf.collectives.psum(torch.tanh(x @ local["up"].T) @ local["down"].T, mesh, "tp")


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 2})
@pytest.mark.parametrize("split", [True, False])
def test_a_registered_forward_is_for_split_weights(mesh: DeviceMesh, split: bool) -> None:
    """With whole weights its sum over ranks would count everything twice."""
    torch.manual_seed(0)
    model = Own().double()
    rules = {"up": "f@tp c@fsdp", "down": "c@fsdp f@tp"} if split else {}
    params = sf.shard(model, mesh, sf.Policy(rules=rules))
    assert_parity(sf.apply(model, params, X[:2]), model(X[:2]).detach(), tol=1e-12)


class Marked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


@sf.register(Marked)
def marked_forward(module: Marked, local: dict[str, Tensor], layouts: Any, x: Tensor) -> Tensor:
    return 2 * x


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_registered_forward_of_a_module_without_weights(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(mlp(), Marked())
    params = sf.shard(model, mesh, sf.Policy(rules={f"0.{name}": rule for name, rule in RULES.items()}))
    assert_parity(sf.apply(model, params, X), 2 * model(X).detach(), tol=1e-12)


@on_meshes({"replicate": 2, "fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2})
def test_dot_where_a_rank_has_nothing_to_add(mesh: DeviceMesh) -> None:
    """All ranks send the same dtype."""
    model = mlp()
    params = sf.shard(model, mesh, sf.Policy(rules=RULES, default="replicate"))
    whole = torch.stack([w.square().sum() for w in weights(model).values()]).sum()
    assert_parity(sf.tree.dot(params, params), whole, tol=1e-12)
    scale = sf.shard({"scale": torch.full([], 3.0, dtype=torch.float64)}, mesh, sf.Policy())
    assert_parity(sf.tree.dot(scale, scale), torch.tensor(9.0, dtype=torch.float64), tol=1e-12)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 2, "tp": 1})
@pytest.mark.parametrize("regather", [True, False])
def test_checkpoints_inside_transforms(mesh: DeviceMesh, regather: bool) -> None:
    """torch forbids their hooks there, where units compute again in any case."""
    torch.manual_seed(0)
    model = Checkpointed().double()
    rules = {f"layers.*.{name}": rule for name, rule in RULES.items()}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, regather=regather))
    (x,) = sf.data.local_batch((X,), mesh)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    def plain(p: dict[str, Tensor]) -> Tensor:
        out = X
        for i, layer in enumerate(model.layers):
            own = {name.removeprefix(f"layers.{i}."): w for name, w in p.items() if name.startswith(f"layers.{i}.")}
            out = functional_call(layer, own, (out,))
        return out.square().mean()

    direction = sf.tree.map(torch.cos, params)
    cosines = {name: w.cos() for name, w in weights(model).items()}
    wanted = torch.func.jvp(torch.func.grad(plain), (weights(model),), (cosines,))[1]
    assert_parity(sf.gather(sf.hvp(loss, (params, x), direction)), wanted, tol=1e-9)
    # Zeros without memory, of forward mode, crashed under the mode that watches a function's first run.
    _, product = sf.jvp(lambda p: sf.grad(loss)(p, x), (params,), (direction,))
    assert_parity(sf.gather(product), wanted, tol=1e-9)
    _, pull = sf.vjp(lambda p: loss(p, x), params)
    gradient = torch.func.grad(plain)(weights(model))
    assert_parity(sf.gather(pull(torch.ones((), dtype=torch.float64))[0]), gradient, tol=1e-10)
    slopes = sf.grad(lambda p: sf.jvp(lambda q: loss(q, x), (p,), (direction,))[1])(params)
    assert_parity(sf.gather(slopes), wanted, tol=1e-9)
    assert_parity(sf.gather(sf.grad(loss)(params, x)), gradient, tol=1e-10)


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 1})
@pytest.mark.parametrize("default", ["auto", "replicate"])
def test_pending_gradients_that_torch_reduced(mesh: DeviceMesh, default: Any) -> None:
    """A sum that torch has taken counted as the mean that is still to be taken."""
    model = mlp()
    params = sf.shard(model, mesh, sf.Policy(default=default))
    (x,) = sf.data.local_batch((X,), mesh)
    pending = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean(), reduce=None)
    parts = [pending(params, part)[1] for part in x.chunk(2)]
    averaged = sf.tree.map(lambda a, b: (a + b) / 2, *parts)
    summed = sf.tree.map(lambda *grads: sum(grads) / 2, *parts)
    wanted = torch.func.grad(lambda p: functional_call(model, p, (X,)).square().mean())(weights(model))
    reduced = sf.reduce_grads(averaged)
    assert_parity(sf.gather(reduced), wanted, tol=1e-12)
    assert_parity(sf.gather(sf.reduce_grads(reduced)), wanted, tol=1e-12)
    try:  # whether torch reduces them depends on the other placements
        assert_parity(sf.gather(sf.reduce_grads(summed)), wanted, tol=1e-12)
    except sf.ShardError as error:
        assert "no pending sum any more" in str(error) and "sf.tree.map(torch.add, a, b)" in str(error)
    optimizer = sf.optim.sgd(0.1)
    for grads in (summed, averaged) if sf.data.rank(mesh)[1] > 1 else ():
        with pytest.raises(sf.ShardError, match=r"call sf\.reduce_grads first"):
            optimizer.step(params, grads, optimizer.init(params))
    by_torch = sf.tree.map(lambda g: g.redistribute(g.device_mesh, [Replicate()] * g.device_mesh.ndim), averaged)
    if sf.data.rank(mesh)[1] > 1 and default == "replicate":
        with pytest.raises(sf.ShardError, match="no pending sum any more"):
            sf.reduce_grads(by_torch)
    optimizer.step(params, reduced, optimizer.init(params))


@on_meshes({"fsdp": 1, "tp": 2})
def test_positions_that_are_split_in_a_vmap(mesh: DeviceMesh) -> None:
    """Half of them came out."""
    torch.manual_seed(0)
    model = nn.Sequential(MLP(), MLP()).double()
    policy = sf.Policy(rules={f"*.{name}": rule for name, rule in RULES.items()}, acts={"*": "b s@tp c"})
    params = sf.shard(model, mesh, policy)
    assert_parity(sf.apply(model, params, X), model(X).detach(), tol=1e-12)
    assert_parity(sf.vmap(lambda x: sf.apply(model, params, x[None])[0])(X), model(X).detach(), tol=1e-12)


@on_meshes({"fsdp": 2})
def test_shapes_that_a_tree_function_changed(mesh: DeviceMesh) -> None:
    params = sf.shard(mlp(), mesh, sf.Policy())
    one = params.select("up.weight")
    assert sf.gather(sf.tree.map(lambda w: torch.stack([w, w]), one))["up.weight"].shape == (2, 16, 8)
    for change, shape in ((lambda w: torch.stack([w, w], 2), r"16, 8, 2"), (lambda w: w.sum(1), "16")):
        with pytest.raises(sf.ShardError, match=rf"gather: 'up.weight' has shape \({shape},?\), its .* \(16, 8\)"):
            sf.gather(sf.tree.map(change, one))


@on_meshes({"fsdp": 2})
def test_a_third_derivative_that_torch_has_not(mesh: DeviceMesh) -> None:
    """A norm in the forward, under a gradient of a forward-mode derivative; what the error says to write is right."""
    model = mlp()
    params = sf.shard(model, mesh, sf.Policy())
    direction = sf.tree.map(torch.cos, params)

    def loss(p: sf.Params) -> Tensor:
        out = sf.apply(model, p, X).unflatten(-1, (-1, 2)).transpose(1, 2)
        out = out / out.norm(dim=-1, keepdim=True)
        return ((out @ out.mT).softmax(-1) @ out).square().mean()

    def by_forward_mode(p: sf.Params) -> Tensor:
        return sf.tree.dot(direction, sf.hvp(loss, (p,), direction))

    def by_reverse_mode(p: sf.Params) -> Tensor:
        product = sf.grad(lambda p: sf.tree.dot(sf.grad(loss)(p), direction))(p)
        return sf.tree.dot(direction, product)

    found = sf.gather(sf.grad(by_reverse_mode)(params))
    assert all(bool(g.isfinite().all()) for g in found.values())
    try:
        other = sf.gather(sf.grad(by_forward_mode)(params))
    except sf.ShardError as error:
        assert "sf.grad(lambda p: sf.tree.dot(sf.grad(f)(p), v))(p)" in str(error)
    else:
        assert_parity(other, found, tol=1e-8)


class Stack(nn.Module):
    """A layer, and a linear that reads what it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([mlp()]), nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x))


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_a_batch_of_one_whose_positions_are_split(mesh: DeviceMesh) -> None:
    """The first dim of [1, s, c] was taken for the split one; the same inside a vmap of samples."""
    model = Stack()
    rules = {f"layers.*.{name}": rule for name, rule in RULES.items()}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, acts={"layers.*": "b s@tp c"}))
    for samples in (1, 8, 1):
        assert_parity(sf.apply(model, params, X[:samples]), model(X[:samples]), tol=1e-12)
    assert_parity(sf.vmap(lambda x: sf.apply(model, params, x[None])[0])(X), model(X), tol=1e-12)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x[None]).square().mean()

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x[None],)).square().mean()

    each = sf.vmap(sf.grad(loss), in_dims=(None, 0))(params, X)
    wanted = torch.func.vmap(torch.func.grad(plain), in_dims=(None, 0))(weights(model), X)
    assert_parity(sf.gather(each), wanted, tol=1e-10)


class Telling(MLP):
    """It also puts its hidden features into a list that it is given."""

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        if kept is not None:
            kept.append(h)
        return x + self.down(h)


@pytest.mark.parametrize("how", ["hook", "later", "argument", "deque"])
@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2})
def test_split_values_that_leave_in_a_list_are_whole(mesh: DeviceMesh, how: str) -> None:
    torch.manual_seed(0)
    model = Telling().double()
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    (x,) = sf.data.local_batch((X,), mesh)
    kept: Any = []
    if how == "later":
        sf.apply(model, params, x)
    if how == "deque":
        vars(model.up)["kept"] = kept = deque(maxlen=4)
        model.up.register_forward_hook(lambda module, args, out: vars(module)["kept"].append(out))
    elif how != "argument":
        model.up.register_forward_hook(lambda module, args, out: kept.append(out))
    more = {"kept": kept} if how == "argument" else {}

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        kept.clear()
        return sf.apply(model, p, x, **more).square().mean() + kept[0].square().mean()

    def plain(p: dict[str, Tensor]) -> Tensor:
        kept.clear()
        return functional_call(model, p, (X,), more).square().mean() + kept[0].square().mean()

    found = [sf.gather(sf.grad(loss)(params, x)) for _ in range(2)]
    for each in found:
        assert_parity(each, torch.func.grad(plain)(weights(model)), tol=1e-11)


@on_meshes({"fsdp": 1, "tp": 2})
def test_split_values_that_leave_by_a_hook_of_all_modules_are_whole(mesh: DeviceMesh) -> None:
    model, kept = mlp(), list[Tensor]()
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))

    def collect(module: nn.Module, args: Any, out: Tensor) -> None:
        if getattr(module, "out_features", 0) == model.up.out_features:
            kept.append(out)

    hook = register_module_forward_hook(collect)
    try:
        sf.apply(model, params, X)
        model(X)
    finally:
        hook.remove()
    first, second = kept
    assert_parity(first, second, tol=1e-12)


@on_meshes({"fsdp": 1, "tp": 2})
def test_what_leaves_in_a_list_as_a_part_is_refused(mesh: DeviceMesh) -> None:
    model = mlp()
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    kept: list[Any] = []
    model.down.register_forward_pre_hook(lambda module, args: kept.append(args[0].shape[-1]))
    with pytest.raises(sf.ShardError, match="8 leaves the forward, which is 16 on one rank"):
        sf.apply(model, params, X)
    model, kept = mlp(), []
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    model.up.register_forward_hook(lambda module, args, out: kept.append(out.sum(-1)))
    for _ in range(2):
        sf.apply(model, params, X)
        model(X)
        assert_parity(kept[-2], kept[-1], tol=1e-12)


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 1})
def test_what_a_backward_assigns_to_a_module_is_kept(mesh: DeviceMesh) -> None:
    """Hooks get the copies of modules with which a call computes."""

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norms = nn.Linear(8, 16), nn.Linear(16, 8), torch.zeros((), dtype=torch.float64)

        def note(self, grad: Tensor) -> None:
            self.norms = self.norms + grad.norm()

        def forward(self, x: Tensor) -> Tensor:
            out = self.down(torch.tanh(self.up(x)))
            if out.requires_grad:
                out.register_hook(self.note)
            return out

    torch.manual_seed(0)
    model, own = Seen().double(), Seen().double()
    for each in (model, own):
        each.down.register_full_backward_hook(lambda module, into, out: setattr(module, "seen", out[0].sum()))
    own.load_state_dict(model.state_dict())
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    for _ in range(2):
        sf.grad(lambda p: sf.apply(model, p, X).square().sum())(params)
        own(X).square().sum().backward()
        assert_parity([model.norms, model.down.seen], [own.norms, own.down.seen], tol=1e-11)


@pytest.mark.parametrize("change", ["class", "forward of the class", "method of the class", "forward in torch"])
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_class_that_is_changed_after_a_call(mesh: DeviceMesh, change: str) -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

        def act(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    def mixes(self: nn.Module, x: Tensor) -> Tensor:
        return x.softmax(-1)

    torch_class = type("Tanh", (nn.Tanh,), {"__module__": "torch.nn", "forward": nn.Tanh.forward})
    act = torch_class() if change.endswith("torch") else Chosen()
    model = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 8)).double()
    params = sf.shard(model, mesh, sf.Policy(rules={"0.weight": "f@tp c@fsdp", "2.weight": "c@fsdp f@tp"}))
    assert_parity(sf.apply(model, params, X), model(X), tol=1e-12)
    if change == "class":
        object.__setattr__(model[1], "__class__", type("Mixing", (Chosen,), {"act": mixes}))
    else:
        setattr(type(act), "act" if change.startswith("method") else "forward", mixes)
    with pytest.raises(sf.ShardError, match="_softmax along dim 2, of which each rank has a part"):
        sf.apply(model, params, X)


@pytest.mark.parametrize("change", ["child", "forward", "class"])
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_model_that_is_changed_after_a_call(mesh: DeviceMesh, change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    params = sf.shard(model, mesh, sf.Policy(rules={"0.weight": "f@tp c@fsdp", "2.weight": "c@fsdp f@tp"}))
    assert_parity(sf.apply(model, params, X), model(X), tol=1e-12)

    def changed(kind: type[nn.Module]) -> None:
        act = kind(dim=-1) if kind is nn.Softmax else kind()
        if change == "child":
            model[1] = act
        elif change == "forward":
            model[1].forward = act.forward
        else:
            object.__setattr__(model[1], "__class__", kind)
            vars(model[1]).update(vars(act))

    changed(nn.Sigmoid)
    assert_parity(sf.apply(model, params, X), model(X), tol=1e-12)
    changed(nn.Softmax)
    with pytest.raises(sf.ShardError, match="_softmax along dim 2, of which each rank has a part"):
        sf.apply(model, params, X)


@on_meshes({"fsdp": 2, "tp": 1})
def test_a_loss_that_is_differentiated_by_a_plain_argument_is_that_of_all_ranks(mesh: DeviceMesh) -> None:
    model, shift = mlp(), torch.zeros(8, dtype=torch.float64)
    params = sf.shard(model, mesh, sf.Policy())
    (x,) = sf.data.local_batch((X,), mesh)

    def loss(p: sf.Params, shift: Tensor, x: Tensor) -> sf.data.Mean:
        out = sf.apply(model, p, x + shift).square()
        return sf.data.Mean(out[x > 0].sum(), (x > 0).sum())

    found = sf.value_and_grad(loss, argnums=1)(params, shift, x)
    closed = sf.value_and_grad(lambda shift: loss(params, shift, x))(shift)
    shift.requires_grad_()
    right = model(X + shift).square()[X > 0].mean()
    (wanted,) = torch.autograd.grad(right, shift)
    for value, grad in (found, closed):
        assert_parity([value, sf.collectives.pmean(grad, mesh, "fsdp")], [right.detach(), wanted], tol=1e-12)


@on_meshes({"fsdp": 2, "tp": 1})
def test_parameters_that_are_unfrozen_after_shard_are_refused(mesh: DeviceMesh) -> None:
    model = mlp()
    model.up.requires_grad_(False)
    params = sf.shard(model, mesh, sf.Policy())
    sf.grad(lambda p: sf.apply(model, p, X).square().mean())(params)
    model.up.requires_grad_(True)
    with pytest.raises(sf.ShardError, match=r"would get none. Write model.load_state_dict\(sf.gather\(params\)\)"):
        sf.grad(lambda p: sf.apply(model, p, X).square().mean())(params)
    model.load_state_dict(sf.gather(params))
    grads = sf.grad(lambda p: sf.apply(model, p, X).square().mean())(sf.shard(model, mesh, sf.Policy()))
    assert sf.gather(grads)["up.weight"].abs().sum() > 0


@on_meshes({"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 1})
def test_a_tree_that_asks_and_is_closed_over_has_a_gradient_through_one(mesh: DeviceMesh) -> None:
    model = mlp()
    p = sf.shard(model, mesh, sf.Policy())
    q = sf.tree.map(lambda w: (0.5 * w).detach().requires_grad_(), p)
    grads = sf.grad(lambda p: (sf.apply(model, p, X) * sf.apply(model, q, X)).square().mean())(p)
    sf.tree.dot(grads, grads).backward()
    own = {name: w.clone().requires_grad_() for name, w in weights(model).items()}
    other = {name: (0.5 * w).requires_grad_() for name, w in weights(model).items()}
    loss = (functional_call(model, own, (X,)) * functional_call(model, other, (X,))).square().mean()
    wanted = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    torch.stack([w.square().sum() for w in wanted]).sum().backward()
    assert_parity({n: w.grad.full_tensor() for n, w in q.items()}, {n: w.grad for n, w in other.items()}, tol=1e-10)
