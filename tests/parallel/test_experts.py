"""Mixtures of experts over an axis of their own, against the same model on one rank."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from families import FAMILIES, Family, InDouble
from ranks import folder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.comm.collectives import all_to_all_rows
from shardfn.parallel import tensor_parallel_experts
from shardfn.testing import assert_close, assert_parity, count_collectives, on_meshes, run, run_raises

WIDTH, HIDDEN, EXPERTS = 12, 20, 8
BATCH, SHARED = ("fsdp", "ep"), ("fsdp",)  # whether ep splits the batch
MESHES = ({"fsdp": 2, "ep": 2}, {"fsdp": 1, "ep": 4})


class Experts(nn.Module):
    """Experts as a user writes them: one loop, one weight for all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.shift = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            token, slot = torch.where(ids == expert)
            if len(token):
                made = torch.tanh(x[token] @ self.up[expert].t()) @ self.down[expert].t() + self.shift[expert]
                out = out.index_add(0, token, made * weights[token, slot, None])
        return out


class Layer(nn.Module):
    """A dense part, a router, experts; `chosen` adds to what the router says of each expert."""

    def __init__(self, chosen: Tensor) -> None:
        super().__init__()
        self.dense, self.router, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()
        self.register_buffer("chosen", chosen)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.dense(x)).flatten(0, -2)
        scores = self.router(h).softmax(-1)
        ids = (scores + self.chosen).topk(2).indices
        return x + self.experts(h, ids, scores.gather(-1, ids)).view_as(x)


