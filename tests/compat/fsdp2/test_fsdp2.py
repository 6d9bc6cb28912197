"""FSDP2's `fully_shard` on this engine, in models that train, against one process."""

import copy
import gc
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from drawing import untyped
from fsdp2_rows.common import gradients, same_error, split, trains
from fsdp2_rows.common import sharded as sharded_net
from models import MLPs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardfn as sf
from shardfn.comm.buckets import whole
from shardfn.compat.common.sharded_module import current_shards
from shardfn.compat.fsdp2 import CPUOffloadPolicy, DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard
from shardfn.testing import assert_close, assert_trees_close, count_collectives, on_meshes, run


def _meshes(kind: str) -> tuple[DeviceMesh, DeviceMesh]:
    """The data mesh, and the whole one."""
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return mesh, mesh
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return mesh["dp"], mesh
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return mesh, mesh


def _sharded(kind: str, **given: Any) -> tuple[Any, MLPs, DeviceMesh]:
    torch.manual_seed(0)
    plain = MLPs(6, 15).double()
    model: Any = copy.deepcopy(plain)
    if kind == "meta":
        with torch.device("meta"):
            model = MLPs(6, 15).double()
    data, mesh = _meshes(kind)
    if kind == "tensor":
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=data, **given)
    assert fully_shard(model, mesh=data, **given) is model
    if kind == "meta":
        model.to_empty(device="cpu")
        shards = dict(model.named_parameters())
        full = {name: distribute_tensor(x, shards[name].device_mesh, shards[name].placements) for name, x in _of(plain)}
        model.load_state_dict(full, assign=True)
    return model, plain, data


def _of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def _trained(kind: str, **given: Any) -> None:
    model, plain, data = _sharded(kind, **given)
    assert isinstance(model, FSDPModule) and isinstance(model, MLPs) and type(model).__name__ == "FSDPMLPs"
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (model, plain)]
    index = sum(data.get_local_rank(i) * (2 if i == 0 and data.ndim == 2 else 1) for i in range(data.ndim))
    batches = torch.randint(0, 16, (4, data.size(), 3, 4), generator=torch.Generator().manual_seed(1))
    for step, ids in enumerate(batches):
        model.set_requires_gradient_sync(step != 1)
        for each, own in ((model, ids[index]), (plain, ids.flatten(0, 1))):
            each(own).square().mean().backward()
        if step == 1:
            continue
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain)]
        assert_close(whole(norms[0]) if isinstance(norms[0], DTensor) else norms[0], norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_trees_close(full, dict(_of(plain)), rtol=0, atol=1e-9)
    _goes_round(model, optimizers[0], full, batches[0, 0])


def _goes_round(model: Any, optimizer: torch.optim.Optimizer, full: dict[str, Any], ids: Tensor) -> None:
    """State dicts of model and optimizer; whole weights for a while."""
    before, moments = model(ids), get_optimizer_state_dict(model, optimizer)
    for parameter in model.parameters():
        parameter.detach().zero_()
    assert not torch.equal(model(ids), before)
    model.load_state_dict(full)
    assert_close(model(ids), before)
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
    set_optimizer_state_dict(model, optimizer, moments)
    assert_close(model(ids), before)
    model.unshard()
    model.blocks[0].unshard()
    assert not isinstance(model.head.weight, DTensor) and isinstance(model.blocks[1].up.weight, DTensor)
    assert_close(model.blocks[0].norm.weight.detach(), full["blocks.0.norm.weight"])
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].norm.weight, DTensor) and not isinstance(model.head.weight, DTensor)
    assert_close(model(ids), before)  # and the forward puts the shards back
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.everyday(2)
@pytest.mark.parametrize("kind", ["plain", "hybrid", "tensor", "meta"])
def test_trains_as_one_process(kind: str) -> None:
    run(_trained, kind, ranks=4)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_trains_whatever_is_freed(reshard: bool | int) -> None:
    run(_trained, "plain", ranks=4, reshard_after_forward=reshard)


def _divided() -> None:
    model, _, data = _sharded("plain")
    ids = torch.randint(0, 16, (3, 4), generator=torch.Generator().manual_seed(data.get_local_rank()))
    found = []
    for factor in (None, 1.0):
        if factor is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)
        model(ids).square().mean().backward()
        found.append({name: whole(p.grad) for name, p in model.named_parameters()})
        model.zero_grad()
    assert_trees_close({name: 2 * grad for name, grad in found[0].items()}, found[1])


def test_gradients_divided_by_a_factor() -> None:
    run(_divided, ranks=2)


