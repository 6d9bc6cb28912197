"""Many leaves in one collective: packing against torch's own DTensor, memory, and derivatives of the pair."""

import torch
import torch.distributed as dist
from drawing import as_dtensor, assert_same_bits
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardfn as sf
from shardfn._torch import unwrap_local, wrap_local
from shardfn.core.buckets import (
    BucketOnGrid,
    GatherBucket,
    ReduceBucket,
    empty_in_one,
    gather_leaves,
    leaf_spec,
    scatter_leaves,
    sum_leaves,
)
from shardfn.core.mesh import Grid, grid
from shardfn.testing import count_collectives, run

SHAPES = {"a": (5, 3), "b": (4, 2), "c": (1, 7), "d": (2, 0)}
RULES = {"a": "x@fsdp _", "b": "_ y@fsdp", "c": "_ z@fsdp", "d": "w@fsdp _"}


def make_params(mesh: DeviceMesh, dtype: torch.dtype | None = None) -> tuple[sf.Params, Grid, BucketOnGrid]:
    model = {
        n: torch.arange(float(torch.Size(s).numel())).view(s).double() + 10 * i
        for i, (n, s) in enumerate(SHAPES.items())
    }
    params = sf.shard(model, mesh, sf.Policy(rules=RULES, compute_dtype=dtype))
    places = grid(mesh, params.plan.roles.storage)
    return params, places, BucketOnGrid(params.plan, places, params.plan.units[0].buckets[0])


