"""Models that torch's `parallelize_module` has split already, sharded further, against one process."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP, MLPs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.func import functional_call

import shardfn as sf
from shardfn.comm import buckets
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp1 import MixedPrecision, ShardingStrategy
from shardfn.compat.fsdp2 import fully_shard
from shardfn.testing import assert_close, assert_trees_close, count_collectives, on_meshes, run


def _blocks(styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    return {f"blocks.{i}.{name}".removesuffix("."): style for i in range(2) for name, style in styles.items()}


def _tensor_parallel() -> dict[str, ParallelStyle]:
    return _blocks({"up": ColwiseParallel(), "down": RowwiseParallel()})


def _sequence_parallel() -> dict[str, ParallelStyle]:
    split = {"input_layouts": Shard(1), "desired_input_layouts": Shard(1)}
    whole = {"output_layouts": Shard(1), "desired_output_layouts": Shard(1), "use_local_output": True}
    return {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        **_blocks(
            {
                "": PrepareModuleInputOutput(**split, **whole),
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        ),
    }


PLANS = {"tensor": _tensor_parallel, "sequence": _sequence_parallel}


def _models() -> tuple[MLPs, MLPs]:
    """The same twice."""
    torch.manual_seed(0)
    model = MLPs(8, 16).double()
    return model, copy.deepcopy(model)


def _batches(ranks: int) -> Tensor:
    """[step, data rank, sample, token]"""
    return torch.randint(0, 16, (3, ranks, 3, 4), generator=torch.Generator().manual_seed(1))


def _train_plain(model: nn.Module, batches: Tensor, clip: float) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.01), []
    for ids in batches:
        loss = model(ids.flatten(0, 1)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.everyday(2)
@pytest.mark.parametrize("kind", PLANS)
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 2}, {"replicate": 2, "fsdp": 1, "tp": 2}, {"tp": 2, "fsdp": 2})
def test_trainer_on_a_parallelized_model(mesh: DeviceMesh, kind: str) -> None:
    model, plain = _models()
    parallelize_module(model, mesh["tp"], PLANS[kind]())
    trainer = sf.Trainer(model, mesh, sf.Policy())
    assert "on a DTensor" in trainer.plan.explain("blocks.0.up.weight")
    batches = _batches(mesh.size() // 2)
    own = sum(mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names or () if axis != "tp")
    optimizer, losses = torch.optim.AdamW(trainer.parameters(), 0.01), []
    for ids in batches:
        loss = trainer(ids[own]).square().mean()
        loss.backward()
        trainer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    _require_same(losses, sf.gather(trainer.params), plain, batches)


def _require_same(losses: list[Tensor], params: dict[str, Tensor], plain: nn.Module, batches: Tensor) -> None:
    """The losses are those of one process, and so are the parameters after the steps."""
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    assert_close(mean / dist.get_world_size(), torch.tensor(_train_plain(plain, batches, 0.05), dtype=torch.float64))
    assert_trees_close(params, dict(plain.named_parameters()), rtol=0, atol=1e-9)


@on_meshes({"fsdp": 2, "tp": 2})
def test_value_and_grad_of_a_parallelized_model(mesh: DeviceMesh) -> None:
    model, plain = _models()
    parallelize_module(model, mesh["tp"], _sequence_parallel())
    params = sf.shard(model, mesh, sf.Policy())
    ids = _batches(2)[0]

    def loss_fn(params: sf.Params, ids: Tensor) -> Tensor:
        return sf.apply(model, params, ids).square().mean()

    loss, grads = sf.value_and_grad(loss_fn)(params, ids[mesh.get_local_rank("fsdp")])
    expected = plain(ids.flatten(0, 1)).square().mean()
    expected.backward()
    assert_close(loss, expected)
    assert_trees_close(sf.gather(grads), {name: p.grad for name, p in plain.named_parameters()})


@on_meshes({"fsdp": 2, "tp": 2})
def test_weights_are_freed_between_forward_and_backward(mesh: DeviceMesh) -> None:
    """Autograd saves DTensors there, whose local parts are views of what was gathered."""
    counts = {}
    for regather in (True, False):
        model, _ = _models()
        parallelize_module(model, mesh["tp"], _tensor_parallel())
        trainer = sf.Trainer(model, mesh, sf.Policy(regather=regather))
        with count_collectives() as counted:
            trainer(_batches(2)[0, 0]).sum().backward()
        counts[regather] = counted.all_gather
    assert counts[True] == counts[False] + 2, "each block is gathered again"


STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}
MESHES = {
    "dp, tp": ((2, 2), ("dp", "tp")),
    "tp, dp": ((2, 2), ("tp", "dp")),
    "pp, dp, tp": ((2, 1, 2), ("pp", "dp", "tp")),
    "replicate, dp, tp": ((2, 1, 2), ("replicate", "dp", "tp")),
}


def _wrapped(strategy: str, names: str, kind: str, **given: Any) -> tuple[Any, MLPs, DeviceMesh]:
    """FSDP1's class around a parallelized model, the plain model, the mesh."""
    model, plain = _models()
    shape, axes = MESHES[names]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    parallelize_module(model, mesh["tp"], PLANS[kind]())
    own = mesh["replicate", "dp"] if strategy == "hybrid" else mesh["dp"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NO_SHARD, and of one rank
        fsdp = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({MLP}),
            device_mesh=own,
            sharding_strategy=STRATEGIES[strategy],
            use_orig_params=True,
            **given,
        )
    return fsdp, plain, own


