"""`Trainer` against the functions and against one process; as a module; its checkpoints."""

import copy
import gc
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import VOCAB, decoder, policy, token_loss, tokens
from ranks import folder, quiet
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn._torch import pytree, unwrap_locals
from shardfn.comm.buckets import whole as whole_of
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp2 import fully_shard
from shardfn.testing import assert_parity, count_collectives, on_meshes, run, run_raises


def _loss(model: nn.Module) -> Any:
    return lambda params, x, y: sf.cross_entropy(sf.apply(model, params, x), y)


def _full(trainer: sf.Trainer) -> dict[str, Tensor]:
    return {name: value for name, value in sf.gather(trainer.params).items() if "wk.bias" not in name}


def _of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.detach() for name, p in named if "wk.bias" not in name}


@pytest.mark.everyday(1)
@on_meshes()
def test_the_shell_adds_no_numerics(mesh: DeviceMesh) -> None:
    model, other = decoder(), decoder()
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))
    trainer = sf.Trainer(model, mesh, policy(), optimizer=sf.optim.adamw(1e-2), loss_fn=_loss(model), clip=0.5)
    params = sf.shard(other, mesh, policy())
    state, step = optimizer.init(params), sf.value_and_grad(_loss(other))
    for i in range(3):
        batch = sf.data.local_batch(tokens(i), mesh)
        out = trainer.step(*batch)
        loss, grads = step(params, *batch)
        norm = sf.optim.global_norm(grads)
        params, state = optimizer.step(params, grads, state)
        assert torch.equal(out["loss"], loss) and torch.equal(out["grad_norm"], norm)
        assert out["tokens"] == 60
    for name, leaf in trainer.params.items():
        assert torch.equal(leaf.to_local(), params[name].to_local()), name


@pytest.mark.everyday(1)
@on_meshes()
def test_as_a_module_with_a_torch_optimizer(mesh: DeviceMesh) -> None:
    trainer, reference = sf.Trainer(decoder(), mesh, policy()), decoder()
    assert [n for n, _ in trainer.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in trainer.parameters())
    mine = torch.optim.AdamW([p for p in trainer.parameters() if p.requires_grad], 1e-2)
    theirs = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], 1e-2)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (mine, theirs)]
    for i in range(3):
        x, y = tokens(i)
        local_x, local_y = sf.data.local_batch((x, y), mesh)
        mine.zero_grad()
        token_loss(trainer(local_x), local_y).backward()
        theirs.zero_grad()
        token_loss(reference(x), y).backward()
        norm = trainer.clip_grad_norm_(0.3)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        assert_parity({"norm": norm}, {"norm": expected})
        for optimizer, schedule in zip((mine, theirs), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert_parity(_full(trainer), _of(reference))


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 2})
def test_accumulated_microbatches_equal_one_batch(mesh: DeviceMesh) -> None:
    model, other = decoder(), decoder()
    trainer = sf.Trainer(model, mesh, policy(), optimizer=sf.optim.adamw(1e-2), loss_fn=_loss(model), accumulate=3)
    whole = sf.Trainer(other, mesh, policy(), optimizer=sf.optim.adamw(1e-2), loss_fn=_loss(other))
    batch = sf.data.local_batch(tokens(), mesh)
    assert_parity({"loss": trainer.step(*batch)["loss"]}, {"loss": whole.step(*batch)["loss"]})
    assert_parity(_full(trainer), _full(whole))
    with pytest.raises(
        sf.ShardError, match=r"batch\[0\] has shape \(4, 5\); dim 0 is cut into accumulate=3 parts, 4 % 3"
    ):
        trainer.step(*(t[:4] for t in batch))
    for weights, says in (
        (torch.ones(3), r"has other lengths \(batch\[0\]: 6, batch\[1\]: 6, batch\[2\]: 3\)"),
        (torch.tensor(1.0), "or as a number"),
    ):
        with pytest.raises(sf.ShardError, match=says):
            trainer.step(*batch, weights)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 2}, {"replicate": 2, "fsdp": 2}, {"fsdp": 3})
def test_gradients_held_back_under_no_sync_are_reduced_with_the_next(mesh: DeviceMesh) -> None:
    chosen = policy() if "tp" in (mesh.mesh_dim_names or ()) else sf.Policy()
    trainer, reference = sf.Trainer(decoder(), mesh, chosen), decoder()
    for order in ("held held reduced", "reduced held reduced", "reduced reduced"):
        trainer.zero_grad()
        reference.zero_grad()
        for i, how in enumerate(order.split()):
            x, y = tokens(i)
            local_x, local_y = sf.data.local_batch((x, y), mesh)
            loss = token_loss(trainer(local_x), local_y)
            with trainer.no_sync() if how == "held" else nullcontext(), count_collectives() as counts:
                loss.backward()
            token_loss(reference(x), y).backward()
            if how == "held" and trainer.plan.roles.compute == ():
                assert counts.total == counts.all_gather, counts
            assert all(p.grad is None or p.grad.shape == p.shape for p in trainer.parameters())
        _assert_grads(trainer, reference)


_OF_GRADIENTS: dict[str, Any] = {
    "itself": lambda p: p.grad,
    "square": lambda p: p.grad * p.grad,
    "norm": lambda p: p.grad.norm(),
    "norm by hand": lambda p: p.grad.pow(2).sum().sqrt(),
    "clamp": lambda p: p.grad.clamp(-0.01, 0.01),
    "clamp_": lambda p: p.grad.clone().clamp_(-0.01, 0.01),
    "mul_": lambda p: p.grad.clone().mul_(0.5),
    "plus a number": lambda p: p.grad + 1,
    "average": lambda p: 0.9 * p.grad + 0.1 * p.detach(),
    "step": lambda p: p.detach().clone().sub_(0.1 * p.grad),
    "step by data": lambda p: p.detach().clone().data.add_(p.grad.data, alpha=-0.1),
    "total norm": lambda p: nn.utils.get_total_norm([p.grad, p.grad]),
}


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2}, {"fsdp": 2, "tp": 2}, {"replicate": 2, "fsdp": 2})
def test_what_is_made_of_gradients_under_no_sync_is_made_of_their_mean(mesh: DeviceMesh) -> None:
    chosen = sf.Policy(rules={"0.weight": "f@tp c", "2.weight": "c f@tp"} if mesh.size() == 4 else {})
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    trainer = sf.Trainer(copy.deepcopy(model), mesh, chosen if "tp" in (mesh.mesh_dim_names or ()) else sf.Policy())
    x, y = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with trainer.no_sync():
        own_x, own_y = sf.data.local_batch((x, y), mesh)
        nn.functional.mse_loss(trainer(own_x), own_y).backward()
    nn.functional.mse_loss(model(x), y).backward()
    held = {name: p.grad for name, p in trainer.module.named_parameters() if isinstance(p.grad, DTensor)}
    assert all(any(placement.is_partial() for placement in grad.placements) for grad in held.values())
    for what, of in _OF_GRADIENTS.items():
        for ours, theirs in zip(trainer.module.parameters(), model.parameters(), strict=True):
            made = of(ours)
            assert_parity(
                {what: made.full_tensor() if isinstance(made, DTensor) else made}, {what: of(theirs)}, tol=1e-12
            )
    reduced = sf.reduce_grads(held, like=trainer.params)
    assert_parity(sf.gather(reduced), {name: p.grad for name, p in model.named_parameters()}, tol=1e-12)


def _assert_grads(trainer: sf.Trainer, reference: nn.Module) -> None:
    grads = trainer.params.like((n, p.grad) for n, p in trainer.params.items() if p.grad is not None)
    expected = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False) if p.grad is not None}
    full = sf.gather(grads)
    noise = [n for n in expected if "wk.bias" in n]
    assert_parity(
        {n: g for n, g in full.items() if n not in noise}, {n: g for n, g in expected.items() if n not in noise}
    )


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, layers: int) -> Tensor:
        for layer in self.layers[:layers]:
            x = layer(x)
        return x