def move_on_a_rank() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    params, places, spot = make_params(init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",)))
    shards = [unwrap_local(leaf) for leaf in params.values()]
    with count_collectives() as counts:
        wholes = gather_leaves(spot.leaves, shards, ("fsdp",), places)
    assert counts.as_dict() == {"all_gather": 1}, "one for all leaves"
    for leaf, whole in zip(params.values(), wholes, strict=True):
        assert_same_bits(whole, as_dtensor(leaf).full_tensor())
    assert len({whole.untyped_storage().data_ptr() for whole in wholes if whole.numel()}) == 1, "one buffer"
    with count_collectives() as counts:
        back = scatter_leaves(spot.leaves, [whole * (rank + 1) for whole in wholes], ("fsdp",), places)
    assert counts.total == 1
    total = sum(range(1, size + 1))
    for shard, got in zip(shards, back, strict=True):
        assert_same_bits(got, shard * total)
    with count_collectives() as counts:
        summed = sum_leaves([wholes[0], wholes[1]], ("fsdp",), places)
    assert counts.as_dict() == {"all_reduce": 1}
    assert_same_bits(summed[0], wholes[0] * size)
    assert summed[0].data_ptr() != wholes[0].data_ptr()
    empty = [leaf for leaf in spot.leaves if leaf.name == "d"]
    with count_collectives() as counts:
        assert gather_leaves(empty, [shards[3]], ("fsdp",), places)[0].shape == (2, 0)
        assert scatter_leaves(empty, [wholes[3]], ("fsdp",), places)[0].shape == shards[3].shape
    assert counts.total == 0, "nothing to send"


def test_leaves_travel_together() -> None:
    for ranks in (2, 3):
        run(move_on_a_rank, ranks=ranks)


def one_rank_on_a_rank() -> None:
    params, places, spot = make_params(init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
    shards = [unwrap_local(leaf) for leaf in params.values()]
    with count_collectives() as counts:
        assert all(a is b for a, b in zip(gather_leaves(spot.leaves, shards, ("fsdp",), places), shards, strict=True))
        assert all(a is b for a, b in zip(scatter_leaves(spot.leaves, shards, ("fsdp",), places), shards, strict=True))
        assert all(a is b for a, b in zip(sum_leaves(shards, ("fsdp",), places), shards, strict=True))
    assert counts.total == 0 and not spot.communicates


def test_one_rank_moves_nothing() -> None:
    run(one_rank_on_a_rank, ranks=1)


def test_tensors_of_one_storage_have_their_own_versions() -> None:
    a, b = empty_in_one([(2, 3), (4,)], torch.ones(1, dtype=torch.float64))
    assert (a.shape, b.shape, a.dtype) == ((2, 3), (4,), torch.float64)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and b.storage_offset() == 6
    before = a._version, b._version
    a.zero_()
    assert (a._version, b._version) == (before[0] + 1, before[1]), "autograd tells them apart"


def derivatives_on_a_rank() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    params, places, spot = make_params(init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",)))
    specs = [leaf_spec(params.plan, places, name) for name in spot.bucket.leaves]
    leaves = [
        wrap_local(unwrap_local(params[n]), s, requires_grad=n != "b")
        for n, s in zip(spot.bucket.leaves, specs, strict=True)
    ]
    called: list[int] = []
    wholes = GatherBucket.apply(spot, lambda: called.append(1), *leaves)
    loss = (rank + 1) * (wholes[0] ** 3).sum() + wholes[3].sum()  # wholes[2] takes no part
    wanted = [leaves[0], leaves[2], leaves[3]]
    grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    assert called == [1]
    mean = (size + 1) / 2
    x = unwrap_local(leaves[0])
    assert as_dtensor(grads[0]).placements == as_dtensor(leaves[0]).placements
    torch.testing.assert_close(unwrap_local(grads[0]), 3 * mean * x**2)
    assert grads[1] is None or not unwrap_local(grads[1]).any()
    second = torch.autograd.grad(unwrap_sum(grads[0]), leaves[0])[0]
    assert as_dtensor(second).placements == as_dtensor(leaves[0]).placements
    # what every rank differentiates is averaged: here the sum over its own part, a `size`-th of the whole
    torch.testing.assert_close(unwrap_local(second), 6 * mean * x / size)


def unwrap_sum(leaf: Tensor) -> Tensor:
    """The sum of this rank's part of a DTensor, differentiable."""
    return as_dtensor(leaf).to_local().sum()


def test_gather_and_reduce_are_transposes() -> None:
    run(derivatives_on_a_rank, ranks=2)


def pending_on_a_rank() -> None:
    params, places, spot = make_params(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    grads = [torch.ones(SHAPES[name], dtype=torch.float64) for name in spot.bucket.leaves]
    dtypes = [torch.float64] * 4
    kept = ReduceBucket.apply(spot, None, dtypes, grads[0], None, *grads[2:])
    assert kept[0].placements == (Partial(),) and kept[0].shape == (5, 3)
    assert unwrap_local(kept[1]).shape == SHAPES["b"] and not unwrap_local(kept[1]).any(), "a missing gradient is zeros"
    for op, value in (("sum", 2.0), ("mean", 1.0)):
        reduced = ReduceBucket.apply(spot, op, dtypes, *grads)
        assert reduced[0].placements == (Shard(0),) and (unwrap_local(reduced[0]) == value).all()
    half = ReduceBucket.apply(spot, "mean", [torch.float32] * 4, *grads)
    assert half[0].dtype == torch.float32 and unwrap_local(half[0]).dtype == torch.float32
    some = spot.part([True, False, False, True])
    assert some.bucket.leaves == ("a", "d") and spot.part([True] * 4) is spot
    spec = leaf_spec(params.plan, places, "a", torch.bfloat16)
    assert spec.placements == (Shard(0),) and spec.tensor_meta is not None and spec.tensor_meta.dtype == torch.bfloat16
    plain = sf.shard({"s": torch.tensor(1.0)}, params.mesh, sf.Policy())
    assert leaf_spec(plain.plan, places, "s").placements == (Replicate(),)


def test_pending_and_reduced_gradients() -> None:
    run(pending_on_a_rank, ranks=2)


def cast_on_a_rank() -> None:
    _, _, spot = make_params(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), dtype=torch.bfloat16)
    params, _, _ = make_params(spot.grid.mesh)
    with count_collectives() as counts:
        wholes = spot.gather([unwrap_local(leaf) for leaf in params.values()])
    numel = sum(unwrap_local(leaf).numel() for leaf in params.values())
    assert all(whole.dtype == torch.bfloat16 for whole in wholes) and counts.bytes < 4 * (numel + 8), (
        "cast before it is sent"
    )


def test_weights_travel_in_the_compute_dtype() -> None:
    run(cast_on_a_rank, ranks=2)