def _fsdp1(strategy: str, names: str, kind: str) -> None:
    warnings.filterwarnings("ignore", "When using ``NO_SHARD``")
    fsdp, plain, own = _wrapped(strategy, names, kind)
    batches, optimizer, losses = _batches(own.size()), torch.optim.AdamW(fsdp.parameters(), 0.01), []
    for ids in batches:
        loss = fsdp(ids[own.get_local_rank(0)]).square().mean()
        loss.backward()
        fsdp.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    _require_same(losses, fsdp.state_dict(), plain, batches)
    full = get_model_state_dict(fsdp, options=StateDictOptions(full_state_dict=True))
    assert_trees_close(full, dict(plain.named_parameters()), rtol=0, atol=1e-9)
    assert_same_after_a_round(fsdp, optimizer, batches[0, 0])


def assert_same_after_a_round(fsdp: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    """State dicts of model and optimizer, whole parameters, a copy."""
    before = fsdp(ids)
    state, moments = fsdp.state_dict(), FSDP.optim_state_dict(fsdp, optimizer)
    assert moments["state"]["blocks.0.up.weight"]["exp_avg"].shape == (32, 8)
    with FSDP.summon_full_params(fsdp):
        assert fsdp.blocks[0].up.weight.shape == (32, 8)
        assert not isinstance(fsdp.blocks[0].up.weight, DTensor)
        fsdp.blocks[0].up.weight.data.zero_()
    assert not torch.equal(fsdp(ids), before)
    fsdp.load_state_dict(state)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(fsdp, optimizer, moments))
    assert_close(fsdp(ids), before)
    assert_close(copy.deepcopy(fsdp)(ids), before)
    assert_close(fsdp.float()(ids), before.float())


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("strategy", ["full", "grad_op", "none"])
def test_fsdp1_around_a_parallelized_model(strategy: str, kind: str) -> None:
    run(_fsdp1, strategy, "dp, tp", kind, ranks=4)


@pytest.mark.slow
@pytest.mark.everyday(1)
@pytest.mark.parametrize("names", ["tp, dp", "pp, dp, tp"])
def test_fsdp1_on_slices_of_other_meshes(names: str) -> None:
    run(_fsdp1, "full", names, "sequence", ranks=4)


@pytest.mark.slow
def test_fsdp1_hybrid_around_a_parallelized_model() -> None:
    run(_fsdp1, "hybrid", "replicate, dp, tp", "tensor", ranks=4)


