"""What the compatible classes do with whole tensors that are copied into shards."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardfn.compat.common import CopiesIntoShards
from shardfn.testing import on_meshes


@on_meshes({"fsdp": 2})
def test_a_whole_tensor_is_copied_into_a_shard(mesh: DeviceMesh) -> None:
    whole = torch.arange(6.0).view(3, 2)
    shard = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    plain = torch.zeros(3, 2)
    with CopiesIntoShards():
        assert shard.copy_(whole) is shard
        assert plain.copy_(whole) is plain
    assert isinstance(shard, DTensor) and isinstance(plain, Tensor)
    assert shard.full_tensor().equal(whole) and plain.equal(whole)
