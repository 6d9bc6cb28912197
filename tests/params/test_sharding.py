"""`shard`, `gather`, `reduce_grads`, `reshard`: the laws as properties, counts, bad input on every rank."""

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from drawing import (
    COMPLEX,
    FLOATS,
    INTS,
    Case,
    as_dtensor,
    assert_all_raise,
    assert_same_bits,
    assert_same_tree,
    cases,
    hold_for_all,
    untyped,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardfn as sf
from shardfn._torch import unwrap_local, wrap_local
from shardfn.comm import buckets
from shardfn.comm.buckets import leaf_spec
from shardfn.comm.raw_collectives import gather_flat
from shardfn.layout.layout import compute_view, local_slice, to_leaves
from shardfn.layout.mesh import Grid, grid_of
from shardfn.layout.policy import BATCH_AXES
from shardfn.testing import count_collectives, on_meshes, run

# Laws


def gather_undoes_shard(case: Case) -> None:
    model, layouts = case.model(), case.layouts[0]
    full = sf.gather(sf.shard(model, layouts.mesh(), layouts.policy()))
    want = dict(model.named_parameters(remove_duplicate=False)) if isinstance(model, nn.Module) else model
    assert set(full) == set(want)
    for name, tensor in want.items():
        assert_same_bits(full[name], tensor, name)


@pytest.mark.law("P1")
def test_gather_undoes_shard() -> None:
    hold_for_all(gather_undoes_shard, cases())


def reshard_equals_shard(case: Case) -> None:
    model, (first, second, third) = case.model(), case.layouts
    params = sf.shard(model, first.mesh(), first.policy())
    there = sf.reshard(params, second.policy(), second.mesh())
    assert_same_tree(there, sf.shard(model, second.mesh(), second.policy()))
    assert_same_tree(sf.reshard(there, third.policy(), third.mesh()), sf.shard(model, third.mesh(), third.policy()))
    assert_same_tree(sf.reshard(there, params.plan, params.mesh), params)


@pytest.mark.law("P3")
def test_reshard_equals_shard() -> None:
    hold_for_all(reshard_equals_shard, cases(layouts=3))


@on_meshes({"fsdp": 2})
def test_a_mapping_by_a_plan_with_tied_tensors(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    params = sf.shard(model, mesh, sf.Policy())
    whole = sf.gather(params)
    apart = {**whole, "1.weight": whole["1.weight"] + 1}
    for values in (dict(model.named_parameters()), model.state_dict(), whole):
        assert_same_tree(sf.shard(values, mesh, params.plan), params)
    with pytest.raises(sf.ShardError, match=r"another model or mesh\n1\.weight: absent"):
        sf.shard(apart, mesh, params.plan)


def pending_on_a_rank(case: Case, params: sf.Params, places: Grid, typed: bool) -> dict[str, Tensor]:
    """What the backward leaves on this rank: its own numbers, the same along compute axes, with junk in the padding."""
    plan = params.plan
    full = case.whole_numbers(data_index(plan, places))
    out: dict[str, Tensor] = {}
    for layout in plan.layouts.values():
        wholes = []
        for leaf, whole in zip(layout.leaves, to_leaves(layout, full[layout.name]), strict=True):
            inside = to_leaves(layout, torch.ones_like(full[layout.name]))[layout.leaves.index(leaf)]
            junk = torch.where(inside == 0, torch.full_like(whole, 3), whole)
            wholes.append(local_slice(leaf, junk, places.sizes, places.coords, plan.roles.compute))
        if typed:
            specs = [leaf_spec(plan, places, leaf.name, pending="sum") for leaf in layout.leaves]
            out |= {leaf.name: wrap_local(x, spec) for leaf, x, spec in zip(layout.leaves, wholes, specs, strict=True)}
        else:
            out[layout.name] = compute_view(layout, wholes)
    return out


def data_index(plan: sf.Plan, places: Grid) -> int:
    index = 0
    for axis in plan.roles.data:
        index = index * places.sizes[axis] + places.coords[axis]
    return index


def reduced_full(case: Case, plan: sf.Plan, op: str) -> dict[str, Tensor]:
    ranks = 1
    for axis in plan.roles.data:
        ranks *= plan.axes[axis]
    each = [case.whole_numbers(index) for index in range(ranks)]
    total = {name: torch.stack([numbers[name] for numbers in each]).sum(0).to(each[0][name].dtype) for name in each[0]}
    return {name: x / ranks if op == "mean" else x for name, x in total.items()}


def reduce_grads_adds_once(case: Case) -> None:
    layouts = case.layouts[0]
    params = sf.shard(case.whole_numbers(99), layouts.mesh(), layouts.policy())
    places = grid_of(params.mesh, params.plan.roles.storage)
    exact = all(dtype in (*FLOATS, *COMPLEX) for dtype in case.dtypes)
    for op in ("mean", "sum") if exact else ("sum",):
        want = sf.shard(reduced_full(case, params.plan, op), layouts.mesh(), layouts.policy())
        for typed in (False, True) if params.plan.roles.data else (False,):  # without data axes nothing is ever pending
            pending = pending_on_a_rank(case, params, places, typed)
            grads = sf.reduce_grads(params.like(pending) if typed else pending, op=op, like=None if typed else params)
            assert_same_tree(grads, want)
            again = sf.reduce_grads(grads, op=op)
            assert all(again[name] is leaf for name, leaf in grads.items()) and list(again) == list(grads)


@pytest.mark.law("P4")
def test_reduce_grads_adds_once() -> None:
    hold_for_all(reduce_grads_adds_once, cases(dtypes=(*FLOATS, *COMPLEX, *INTS)))


def gather_is_differentiable(case: Case) -> None:
    layouts = case.layouts[0]
    params = sf.shard(case.whole_numbers(99), layouts.mesh(), layouts.policy())
    places = grid_of(params.mesh, params.plan.roles.storage)
    leaves = {
        n: wrap_local(unwrap_local(x), leaf_spec(params.plan, places, n)).requires_grad_() for n, x in params.items()
    }
    full = sf.gather(params.like(leaves))
    weights = case.whole_numbers(data_index(params.plan, places))
    loss = torch.stack([(weights[name] * full[name]).double().sum() for name in full]).sum()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    want = sf.shard(reduced_full(case, params.plan, "mean"), layouts.mesh(), layouts.policy())
    assert_same_tree(grads, want)


@pytest.mark.law("P4")
def test_gather_is_differentiable() -> None:
    hold_for_all(gather_is_differentiable, cases(dtypes=FLOATS))


# Models and meshes

RULES = {
    "blocks.*.up.weight": "ff@tp c@fsdp",
    "blocks.*.down.weight": "c@fsdp ff@tp",
    "blocks.*.qkv.weight": "(q: heads@tp hd + k: kv@tp hd + v: kv@tp hd) c@fsdp",
    "emb.weight": "vocab@tp c@fsdp",
}
MEGATRON = sf.Policy(rules=RULES, sizes={"hd": 2, "heads": 8})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 32, bias=False)  # 8 heads, 4 kv heads, hd 2
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.arange(3))


