"""`apply` and `value_and_grad` against one process, on every mesh; what they communicate; what they refuse."""

import copy
import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import decoder, policy, token_loss, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.comm import exchange_numbers
from shardfn.comm.packing import AxisCollective
from shardfn.testing import assert_parity, count_collectives, on_meshes, run, run_raises

TRACE = {path.stem for path in (Path(sf.__file__).parent / "trace").glob("*.py")}
OF_A_CALL = {"guards", "meta_values", "state_rollback"}  # whether it is like the traced one

MESHES = tuple({"fsdp": f, "tp": t} for f, t in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (3, 1)))


def _loss(model: nn.Module) -> Any:
    return lambda params, x, y: sf.cross_entropy(sf.apply(model, params, x), y)


def _mine(mesh: DeviceMesh, *batch: Tensor) -> tuple[Tensor, ...]:
    return sf.data.local_batch(batch, mesh)


def _without_noise(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """A key bias shifts all scores of a query alike: its gradient is rounding noise."""
    return {name: value for name, value in tree.items() if "wk.bias" not in name}


def _reference_grads(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


@pytest.mark.everyday(1)
@pytest.mark.sample(8)
@pytest.mark.parametrize("kv", [4, 1])
@on_meshes(*MESHES)
def test_ten_adamw_steps_equal_one_process(mesh: DeviceMesh, kv: int) -> None:
    model, reference = decoder(kv), decoder(kv)
    optimizer, ref_optimizer = (
        sf.optim.adamw(1e-2, weight_decay=0.1),
        torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1),
    )
    params = sf.shard(model, mesh, policy())
    state = optimizer.init(params)
    step = sf.value_and_grad(_loss(model))
    for i in range(10):
        x, y = tokens(i)
        loss, grads = step(params, *_mine(mesh, x, y))
        ref_optimizer.zero_grad()
        ref_loss = token_loss(reference(x), y)
        ref_loss.backward()
        assert_parity({"loss": loss}, {"loss": ref_loss.detach()})
        assert {n: g.placements for n, g in grads.items()} == {n: p.placements for n, p in params.items()}
        assert_parity(_without_noise(sf.gather(grads)), _without_noise(_reference_grads(reference)))
        params, state = optimizer.step(params, grads, state)
        ref_optimizer.step()
        expected = {n: p.detach() for n, p in reference.named_parameters(remove_duplicate=False)}
        assert_parity(_without_noise(sf.gather(params)), _without_noise(expected))


_FIELDS = [
    {"regather": False},
    {"units": ("layers.*.attn", "layers.*")},
    {"units": ()},
    {"pad": {"vocab": 16, "ff": 8}},
]


@pytest.mark.everyday(3)
@pytest.mark.one_mesh
@pytest.mark.parametrize("fields", _FIELDS)
@on_meshes()
def test_units_and_regather_change_no_number(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    model = decoder()
    x, y = tokens()
    loss, grads = sf.value_and_grad(_loss(model))(sf.shard(model, mesh, policy(**fields)), *_mine(mesh, x, y))
    ref_loss = token_loss(model(x), y)
    ref_loss.backward()
    assert_parity({"loss": loss}, {"loss": ref_loss.detach()})
    assert_parity(_without_noise(sf.gather(grads)), _without_noise(_reference_grads(model)))


class SeveralHeads(nn.Module):
    """Returns tensors of different sizes that are all split."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 4 * n) for n in range(1, 7))

    def forward(self, x: Tensor) -> Any:
        first, *rest = (head(x) for head in self.heads)
        return first, {"rest": tuple(rest)}


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_outputs_leave_in_the_same_order_on_all_ranks(mesh: DeviceMesh) -> None:
    """The hashes of strings, by which sets are in order, differ between ranks: of torchrun, and here."""
    assert len({row[0] for row in exchange_numbers(mesh, [hash("tp")])}) > 1
    torch.manual_seed(0)
    model, x = SeveralHeads(), torch.randn(2, 8)
    params = sf.shard(model, mesh, sf.Policy(rules={"heads.*.weight": "_@tp c"}))
    want = model(x)
    for _ in range(3):
        torch.testing.assert_close(sf.apply(model, params, x), want)


@pytest.mark.everyday(2)
@on_meshes({"replicate": 2, "fsdp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "data": 2}, {"dp_replicate": 2, "tp": 2})
def test_other_axis_names_and_orders(mesh: DeviceMesh) -> None:
    model = decoder()
    without_fsdp = {pattern: rule.replace("@fsdp", "") for pattern, rule in policy().rules.items()}
    rules = without_fsdp if "tp" in (mesh.mesh_dim_names or ()) else {}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, sizes={"d": 3}))
    x, y = tokens()
    loss, grads = sf.value_and_grad(_loss(model))(params, *_mine(mesh, x, y))
    ref_loss = token_loss(model(x), y)
    ref_loss.backward()
    assert_parity({"loss": loss}, {"loss": ref_loss.detach()})
    assert_parity(_without_noise(sf.gather(grads)), _without_noise(_reference_grads(model)))


@on_meshes({"fsdp": 2, "tp": 2})
def test_pending_gradients_are_reduced_once(mesh: DeviceMesh) -> None:
    model = decoder()
    params = sf.shard(model, mesh, policy())
    pending = sf.value_and_grad(_loss(model), reduce=None)
    total: Any = None
    for i in range(3):
        _, grads = pending(params, *_mine(mesh, *tokens(i)))
        total = grads if total is None else sf.tree.map(torch.add, total, grads)
    with count_collectives() as counts:
        reduced = sf.reduce_grads(total)
    assert counts.total == sum(
        bool(bucket.axes) or any(params.plan.layouts[name].trainable for name in bucket.leaves)
        for unit in params.plan.units
        for bucket in unit.buckets
    )
    for i in range(3):
        x, y = tokens(i)
        token_loss(model(x), y).backward()
    assert {n: g.placements for n, g in reduced.items()} == {n: p.placements for n, p in params.items()}
    assert_parity(_without_noise(sf.gather(reduced)), _without_noise(_reference_grads(model)))
    assert sf.reduce_grads(reduced)["emb.weight"] is reduced["emb.weight"]


@on_meshes({"fsdp": 4}, {"fsdp": 3})
def test_a_mean_over_unequal_counts_is_exact(mesh: DeviceMesh) -> None:
    model = decoder()
    params = sf.shard(model, mesh, sf.Policy())
    x, y = tokens()
    y[:, 3:] = torch.where(torch.arange(12)[:, None] % 4 == 0, torch.tensor(-100), y[:, 3:])
    y[:5] = -100

    def loss_fn(p: sf.Params, x: Tensor, y: Tensor) -> sf.data.Mean:
        return sf.data.Mean(sf.cross_entropy(sf.apply(model, p, x), y, reduction="sum"), (y != -100).sum())

    loss, grads = sf.value_and_grad(loss_fn)(params, *_mine(mesh, x, y))
    ref_loss = token_loss(model(x), y)
    ref_loss.backward()
    assert_parity({"loss": loss}, {"loss": ref_loss.detach()})
    assert_parity(_without_noise(sf.gather(grads)), _without_noise(_reference_grads(model)))


def _counts_of_a_step(axes: dict[str, int], regather: bool) -> tuple[dict[str, int], dict[str, int]]:
    mesh = sf.make_mesh("cpu", **axes)
    model = decoder()
    params = sf.shard(model, mesh, policy(regather=regather))
    batch = _mine(mesh, *tokens())
    step = sf.value_and_grad(_loss(model))
    for _ in range(2):
        step(params, *batch)  # the first calls compare the batch
    with count_collectives() as counts:
        step(params, *batch)
    buckets = [
        (u.name, bool(b.axes), any(params.plan.leaves[n][0].trainable for n in b.leaves))
        for u in params.plan.units
        for b in u.buckets
    ]
    expected = {
        "gathers": sum((1 + (regather and bool(unit))) for unit, sharded, _ in buckets if sharded),
        "scatters": sum(sharded and trainable for _, sharded, trainable in buckets),
        "replicated": sum(not sharded and trainable for _, sharded, trainable in buckets),
    }
    found = {
        "all_gather": counts.all_gather,
        "scatter": counts.all_to_all + counts.reduce_scatter,
        "all_reduce": counts.all_reduce,
    }
    return found, expected


@pytest.mark.parametrize("regather", [True, False])
def test_one_collective_a_bucket_and_direction(regather: bool) -> None:
    for counts, expected in run(_counts_of_a_step, {"fsdp": 4, "tp": 1}, regather, ranks=4):
        assert counts["all_gather"] == expected["gathers"]
        assert counts["scatter"] == expected["scatters"]
        assert counts["all_reduce"] == expected["replicated"] + 1  # the loss


def test_one_all_reduce_a_shared_input_and_row_parallel_output() -> None:
    layers = 2
    for counts, _ in run(_counts_of_a_step, {"fsdp": 1, "tp": 4}, True, ranks=4):
        # forward: the embedding, and two row-parallel outputs a layer; backward: two shared inputs a layer, q_norm's
        # weight a layer, and the head's input; the logits are gathered
        assert counts == {"all_gather": 1, "scatter": 0, "all_reduce": 1 + 2 * layers + 2 * layers + layers + 1}


def _largest_live_bytes(regather: bool) -> tuple[int, int, int]:
    """(most bytes of gathered weights alive at once in forward and backward, bytes of a unit, of all units)."""
    mesh = sf.make_mesh("cpu", fsdp=2)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    params = sf.shard(model, mesh, sf.Policy(regather=regather))
    peak = 0
    original = AxisCollective.gather

    def counted(self: AxisCollective, shards: Any, dtype: torch.dtype, buffers: Any) -> Any:
        nonlocal peak
        made = yield from original(self, shards, dtype, buffers)
        peak = max(peak, sum(b.storage.nbytes() for b in buffers.buffers() if not b.free))
        return made

    AxisCollective.gather = counted
    try:
        # The first unit has a gradient of its input too; asked for outside, the result would keep a graph.
        step = sf.value_and_grad(lambda p, x: sf.apply(model, p, x.detach().requires_grad_()).square().mean())
        for _ in range(3):
            step(params, torch.randn(3, 64))
    finally:
        AxisCollective.gather = original
    whole = 64 * 64 * 4 + 256 + 64  # weight, bias, a gap
    return peak, whole, 16 * whole


def test_no_full_tree_is_alive_with_regather() -> None:
    for peak, unit, _ in run(_largest_live_bytes, True, ranks=2):
        assert unit <= peak <= 6 * unit  # two units and what they are received in, gradients that are sent and received
    for peak, _, everything in run(_largest_live_bytes, False, ranks=2):
        assert peak >= everything


class _Many(nn.Module):
    """A unit used twice, keyword arguments, trees in and out, another method, an attribute assigned in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.seen = 0.0

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0) -> dict[str, Tensor]:
        x = batch["x"]
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(block(x)) * scale
        self.seen = float(x.detach().sum())
        return {"y": self.norm(x), "w": self.blocks[1].weight.sum()}

    def other(self, x: Tensor) -> Tensor:
        return F.linear(x, self.blocks[1].weight, self.blocks[0].bias)


@on_meshes({"fsdp": 2})
def test_module_features(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model: Any = _Many().double()
    reference: Any = _Many().double()
    reference.load_state_dict(model.state_dict())
    params = sf.shard(model, mesh, sf.Policy(units="blocks.*"))
    x = torch.randn(4, 6, dtype=torch.float64)

    def loss_fn(p: sf.Params, x: Tensor) -> Tensor:
        out = sf.apply(model, p, {"x": x}, scale=0.5)
        return out["y"].square().mean() * 3 + out["w"].sin() + sf.apply(model, p, x, method="other").mean()

    loss, grads = sf.value_and_grad(loss_fn)(params, x)
    out = reference({"x": x}, scale=0.5)
    ref_loss = out["y"].square().mean() * 3 + out["w"].sin() + reference.other(x).mean()
    ref_loss.backward()
    assert_parity({"loss": loss}, {"loss": ref_loss.detach()})
    assert_parity(sf.gather(grads), _reference_grads(reference))
    assert model.seen == reference.seen != 0.0
    assert params.buffers["norm.num_batches_tracked"].item() == 1 == reference.norm.num_batches_tracked.item()
    assert torch.equal(params.buffers["norm.running_mean"], reference.norm.running_mean)
    assert model.norm.num_batches_tracked.item() == 0, "the model's own buffers are copied, not used"


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@on_meshes({"fsdp": 2}, {"fsdp": 1, "tp": 2})
@pytest.mark.parametrize("units", ["blocks.*", ()])
def test_a_reentrant_checkpoint_is_refused_where_it_would_lose_gradients(mesh: DeviceMesh, units: Any) -> None:
    """`torch.autograd.grad` does not run it when nothing but the input leads to it, and weights would get zeros."""
    model = _Checkpointed(reentrant=True).double()
    params = sf.shard(model, mesh, sf.Policy(units=units))
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def loss(p: Any, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    for differentiate in (sf.grad(loss), sf.value_and_grad(loss), sf.grad(loss, argnums=(0, 1))):
        with pytest.raises(sf.ShardError, match=r"checkpoint with use_reentrant=True.* Write use_reentrant=False"):
            differentiate(params, x)
    model.reentrant = False
    with torch.no_grad():
        value = sf.apply(model, params, x)
    _, grads = sf.value_and_grad(lambda p, x: (sf.apply(model, p, x) - value).sum())(params, x)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    assert_parity(sf.gather(grads), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


@on_meshes({"fsdp": 2})
def test_activation_checkpointing_inside(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _Checkpointed(reentrant=False).double()
    params = sf.shard(model, mesh, sf.Policy(units="blocks.*"))
    x = torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():  # values that the template does not have: recomputation must use the shards
        params = sf.tree.map(lambda leaf: leaf * 1.5, params)
        for p in model.parameters():
            p.mul_(1.5)
    loss, grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, x)
    for p in model.parameters():
        p.data.mul_(1.0)
    ref = model(x).square().mean()
    ref.backward()
    assert_parity({"loss": loss}, {"loss": ref.detach()})
    assert_parity(sf.gather(grads), _reference_grads(model))


@on_meshes({"fsdp": 2})
def test_checkpoint_recomputes_with_the_tree_not_the_template(mesh: DeviceMesh) -> None:
    model = _Checkpointed(reentrant=False).double()
    params = sf.shard(model, mesh, sf.Policy(units="blocks.*"))
    x = torch.randn(4, 6, dtype=torch.float64)
    _, before = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, x)
    for p in model.parameters():
        p.data.fill_(float("nan"))
    _, after = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, x)
    assert_parity(sf.gather(after), sf.gather(before))


@on_meshes({"fsdp": 2})
def test_double_backward_and_two_forwards(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    params = sf.shard(model, mesh, sf.Policy(units=("0", "2")))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def penalty(run: Any) -> Tensor:
        (gx,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        return gx.square().mean() + run(2 * x).mean()

    loss, grads = sf.value_and_grad(lambda p: penalty(lambda x: sf.apply(model, p, x)))(params)
    ref = penalty(model)
    ref.backward()
    assert_parity({"loss": loss}, {"loss": ref.detach()})
    assert_parity(sf.gather(grads), _reference_grads(model))


@on_meshes({"fsdp": 2, "tp": 2})
def test_mixed_precision_dtypes(mesh: DeviceMesh) -> None:
    model = decoder(dtype=torch.float32)
    seen: dict[str, torch.dtype] = {}
    params = sf.shard(
        model, mesh, policy(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    )
    hook = model.layers[0].down.register_forward_hook(
        lambda module, args, out: seen.update(x=args[0].dtype, y=out.dtype)
    )
    loss, grads = sf.value_and_grad(_loss(model))(params, *_mine(mesh, *tokens()))
    hook.remove()
    assert seen == {"x": torch.bfloat16, "y": torch.bfloat16}
    assert loss.dtype == torch.float32
    assert {g.dtype for g in grads.values()} == {torch.float32}
    x, y = tokens()
    ref = token_loss(model(x), y)
    ref.backward()
    assert abs(float(loss) - ref.item()) < 0.02
    full = sf.gather(grads)
    for name, p in model.named_parameters():
        if p.grad is not None and p.grad.norm() > 0.05:
            assert F.cosine_similarity(full[name].flatten(), p.grad.flatten(), 0) > 0.99, name


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_warm_call_runs_nothing_of_the_trace(mesh: DeviceMesh) -> None:
    model = decoder(2)
    params, step = sf.shard(model, mesh, policy()), sf.value_and_grad(_loss(model))
    seen: list[set[str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "shardfn" in frame.f_code.co_filename:
            seen[-1].add(Path(frame.f_code.co_filename).stem)

    for i in range(3):
        seen.append(set())
        sys.setprofile(note)
        try:
            step(params, *tokens(i))
        finally:
            sys.setprofile(None)
    assert seen[0] >= {"shape_trace", "traced_axes", "interpreter"}
    assert not seen[2] & (TRACE - OF_A_CALL)


@on_meshes({"fsdp": 2})
def test_nothing_outlives_a_call(mesh: DeviceMesh) -> None:
    model = decoder()
    params = sf.shard(model, mesh, sf.Policy())
    shape = model.layers[0].down.weight.shape  # no shard has it
    gc.collect()
    gc.disable()  # what only the cycle collector would free counts as a leak
    try:
        for _ in range(3):
            loss, grads = sf.value_and_grad(_loss(model))(params, *_mine(mesh, *tokens()))
            del loss, grads
            with torch.no_grad():
                sf.apply(model, params, tokens()[0])
        assert [o for o in gc.get_objects() if type(o) is Tensor and o.shape == shape] == []
    finally:
        gc.enable()


@on_meshes({"fsdp": 2})
def test_the_model_is_not_changed_after_an_error(mesh: DeviceMesh) -> None:
    model = decoder()
    params = sf.shard(model, mesh, sf.Policy())
    sf.apply(model, params, _mine(mesh, *tokens())[0])
    tables = {name: dict(module.__dict__) for name, module in model.named_modules()}
    own = dict(model.named_parameters())

    class Boom(Exception):
        pass

    def explode(*_: object) -> None:
        raise Boom

    hook = model.layers[1].down.register_forward_hook(explode)
    with pytest.raises(Boom):
        sf.value_and_grad(_loss(model))(params, *_mine(mesh, *tokens()))
    hook.remove()
    for name, module in model.named_modules():
        assert {k: v for k, v in module.__dict__.items() if v is not tables[name][k]} == {}
    assert all(p is own[name] and type(p) is nn.Parameter for name, p in model.named_parameters())
    assert model.layers[1].down.weight is own["layers.1.down.weight"]
    loss, _ = sf.value_and_grad(_loss(model))(params, *_mine(mesh, *tokens()))
    assert_parity({"loss": loss}, {"loss": token_loss(model(tokens()[0]), tokens()[1]).detach()})


@on_meshes({"fsdp": 2})
@pytest.mark.parametrize("through", ["the shard", "the DTensor", "an optimizer"])
def test_a_weight_changed_before_its_backward_is_an_error(mesh: DeviceMesh, through: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params = sf.shard(model, mesh, sf.Policy())
    working = sf.tree.map(lambda leaf: leaf.requires_grad_(), params)
    loss = sf.apply(model, working, torch.ones(2, 4)).sum()
    with torch.no_grad():
        if through == "the shard":
            params["0.weight"].to_local().add_(1)
            params["1.weight"].to_local().add_(1)
        elif through == "the DTensor":
            working["1.weight"].add_(1)
        else:
            working["1.weight"].grad = torch.ones_like(working["1.weight"])
            torch.optim.SGD([working["1.weight"]], lr=0.1).step()
    with pytest.raises(RuntimeError, match="changed in place between the forward and the backward"):
        loss.backward()


@on_meshes({"fsdp": 2})
def test_a_tree_changed_by_its_own_loss_is_an_error(mesh: DeviceMesh) -> None:
    """The loss gets fresh leaves; the tree that they are made of belongs to the caller, who may write into it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params = sf.shard(model, mesh, sf.Policy())

    def loss(own: sf.Params) -> Tensor:
        out = sf.apply(model, own, torch.ones(2, 4)).sum()
        with torch.no_grad():
            params["1.weight"].mul_(2)
        return out

    with pytest.raises(RuntimeError, match=r"'1.weight' was changed in place between the forward and the backward"):
        sf.grad(loss)(params)


@on_meshes({"fsdp": 2})
def test_inference_mode_leaves_nothing_that_training_cannot_use(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    params, x = sf.shard(model, mesh, sf.Policy()), torch.ones(2, 4)
    step = sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())
    for _ in range(2):
        with torch.inference_mode():
            out = sf.apply(model, params, x)
        torch.testing.assert_close(out, model(x))
        assert out.is_inference()
        step(params)


class _Packed(nn.Parameter):
    """A class of its own for frozen weights, as bitsandbytes has it."""


class _Unpacks(nn.Linear):
    """Puts that class around what was gathered, with which `fully_shard` knows nothing to do."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight = _Packed(self.weight.detach() if self.weight.requires_grad else self.weight, requires_grad=False)
        assert type(self.weight) is _Packed
        return super().forward(input)


@on_meshes({"fsdp": 2})
def test_a_frozen_weight_may_be_assigned_in_a_class_of_its_own(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Unpacks(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    params, x = sf.shard(model, mesh, sf.Policy(units="")), torch.ones(2, 4)
    sf.apply(model, params, x)
    loss, grads = sf.value_and_grad(lambda params, x: sf.apply(model, params, x).sum())(params, x)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.load_state_dict(sf.gather(params))
    want = plain(x).sum()
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(sf.gather(grads)["1.weight"], plain[1].weight.grad)
    assert type(model[0].weight) is nn.Parameter, "the model keeps its own"
    trained = sf.shard(model := _Unpacks(4, 4), mesh, sf.Policy())
    with pytest.raises(sf.ShardError, match="a forward assigns the parameter 'weight'"):
        sf.apply(model, trained, x)


@on_meshes({"fsdp": 2})
def test_a_forward_that_assigns_a_parameter_is_an_error(mesh: DeviceMesh) -> None:
    class Assigns(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.weight = nn.Parameter(torch.zeros(4, 4))
            return super().forward(input)

    model = Assigns(4, 4)
    params = sf.shard(model, mesh, sf.Policy())
    with pytest.raises(sf.ShardError, match="a forward assigns the parameter 'weight'"):
        sf.apply(model, params, torch.ones(2, 4))


class _Buffers(nn.Module):
    """Its first forward takes buffers away, registers one and replaces one, each under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.Linear(2, 2)
        self.inner.register_buffer("given", torch.ones(1))
        self.inner.register_buffer("gone", torch.ones(1))
        self.inner.register_buffer("count", torch.zeros(1))
        self.inner.register_buffer("late", None)
        self.again = self.inner

    def forward(self, x: Tensor) -> list[Any]:
        inner = self.inner
        inner.count = inner.count + 1
        if inner.given is not None:
            inner.given, inner.late = None, torch.full((1,), 2.0)
            del inner.gone
            inner.register_buffer("new", torch.full((1,), 3.0))
        self.seen = sorted(inner._buffers)
        return [inner.given, inner.late + 0, inner.new + 0, inner.count + 0, self.again(x)]


@on_meshes({"fsdp": 2})
def test_buffers_that_a_forward_registers_or_takes_away(mesh: DeviceMesh) -> None:
    for wrap in (False, True):
        torch.manual_seed(0)
        model, reference, x = _Buffers(), _Buffers(), torch.ones(1, 2)
        reference.load_state_dict(model.state_dict())
        params = sf.shard(model, mesh, sf.Policy())
        trainer = sf.Trainer(model, mesh, sf.Policy()) if wrap else None
        for _ in range(3):
            found = trainer(x) if trainer is not None else sf.apply(model, params, x)
            torch.testing.assert_close(found, reference(x))
            assert model.seen == reference.seen
        for tree in [trainer.params] if trainer is not None else [params]:
            assert {name.rpartition(".")[2] for name in tree.buffers} == {"count", "late", "new"}
            for name in ("inner.count", "again.count"):
                torch.testing.assert_close(tree.buffers[name], torch.full((1,), 3.0))


@on_meshes({"fsdp": 1, "tp": 1})
def test_a_buffer_that_a_forward_registers(mesh: DeviceMesh) -> None:
    class Registers(nn.Linear):
        scale: Tensor

        def forward(self, input: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                self.register_buffer("scale", torch.full((1,), 2.0))
            return super().forward(input) * self.scale

    model = Registers(2, 2)
    params = sf.shard(model, mesh, sf.Policy())
    sf.apply(model, params, torch.ones(1, 2))
    assert list(params.buffers) == ["scale"]
    params.buffers["scale"].fill_(3)
    torch.testing.assert_close(
        sf.apply(model, params, torch.ones(1, 2)), F.linear(torch.ones(1, 2), *model.parameters()) * 3
    )


class _Grouped(nn.Module):
    """Grouped queries by torch's own attention, which repeats keys by the ratio of the heads that it is given."""

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = nn.Linear(6, 4 * heads), nn.Linear(6, 4 * kv), nn.Linear(6, 4 * kv)
        self.wo = nn.Linear(4 * heads, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


_GROUPED = {"wq.weight": "(heads@tp d) c", "wo.weight": "c (heads@tp d)"}


@pytest.mark.parametrize(("heads", "kv"), [(8, 4), (8, 2), (4, 2), (4, 1)])
@on_meshes({"fsdp": 1, "tp": 4})
def test_fewer_key_heads_than_ranks(mesh: DeviceMesh, heads: int, kv: int) -> None:
    torch.manual_seed(0)
    model = _Grouped(heads, kv).double()
    params = sf.shard(model, mesh, sf.Policy(rules=_GROUPED | {"{wk,wv}.weight": "(kv@tp? d) c"}, sizes={"d": 4}))
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss, grads = sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())(params)
    ref = model(x).square().mean()
    ref.backward()
    assert_parity({"loss": loss}, {"loss": ref.detach()})
    noise = {"wk.bias"}
    full, expected = sf.gather(grads), _reference_grads(model)
    assert_parity({n: full[n] for n in full.keys() - noise}, {n: expected[n] for n in full.keys() - noise})


def _grouped(heads: int, kv: int, rules: dict[str, str]) -> None:
    torch.manual_seed(0)
    mesh, model = sf.make_mesh("cpu", fsdp=1, tp=4), _Grouped(heads, kv)
    sf.apply(model, sf.shard(model, mesh, sf.Policy(rules=_GROUPED | rules, sizes={"d": 4})), torch.ones(2, 5, 6))


@pytest.mark.parametrize(
    ("heads", "kv", "rules", "match"),
    [
        (8, 2, {}, r"The output of 'w[kv]' is the same on all ranks of 'tp' and meets values .*'\(kv@tp\? d\) c'"),
        (12, 3, {"{wk,wv}.weight": "(kv@tp? d) c"}, r"'w[kv]' has 3 parts .* 4 % 3 = 1 and 3 % 4 = 3"),
    ],
)
def test_keys_that_fit_no_group_are_an_error(heads: int, kv: int, rules: dict[str, str], match: str) -> None:
    run_raises(sf.ShardError, _grouped, heads, kv, rules, match=match, ranks=4)


class _Sinks(nn.Module):
    """A parameter for each head, used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gain = Gain(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gain(self.up(x)))


class Gain(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, heads))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _split_gain(module: nn.Module, local: dict[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    assert layout["weight"].name == "gain.weight"
    return x * local["weight"]


@on_meshes({"fsdp": 1, "tp": 4}, {"fsdp": 2, "tp": 2})
def test_a_parallel_forward_of_ones_own(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _Sinks().double()
    rules = {"up.weight": "h@tp c@fsdp", "down.weight": "c@fsdp h@tp", "gain.weight": "h@tp"}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, compute={"gain": _split_gain}))
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss, grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, *_mine(mesh, x))
    ref = model(x).square().mean()
    ref.backward()
    assert_parity({"loss": loss}, {"loss": ref.detach()})
    assert_parity(sf.gather(grads), _reference_grads(model))


class RegisteredGain(Gain):
    """A class of its own, so that `Gain` stays unknown."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_registered_class(mesh: DeviceMesh) -> None:
    model = _Sinks().double()
    model.gain = RegisteredGain(8).double()
    rules = {"up.weight": "h@tp c@fsdp", "down.weight": "c@fsdp h@tp", "gain.weight": "h@tp"}
    calls: list[nn.Module] = []

    def counted(module: nn.Module, local: dict[str, Tensor], layout: Any, x: Tensor) -> Tensor:
        calls.append(module)
        return _split_gain(module, local, layout, x)

    assert sf.register(RegisteredGain)(counted) is counted
    x = torch.ones(4, 6, dtype=torch.float64)
    for module_class in (RegisteredGain, type("Sub", (RegisteredGain,), {})):
        model.gain.__class__ = module_class
        params = sf.shard(model, mesh, sf.Policy(rules=rules))
        for tree in (params, sf.reshard(params, sf.Policy(rules=rules, regather=False))):
            calls.clear()
            torch.testing.assert_close(sf.apply(model, tree, x), model(x))
            assert calls
    # A class with another forward is not meant; its own is followed.
    calls.clear()
    model.gain.__class__ = type("Other", (RegisteredGain,), {"forward": lambda self, x: x + self.weight})
    torch.testing.assert_close(sf.apply(model, sf.shard(model, mesh, sf.Policy(rules=rules)), x), model(x))
    assert not calls
    model = _Sinks().double()
    model.gain.__class__ = type("Mixes", (RegisteredGain,), {"forward": lambda self, x: x * self.weight.cumsum(0)})
    with pytest.raises(sf.ShardError, match=r"cumsum along dim 0, of which each rank has a part(.|\n)*@sf\.register"):
        sf.apply(model, sf.shard(model, mesh, sf.Policy(rules=rules)), x)
    with pytest.raises(TypeError, match=r"expected a class of nn\.Module"):
        no_class: Any = print
        sf.register(no_class)


def _apply_on(axes: dict[str, int], kind: str) -> None:
    mesh = sf.make_mesh("cpu", **axes)
    x, _ = tokens()
    model = decoder()
    params = sf.shard(model, mesh, policy())
    rank = torch.distributed.get_rank()
    if kind == "batch":
        sf.apply(model, params, tokens(rank)[0])
    elif kind == "device":
        sf.apply(model, params, x.to("meta") if rank == 1 else x)
    elif kind == "DTensor":
        sf.apply(model, params, DTensor.from_local(x, mesh))
    elif kind == "other model":
        sf.apply(nn.Linear(3, 3), params, x)
    elif kind == "scalar":
        sf.value_and_grad(lambda p: sf.apply(model, p, x))(params)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("axes", "kind", "match"),
    [
        ({"fsdp": 2, "tp": 2}, "batch", "inputs differ between ranks along 'tp'"),
        ({"fsdp": 1, "tp": 4}, "batch", "sf.data.rank"),
        ({"fsdp": 2, "tp": 2}, "device", "is on 'meta'|1 other ranks cannot use their inputs|other ranks"),
        ({"fsdp": 2, "tp": 2}, "DTensor", r"input \[0\] is a DTensor; .* pass x.to_local"),
        ({"fsdp": 2, "tp": 2}, "other model", "was made for another model"),
        ({"fsdp": 2, "tp": 2}, "scalar", "must be a scalar"),
    ],
)
def test_bad_input_raises_on_every_rank(axes: dict[str, int], kind: str, match: str) -> None:
    run_raises(sf.ShardError, _apply_on, axes, kind, match=match, ranks=4)


class _HardCoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.wq(x).view(-1, 4, 2).flatten(1))


class _Direct(_HardCoded):
    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.linear(x, self.wq.weight))


class _Unsummed(_HardCoded):
    """Joins a split value with one that all ranks share: the gradient of x would be a part of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.wq(x)
        return self.wo(h * torch.tanh(x[..., : h.shape[-1]] * self.wo.bias.sum()))


def _broken(kind: type[nn.Module]) -> None:
    mesh = sf.make_mesh("cpu", fsdp=1, tp=2)
    model = kind()
    rules = {"wq.weight": "h@tp c@fsdp", "wo.weight": "c@fsdp h@tp"}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, compile=True))  # so that no call is amended
    with count_collectives() as counts:
        try:
            sf.grad(lambda p, x: sf.apply(model, p, x).sum())(params, torch.ones(3, 8))
        finally:
            assert counts.all_gather <= 4 and counts.total == counts.all_gather  # only the comparison of batches


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (_HardCoded, "failed in '_HardCoded': shape '.-1, 4, 2.' is invalid"),
        (_Unsummed, "slice has a result of shape .3, 4. here and of .3, 8. on one rank"),
    ],
)
def test_models_that_do_not_fit_are_found_before_any_data_moves(kind: type[nn.Module], match: str) -> None:
    run_raises(sf.ShardError, _broken, kind, match=match, ranks=2)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@on_meshes({"fsdp": 1, "tp": 4}, {"fsdp": 2, "tp": 2})
def test_split_logits_and_their_loss(mesh: DeviceMesh, smoothing: float) -> None:
    model = decoder()
    params = sf.shard(model, mesh, policy(acts={"head": "b s vocab@tp"}))
    x, y = tokens()
    y[0, :3] = -100
    local = _mine(mesh, x, y)
    logits = sf.apply(model, params, local[0])
    assert sf.typeof(logits) == f"f64[{local[0].shape[0]} 5 24@tp]"

    def loss_fn(p: sf.Params, x: Tensor, y: Tensor) -> sf.data.Mean:
        total = sf.cross_entropy(sf.apply(model, p, x), y, reduction="sum", label_smoothing=smoothing)
        return sf.data.Mean(total, (y != -100).sum())

    loss, grads = sf.value_and_grad(loss_fn)(params, *local)
    ref = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=smoothing)
    ref.backward()
    assert_parity({"loss": loss}, {"loss": ref.detach()})
    assert_parity(_without_noise(sf.gather(grads)), _without_noise(_reference_grads(model)))


class _Meets(nn.Module):
    """Two threads meet in the forward."""

    def __init__(self, both: threading.Barrier) -> None:
        super().__init__()
        self.linear, self.both = nn.Linear(4, 4), both

    def forward(self, x: Tensor) -> Tensor:
        with suppress(threading.BrokenBarrierError):
            self.both.wait(1)
        return self.linear(x)


@on_meshes({"fsdp": 2})
def test_two_threads_do_not_call_at_once(mesh: DeviceMesh) -> None:
    model = _Meets(threading.Barrier(2))
    params, x = sf.shard(model, mesh, sf.Policy()), torch.ones(2, 4)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sf.apply, model, params, x)
        while not model.both.n_waiting:
            time.sleep(0.001)
        with pytest.raises(sf.ShardError, match="another thread is in a call of it"):
            sf.apply(model, params, x)
        assert first.result().shape == (2, 4)
    assert sf.apply(model, params, x).shape == (2, 4)