class _Seen(nn.Module):
    """Notes the dtypes that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        self.seen = [x.dtype, other.dtype]
        return self.inner(x.to(self.inner.weight.dtype))


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = _Seen(), nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = self.block(x, other)
        self.seen = x.dtype
        return self.head(x.float())


def _casts() -> None:
    """Inputs only where a dtype was asked for, also around a group without parameters of its own."""
    inputs = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float64)
    model: Any = _Around()
    fully_shard(model.block)
    fully_shard(model)
    model(*inputs)
    assert model.block.seen == [torch.bfloat16, torch.float64]
    model = _Around()
    precision = MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(model.block.inner, mp_policy=precision)
    fully_shard(model.block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    fully_shard(model)
    model(torch.ones(2, 4), inputs[1]).sum().backward()
    assert model.block.seen == [torch.bfloat16] * 2 and model.seen == torch.float64


def test_casts_are_those_that_were_asked_for() -> None:
    run(_casts, ranks=2)


def _inside_out(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _freed() -> None:
    for sharded in (fully_shard, _inside_out):
        model: Any = sharded(MLPs(6, 15))
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        alive = weakref.ref(model), weakref.ref(model.blocks[0].up.weight)
        del model
        gc.collect()
        assert [each() for each in alive] == [None, None]


def test_a_model_that_ran_is_freed() -> None:
    run(_freed, ranks=2)


def _in_graphs() -> None:
    """A compiled model, a compiled function that calls one, and `compile()` of it."""
    ids = torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = MLPs(6, 15).double()
    found = []
    for way in ("eager", "compile(model)", "compile(step)", "model.compile()"):
        for sharded in (fully_shard, _inside_out):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            model: Any = sharded(copy.deepcopy(plain))
            call: Any = torch.compile(model, backend="eager") if way == "compile(model)" else model
            if way == "model.compile()":
                model.compile(backend="eager")

            def step(ids: Tensor, call: Any = call) -> Tensor:
                return call(ids).square().mean()

            run_step = torch.compile(step, backend="eager") if way == "compile(step)" else step
            run_step(ids).backward()
            graphs = sum(torch._dynamo.utils.counters["stats"].values())
            assert (graphs > 0) == (way != "eager"), way
            found.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
    for each in found[1:]:
        assert_trees_close(each, found[0], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_compiled_models_and_steps() -> None:
    run(_in_graphs, ranks=2)


def _after_unshard() -> None:
    """Whole weights of a module inside are not what is sharded around it."""
    model: Any = MLPs(6, 15)
    fully_shard(model.blocks[0])
    held = list(model.blocks[0].parameters())
    model.blocks[0].unshard()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert all(one is two for one, two in zip(model.blocks[0].parameters(), held, strict=True))
    before = [whole(parameter) for parameter in held]
    model(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(whole(p), was) for p, was in zip(held, before, strict=True))


def test_a_module_inside_that_is_whole() -> None:
    run(_after_unshard, ranks=2)


def _in_order() -> None:
    model: Any = MLPs(6, 15)
    names = [name for name, _ in model.named_parameters()]
    fully_shard(model, ignored_params={model.blocks[0].up.bias})
    assert [name for name, _ in model.named_parameters()] == names


def test_parameters_keep_their_order() -> None:
    run(_in_order, ranks=2)


def _refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model: Any = MLPs(6, 15)
    with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
        fully_shard(model.blocks, mesh=mesh)
    with pytest.raises(ValueError, match="it should be a factor of 2, not 3"):
        fully_shard(model, mesh=mesh, reshard_after_forward=3)
    wrong: list[dict[str, Any]]
    wrong = [{"ignored_params": {"head.weight"}}, {"offload_policy": "cpu"}, {"mp_policy": torch.bfloat16}]
    for given in wrong:
        with pytest.raises(TypeError, match=f"fully_shard: {next(iter(given))}"):
            fully_shard(model, mesh=mesh, **given)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    fully_shard(model.head, mesh=mesh)
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fully_shard(model.head, mesh=mesh)
    tied: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    fully_shard(tied[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"Parameter '1.weight' is shared with a parameter already managed"):
        fully_shard(tied, mesh=mesh)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model.head)
    with pytest.raises(sf.ShardError, match="reductions are the engine's own"):
        model.head.set_all_reduce_hook(lambda grad: None)


def test_what_is_refused() -> None:
    run(_refused, ranks=2)


def _pair(*, bias: bool = True) -> Any:
    """Two layers and a buffer, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)).double()
    model.register_buffer("shift", torch.ones(4))
    return model