class Net(nn.Module):
    """Two layers."""

    def __init__(self, chosen: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(chosen), Layer(chosen)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def dense(self, x: Tensor) -> Tensor:
        return cast(Layer, self.layers[0]).dense(x)


def made(chosen: Mapping[int, float] | None = None) -> Net:
    """A net in float64; what is added to the scores of experts by number."""
    torch.manual_seed(0)
    added = torch.zeros(EXPERTS)
    for expert, value in (chosen or {}).items():
        added[expert] = value
    return Net(added).double()


def grouped(weights: Mapping[str, Tensor], tokens: Tensor, counts: Sequence[int]) -> Tensor:
    """The same experts as a function of sorted tokens."""
    parts = [
        torch.tanh(x @ weights["up"][expert].t()) @ weights["down"][expert].t() + weights["shift"][expert]
        for expert, x in enumerate(tokens.split(list(counts)))
    ]
    return torch.cat(parts)


def policy(batch: Sequence[str] = BATCH, **options: Any) -> sf.Policy:
    return sf.Policy(
        batch=batch,
        rules={"**.up": "experts@ep ff c@fsdp", "**.down": "experts@ep c@fsdp ff", "**.shift": "experts@ep c"},
        compute={"**.experts": sf.policies.Experts("ep", **options)},
    )


def inputs(samples: int = 4, length: int = 5) -> Tensor:
    return torch.randn(samples, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def square(model: nn.Module, params: sf.Params, x: Tensor) -> Tensor:
    return sf.apply(model, params, x).square().mean()


def of_one_rank(model: nn.Module, x: Tensor, steps: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of AdamW's steps; the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    losses, grads = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if not step:
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        losses.append(loss.item())
        optimizer.step()
    return losses, grads


def require_parity(mesh: DeviceMesh, chosen: Mapping[int, float] | None, used: sf.Policy, x: Tensor) -> None:
    """Loss and gradients, and the losses of three steps, are those of one rank."""
    model = made(chosen)
    losses, grads = of_one_rank(made(chosen), x, 3)
    params = sf.shard(model, mesh, used)
    local = sf.data.local_batch(x, mesh, used)
    optimizer = sf.optim.adamw(1e-2, weight_decay=0)
    state, found = optimizer.init(params), []
    for step in range(3):
        loss, g = sf.value_and_grad(partial(square, model))(params, local)
        if not step:
            assert_parity(sf.gather(g), grads, tol=1e-9)
        params, state = optimizer.step(params, g, state)
        found.append(float(loss))
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-12)


WAYS = {
    "batch": (BATCH, {}),
    "batch, grouped": (BATCH, {"grouped": grouped}),
    "shared": (SHARED, {}),
    "shared, grouped": (SHARED, {"grouped": grouped}),
}
LOADS = {
    "as they come": None,
    "one that nobody chooses": {3: -10.0},
    "all to one and the next": {5: 10.0, 6: 5.0},
    "all to two ranks": {0: 10.0, 7: 5.0},
}


@pytest.mark.everyday(2)
@pytest.mark.one_mesh
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("way", WAYS)
@on_meshes(*MESHES)
def test_experts_are_as_on_one_rank(mesh: DeviceMesh, way: str, load: str) -> None:
    batch, options = WAYS[way]
    require_parity(mesh, LOADS[load], policy(batch, **options), inputs())


@pytest.mark.parametrize("way", WAYS)
@on_meshes({"fsdp": 1, "ep": 4})
def test_tokens_that_ranks_do_not_divide(mesh: DeviceMesh, way: str) -> None:
    batch, options = WAYS[way]
    require_parity(mesh, None, policy(batch, **options), inputs(4, 1) if batch == BATCH else inputs(1, 3))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("way", WAYS)
@on_meshes({"fsdp": 1, "tp": 2, "ep": 2}, {"ep": 2, "tp": 2})
def test_experts_may_be_split_within_too(mesh: DeviceMesh, way: str) -> None:
    batch, options = WAYS[way]
    data = [axis for axis in batch if axis in (mesh.mesh_dim_names or ())]
    model, x = made(), inputs()
    for layer in model.layers:
        experts: Any = layer.experts
        del experts.shift  # a bias after the split product would count once a rank
        experts.shift = torch.zeros(EXPERTS, WIDTH, dtype=torch.float64)
    rules = {"**.up": "experts@ep ff@tp c", "**.down": "experts@ep c ff@tp"}
    own = replace(policy(data, **options), rules=rules)
    if "grouped" in options:
        own = sf.Policy(batch=data, rules=rules, compute={"**.experts": sf.policies.Experts("ep", grouped=_unbiased)})
    params = sf.shard(model, mesh, own)
    expected, grads = of_one_rank(model, x)
    loss, found = sf.value_and_grad(partial(square, model))(params, sf.data.local_batch(x, mesh, own))
    assert_parity({"loss": loss}, {"loss": torch.tensor(expected[0], dtype=torch.float64)}, tol=1e-9)
    assert_parity(sf.gather(found), grads, tol=1e-9)
    assert params.plan.local_shape("layers.0.experts.up") == (EXPERTS // 2, HIDDEN // 2, WIDTH)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("batch", [BATCH, SHARED])
def test_experts_of_which_some_weights_are_split_are_an_error(batch: Sequence[str]) -> None:
    rules = {"**.up": "experts@ep ff@tp c", "**.down": "experts@ep c ff@tp", "**.shift": "experts@ep c"}
    with pytest.raises(sf.ShardError, match=r"experts\.shift' is whole over 'tp', and others of its module are split"):
        sf.plan(made(), sf.MeshSpec(fsdp=1, ep=2, tp=2), replace(policy(batch), rules=rules), example=inputs())


@on_meshes({"fsdp": 2, "ep": 2})
def test_without_rules_every_rank_has_all_experts(mesh: DeviceMesh) -> None:
    require_parity(mesh, None, replace(policy(), rules={}), inputs())


@on_meshes({"ep": 2, "fsdp": 2})
def test_one_dim_may_be_split_by_both_axes(mesh: DeviceMesh) -> None:
    rules = {"**.experts.*": "experts@ep@fsdp ..."}
    require_parity(mesh, LOADS["all to two ranks"], replace(policy(), rules=rules), inputs())


@on_meshes({"fsdp": 2, "ep": 2})
def test_trees_of_experts_are_trees(mesh: DeviceMesh) -> None:
    """Norms, other layouts and checkpoints see a weight that two axes split."""
    model, own, x = made(), policy(), inputs()
    params = sf.shard(model, mesh, own)
    _, grads = sf.value_and_grad(partial(square, model))(params, sf.data.local_batch(x, mesh, own))
    _, expected = of_one_rank(made(), x)
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    assert_close(sf.optim.global_norm(grads), norm, rtol=1e-12, atol=0)
    other = sf.tree.zeros_like(sf.shard(made(), mesh, policy(SHARED)))
    with folder() as at:
        saved = sf.checkpoint.save(f"{at}/step-1", params)
        loaded = sf.checkpoint.load(saved, other)
    for moved in (sf.reshard(params, policy(SHARED)), loaded):
        whole = {name: p.detach() for name, p in model.named_parameters()}
        assert_parity(sf.gather(moved), whole, tol=0)
        assert_parity({"loss": square(model, moved, x[:2])}, {"loss": model(x[:2]).square().mean()}, tol=1e-9)


@pytest.mark.parametrize("way", WAYS)
@on_meshes(*MESHES)
def test_every_token_may_choose_every_expert(mesh: DeviceMesh, way: str) -> None:
    batch, options = WAYS[way]

    class Everyone(Layer):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.dense(x)).flatten(0, -2)
            scores = self.router(h).softmax(-1)
            ids = scores.argsort(-1, descending=True)
            return x + self.experts(h, ids, scores.gather(-1, ids)).view_as(x)

    def chosen_by_all() -> Net:
        model = made()
        for layer in model.layers:
            layer.__class__ = Everyone
        return model

    model, own, x = chosen_by_all(), policy(batch, **options), inputs()
    params = sf.shard(model, mesh, own)
    loss, grads = sf.value_and_grad(partial(square, model))(params, sf.data.local_batch(x, mesh, own))
    losses, expected = of_one_rank(chosen_by_all(), x)
    torch.testing.assert_close(float(loss), losses[0], rtol=1e-9, atol=1e-12)
    assert_parity(sf.gather(grads), expected, tol=1e-9)


@pytest.mark.parametrize("batch", [BATCH, SHARED])
@on_meshes({"fsdp": 2, "ep": 2})
def test_a_run_goes_on_where_experts_lie_otherwise(mesh: DeviceMesh, batch: Sequence[str]) -> None:
    """Two steps of a trainer that accumulates on 2 x 2 ranks, and a third one on 4 x 1 or 1 x 4."""
    own, x = policy(batch), inputs(8)

    def mean(model: nn.Module) -> Callable[[sf.Params, Tensor], Tensor]:
        return lambda params, x: square(model, params, x)

    def trainer(mesh: DeviceMesh, chosen: Mapping[int, float] | None = None) -> sf.Trainer:
        model = made(chosen)
        optimizer = sf.optim.adamw(1e-2, weight_decay=0)
        return sf.Trainer(model, mesh, own, optimizer=optimizer, loss_fn=mean(model), accumulate=2)

    losses, _ = of_one_rank(made(), x, 3)
    first = trainer(mesh)
    found = [float(first.step(sf.data.local_batch(x, mesh, own))["loss"]) for _ in range(2)]
    with folder() as at:
        first.save(at)
        for sizes in ({"fsdp": 4, "ep": 1}, {"fsdp": 1, "ep": 4}):
            other = sf.make_mesh("cpu", **sizes)
            then = trainer(other)
            then.load(at)
            local = sf.data.local_batch(x, other, own)
            torch.testing.assert_close([*found, float(then.step(local)["loss"])], losses, rtol=1e-9, atol=1e-12)


def _unbiased(weights: Mapping[str, Tensor], tokens: Tensor, counts: Sequence[int]) -> Tensor:
    pairs = enumerate(tokens.split(list(counts)))
    return torch.cat([torch.tanh(x @ weights["up"][e].t()) @ weights["down"][e].t() for e, x in pairs])


@pytest.mark.everyday(1)
@pytest.mark.parametrize("way", WAYS)
@on_meshes({"fsdp": 1, "ep": 4})
def test_an_expert_without_tokens_has_zeros(mesh: DeviceMesh, way: str) -> None:
    batch, options = WAYS[way]
    model, own = made(LOADS["all to two ranks"]), policy(batch, **options)
    params = sf.shard(model, mesh, own)
    _, grads = sf.value_and_grad(partial(square, model))(params, sf.data.local_batch(inputs(), mesh, own))
    assert grads.keys() == params.keys()
    up = sf.gather(grads)["layers.0.experts.up"]
    assert [bool(x.any()) for x in up] == [True, *[False] * 6, True]


@on_meshes(*MESHES)
def test_a_rank_may_have_no_tokens(mesh: DeviceMesh) -> None:
    model, own, x = made(), policy(), inputs()
    params, (index, count) = sf.shard(model, mesh, own), sf.data.rank(mesh, own)
    local = x if index == count - 1 else x[:0]

    def loss_fn(params: sf.Params) -> sf.data.Mean:
        out = sf.apply(model, params, local)
        return sf.data.Mean(out.square().sum(), out.numel())

    loss, grads = sf.value_and_grad(loss_fn)(params)
    expected, expected_grads = of_one_rank(made(), x)
    assert_parity({"loss": loss}, {"loss": torch.tensor(expected[0], dtype=torch.float64)}, tol=1e-9)
    assert_parity(sf.gather(grads), expected_grads, tol=1e-9)


@pytest.mark.parametrize("way", WAYS)
@on_meshes({"fsdp": 2, "ep": 2})
def test_gradients_that_wait(mesh: DeviceMesh, way: str) -> None:
    batch, options = WAYS[way]
    model, own, x = made(), policy(batch, **options), inputs(8)
    params = sf.shard(model, mesh, own)
    total = None
    for part in x.chunk(2):
        local = sf.data.local_batch(part, mesh, own)
        pending = sf.grad(partial(square, model), reduce=None)(params, local)
        total = pending if total is None else sf.tree.map(torch.add, total, pending)
    assert total is not None
    _, expected = of_one_rank(made(), x)
    found = sf.tree.map(lambda g: g / 2, sf.reduce_grads(total))
    assert_parity(sf.gather(found), expected, tol=1e-9)


@pytest.mark.parametrize("batch", [BATCH, SHARED])
@on_meshes({"fsdp": 2, "ep": 2})
def test_a_trainer_accumulates(mesh: DeviceMesh, batch: Sequence[str]) -> None:
    own, x = policy(batch), inputs(8)
    trainer = sf.Trainer(made(), mesh, own)
    first, second = x.chunk(2)
    with trainer.no_sync():
        (trainer(sf.data.local_batch(first, mesh, own)).square().mean() / 2).backward()
    (trainer(sf.data.local_batch(second, mesh, own)).square().mean() / 2).backward()
    _, expected = of_one_rank(made(), x)
    found: list[tuple[str, Any]] = [(name, p.grad) for name, p in trainer.named_parameters()]
    whole = {name.removeprefix("module."): grad.full_tensor() for name, grad in found}
    assert_parity(whole, expected, tol=1e-9)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "ep": 2})