def make_mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def assert_full(params: sf.Params, model: nn.Module) -> None:
    full = sf.gather(params)
    want = dict(model.named_parameters(remove_duplicate=False))
    assert set(full) == set(want)
    for name, tensor in want.items():
        assert_same_bits(full[name], tensor, name)


# shard


@on_meshes()
def test_shard_keeps_the_model_and_only_this_ranks_part(mesh: DeviceMesh) -> None:
    model = Model()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    params = sf.shard(model, mesh, MEGATRON)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert_same_bits(tensor, before[name][1], name)
    assert list(params) == list(params.plan.leaves) and "head.weight" not in params
    coords = {"fsdp": mesh.get_local_rank("fsdp"), "tp": mesh.get_local_rank("tp")}
    for name, leaf in params.items():
        local = unwrap_local(leaf)
        assert isinstance(leaf, DTensor) and not leaf.requires_grad and local.is_contiguous()
        assert tuple(local.shape) == params.plan.local_shape(name, coords)
        assert local.untyped_storage().nbytes() == local.numel() * local.itemsize, "more than the shard is kept alive"
        assert leaf.device_mesh.mesh_dim_names == ("tp", "fsdp")
        assert_same_bits(
            buckets.whole(leaf), params.plan.leaves[name][0] and whole_leaf(params.plan, name, model), name
        )
    up = as_dtensor(params["blocks.0.up.weight"])
    assert up.placements == (Shard(0), Shard(1))
    assert as_dtensor(params["scale"]).placements == (Replicate(), Replicate())
    assert params.mesh is mesh and list(params.buffers) == ["steps"]
    assert params.buffers["steps"] is not model.steps and params.buffers["steps"].tolist() == [0, 1, 2]
    assert_full(params, model)


def whole_leaf(plan: sf.Plan, name: str, model: nn.Module) -> Tensor:
    layout, leaf = plan.leaves[name]
    return to_leaves(layout, model.get_parameter(layout.name).detach())[layout.leaves.index(leaf)]


