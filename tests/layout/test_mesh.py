"""Meshes: sizes that are inferred, names and roles of axes, the storage order, and how a size is cut into parts."""

import contextlib
import copy
import io
import os
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from drawing import PROPERTY, untyped
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardfn as sf
from shardfn.layout.mesh import axes_of, chunk, grid_of, nested_chunk, roles
from shardfn.layout.policy import BATCH_AXES
from shardfn.testing import run


def _printed_at_the_end(text: str, wrapped: bool = False) -> str:
    """What the hook of a rank prints; `wrapped`: somebody else has put one around it, and there was another mesh."""
    sf.make_mesh("cpu", fsdp=2)
    hook = sys.excepthook
    if wrapped:
        sys.excepthook = lambda *error: hook(*error)
        sf.make_mesh("cpu", fsdp=2)
        assert sys.excepthook is not hook
    error = sf.ShardError(text.format(dist.get_rank()))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        sys.excepthook(sf.ShardError, error, None)
    sys.excepthook = hook
    return printed.getvalue()


def test_an_error_of_all_ranks_is_printed_in_whole_by_one() -> None:
    name = "shardfn.notation.errors.ShardError: "
    same = run(_printed_at_the_end, "shard: 2 problems\n1. one\n2. another", ranks=2)
    rank = next(rank for rank, text in enumerate(same) if name not in text)
    assert same[rank] == f"[rank{rank}]: the same ShardError, shard: 2 problems\n"
    assert f"{name}shard: 2 problems\n" in same[1 - rank] and "2. another" in same[1 - rank]
    wrapped = run(_printed_at_the_end, "shard: around", True, ranks=2)
    assert sorted("the same ShardError" in text for text in wrapped) == [False, True], "one has it in whole"
    different = run(_printed_at_the_end, "of rank {}", ranks=2)
    assert [text.partition(": ")[2].strip() for text in different] == [f"{name}of rank {rank}" for rank in range(2)]


# MeshSpec and roles


def test_a_mesh_spec_is_a_value() -> None:
    spec = sf.MeshSpec(fsdp=512, tp=8)
    assert spec.size == 4096 and repr(spec) == "MeshSpec(fsdp=512, tp=8)" and axes_of(spec) == {"fsdp": 512, "tp": 8}
    assert (
        spec == sf.MeshSpec(fsdp=512, tp=8)
        and hash(spec) == hash(copy.copy(spec))
        and pickle.loads(pickle.dumps(spec)) == spec
    )
    assert spec != sf.MeshSpec(tp=8, fsdp=512), "the order counts"
    with pytest.raises(ValueError, match=r"MeshSpec\(tp=0\): an axis has at least one rank"):
        sf.MeshSpec(tp=0)
    with pytest.raises(TypeError, match=r"MeshSpec\(tp=2.0\): an axis size is a whole number"):
        sf.MeshSpec(tp=untyped(2.0))
    with pytest.raises(TypeError, match=r"MeshSpec\(tp=True\)"):
        sf.MeshSpec(tp=True)
    with pytest.raises(TypeError, match=r"MeshSpec: name at least one axis"):
        sf.MeshSpec()


def test_roles_of_axes() -> None:
    assert roles(["replicate", "shard"], BATCH_AXES).shardable == ("shard",), "names of torch's own examples"
    assert roles(["batch", "model"], BATCH_AXES).data == ("batch",), "a name of JAX's examples"
    role = roles(["pp", "dp_replicate", "fsdp", "x_replicate", "tp"], BATCH_AXES)
    assert role.data == ("dp_replicate", "fsdp", "x_replicate") and role.compute == ("pp", "tp")
    assert role.shardable == ("fsdp",), "weights never shard over *_replicate"
    assert role.storage == ("pp", "tp", "dp_replicate", "fsdp", "x_replicate")
    assert roles(["rows", "fsdp"], ["ro*"]).data == ("rows",), "only what Policy.batch names"


# make_mesh