def test_pending_gradients_are_those_of_own_experts(mesh: DeviceMesh) -> None:
    model, own = made(), policy()
    params = sf.shard(model, mesh, own)
    local = sf.data.local_batch(inputs(), mesh, own)
    pending = sf.grad(lambda p: sf.apply(model, p, local, method="dense").sum(), reduce=None)(params)
    assert pending["layers.0.experts.up"].to_local().shape == (EXPERTS // 2, HIDDEN, WIDTH)
    ones = torch.ones(EXPERTS // 2, HIDDEN, WIDTH, dtype=torch.float64)
    reduced = sf.reduce_grads({"layers.0.experts.up": ones}, like=params)
    assert_close(sf.gather(reduced)["layers.0.experts.up"], torch.full((EXPERTS, HIDDEN, WIDTH), 0.5).double())


@on_meshes({"fsdp": 2, "ep": 2})
def test_gradients_wait_beside_reduced_ones(mesh: DeviceMesh) -> None:
    own, x = policy(), inputs()
    trainer = sf.Trainer(made(), mesh, own)
    local = sf.data.local_batch(x, mesh, own)
    trainer(local).square().mean().backward()
    with trainer.no_sync():
        trainer(local).square().mean().backward()
    trainer(local).square().mean().backward()
    found: list[tuple[str, Any]] = [(name, p.grad) for name, p in trainer.named_parameters()]
    whole = {name.removeprefix("module."): grad.full_tensor() / 3 for name, grad in found}
    assert_parity(whole, of_one_rank(made(), x)[1], tol=1e-9)


@pytest.mark.parametrize("way", WAYS)
@on_meshes({"fsdp": 2, "ep": 2})
def test_derivatives_of_derivatives(mesh: DeviceMesh, way: str) -> None:
    batch, options = WAYS[way]
    model, own, x = made(), policy(batch, **options), inputs()
    params = sf.shard(model, mesh, own)
    local = sf.data.local_batch(x, mesh, own)
    plain = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    tangents = {n: torch.randn(p.shape, dtype=p.dtype, generator=generator) for n, p in plain.items()}

    def plain_loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, p, (x,)).square().mean()

    expected = torch.func.jvp(torch.func.grad(plain_loss), (plain,), (tangents,))[1]
    other = made()
    other.load_state_dict(tangents, strict=False)
    along = sf.shard(other, mesh, own)
    assert_parity(sf.gather(sf.hvp(partial(square, model), (params, local), along)), expected, tol=1e-9)
    slope = sf.jvp(lambda p: square(model, p, local), (params,), (along,))[1]
    for axis in batch:
        slope = sf.collectives.pmean(slope, mesh, axis)
    assert_close(slope, torch.func.jvp(plain_loss, (plain,), (tangents,))[1], rtol=1e-9, atol=1e-12)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("way", WAYS)
@on_meshes({"fsdp": 2, "ep": 2})
def test_checkpoints_send_tokens_again(mesh: DeviceMesh, way: str) -> None:
    batch, options = WAYS[way]
    model, own, x = made(LOADS["all to one and the next"]), policy(batch, **options), inputs()
    params = sf.shard(model, mesh, own)

    class Saving(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model.__class__ = Saving
    _, grads = sf.value_and_grad(partial(square, model))(params, sf.data.local_batch(x, mesh, own))
    assert_parity(sf.gather(grads), of_one_rank(made(LOADS["all to one and the next"]), x)[1], tol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_a_simulated_step_is_as_on_one_rank(way: str) -> None:
    batch, options = WAYS[way]
    model = made()
    report = sf.check(model, sf.MeshSpec(fsdp=2, ep=2), policy(batch, **options), partial(square, model), inputs())
    assert report.ok, str(report)


@pytest.mark.parametrize("way", ["batch, grouped", "shared, grouped"])
@on_meshes({"fsdp": 2, "ep": 2})
def test_a_step_is_one_graph(mesh: DeviceMesh, way: str) -> None:
    """Without sizes that depend on values: each expert computes all tokens."""
    batch, options = WAYS[way]
    model, own, x = made(), policy(batch, **options), inputs()
    params = sf.shard(model, mesh, own)
    step = sf.jit(sf.value_and_grad(partial(square, model)), backend="eager")
    _, grads = step(params, sf.data.local_batch(x, mesh, own))
    assert_parity(sf.gather(grads), of_one_rank(made(), x)[1], tol=1e-9)


@pytest.mark.parametrize("batch", [BATCH, SHARED])
@on_meshes({"fsdp": 2, "ep": 2})
def test_a_graph_of_a_forward_that_picks_tokens_is_an_error(mesh: DeviceMesh, batch: Sequence[str]) -> None:
    model, own = made(), policy(batch)
    params, local = sf.shard(model, mesh, own), sf.data.local_batch(inputs(), mesh, own)
    step = sf.jit(sf.value_and_grad(partial(square, model)), backend="eager")
    with pytest.raises(sf.ShardError, match=r"torch.where\(ids == expert\)` needs the value .* Experts\(grouped=...\)"):
        step(params, local)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "ep": 2})
def test_gradients_of_each_sample(mesh: DeviceMesh) -> None:
    model, x = made(), inputs()

    def loss_fn(params: sf.Params, sample: Tensor) -> Tensor:
        return square(model, params, sample)

    for batch in (SHARED, BATCH):
        own = policy(batch, grouped=grouped)
        params, local = sf.shard(model, mesh, own), sf.data.local_batch(x, mesh, own)
        each = sf.gather(sf.vmap(sf.grad(loss_fn), in_dims=(None, 0))(params, local))
        for index, sample in enumerate(x):
            expected = of_one_rank(made(), sample)[1]
            assert_parity({name: g[index] for name, g in each.items()}, expected, tol=1e-9)
    params = sf.shard(model, mesh, policy(BATCH))
    with pytest.raises(sf.ShardError, match="samples lie on 'ep', and weights of experts are whole for each"):
        sf.vmap(sf.grad(loss_fn), in_dims=(None, 0))(params, sf.data.local_batch(x, mesh, policy(BATCH)))


def test_a_plan_says_what_stays_split() -> None:
    plan = sf.plan(made(), sf.MeshSpec(fsdp=2, ep=2), policy())
    assert plan.explain("layers.0.experts.up").splitlines()[1:] == [
        "  local (4, 20, 6), 3840 bytes per rank",
        "  forward: all_gather over fsdp; backward: reduce_scatter over fsdp",
        "  used as split over ep: what it computes with comes from all ranks there",
    ]
    assert "all_reduce over fsdp" in plan.explain("layers.0.experts.shift")
    assert "used as split" not in plan.explain("layers.0.dense.weight")
    other = sf.plan(made(), sf.MeshSpec(fsdp=2, ep=2), replace(policy(), compute={}))
    assert plan != other
    assert plan.comm_bytes < other.comm_bytes


# ---------------------------------------------------------------------------------------------------------------------
# What travels


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "ep": 4})
def test_a_token_goes_once_to_a_rank(mesh: DeviceMesh) -> None:
    """Both experts of all tokens are on rank 0: the other ranks send their tokens once, and their routing."""
    model, own = made({0: 10.0, 1: 5.0}), policy()
    params, local = sf.shard(model, mesh, own), sf.data.local_batch(inputs(), mesh, own)
    square(model, params, local)
    with torch.no_grad(), count_collectives() as counts:
        sf.apply(model, params, local)
    token = (WIDTH + 2) * 8 + 2 * 8  # with two weights and the numbers of two experts
    sent = local.shape[1] * token
    back = 0 if mesh.get_local_rank("ep") else 4 * local.shape[1] * WIDTH * 8  # for the tokens of all ranks
    layers = len(model.layers)
    assert counts.as_dict()["all_to_all"] == layers * 5  # counts, tokens, experts, weights; results
    assert counts.bytes_of["all_to_all"] == layers * (4 * 8 + sent + back)


