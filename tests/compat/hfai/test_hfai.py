"""hfai's class in the three programs of its documentation, and against one process."""

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import zeroed
from torch import Tensor, nn
from torch.distributed.fsdp import LocalOptimStateDictConfig, LocalStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.hfai import BackwardPrefetch, FullyShardedDataParallel
from shardfn.compat.hfai.warp import size_based_auto_wrap_policy
from shardfn.testing import assert_trees_close, count_collectives, run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def _trained(group: int | None = None, *, reshard: bool = True, steps: int = 3) -> tuple[Any, Net]:
    """A model that has trained, and the same in one process; the arguments stand by place."""
    torch.manual_seed(0)
    plain = Net().double()
    policy = partial(size_based_auto_wrap_policy, min_num_params=40)
    last = (BackwardPrefetch.BACKWARD_POST, False, group)
    model = FullyShardedDataParallel(copy.deepcopy(plain), None, policy, reshard, *last)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    for step in range(steps):
        x = torch.randn(dist.get_world_size(), 4, 5, generator=torch.Generator().manual_seed(step)).double()
        for each, own, optimizer in (
            (model, x[dist.get_rank()], optimizers[0]),
            (plain, x.flatten(0, 1), optimizers[1]),
        ):
            optimizer.zero_grad()
            each(own).square().mean().backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
    return model, plain


def _require(model: Any, plain: nn.Module) -> None:
    with model.summon_full_params():
        found = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert_trees_close(found, {name: value.detach() for name, value in plain.named_parameters()}, rtol=0, atol=1e-9)


def _trains(group: int | None, reshard: bool) -> None:
    model, plain = _trained(group, reshard=reshard)
    _require(model, plain)
    meshes = {p.device_mesh.mesh_dim_names for p in model.parameters() if isinstance(p, DTensor)}
    assert meshes == {("replicate", "fsdp") if group == 2 else ("fsdp",)}


@pytest.mark.everyday(3)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("group", [None, 2, 4])
def test_trains_as_one_process(group: int | None, reshard: bool) -> None:
    run(_trains, group, reshard, ranks=4)


def _state_of_rank_0(kind: str) -> None:
    """Every rank loads what rank 0 alone had, or rank 0 alone loads; all hear of it, before anything changes."""
    model, _ = _trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 5).double()).sum().backward()
    optimizer.step()
    state = [optimizer.state_dict()]
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01) if kind == "one" else optimizer
    if kind == "all":
        dist.broadcast_object_list(state, 0)
    if kind == "all" or dist.get_rank() == 0:
        fresh.load_state_dict(state[0])
    model(torch.ones(2, 5).double()).sum().backward()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    own = "is the part of rank 0" if dist.get_rank() else "1 of 2 ranks have loaded the state of another rank"
    with pytest.raises(sf.ShardError, match=own if kind == "all" else "1 of 2 ranks have a state and the others none"):
        fresh.step()
    assert all(torch.equal(p.to_local(), was) for p, was in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["all", "one"])
def test_an_optimizer_state_of_rank_0_alone(kind: str) -> None:
    run(_state_of_rank_0, kind, ranks=2, timeout=30)


def _kept_by_rank_0() -> None:
    """An optimizer whose garbage one rank has not collected yet."""
    model, _ = _trained()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(4, 5).double()).square().mean().backward()
    optimizer.step()
    kept = optimizer if dist.get_rank() == 0 else None
    del optimizer
    gc.collect()
    with model.summon_full_params():
        pass
    assert (kept is None) == (dist.get_rank() != 0)


def test_an_optimizer_that_one_rank_still_has() -> None:
    run(_kept_by_rank_0, ranks=2, timeout=30)


def _groups_made_by_some_ranks() -> None:
    """The caller's own groups: torch would count one more on two of the four ranks, and name the next by that."""
    dist.new_group([0, 1])
    model, plain = _trained(2)
    _require(model, plain)


def test_groups_do_not_depend_on_those_there_are() -> None:
    run(_groups_made_by_some_ranks, ranks=4, timeout=20)


