"""Trees saved to directories, and loaded on other meshes; what does not fit, and what a save that died leaves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import decoder, policy
from ranks import folder
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn._torch import unwrap_locals
from shardfn.checkpoint.directories import from_state_dict, to_state_dict
from shardfn.comm.buckets import whole
from shardfn.comm.flat_memory import merged
from shardfn.testing import on_meshes, run, run_raises


class Odd(nn.Module):
    """A fused weight, one that is padded, one name for two parameters, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.uneven = nn.Linear(6, 5, bias=False)
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.uneven.weight
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.scale * (gate * up).sum(-1) + self.tied(self.uneven(x) @ self.uneven.weight).sum(-1)


RULES = sf.Policy(
    rules={"up.weight": "(g: ff@tp + u: ff@tp) c@fsdp", "up.bias": "(g: ff@tp + u: ff@tp)"}, pad={"ff": 4}
)


def _odd(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Odd().double()


def _state(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A tree, and the state of an optimizer that has made one step."""
    model = _odd(seed)
    params = sf.shard(model, mesh, RULES)
    optimizer = sf.optim.adamw(0.1)
    x = torch.arange(24.0, dtype=torch.float64).view(4, 6) / 10
    grads = sf.grad(lambda p: sf.apply(model, p, x).square().mean())(params)
    params, state = optimizer.step(params, grads, optimizer.init(params))
    return model, {"params": params, "optimizer": state, "step": 3, "rate": 0.5, "plain": torch.arange(3)}


def _whole(tree: dict[str, Any]) -> dict[str, Tensor]:
    adam = tree["optimizer"]
    parts = {"params": tree["params"], "mu": adam.mu, "nu": adam.nu}
    return {f"{key}.{name}": x for key, part in parts.items() for name, x in sf.gather(part).items()}


def _save_odd(path: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    _, tree = _state(sf.make_mesh("cpu", **sizes), 0)
    sf.checkpoint.save(path, tree)
    return _whole(tree)


def _load_odd(path: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    _, like = _state(sf.make_mesh("cpu", **sizes), 1)
    like |= {"step": 0, "rate": 0.0, "plain": torch.zeros(3, dtype=torch.int64)}
    before = _whole(like)
    tree = sf.checkpoint.load(path, like)
    assert (tree["step"], tree["rate"], tree["plain"].tolist()) == (3, 0.5, [0, 1, 2])
    assert isinstance(tree["step"], int) and int(tree["optimizer"][0]) == 1
    assert tree["params"].plan == like["params"].plan
    assert all(x.equal(before[name]) for name, x in _whole(like).items()), "load changed what it was like"
    return _whole(tree)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("fsdp", "tp"), [(4, 1), (1, 4), (3, 1), (1, 1)])
def test_a_tree_goes_to_another_mesh(tmp_path: Path, fsdp: int, tp: int) -> None:
    path = str(tmp_path / "step-1")
    saved = run(_save_odd, path, {"fsdp": 2, "tp": 2}, ranks=4)[0]
    loaded = run(_load_odd, path, {"fsdp": fsdp, "tp": tp}, ranks=fsdp * tp)[0]
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert value.equal(loaded[name]), name


@on_meshes({"fsdp": 2, "tp": 2})
def test_loaded_shards_lie_as_those_they_are_like(mesh: DeviceMesh) -> None:
    """Side by side, so that the next gather and the next update take them in one piece."""
    params = sf.shard(decoder(), mesh, policy())
    pieces = len(merged([unwrap_locals([*params.values()])])[0])
    with folder() as at:
        path = sf.checkpoint.save(at / "step-1", {"params": params})
        loaded = sf.checkpoint.load(path, {"params": params})["params"]
    assert len(merged([unwrap_locals([*loaded.values()])])[0]) == pieces < len(params)
    assert all(leaf.to_local().equal(params[name].to_local()) for name, leaf in loaded.items())


@on_meshes({"fsdp": 2})
def test_gradients_that_are_not_reduced_are_no_checkpoint(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 2)
    loss = sf.grad(lambda p: sf.apply(model, p, torch.ones(3, 4)).sum(), reduce=None)
    pending = loss(sf.shard(model, mesh, sf.Policy()))
    with folder() as at, pytest.raises(sf.ShardError, match=r"is a sum that is still pending.* sf\.reduce_grads"):
        sf.checkpoint.save(at / "step-1", {"grads": pending, "g": pending["weight"]})


def _one(seed: int = 0, size: int = 2) -> sf.Params:
    torch.manual_seed(seed)
    return sf.shard(nn.Linear(4, size), sf.make_mesh("cpu", fsdp=1), sf.Policy())


def _bias(path: Path) -> Tensor:
    return sf.gather(sf.checkpoint.load(path, _one(9)))["bias"]


def test_what_a_dead_save_left_is_not_in_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".writing-step-1"
    left.mkdir()
    (left / "__9_9.distcp").write_text("half of a file")
    sf.checkpoint.save(tmp_path / "step-1", _one())
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert not (tmp_path / "step-1" / "__9_9.distcp").exists()


def test_a_checkpoint_of_that_name_stays_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _one(1), _one(2)
    path = sf.checkpoint.save(tmp_path / "a" / "step-1", first, notes={"loss": 3.5})
    with monkeypatch.context() as patch:
        patch.setattr(state_dict_saver, "save", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sf.checkpoint.save(path, second)
    assert _bias(path).equal(sf.gather(first)["bias"]) and sf.checkpoint.notes(path) == {"loss": 3.5}
    sf.checkpoint.save(path, second)
    assert _bias(path).equal(sf.gather(second)["bias"]) and sf.checkpoint.notes(path) == {}
    assert [other.name for other in path.parent.iterdir()] == ["step-1"]


def test_latest_takes_the_newest_whole_one(tmp_path: Path) -> None:
    assert sf.checkpoint.latest(tmp_path) is None
    for name in ("step-00000002", "step-00000010", "step-x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / "step-00000011").mkdir()
    found = sf.checkpoint.latest(tmp_path)
    assert found is not None and found.name == "step-00000010"


def test_what_does_not_fit_is_named_before_anything_is_read(tmp_path: Path) -> None:
    path = sf.checkpoint.save(tmp_path / "step-1", {"params": _one(), "more": 1})
    with pytest.raises(
        sf.ShardError, match=r"2 problems\n1. 'params.weight' is \(2, 4\) torch.float32, wanted \(3, 4\)"
    ):
        sf.checkpoint.load(path, {"params": _one(size=3)})
    with pytest.raises(sf.ShardError, match="fit: 'other' is not in it"):
        sf.checkpoint.load(path, {"params": _one(), "other": 1})
    with pytest.raises(sf.ShardError, match="'more' is in it and was not asked for"):
        sf.checkpoint.load(path, {"params": _one()}, whole=["params", "more"])
    with pytest.raises(sf.ShardError, match=r"'more' is \(\) torch.int64, wanted \(\) torch.float64"):
        sf.checkpoint.load(path, {"more": 1.0})
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        sf.checkpoint.load(tmp_path, {"params": _one()})
    with pytest.raises(TypeError, match=r"'name' is a str; .* tensors and numbers"):
        sf.checkpoint.save(tmp_path / "step-2", {"params": _one(), "name": "mine"})
    assert [other.name for other in tmp_path.iterdir()] == ["step-1"]
    assert sf.checkpoint.load(path, {"params": _one()})["params"].keys() == _one().keys()


def _some_ranks(path: str, what: str) -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    params = sf.shard(nn.Linear(4, 2), mesh, sf.Policy())
    if what == "another path":
        sf.checkpoint.save(f"{path}/{dist.get_rank()}", params)
    elif what == "nothing there":
        sf.checkpoint.load(path if dist.get_rank() else f"{path}/none", params)
    else:
        half = dist.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("fsdp",))
        sf.checkpoint.save(f"{path}/b", params, mesh=half)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("another path", "rank 0 has .* and rank 1 .*give all ranks one directory"),
        ("nothing there", "rank 0 has 'None' and rank 1"),
        ("half", "the mesh has 1 of 2 ranks; all ranks must save and load together"),
    ],
)
def test_ranks_that_do_not_agree(tmp_path: Path, what: str, match: str) -> None:
    sf.checkpoint.save(tmp_path / "a", {"params": _one()})
    run_raises(sf.ShardError, _some_ranks, str(tmp_path / "a"), what, match=match, ranks=2)


def _names(tree: Any) -> Sequence[str]:
    return sorted(tree)


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_state_dict_has_the_models_names_and_shapes(mesh: DeviceMesh) -> None:
    model = _odd(0)
    params = sf.shard(model, mesh, RULES)
    state = to_state_dict(params)
    theirs = model.state_dict(keep_vars=False)
    assert _names(state) == _names(theirs)
    for name, value in theirs.items():
        assert tuple(state[name].shape) == tuple(value.shape), name
    for form in (state, {name: whole(x) if isinstance(x, DTensor) else x for name, x in state.items()}):
        again = sf.gather(from_state_dict(params, form))
        assert all(x.equal(again[name]) for name, x in sf.gather(params).items())
    some = from_state_dict(params, {"up.bias": state["up.bias"]})
    assert all(name.startswith("up.bias") for name in some) and some