def make_meshes_on_a_rank() -> None:
    mesh = sf.make_mesh("cpu", fsdp=-1, tp=2)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and mesh.mesh_dim_names == ("fsdp", "tp"), "tp on neighbouring ranks"
    assert sf.make_mesh("cpu", tp=4).mesh.tolist() == [0, 1, 2, 3]
    for axes, match in (
        (
            {"fsdp": 4, "tp": 2},
            r"make_mesh\(fsdp=4, tp=2\): 4 x 2 = 8, but there are 4 ranks \(WORLD_SIZE\). Start 8 ranks \(set nproc",
        ),
        ({"fsdp": 1, "tp": 2}, r"1 x 2 = 2, but there are 4 ranks .*write -1 for one axis"),
        ({"fsdp": -1, "tp": 3}, r"make_mesh\(fsdp=-1, tp=3\): 4 % 3 = 1, but there are 4 ranks"),
        ({"fsdp": -1, "tp": -1}, r"at most one may be -1"),
        ({"fsdp": 0, "tp": -1}, r"sizes are at least 1"),
    ):
        with pytest.raises(sf.ShardError, match=match):
            sf.make_mesh("cpu", **axes)


def test_make_mesh() -> None:
    run(make_meshes_on_a_rank)


def start_alone() -> None:
    dist.destroy_process_group()
    os.environ.pop("RANK", None)
    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(sf.ShardError, match=r"1 x 1 = 1, but there are 2 ranks"):
        sf.make_mesh("cpu", fsdp=1, tp=1)
    assert not dist.is_initialized(), "nothing is started before the sizes are right"
    del os.environ["WORLD_SIZE"]
    mesh = sf.make_mesh("cpu", fsdp=-1, tp=1)
    assert axes_of(mesh) == {"fsdp": 1, "tp": 1} and dist.get_backend() == "gloo"


def test_without_a_launcher_the_world_is_one_rank() -> None:
    run(start_alone, ranks=1)


def test_what_is_no_mesh() -> None:
    with pytest.raises(TypeError, match="expected a DeviceMesh or a MeshSpec, got tuple"):
        axes_of(untyped((2, 2)))


# Grid


def grids_on_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    places = grid_of(mesh, ("tp", "fsdp"))
    rank = dist.get_rank()
    assert places.coords == {"fsdp": rank // 2, "tp": rank % 2} and places.sizes == {"fsdp": 2, "tp": 2}
    assert places.storage.mesh_dim_names == ("tp", "fsdp") and places.storage.mesh.tolist() == [[0, 2], [1, 3]]
    assert places.storage.get_group("tp") is mesh.get_group("tp") is places.groups["tp"], "no communicator is added"
    assert places.ranks == (0, 1, 2, 3) and places.device == torch.device("cpu")
    assert grid_of(mesh, ("tp", "fsdp")) is places, "made once"
    assert grid_of(mesh, ("fsdp", "tp")).storage is mesh, "already in storage order"
    twin = copy.deepcopy(mesh)
    assert grid_of(twin, ("tp", "fsdp")) is not places and twin == mesh
    part = DeviceMesh("cpu", [0, 2], mesh_dim_names=("tp",))
    if rank in (0, 2):
        assert grid_of(part, ("tp",)).coords == {"tp": int(rank == 2)}
    else:
        with pytest.raises(sf.ShardError, match=rf"rank {rank} is not part of the mesh \(tp=2\) over ranks \[0, 2\]"):
            grid_of(part, ("tp",))
    mixed = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("fsdp", "tp"))
    with pytest.raises(sf.ShardError, match=r"descending order along 'fsdp': \[\[3, 0\], \[1, 2\]\]; torch orders"):
        grid_of(mixed, ("tp", "fsdp"))


def test_storage_meshes() -> None:
    run(grids_on_a_rank)


# Cutting a size


@PROPERTY
@given(st.integers(0, 20), st.lists(st.integers(1, 5), max_size=3))
def test_parts_are_those_of_torch_chunk(size: int, splits: list[int]) -> None:
    parts = [(torch.arange(size), [])]
    for ways in splits:
        cut = []
        for whole, path in parts:
            step = -(-len(whole) // ways)
            cut += [(whole[step * i : step * (i + 1)], [*path, (ways, i)]) for i in range(ways)]
        parts = cut
    for part, path in parts:
        start, length = nested_chunk(size, path)
        assert length == len(part) and (not length or part.tolist() == list(range(start, start + length)))
    assert sum(len(part) for part, _ in parts) == size


def test_chunks_of_a_short_dim() -> None:
    assert [chunk(3, 2, i) for i in range(2)] == [(0, 2), (2, 1)]
    assert [chunk(2, 4, i) for i in range(4)] == [(0, 1), (1, 1), (2, 0), (2, 0)]
    assert [chunk(0, 2, i) for i in range(2)] == [(0, 0), (0, 0)]
