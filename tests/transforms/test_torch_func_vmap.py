"""`vmap`: whose samples, members and directions are mapped, what comes out, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

import shardfn as sf
from shardfn.testing import assert_parity, count_collectives, on_meshes, run_raises

MEGATRON = sf.Policy(rules={"0.weight": "ff@tp c@fsdp", "2.weight": "_@fsdp ff@tp"})


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples(count: int = 12) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@on_meshes({"fsdp": 2, "tp": 2}, {"replicate": 2, "fsdp": 2, "tp": 1}, {"tp": 2, "fsdp": 2})
def test_clipping_per_sample(mesh: DeviceMesh) -> None:
    """The heart of DP-SGD: gradients clipped one by one, then their mean."""
    model = net()
    params = sf.shard(model, mesh, MEGATRON)
    batch = samples()
    (local,) = sf.data.local_batch((batch,), mesh)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().sum()

    def clipped(p: sf.Params, x: Tensor) -> sf.Params:
        return sf.optim.clip(sf.grad(loss)(p, x), 5.0)[0]

    each = sf.vmap(clipped, in_dims=(None, 0))(params, local)
    total = sf.reduce_grads(sf.tree.map(lambda g: g.sum(0), each), op="sum", like=params)

    wanted: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in weights_of(model).items()}
    for x in batch:
        grads = torch.func.grad(lambda p, x: functional_call(model, p, (x,)).square().sum())(weights_of(model), x)
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        factor = (5.0 / (norm + 1e-6)).clamp(max=1)
        wanted = {name: wanted[name] + factor * g for name, g in grads.items()}
    assert {n: g.placements for n, g in total.items()} == {n: p.placements for n, p in params.items()}
    assert_parity(sf.gather(total), wanted, tol=1e-11)


@on_meshes({"fsdp": 2, "tp": 2})
def test_samples_cost_one_gather_a_bucket(mesh: DeviceMesh) -> None:
    model = net()
    params = sf.shard(model, mesh, MEGATRON)
    (local,) = sf.data.local_batch((samples(),), mesh)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().sum()

    run = sf.vmap(sf.grad(loss), in_dims=(None, 0))
    run(params, local)
    with count_collectives() as counts:
        run(params, local)
    buckets = sum(len(unit.buckets) for unit in params.plan.units)
    # one more to compare the numbers of samples; over tp the sum of a row-parallel output, and no input to sum back to
    assert counts.all_gather == buckets + 1
    assert counts.reduce_scatter == counts.all_to_all == 0
    assert counts.all_reduce == 1


def stacked_nets(count: int) -> dict[str, Tensor]:
    members = [weights_of(net(seed)) for seed in range(count)]
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}


ENSEMBLE = {"0.weight": "e@dp ff c@fsdp", "0.bias": "e@dp ff", "2.weight": "e@dp _@fsdp ff", "2.bias": "e@dp _"}


@on_meshes({"dp": 2, "fsdp": 2}, {"dp": 4, "fsdp": 1}, {"fsdp": 2, "dp": 2})
def test_ensembles(mesh: DeviceMesh) -> None:
    """Four members, stacked over an axis of their own, on one batch."""
    model, whole, batch = net(), stacked_nets(4), samples(4)
    members = sf.shard({n: nn.Parameter(w) for n, w in whole.items()}, mesh, sf.Policy(rules=ENSEMBLE))
    index, count = mesh.get_local_rank("fsdp"), mesh["fsdp"].size()
    local = batch.unflatten(0, (count, -1))[index]

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x,)).square().mean()

    losses, grads = sf.vmap(sf.value_and_grad(loss), in_dims=(0, None))(members, local)
    wanted, wanted_losses = torch.func.vmap(torch.func.grad_and_value(plain), in_dims=(0, None))(whole, batch)
    first = mesh.get_local_rank("dp") * len(losses)
    torch.testing.assert_close(losses, wanted_losses[first : first + len(losses)], rtol=1e-12, atol=1e-12)
    assert {n: g.placements for n, g in grads.items()} == {n: p.placements for n, p in members.items()}
    assert_parity(sf.gather(grads), wanted, tol=1e-12)
    optimizer = sf.optim.adamw(1e-2)
    new, _ = optimizer.step(members, grads, optimizer.init(members))
    assert list(new) == list(members)


@on_meshes({"fsdp": 2, "tp": 2})
def test_members_on_every_rank(mesh: DeviceMesh) -> None:
    """A tree stacked by hand: its first dim is whole, each member is sharded."""
    model, other = net(), net(1)
    both = [sf.shard(m, mesh, MEGATRON) for m in (model, other)]
    stack = sf.tree.map(lambda a, b: torch.stack([a, b]), *both)
    batch = samples()
    (local,) = sf.data.local_batch((batch,), mesh)
    step = sf.grad(lambda p, x: sf.apply(model, p, x).square().mean())
    found = sf.gather(sf.vmap(step, in_dims=(0, None))(stack, local))
    for i, params in enumerate(both):
        assert_parity({n: g[i] for n, g in found.items()}, sf.gather(step(params, local)), tol=1e-12)


@on_meshes({"fsdp": 2})
def test_torchs_vmap_over_inputs(mesh: DeviceMesh) -> None:
    model, batch = net(), samples(4)
    params = sf.shard(model, mesh, sf.Policy())
    found = torch.func.vmap(lambda x: sf.apply(model, params, x))(batch)
    torch.testing.assert_close(found, model(batch))
    chunks = sf.vmap(lambda p, x: sf.apply(model, p, x), in_dims=(None, 0), chunk_size=2)(params, batch)
    torch.testing.assert_close(chunks, model(batch))


def refused(kind: str) -> Any:
    mesh = sf.make_mesh("cpu", fsdp=2)
    model = net()
    params = sf.shard(model, mesh, sf.Policy())
    x = samples(4)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    match kind:
        case "closed over":
            return sf.vmap(lambda x: sf.grad(loss)(params, x))(x)
        case "torch's vmap":
            return torch.func.vmap(sf.grad(loss), in_dims=(None, 0))(params, x)
        case "torch's vmap and grad":
            return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
        case "a tree's out_dims":
            return sf.vmap(sf.grad(loss), in_dims=(None, 0), out_dims=1)(params, x)
        case "pending sums":
            return sf.grad(lambda p: sf.optim.global_norm(sf.grad(loss, reduce=None)(p, x)))(params)
        case "a dim":
            return sf.vmap(loss, in_dims=(1, 0))(params, x)
        case "no first dim":
            return sf.vmap(loss, in_dims=(0, 0))(params, x)
        case "uneven":
            own = x[: 1 + torch.distributed.get_rank()]
            return sf.vmap(sf.grad(loss), in_dims=(None, 0))(params, own)
        case "another layout":
            replicated = sf.reshard(params, sf.Policy(default="replicate"))
            return sf.jvp(lambda p: loss(p, x), (params,), (replicated,))
        case "a leaf too few":
            return sf.hvp(loss, (params, x), params.select("0.*"))
        case "torch's jvp":
            return torch.func.jvp(lambda p: loss(p, x), (params,), (params,))
        case "torch's grad of a tree from outside":
            return torch.func.vmap(lambda row: torch.func.grad(lambda p: loss(p, row[None]))(params))(x)
        case "torch's jacfwd":
            return torch.func.jacfwd(lambda p: loss(p, x))(params)
        case "linearize":
            return torch.func.linearize(lambda x: loss(params, x), x)
        case "no tuple":
            return sf.jvp(lambda p: loss(p, x), params, params)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("closed over", sf.ShardError, "Pass the tree to sf.vmap too, with None in in_dims"),
        ("torch's vmap", sf.ShardError, "Pass the tree to sf.vmap too, with None in in_dims"),
        ("torch's vmap and grad", sf.ShardError, r"Use sf\.vmap and sf\.grad"),
        ("a tree's out_dims", sf.ShardError, "its mapped dim comes first"),
        ("pending sums", sf.ShardError, "pending sums cannot be differentiated again"),
        ("a dim", sf.ShardError, "in_dims=1 for a tree of shards"),
        ("no first dim", sf.ShardError, "several of them|no first dim to map over"),
        ("uneven", sf.ShardError, r"number of samples differs between ranks along fsdp: \[1, 2\]"),
        ("another layout", sf.ShardError, "another layout than the primal"),
        ("a leaf too few", sf.ShardError, "the tangent has no leaf '2.weight'"),
        ("torch's jvp", sf.ShardError, "use sf.jvp or sf.hvp"),
        ("torch's grad of a tree from outside", sf.ShardError, "torch.func.vmap goes on around a gradient"),
        ("torch's jacfwd", sf.ShardError, "use sf.jvp or sf.hvp"),
        ("linearize", sf.ShardError, "loses what collectives wait for"),
        ("no tuple", TypeError, "primals and tangents are tuples"),
    ],
)
def test_refusals(kind: str, error: type[Exception], match: str) -> None:
    run_raises(error, refused, kind, match=match, ranks=2)


@pytest.mark.everyday(1)
@on_meshes({"dp": 2, "fsdp": 1}, {"fsdp": 2, "tp": 1}, {"fsdp": 2, "tp": 2})
def test_gradients_of_what_a_vmap_returns(mesh: DeviceMesh) -> None:
    """Around a vmap over members or samples the loss is still the mean over ranks, to the second order."""
    model, batch = net(), samples(4)

    def loss(p: Any, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    def plain(p: Any, x: Tensor) -> Tensor:
        return functional_call(model, p, (x,)).square().mean()

    if "dp" in (mesh.mesh_dim_names or ()):
        whole = stacked_nets(4)
        rules = {name: "e@dp " + "_ " * (w.dim() - 1) for name, w in whole.items()}
        params = sf.shard({n: nn.Parameter(w) for n, w in whole.items()}, mesh, sf.Policy(rules=rules))
        local, dims = batch, (0, None)
    else:
        whole, params = weights_of(model), sf.shard(model, mesh, MEGATRON)
        local, dims = sf.data.local_batch((batch,), mesh)[0], (None, 0)

    def mean(p: Any) -> Tensor:
        return sf.vmap(loss, in_dims=dims)(p, local).square().mean()

    def plain_mean(p: Any) -> Tensor:
        return torch.func.vmap(plain, in_dims=dims)(p, batch).square().mean()

    assert_parity(sf.gather(sf.grad(mean)(params)), torch.func.grad(plain_mean)(whole), tol=1e-11)
    gradient = torch.func.grad(plain_mean)
    wanted = torch.func.jvp(gradient, (whole,), (whole,))[1]
    assert_parity(sf.gather(sf.hvp(mean, (params,), params)), wanted, tol=1e-11)

    def penalty(p: Any) -> Tensor:
        grads = sf.vmap(sf.grad(loss), in_dims=dims)(p, local)
        return sf.optim.global_norm(grads).square()

    def plain_penalty(p: Any) -> Tensor:
        grads = torch.func.vmap(torch.func.grad(plain), in_dims=dims)(p, batch)
        return torch.stack([g.square().sum() for g in grads.values()]).sum()

    assert_parity(sf.gather(sf.grad(penalty)(params)), torch.func.grad(plain_penalty)(whole), tol=1e-11)


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 1})
def test_trees_that_a_mapped_function_closes_over(mesh: DeviceMesh) -> None:
    """On one data rank each transform works; on several, a penalty does, and what would mix samples is refused."""
    model, batch = net(), samples()
    params, whole = sf.shard(model, mesh, MEGATRON), weights_of(model)
    (local,) = sf.data.local_batch((batch,), mesh)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x[None]).square().sum()

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x[None],)).square().sum()

    def penalized(p: sf.Params) -> Tensor:
        return sf.vmap(lambda x: loss(p, x) * sf.tree.dot(p, p))(local).mean()

    def plain_penalized(p: dict[str, Tensor]) -> Tensor:
        dot = torch.stack([w.square().sum() for w in p.values()]).sum()
        return torch.func.vmap(lambda x: plain(p, x) * dot)(batch).mean()

    assert_parity(sf.gather(sf.grad(penalized)(params)), torch.func.grad(plain_penalized)(whole), tol=1e-11)
    found: dict[str, Any] = {
        "jvp": lambda x: sf.jvp(lambda p: loss(p, x), (params,), (params,))[1],
        "vjp": lambda x: sf.vjp(lambda p: loss(p, x), params)[1](torch.ones_like(x[0]))[0],
        "hvp": lambda x: sf.hvp(loss, (params, x), params),
        "grad": lambda x: sf.grad(loss)(params, x),
    }
    products = sf.vmap(lambda p, q, x: sf.tree.dot(sf.grad(loss)(p, x), q), in_dims=(None, None, 0))
    own = torch.func.vmap(torch.func.grad(plain), in_dims=(None, 0))(whole, batch)
    right = torch.stack([(own[name] * w).flatten(1).sum(1) for name, w in whole.items()]).sum(0)
    assert_parity(products(params, params, local), *sf.data.local_batch((right,), mesh), tol=1e-11)
    if mesh["fsdp"].size() > 1:
        with pytest.raises(sf.ShardError, match=r"(?s)tree.dot: .*from outside of a vmap to sf.vmap too"):
            sf.vmap(lambda p, x: sf.tree.dot(sf.grad(loss)(p, x), params), in_dims=(None, 0))(params, local)
        for name, each in found.items():
            with pytest.raises(sf.ShardError, match=rf"{name}: a vmap goes on around it.*Pass the tree to sf.vmap too"):
                sf.vmap(each)(local)
        return
    gradient = torch.func.grad(plain)
    wanted: dict[str, Any] = {
        "jvp": lambda x: torch.func.jvp(lambda p: plain(p, x), (whole,), (whole,))[1],
        "vjp": lambda x: gradient(whole, x),
        "hvp": lambda x: torch.func.jvp(lambda p: gradient(p, x), (whole,), (whole,))[1],
        "grad": lambda x: gradient(whole, x),
    }
    for name, each in found.items():
        out, right = sf.vmap(each)(local), torch.func.vmap(wanted[name])(batch)
        out, right = ({"out": out}, {"out": right}) if isinstance(out, Tensor) else (sf.gather(out), right)
        assert_parity(out, right, tol=1e-11)
    with pytest.raises(sf.ShardError, match=r"or pass it to sf\.vmap as the primal is"):
        direction = sf.vmap(lambda p, x: sf.jvp(lambda q: loss(q, x), (p,), (params,))[1], in_dims=(None, 0))
        direction(params, local)


@on_meshes({"fsdp": 1}, {"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2})
def test_derivatives_around_a_vmap_over_a_stacked_tree(mesh: DeviceMesh) -> None:
    """Members that a loss couples: what comes out is stacked as what went in."""
    torch.manual_seed(0)
    model = nn.Linear(4, 6, bias=False).double()
    weight, x = model.weight.detach(), torch.randn(8, 4, dtype=torch.float64)
    tp = "@tp" if "tp" in (mesh.mesh_dim_names or ()) else ""
    params = sf.shard(model, mesh, sf.Policy(rules={"weight": f"f{tp} c@fsdp"}))
    stacked = sf.tree.map(lambda w: torch.stack([w, 2 * w]), params)
    local = sf.data.local_batch(x, mesh)

    def coupled(t: Any) -> Tensor:
        out = sf.vmap(lambda p: sf.apply(model, p, local).tanh())(t)
        return out.prod(0).square().mean()

    def expected(w: Tensor) -> Tensor:
        return torch.einsum("bc,efc->ebf", x, w).tanh().prod(0).square().mean()

    def stepped(t: Any) -> Tensor:
        return coupled(sf.tree.map(lambda w, g: w - 0.5 * g, t, sf.grad(coupled)(t)))

    whole = torch.stack([weight, 2 * weight]).requires_grad_()
    (grad,) = torch.autograd.grad(expected(whole), whole, create_graph=True)
    (second,) = torch.autograd.grad((grad * whole.detach()).sum(), whole, retain_graph=True)
    inner = expected(whole - 0.5 * grad)
    (outer,) = torch.autograd.grad(inner, whole)

    found = sf.grad(coupled)(stacked)
    pulled = sf.vjp(coupled, stacked)[1](torch.ones((), dtype=torch.float64))[0]
    loss, grads = sf.value_and_grad(stepped)(stacked)
    wanted = (grad.detach(), grad.detach(), second, outer)
    for tree, want in zip((found, pulled, sf.hvp(coupled, (stacked,), stacked), grads), wanted, strict=True):
        assert tree["weight"].placements == stacked["weight"].placements
        torch.testing.assert_close(tree["weight"].full_tensor().detach(), want)
    torch.testing.assert_close(loss, inner.detach())
    optimizer = sf.optim.sgd(0.1)
    new, _ = optimizer.step(stacked, found, optimizer.init(stacked))
    torch.testing.assert_close(new["weight"].full_tensor(), (whole - 0.1 * grad).detach())


@on_meshes({"fsdp": 1}, {"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2})
def test_a_tree_that_is_stacked_says_so(mesh: DeviceMesh) -> None:
    """Its layouts have the new dim, as those of what comes out of a vmap; a member has the layouts of one tree."""
    model, x = nn.Linear(4, 8).double(), torch.randn(8, 4, dtype=torch.float64)
    tp = "@tp" if "tp" in (mesh.mesh_dim_names or ()) else ""
    params = sf.shard(model, mesh, sf.Policy(rules={"weight": f"(2 f{tp}) c@fsdp", "bias": f"(2 f{tp})"}))
    plain = {name: w.detach().clone() for name, w in model.named_parameters()}
    whole = {name: torch.stack([w, 2 * w, w.sin()]) for name, w in plain.items()}
    stacked = sf.tree.map(lambda w: torch.stack([w, 2 * w, w.sin()]), params)
    assert {name: str(leaf.rule) for name, (_, leaf) in stacked.plan.leaves.items()} == {
        name: f"b {leaf.rule}" for name, (_, leaf) in params.plan.leaves.items()
    }
    assert_parity(sf.gather(stacked), whole)
    for made in (lambda w: w.mean(0), lambda w: w[1], lambda w: w.unbind()[2]):
        one = sf.tree.map(made, stacked)
        assert one.plan == params.plan
        assert_parity(sf.gather(one), {name: made(w) for name, w in whole.items()})
    assert_parity(sf.gather(sf.tree.map(torch.mul, stacked, params)), {n: w * plain[n] for n, w in whole.items()})
    assert_parity(sf.gather(sf.tree.map(torch.add, params, stacked)), {n: w + plain[n] for n, w in whole.items()})
    with pytest.raises(sf.ShardError, match="the layouts differ"):
        sf.tree.map(torch.add, params, sf.tree.map(lambda w: torch.stack([w, w]), stacked))

    moved = sf.reshard(stacked, sf.Policy(default="replicate"))
    assert str(moved.plan.leaves["weight"][1].rule) == "b 8 4"
    assert_parity(sf.gather(moved), whole)
    with pytest.raises(sf.ShardError, match=r"has several members, 'weight' of shape \(3, 8, 4\).*sf\.vmap"):
        sf.apply(model, stacked, x)

    def loss(p: Any, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    each = sf.vmap(sf.grad(loss), in_dims=(0, None))(stacked, sf.data.local_batch(x, mesh))
    moved = sf.tree.map(lambda w, g: w - g, stacked, each)
    mixed = sf.tree.ema(stacked, moved, decay=0.5)
    gradient = torch.func.grad(lambda p: torch.func.functional_call(model, p, x).square().mean())
    wanted = torch.func.vmap(gradient)(whole)
    assert_parity(sf.gather(mixed), {name: w - 0.5 * wanted[name] for name, w in whole.items()}, tol=1e-12)
    samples = sf.vmap(sf.grad(loss), in_dims=(None, 0))(params, sf.data.local_batch(x, mesh))
    if mesh.size() > 1 and mesh["fsdp"].size() > 1:
        with pytest.raises(sf.ShardError, match="reshard: the leaves have a first dim of 8 that is split"):
            sf.reshard(samples, sf.Policy())
    assert_parity({"dot": sf.tree.dot(stacked, each)}, {"dot": sum((w * wanted[n]).sum() for n, w in whole.items())})


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2})
def test_members_inside_a_transform(mesh: DeviceMesh) -> None:
    """Sums over members are those of this rank's part; sums over what axes split are refused, as of any leaf."""
    model, x = nn.Linear(4, 6).double(), torch.randn(8, 4, dtype=torch.float64)
    params = sf.shard(model, mesh, sf.Policy(rules={"weight": "f@tp c@fsdp", "bias": "f@tp"}))
    whole = {name: torch.stack([w.detach(), w.detach().sin()]) for name, w in model.named_parameters()}
    stacked, local = sf.tree.map(lambda w: torch.stack([w, w.sin()]), params), sf.data.local_batch(x, mesh)

    def loss(fold: Any) -> Any:
        return lambda t: sf.apply(model, sf.tree.map(fold, t), local).square().mean()

    for fold in (lambda w: w.mean(0), lambda w: w.sum(dim=0), lambda w: w[1], lambda w: w[0, ...], lambda w: w.prod(0)):
        pulled = sf.vjp(loss(fold), stacked)[1](torch.ones((), dtype=torch.float64))[0]

        def of_plain(t: Any, fold: Any = fold) -> Tensor:
            return torch.func.functional_call(model, {n: fold(w) for n, w in t.items()}, x).square().mean()

        assert_parity(sf.gather(pulled), torch.func.grad(of_plain)(whole), tol=1e-12)
    for fold, name in ((lambda w: w.sum(1), "sum"), (lambda w: w[0].sum(0), "sum"), (lambda w: w[:, 0], "getitem")):
        with pytest.raises(sf.ShardError, match=f"vjp: {name} of '(weight|bias)' would be that of this rank's part"):
            sf.vjp(loss(fold), stacked)