def _batch() -> Tensor:
    """This rank's own."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank())).double()


def _listed() -> None:
    """A module that another of the list holds belongs to that one, and one that is listed twice is sharded once."""
    for pick in (lambda model: [model, model[0]], lambda model: [model[0], model], lambda model: [model, model]):
        model = _pair()
        given = pick(model)
        assert fully_shard(given) is given
        assert type(model).__name__ == "FSDPSequential" and type(model[0]) is nn.Linear
        model(_batch()).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_lists_name_each_module_once() -> None:
    run(_listed, ranks=2)


def _asked() -> None:
    """`shard_placement_fn` sees neither ignored parameters nor shards of inner groups."""
    model, seen = _pair(), []
    ignored = {model[1].bias}
    weight = model[1].weight
    fully_shard(model[0])
    fully_shard(model, ignored_params=ignored, shard_placement_fn=seen.append)
    assert [id(parameter) for parameter in seen] == [id(weight)]
    assert not isinstance(model[1].bias, DTensor) and isinstance(model[1].weight, DTensor)
    last: Any = fully_shard(_pair(), shard_placement_fn=lambda parameter: Shard(-1))
    assert all(parameter.placements == (Shard(parameter.dim() - 1),) for parameter in last.parameters())
    with pytest.raises(ValueError, match=r"'0\.weight' of shape \(\d+, \d+\) has no dim 2"):
        fully_shard(_pair(), shard_placement_fn=lambda parameter: Shard(2))


def test_what_shard_placement_fn_is_asked_about() -> None:
    run(_asked, ranks=2)


def _ignored_inside() -> None:
    """What an inner group ignores, the one around it ignores too: it stays plain, with this rank's own gradient."""
    model, seen = _pair(), []
    bias = model[0].bias
    model[0].scale = nn.Parameter(torch.tensor(1.0))  # a scalar, which is not sharded otherwise
    fully_shard(model[0], ignored_params={bias, model[0].scale})
    fully_shard(model, shard_placement_fn=seen.append)
    assert model[0].bias is bias and not any(parameter is bias for parameter in seen)
    model(_batch()).square().sum().backward()
    assert not isinstance(bias.grad, DTensor) and isinstance(model[1].bias.grad, DTensor)


def test_parameters_that_an_inner_group_ignores() -> None:
    run(_ignored_inside, ranks=2)


def _buffers() -> None:
    """They are no parameters: the same objects, wherever they are."""
    model = _pair()
    shift = model.shift
    fully_shard(model)
    assert model.shift is shift
    with torch.device("meta"):
        model = _pair()
    shift = model.shift
    fully_shard(model)
    assert model.shift is shift and shift.is_meta


def test_buffers_stay_as_they_are() -> None:
    run(_buffers, ranks=2)


def _runs_alone(model: Any) -> None:
    """A part of a model, run alone, gets gradients where its shards are, at first unreduced ones."""
    model.zero_grad()
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        model(torch.ones(3, 4).double()).sum().backward()
        assert all(parameter.grad.device_mesh == parameter.device_mesh for parameter in model.parameters())
    assert all(parameter.grad.placements == parameter.placements for parameter in model.parameters())


def _renamed() -> None:
    model = _pair()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))
    model[0].unshard()
    model[0].reshard()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    assert model[0].weight.device_mesh == model[1].weight.device_mesh
    model(_batch())
    _runs_alone(model[0])


def test_an_inner_group_that_was_used_before_one_of_other_names_came_around_it() -> None:
    run(_renamed, ranks=2)


def _spread() -> None:
    data, mesh = _meshes("tensor")
    model: Any = nn.Sequential(_pair(), MLPs(4, 4).double())
    fully_shard(model[0][0], mesh=data)
    fully_shard(model[0], mesh=data)
    for part in (model[0], model[0][0]):
        part.unshard()
        part.reshard()
    split(model[1], mesh)
    fully_shard(model, mesh=data)
    assert {parameter.device_mesh.ndim for parameter in model.parameters()} == {2}
    for part in (model[0], model[0][0]):
        _runs_alone(part)
    both: Any = nn.Sequential(model[0][0], nn.Linear(4, 4).double())
    fully_shard(both, mesh=data)
    _runs_alone(both)


def test_inner_groups_that_were_used_before_a_tensor_parallel_one_came_around_them() -> None:
    run(_spread, ranks=4)


def _on(mesh: DeviceMesh, *placements: Any) -> Any:
    """A pair whose parameters are DTensors on `mesh`."""
    model = _pair(bias=False)
    for layer in model[:2]:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))
    return model


