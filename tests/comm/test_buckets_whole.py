"""`whole` against torch's `full_tensor` and the tensor that was split."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn.comm.buckets import whole
from shardfn.testing import on_meshes, run

SHAPES = [(0,), (1,), (3,), (5, 3), (4, 4), (1, 7), (2, 0, 3), (17, 2)]


def _of_every_layout(axes: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", axes)
    for shape in SHAPES:
        for dtype in (torch.float32, torch.int64, torch.bool):
            full = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
            options = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for placements in itertools.product(options, repeat=len(axes)):
                split = distribute_tensor(full, mesh, placements)
                found = whole(split)
                assert type(found) is torch.Tensor and torch.equal(found, full), (shape, placements)
                assert found.data_ptr() != split.to_local().data_ptr() or not full.numel()
    ones = torch.ones(3, 2)
    sums = DTensor.from_local(ones, mesh, [Partial()] * len(axes))
    assert torch.equal(whole(sums), ones * dist.get_world_size()) and bool(ones.eq(1).all())


@pytest.mark.parametrize("axes", [(2,), (3,), (2, 2), (1, 2)])
def test_it_is_the_tensor_that_was_split(axes: tuple[int, ...]) -> None:
    run(_of_every_layout, axes, ranks=int(torch.Size(axes).numel()))


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 4.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0)])
@on_meshes({"fsdp": 2})
def test_pending_reductions_are_done_as_they_are_named(mesh: DeviceMesh, reduction: str, expected: float) -> None:
    own = torch.full((2,), 1.0 + 2 * dist.get_rank())
    assert whole(DTensor.from_local(own, mesh, [Partial(reduction)])).tolist() == [expected] * 2


@on_meshes({"fsdp": 3})
def test_a_rank_beside_the_mesh_has_none_of_it(mesh: DeviceMesh) -> None:
    full = torch.arange(3.0)
    found = whole(distribute_tensor(full, DeviceMesh("cpu", [0, 1]), [Shard(0)]))
    assert torch.equal(found, full[: 3 if dist.get_rank() < 2 else 0])


def test_simulated_ranks_put_it_together() -> None:
    full = torch.arange(15.0).view(5, 3)
    with sf.simulate(fsdp=2, tp=2) as mesh:
        found: Any = whole(distribute_tensor(full, mesh, [Shard(0), Shard(1)]))
        assert torch.equal(found.reconcile(), full)