@on_meshes()
def test_a_plan_stands_for_its_policy(mesh: DeviceMesh) -> None:
    model = Model()
    made = sf.plan(model, sf.MeshSpec(fsdp=mesh["fsdp"].size(), tp=mesh["tp"].size()), MEGATRON)
    assert_same_tree(sf.shard(model, mesh, made), sf.shard(model, mesh, MEGATRON))


def from_src_on_a_rank() -> None:
    for mesh in (make_mesh(fsdp=2, tp=2), make_mesh(tp=4, fsdp=1)):
        for src in range(4):
            torch.manual_seed(0)
            want = Model()
            with torch.device("meta" if dist.get_rank() != src else "cpu"):
                torch.manual_seed(0)
                model = Model()
            if dist.get_rank() == src:
                model.get_buffer("steps").add_(src)
            params = sf.shard(model, mesh, MEGATRON, src=src)
            assert_full(params, want)
            assert params.buffers["steps"].tolist() == [src, src + 1, src + 2]


def test_src_has_the_values() -> None:
    run(from_src_on_a_rank)


def src_of_every_dtype_on_a_rank() -> None:
    mesh = make_mesh(fsdp=2)
    for name in ("float64", "bfloat16", "int16", "bool", "float8_e4m3fn"):
        values = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, name))
        mine = {
            "a": values if dist.get_rank() == 1 else values.float().zero_().to(values.dtype),
            "s": values[0, 0].clone(),
        }
        full = sf.gather(sf.shard(mine, mesh, sf.Policy(), src=1))
        assert_same_bits(full["a"], values)


def test_src_sends_every_dtype() -> None:
    run(src_of_every_dtype_on_a_rank, ranks=2)


def one_number_with_a_stride_on_a_rank(path: str) -> None:
    mesh = make_mesh(fsdp=2)
    for name in ("float32", "complex64"):
        column = torch.arange(2).to(getattr(torch, name)).view(1, 2)[:, 1].conj()
        assert_same_bits(sf.gather(sf.shard({"a": column}, mesh, sf.Policy()))["a"], column)
        assert gather_flat(column, mesh.get_group("fsdp")).tolist() == [1, 1]
        sf.checkpoint.save(f"{path}/{name}", {"a": column}, mesh)
        loaded = sf.checkpoint.load(f"{path}/{name}", {"a": torch.zeros(1, 2, dtype=column.dtype)[:, 0]}, mesh)
        assert loaded["a"].tolist() == [1]


def test_one_number_with_a_stride(tmp_path: Path) -> None:
    """What torch calls contiguous, and does not view as bytes; nor does it a number that is conjugated."""
    run(one_number_with_a_stride_on_a_rank, str(tmp_path), ranks=2)


# Bad input, on every rank


def shard_with(model: Any, mesh: Any, policy: Any, src: int | None = None) -> None:
    """`mesh` as axes, or None for one without names."""
    mesh = DeviceMesh("cpu", [0, 1]) if mesh is None else make_mesh(**mesh) if isinstance(mesh, Mapping) else mesh
    sf.shard(Model() if isinstance(model, str) else model, mesh, policy, src=src)


def test_a_bad_policy_is_an_error_on_every_rank() -> None:
    axes = {"fsdp": 2, "tp": 2}
    table = [
        (
            {"emb.weight": "v@ftp c"},
            r"emb.weight: unknown mesh axis 'ftp'; the mesh has fsdp=2, tp=2; did you mean 'tp'",
        ),
        (
            {"blocks.*.upp.weight": "a b"},
            r"rule 'blocks.\*.upp.weight' matches no parameter; did you mean 'blocks.\d.up",
        ),
        (
            {"emb.weight": "v c", "blocks.0.up.weight": "c f"},
            r"blocks.0.up.weight: dim 0 of size 12 does not match 6: c=6 \(from emb.weight\)",
        ),
        ({"scale": "c"}, r"scale \(\): the rule has 1 dims, the tensor has 0"),
        (
            {"emb.weight": "v c@tp"},
            r"(?s)'emb.weight' has shape \(8, 6\); rule 'v c@tp' splits dim 1 .* 6 % 4 = 2.*\^\^\^\^.*pad=\{'c': 4\}",
        ),
    ]
    rows = [
        (("model", {"fsdp": 1, "tp": 4} if "6 % 4" in match else axes, sf.Policy(rules=r)), sf.ShardError, match)
        for r, match in table
    ]
    assert_all_raise(
        shard_with, [*rows, (("model", axes, sf.Policy(default="error")), sf.ShardError, "no rule matches it")]
    )