def _whole_meshes() -> None:
    """Parameters on all of a mesh: replicas and shards by any name; an error leaves them where they were."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"))
    dims = DataParallelMeshDims(shard="in", replicate="out")
    model = _on(mesh, Replicate(), Replicate())
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert {parameter.placements for parameter in model.parameters()} == {(Replicate(), Shard(0))}
    some: Any = fully_shard(_pair(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="in"))
    assert {parameter.device_mesh.mesh_dim_names for parameter in some.parameters()} == {("in",)}
    wrong = _on(mesh, Shard(0), Replicate())
    words = "Expected Replicate() on DP replicate dim 'out' (index 0) but got S"
    same_error(lambda door: door.fully_shard(wrong, mesh=mesh, dp_mesh_dims=dims), ValueError, words)
    several = DataParallelMeshDims(shard=("out", "in"))
    with pytest.raises(sf.ShardError, match=r"has several dims of a kind, \('out', 'in'\); make them one dim"):
        fully_shard(_on(mesh, Replicate(), Replicate()), mesh=mesh, dp_mesh_dims=several)
    model = _on(mesh, Replicate(), Replicate())
    fully_shard(model[0], mesh=mesh, dp_mesh_dims=dims, offload_policy=CPUOffloadPolicy())
    with pytest.raises(sf.ShardError, match="'0' and the module around it have different offload policies; use one"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model[1].weight.device_mesh is mesh and not isinstance(model, FSDPModule)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, offload_policy=CPUOffloadPolicy())


def test_parameters_on_a_whole_mesh() -> None:
    run(_whole_meshes, ranks=4)


def _named_dims() -> None:
    """`dp_mesh_dims` also where `parallelize_module` had only the other dims of the mesh."""
    _, mesh = _meshes("tensor")
    trains(sharded_net("tensor", mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp")), "tensor")


def test_data_dims_beside_tensor_parallel_ones() -> None:
    run(_named_dims, ranks=4)


ALONE = """
import torch.distributed as dist
from torch import nn
from shardfn.compat.fsdp2 import fully_shard
model = fully_shard(nn.Linear(4, 4))
print(type(model).__name__, dist.get_world_size())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_starts_the_process_group_that_is_missing() -> None:
    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=os.environ | own, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["FSDPLinear", "1"], done.stderr[-3000:]


def _grads(model: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return gradients(model)


def _factor_inside() -> None:
    model = fully_shard(_pair())
    before = _grads(model, _batch())
    model = _pair()
    fully_shard(model[0])
    fully_shard(model)
    model[0].set_gradient_divide_factor(1.0)
    want = {name: grad * (2 if name.startswith("0.") else 1) for name, grad in before.items()}
    assert_trees_close(_grads(model, _batch()), want, rtol=0, atol=1e-12)


def test_a_factor_of_an_inner_group_alone() -> None:
    run(_factor_inside, ranks=2)


def _factor_beside_tp() -> None:
    """The sum over data ranks alone: the mean times two, on two of them."""
    model, _, _ = _sharded("tensor")
    ids = torch.randint(0, 16, (3, 4), generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    before = _grads(model, ids)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(1.0)
    assert_trees_close(_grads(model, ids), {name: 2 * grad for name, grad in before.items()}, rtol=0, atol=1e-9)


def test_a_factor_counts_data_ranks() -> None:
    run(_factor_beside_tp, ranks=4)


def _reduces(model: Any) -> bool:
    """Whether a backward leaves no gradient to be reduced later."""
    model.zero_grad()
    model(_batch()).sum().backward()
    return all(p.grad.placements == p.placements for p in model.parameters())


def _all_reduces() -> None:
    """Without replicas there is none to leave out; and all gradients are reduced again once they are synced again."""
    model: Any = fully_shard(_pair())
    model.set_requires_all_reduce(False)
    assert _reduces(model)
    mesh, _ = _meshes("hybrid")
    model = fully_shard(_pair(), mesh=mesh)
    model.set_requires_all_reduce(False)
    assert not _reduces(model)
    model.set_requires_gradient_sync(True)
    assert _reduces(model)


def test_when_gradients_are_reduced() -> None:
    run(_all_reduces, ranks=4)


def _unsharded() -> None:
    """Again: the same weights, for nothing. Inner groups are on their own, also where there is nothing else."""
    weights = list(_pair().parameters())
    for inner_first in (False, True):
        model: Any = _pair()
        fully_shard(model[0])
        fully_shard(model)
        shards, each = list(model.parameters()), [model[0], model] if inner_first else [model, model[0]]
        for module in each:
            module.unshard()
        found = list(model.parameters())
        with count_collectives() as counted:
            model.unshard()
        assert counted.total == 0 and all(a is b for a, b in zip(found, model.parameters(), strict=True))
        assert_trees_close(found, weights, rtol=0, atol=0)
        for module in each:
            module.reshard()
        assert all(a is b for a, b in zip(shards, model.parameters(), strict=True))
    model = nn.Sequential(*_pair())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.unshard()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_unshard_is_about_own_weights() -> None:
    run(_unsharded, ranks=2)


def _reset() -> None:
    """`reset_iter_state` puts shards back, and keeps gradients that were reduced."""
    model: Any = fully_shard(_pair())
    want = _grads(model, _batch())
    model.unshard()
    model.reset_iter_state()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_trees_close(gradients(model), want, rtol=0, atol=0)


def test_a_reset_keeps_what_was_reduced() -> None:
    run(_reset, ranks=2)


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.emb(ids))))


