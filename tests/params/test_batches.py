"""Which part of a batch a rank gets, on meshes and in one process."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import shardfn as sf
from shardfn.params import batches
from shardfn.testing import count_collectives, on_meshes, run


@on_meshes(
    {"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}, {"replicate": 2, "fsdp": 2}, {"tp": 2, "dp": 2}
)
def test_tp_neighbours_load_the_same_samples(mesh: DeviceMesh) -> None:
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names or ()}
    ways = math.prod(size for axis, size in sizes.items() if axis != "tp")
    batch = {"x": torch.arange(24).view(12, 2), "y": [torch.arange(12), "text", 3, None], "empty": torch.zeros(0, 2)}
    with count_collectives() as counts:
        index, count = batches.rank(mesh)
        mine = batches.local_batch(batch, mesh)
    assert counts.total == 0 and count == ways
    expected = 0  # counted along the data axes, outermost first
    for axis, size in sizes.items():
        if axis != "tp":
            expected = expected * size + mesh.get_local_rank(axis)
    assert index == expected
    per = 12 // ways
    assert torch.equal(mine["x"], batch["x"][per * index : per * (index + 1)])
    assert torch.equal(mine["y"][0], torch.arange(12)[per * index : per * (index + 1)])
    assert mine["y"][1:] == ["text", 3, None] and mine["empty"].shape == (0, 2)
    assert mine["x"].untyped_storage().data_ptr() == batch["x"].untyped_storage().data_ptr(), "a view, not a copy"


def ranks_of_any_mesh() -> tuple[tuple[int, int], ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    both = sf.Policy(batch=["rows", "columns"])
    return batches.rank(mesh), batches.rank(mesh, sf.Policy(batch=["col*"])), batches.rank(mesh, both)


def test_the_policy_says_which_axes_split_the_batch() -> None:
    for rank, (default, columns, both) in enumerate(run(ranks_of_any_mesh, ranks=4)):
        assert default == (0, 1)
        assert columns == (rank % 2, 2)
        assert both == (rank, 4)


@on_meshes({"fsdp": 4})
def test_batches_that_cannot_be_split(mesh: DeviceMesh) -> None:
    with pytest.raises(sf.ShardError, match="local_batch: 2 problems") as error:
        batches.local_batch({"x": torch.zeros(10, 3), "y": torch.zeros(4), "z": [torch.zeros(())]}, mesh)
    assert "1. batch['x'] has shape (10, 3); dim 0 is split over 4 data ranks, 10 % 4 = 2. Use 8 or 12" in str(
        error.value
    )
    assert "2. batch['z'][0] has no dims" in str(error.value)
    with pytest.raises(sf.ShardError, match=r"3 % 4 = 3\. Use 4 or"):
        batches.local_batch(torch.zeros(3), mesh)
    part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
    if part.get_coordinate() is None:
        with pytest.raises(sf.ShardError, match="is not part of the mesh"):
            batches.rank(part)
    else:
        assert batches.rank(part) == (dist.get_rank(), 2)


def one_rank() -> None:
    loose: Any = batches
    mesh = sf.make_mesh("cpu", fsdp=1)
    for wrong in (np.zeros(4), sf.shard({"x": torch.zeros(4)}, mesh, sf.Policy())["x"]):
        with pytest.raises(TypeError, match=r"batch\[0\] is a \w+; expected plain tensors"):
            batches.local_batch([wrong], mesh)
    with pytest.raises(TypeError, match="expected a DeviceMesh, got MeshSpec"):
        loose.rank(sf.MeshSpec(fsdp=1))
    with pytest.raises(TypeError, match="expected a Policy, got str"):
        loose.rank(mesh, "fsdp")
    with pytest.raises(ValueError, match="mesh_dim_names"):
        batches.rank(init_device_mesh("cpu", (1,)))
    with sf.simulate(fsdp=2) as simulated:
        for uses in (batches.rank, lambda m: sf.shard({"x": torch.zeros(4)}, m, sf.Policy())):
            with pytest.raises(sf.ShardError, match=r"take that, such as params\.mesh"):
                uses(mesh)
        with pytest.raises(sf.ShardError, match="rule 'y' matches no parameter"):
            sf.shard({"x": torch.zeros(4)}, mesh, sf.Policy(rules={"y": "a"}))
        assert batches.rank(simulated)[1] == 2


def test_bad_arguments() -> None:
    run(one_rank, ranks=1)


def test_mean_is_a_pytree() -> None:
    mean = batches.Mean(torch.tensor(6.0, requires_grad=True), 3)
    assert (mean.total / mean.count).item() == 2.0
    doubled = pytree.tree_map(lambda leaf: leaf * 2, mean)
    assert isinstance(doubled, batches.Mean) and doubled.count == 6 and doubled.total.requires_grad


def test_what_is_not_of_samples_is_no_batch() -> None:
    mesh = sf.make_mesh("cpu", fsdp=1)
    with pytest.raises(sf.ShardError, match=r"other lengths \(batch\['x'\]: 8, batch\['w'\]: 2\); pass what is not"):
        batches.local_batch({"x": torch.zeros(8, 3), "w": torch.ones(2)}, mesh)