def test_what_is_no_model_mesh_or_policy() -> None:
    good, axes, policy = {"w": torch.ones(2)}, {"fsdp": 2}, sf.Policy()
    made = sf.plan({"w": torch.ones(3, 2)}, sf.MeshSpec(fsdp=2), policy)
    table = [
        (([1, 2], axes, policy), TypeError, "an nn.Module or a mapping.*got list"),
        (({"w": 3}, axes, policy), TypeError, "'w' holds int"),
        ((good, sf.MeshSpec(fsdp=2), policy), TypeError, "a MeshSpec is for plan"),
        ((good, axes, {"w": "a@fsdp"}), TypeError, "expected a Policy, got dict"),
        ((good, axes, policy, 7), sf.ShardError, r"src=7 is not a rank of the mesh.*\[0, 1\]"),
        (({"w": torch.ones(2, 3)}, axes, made), sf.ShardError, r"made for another model or mesh\nw: .*3.* -> .*2"),
        ((good, None, policy), ValueError, "mesh_dim_names"),
    ]
    assert_all_raise(shard_with, table, ranks=2)


def shard_meta(what: str, init: bool, src: int | None) -> None:
    with torch.device("meta"):
        model: Any = nn.Linear(3, 2)
    if what == "mapping":
        model = dict(model.named_parameters())
    elif what == "buffer":
        model = nn.Module()
        model.register_buffer("table", torch.empty(2, device="meta"))
    sf.shard(model, make_mesh(fsdp=2), sf.Policy(), init=reset if init else None, src=src)


def reset(module: Any) -> None:
    module.reset_parameters()


def test_meta_tensors_need_init() -> None:
    why = "2 tensors are on the meta device .*'weight'.* no init to fill them"
    table = [
        (("module", False, None), sf.ShardError, why),
        (("mapping", False, None), sf.ShardError, why),
        (("mapping", True, None), sf.ShardError, "a mapping must hold the values"),
        (("module", False, 1), sf.ShardError, "src=1 must have the values"),
        (("module", True, 1), sf.ShardError, "src=1 must have the values"),
        (("buffer", False, None), sf.ShardError, "the first is 'table'"),
    ]
    assert_all_raise(shard_meta, table, ranks=2)


def shard_differently(what: str) -> None:
    rank = dist.get_rank()
    odd = rank == 2
    mesh, other = make_mesh(fsdp=2, tp=2), make_mesh(fsdp=4)
    policy, model, src = MEGATRON, Model(), None
    if what == "policy":
        policy = MEGATRON | sf.Policy(rules={"emb.weight": "vocab c@fsdp"}) if odd else MEGATRON
    elif what == "dtype":
        policy = MEGATRON | sf.Policy(compute_dtype=torch.bfloat16) if odd else MEGATRON
    elif what == "model":
        model = Model(3) if odd else model
    elif what == "frozen":
        model.scale.requires_grad_(not odd)
    elif what == "buffer":
        model.register_buffer("more", torch.ones(2)) if odd else None
    elif what == "mesh":
        mesh, policy = (other if odd else mesh), sf.Policy()
    elif what == "src":
        src = 0 if odd else None
    elif what == "invalid":
        policy = sf.Policy(rules={"nothing": "a"}) if odd else MEGATRON
    elif what == "units":
        policy = sf.Policy(units=broken if odd else working)
    sf.shard(model, mesh, policy, src=src)


def broken(name: str, module: nn.Module) -> bool:
    raise RuntimeError("broken units")


def working(name: str, module: nn.Module) -> bool:
    return name.startswith("blocks.") and name.count(".") == 1


DIFFERENCES = {
    "policy": r"rank 0 has parameter 'emb.weight'.*vocab@tp c@fsdp.*; rank 2 has parameter 'emb.weight'.*vocab c@fsdp",
    "dtype": r"rank 0 has compute_dtype=None; rank 2 has compute_dtype=torch.bfloat16",
    "model": r"rank 0 has regather=True; rank 2 has parameter 'blocks.2.qkv.weight'",
    "frozen": r"rank 0 has parameter 'scale'.*; rank 2 has parameter 'scale'.*frozen",
    "buffer": r"rank 0 has src=None; rank 2 has buffer 'more' \(2,\)",
    "mesh": r"rank 0 has mesh \{'fsdp': 2, 'tp': 2\}.*; rank 2 has mesh \{'fsdp': 4\}",
    "src": r"rank 0 has src=None; rank 2 has src=0",
}


def test_ranks_that_differ() -> None:
    assert_all_raise(shard_differently, [((what,), sf.ShardError, match) for what, match in DIFFERENCES.items()])


def test_one_rank_that_fails_stops_all() -> None:
    table = [(("invalid",), ValueError, "matches no parameter"), (("units",), Exception, "broken units")]
    said = assert_all_raise(shard_differently, table)
    for call in range(len(table)):
        assert all("rank 2" in said[rank][call] for rank in (0, 1, 3)) and "rank 2" not in said[2][call]


