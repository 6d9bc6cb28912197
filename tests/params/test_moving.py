"""Slices of trees from rank to rank: which bytes travel, what ranks hold, what is the same in a simulation, errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import FLOATS, Case, assert_all_raise, assert_same_bits, cases, hold_for_all, whole_forward
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import shardfn as sf
from shardfn._torch import part_of_rank, unwrap_local, wrap_local
from shardfn.comm import slice_messages
from shardfn.comm.buckets import leaf_spec
from shardfn.layout.layout import local_slice, to_leaves
from shardfn.layout.mesh import grid_of
from shardfn.testing import count_collectives, on_meshes, run

# sizes that divide, and that do not: w is fused, padded, split within, over both axes of one dim; all dtypes of a byte
SHAPES = {
    "w": ((12, 6), torch.float32),
    "row": ((7, 5), torch.bfloat16),
    "col": ((3, 10), torch.float8_e4m3fn),
    "vocab": ((5, 3), torch.float64),
    "both": ((9,), torch.int16),
    "heads": ((24, 3), torch.complex128),
    "empty": ((4, 0), torch.bool),
    "one": ((), torch.float16),
}
RULES = {
    "w": "(q: 4@tp 2 + k: kv@tp 1 + v: kv@tp 1) _@fsdp",
    "row": "_@fsdp _",
    "col": "_ _@fsdp",
    "vocab": "vocab@tp _@fsdp",
    "both": "n@tp@fsdp",
    "heads": "(3 h@tp d) _@fsdp",
}
A = sf.Policy(rules=RULES, sizes={"kv": 2, "h": 4, "d": 2}, pad={"vocab": 4, "n": 2}, compute={"**": whole_forward})
B = sf.Policy()
C = sf.Policy(default="replicate")
D = sf.Policy(rules={"w": "_ _@fsdp", "col": "_@fsdp _", "heads": "(6 d@fsdp) _"}, min_size=100)


def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    out = {}
    for name, (shape, dtype) in SHAPES.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        out[name] = torch.randint(0, 2, (count,), dtype=torch.uint8).view(dtype).view(shape)
    return out


def own(plan: sf.Plan, mesh: DeviceMesh, name: str) -> set[int]:
    """The elements of a parameter that this rank has."""
    layout, grid = plan.layouts[name], grid_of(mesh, plan.roles.storage)
    numbers = torch.arange(1, layout.numel + 1).view(layout.shape)  # zeros are padding
    leaves = zip(layout.leaves, to_leaves(layout, numbers), strict=True)
    parts = [local_slice(leaf, whole, grid.sizes, grid.coords) for leaf, whole in leaves]
    return {x for part in parts for x in part.flatten().tolist()} - {0}


def received(fn: Any) -> tuple[Any, int]:
    """What it returns, and the bytes that came in messages."""
    with count_collectives() as counts:
        out = fn()
    assert counts.as_dict().keys() <= {"send", "receive", "all_gather"} and counts.all_gather <= 2, counts
    return out, counts.bytes_of.get("receive", 0)


def assert_moved(params: sf.Params, to: sf.Policy, mesh: DeviceMesh) -> sf.Params:
    moved, nbytes = received(lambda: sf.reshard(params, to, mesh))
    lacked = sum(
        len(own(moved.plan, mesh, name) - own(params.plan, params.mesh, name)) * dtype.itemsize
        for name, (_, dtype) in SHAPES.items()
    )
    want = sf.shard(values(), mesh, to)
    assert list(moved) == list(want)
    for name, leaf in want.items():
        assert moved[name].placements == leaf.placements
        assert_same_bits(unwrap_local(moved[name]), unwrap_local(leaf), name)
    assert nbytes == lacked, (nbytes, lacked)
    return moved


def exact_bytes_on_a_rank(parcel: int) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(slice_messages, "PARCEL", parcel)
    meshes = [
        sf.make_mesh("cpu", **axes)
        for axes in ({"fsdp": 2, "tp": 2}, {"tp": 2, "fsdp": 2}, {"fsdp": 4, "tp": 1}, {"replicate": 2, "fsdp": 2})
    ]
    ways = [
        (mesh, policy)
        for mesh in meshes
        for policy in (A, B, C, D)
        if policy != A or "tp" in (mesh.mesh_dim_names or ())
    ]
    pairs = [*product(ways, repeat=2)]
    try:
        for before, after in pairs if parcel > 16 else pairs[::5]:
            assert_moved(sf.shard(values(), *before), after[1], after[0])
    finally:
        patch.undo()


@pytest.mark.parametrize("parcel", [16, pytest.param(slice_messages.PARCEL, marks=pytest.mark.slow)])
def test_a_rank_receives_what_it_lacks_and_nothing_else(parcel: int) -> None:
    run(exact_bytes_on_a_rank, parcel)


def first_has_all(case: Case) -> None:
    params, is_first = sf.shard(case.model(), case.layouts[0].mesh(), case.layouts[0].policy()), dist.get_rank() == 0
    own = 0
    for dtype in (None, torch.bfloat16, torch.float64):
        want = sf.gather(params, dtype=dtype)
        first, nbytes = received(lambda dtype=dtype: sf.gather(params, to="rank0", dtype=dtype))
        own = nbytes if dtype is None else own
        assert list(first) == list(want) * is_first and (is_first or not nbytes)
        assert nbytes == own or (nbytes < own and dtype == torch.bfloat16), "what is narrower travels"
        wide = own and dtype == torch.bfloat16 and {"float32", "float64"}.issuperset(case.dtypes)
        assert nbytes < own or not wide
        for name, value in first.items():
            assert_same_bits(value, want[name], name)
            assert value.untyped_storage().nbytes() == value.nbytes


def test_the_first_rank_has_all() -> None:
    hold_for_all(first_has_all, cases())


@contextmanager
def garbage() -> Iterator[None]:
    """Memory that nobody has written to is not zero by chance."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def backward_goes_the_other_way(case: Case) -> None:
    """The cotangents of a tree in another layout are moved back; ranks have whole numbers that say which is whose."""
    first, second = case.layouts
    params = sf.shard(case.whole_numbers(1), first.mesh(), first.policy())
    weights = sf.shard(case.whole_numbers(2), second.mesh(), second.policy())
    grid = grid_of(params.mesh, params.plan.roles.storage)
    leaves = {
        name: wrap_local(unwrap_local(x), leaf_spec(params.plan, grid, name, x.dtype)).requires_grad_()
        for name, x in params.items()
    }
    moved = sf.reshard(params.like(leaves), second.policy(), second.mesh())
    want = sf.shard(case.whole_numbers(2), first.mesh(), first.policy())
    used = {leaf.name for leaf in weights.plan.layouts["t0"].leaves}
    for names in (used, set(weights)):  # what is not used has zeros
        outs, cotangents = zip(*((moved[name], weights[name]) for name in weights if name in names), strict=True)
        with garbage():
            grads = torch.autograd.grad(outs, [*leaves.values()], cotangents, retain_graph=True)
        for grad, (name, x) in zip(grads, want.items(), strict=True):
            is_used = len(names) == len(weights) or want.plan.leaves[name][0].name == "t0"
            whole = unwrap_local(x) if is_used else torch.zeros_like(unwrap_local(x))
            assert_same_bits(unwrap_local(grad), whole, name)