@pytest.mark.parametrize("way", ["batch", "shared"])
@on_meshes({"fsdp": 1, "ep": 2})
def test_a_plan_counts_what_travels_if_no_token_stays(mesh: DeviceMesh, way: str) -> None:
    batch, options = WAYS[way]
    model, own = made({0: 10.0, 7: 10.0}), policy(batch, **options)  # each token chooses both ranks
    params, local = sf.shard(model, mesh, own), sf.data.local_batch(inputs(), mesh, own)
    plan = sf.plan(model, sf.MeshSpec(fsdp=1, ep=2), own, example=local)
    assert plan.comm_bytes - sf.plan(model, sf.MeshSpec(fsdp=1, ep=2), own).comm_bytes == plan.activation_bytes
    step = partial(square, model)
    for _ in range(2):  # which also compare their batches
        step(params, local)
    with count_collectives() as counts:
        sf.grad(step, reduce=None)(params, local)
    sent = {kind: counts.bytes_of.get(kind, 0) for kind in ("all_to_all", "all_reduce", "all_gather")}
    if way == "batch":  # over data axes weights are gathered, too, and the loss is averaged
        sent["all_reduce"] = sent["all_gather"] = 0
    # Of 2 ranks, half of an all-to-all stays, and an all-reduce is as much as its tensor.
    assert sent["all_to_all"] // 2 + sent["all_reduce"] + sent["all_gather"] == plan.activation_bytes > 8000