@on_meshes({"fsdp": 4})
def test_a_unit_that_the_last_backward_does_not_reach_is_reduced_too(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _Branches()
    reference = copy.deepcopy(model)
    trainer = sf.Trainer(model, mesh, sf.Policy())
    for i, layers in enumerate((3, 2)):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        with trainer.no_sync() if layers == 3 else nullcontext():
            trainer(sf.data.local_batch(x, mesh), layers).square().mean().backward()
        reference(x, layers).square().mean().backward()
        if layers == 3:
            with pytest.raises(sf.ShardError, match="a sum that is still pending"):
                _assert_grads(trainer, reference)
    _assert_grads(trainer, reference)


@on_meshes({"fsdp": 4, "tp": 1})
def test_average_and_evaluation(mesh: DeviceMesh) -> None:
    model = decoder()
    trainer = sf.Trainer(model, mesh, policy(), optimizer=sf.optim.sgd(0.1), loss_fn=_loss(model), ema=0.75)
    assert trainer.ema is not None
    expected = sf.gather(trainer.params)
    for i in range(3):
        trainer.step(*sf.data.local_batch(tokens(i), mesh))
        expected = sf.tree.ema(expected, sf.gather(trainer.params), 0.75)
    assert_parity(sf.gather(trainer.ema), expected)
    before = _full(trainer)
    x, y = tokens()
    loss = trainer.evaluate(*sf.data.local_batch((x, y), mesh))["loss"]
    model.load_state_dict({}, strict=False)
    full = decoder()
    full.load_state_dict(sf.gather(trainer.params) | dict(full.named_buffers()))
    assert_parity({"loss": loss}, {"loss": token_loss(full(x), y).detach()})
    assert_parity(_full(trainer), before)
    assert trainer.training and trainer.module.training


class _Fused(nn.Module):
    """A fused projection, stored in blocks, and a stack stored with one dim per factor."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 8)
        self.qkv = nn.Linear(8, 4 * 2 + 2 * 2 * 2)
        self.out = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        qkv = self.qkv(x)
        d = qkv.shape[-1] // 2
        return self.out(qkv[..., :d] * qkv[..., d:].tanh()) + x


def _fused_policy() -> sf.Policy:
    return sf.Policy(
        rules={
            "qkv.weight": "(q: heads@tp d + k: kv@tp d + v: kv@tp d) c@fsdp",
            "qkv.bias": "(q: heads@tp d + k: kv@tp d + v: kv@tp d)",
            "out.weight": "c@fsdp (heads@tp d)",
            "emb.weight": "(2 half@fsdp) c",
        },
        sizes={"d": 2, "heads": 4},
    )


@on_meshes({"fsdp": 2, "tp": 2})
def test_state_dicts_have_the_models_names_and_shapes(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    model = _Fused()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = sf.Trainer(model, mesh, _fused_policy())
    state = trainer.state_dict()
    assert {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in wanted.items()}
    assert all(torch.equal(v.full_tensor(), wanted[n]) for n, v in state.items())
    other = sf.Trainer(_Fused(), mesh, _fused_policy())
    other.load_state_dict(state)
    assert all(torch.equal(v, wanted[n]) for n, v in sf.gather(other.params).items())
    for value in wanted.values():
        value.mul_(2)
    other.load_state_dict(wanted)
    assert all(torch.equal(v, wanted[n]) for n, v in sf.gather(other.params).items())
    with pytest.raises(sf.ShardError, match=r"missing .*emb\.weight.*, unexpected .*nope"):
        other.load_state_dict({"nope": torch.ones(1)} | {n: v for n, v in wanted.items() if n != "emb.weight"})
    with pytest.raises(sf.ShardError, match=r"'out.bias' is \(3,\), the model has \(8,\)"):
        other.load_state_dict(wanted | {"out.bias": torch.ones(3)})


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 1})
def test_a_state_may_be_a_tree_of_any_layout(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    model = _Fused()
    model.register_buffer("table", torch.arange(4.0))
    model.register_buffer("made", torch.arange(2.0), persistent=False)
    trees = [sf.shard(model, mesh, chosen) for chosen in (_fused_policy(), sf.Policy())]
    other = sf.Trainer(copy.deepcopy(model), mesh, _fused_policy())
    for number, tree in enumerate(trees):
        tree = sf.tree.map_local(lambda x, number=number: x + number, tree)
        tree.buffers["table"] = torch.arange(4.0) + number
        other.load_state_dict(tree)
        wanted = sf.gather(tree)
        assert all(torch.equal(value, wanted[name]) for name, value in sf.gather(other.params).items())
        assert torch.equal(dict(other.module.named_buffers())["table"], torch.arange(4.0) + number)
    with pytest.raises(sf.ShardError, match=r"missing \['emb.weight', 'table'\], unexpected nothing"):
        part = trees[0].like((name, leaf) for name, leaf in trees[0].items() if name != "emb.weight")
        part.buffers = {}
        other.load_state_dict(part)


def _blank(make: Any = decoder) -> Any:
    with torch.device("meta"):
        return make()


@pytest.mark.slow
@pytest.mark.everyday(1)
@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_a_trainer_begins_with_a_tree(mesh: DeviceMesh) -> None:
    model, blank = decoder(), _blank()
    tree = sf.shard(decoder(), mesh, policy(pad={"vocab": 20}))
    fields: dict[str, Any] = {"optimizer": sf.optim.adamw(1e-2), "clip": 0.5, "ema": 0.5}
    trainer = sf.Trainer(model, mesh, policy(pad={"vocab": 20}), loss_fn=_loss(model), **fields)
    begun = sf.Trainer(blank, params=tree, loss_fn=_loss(blank), **fields)
    assert begun.plan == tree.plan and begun.mesh is tree.mesh and not any(p.is_meta for p in blank.parameters())
    for i in range(3):
        batch = sf.data.local_batch(tokens(i), mesh)
        assert torch.equal(trainer.step(*batch)["loss"], begun.step(*batch)["loss"])
    for name, leaf in trainer.params.items():
        assert torch.equal(begun.params[name].to_local(), leaf.to_local()), name
        assert torch.equal(tree[name].to_local(), leaf.to_local()), "the trainer has taken the tree over"
        assert begun.ema is not None and trainer.ema is not None
        assert torch.equal(begun.ema[name].to_local(), trainer.ema[name].to_local())


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2})
def test_two_trainers_of_one_model_need_the_same_layouts(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    x = torch.ones(4, 8, dtype=torch.float64)
    expected, rules = model(x).detach(), {"0.weight": "o@tp _", "0.bias": "o@tp", "2.weight": "_ k@tp"}
    first = sf.Trainer(model, mesh, sf.Policy())
    assert_parity({"y": first(x).detach()}, {"y": expected})
    copied = copy.deepcopy(model)
    alike = sf.Trainer(model, mesh, sf.Policy(units=["0"]))
    for trainer in (first, alike, first):
        assert_parity({"y": trainer(x).detach()}, {"y": expected})
    for way in (model, copied):  # the second as the error says
        again = sf.Trainer(way, mesh, sf.Policy(rules=rules))
        for _ in range(2):
            assert_parity({"y": again(x).detach()}, {"y": expected})
            if way is copied:
                continue
            for refused in (lambda: first(x), lambda: alike.params):
                with pytest.raises(sf.ShardError, match=r"sharded again since, in another way.*copy\.deepcopy"):
                    refused()


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_tree_for_a_trainer_may_have_other_settings_but_no_other_layout(mesh: DeviceMesh) -> None:
    def begin(params: sf.Params, model: nn.Module | None = None, chosen: sf.Policy | None = None) -> sf.Trainer:
        return sf.Trainer(_blank() if model is None else model, mesh, chosen or policy(), params=params)

    tree = sf.shard(decoder(), mesh, policy())
    settings = policy(regather=False, units="layers.1", compute_dtype=torch.float32)
    assert begin(tree, chosen=settings).plan.policy.compute_dtype is torch.float32
    part = tree.like((name, leaf) for name, leaf in tree.items() if name != "norm.weight")
    bare = tree.copy()
    bare.buffers = {}
    leaves: Any = dict(tree)
    own = sf.make_mesh("cpu", fsdp=1, tp=4)
    wrong: list[tuple[sf.Params, nn.Module | None, str]] = [
        (sf.shard(decoder(), mesh, sf.Policy()), None, r"as '24@fsdp 10' in .* needs \(24, 10\) as 'vocab@tp"),
        (sf.shard(decoder(), mesh, policy(pad={"vocab": 20})), None, r"'emb.weight' is \(24, 10\) as"),
        (part, None, "'norm.weight' is not there"),
        (bare, None, "buffer 'positions' is not in the tree"),
        (tree, _blank(lambda: decoder(layers=1)), "'layers.1.norm1.weight' is not in the model"),
        (tree, _blank(lambda: decoder(ff=16)), r"'layers.0.up.weight' is \(12, 10\) .* in the tree, .* needs \(16, 10"),
        (tree, _blank(lambda: decoder(dtype=torch.float32)), "'emb.weight' is .*torch.float64.* needs .*torch.float32"),
        (sf.shard(decoder(), own, policy()), None, "the mesh of the tree is DeviceMesh"),
        (sf.grad(_loss(decoder()), reduce=None)(tree, *tokens()), None, "'emb.weight' is .*Partial"),
        (tree.like({name: leaf.to_local() for name, leaf in tree.items()}), None, "no shard but a Tensor"),
    ]
    for params, model, words in wrong:
        with pytest.raises(sf.ShardError, match=words):
            begin(params, model)
    with pytest.raises(sf.ShardError, match="norm.weight" if dist.get_rank() == 1 else r"rank 1 of \[1\] failed"):
        begin(part if dist.get_rank() == 1 else tree)
    with pytest.raises(TypeError, match=r"Trainer\(params=dict\): expected a tree"):
        begin(leaves)
    with pytest.raises(ValueError, match="leave out init and src"):
        sf.Trainer(decoder(), params=tree, src=0)


@on_meshes({"fsdp": 2, "tp": 2})
def test_summon_full_params(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    trainer = sf.Trainer(_Fused(), mesh, _fused_policy())
    reference = sf.gather(trainer.params)
    names = [n for n, _ in trainer.named_parameters()]
    module: Any = trainer.module
    ids = torch.arange(6).view(2, 3)
    with trainer.summon_full_params():
        assert all(torch.equal(p, reference[n]) for n, p in trainer.module.named_parameters())
        whole = trainer.module(ids)
        assert torch.equal(trainer(ids, method="forward"), whole)
        with torch.no_grad():
            module.qkv.weight.add_(1)
    assert [n for n, _ in trainer.named_parameters()] == names
    assert torch.equal(sf.gather(trainer.params)["qkv.weight"], reference["qkv.weight"] + 1)
    with trainer.summon_full_params(writeback=False), torch.no_grad():
        module.qkv.weight.zero_()
    assert torch.equal(sf.gather(trainer.params)["qkv.weight"], reference["qkv.weight"] + 1)
    assert whole.shape == (2, 3, 8)
    with pytest.raises(sf.ShardError, match=r"got a gradient within it, .*; call loss\.backward\(\) outside"):
        with trainer.summon_full_params():
            trainer(ids, method="forward").sum().backward()


def _train(axes: dict[str, int], directory: str, start: int, stop: int, save_at: int) -> list[float]:
    mesh = sf.make_mesh("cpu", **axes)
    model = decoder()
    optimizer = sf.optim.adamw(sf.optim.warmup_cosine(1e-2, 2, 8))
    trainer = sf.Trainer(model, mesh, policy(), optimizer=optimizer, loss_fn=_loss(model), clip=1.0, ema=0.9)
    if start:
        with quiet():  # of random states, on other numbers of ranks
            trainer.load(directory)
        assert trainer.steps == start
    losses = []
    for i in range(start, stop):
        losses.append(trainer.step(*sf.data.local_batch(tokens(i), mesh))["loss"].item())
        if trainer.steps == save_at:
            trainer.save(directory)
    assert trainer.ema is not None
    return [*losses, float(sf.optim.global_norm(trainer.ema))]


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_another_mesh(tmp_path: Path) -> None:
    whole = run(_train, {"fsdp": 2, "tp": 2}, str(tmp_path), 0, 6, 3, ranks=4)
    for fsdp, tp in ((2, 2), (4, 1), (1, 4), (3, 1), (1, 1)):
        resumed = run(_train, {"fsdp": fsdp, "tp": tp}, str(tmp_path), 3, 6, 0, ranks=fsdp * tp)
        assert len(set(map(tuple, resumed))) == 1
        torch.testing.assert_close(torch.tensor(resumed[0]), torch.tensor(whole[0][3:]), rtol=1e-12, atol=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003"]


def _load_bad(directory: str, kind: str) -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    model = _Fused() if kind == "other model" else decoder()
    trainer = sf.Trainer(model, mesh, sf.Policy(), optimizer=sf.optim.adamw(1e-2), loss_fn=_loss(model))
    before = sf.gather(trainer.params)
    if kind == "saved":
        trainer.save(directory)
        return
    try:
        trainer.load(directory)
    finally:
        assert all(torch.equal(v, before[n]) for n, v in sf.gather(trainer.params).items())


def _with_others(mesh: DeviceMesh) -> tuple[sf.Trainer, dict[str, Any]]:
    trainer = sf.Trainer(decoder(), mesh, policy())
    optimizer = torch.optim.AdamW([p for p in trainer.parameters() if p.requires_grad], 1e-2, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)
    return trainer, {"optimizer": optimizer, "schedule": schedule}


def _steps(trainer: sf.Trainer, others: dict[str, Any], mesh: DeviceMesh, numbers: range) -> None:
    for i in numbers:
        x, y = sf.data.local_batch(tokens(i), mesh)
        others["optimizer"].zero_grad()
        token_loss(trainer(x), y).backward()
        others["optimizer"].step()
        others["schedule"].step()


def _goes_on_with_others(directory: str, axes: dict[str, int]) -> None:
    mesh = sf.make_mesh("cpu", **axes)
    trainer, others = _with_others(mesh)
    if axes == {"fsdp": 4, "tp": 1}:
        _steps(trainer, others, mesh, range(3))
        trainer.save(directory, **others)
    else:
        trainer.load(directory, **others)
        assert others["schedule"].last_epoch == 3 and others["optimizer"].param_groups[0]["betas"] == (0.8, 0.9)
    _steps(trainer, others, mesh, range(3, 6))
    reference, wanted = _with_others(sf.make_mesh("cpu", fsdp=4, tp=1))
    _steps(reference, wanted, reference.mesh, range(6))
    assert_parity(_full(trainer), _full(reference), tol=1e-9)
    with pytest.raises(sf.ShardError, match=r"without \['scaler'\]: leave out; it has \['optimizer', 'schedule'\]"):
        trainer.load(directory, scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.slow
def test_torch_optimizers_and_schedules_are_saved_by_name(tmp_path: Path) -> None:
    for axes in ({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}):
        run(_goes_on_with_others, str(tmp_path), axes, ranks=4)


def test_what_json_cannot_hold_is_named() -> None:
    trainer = sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1))
    odd: Any = type("Odd", (), {"state_dict": lambda self: {"a": [1, object()]}})()
    with pytest.raises(TypeError, match=r"checkpoint: 'odd.a.1' is a object, not a tensor, number"):
        trainer.save("nowhere", odd=odd)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(sf.ShardError, match=r"SGD has parameters that are not the trainer's"):
        trainer.save("nowhere", stranger=stranger)


class _Kept:
    """Something with a state of any kind."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, r"two values of a state have the path 'odd\.a\.b'"),
        ({"a": {(0, 1): 2}}, r"'odd\.a' has the key \(0, 1\); keys are numbers and strings"),
    ],
)
def test_states_without_paths_of_their_own_are_named(state: Any, match: str) -> None:
    trainer = sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1))
    with pytest.raises(TypeError, match=f"checkpoint: {match}"):
        trainer.save("nowhere", odd=_Kept(state))