def _by_hand() -> None:
    """Instances inside with and without weights that are split already."""
    model, plain = _models()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model.blocks[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.emb = FSDP(model.emb, device_mesh=mesh["dp"])
    for i in range(2):
        model.blocks[i] = FSDP(model.blocks[i], device_mesh=mesh["dp"])
    early = torch.optim.AdamW(model.emb.parameters(), 0.01)
    fsdp: Any = FSDP(model, device_mesh=mesh["dp"])
    optimizers = early, torch.optim.AdamW([p for n, p in fsdp.named_parameters() if "emb" not in n], 0.01)
    batches, losses = _batches(2), []
    for ids in batches:
        loss = fsdp(ids[mesh.get_local_rank("dp")]).square().mean()
        loss.backward()
        fsdp.clip_grad_norm_(0.05)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    _require_same(losses, fsdp.state_dict(), plain, batches)


def test_instances_by_hand_of_which_some_are_parallelized() -> None:
    run(_by_hand, ranks=4)


def _on_meta() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = MLPs(8, 16)
    parallelize_module(model, mesh["tp"], _tensor_parallel())
    fsdp: Any = FSDP(model, device_mesh=mesh["dp"], auto_wrap_policy=ModuleWrapPolicy({MLP}))
    with FSDP.summon_full_params(fsdp):
        weight = fsdp.blocks[0].up.weight
        assert weight.std() > 0.1 and weight.unique().numel() == weight.numel(), "no part is like another"
        everywhere = weight.detach().clone()
    dist.broadcast(everywhere, 0)
    with FSDP.summon_full_params(fsdp):
        assert torch.equal(fsdp.blocks[0].up.weight, everywhere)


def test_a_parallelized_model_on_the_meta_device() -> None:
    run(_on_meta, ranks=4)


def _in_bfloat16() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp, _, own = _wrapped("full", "dp, tp", "sequence", mixed_precision=low, sync_module_states=True)
    out = fsdp(_batches(2)[0, own.get_local_rank()])
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in fsdp.parameters())


def test_mixed_precision_of_a_parallelized_model() -> None:
    run(_in_bfloat16, ranks=4)


def _refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model, _ = _models()
    parallelize_module(model, mesh["tp"], _tensor_parallel())
    with pytest.raises(sf.ShardError, match="no device_mesh beside it"):
        FSDP(model)
    with pytest.raises(sf.ShardError, match="does not cross"):
        FSDP(model, device_mesh=mesh["tp"])
    with pytest.raises(sf.ShardError, match="'tp', which is no axis of the mesh"):
        sf.shard(model, mesh["dp"], sf.Policy())
    with pytest.raises(sf.ShardError, match="but it is a DTensor split by itself"):
        sf.shard(model, mesh, sf.Policy(rules={"blocks.*.up.weight": "o c@tp"}))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp"))
    apart, _ = _models()
    parallelize_module(apart, named["fsdp"], _tensor_parallel())
    with pytest.raises(sf.ShardError, match="'fsdp', which splits the batch"):
        sf.shard(apart, named, sf.Policy())
    parallelize_module(model.head, other, ColwiseParallel())
    with pytest.raises(sf.ShardError, match=r"and 'head.bias' on"):
        FSDP(model, device_mesh=mesh["dp"])


def test_what_cannot_be_sharded_further_is_an_error() -> None:
    run(_refused, ranks=4)