# ---------------------------------------------------------------------------------------------------------------------
# The exchange of rows


def _exchanged(mesh: DeviceMesh, x: Tensor, send: Sequence[int]) -> Tensor:
    receive = sf.collectives.all_to_all(torch.tensor(send), mesh, "ep", 0, 0)
    return all_to_all_rows(x, mesh, "ep", send, receive.tolist())


@pytest.mark.everyday(1)
@on_meshes({"ep": 3})
def test_rows_go_where_counts_say(mesh: DeviceMesh) -> None:
    rank = mesh.get_rank()
    sends = [[0, 2, 1], [3, 0, 0], [0, 0, 0]]
    rows = [torch.arange(sum(s) * 2, dtype=torch.float64).view(-1, 2) + 100 * r for r, s in enumerate(sends)]
    wanted = torch.cat([rows[r].split(sends[r])[rank] for r in range(3)])
    assert torch.equal(_exchanged(mesh, rows[rank], sends[rank]), wanted)
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        assert torch.equal(_exchanged(mesh, rows[rank].to(dtype), sends[rank]), wanted.to(dtype))
    assert torch.equal(_exchanged(mesh, rows[rank][:, 0], sends[rank]), wanted[:, 0])
    assert _exchanged(mesh, rows[rank][:, :0], sends[rank]).shape == (len(wanted), 0)