def shard_on_a_part_of_the_ranks() -> None:
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [[1, 3]], mesh_dim_names=("fsdp", "tp"))
    model = {"w": torch.arange(6).view(2, 3)}
    policy = sf.Policy(rules={"w": "a@tp b@fsdp"})
    if rank in (1, 3):
        params = sf.shard(model, mesh, policy, src=3)
        assert_same_bits(sf.gather(params)["w"], model["w"])
        assert unwrap_local(params["w"]).tolist() == [model["w"].tolist()[rank == 3]]
        assert bool(sf.gather(params, to="rank0")) == (rank == 1)
    else:
        with pytest.raises(
            sf.ShardError, match=rf"rank {rank} is not part of the mesh \(fsdp=1, tp=2\) over ranks \[\[1, 3\]\]"
        ):
            sf.shard(model, mesh, policy)


def test_a_mesh_over_some_of_the_ranks() -> None:
    run(shard_on_a_part_of_the_ranks)


def shard_on_user_meshes() -> None:
    model = Model()
    rules = {name: rule.replace("fsdp", "{data}") for name, rule in RULES.items()}
    cube = make_mesh(pp=1, rows=2, tp=2)
    for mesh, data in (
        (make_mesh(dp=2, tp=2), "dp"),
        (make_mesh(tp=2, fsdp=2), "fsdp"),
        (make_mesh(replicate=2, dp_shard=1, tp=2), "dp_shard"),
        (make_mesh(dp_replicate=2, fsdp=2), "fsdp"),
        (cube["rows", "tp"], "rows"),
        (DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("fsdp", "tp")), "fsdp"),
    ):
        names = mesh.mesh_dim_names or ()
        here = {
            n: r.replace("{data}", data) if "tp" in names else r.replace("{data}", data).replace("@tp", "")
            for n, r in rules.items()
        }
        policy = sf.Policy(
            rules=here, sizes={"hd": 2, "heads": 8, "kv": 4}, batch=["rows"] if data == "rows" else BATCH_AXES
        )
        params = sf.shard(model, mesh, policy)
        assert_full(params, model)
        assert params.mesh is mesh
        assert buckets.whole(as_dtensor(params["emb.weight"])).equal(model.emb.weight)
        assert_same_tree(sf.reshard(params, policy), params)


def test_user_meshes() -> None:
    run(shard_on_user_meshes)


# gather


@on_meshes()
def test_gather_options(mesh: DeviceMesh) -> None:
    model = Model()
    params = sf.shard(model, mesh, MEGATRON)
    assert set(sf.gather(params, "blocks.0.**")) == {
        f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()
    }
    assert set(sf.gather(params, ["scale", "head.weight"])) == {"scale", "emb.weight", "head.weight"}
    assert sf.gather(params, []) == {}
    with pytest.raises(KeyError, match=r"'blocks\.9\.\*\*' matches no parameter"):
        sf.gather(params, "blocks.9.**")
    first = sf.gather(params, to="rank0")
    assert set(first) == (set(dict(model.named_parameters(remove_duplicate=False))) if dist.get_rank() == 0 else set())
    host = sf.gather(params, to="cpu", dtype=torch.float64)
    for full in (first, host, sf.gather(params), sf.gather(params, dtype=torch.bfloat16)):
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in full.values())  # which torch.save writes
    for name, tensor in model.named_parameters(remove_duplicate=False):
        assert_same_bits(host[name], tensor.detach().double(), name)
    assert host["head.weight"] is host["emb.weight"]
    with pytest.raises(ValueError, match=r"gather\(to='disk'\)"):
        sf.gather(params, to=untyped("disk"))
    with pytest.raises(TypeError, match="expected the tree that shard"):
        sf.gather({"w": torch.ones(2)})


def snapshot_on_a_rank(**axes: int) -> None:
    params = sf.shard(Model(), make_mesh(**axes), MEGATRON if "tp" in axes else sf.Policy(default="replicate"))
    to: Literal["all", "cpu"]
    for to in ("all", "cpu"):
        full = sf.gather(params, to=to)
        before = {name: tensor.clone() for name, tensor in full.items()}
        for leaf in params.values():
            unwrap_local(leaf).add_(1)
        for name, tensor in full.items():
            assert_same_bits(tensor, before[name], name)


def test_gather_is_a_snapshot() -> None:
    run(snapshot_on_a_rank, ranks=1, fsdp=1, tp=1)
    run(snapshot_on_a_rank, ranks=2, fsdp=2)