def _two_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Over the same four ranks, with axes that cross."""
    return (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")),
    )


def _refused_by_fully_shard() -> None:
    mesh, other = _two_meshes()
    model, _ = _models()
    parallelize_module(model, mesh["tp"], _tensor_parallel())
    with pytest.raises(sf.ShardError, match="does not cross"):
        fully_shard(model, mesh=other["tp"])
    fully_shard(model.blocks[0], mesh=mesh["dp"])
    parallelize_module(model.head, other["tp"], ColwiseParallel())
    model.blocks[1] = nn.Identity()
    with pytest.raises(sf.ShardError, match=r"'head\.\w+' is a DTensor on .* and 'a module inside' on"):
        fully_shard(model, mesh=mesh["dp"])


def test_fully_shard_on_meshes_that_do_not_fit_is_an_error() -> None:
    run(_refused_by_fully_shard, ranks=4)


class _WithTable(nn.Module):
    """An MLP beside a parameter that somebody else has split."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mlp = MLP(8)
        self.table = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def _ignored() -> None:
    """The table is left alone by the class around its module, and by one around both on a mesh of more axes."""
    mesh, other = _two_meshes()
    torch.manual_seed(0)
    inner, head, x = _WithTable(other["tp"]), nn.Linear(8, 4), torch.ones(2, 8)
    table: Any = inner.table
    before = table.device_mesh, table.placements
    model = nn.Sequential(inner, head)
    expected = model(x)
    fully_shard(inner, mesh=mesh["dp"], ignored_params={table})
    parallelize_module(head, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(model, mesh=mesh["dp"], ignored_params={table})
    assert inner.table is table and (table.device_mesh, table.placements) == before
    assert_close(model(x).detach(), expected.detach())


def test_dtensors_that_are_ignored_stay_on_their_mesh() -> None:
    run(_ignored, ranks=4)


@on_meshes({"fsdp": 2, "tp": 2})
def test_uneven_and_unnamed_dtensors_are_refused(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(sf.ShardError, match=r"split unevenly, 3 % 2 = 1"):
        sf.shard(model, mesh, sf.Policy())
    nameless = init_device_mesh("cpu", (4,))
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), nameless, [Shard(0)]))
    with pytest.raises(sf.ShardError, match="on a mesh with axis names"):
        sf.shard(model, mesh, sf.Policy())


@pytest.mark.parametrize("placement", [_StridedShard(0, split_factor=2), Partial()])
@on_meshes({"fsdp": 2, "tp": 2})
def test_dtensors_that_are_no_plain_splits_are_refused(mesh: DeviceMesh, placement: Placement) -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh["tp"], [placement]))
    with pytest.raises(sf.ShardError, match=r"'weight' is a DTensor with .* must have Shard and Replicate only"):
        sf.shard(model, mesh, sf.Policy())


@on_meshes({"fsdp": 1, "tp": 2, "cp": 2})
def test_a_dim_that_two_axes_split_is_put_together_in_their_order(mesh: DeviceMesh) -> None:
    full = torch.arange(32.0).view(8, 4)
    for dims in ((0, 0), (1, 0)):
        model = nn.Linear(4, 8)
        split = distribute_tensor(full, mesh["tp", "cp"], [Shard(dim) for dim in dims])
        model.weight = nn.Parameter(split)
        params = sf.shard(model, mesh, sf.Policy())
        assert torch.equal(sf.gather(params)["weight"], full)
        assert torch.equal(params["weight"].to_local(), split.to_local())