def _saved_whole(folder: Path) -> None:
    """Inside `summon_full_params` one rank alone asks for the state dict."""
    model, plain = _trained()
    with model.summon_full_params():
        if dist.get_rank() == 0:
            with count_collectives() as counted:
                state = model.state_dict()
                assert list(state) == list(model.module.state_dict()) == list(plain.state_dict())
            assert counted.total == 0
            torch.save(state, folder / "model.pt")
    dist.barrier()
    zeroed(model)
    state = torch.load(folder / "model.pt", map_location="cpu")
    with model.summon_full_params():
        with count_collectives() as counted:
            model.load_state_dict(state)
        assert counted.total == 0
    _require(model, plain)
    zeroed(model)
    with model.summon_full_params():
        model.module.load_state_dict(state)
    _require(model, plain)
    other = Net().double()
    other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        model.load_state_dict(state)
    _require(model, plain)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_full_checkpoint(tmp_path: Path, ranks: int) -> None:
    run(_saved_whole, tmp_path, ranks=ranks)


def _saved_in_parts(folder: Path, group: int | None) -> None:
    model, plain = _trained(group)
    rank = dist.get_rank()
    with count_collectives() as counted:
        state = model.state_dict()
    assert counted.total == 0 and not any(isinstance(value, DTensor) for value in state.values())
    torch.save(state, folder / f"model{rank}.pt")
    dist.barrier()
    zeroed(model)
    model.load_state_dict(torch.load(folder / f"model{rank}.pt", map_location="cpu"))
    _require(model, plain)
    wrong = torch.load(folder / "model0.pt", map_location="cpu")
    words = (
        "this is the part of rank 0" if rank % (group or 4) else r"rank \d of .* failed, so no rank goes on: .* this is"
    )
    with pytest.raises(sf.ShardError, match=words):
        model.load_state_dict(wrong)
    _require(model, plain)


@pytest.mark.parametrize("group", [None, 2])
def test_a_checkpoint_of_each_rank(tmp_path: Path, group: int | None) -> None:
    run(_saved_in_parts, tmp_path, group, ranks=4)


def _part_of_others() -> None:
    """Two models, each on its own ranks: the same place in the other one is not this rank's part."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    model = FullyShardedDataParallel(Net(), halves[rank // 2])
    parts: list[Any] = [None] * 4
    dist.all_gather_object(parts, model.state_dict())
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(sf.ShardError, match=f"this is the part of rank {(rank + 2) % 4} of 2, cut in 2, and here is"):
        model.load_state_dict(parts[(rank + 2) % 4])
    assert all(torch.equal(p.to_local(), was) for p, was in zip(model.parameters(), before, strict=True))
    model.load_state_dict(parts[rank])


def test_the_same_part_of_a_model_on_other_ranks() -> None:
    run(_part_of_others, ranks=4)


def _kind_of_state_dict() -> None:
    """Parts, as the class has them, with the configs that go with them: for torch's functions to ask, and to set."""
    model: Any = FullyShardedDataParallel(Net())
    settings = FSDP.get_state_dict_type(model)
    assert settings.state_dict_type == StateDictType.LOCAL_STATE_DICT
    assert type(settings.state_dict_config) is LocalStateDictConfig
    assert type(settings.optim_state_dict_config) is LocalOptimStateDictConfig


def test_the_kind_of_its_state_dict() -> None:
    run(_kind_of_state_dict, ranks=2)


def _alone(folder: Path) -> None:
    model, plain = _trained()
    torch.save(model.state_dict(), folder / "model.pt")
    zeroed(model)
    model.load_state_dict(torch.load(folder / "model.pt"))
    _require(model, plain)


def test_on_one_rank(tmp_path: Path) -> None:
    run(_alone, tmp_path, ranks=1)


def _refused() -> None:
    with pytest.raises(sf.ShardError, match=r"fsdp_group_size=3 must divide the number of ranks, 4, 4 % 3 = 1"):
        FullyShardedDataParallel(Net(), fsdp_group_size=3)
    with pytest.raises(TypeError, match="reshard_after_forward=<BackwardPrefetch"):
        wrong: Any = BackwardPrefetch.BACKWARD_PRE
        FullyShardedDataParallel(Net(), None, None, wrong)
    with pytest.raises(TypeError, match="is no process group"):
        number: Any = 4
        FullyShardedDataParallel(Net(), number)


def test_what_is_refused() -> None:
    run(_refused, ranks=4)