def counts_on_a_rank(fsdp: int, tp: int) -> dict[str, Any]:
    model = Model()
    params = sf.shard(model, make_mesh(fsdp=fsdp, tp=tp), MEGATRON)
    out = {}
    with count_collectives() as counts:
        sf.gather(params)
    out["gather"] = counts.as_dict()
    pending = {n: torch.ones_like(x) for n, x in params.items()}
    places = grid_of(params.mesh, params.plan.roles.storage)
    for name in pending:
        spec = leaf_spec(params.plan, places, name, pending="sum")
        leaf = params.plan.leaves[name][1]
        shape = leaf.local_shape(places.sizes, places.coords, params.plan.roles.compute)
        pending[name] = wrap_local(torch.ones(shape), spec)
    with count_collectives() as counts:
        sf.reduce_grads(params.like(pending))
    out["reduce"] = counts.as_dict()
    out["buckets"] = [bucket.axes for unit in params.plan.units for bucket in unit.buckets]
    out["kinds"] = len({tuple(a for a in ("tp", "fsdp") if a in leaf.axes) for _, leaf in params.plan.leaves.values()})
    with count_collectives() as counts:
        sf.reshard(params, MEGATRON)
    out["same"] = counts.as_dict()
    with count_collectives() as counts:
        sf.reshard(params, MEGATRON | sf.Policy(rules={"emb.weight": "vocab c"}))
    out["one"] = counts.as_dict()
    with count_collectives() as counts:
        sf.shard(model, params.mesh, MEGATRON)
    out["shard"] = counts.as_dict()
    return out


def test_collectives_are_counted() -> None:
    for fsdp, tp in ((4, 1), (1, 4), (2, 2)):
        found = run(counts_on_a_rank, fsdp, tp)[0]
        # leaves split over tp and fsdp (two collectives), over fsdp only (one), and not at all
        assert found["gather"] == {"all_gather": (fsdp > 1) * 2 + (tp > 1)}, found
        split = sum(bool(axes) for axes in found["buckets"]) * (fsdp > 1)
        whole = sum(not axes for axes in found["buckets"]) * (fsdp > 1)
        assert found["reduce"] == {k: n for k, n in (("all_reduce", whole), ("all_to_all", split)) if n}, found
        assert found["same"] == {"all_gather": 1}, found  # of what ranks ask for
        assert found["one"] == {"all_gather": 1, "send": 3, "receive": 3 - (fsdp == 4)}, found  # 6 columns on 3 ranks
        assert found["shard"] == {"all_gather": 1}, found  # the exchange of three numbers


# reduce_grads


def bad_grads(what: str) -> None:
    params = sf.shard(Model(), make_mesh(fsdp=2, tp=2), MEGATRON)
    grads: dict[str, Any] = {"blocks.0.up.weight": torch.ones(6, 6)}
    like: sf.Params | None = params
    op: Any = "mean"
    if what == "like":
        like = None
    elif what == "name":
        grads = {"blocks.0.upp.weight": torch.ones(6, 6)}
    elif what == "shape":
        grads = {"blocks.0.up.weight": torch.ones(12, 6)}
    elif what == "integer":
        grads = {"blocks.0.up.weight": torch.ones(6, 6, dtype=torch.int64)}
    elif what == "bool":
        grads, op = {"blocks.0.up.weight": torch.ones(6, 6, dtype=torch.bool)}, "sum"
    elif what == "none":
        grads = {"blocks.0.up.weight": None}
    elif what == "twice":
        grads = {"emb.weight": torch.ones(4, 6), "head.weight": torch.ones(4, 6)}
    elif what == "placed":
        leaf = params["blocks.0.up.weight"]
        assert isinstance(leaf, DTensor)
        grads = {"blocks.0.up.weight": leaf.redistribute(placements=[Replicate(), Replicate()])}
    elif what == "op":
        op = "max"
    sf.reduce_grads(grads, op=op, like=like)


def test_bad_gradients() -> None:
    table = [
        (("like",), TypeError, "needs like=params"),
        (("name",), sf.ShardError, r"no parameter 'blocks.0.upp.weight'; did you mean 'blocks.0.up.weight'"),
        (("shape",), sf.ShardError, r"shape \(12, 6\).*split over the compute axes by 'ff@tp c@fsdp': \(6, 6\)"),
        (("integer",), TypeError, r"'blocks.0.up.weight' holds torch.int64, of which there is no mean; use op='sum'"),
        (("bool",), TypeError, r"holds torch.bool, which cannot be added"),
        (("none",), TypeError, r"holds NoneType, not a tensor"),
        (("twice",), sf.ShardError, r"another name of the same parameter"),
        (
            ("placed",),
            sf.ShardError,
            r"placements \(Replicate\(\), Replicate\(\)\); the parameter has .*Shard\(dim=0\), Shard\(dim=1\)",
        ),
        (("op",), ValueError, r"reduce_grads\(op='max'\)"),
    ]
    assert_all_raise(bad_grads, table)