def test_the_backward_goes_the_other_way() -> None:
    hold_for_all(backward_goes_the_other_way, cases(layouts=2, dtypes=FLOATS))


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tp": 2}, {"tp": 2, "fsdp": 2}, {"fsdp": 3, "tp": 1}])
def test_one_process_copies_from_rank_to_rank(axes: dict[str, int]) -> None:
    for before, after in product((A, B, C, D), repeat=2):
        with sf.simulate(**axes) as mesh:
            if 3 in axes.values() and A in (before, after):
                continue
            moved, want = sf.reshard(sf.shard(values(), mesh, before), after), sf.shard(values(), mesh, after)
            for name, rank in product(want, range(mesh.size())):
                here, there = (part_of_rank(unwrap_local(tree[name]), rank) for tree in (moved, want))
                assert_same_bits(here, there, f"{name} on rank {rank}")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells how much memory was resident")
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 1})
def test_no_rank_holds_more_than_its_shards_and_some_parcels(mesh: DeviceMesh) -> None:
    def resident(field: str) -> int:
        return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 2**10

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 24 * 1024, bias=False))  # 100 MiB
    params = sf.shard(model, mesh, sf.Policy(), init=lambda module: module.reset_parameters())
    columns = sf.Policy(rules={"*.weight": "_ c@fsdp"})
    sf.reshard(params.select("0.**"), columns)
    for verb in ("reshard", "gather"):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        out = sf.reshard(params, columns) if verb == "reshard" else sf.gather(params, to="rank0")
        peak = resident("VmHWM") - before
        held = sum(unwrap_local(x).nbytes for x in out.values())
        assert peak < held + 2**25, (verb, peak, held)  # 16 MiB, and what the allocator keeps


def differ_on_a_rank(what: str) -> None:
    mesh, odd = sf.make_mesh("cpu", fsdp=2, tp=2), dist.get_rank() == 1
    params, to = sf.shard(values(), mesh, A), B
    if what == "policy" and odd:
        to = C
    elif what == "mistake" and odd:
        to = sf.Policy(rules={"nothing": "a b"})
    elif what == "mesh":
        mesh = sf.make_mesh("cpu", fsdp=4), sf.make_mesh("cpu", tp=4)
        sf.reshard(params, B, mesh[odd])
    elif what == "dtype" and odd:
        params = sf.tree.map(lambda x: x.to(torch.float64) if x.dtype == torch.bfloat16 else x, params)
    elif what == "names" and odd:
        params = params.select("row")
    elif what == "placed":
        leaf: Any = params["row"]
        params = params.like({**params, "row": leaf.redistribute(placements=[Replicate(), Replicate()])})
    elif what in ("gather", "gathered dtype"):
        sf.gather(params, "w" if odd and what == "gather" else None, to="rank0", dtype=torch.float64 if odd else None)
    sf.reshard(params, to)


def test_ranks_that_differ_raise_alike_before_anything_is_sent() -> None:
    table = [
        (("policy",), sf.ShardError, r"reshard: ranks have different models or policies: .*parameter 'w'"),
        (("mistake",), sf.ShardError, r"nothing"),
        (("mesh",), sf.ShardError, r"reshard: ranks have different"),
        (("dtype",), sf.ShardError, r"leaf 'row' \(7, 5\) torch.bfloat16, '_@fsdp _'.* torch.float64"),
        (("names",), sf.ShardError, r"reshard: ranks have different"),
        (("placed",), sf.ShardError, r"reshard: 'row' is placed as .*, which is not its layout '_@fsdp _'"),
        (("gather",), sf.ShardError, r"gather: ranks differ"),
        (("gathered dtype",), sf.ShardError, r"gather: ranks differ: .*dtype=torch.float64"),
    ]
    assert_all_raise(differ_on_a_rank, table)
