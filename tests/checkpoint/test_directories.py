"""Trees saved to directories, and loaded on other meshes; what does not fit, and what a save that died leaves."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import untyped
from models import decoder, policy
from ranks import folder, quiet
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardfn as sf
from shardfn._torch import pytree, unwrap_locals
from shardfn.checkpoint import directories, storages
from shardfn.checkpoint.__main__ import main
from shardfn.checkpoint.block_writer import BLOCK
from shardfn.checkpoint.hashed_files import HashingSink, hash_of
from shardfn.comm.buckets import whole
from shardfn.comm.flat_memory import merged
from shardfn.params.state_dicts import from_state_dict, to_state_dict
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


def _small(path: str, saves: bool) -> None:
    mesh = sf.make_mesh("cpu", fsdp=dist.get_world_size())
    tensors = {"three": torch.arange(3.0), "uneven": torch.arange(130.0).view(65, 2), "none": torch.empty(0, 3)}
    params = sf.shard(tensors | {"scalar": torch.tensor(4.0)}, mesh, sf.Policy(min_size=0))
    if saves:
        sf.checkpoint.save(path, params)
    read = sf.gather(sf.checkpoint.load(path, sf.tree.map(torch.zeros_like, params)))
    assert all(read[name].equal(x) for name, x in tensors.items()) and read["scalar"] == 4


@pytest.mark.slow
def test_most_ranks_have_nothing_of_a_leaf(tmp_path: Path) -> None:
    run(_small, str(tmp_path / "step-1"), True, ranks=64)
    run(_small, str(tmp_path / "step-1"), False, ranks=3)


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


@on_meshes({"fsdp": 2, "tp": 2})
def test_padding_is_zero_as_it_was(mesh: DeviceMesh) -> None:
    params = sf.shard(_odd(0), mesh, RULES)
    with folder() as at:
        path = sf.checkpoint.save(at / "step-1", {"params": params})
        for _ in range(3):
            torch.full((4096,), float("nan"))  # what new memory may have held before
            loaded = sf.checkpoint.load(path, {"params": params})["params"]
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


@pytest.mark.parametrize("replaces", [False, True])
def test_what_a_dead_save_left_goes_with_the_next_one(tmp_path: Path, replaces: bool) -> None:
    """Unless its process lives, or is on another host."""
    if replaces:
        sf.checkpoint.save(tmp_path / "step-1", _one())
    host, _, _ = storages.owner().split(".")
    other = storages.started(os.getppid())
    owners = [
        f"{host}.{2**22 + 1}.1",
        f"{host}.{os.getppid()}.17",
        f"{host}.{os.getppid()}.{other}",
        f"00000000.{2**22 + 1}.1",
    ]
    for owner in owners:
        (tmp_path / f".writing-step-1-0-{owner}").mkdir()
    sf.checkpoint.save(tmp_path / "step-1", _one(), overwrite=replaces)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", *(f".writing-step-1-0-{x}" for x in owners[2:])}


def test_a_checkpoint_of_that_name_stays_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _one(1), _one(2)
    path = sf.checkpoint.save(tmp_path / "a" / "step-1", first, notes={"loss": 3.5})
    with pytest.raises(sf.ShardError, match=r"step-1' is there already; .* write overwrite=True"):
        sf.checkpoint.save(path, second)
    before = sorted(path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(HashingSink, "hashed", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sf.checkpoint.save(path, second, overwrite=True)
    assert sorted(path.iterdir()) == before
    assert _bias(path).equal(sf.gather(first)["bias"]) and sf.checkpoint.notes(path) == {"loss": 3.5}
    sf.checkpoint.save(path, second, overwrite=True)
    assert _bias(path).equal(sf.gather(second)["bias"]) and sf.checkpoint.notes(path) == {}
    assert len(sorted(path.iterdir())) == len(before) and not {x for x in before if x.suffix == ".distcp"} & {
        *path.iterdir()
    }
    assert [other.name for other in path.parent.iterdir()] == ["step-1"]
    sf.checkpoint.verify(path)


def test_latest_takes_the_newest_whole_one(tmp_path: Path) -> None:
    assert sf.checkpoint.latest(tmp_path) is None
    for name in ("step-00000002", "step-00000010", "step-x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
        when = 10**9 - (int(name[5:]) if name[5:].isdecimal() else 0)  # the clock went back between them
        os.utime(tmp_path / name, (when, when))
    (tmp_path / "step-00000011").mkdir()
    found = sf.checkpoint.latest(tmp_path)
    assert found is not None and found.name == "step-00000010"


def test_what_does_not_fit_is_named_before_anything_is_read(tmp_path: Path) -> None:
    path = sf.checkpoint.save(tmp_path / "step-1", {"params": _one(), "more": 1})
    with pytest.raises(
        sf.ShardError, match=r"3 problems\n1. 'params.weight' is \(2, 4\) torch.float32, wanted \(3, 4\)"
    ):
        sf.checkpoint.load(path, {"params": _one(size=3)})
    with pytest.raises(sf.ShardError, match=r"fit: 'other' is not in it"):
        sf.checkpoint.load(path, {"params": _one(), "other": 1}, unexpected="ignore")
    with pytest.raises(sf.ShardError, match="'more' is in it and was not asked for"):
        sf.checkpoint.load(path, {"params": _one()}, whole=["params", "more"], unexpected="ignore")
    with pytest.raises(sf.ShardError, match=r"'more' is \(\) torch.int64, wanted \(\) torch.float64"):
        sf.checkpoint.load(path, {"more": 1.0, "params": ...})
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        sf.checkpoint.load(tmp_path, {"params": _one()})
    with pytest.raises(TypeError, match=r"'name' is a str; .* tensors and numbers"):
        sf.checkpoint.save(tmp_path / "step-2", {"params": _one(), "name": "mine"})
    assert [other.name for other in tmp_path.iterdir()] == ["step-1"]
    for read in (
        sf.checkpoint.load(path, {"params": _one(), "more": ...}),
        sf.checkpoint.load(path, {"params": _one()}, unexpected="ignore"),
    ):
        assert read["params"].keys() == _one().keys() and read.get("more", ...) is ...


def test_what_is_missing_or_of_another_dtype_when_that_is_asked_for(tmp_path: Path) -> None:
    whole = torch.arange(6, dtype=torch.float64).view(2, 3) + 2**-30
    path = sf.checkpoint.save(tmp_path / "step-1", {"a": whole, "n": torch.tensor([1, 2])})
    like = {"a": torch.zeros(2, 3), "n": torch.zeros(2, dtype=torch.int64), "b": torch.full((2,), 7.0), "c": 5}
    with pytest.raises(sf.ShardError, match="3 problems"):
        sf.checkpoint.load(path, like)
    for other in ({"z": torch.zeros(2)}, {"z": torch.zeros(2), "a1": ...}):
        with pytest.raises(sf.ShardError, match="nothing that was asked for is in it"):
            sf.checkpoint.load(path, other, missing="ignore", unexpected="ignore")
    params = _one(5)
    report = (
        r"ignored, of '.*step-1': 'b' is not in it; 'c' is not in it; 'p.weight' is not in it \(and 1 more of 'p'\)$"
    )
    with pytest.warns(UserWarning, match=report):
        read = sf.checkpoint.load(path, like | {"p": params}, missing="ignore", cast=True)
    assert sf.gather(read["p"])["bias"].equal(sf.gather(params)["bias"])
    assert read["a"].equal(whole.float()) and read["b"].equal(like["b"]) and read["c"] == 5
    with pytest.raises(sf.ShardError, match=r"'n' is .* torch.int64, wanted .* torch.int32"):
        sf.checkpoint.load(path, like | {"n": torch.zeros(2, dtype=torch.int32)}, missing="ignore", cast=True)


def test_what_is_ignored_is_told_and_what_is_ignored_for_no_reason_is_an_error(tmp_path: Path) -> None:
    tree = {
        "a": {"x": torch.ones(2), "y": torch.ones(2)},
        "b": torch.ones(2),
        "each": sf.checkpoint.PerRank(torch.ones(2)),
    }
    path = sf.checkpoint.save(tmp_path / "step-1", tree)
    for other in ({"a": ..., "b": torch.zeros(2), "each": ...}, {"b": torch.zeros(2)}):  # nothing to tell
        assert sf.checkpoint.load(path, other, unexpected="error" if "a" in other else "ignore")["b"].equal(
            torch.ones(2)
        )
    with pytest.warns(UserWarning, match=r"ignored, of '.*': 'a.y' is in it and was not asked for$"):
        sf.checkpoint.load(path, {"a": {"x": torch.zeros(2)}}, unexpected="ignore")
    for wrong in ({"missing": "raise"}, {"unexpected": True}):
        with pytest.raises(ValueError, match="missing= and unexpected= are 'error' or 'ignore', not"):
            sf.checkpoint.load(path, tree, **untyped(wrong))
    with pytest.raises(sf.ShardError, match="whole= has 'aa', which is no top of it"):
        sf.checkpoint.load(path, tree, whole=("a", "aa"))
    with pytest.raises(sf.ShardError, match=r"'a~1x' is not in it.* \(~1 is a dot in a key: nest dicts instead\)"):
        sf.checkpoint.load(path, {"a.x": torch.zeros(2)}, missing="error", unexpected="ignore")
    one = sf.checkpoint.save(tmp_path / "step-2", torch.ones(2))
    with pytest.raises(sf.ShardError, match="'' is not in it"):
        sf.checkpoint.load(one, sf.checkpoint.PerRank(torch.zeros(2)), unexpected="ignore")


@on_meshes({"fsdp": 2})
def test_what_was_not_tied_is_tied_only_if_it_is_the_same(mesh: DeviceMesh) -> None:
    def model(tied: bool, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        both = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        both[1].weight = both[0].weight if tied else both[1].weight
        return both

    with folder() as at:
        apart, same = model(False, 0), model(False, 1)
        untyped(same)[1].load_state_dict(untyped(same)[0].state_dict())
        for number, other in enumerate((apart, same)):
            sf.checkpoint.save(at / f"step-{number}", {"p": sf.shard(other, mesh, sf.Policy())})
        like = {"p": sf.shard(model(True, 2), mesh, sf.Policy())}
        with pytest.raises(
            sf.ShardError, match=r"'p.0.weight', 'p.1.weight'\] are tied here, and there they have different"
        ):
            sf.checkpoint.load(at / "step-0", like)
        read = sf.gather(sf.checkpoint.load(at / "step-1", like)["p"])
        assert read["0.weight"].equal(untyped(same)[0].weight)
        part = sf.checkpoint.save(at / "step-2", {"p": {"1": {"weight": torch.full((3, 3), 7.0)}}}, mesh)
        with warnings.catch_warnings(action="ignore"):
            read = sf.gather(sf.checkpoint.load(part, like, missing="ignore")["p"])
        assert read["0.weight"].eq(7).all() and read["0.bias"].equal(sf.gather(like["p"])["0.bias"])


def test_of_one_step_the_name_that_a_trainer_gives_comes_first(tmp_path: Path) -> None:
    names = [f"step-{3:0{n}d}" for n in (1, 8, 3, 12)]
    for name in names:
        sf.checkpoint.save(tmp_path / name, {"x": torch.ones(1)})
    assert directories.steps(tmp_path)[0].name == "step-00000003" == untyped(sf.checkpoint.latest(tmp_path)).name
    directories.prune(tmp_path, 3, keep=1)
    assert [x.name for x in tmp_path.iterdir()] == ["step-00000003"]


def test_a_directory_that_cannot_be_read_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    assert sf.checkpoint.latest(tmp_path) is None is sf.checkpoint.latest(tmp_path / "new")
    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError):
        sf.checkpoint.latest(tmp_path)


def test_places_that_no_directory_can_be_renamed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = {"x": torch.ones(1)}
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    for target in (tmp_path / "link", tmp_path / "nowhere"):
        with pytest.raises(
            sf.ShardError, match="is a link, or where this process is; give the name of a new directory"
        ):
            sf.checkpoint.save(target, x)
    monkeypatch.chdir(tmp_path / "empty")
    for here in (".", "", tmp_path / "empty"):
        with pytest.raises(sf.ShardError, match="is a link, or where this process is"):
            sf.checkpoint.save(here, x)
    sf.checkpoint.save("step-1", x)
    (tmp_path / "latest").symlink_to(tmp_path / "empty" / "step-1")
    sf.checkpoint.save(tmp_path / "latest", {"x": torch.zeros(1)}, overwrite=True)
    assert sf.checkpoint.load("step-1", x)["x"].item() == 0


def test_ranks_without_a_process_group_do_not_save_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one may, once the others are done."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        if rank == "0":
            sf.checkpoint.save(tmp_path / "step-0", {"x": torch.ones(1)})
            continue
        with pytest.raises(sf.ShardError, match="RANK says that there are others, and no group does"):
            sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(1)})


def test_notes_whose_keys_are_one_in_json_are_refused(tmp_path: Path) -> None:
    for notes in ({1: 2, "1": 3}, {"a": {None: 1, "null": 2}}):
        with pytest.raises(TypeError, match="two keys that are one text"):
            sf.checkpoint.save(tmp_path / "step-1", {}, notes=untyped(notes))
    fine = {"a": (1, 2.5, float("inf")), "ü": None, "1": True}
    path = sf.checkpoint.save(tmp_path / "step-1", {}, notes=fine)
    assert sf.checkpoint.notes(path) == fine | {"a": [1, 2.5, float("inf")]}


def test_names_are_the_keys_on_the_way(tmp_path: Path) -> None:
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    tree = {"x": {"y": a}, "x.y": b, "x~1y": c, "~": [d, {}]}
    path = sf.checkpoint.save(tmp_path / "step-1", tree)
    read = sf.checkpoint.load(path, pytree.tree_map(torch.zeros_like, tree))
    assert pytree.tree_leaves(read) == [0, 1, 2, 3] and [*read] == [*tree]
    with pytest.raises(sf.ShardError, match="two leaves of the tree have the name '0'"):
        sf.checkpoint.save(tmp_path / "step-2", {0: a, "0": b})


def _of_each_rank(path: str, saved: int) -> None:
    mesh, rank = sf.make_mesh("cpu", fsdp=dist.get_world_size()), dist.get_rank()
    mine = {"a": sf.checkpoint.PerRank(torch.arange(rank + 2)), "b": sf.checkpoint.OfFirst(torch.tensor([rank]))}
    if saved == mesh.size():
        sf.checkpoint.save(path, mine, mesh)
    like = {"a": sf.checkpoint.PerRank(torch.zeros(rank + 2, dtype=torch.int64)), "b": torch.tensor([9])}
    if saved != mesh.size():
        with pytest.raises(sf.ShardError, match=rf"'a' of each rank is of {saved} ranks, and {mesh.size()} are here"):
            sf.checkpoint.load(path, like, mesh)
        like["a"] = ...
    read = sf.checkpoint.load(path, like, mesh)
    assert read["b"].tolist() == [0] and (saved != mesh.size() or read["a"].tensor.equal(mine["a"].tensor))


def test_what_each_rank_has_of_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    run(_of_each_rank, path, 2, ranks=2)
    run(_of_each_rank, path, 2, ranks=3)
    run(_of_each_rank, path, 2, ranks=1)


def test_in_a_simulation_nothing_is_saved(tmp_path: Path) -> None:
    with sf.simulate(fsdp=2) as mesh, pytest.raises(sf.ShardError, match="save and load on real ranks"):
        sf.checkpoint.save(tmp_path / "step-1", sf.shard(nn.Linear(4, 2), mesh, sf.Policy()))


DTYPES = (
    "bool uint8 int8 float8_e5m2 float8_e4m3fn int16 uint16 float16 bfloat16 int32 uint32 float32 complex64 float64 "
    "int64 uint64 complex128"
).split()


def test_every_bit_of_every_dtype_comes_back(tmp_path: Path) -> None:
    tree: dict[str, Tensor] = {}
    for name in DTYPES:
        for shape in ((3, 5), (), (0, 4), (1,)):
            x = torch.empty(shape, dtype=getattr(torch, name))
            x.view(-1).view(torch.uint8).random_(0, 2 if name == "bool" else 256)
            tree[f"{name}{shape}"] = x
    tree |= {
        "transposed": torch.arange(6).view(2, 3).T,
        "part": torch.arange(100)[3:5],
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    path = sf.checkpoint.save(tmp_path / "step-1", tree)
    for name, x in sf.checkpoint.load(path, {name: torch.empty_like(x) for name, x in tree.items()}).items():
        assert hash_of(x) == hash_of(tree[name]), name
    theirs = {name.replace(".", "~1"): torch.empty_like(x.resolve_conj()) for name, x in tree.items()}
    with warnings.catch_warnings(action="ignore"):
        state_dict_loader.load(theirs, checkpoint_id=str(path), no_dist=True)
    for name, x in tree.items():
        assert hash_of(theirs[name.replace(".", "~1")]) == hash_of(x), f"torch reads another {name}"


@pytest.mark.parametrize(
    "what", ["a bit", "zeros", "cut", "longer", "missing", "of another save", "one too many", "a link"]
)
def test_a_file_that_is_not_what_was_written_is_an_error(tmp_path: Path, what: str) -> None:
    torch.manual_seed(0)
    tree = {"x": torch.randn(3000), "y": torch.randn(5)}
    path = sf.checkpoint.save(tmp_path / "step-1", tree)
    other = sf.checkpoint.save(tmp_path / "step-2", tree | {"y": torch.randn(5)})
    (file,), (others,) = path.glob("*.distcp"), other.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(tree["x"].numpy().tobytes()[:64]) + 4000
    if what == "a bit":
        data[at] ^= 4
    elif what == "zeros":
        data[at : at + 512] = bytes(512)
    elif what == "cut":
        del data[-1000:]
    elif what == "longer":
        data += b"0"
    elif what == "of another save":
        data = others.read_bytes()
    elif what == "one too many":
        (path / others.name).write_bytes(others.read_bytes())
    if what == "missing":
        file.unlink()
    elif what == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_bytes(data)
    says = {"missing": "is missing", "a link": "is missing", "one too many": "is no part of it"}.get(
        what, "were written|is damaged"
    )
    for read in (lambda: sf.checkpoint.load(path, tree), lambda: sf.checkpoint.verify(path)):
        with pytest.raises(sf.ShardError, match=says):
            read()


def test_a_file_of_several_blocks(tmp_path: Path) -> None:
    """Each has a hash of its own, and what is damaged in one is no hindrance to reading others."""
    first, second = torch.randn(700, 1000), torch.arange(2_500_000)
    path = sf.checkpoint.save(tmp_path / "step-1", {"first": first, "second": second})
    like = {"first": torch.zeros(700, 1000), "second": torch.zeros(2_500_000, dtype=torch.int64)}
    read = sf.checkpoint.load(path, like)
    assert read["first"].equal(first) and read["second"].equal(second)
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    assert len(data) > 5 * BLOCK
    data[4 * BLOCK + 5] ^= 1
    file.write_bytes(data)
    assert sf.checkpoint.load(path, like | {"second": ...})["first"].equal(first)
    for read in (lambda: sf.checkpoint.load(path, like), lambda: sf.checkpoint.verify(path)):
        with pytest.raises(sf.ShardError, match=rf"damaged: bytes {4 * BLOCK} to {5 * BLOCK} are not"):
            read()


@on_meshes({"fsdp": 2, "tp": 2})
@pytest.mark.parametrize("size", [8, 10, 3])
def test_dtensors_of_classes(mesh: DeviceMesh, size: int) -> None:
    """One dim that two axes split, tensor parallelism first; and what a part of the ranks have is refused."""
    torch.manual_seed(0)
    whole = {"weight": torch.randn(size, 6), "bias": torch.randn(size)}
    model = nn.Linear(6, size)
    model.load_state_dict(whole)
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["fsdp"])
    with folder() as at:
        path = at / "step-1"
        for declared in (sf.checkpoint.OfFirst, sf.checkpoint.PerRank):
            with pytest.raises(sf.ShardError, match="'bias' is a DTensor tensor"):
                sf.checkpoint.save(path, {"bias": declared(model.state_dict()["bias"])}, mesh)
        for tree in (whole, model.state_dict()):
            sf.checkpoint.save(path, tree, mesh, overwrite=True)
            read = sf.checkpoint.load(path, model.state_dict(), mesh)
            assert all(read[name].full_tensor().equal(x) for name, x in whole.items())
            assert sf.checkpoint.load(path, whole, mesh)["bias"].equal(whole["bias"])
        sf.checkpoint.save(at / "flat", {"x": torch.arange(16.0)}, mesh)

        def load_strides(like: Tensor) -> None:
            sf.checkpoint.load(at / "flat", {"x": like}, mesh)

        part = distribute_tensor(whole["weight"], mesh["tp"], [Shard(0)])
        assert (
            sf.checkpoint.load(path, {"weight": part, "bias": ...}, mesh)["weight"].full_tensor().equal(whole["weight"])
        )
        strides = distribute_tensor(torch.arange(16.0).view(4, 4), mesh["tp"], [Shard(1)]).view(16)
        for action in (lambda: sf.checkpoint.save(at / "step-9", {"x": strides}, mesh), lambda: load_strides(strides)):
            with pytest.raises(sf.ShardError, match=r"'x' is .* of which no rank has a box; redistribute it"):
                action()
        with pytest.raises(sf.ShardError, match=r"ranks differ: rank 0 has 'x' .* of 2 ranks from rank 0"):
            sf.checkpoint.save(at / "step-9", {"x": part}, mesh)


def test_what_has_no_numbers_to_save_or_to_load(tmp_path: Path) -> None:
    one, eye = torch.ones(3), torch.eye(3)
    with quiet():
        quantized, nested = torch.quantize_per_tensor(one, 0.1, 0, torch.quint8), torch.nested.nested_tensor([one])
    wrong = {"sparse": eye.to_sparse(), "meta": eye.to("meta"), "nested": nested, "quantized": quantized}
    for kind, x in wrong.items():
        for tree in ({"x": x}, {"x": sf.checkpoint.OfFirst(x)}):
            with pytest.raises(sf.ShardError, match=f"'x' is a {kind} tensor"):
                sf.checkpoint.save(tmp_path / "step-1", tree)
    with pytest.raises(TypeError, match="'x' is a NoneType"):
        sf.checkpoint.save(tmp_path / "step-1", {"x": sf.checkpoint.OfFirst(untyped(None))})
    path = sf.checkpoint.save(tmp_path / "step-1", {"x": one, "yes": True, "n": 5})
    with pytest.raises(sf.ShardError, match="'x' is a meta tensor"):
        sf.checkpoint.load(path, {"x": one.to("meta"), "yes": False, "n": 0})
    with pytest.raises(sf.ShardError, match=r"'n' is \(\) torch.int64, wanted \(\) torch.bool"):
        sf.checkpoint.load(path, {"x": one, "yes": False, "n": True})
    with torch.device("meta"):
        read = sf.checkpoint.load(path, {"x": eye[0], "yes": False, "n": 0}) if not eye.is_meta else {}
    assert read["yes"] is True and read["n"] == 5 and read["x"].equal(one)
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(TypeError, match="notes= is what JSON has"):
        sf.checkpoint.save(tmp_path / "step-2", {"x": one}, notes={"deep": deep})


def _fails_to_look(path: str) -> None:
    """One rank cannot even see whether there is a checkpoint."""
    mesh = sf.make_mesh("cpu", fsdp=2)

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error", path)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(storages.LocalDirectory, "size", fail)
        sf.checkpoint.load(path, {"x": torch.ones(2)}, mesh)


def test_a_rank_that_cannot_look_is_an_error_of_all(tmp_path: Path) -> None:
    path = sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(2)})
    run_raises(Exception, _fails_to_look, str(path), match="Input/output error", ranks=2, timeout=30)


def _some_ranks(path: str, what: str) -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    params = sf.shard(nn.Linear(4, 2), mesh, sf.Policy())
    if what == "another path":
        sf.checkpoint.save(f"{path}/{dist.get_rank()}", params)
    elif what == "nothing there":
        sf.checkpoint.load(path if dist.get_rank() else f"{path}/none", params)
    elif what == "other values":
        sf.checkpoint.save(f"{path}/b", {"params": params, "n": torch.tensor([1.0, dist.get_rank()])})
    elif what == "another number":
        sf.checkpoint.save(f"{path}/b", {"params": params, "n": 3 + dist.get_rank()})
    elif what == "another leaf":
        sf.checkpoint.save(f"{path}/b", {"params": params} | ({"n": 3} if dist.get_rank() else {}))
    elif what == "another like":
        sf.checkpoint.load(path, {"params": params} | ({"n": 3} if dist.get_rank() else {}), missing="ignore")
    else:
        half = dist.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("fsdp",))
        sf.checkpoint.save(f"{path}/b", params, mesh=half)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("another path", "rank 0 has .* rank 1 has .*give all ranks one directory"),
        ("nothing there", r"rank 0 has 'None'; rank 1 has .* \(None: no checkpoint there"),
        ("other values", "rank 0 has 'n' .* the same on all ranks: values .*; rank 1 has 'n'"),
        ("another number", "rank 0 has 'n' .* the same on all ranks: 3; rank 1 has 'n' .*: 4"),
        ("another leaf", "rank 0 has nothing; rank 1 has 'n'"),
        ("another like", "rank 0 has nothing; rank 1 has 'n'"),
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


def test_the_command_line_lists_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-00000002", "step-00000010", "mine", "step-last"):
        sf.checkpoint.save(tmp_path / name, {"x": torch.ones(3), "n": 1}, notes={"loss": 1.0})
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].rpartition("/")[2] for line in lines] == [
        "step-00000010",
        "step-00000002",
        "mine",
        "step-last",
    ]
    assert all("2 leaves in ['n', 'x'], 1 files" in line and "notes ['loss']" in line for line in lines)
    assert main(["verify", str(tmp_path / "mine")]) == 0
    (file,) = (tmp_path / "mine").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["verify", str(tmp_path)]) == 1 and main(["ls", str(tmp_path / "nowhere")]) == 1
    assert "mine" in capsys.readouterr().err


def _save_and_load_names(path: str) -> None:
    """Keys that look like those of `PerRank`, and keys that no file can be called by."""
    mesh = sf.make_mesh("cpu", fsdp=2)
    mine = sf.checkpoint.PerRank(torch.tensor(dist.get_rank()))
    params = sf.shard({"w@1": torch.arange(4), "\ud800": torch.ones(2)}, mesh, sf.Policy())
    tree = {"x@0": 5, "x": mine, "x@1": torch.ones(2), "\ud800": 6, "p": params}
    like = {**tree, "x@0": 0, "x@1": torch.zeros(2), "\ud800": 0}
    loaded = sf.checkpoint.load(sf.checkpoint.save(f"{path}/step-1", tree, mesh), like, mesh)
    assert loaded["x"].tensor == dist.get_rank() and loaded["x@0"] == 5 and loaded["\ud800"] == 6
    assert loaded["x@1"].tolist() == [1, 1] and sf.gather(loaded["p"])["w@1"].tolist() == [0, 1, 2, 3]


def test_names_of_any_characters(tmp_path: Path) -> None:
    run(_save_and_load_names, str(tmp_path), ranks=2)


def test_what_has_no_name_of_its_own_or_no_room(tmp_path: Path) -> None:
    """Parameters of a tree under an empty key stand beside other leaves; a file has 64 bits for a number."""
    with pytest.raises(sf.ShardError, match=r"two leaves of the tree have the name 'bias'"):
        sf.checkpoint.save(tmp_path / "a", {"": _one(), "bias": torch.ones(2)})
    with pytest.raises(sf.ShardError, match=r"'n' is 9223372036854775808, which does not fit into 64 bits"):
        sf.checkpoint.save(tmp_path / "a", {"n": 2**63})
