"""`whole` against torch's `full_tensor` and the tensor that was split."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardfn.core.whole import whole
from shardfn.testing import run

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