def test_states_come_back_as_the_types_they_were(tmp_path: Path) -> None:
    trainer = sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1))
    state = {
        "count": torch.tensor(2**53 + 1),
        "moments": (torch.tensor([0.1], dtype=torch.float64), torch.ones(2)),
        3: [None, "a"],
    }
    trainer.save(tmp_path, kept=_Kept(state))
    back = _Kept(None)
    trainer.load(tmp_path, kept=back)
    (found, layout), (wanted, expected) = pytree.tree_flatten(back.state), pytree.tree_flatten(state)
    assert layout == expected
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other) if isinstance(other, Tensor) else one == other


def test_a_schedule_with_milestones_goes_on(tmp_path: Path) -> None:
    rates = []
    for stops in ((6,), (2, 4)):
        for number, steps in enumerate(stops):
            trainer = sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1))
            optimizer = torch.optim.SGD(trainer.parameters(), 1.0)
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3, 5])
            if number:
                trainer.load(tmp_path, optimizer=optimizer, schedule=schedule)
                assert type(schedule.milestones) is Counter and schedule.milestones[3] == 2
            for _ in range(steps):
                optimizer.step()
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
            trainer.save(tmp_path, optimizer=optimizer, schedule=schedule)
        shutil.rmtree(tmp_path)
    assert rates[:6] == rates[6:]