def mixed_blocks_on_a_rank() -> None:
    # q is split over tp, k and v are not: what a module sees has 2 + 1 + 1 of 4 + 1 + 1 heads
    rule = "(q: 4@tp 2 + k: kv@tp? 2 + v: kv@tp? 2) c@fsdp"
    policy = sf.Policy(rules={"w": rule}, sizes={"kv": 1})
    params = sf.shard({"w": torch.zeros(12, 3)}, make_mesh(fsdp=2, tp=2), policy)
    tp = params.mesh.get_local_rank("tp")
    mine = torch.cat([torch.full((4, 3), 1.0 + tp), torch.full((4, 3), 9.0)])
    full = sf.gather(sf.reduce_grads({"w": mine}, like=params, op="sum"))["w"]
    want = torch.cat([torch.full((4, 3), 2.0), torch.full((4, 3), 4.0), torch.full((4, 3), 18.0)])
    assert_same_bits(full, want)


def test_blocks_that_are_split_and_not() -> None:
    run(mixed_blocks_on_a_rank)


def reduce_dtypes_on_a_rank() -> None:
    # 256 + 1 is 256 in bfloat16: only a float32 reduction of the bfloat16 gradients reaches 257 / 2
    policy = sf.Policy(reduce_dtype=torch.float32)
    params = sf.shard({"w": torch.zeros(4), "i": torch.zeros(4, dtype=torch.int64)}, make_mesh(fsdp=2), policy)
    first = dist.get_rank() == 0
    grad = torch.full((4,), 256.0 if first else 1.0, dtype=torch.bfloat16)
    big = torch.full((4,), 2**53 if first else 1)
    grads = sf.reduce_grads({"w": grad}, like=params)
    assert grads["w"].dtype == torch.float32 and unwrap_local(grads["w"]).tolist() == [128.5, 128.5]
    summed = sf.reduce_grads({"i": big}, like=params, op="sum")
    assert unwrap_local(summed["i"]).tolist() == [2**53 + 1] * 2, "integers are not reduced in a floating dtype"


def test_reduce_dtype() -> None:
    run(reduce_dtypes_on_a_rank, ranks=2)


# reshard


def pending_tree_on_a_rank(verb: str) -> None:
    params = sf.shard({"w": torch.zeros(4, 2)}, make_mesh(fsdp=2), sf.Policy())
    places = grid_of(params.mesh, params.plan.roles.storage)
    tree = params.like({"w": wrap_local(torch.zeros(4, 2), leaf_spec(params.plan, places, "w", pending="sum"))})
    sf.gather(tree) if verb == "gather" else sf.reshard(tree, sf.Policy(default="replicate"))


def test_a_pending_sum_cannot_be_moved() -> None:
    why = r"'w' is a sum that is still pending\. Gradients of .* go through sf\.reduce_grads"
    assert_all_raise(
        pending_tree_on_a_rank, [((verb,), sf.ShardError, f"{verb}: {why}") for verb in ("gather", "reshard")], ranks=2
    )


def bad_reshard(what: str) -> None:
    params = sf.shard(Model(), make_mesh(fsdp=2, tp=2), MEGATRON)
    if what == "ranks":
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
        sf.reshard(params, sf.Policy(), mesh)
    elif what == "plan mesh":
        sf.reshard(params, sf.plan(Model(), sf.MeshSpec(fsdp=4), sf.Policy()))
    elif what == "plan model":
        sf.reshard(params, sf.plan(Model(3), sf.MeshSpec(fsdp=2, tp=2), sf.Policy()))
    elif what == "type":
        sf.reshard(params, untyped(3))
    elif what == "units":
        sf.reshard(params, sf.Policy(units=working))
    elif what == "policy":
        sf.reshard(params, sf.Policy(rules={"emb.weight": "v@nope c"}))
    elif what == "tree":
        sf.reshard({"w": torch.ones(2)}, sf.Policy())


def test_bad_reshard() -> None:
    table = [
        (("ranks",), sf.ShardError, r"the meshes have other ranks: \[0, 1, 2, 3\] and \[0, 1\]"),
        (("plan mesh",), sf.ShardError, r"the plan is for a mesh \{'fsdp': 4\}"),
        (("plan model",), sf.ShardError, r"the plan is for another model\n(?s:.*)blocks.2.qkv.weight: absent -> "),
        (("type",), TypeError, r"expected a Policy, a Plan, a DeviceMesh or a string, got int"),
        (("units",), TypeError, r"units=callable.*needs the model"),
        (("policy",), sf.ShardError, r"unknown mesh axis 'nope'"),
        (("tree",), TypeError, r"reshard: expected the tree that shard\(\) makes, got dict"),
    ]
    assert_all_raise(bad_reshard, table)


