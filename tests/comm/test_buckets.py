"""Many leaves travel together: against torch's own DTensor, both ways over an axis, memory, and derivatives."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import as_dtensor, assert_same_bits
from ranks import in_place
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardfn as sf
from shardfn._torch import unwrap_local, wrap_local
from shardfn.comm import packing
from shardfn.comm.buckets import BucketOnGrid, GatherBucket, ReduceBucket, leaf_spec
from shardfn.comm.flat_memory import BufferPool, FreshBuffers
from shardfn.comm.packing import AxisCollective
from shardfn.comm.raw_collectives import AsyncCollective
from shardfn.layout.mesh import Grid, grid_of
from shardfn.testing import count_collectives, run

SHAPES = {"a": (5, 3), "b": (4, 2), "c": (1, 7), "d": (2, 0), "e": (9, 2), "f": (3,)}
RULES = {"a": "x@fsdp _", "b": "_ y@fsdp", "c": "_ z@fsdp", "d": "w@fsdp _", "e": "v@fsdp _", "f": "u@fsdp"}


def make_params(mesh: DeviceMesh, dtype: torch.dtype | None = None) -> tuple[sf.Params, Grid, BucketOnGrid]:
    model = {
        n: torch.arange(float(torch.Size(s).numel())).view(s).double() + 10 * i
        for i, (n, s) in enumerate(SHAPES.items())
    }
    params = sf.shard(model, mesh, sf.Policy(rules=RULES, compute_dtype=dtype))
    places = grid_of(mesh, params.plan.roles.storage)
    bucket = params.plan.units[0].buckets[0]
    return params, places, BucketOnGrid(params.plan, places, bucket, BufferPool(places.device))


def move_on_a_rank(message: int | None) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    params, _, on_grid = make_params(init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",)))
    names = on_grid.bucket.leaves
    shards = [unwrap_local(params[name]) for name in names]
    in_place(message)
    try:
        with count_collectives() as counts:
            wholes = on_grid.gather(shards)
        if message is None:
            assert counts.as_dict() == {"all_gather": 1}, "one for all leaves"
        else:
            assert set(counts.as_dict()) == {"send", "receive"}
        for name, whole in zip(names, wholes, strict=True):
            assert_same_bits(whole, as_dtensor(params[name]).full_tensor())
        assert len({whole.untyped_storage().data_ptr() for whole in wholes if whole.numel()}) == 1, "one buffer"
        scaled: list[Tensor | None] = [whole * (rank + 1) for whole in wholes]
        with count_collectives() as counts:
            back = on_grid.reduce(scaled, [torch.float64] * len(names), "sum")
        assert message is not None or counts.total == 1
        total = sum(range(1, size + 1))
        for shard, got in zip(shards, back, strict=True):
            assert_same_bits(got, shard * total)
        for wide, narrow in ((torch.float64, torch.float32), (torch.float64, torch.bfloat16)):
            part = on_grid.reduce([None, *scaled[1:]], [narrow] * len(names), "mean")
            for i, (shard, got) in enumerate(zip(shards, part, strict=True)):
                expected = shard * total / size if i else torch.zeros_like(shard)
                assert_same_bits(got, expected.to(wide).to(narrow), names[i])
    finally:
        in_place(None)


@pytest.mark.everyday(6)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("message", [None, 0, 60, 2**20])
def test_leaves_travel_together_or_in_place(ranks: int, message: int | None) -> None:
    run(move_on_a_rank, message, ranks=ranks)


def bucket_of(rule: str, dtype: torch.dtype) -> tuple[Tensor, BucketOnGrid]:
    """A weight of 4 x 4 and the bucket that it is alone in, over two ranks."""
    weight = torch.arange(16).view(4, 4).to(dtype)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    params = sf.shard({"w": weight}, mesh, sf.Policy(rules={"w": rule}))
    places = grid_of(mesh, params.plan.roles.storage)
    return weight, BucketOnGrid(params.plan, places, params.plan.units[0].buckets[0], BufferPool(places.device))


def sent_on_a_rank(dtype: torch.dtype, travels_as: torch.dtype) -> None:
    weight, on_grid = bucket_of("x@fsdp _", dtype)
    sent: list[torch.dtype] = []
    gathers = packing.all_gather_single

    def noting(into: Tensor, own: Tensor, **how: Any) -> Any:
        sent.extend([into.dtype, own.dtype])
        return gathers(into, own, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "all_gather_single", noting)
        (whole,) = on_grid.gather([weight.chunk(2)[dist.get_rank()].clone()])
    assert sent == [travels_as, travels_as]
    assert whole.dtype == dtype and torch.equal(whole.view(torch.uint8), weight.view(torch.uint8))


AS_BYTES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int16, torch.bool, torch.complex64)


@pytest.mark.everyday(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *AS_BYTES])
def test_what_every_backend_takes_is_sent_as_it_is_and_the_rest_as_bytes(dtype: torch.dtype) -> None:
    run(sent_on_a_rank, dtype, torch.uint8 if dtype in AS_BYTES else dtype, ranks=2)


def reduced_on_a_rank(rule: str, dim: int) -> None:
    weight, on_grid = bucket_of(rule, torch.float32)
    with count_collectives() as counts:
        (got,) = on_grid.reduce([weight], [torch.float32], "sum")
    assert counts.total == 1
    assert_same_bits(got, 2 * weight.chunk(2, dim)[dist.get_rank()])


@pytest.mark.parametrize(("rule", "dim"), [("x@fsdp _", 0), ("_ x@fsdp", 1)])
def test_a_gradient_is_cut_along_the_dim_that_is_split(rule: str, dim: int) -> None:
    """A square one has parts of the same size along both."""
    run(reduced_on_a_rank, rule, dim, ranks=2)


def nothing_to_send_on_a_rank() -> None:
    params, _, on_grid = make_params(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    alone = on_grid.part([name == "d" for name in on_grid.bucket.leaves])
    for message in (None, 0):
        in_place(message)
        with count_collectives() as counts:
            assert alone.gather([unwrap_local(params["d"])])[0].shape == (2, 0)
            got = alone.reduce([torch.empty(2, 0, dtype=torch.float64)], [torch.float64], "mean")
            assert got[0].shape == unwrap_local(params["d"]).shape
        assert counts.total == 0
    in_place(None)


def test_nothing_to_send() -> None:
    run(nothing_to_send_on_a_rank, ranks=2)


def one_rank_on_a_rank() -> None:
    params, _, on_grid = make_params(init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
    shards = [unwrap_local(params[name]) for name in on_grid.bucket.leaves]
    with count_collectives() as counts:
        assert all(a is b for a, b in zip(on_grid.gather(shards), shards, strict=True))
        for shard, got in zip(shards, on_grid.reduce(shards, [torch.float64] * len(shards), "mean"), strict=True):
            assert_same_bits(got, shard)
    assert counts.total == 0 and not on_grid.collectives


def test_one_rank_moves_nothing() -> None:
    run(one_rank_on_a_rank, ranks=1)


def side_by_side_on_a_rank() -> None:
    _, places, on_grid = make_params(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    even = on_grid.part([name in ("a", "e", "f") for name in on_grid.bucket.leaves])
    collective = even.collectives[0]
    assert isinstance(collective, AxisCollective)
    if dist.get_rank():  # has less of each: padding lies between, and they are copied together
        assert collective.side_by_side(even.empty_shards(torch.float64)) is None
        return
    shards = even.empty_shards(torch.float64)
    for i, shard in enumerate(shards):
        shard.fill_(i)
    flat, _ = collective.packed(shards, torch.float64, FreshBuffers(places.device))
    assert flat.data_ptr() == shards[0].data_ptr(), "no copy"
    versions = [shard._version for shard in shards]
    shards[1].add_(1)
    assert [shard._version - v for shard, v in zip(shards, versions, strict=True)] == [0, 1, 0]
    moved = [shards[0], shards[1].clone(), shards[2]]
    copied, _ = collective.packed(moved, torch.float64, FreshBuffers(places.device))
    assert copied.data_ptr() != shards[0].data_ptr(), "a leaf that was replaced is copied in"
    swapped = collective.side_by_side([shards[1], shards[0], shards[2]])
    assert swapped is None
    assert all(shard.untyped_storage().nbytes() == shard.numel() * 8 for shard in shards), "storages of their own"
    assert collective.side_by_side([shards[0], shards[1], shards[2].to(torch.float32)]) is None
    where, shards_too = shards[0].data_ptr(), shards
    del shards
    assert torch.equal(shards_too[2], torch.full((2,), 2.0, dtype=torch.float64)) and shards_too[0].data_ptr() == where
    shards = shards_too
    cast, _ = collective.packed(shards, torch.bfloat16, FreshBuffers(places.device))
    assert cast.dtype == torch.bfloat16 and cast.shape == flat.shape


def test_shards_of_a_bucket_lie_side_by_side() -> None:
    run(side_by_side_on_a_rank, ranks=2)


def flights_on_a_rank() -> None:
    params, _, on_grid = make_params(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    shards = [unwrap_local(params[name]) for name in on_grid.bucket.leaves]
    first, second = AsyncCollective(on_grid.gather_steps(shards)), AsyncCollective(on_grid.gather_steps(shards))
    second.advance()
    wholes = (on_grid.collectives[-1].wholes_of(flight.finish()[0]) for flight in (second, first))
    for a, b, name in zip(*wholes, on_grid.bucket.leaves, strict=True):
        assert_same_bits(a, b)
        assert_same_bits(a, as_dtensor(params[name]).full_tensor())
    assert first.finish() is first.finish(), "a result stays"


def test_several_gathers_at_a_time() -> None:
    run(flights_on_a_rank, ranks=2)


def derivatives_on_a_rank() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    params, places, on_grid = make_params(init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",)))
    specs = [leaf_spec(params.plan, places, name) for name in on_grid.bucket.leaves]
    leaves = {
        n: wrap_local(unwrap_local(params[n]), s).requires_grad_(n != "b")
        for n, s in zip(on_grid.bucket.leaves, specs, strict=True)
    }
    wholes = dict(zip(leaves, GatherBucket.apply(on_grid, *leaves.values()), strict=True))
    loss = (rank + 1) * (wholes["a"] ** 3).sum() + wholes["d"].sum()  # c takes no part
    wanted = [leaves["a"], leaves["c"], leaves["d"]]
    grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    mean = (size + 1) / 2
    x = unwrap_local(leaves["a"])
    assert as_dtensor(grads[0]).placements == as_dtensor(leaves["a"]).placements
    torch.testing.assert_close(unwrap_local(grads[0]), 3 * mean * x**2)
    assert grads[1] is None or not unwrap_local(grads[1]).any()
    second = torch.autograd.grad(unwrap_sum(grads[0]), leaves["a"])[0]
    assert as_dtensor(second).placements == as_dtensor(leaves["a"]).placements
    torch.testing.assert_close(unwrap_local(second), 6 * mean * x)


def unwrap_sum(leaf: Tensor) -> Tensor:
    """The sum of a DTensor, differentiable."""
    return as_dtensor(leaf.sum()).full_tensor()


def test_gather_and_reduce_are_transposes() -> None:
    run(derivatives_on_a_rank, ranks=2)


def pending_on_a_rank() -> None:
    params, places, on_grid = make_params(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    names = on_grid.bucket.leaves
    grads = [torch.ones(SHAPES[name], dtype=torch.float64) for name in names]
    dtypes = [torch.float64] * len(names)
    kept = ReduceBucket.apply(on_grid, None, dtypes, grads[0], None, *grads[2:])
    assert kept[0].placements == (Partial(),) and kept[0].shape == SHAPES[names[0]]
    assert unwrap_local(kept[1]).shape == SHAPES[names[1]], "a missing gradient is zeros"
    assert not unwrap_local(kept[1]).any()
    for op, value in (("sum", 2.0), ("mean", 1.0)):
        reduced = ReduceBucket.apply(on_grid, op, dtypes, *grads)
        assert reduced[0].placements == (Shard(0),) and (unwrap_local(reduced[0]) == value).all()
    half = ReduceBucket.apply(on_grid, "mean", [torch.float32] * len(names), *grads)
    assert half[0].dtype == torch.float32 and unwrap_local(half[0]).dtype == torch.float32
    some = on_grid.part([name in "ad" for name in names])
    assert set(some.bucket.leaves) == {"a", "d"} and on_grid.part([True] * len(names)) is on_grid
    spec = leaf_spec(params.plan, places, "a", torch.bfloat16)
    assert spec.placements == (Shard(0),) and spec.tensor_meta is not None and spec.tensor_meta.dtype == torch.bfloat16
    plain = sf.shard({"s": torch.tensor(1.0)}, params.mesh, sf.Policy())
    assert leaf_spec(plain.plan, places, "s").placements == (Replicate(),)


def test_pending_and_reduced_gradients() -> None:
    run(pending_on_a_rank, ranks=2)


def cast_on_a_rank() -> None:
    _, _, on_grid = make_params(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), dtype=torch.bfloat16)
    params, _, _ = make_params(on_grid.grid.mesh)
    with count_collectives() as counts:
        wholes = on_grid.gather([unwrap_local(params[name]) for name in on_grid.bucket.leaves])
    numel = sum(unwrap_local(leaf).numel() for leaf in params.values())
    assert all(whole.dtype == torch.bfloat16 for whole in wholes) and counts.bytes < 4 * (numel + 16), (
        "cast before it is sent"
    )


def test_weights_travel_in_the_compute_dtype() -> None:
    run(cast_on_a_rank, ranks=2)