def _in_another_order(folder: Path) -> None:
    torch.manual_seed(0)
    trainer = sf.Trainer(nn.Linear(4, 4), sf.make_mesh("cpu", fsdp=-1))
    weight, bias = trainer.parameters()
    saved, loaded = torch.optim.AdamW([weight, bias], 0.1), torch.optim.AdamW([bias, weight], 0.2)
    trainer(torch.randn(2, 4)).square().mean().backward()
    saved.step()
    path = trainer.save(folder, optimizer=saved)
    trainer.load(path, optimizer=loaded)
    assert loaded.param_groups[0]["lr"] == 0.1 and loaded.param_groups[0]["params"][0] is bias
    for parameter in (weight, bias):
        for key in ("exp_avg", "exp_avg_sq"):
            found, wanted = loaded.state[parameter][key], saved.state[parameter][key]
            assert found.shape == parameter.shape and torch.equal(found.to_local(), wanted.to_local())
    for groups in ([{"params": [weight]}, {"params": [bias]}], [{"params": [weight]}]):
        with pytest.raises(sf.ShardError, match=r"'optimizer' was saved with parameters in other groups, \[\['weight'"):
            trainer.load(path, optimizer=torch.optim.AdamW(groups))


def test_states_of_a_torch_optimizer_follow_the_names(tmp_path: Path) -> None:
    run(_in_another_order, tmp_path, ranks=2)


class _Wide(torch.optim.SGD):
    """Keeps states in the dtypes that they have, as optimizers of low-precision parameters do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, values in state_dict["state"].items():
            self.state[self.param_groups[0]["params"][number]] = values


@on_meshes({"fsdp": 2})
def test_optimizer_states_of_other_dtypes_and_shapes(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    trainer = sf.Trainer(nn.Linear(4, 4), mesh)
    saved, loaded = _Wide(trainer.parameters(), 0.1), _Wide(trainer.parameters(), 0.1)
    weight = trainer.module.get_parameter("weight")
    exact: Any = weight.detach().double() + 2.0**-40
    saved.state[weight]["momentum_buffer"] = exact
    with folder() as at:
        trainer.save(at, optimizer=saved)
        trainer.load(at, optimizer=loaded)
    found = loaded.state[weight]["momentum_buffer"]
    assert found.dtype == torch.float64 and torch.equal(found.to_local(), exact.to_local())
    saved.state[weight]["momentum_buffer"] = exact[:2]
    with pytest.raises(sf.ShardError, match=r"_Wide has a DTensor of shape \(2, 4\) at .*momentum_buffer"):
        trainer.save("nowhere", optimizer=saved)


def test_bad_checkpoints_change_nothing(tmp_path: Path) -> None:
    run_raises(FileNotFoundError, _load_bad, str(tmp_path), "none", match="no checkpoint in", ranks=2)
    run(_load_bad, str(tmp_path), "saved", ranks=2)
    run_raises(sf.ShardError, _load_bad, str(tmp_path), "other model", match="does not fit: ", ranks=2)
    # a save that was killed before its rename is not taken for a checkpoint
    shutil.move(tmp_path / "step-00000000", tmp_path / ".writing-step-00000007")
    run_raises(FileNotFoundError, _load_bad, str(tmp_path), "none", match="no checkpoint in", ranks=2)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"accumulate": 0}, ValueError, "at least 1"),
        ({"clip": -1.0}, ValueError, "above 0"),
        ({"ema": 1.0}, ValueError, r"\[0, 1\)"),
        ({"compile": {"nonsense": 1}}, TypeError, "torch.compile has"),
    ],
)
def test_settings_that_mean_nothing(fields: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1), **fields)


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 1})
def test_compiled_units_train_alike(mesh: DeviceMesh) -> None:
    losses = []
    for compile in (False, {"backend": "eager"}):
        model = decoder()
        optimizer = sf.optim.adamw(1e-2)
        trainer = sf.Trainer(model, mesh, policy(), optimizer=optimizer, loss_fn=_loss(model), compile=compile)
        losses.append([float(trainer.step(*sf.data.local_batch(tokens(i), mesh))["loss"]) for i in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    with pytest.raises(ValueError, match="the plan has decided that"):
        sf.Trainer(decoder(), mesh, sf.plan(decoder(), mesh, policy()), compile=True)


@on_meshes({"fsdp": 2})
def test_an_optimizer_made_before_is_told_so_when_it_steps(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    early = torch.optim.SGD(model.parameters(), 0.1)
    trainer = sf.Trainer(model, mesh)
    late = torch.optim.SGD(trainer.parameters(), 0.1)
    with trainer.no_sync():
        trainer(torch.ones(2, 4)).sum().backward()
    with pytest.raises(sf.ShardError, match=r"SGD.step: the optimizer was made before the model .* 'weight' as it was"):
        early.step()
    with pytest.raises(sf.ShardError, match=r"SGD.step: a gradient was only added up under no_sync\(\), never reduced"):
        late.step()
    trainer(torch.ones(2, 4)).sum().backward()
    late.step()


@on_meshes({"fsdp": 2})
def test_modules_that_share_their_tables_train(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    trainer = sf.Trainer(nn.Sequential(linear, nn.Tanh(), copy.copy(linear)), mesh)
    optimizer = torch.optim.SGD(trainer.parameters(), 0.1)
    before = sf.gather(trainer.params)
    trainer(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert not any(torch.equal(value, before[name]) for name, value in sf.gather(trainer.params).items())


@pytest.mark.parametrize("kind", ["trainer", "fsdp1", "fsdp2"])
@on_meshes({"fsdp": 2})
def test_attributes_of_parameters_are_kept(mesh: DeviceMesh, kind: str) -> None:
    model: Any = nn.Linear(4, 4)
    model.weight.no_decay = True
    holder: Any = model
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh)
    else:
        holder = sf.Trainer(model, mesh) if kind == "trainer" else FSDP(model, use_orig_params=True)
    assert [getattr(parameter, "no_decay", False) for parameter in holder.parameters()] == [True, False]


def test_a_step_needs_a_loss_and_an_optimizer() -> None:
    trainer = sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1))
    with pytest.raises(sf.ShardError, match="there is no optimizer"):
        trainer.step(torch.ones(1, 2))
    with pytest.raises(sf.ShardError, match="there is no loss_fn"):
        trainer.evaluate(torch.ones(1, 2))
    tensors: Any = {"w": torch.ones(2)}
    with pytest.raises(TypeError, match=r"expected an nn\.Module"):
        sf.Trainer(tensors)


@on_meshes({"fsdp": 2})
def test_a_step_issues_the_collectives_of_the_functions(mesh: DeviceMesh) -> None:
    model = decoder()
    trainer = sf.Trainer(model, mesh, sf.Policy(), optimizer=sf.optim.adamw(1e-2), loss_fn=_loss(model), clip=1.0)
    batch = sf.data.local_batch(tokens(), mesh)
    for _ in range(2):
        trainer.step(*batch)
    with count_collectives() as shell:
        trainer.step(*batch)
    with count_collectives() as functions:
        sf.value_and_grad(_loss(model))(trainer.params, *batch)
    assert shell.total == functions.total + 1  # the norm


def test_meta_model_with_init() -> None:
    run(_meta, ranks=2)


def _meta() -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    trainer = sf.Trainer(model, mesh, init=lambda module: module.reset_parameters())
    assert not any(t.is_meta for t in (*trainer.parameters(), *trainer.buffers()))
    assert bool(trainer(torch.randn(4, 6)).isfinite().all())


@on_meshes({"fsdp": 2})
def test_accumulated_means_over_unequal_counts_are_exact(mesh: DeviceMesh) -> None:
    batch = sf.data.local_batch(tokens(), mesh)
    batch[1][:2] = -100
    batch[1][3, 1:] = -100
    out = []
    for accumulate in (1, 3):
        model = decoder()

        def loss_fn(params: sf.Params, x: Tensor, y: Tensor, model: nn.Module = model) -> sf.data.Mean:
            return sf.data.Mean(sf.cross_entropy(sf.apply(model, params, x), y, reduction="sum"), (y != -100).sum())

        trainer = sf.Trainer(model, mesh, optimizer=sf.optim.sgd(0.1), loss_fn=loss_fn, accumulate=accumulate)
        result = trainer.step(*batch)
        out.append({"loss": result["loss"], "norm": result["grad_norm"], **_full(trainer)})
    assert_parity(out[1], out[0])


@on_meshes({"fsdp": 2})
def test_a_learnt_count_is_exact_in_one_step_and_refused_over_several(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 4, dtype=torch.float64)
    model, (x,) = nn.Linear(4, 2).double(), sf.data.local_batch((batch,), mesh)
    value, gate = model(batch).unbind(-1)
    loss = (value * gate.sigmoid()).sum() / gate.sigmoid().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()))

    def loss_fn(params: sf.Params, x: Tensor) -> sf.data.Mean:
        value, gate = sf.apply(model, params, x).unbind(-1)
        return sf.data.Mean((value * gate.sigmoid()).sum(), gate.sigmoid().sum())

    wanted = {name: p.detach() - g for (name, p), g in zip(model.named_parameters(), grads, strict=True)}
    trainer = sf.Trainer(model, mesh, optimizer=sf.optim.sgd(1.0), loss_fn=loss_fn)
    found = {"before": trainer.evaluate(x)["loss"], "loss": trainer.step(x)["loss"], **_full(trainer)}
    assert_parity(found, {"before": loss.detach(), "loss": loss.detach(), **wanted})
    trainer.accumulate = 2
    with pytest.raises(sf.ShardError, match=r"a count that depends on the parameters.*Use accumulate=1"):
        trainer.step(x)


@on_meshes({"fsdp": 2})
def test_a_checkpoint_of_another_optimizer_is_refused(mesh: DeviceMesh) -> None:
    with folder() as at:
        sf.Trainer(decoder(), mesh, optimizer=sf.optim.adamw(0.1)).save(at)
        for optimizer in (sf.optim.lion(0.1), None):
            with pytest.raises(sf.ShardError, match=r"'optimizer\..*' is in it and was not asked for"):
                sf.Trainer(decoder(), mesh, optimizer=optimizer).load(at)
    adam: Any = torch.optim.AdamW
    with pytest.raises(TypeError, match=r"sf\.optim\.from_torch\(AdamW"):
        sf.Trainer(decoder(), mesh, optimizer=adam)


class _Counting(nn.Module):
    """Counts its calls in a buffer that every forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 1), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.linear(x)