@on_meshes({"ep": 3})
def test_derivatives_of_rows_come_back(mesh: DeviceMesh) -> None:
    rank = mesh.get_rank()
    send = [[0, 2, 1], [3, 0, 0], [0, 0, 0]][rank]
    x = torch.randn(sum(send), 2, dtype=torch.float64, requires_grad=True)
    factor = torch.tensor(float(rank + 1), dtype=torch.float64)
    (first,) = torch.autograd.grad((_exchanged(mesh, x, send) ** 3 * factor).sum(), x, create_graph=True)
    there = torch.arange(1.0, 4.0, dtype=torch.float64).repeat_interleave(torch.tensor(send))[:, None]
    assert_close(first, 3 * x**2 * there)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_close(second, 6 * x * there)
    tangent = torch.func.jvp(lambda x: _exchanged(mesh, x, send), (x.detach(),), (torch.ones_like(x),))[1]
    assert torch.equal(tangent, torch.ones_like(tangent))
    many = torch.stack([x.detach(), -x.detach()], 1)  # [rows, 2, c]
    mapped = torch.func.vmap(lambda x: _exchanged(mesh, x, send), in_dims=1, out_dims=1)(many)
    assert torch.equal(mapped, _exchanged(mesh, many, send))


@pytest.mark.everyday(7)
@pytest.mark.parametrize(
    ("send", "receive", "match"),
    [
        ([1, 1, 1], [1, 2], r"send=\[1, 1, 1\] has to be ep=2 counts"),
        ([1, 1], [1, 2], r"x has 3 rows, and send=\[1, 1\] adds up to 2"),
        ([4, -1], [1, 2], r"send=\[4, -1\] has to be ep=2 counts"),
        ([1, 2], [3], r"receive=\[3\] has to be ep=2 counts"),
    ],
)
def test_counts_that_do_not_fit_are_errors(send: list[int], receive: list[int], match: str) -> None:
    with pytest.raises(sf.ShardError, match=match):
        all_to_all_rows(torch.empty(3, 2, device="meta"), sf.MeshSpec(ep=2), "ep", send, receive)


@pytest.mark.everyday(1)
def test_rows_without_data_have_a_shape() -> None:
    x = torch.empty(3, 2, device="meta")
    assert all_to_all_rows(x, sf.MeshSpec(ep=2), "ep", [1, 2], [5, 0]).shape == (5, 2)
    with sf.simulate(ep=2) as mesh, pytest.raises(sf.ShardError, match=r"sf\.simulate cannot follow"):
        all_to_all_rows(torch.ones(3, 2), mesh, "ep", [1, 2], [1, 2])


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


def _mistakes() -> dict[str, tuple[Callable[[], sf.Policy], str]]:
    two = replace(policy(), rules={**policy().rules, "**.shift": "experts c"})
    return {
        "experts that do not divide": (policy, r"\(experts=8\) over ep=3, 8 % 3 = 2"),
        "a part after another axis": (
            lambda: replace(policy(), rules={**policy().rules, "**.up": "experts@fsdp@ep ff c"}),
            r"experts\.up: its module computes with a part over 'ep', which 'experts@fsdp@ep' must be split over first",
        ),
        "a part of neighbours": (lambda: policy() | sf.Policy(regather=2), "weights of experts differ between"),
        "not all by number": (lambda: two, r"shift' \(8, 12\) has the rule 'experts c'; all parameters of the module"),
    }


