"""What ranks tell each other before they go on; `shard`'s use of it is in test_sharding.py."""

import pytest
import torch
import torch.distributed as dist
from drawing import assert_all_raise
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardfn as sf
from shardfn.comm.agreement import agree, check_batch, wrong_inputs
from shardfn.layout.mesh import grid_of
from shardfn.testing import count_collectives, run


def seeds_on_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    made = sf.plan({"w": torch.ones(2)}, mesh, sf.Policy())
    torch.manual_seed(10 + dist.get_rank())
    with count_collectives() as counts:
        assert agree(mesh, made) == 10
    assert counts.total == counts.all_gather == 1
    part = DeviceMesh("cpu", [1, 2], mesh_dim_names=("fsdp",))
    if dist.get_rank() in (1, 2):
        assert agree(part, made) == 11, "the first rank of the mesh"
    else:
        with pytest.raises(sf.ShardError, match="is not part of the mesh"):
            agree(part, made)


def test_ranks_take_the_seed_of_the_first() -> None:
    run(seeds_on_a_rank)


def disagree_on_a_part() -> None:
    part = DeviceMesh("cpu", [1, 2], mesh_dim_names=("fsdp",))
    made = sf.plan({"w": torch.ones(2)}, part, sf.Policy())
    if dist.get_rank() in (1, 2):
        with pytest.raises(sf.ShardError, match=r"rank 1 has rank=1; rank 2 has rank=2"):
            agree(part, made, [f"rank={dist.get_rank()}"])
        with pytest.raises(
            sf.ShardError, match=r"rank 2 of \[2\] failed, so no rank goes on: ShardError: plan$|^plan$"
        ):
            agree(part, made if dist.get_rank() == 1 else sf.ShardError("plan"))


def test_a_mesh_of_some_ranks_agrees_too() -> None:
    run(disagree_on_a_part)


# Batches


def compare_batches(what: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    places = grid_of(mesh, ("tp", "fsdp"))
    batch = {"x": torch.arange(4) + rank // 2, "n": 3}
    if what == "differs" and rank == 3:
        batch["x"] = batch["x"] + 1
    elif what == "shape" and rank == 3:
        batch["x"] = batch["x"].view(2, 2)
    problem = "apply: mine" if what == "problem" and rank == 3 else None
    check_batch(places, ("tp",), batch, problem)


def test_batches_along_compute_axes_must_be_equal() -> None:
    run(compare_batches, "equal")
    why = r"the inputs differ between ranks along 'tp'.*sf.data.rank\(mesh\)"
    said = assert_all_raise(
        compare_batches,
        [
            (("differs",), sf.ShardError, why),
            (("shape",), sf.ShardError, why),
            (("problem",), sf.ShardError, "apply: mine|apply: 1 other ranks cannot use their inputs"),
        ],
    )
    assert [messages[2] == "apply: mine" for messages in said] == [False, False, False, True]


def two_compute_axes(odd: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    check_batch(grid_of(mesh, ("cp", "tp")), ("cp", "tp"), torch.tensor(float(dist.get_rank() == odd)), None)


def test_batches_along_two_compute_axes() -> None:
    run(two_compute_axes, 9)
    assert_all_raise(
        two_compute_axes, [((odd,), sf.ShardError, "the inputs differ between ranks along") for odd in range(4)]
    )


def test_inputs_on_the_wrong_device() -> None:
    cpu = torch.device("cpu")
    assert wrong_inputs(({"x": torch.ones(2)}, 3), cpu) is None
    why = wrong_inputs(({"x": torch.ones(2, device="meta")}, 3), cpu)
    assert why is not None and "['x'] is on 'meta', the parameters are on 'cpu'; move it with .to('cpu')" in why


def changed_on_one_rank() -> None:
    """A rank whose model was changed, to what computes the same, asks the others nothing."""
    mesh = sf.make_mesh("cpu", tp=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    params = sf.shard(model, mesh, sf.Policy(rules={"0.weight": "f@tp c", "0.bias": "f@tp", "2.weight": "c f@tp"}))
    x = torch.ones(2, 4)
    calls = [sf.apply(model, params, x) for _ in range(3)]
    if dist.get_rank() == 0:
        model[1].forward = torch.relu
    with count_collectives() as counts:
        assert torch.equal(sf.apply(model, params, x), calls[0])
    assert counts.as_dict() == {"all_reduce": 1}


def test_a_model_that_is_changed_on_one_rank() -> None:
    run(changed_on_one_rank, ranks=2, timeout=30)