@on_meshes({"fsdp": 2})
def test_buffers_that_a_forward_replaces_are_kept(mesh: DeviceMesh) -> None:
    model, x = _Counting(), torch.ones(2, 4)
    params = sf.shard(model, mesh, sf.Policy())
    step = sf.value_and_grad(lambda p: sf.apply(model, p, x).sum())
    for _ in range(3):
        step(params)
    assert params.buffers["calls"] == 3
    trainer = sf.Trainer(
        _Counting(), mesh, optimizer=sf.optim.sgd(0.1), loss_fn=lambda p, x: sf.apply(trainer.module, p, x).sum()
    )
    trainer(x).sum().backward()
    trainer.step(x)
    trainer.step(x)
    assert trainer.get_buffer("calls") == 3 and trainer.state_dict()["calls"] == 3


@on_meshes({"fsdp": 2})
def test_what_is_frozen_or_thawed_later_is_refused_by_a_step(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 1)
    model.bias.requires_grad_(False)
    trainer = sf.Trainer(model, mesh, optimizer=sf.optim.sgd(0.1), loss_fn=_squares(model))
    trainer.step(torch.ones(2, 4))
    for flags, what in (((True, True), "'bias' is no longer frozen"), ((False, False), "'weight' is frozen")):
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
        with pytest.raises(sf.ShardError, match=f"{what} since .*loss.backward\\(\\)"):
            trainer.step(torch.ones(2, 4))
    model.weight.requires_grad_(True)
    trainer.step(torch.ones(2, 4))
    reference = nn.Linear(4, 1)
    reference.load_state_dict(sf.gather(trainer.params))
    model.bias.requires_grad_(True)  # and counts in a norm
    for each in (trainer, reference):
        each(torch.ones(2, 4)).square().mean().backward()
    norms = trainer.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert_parity({"norm": norms[0]}, {"norm": norms[1]})
    grads = trainer.params.like((name, leaf.grad) for name, leaf in trainer.params.items() if leaf.grad is not None)
    assert_parity(sf.gather(grads), {name: p.grad for name, p in reference.named_parameters()})


@pytest.mark.parametrize("asked", [{"clip": 1.0}, {"accumulate": 2}, {"ema": 0.9}])
def test_what_only_a_step_does_needs_its_optimizer(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Trainer\((clip|accumulate|ema)=.*beside a torch optimizer write trainer\."):
        sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1), **asked)