def parts_of_a_tree_on_a_rank() -> None:
    mesh = make_mesh(fsdp=2, tp=2)
    params = sf.shard(Model(), mesh, MEGATRON)
    part = params.select("blocks.0.**")
    there = sf.reshard(part, sf.Policy())
    assert list(there) == [name for name, _ in Model().named_parameters() if name.startswith("blocks.0.")]
    back = sf.reshard(there, params.plan)
    assert_same_tree(back, part)
    moments = sf.tree.cast(params, torch.float64)
    assert sf.reshard(moments, make_mesh(fsdp=4, tp=1))["scale"].dtype == torch.float64
    assert all(
        unwrap_local(a).data_ptr() != unwrap_local(b).data_ptr()
        for a, b in zip(back.values(), part.values(), strict=True)
    )
    same = sf.reshard(params, MEGATRON)
    unwrap_local(same["scale"]).add_(1)
    assert unwrap_local(params["scale"]).item() == 2, "a new tree has memory of its own"


def test_parts_and_moments_reshard() -> None:
    run(parts_of_a_tree_on_a_rank)


def copies_on_a_rank() -> None:
    params = sf.shard(Model(), make_mesh(fsdp=2, tp=2), MEGATRON)
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), copy.copy(params), params.copy()):
        assert type(twin) is sf.Params and twin.plan == params.plan
        assert_same_tree(twin, params)
        assert sf.gather(twin)["scale"].item() == 2
        assert twin.buffers["steps"].tolist() == [0, 1, 2]


def test_copies_and_pickles() -> None:
    run(copies_on_a_rank)


@on_meshes({"fsdp": 2})
def test_an_optimizer_of_torch_that_trains_nothing_is_an_error(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 2)
    params = sf.shard(model, mesh, sf.Policy())
    optimizer = torch.optim.AdamW(params.values(), lr=0.5)
    grads = sf.grad(lambda p: sf.apply(model, p, torch.ones(3, 4)).sum())(params)
    with pytest.raises(sf.ShardError, match=r"^AdamW.step: .*would train nothing.*sf.optim.from_torch\(AdamW"):
        optimizer.step()

    def closure() -> float:
        for name, leaf in params.items():
            leaf.grad = grads[name]
        return 0.0

    optimizer.step(closure)
    optimizer.step()
    model.requires_grad_(False)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(sf.Trainer(model, mesh, sf.Policy()).parameters(), lr=0.1).step()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@on_meshes({"fsdp": 2})
def test_hooks_from_before_are_refused_and_run_from_after(mesh: DeviceMesh, register: str) -> None:
    model, seen = nn.Linear(4, 2), list[Tensor]()
    handle = getattr(model.weight, register)(seen.append)
    for make in (lambda: sf.shard(model, mesh, sf.Policy()), lambda: sf.Trainer(model, mesh, sf.Policy())):
        with pytest.raises(sf.ShardError, match=r"'weight' has hooks .*Register them later, for backward"):
            make()
    handle.remove()
    trainer = sf.Trainer(model, mesh, sf.Policy())
    getattr(next(trainer.parameters()), register)(seen.append)
    trainer(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 1
    with torch.no_grad(), pytest.raises(sf.ShardError, match=r"'weight' has hooks .* only loss\.backward"):
        sf.grad(lambda params: sf.apply(model, params, torch.ones(1, 4)).sum())(trainer.params)


def reshard_elsewhere_on_the_first_rank(rules: Mapping[str, str]) -> None:
    first = dist.get_rank() == 0
    params = sf.shard({"w": torch.arange(8.0).view(4, 2)}, make_mesh(fsdp=2), sf.Policy())
    sf.reshard(params, sf.Policy(rules=rules) if first else sf.Policy(default="replicate"))


def test_ranks_that_go_to_other_layouts() -> None:
    """Not only the one whose layout does not fit hears of it; of layouts that do, one would take the other's bytes."""
    table = [
        (({"w": "a b c"},), sf.ShardError, r"the rule has 3 dims, the tensor has 2"),
        (({"w": "a b@fsdp"},), sf.ShardError, r"reshard: ranks have different models or policies: .*b@fsdp"),
    ]
    assert_all_raise(reshard_elsewhere_on_the_first_rank, table, ranks=2)