@pytest.mark.everyday(7)
@pytest.mark.parametrize("mistake", ["experts that do not divide", "a part after another axis", "a part of neighbours"])
def test_layouts_that_cannot_be_are_errors(mistake: str) -> None:
    make, match = _mistakes()[mistake]
    ep = 3 if "divide" in mistake else 2
    with pytest.raises(sf.ShardError, match=match):
        sf.plan(made(), sf.MeshSpec(fsdp=4, ep=ep), make())


@pytest.mark.everyday(1)
@pytest.mark.parametrize("batch", [BATCH, SHARED])
def test_weights_that_are_not_split_by_number_are_errors(batch: Sequence[str]) -> None:
    used, match = _mistakes()["not all by number"]
    run_raises(sf.ShardError, _step, used() | sf.Policy(batch=batch), match=match)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_no_expert_are_an_error_on_all_ranks(way: str) -> None:
    batch, options = WAYS[way]
    match = "routed to experts that are not among 0 to 7"
    run_raises(sf.ShardError, _wrong_numbers, policy(batch, **options), match=match)


def _step(used: sf.Policy) -> None:
    model, mesh = made(), sf.make_mesh("cpu", fsdp=2, ep=2)
    square(model, sf.shard(model, mesh, used), sf.data.local_batch(inputs(), mesh, used))


class _Off(Layer):
    """Routes to experts that are not there; where ranks have tokens of their own, only on one of them."""

    first = 0

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        ids = torch.full((len(flat), 2), self.first, device=x.device)
        return self.experts(flat, ids, torch.ones_like(ids, dtype=x.dtype))


def _wrong_numbers(used: sf.Policy) -> None:
    mesh = sf.make_mesh("cpu", fsdp=2, ep=2)
    alone = used.batch == BATCH and mesh.get_local_rank("ep")
    model = _Off(torch.zeros(EXPERTS)).double()
    model.first = 0 if alone else EXPERTS
    params = sf.shard(model, mesh, used)
    sf.apply(model, params, sf.data.local_batch(inputs(), mesh, used))