def _assigned(how: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=None if how == "nameless" else ("dp",))
    plain, model = Tied().double(), Tied().double()
    plain.load_state_dict({name: torch.randn(x.shape, dtype=x.dtype) for name, x in Tied().state_dict().items()})
    for each in (model.mid, [model.emb, model.head] if how == "list" else model):
        fully_shard(each, mesh=mesh)
    outer = nn.Sequential(model)  # hooks run when any module above loads
    new = {f"0.{name}": distribute_tensor(x.clone(), mesh, [Shard(0)]) for name, x in plain.state_dict().items()}
    if how == "one name":
        del new["0.emb.weight"]
    outer.load_state_dict(new, strict=how != "one name", assign=True)
    fully_shard(outer, mesh=mesh)
    assert model.emb.weight is model.head.weight and len(list(model.parameters())) == 3
    ids = torch.arange(9)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (outer, plain)]
    for _ in range(2):
        for each, optimizer in zip((outer, plain), optimizers, strict=True):
            each(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_trees_close(found, plain.state_dict(), rtol=0, atol=1e-9)
    with pytest.raises(sf.ShardError, match=r"assign=True\): '0\.\w+\.weight' is whole.* Leave assign=True out"):
        outer.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()}, assign=True)


@pytest.mark.parametrize("how", ["all", "list", "one name", "nameless"])
def test_tied_weights_stay_tied_when_others_take_their_place(how: str) -> None:
    run(_assigned, how, ranks=2)


def _pickled(folder: Path, own: bool, assign: bool) -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 2, bias=False))
    before = whole(model.weight)
    torch.save(model.state_dict(), folder / str(dist.get_rank()))
    dist.barrier()
    state = torch.load(folder / (str(dist.get_rank()) if own else "0"), weights_only=False)
    words = "is the part of rank 0 of ranks .0, 1., and this is rank 1 of .0, 1.: torch.save of sharded parameters"
    is_own = own or not dist.get_rank()
    with nullcontext() if is_own else pytest.raises((sf.ShardError, RuntimeError), match=words):
        model.load_state_dict(state, assign=assign)
    if not assign:
        assert torch.equal(whole(model.weight), before)


@pytest.mark.parametrize("assign", [False, True])
def test_a_pickled_shard_is_that_of_the_rank_which_wrote_it(tmp_path: Path, assign: bool) -> None:
    run(_pickled, tmp_path, True, assign, ranks=2)
    run(_pickled, tmp_path, False, assign, ranks=2)


@on_meshes({"fsdp": 2})
def test_a_setting_that_changes_after_a_forward_counts(mesh: DeviceMesh) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4))
    assert [unit.regather for unit in current_shards(model).plan.units if unit.name] == [True, True]
    model[0].set_reshard_after_forward(False)
    model(torch.ones(2, 4))
    assert [unit.regather for unit in current_shards(model).plan.units if unit.name] == [False, True]


@on_meshes({"fsdp": 2})
def test_a_batch_norm_in_its_own_dtype_leaves_activations_as_they_are(mesh: DeviceMesh) -> None:
    found: list[Tensor] = []
    for shard in (fully_shard, torch.distributed.fsdp.fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
        shard(model[1], mesh=mesh, mp_policy=MixedPrecisionPolicy())
        shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        found.append(model(torch.linspace(-1, 1, 32).reshape(4, 8)))
    assert found[0].dtype == torch.bfloat16
    assert_close(*found)


@on_meshes({"fsdp": 2})
def test_a_forward_on_the_meta_device_says_what_is_there(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    untyped(fully_shard)(model, mesh=mesh, offload_policy=None)  # as verl calls it
    with pytest.raises(RuntimeError, match=r"still on meta device: \['weight', 'bias'\]. Call module.to_empty"):
        model(torch.ones(2, 8))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert_close(model(torch.ones(2, 8)), torch.full((2, 8), 9.0))