@on_meshes({"fsdp": 2})
def test_a_trainer_that_another_one_took_over_from_counts_no_steps(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 1)
    first = sf.Trainer(model, mesh)
    second, plain = sf.Trainer(model, mesh, sf.Policy(default="replicate")), nn.Linear(2, 2)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    second(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(second.parameters(), lr=0.1).step()
    assert second.steps == 1
    with pytest.raises(sf.ShardError, match="sharded again since"):
        first(torch.ones(2, 4))


@on_meshes({"fsdp": 2})
def test_a_state_dict_is_loaded_by_all_ranks_or_by_none(mesh: DeviceMesh) -> None:
    trainer = sf.Trainer(nn.Linear(4, 1), mesh)
    before, full = sf.gather(trainer.params), {"weight": torch.ones(1, 4), "bias": torch.ones(1)}
    with pytest.raises(sf.ShardError, match=r"'weight' in the state dict"):
        trainer.load_state_dict(full | {"weight": torch.full((1, 4), float(mesh.get_rank()))})
    with pytest.raises(sf.ShardError, match=r"missing|rank 1"):
        trainer.load_state_dict({} if mesh.get_rank() else full)
    assert_parity(sf.gather(trainer.params), before, tol=0)
    trainer.load_state_dict(full)
    assert_parity(sf.gather(trainer.params), full, tol=0)


class _Listed(_Counting):
    """Counts them in a buffer that a list holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.all = [self.calls]

    def forward(self, x: Tensor) -> Tensor:
        self.all[0].add_(1)
        return self.linear(x) * self.calls


@on_meshes({"fsdp": 2})
def test_a_buffer_that_a_list_holds_too_is_one(mesh: DeviceMesh) -> None:
    trainer, x = sf.Trainer(model := _Listed(), mesh), torch.ones(2, 4)
    outputs = [trainer(x).detach() for _ in range(3)]
    assert trainer.state_dict()["calls"] == 3 and model.all[0] is trainer.get_buffer("calls")
    assert outputs[2].equal(outputs[0] * 3)


def _squares(model: nn.Module) -> Any:
    return lambda params, x: sf.apply(model, params, x).square().mean()


def _scaled_trainer(mesh: DeviceMesh, scale: float | None, **given: Any) -> sf.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    return sf.Trainer(
        model,
        mesh,
        given.pop("policy", None),
        optimizer=sf.optim.adamw(1e-2),
        loss_fn=_squares(model),
        scaler=scaler,
        **given,
    )


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_scaler_changes_no_finite_step(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(mesh.get_local_rank("fsdp")))
    plain, scaled = _scaled_trainer(mesh, None, clip=0.5), _scaled_trainer(mesh, 1024.0, clip=0.5, accumulate=2)
    assert "scale" not in _scaled_trainer(mesh, None).step(x)
    scales = []
    for _ in range(5):
        a, b = plain.step(x), scaled.step(x)
        torch.testing.assert_close(a["loss"], b["loss"])
        torch.testing.assert_close(a["grad_norm"], b["grad_norm"])
        scales.append(b["scale"])
    assert scales == [1024, 1024, 2048, 2048, 4096]
    torch.testing.assert_close(sf.gather(plain.params), sf.gather(scaled.params))


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(mesh: DeviceMesh) -> None:
    trainer = _scaled_trainer(mesh, 8.0, ema=0.9)
    x = torch.ones(4, 4)
    trainer.step(x)
    before, average = sf.gather(trainer.params), sf.gather(trainer.ema or {})
    moments = [leaf.clone() for leaf in pytree.tree_leaves(trainer.optimizer_state)]
    out = trainer.step(x * float("inf") if mesh.get_local_rank("fsdp") == 1 else x)
    assert not out["grad_norm"].isfinite() and out["scale"] == 8
    assert all(torch.equal(before[name], value) for name, value in sf.gather(trainer.params).items())
    assert all(torch.equal(average[name], value) for name, value in sf.gather(trainer.ema or {}).items())
    leaves = pytree.tree_leaves(trainer.optimizer_state)
    assert all(torch.equal(a, b) for a, b in zip(unwrap_locals(moments), unwrap_locals(leaves), strict=True))
    assert [trainer.step(x)["scale"] for _ in range(3)] == [4, 4, 8]
    assert trainer.steps == 5


def test_a_scaler_keeps_small_gradients_of_float16_and_goes_into_checkpoints(tmp_path: Path) -> None:
    mesh = sf.make_mesh("cpu", fsdp=1)
    low = sf.Policy(compute_dtype=torch.float16, reduce_dtype=torch.float32)
    x, norms = torch.full((4, 4), 1e-4), []
    for scale in (None, 2.0**15):
        trainer = _scaled_trainer(mesh, scale, policy=low)
        trainer.loss_fn = lambda params, x, of=trainer: sf.apply(of.module, params, x).mean() * 1e-9
        norms.append(float(trainer.step(x)["grad_norm"]))
    assert norms[0] == 0 and 1e-10 < norms[1] < 1e-8
    trainer.step(x)
    trainer.save(tmp_path)
    other = _scaled_trainer(mesh, 2.0, policy=low)
    other.load(tmp_path)
    assert trainer.scaler is not None and other.scaler is not None
    assert other.scaler.state_dict() == trainer.scaler.state_dict() and other.scaler.get_scale() == 2.0**16
    assert _scaled_trainer(mesh, 1.0, policy=low, ema=None).scaler is not None
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert sf.Trainer(nn.Linear(2, 2), mesh, scaler=off).scaler is None
    trainer.save(tmp_path, scaler=trainer.scaler)
    for action in (trainer.save, trainer.load):
        with pytest.raises(sf.ShardError, match="scaler= is not that of Trainer"):
            action(tmp_path, scaler=torch.amp.GradScaler("cpu"))


def test_callbacks_see_every_step() -> None:
    seen: list[tuple[int, float]] = []
    trainer = _scaled_trainer(
        sf.make_mesh("cpu", fsdp=1),
        None,
        callbacks=[
            lambda trainer, out: out.update(lr=0.1 * trainer.steps),
            lambda trainer, out: seen.append((trainer.steps, out["lr"])),
        ],
    )
    trainer.step(torch.ones(4, 4))
    trainer.callbacks.append(lambda trainer, out: seen.append((-1, float(out["loss"]))))
    out = trainer.step(torch.ones(4, 4))
    assert seen == [(1, 0.1), (2, 0.2), (-1, float(out["loss"]))] and out["lr"] == 0.2


@on_meshes({"fsdp": 2})
def test_torch_scaler_beside_a_trainer(mesh: DeviceMesh) -> None:
    """The loop of a script, with a scaler and an optimizer of torch's."""
    model = nn.Linear(4, 2)
    torch.manual_seed(0)
    trainer = sf.Trainer(model, mesh, src=0)
    optimizer, scaler = torch.optim.SGD(trainer.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = sf.gather(trainer.params)
    for step, factor in enumerate((float("inf") if dist.get_rank() else 1.0, 1.0)):
        scaler.scale(trainer(torch.ones(2, 4) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = not torch.equal(sf.gather(trainer.params)["bias"], before["bias"])
        assert (changed, scaler.get_scale()) == (step == 1, 4), "neither rank steps when one overflows"


def _pickled(folder: Path, own: bool) -> None:
    torch.manual_seed(0)
    trainer = sf.Trainer(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=-1))
    if not (folder / str(dist.get_rank())).exists():
        torch.save(trainer.state_dict(), folder / str(dist.get_rank()))
    dist.barrier()
    state = torch.load(folder / (str(dist.get_rank()) if own else "0"), weights_only=False)
    before = sf.gather(trainer.params)
    with nullcontext() if own or not dist.get_rank() else pytest.raises(sf.ShardError, match="is the part of rank 0"):
        trainer.load_state_dict(state)
    assert torch.equal(sf.gather(trainer.params)["weight"], before["weight"])


def _pickled_trees(folder: Path) -> None:
    torch.manual_seed(0)
    model, rank = nn.Linear(4, 2), dist.get_rank()
    mesh = sf.make_mesh("cpu", fsdp=2)
    params = sf.shard(model, mesh, sf.Policy())
    trained = sf.Trainer(copy.deepcopy(model), mesh).module
    for name, x in {
        "tree": params,
        "state": sf.optim.sgd(0.1, momentum=0.9).init(params),
        "dict": dict(params),
    }.items():
        torch.save((x, trained), folder / f"{name}{rank}")
        torch.distributed.barrier()
        own, own_model = torch.load(folder / f"{name}{rank}", weights_only=False)
        if name != "state":
            assert torch.equal(sf.gather(params | own)["weight"], model.weight), name
        assert torch.equal(sf.gather(sf.shard(own_model, mesh, sf.Policy()))["weight"], model.weight)
        with pytest.raises(sf.ShardError, match=f"is the part of rank {1 - rank} .* torch.save of sharded parameters"):
            _ = params | torch.load(folder / f"{name}{1 - rank}", weights_only=False)[0]
        if name == "dict":
            others = torch.load(folder / f"dict{1 - rank}", weights_only=False)[0]
            with pytest.raises(sf.ShardError, match=f"'bias' is the part of rank {1 - rank}"):
                _ = params | {"weight": params["weight"], "bias": others["bias"]}
            with pytest.raises(sf.ShardError, match=f"is the part of rank {1 - rank}"):
                sf.shard(torch.load(folder / f"dict{1 - rank}", weights_only=False)[1], mesh, sf.Policy())


def test_a_pickled_shard_is_that_of_the_rank_which_wrote_it(tmp_path: Path) -> None:
    run(_pickled, tmp_path, True, ranks=2)
    run(_pickled, tmp_path, False, ranks=2)
    run(_pickled_trees, tmp_path, ranks=2)
    with pytest.raises(sf.ShardError, match=r"of ranks \[0, 1\], and this is rank 0 of \[0\]"):
        sf.Trainer(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=-1)).load_state_dict(
            torch.load(tmp_path / "0", weights_only=False)
        )


class Averaging(nn.Module):
    """Members with the names of a trainer's own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Linear(4, 4)
        self.register_buffer("ema", torch.full((4,), 2.0))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.plan(x) * self.ema + self.steps


@on_meshes({"fsdp": 2})
def test_members_named_as_attributes_of_the_trainer(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = Averaging(), torch.ones(2, 4)
    expected = model(x)
    trainer = sf.Trainer(model, mesh)
    torch.testing.assert_close(trainer(x), expected)
    assert list(trainer.state_dict()) == ["ema", "steps", "plan.weight", "plan.bias"]
    assert isinstance(model.plan, nn.Linear) and trainer.steps == 0 and trainer.ema is None


@on_meshes({"fsdp": 2})
def test_a_loss_that_calls_the_trainer_is_an_error(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trainer = sf.Trainer(model, mesh, optimizer=sf.optim.adamw(0.1))
    trainer.loss_fn = lambda params, x: trainer(x).mean()
    with pytest.raises(sf.ShardError, match="loss_fn called the trainer"):
        trainer.step(torch.ones(2, 4))
    trainer.loss_fn = lambda params, x: sf.apply(model, params, x).mean()
    trainer.step(torch.ones(2, 4))
    assert trainer(torch.ones(2, 4)).shape == (2, 2)


@on_meshes({"fsdp": 2})
def test_a_forward_in_summon_uses_the_whole_parameters(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    trainer = sf.Trainer(nn.Linear(4, 2), mesh)
    before = trainer(torch.ones(2, 4))
    with trainer.summon_full_params(writeback=False):
        trainer.module.get_parameter("weight").data.zero_()
        trainer.module.get_parameter("bias").data.fill_(3.0)
        assert torch.equal(trainer(torch.ones(2, 4)), torch.full((2, 2), 3.0))
    assert torch.equal(trainer(torch.ones(2, 4)), before)


@on_meshes({"fsdp": 2})
def test_a_trainer_in_another_dtype(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    trainer, x = sf.Trainer(model, mesh), torch.ones(2, 4)
    before = trainer(x)
    trainer.double()
    torch.testing.assert_close(trainer(x.double()), before.double())
    assert trainer.plan.layouts["0.weight"].dtype == torch.float64


def _steps_of_torch(folder: Path) -> None:
    torch.manual_seed(0)
    trainer = sf.Trainer(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=-1))
    optimizers = [torch.optim.SGD(trainer.parameters(), 0.1), torch.optim.AdamW(trainer.parameters())]
    for number in (1, 2):
        trainer(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert trainer.save(folder, optimizer=optimizers[1]).name == f"step-0000000{number}"
    with pytest.warns(UserWarning, match=r"also has \['optimizer'\], which nobody asked for"):
        trainer.load(folder)
    with pytest.raises(sf.ShardError, match="give all ranks one directory that all see"):
        trainer.load(folder if dist.get_rank() else folder / "none")
    with pytest.raises(sf.ShardError, match=r"rank 0 has .*; rank 1 has .*; give all ranks one directory"):
        trainer.save(folder / str(dist.get_rank()))


def test_steps_of_a_torch_optimizer_count_and_all_ranks_have_one_path(tmp_path: Path) -> None:
    run(_steps_of_torch, tmp_path, ranks=2)


@on_meshes({"fsdp": 2})
def test_steps_of_any_optimizer_with_some_of_the_parameters_count(mesh: DeviceMesh) -> None:
    first = sf.Trainer(nn.Linear(4, 4), mesh)
    half = torch.optim.SGD([first.module.get_parameter("bias")], 0.1)
    half.step()
    second = sf.Trainer(nn.Linear(4, 4), mesh)
    half.step()
    assert (first.steps, second.steps) == (2, 0)
    late = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    late.step()
    late.add_param_group({"params": list(second.parameters())})
    late.step()
    assert (first.steps, second.steps) == (2, 1)
    del half
    gc.collect()
    torch.optim.SGD(first.parameters(), 0.1).step()
    assert (first.steps, second.steps) == (3, 1)


def _own_buffers(folder: Path) -> None:
    torch.manual_seed(0)
    trainer = sf.Trainer(nn.BatchNorm1d(4), sf.make_mesh("cpu", fsdp=-1))
    for _ in range(3):
        trainer(torch.randn(8, 4) * (1 + dist.get_rank()))
    first = {name: buffer.clone() for name, buffer in trainer.module.named_buffers()}
    for buffer in first.values():
        dist.broadcast(buffer, 0)
    trainer.save(folder)
    trainer.load(folder)
    assert all(torch.equal(buffer, first[name]) for name, buffer in trainer.module.named_buffers())


def test_buffers_that_differ_are_saved_as_the_first_rank_has_them(tmp_path: Path) -> None:
    run(_own_buffers, tmp_path, ranks=4)


@on_meshes({"fsdp": 2})
def test_what_does_not_fit_into_a_trainer(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    trainer = sf.Trainer(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mesh)
    state, before = trainer.state_dict(), sf.gather(trainer.params)
    wrong: list[tuple[str, Any, str]] = [
        ("1.running_mean", torch.ones(1), r"buffer '1.running_mean' is \(1,\), the model has \(4,\)"),
        ("1.running_mean", None, "buffer '1.running_mean' is NoneType"),
        ("0.weight", None, "'0.weight' is NoneType"),
    ]
    for name, value, words in wrong:
        with pytest.raises(sf.ShardError, match=words):
            trainer.load_state_dict({**state, "0.bias": torch.ones(4), name: value})
    assert all(torch.equal(value, before[name]) for name, value in sf.gather(trainer.params).items())
    average = torch.optim.swa_utils.AveragedModel(trainer.module)
    with pytest.raises(sf.ShardError, match="AveragedModel has a DTensor of shape"):
        trainer.save("nowhere", average=average)
    with pytest.raises(TypeError, match=r"Trainer\(clip='a'\): expected a number"):
        text: Any = "a"
        sf.Trainer(nn.Linear(2, 2), mesh, clip=text)
    with trainer.no_sync():
        trainer(torch.ones(3, 4)).sum().backward()
    with pytest.raises(sf.ShardError, match=r"the gradient of '0\.weight' was only added up under no_sync"):
        trainer.clip_grad_norm_(1.0)


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 1})
def test_groups_by_dims_that_the_models_parameters_do_not_have_are_refused(mesh: DeviceMesh) -> None:
    def made() -> tuple[nn.Module, sf.Trainer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))
        rules = {"0.weight": "(3 heads@tp d) c@fsdp", "1.weight": "c@fsdp (3 heads@tp d)"}
        return model, sf.Trainer(model, mesh, sf.Policy(rules=rules, sizes={"heads": 4}))

    def groups(matrices: list[Any], vectors: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)

    _, trainer = made()
    weights = list(trainer.parameters())
    trainer(torch.ones(2, 8)).square().sum().backward()
    by_dims = groups([p for p in weights if p.dim() >= 2], [p for p in weights if p.dim() < 2])
    with pytest.raises(sf.ShardError, match=r"'0.bias' \(3 dims, 1 in the model\) is in the group of the matrices"):
        by_dims.step()
    own = dict(trainer.named_parameters())
    for matrices in (["0.weight", "1.weight"], list(own), ["0.weight", "0.bias"], ["0.bias"]):
        vectors = [p for name, p in own.items() if name not in matrices]
        groups([own[name] for name in matrices], vectors).step()


@on_meshes({"fsdp": 1})
def test_a_loss_that_is_called_otherwise_says_how_it_is_called(mesh: DeviceMesh) -> None:
    x = torch.ones(2, 2)
    for loss_fn, batch in (
        (nn.functional.mse_loss, (x, x)),
        (lambda model, x: model(x).sum(), (x,)),
        (lambda params, x, y: x.sum(), ([x, x],)),
    ):
        trainer = sf.Trainer(nn.Linear(2, 2), mesh, optimizer=sf.optim.sgd(0.1), loss_fn=loss_fn)
        for call in (trainer.step, trainer.evaluate):
            with pytest.raises((AttributeError, TypeError)) as caught:
                call(*batch)
            assert "loss_fn(params, *batch)" in "".join(caught.value.__notes__)
            assert "sf.apply(model, params, x)" in "".join(caught.value.__notes__)


def test_a_state_dict_leaves_out_wrappers_of_activation_checkpointing() -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))

    mesh = sf.make_mesh("cpu", fsdp=1)
    trainer, other = sf.Trainer(made(0), mesh, sf.Policy()), made(1)
    other(torch.randn(8, 4))  # statistics
    found = trainer.load_state_dict(other.state_dict())
    assert not found.missing_keys and not found.unexpected_keys
    for load in (lambda: None, lambda: set_model_state_dict(trainer, get_model_state_dict(trainer))):
        load()
        assert_parity(trainer.state_dict(), other.state_dict(), tol=0)
    with pytest.raises(sf.ShardError, match=r"missing \['1._checkpoint_wrapped_module.0.weight'\]"):
        trainer.load_state_dict({name: x for name, x in other.state_dict().items() if name != "1.0.weight"})


def test_a_state_dict_without_the_prefix_of_a_compiled_model_says_what_to_write() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    compiled: Any = torch.compile(copy.deepcopy(model))
    trainer = sf.Trainer(compiled, sf.make_mesh("cpu", fsdp=1), sf.Policy())
    with pytest.raises(sf.ShardError, match=r"pass \{'_orig_mod\.' \+ name: x for name, x in state_dict\.items\(\)\}"):
        trainer.load_state_dict(model.state_dict())
    trainer.load_state_dict({"_orig_mod." + name: x for name, x in model.state_dict().items()})


_BY_HAND: dict[str, Any] = {
    "Trainer": lambda model, mesh: sf.Trainer(model, mesh, sf.Policy()),
    "FSDP1": lambda model, mesh: FSDP(model),
    "FSDP2": lambda model, mesh: fully_shard(model, mesh=mesh["fsdp"]),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@on_meshes({"fsdp": 2})
def test_what_data_ranks_share_comes_into_a_loss_of_ones_own_by_a_pvary(mesh: DeviceMesh) -> None:
    """`backward` averages the gradients of each rank's own loss."""
    for make in _BY_HAND.values():
        model = nn.Linear(4, 3, dtype=torch.float64)
        nn.init.constant_(model.weight, 0.5)
        plain = copy.deepcopy(model)
        sharded: Any = make(model, mesh)
        whole = torch.arange(24, dtype=torch.float64).view(6, 4)
        (x,) = sf.data.local_batch((whole,), mesh)
        with pytest.raises(sf.ShardError, match=r"backward: .* gives, which its ranks share.*pvary\(x, mesh, 'fsdp'\)"):
            sf.collectives.pmean(sharded(x).square().mean(), mesh, "fsdp").backward()
        sharded.zero_grad()
        out = sharded(x)
        mean = sf.collectives.pmean(out.mean(0), mesh, "fsdp")
        with pytest.raises(sf.ShardError, match=r"Write sf\.collectives\.pvary"):
            (out - mean).pow(4).mean().backward(retain_graph=True)
        sharded.zero_grad()
        out = sharded(x)
        mean = sf.collectives.pmean(out.mean(0), mesh, "fsdp")
        loss = (out - sf.collectives.pvary(mean, mesh, "fsdp")).pow(4).mean()
        loss.backward()
        assert torch.isfinite(sf.collectives.pmean(loss.detach(), mesh, "fsdp"))
        expected = plain(whole)
        (expected - expected.mean(0)).pow(4).mean().backward()
        (weight,) = (p for p in sharded.parameters() if p.dim() == 2)
        torch.testing.assert_close(whole_of(weight.grad), plain.weight.grad)


@on_meshes({"fsdp": 1, "tp": 2})
def test_targets_that_differ_along_tp_are_an_error_in_the_backward(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    trainer = sf.Trainer(model, mesh, sf.Policy(rules={"0.weight": "ff@tp c", "2.weight": "o ff@tp"}))
    x, targets = torch.ones(40, 4), torch.arange(40) % 5
    nn.functional.cross_entropy(trainer(x), targets).backward()
    trainer.zero_grad()
    targets[7] = dist.get_rank()
    with pytest.raises(sf.ShardError, match="the gradient of what the model returns differs between ranks along tp"):
        nn.functional.cross_entropy(trainer(x), targets).backward()
    with pytest.raises(sf.ShardError, match="the loss is whole over 'tp' already"):
        sf.collectives.pmean(trainer(x).square().mean(), mesh, "tp")


def test_old_checkpoints_are_taken_away(tmp_path: Path) -> None:
    mesh, model = sf.make_mesh("cpu", fsdp=1), nn.Linear(4, 4)
    how: Any = {"optimizer": sf.optim.adamw(0.1), "loss_fn": lambda p, x: sf.apply(model, p, x).square().mean()}
    trainer = sf.Trainer(model, mesh, sf.Policy(), **how)
    (tmp_path / "step-00000000").mkdir()  # no checkpoint, which does not count and stays
    for step in range(1, 8):
        trainer.step(torch.ones(2, 4))
        trainer.save(tmp_path, keep=2, keep_every=3)
        kept = {step, step - 1, *range(3, step, 3)} - {0}
        assert {p.name for p in tmp_path.iterdir()} == {f"step-{n:08d}" for n in kept | {0}}
    with pytest.raises(sf.ShardError, match="write keep=1 or more"):
        trainer.save(tmp_path, keep=0)


def _goes_on(folder: str, steps: int) -> list[float]:
    mesh = sf.make_mesh("cpu", fsdp=2)
    torch.manual_seed(dist.get_rank())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    how: Any = {"optimizer": sf.optim.adamw(0.1), "loss_fn": lambda p, x: sf.apply(model, p, x).square().mean()}
    trainer = sf.Trainer(model, mesh, sf.Policy(), **how)
    if sf.checkpoint.latest(folder):
        trainer.load(folder)
    losses = [float(trainer.step(torch.randn(3, 4))["loss"]) for _ in range(steps)]
    trainer.save(folder)
    return losses


def _lists_other_names(folder: str) -> None:
    trainer = sf.Trainer(nn.Linear(4, 4), sf.make_mesh("cpu", fsdp=2), src=0)
    path = trainer.save(folder)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(sf.checkpoint.directories, "steps", lambda _: [])
        assert trainer.load(folder) == path


def test_the_first_rank_says_which_checkpoints_there_are(tmp_path: Path) -> None:
    run(_lists_other_names, str(tmp_path), ranks=2)


def test_what_each_rank_draws_goes_on_where_it_was(tmp_path: Path) -> None:
    at_once = run(_goes_on, str(tmp_path / "a"), 4, ranks=2)[0]
    parts = [run(_goes_on, str(tmp_path / "b"), 2, ranks=2)[0] for _ in range(2)]
    assert at_once == parts[0] + parts[1] and len(set(at_once)) == 4


def test_a_file_too_many_is_an_error_and_no_reason_to_go_back(tmp_path: Path) -> None:
    trainer = _scaled_trainer(sf.make_mesh("cpu", fsdp=1), None)
    for name in ("step-00000001", "step-00000002"):
        trainer.step(torch.ones(4, 4))
        assert trainer.save(tmp_path).name == name
    (tmp_path / name / "notes.txt").write_text("lr was too high")
    with pytest.raises(sf.ShardError, match=r"notes.txt' is no part of it; take it away"):
        trainer.load(tmp_path)


def test_a_buffer_that_the_trainer_has_not_is_told(tmp_path: Path) -> None:
    def trainer(value: Tensor | None) -> sf.Trainer:
        model = nn.Linear(2, 2)
        model.register_buffer("amax", value)
        return sf.Trainer(model, sf.make_mesh("cpu", fsdp=1))

    trainer(torch.ones(1)).save(tmp_path)
    with pytest.warns(UserWarning, match="ignored, of '.*': 'buffers.amax' is in it and was not asked for"):
        trainer(None).load(tmp_path)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(tmp_path: Path) -> None:
    mesh, model = sf.make_mesh("cpu", fsdp=1), nn.Linear(4, 4)
    how: Any = {"optimizer": sf.optim.adamw(0.1), "loss_fn": lambda p, x: sf.apply(model, p, x).square().mean()}
    trainer = sf.Trainer(model, mesh, sf.Policy(), **how)
    paths = []
    for _ in range(3):
        trainer.step(torch.ones(2, 4))
        paths.append(trainer.save(tmp_path))
    assert trainer.load(tmp_path) == paths[2] and trainer.steps == 3
    for path in reversed(paths):
        (file,) = path.glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        if path == paths[0]:
            says = r"step-00000001/.*' is damaged: bytes 0 to \d+ are not what was"
            with pytest.warns(UserWarning, match="is damaged"), pytest.raises(sf.ShardError, match=says):
                trainer.load(tmp_path)
        else:
            with pytest.warns(UserWarning, match="is damaged.*Going on with the checkpoint before it") as found:
                trainer.load(tmp_path)
            assert path.name in str(found[-1].message)
            assert trainer.steps == int(path.name[5:]) - 1
    (paths[1] / "manifest.json").write_text("{}")
    with pytest.raises(sf.ShardError, match=r"manifest.json' is damaged"):
        trainer.load(paths[1])


def test_a_tree_is_not_assigned_and_a_step_is_not_recorded() -> None:
    mesh, model = sf.make_mesh("cpu", fsdp=1), nn.Linear(4, 4)
    trainer: Any = sf.Trainer(
        model,
        mesh,
        sf.Policy(),
        optimizer=sf.optim.adamw(0.1),
        loss_fn=lambda p, x: sf.apply(model, p, x).square().mean(),
    )
    zeros = sf.tree.map(torch.zeros_like, trainer.params)
    with pytest.raises(
        sf.ShardError, match=r"Trainer.params is not assigned to: write trainer\.load_state_dict\(params"
    ):
        trainer.params = zeros
    with pytest.raises(sf.ShardError, match=r"in sf\.jit its counts would stand still; write Policy\(compile=True\)"):
        sf.jit(trainer.step, backend="eager")(torch.ones(2, 4))
    trainer.step(torch.ones(2, 4))
    trainer.load_state_dict(zeros)
    assert trainer.steps == 1 and not trainer(torch.ones(2, 4)).any()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("how", ["Trainer", "FSDP1", "FSDP2"])
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("value", [lambda p: p.data * 2, lambda p: torch.ones(4, 4)])
def test_what_is_assigned_to_data_is_not_lost_in_silence(how: str, value: Any, used: bool) -> None:
    mesh, x = sf.make_mesh("cpu", fsdp=1), torch.ones(3, 4)
    made = {"Trainer": lambda m: sf.Trainer(m, mesh, sf.Policy()), "FSDP1": lambda m: FSDP(m), "FSDP2": fully_shard}
    model: Any = made[how](nn.Linear(4, 4))
    (weight,) = (p for p in model.parameters() if p.dim() == 2)
    if used:
        model(x).sum().backward()
        torch.optim.AdamW(model.parameters(), 0.1).step()
        weight.data.mul_(2)
        weight.data.copy_(weight.data + 1)
        before = model(x).detach()
        assert torch.equal(copy.deepcopy(model)(x), before) if how == "Trainer" else True
    weight.data = value(weight)
    with pytest.raises(sf.ShardError, match=r"weight'\.data = value does not change a DTensor: write parameter\.copy_"):
        model(x)