@on_meshes({"fsdp": 1, "tp": 2, "cp": 2})
def test_a_dim_that_two_axes_split_unevenly_is_refused(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp", "cp"], [Shard(0), Shard(0)]))
    with pytest.raises(sf.ShardError, match=r"weight .* dim 0 is split unevenly, 6 % 4 = 2"):
        sf.shard(model, mesh, sf.Policy())


@on_meshes({"fsdp": 2, "tp": 2})
def test_second_derivatives_of_a_parallelized_model(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model, x = copy.deepcopy(plain), torch.ones(3, 4, dtype=torch.float64)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trainer = sf.Trainer(model, mesh)
    found = []
    for each in (trainer, plain):
        parameters = list(each.parameters())
        grads = torch.autograd.grad(each(x).square().mean(), parameters, create_graph=True)
        squares = [(grad.full_tensor() if isinstance(grad, DTensor) else grad).square().sum() for grad in grads]
        torch.stack(squares).sum().backward()
        found.append([buckets.whole(p.grad) if isinstance(p.grad, DTensor) else p.grad for p in parameters])
    assert_trees_close(found[0], found[1])


@on_meshes({"fsdp": 1, "tp": 2})
@pytest.mark.parametrize("kind", ["functional", "Trainer", "fully_shard"])
def test_a_penalty_on_the_gradient_by_an_input_behind_which_blocks_are_parallelized(
    mesh: DeviceMesh, kind: str
) -> None:
    """torch alone cuts the graph of what such a block's input gets."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plain = nn.Sequential(nn.Linear(4, 8), block, nn.Tanh(), nn.Linear(8, 1)).double()
    model, x = copy.deepcopy(plain), torch.randn(3, 4, dtype=torch.float64)
    parallelize_module(model[1], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def penalty(forward: Any) -> Tensor:
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(forward(given).sum(), given, create_graph=True)
        return slope.square().sum()

    penalty(plain).backward()
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
    if kind == "functional":
        params = sf.shard(model, mesh, sf.Policy())
        found = dict(sf.gather(sf.grad(lambda p: penalty(lambda x: sf.apply(model, p, x)))(params)))
    else:
        model = sf.Trainer(model, mesh) if kind == "Trainer" else fully_shard(model, mesh=mesh["fsdp"])
        penalty(model).backward()
        grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        found = {n: buckets.whole(g) if isinstance(g, DTensor) else g for n, g in grads.items()}
        found = {name: torch.zeros_like(wanted[name]) if g is None else g for name, g in found.items()}
    assert_trees_close(found, wanted)


@on_meshes({"fsdp": 1, "tp": 2})
def test_transforms_of_a_parallelized_model_are_refused(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    params, x = sf.shard(model, mesh, sf.Policy()), torch.randn(3, 4, dtype=torch.float64)

    def loss(p: sf.Params) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    v = sf.tree.map(torch.ones_like, params)
    with pytest.raises(sf.ShardError, match=r"parallelize_module has split .* sf.grad twice"):
        sf.hvp(loss, (params,), v)
    product = sf.gather(sf.grad(lambda p: sf.tree.dot(sf.grad(loss)(p), v))(params))
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    whole, ones = dict(sf.gather(params)), {name: torch.ones_like(w) for name, w in sf.gather(params).items()}

    def one(p: dict[str, Tensor]) -> Tensor:
        return functional_call(plain, p, (x,)).square().mean()

    assert_trees_close(dict(product), torch.func.jvp(torch.func.grad(one), (whole,), (ones,))[1])


@on_meshes({"fsdp": 2, "tp": 2})
def test_whole_parameters_of_a_parallelized_model_compute(mesh: DeviceMesh) -> None:
    model, plain = _models()
    parallelize_module(model, mesh["tp"], _sequence_parallel())
    trainer, ids = sf.Trainer(model, mesh), _batches(1)[0, 0]
    with trainer.summon_full_params():
        assert_close(trainer(ids), plain(ids).detach())
        trainer.module.get_parameter("head.bias").data.fill_(1.0)
        plain.head.bias.data.fill_(1.0)
        assert_close(trainer(ids), plain(ids).detach())
    assert_close(trainer(ids), plain(ids))


def test_dropout_streams_of_a_parallelized_model_are_refused() -> None:
    run(_drops, ranks=2)


def _drops() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trainer = sf.Trainer(model, mesh)
    with sf.data.dropout_seed(1), pytest.raises(sf.ShardError, match="from_parallelize_plan"):
        trainer(torch.ones(2, 4))


def _pair_of_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"))
    shard, replicate = mesh["in"].get_group(), mesh["out"].get_group()
    for given in ({"process_group": (shard, replicate)}, {"device_mesh": mesh}):
        torch.manual_seed(0)
        plain = nn.Linear(4, 4).double()
        weight, x = plain.weight.detach().clone(), torch.arange(8.0).view(2, 4).double() + dist.get_rank()
        model = FSDP(plain, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True, **given)
        model(x).square().mean().backward()
        assert {tuple(part.placements) for part in model.parameters() if isinstance(part, DTensor)} <= {
            (Replicate(), Shard(0))
        }
        with FSDP.summon_full_params(model, with_grads=True):
            found, bias = model.module.weight.grad, model.module.bias.detach()
        assert found is not None
        every = [torch.arange(8.0).view(2, 4).double() + rank for rank in range(4)]
        layer = nn.functional.linear(torch.cat(every), weight.requires_grad_(), bias)
        (wanted,) = torch.autograd.grad(layer.square().mean(), weight)
        assert_close(found, wanted, rtol=0, atol=1e-12)


def test_hybrid_sharding_over_a_pair_of_groups_and_over_a_mesh() -> None:
    run(_pair_of_groups, ranks=4)