class _Odd(nn.Module):
    """Gives its experts fewer weights than tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.zeros(len(x), 2, dtype=torch.long, device=x.device)
        return self.experts(x, ids, x[1:, :2])


@pytest.mark.everyday(1)
def test_other_arguments_are_an_error() -> None:
    with pytest.raises(sf.ShardError, match=r"Experts got tokens \(3, 12\), experts \(3, 2\) of torch.int64 and wei"):
        sf.plan(_Odd(), sf.MeshSpec(fsdp=1, ep=2), policy(SHARED), example=torch.zeros(3, WIDTH))


# ---------------------------------------------------------------------------------------------------------------------
# Models of transformers


NAMES = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3")


def _reference(family: Family) -> tuple[list[float], dict[str, Tensor]]:
    model = family.make()
    given, ids = family.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    losses, grads = [], {}
    for step in range(3):
        optimizer.zero_grad()
        loss = family.loss(model(**given), ids)
        loss.backward()
        if not step:
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, grads


def _require_family(mesh: DeviceMesh, name: str, make: Callable[[nn.Module], sf.Policy]) -> sf.Params:
    family = FAMILIES[name]
    model = family.make()
    own = make(model)
    params = sf.shard(model, mesh, own)
    given, ids = sf.data.local_batch(family.batch(), mesh, own)

    def loss_fn(params: sf.Params) -> Tensor:
        return family.loss(sf.apply(model, params, **given), ids)

    with InDouble():
        losses, expected = _reference(family)
        optimizer = sf.optim.adamw(1e-3, weight_decay=0)
        state, found = optimizer.init(params), []
        for step in range(3):
            loss, grads = sf.value_and_grad(loss_fn)(params)
            if not step:
                assert_parity(sf.gather(grads), expected, tol=1e-9)
            params, state = optimizer.step(params, grads, state)
            found.append(float(loss))
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
    return params


@pytest.mark.one_mesh
@pytest.mark.parametrize("name", NAMES)
@on_meshes({"fsdp": 2, "ep": 2}, {"fsdp": 1, "ep": 4})
def test_a_family_without_tensor_parallelism(mesh: DeviceMesh, name: str) -> None:
    params = _require_family(
        mesh, name, lambda m: sf.policies.from_transformers(m, axis=None, data_axis="fsdp", expert_axis="ep")
    )
    ways = 2 * mesh["ep"].size() // 2
    whole, _ = params.plan.leaves["model.layers.1.mlp.experts.down_proj"]
    assert params["model.layers.1.mlp.experts.down_proj"].to_local().shape[0] == whole.shape[0] // ways


@pytest.mark.everyday(1)
@pytest.mark.one_mesh
@pytest.mark.parametrize("name", NAMES)
@on_meshes({"fsdp": 1, "tp": 2, "ep": 2}, {"fsdp": 2, "ep": 2, "tp": 1})
def test_a_family_with_tensor_parallelism(mesh: DeviceMesh, name: str) -> None:
    _require_family(mesh, name, lambda m: sf.policies.from_transformers(m, expert_axis="ep"))


@pytest.mark.one_mesh
@pytest.mark.parametrize("name", NAMES)
@on_meshes({"fsdp": 1, "tp": 2, "ep": 2}, {"fsdp": 1, "tp": 1, "ep": 4})
def test_a_family_over_a_compute_axis(mesh: DeviceMesh, name: str) -> None:
    _require_family(
        mesh, name, lambda m: sf.policies.from_transformers(m, expert_axis="ep") | sf.Policy(batch=("fsdp",))
    )


@pytest.mark.parametrize("batch", [BATCH, SHARED])
@on_meshes({"fsdp": 1, "ep": 2, "tp": 2})
def test_activations_split_along_the_sequence(mesh: DeviceMesh, batch: Sequence[str]) -> None:
    _require_family(
        mesh,
        "Mixtral",
        lambda m: sf.policies.from_transformers(m, expert_axis="ep", sequence_parallel=True) | sf.Policy(batch=batch),
    )


@on_meshes({"fsdp": 2, "ep": 2, "tp": 1})
def test_dense_weights_over_both_axes(mesh: DeviceMesh) -> None:
    params = _require_family(
        mesh, "Mixtral", lambda m: sf.policies.from_transformers(m, data_axis=("fsdp", "ep"), expert_axis="ep")
    )
    assert sf.typeof(params, "model.layers.0.mlp.experts.down_proj") == "f64[experts@ep _@fsdp _@tp]"
    assert sf.typeof(params, "model.layers.0.self_attn.o_proj.weight") == "f64[_@fsdp@ep (heads@tp d)]"


def _by_number(model: Any) -> sf.Policy:
    plan = {name: style for name, style in model.tp_plan.items() if ".experts" not in name}
    experts = {f"model.layers.*.mlp.experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
    model.tp_plan = plan | experts | {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    return sf.policies.from_transformers(model)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", NAMES)
@on_meshes({"fsdp": 2, "tp": 2})
def test_grouped_gemm_splits_over_the_tensor_parallel_axis(mesh: DeviceMesh, name: str) -> None:
    params = _require_family(mesh, name, _by_number)
    assert sf.typeof(params, "model.layers.1.mlp.experts.gate_up_proj") == "f64[experts@tp _ _@fsdp]"


@pytest.mark.everyday(1)
def test_what_cannot_be_split_is_an_error() -> None:
    with pytest.raises(sf.ShardError, match=r"axis=None\): no axis to split activations over"):
        sf.policies.from_transformers(FAMILIES["Mixtral"].make(), axis=None, sequence_parallel=True)
    with pytest.raises(sf.ShardError, match=r"expert_axis='ep': the ep_plan of the model names no experts"):
        sf.policies.from_transformers(FAMILIES["Llama"].make(), expert_axis="ep")


# ---------------------------------------------------------------------------------------------------------------------
# The example


EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # as when torchrun starts it


def _losses_of_the_example(steps: int, **options: Any) -> list[float]:
    return importlib.import_module("moe").train(steps=steps, **options)


def test_the_example_learns_the_same_on_any_mesh() -> None:
    """Without the balance, which is one of each rank's own tokens."""
    (alone,) = run(_losses_of_the_example, 6, ep=1, balance=0.0, ranks=1)
    found = [run(_losses_of_the_example, 6, ep=ep, balance=0.0) for ep in (2, 4)]
    for losses in (*found[0], *found[1]):
        torch.testing.assert_close(losses, alone[: len(losses)], rtol=1e-4, atol=1e-4)
    assert alone[-1] < alone[0] - 1


class _Scaled(Experts):
    """Without the shift, and with an argument that is no tensor."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, scale: float = 1.0) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            token, slot = torch.where(ids == expert)
            made = torch.tanh(x[token] @ self.up[expert].t()) @ self.down[expert].t() * scale
            out = out.index_add(0, token, made * weights[token, slot, None])
        return out


def test_experts_that_are_split_within_may_have_arguments_that_are_no_tensors() -> None:
    rules = {"up": "e f@tp c", "down": "e c f@tp"}
    policy = sf.Policy(rules=rules, compute={"": tensor_parallel_experts})
    experts, x, ids = _Scaled().double(), torch.randn(7, WIDTH).double(), torch.randint(EXPERTS, (7, 2))
    arguments = x, ids, torch.rand(7, 2).double(), 3.0
    wanted = experts(*arguments)
    with sf.simulate(fsdp=1, tp=2) as mesh:
        assert_parity({"out": sf.apply(experts, sf.shard(experts, mesh, policy), *arguments)}, {"out": wanted.detach()})
