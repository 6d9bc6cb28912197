"""Our checkpoints behind torch.distributed.checkpoint, and its directories."""

import gc
import inspect
import os
import pickle
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damage import changed, changes
from ranks import folder
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.checkpoint import dcp
from shardfn.checkpoint.__main__ import main
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp2 import fully_shard
from shardfn.testing import on_meshes, run_raises


@pytest.fixture(autouse=True)
def _torch_warns() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


def _model(kind: str, mesh: DeviceMesh) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 1))
    model = FSDP(model, device_mesh=mesh, use_orig_params=True) if kind == "fsdp1" else fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99))
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@on_meshes({"fsdp": 2})
def test_classes_write_and_read_it_by_one_argument(mesh: DeviceMesh, kind: str) -> None:
    """With all that torch puts into a state dict; a damaged file is an error."""
    with folder() as at:
        model, optimizer = _model(kind, mesh)
        parts = get_state_dict(model, optimizer)
        want = {"model": parts[0], "optim": parts[1], "epoch": 3, "name": "run", "none": None}
        state_dict_saver.save(want, storage_writer=sf.checkpoint.StorageWriter(at / "step-1"))
        sf.checkpoint.verify(at / "step-1")
        other, its = _model(kind, mesh)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(0)
        parts = get_state_dict(other, its)
        state = {"model": parts[0], "optim": parts[1], "epoch": 0, "name": "", "none": 1}
        state_dict_loader.load(state, storage_reader=sf.checkpoint.StorageReader(at / "step-1"))
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert (state["epoch"], state["name"], state["none"]) == (3, "run", None)
        assert its.param_groups[0]["betas"] == (0.8, 0.99)
        x = torch.randn(4, 6)
        assert model.eval()(x).equal(other.eval()(x))
        with pytest.raises(CheckpointException, match="is there already"):
            state_dict_saver.save(want, storage_writer=sf.checkpoint.StorageWriter(at / "step-1"))
        state_dict_saver.save(want, storage_writer=sf.checkpoint.StorageWriter(at / "step-1", overwrite=True))
        sf.checkpoint.verify(at / "step-1")
        dist.barrier()
        if dist.get_rank() == 0:
            (file, *_) = (at / "step-1").glob("*.distcp")
            data = bytearray(file.read_bytes())
            data[900] ^= 1
            file.write_bytes(data)
        dist.barrier()
        with pytest.raises(CheckpointException, match="is damaged"):
            state_dict_loader.load(state, storage_reader=sf.checkpoint.StorageReader(at / "step-1"))


@on_meshes({"fsdp": 2})
def test_what_it_wrote_is_read_by_our_load_too(mesh: DeviceMesh) -> None:
    with folder() as at:
        params = sf.shard(nn.Linear(6, 5), mesh, sf.Policy(), src=0)
        state_dict_saver.save({"params": dict(params)}, storage_writer=sf.checkpoint.StorageWriter(at / "step-1"))
        loaded = sf.checkpoint.load(at / "step-1", {"params": params})["params"]
        assert all(leaf.to_local().equal(params[name].to_local()) for name, leaf in loaded.items())
        sf.checkpoint.save(at / "step-2", {"params": params, "n": 3})
        theirs: Any = {"params": {name: torch.zeros_like(x) for name, x in params.items()}}
        state_dict_loader.load(theirs, storage_reader=sf.checkpoint.StorageReader(at / "step-2"))
        assert all(leaf.to_local().equal(params[name].to_local()) for name, leaf in theirs["params"].items())


def _theirs(path: Path) -> dict[str, Any]:
    """A directory of torch's, of one process."""
    torch.manual_seed(1)
    tree = {"model": {"0.weight": torch.randn(3, 4), "0.bias": torch.ones(3, dtype=torch.bfloat16)}}
    tree |= {"n": 3, "lr": 0.5, "name": "run", "betas": (0.9, 0.99), "rng": torch.get_rng_state()}
    state_dict_saver.save(tree, checkpoint_id=str(path), no_dist=True)
    return tree


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From torch's and from safetensors, and to them; what cannot be is an error."""
    tree = _theirs(tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "step-1")]) == 0
    assert "5 leaves in ['lr', 'model', 'n', 'rng'], 1 files" in capsys.readouterr().out
    like = {"model": {"0": {"weight": torch.zeros(3, 4), "bias": torch.zeros(3, dtype=torch.bfloat16)}}}
    like |= {"n": 0, "lr": 0.0, "rng": torch.zeros_like(tree["rng"])}
    loaded = sf.checkpoint.load(tmp_path / "step-1", like)
    assert loaded["model"]["0"]["weight"].equal(tree["model"]["0.weight"]) and loaded["rng"].equal(tree["rng"])
    assert (loaded["n"], loaded["lr"]) == (3, 0.5)
    read = {
        **tree,
        "model": {name: torch.zeros_like(x) for name, x in tree["model"].items()},
        "n": 0,
        "name": "",
        "lr": 0,
    }
    state_dict_loader.load(read, storage_reader=sf.checkpoint.StorageReader(tmp_path / "step-1"), no_dist=True)
    assert read["model"]["0.weight"].equal(tree["model"]["0.weight"])
    assert [read[x] for x in ("n", "lr", "name", "betas")] == [3, 0.5, "run", (0.9, 0.99)]

    assert main(["convert", str(tmp_path / "step-1"), str(tmp_path / "again"), "--to", "dcp"]) == 0
    state = {"model.0.weight": torch.zeros(3, 4), "n": 0, "lr": 0, "name": "", "betas": ()}
    state_dict_loader.load(state, checkpoint_id=str(tmp_path / "again"), no_dist=True)
    assert state.pop("model.0.weight").equal(tree["model"]["0.weight"])
    assert state == {"n": 3, "lr": 0.5, "name": "run", "betas": (0.9, 0.99)}
    assert main(["convert", str(tmp_path / "again"), str(tmp_path / "step-3")]) == 0
    values = [
        sf.checkpoint.notes(tmp_path / step)["torch.distributed.checkpoint"]["values"] for step in ("step-1", "step-3")
    ]
    assert values[0] == values[1] == {"betas": {"tuple": [0.9, 0.99]}, "lr": 0.5, "n": 3, "name": "run"}

    file = tmp_path / "weights.safetensors"
    assert main(["convert", str(tmp_path / "step-1"), str(file), "--only", "model"]) == 0
    assert {name: x.shape for name, x in load_file(file).items()} == {"0.weight": (3, 4), "0.bias": (3,)}
    assert load_file(file)["0.weight"].equal(tree["model"]["0.weight"])
    assert main(["convert", str(file), str(tmp_path / "step-2")]) == 0
    loaded = sf.checkpoint.load(tmp_path / "step-2", like["model"])
    assert loaded["0"]["bias"].equal(tree["model"]["0.bias"])

    both = tmp_path / "both.safetensors"
    assert main(["convert", str(tmp_path / "step-1"), str(both), "--only", "model", "--only", "rng"]) == 1
    assert "is below ['rng']" in capsys.readouterr().err
    flat = sf.checkpoint.save(tmp_path / "flat", {"a": {"0.weight": torch.ones(2)}, "b": {"x~y": torch.zeros(1)}})
    assert main(["convert", str(flat), str(both), "--only", "a", "--only", "b"]) == 0
    assert sorted(load_file(both)) == ["0.weight", "x~y"]
    twice = sf.checkpoint.save(tmp_path / "twice", {"a": {"w": torch.ones(2)}, "b": {"w": torch.zeros(1)}})
    for source in (str(twice), str(tmp_path / "twice.dcp")):
        assert main(["convert", source, str(tmp_path / "one"), "--only", "a", "--only", "b"]) == 1
        if source == str(twice):
            assert main(["convert", source, str(tmp_path / "twice.dcp"), "--to", "dcp"]) == 0
    assert "several have 'w'" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "twice.dcp"), str(tmp_path / "one"), "--only", "c"]) == 1
    assert "nothing is below ['c']; there are ['a', 'b']" in capsys.readouterr().err
    same = sf.checkpoint.save(tmp_path / "same", {"a.b": torch.ones(2), "a": {"b": torch.zeros(1)}})
    assert main(["convert", str(same), str(tmp_path / "same.safetensors")]) == 1
    assert "two leaves would have one name" in capsys.readouterr().err

    for arguments, why in (
        (["theirs", "step-1"], "there already"),
        (["theirs", "x.safetensors"], "convert it into one first"),
        (["step-1", "new"], "write --to dcp"),
        (["step-1", "new.safetensors", "--only", "nothing"], r"there are ['lr', 'model', 'n', 'rng']"),
        (["nowhere", "new"], "no model.safetensors|no file or directory"),
    ):
        paths = [str(tmp_path / x) if not x.startswith("-") and x != "nothing" else x for x in arguments]
        assert main(["convert", *paths]) == 1
        error = capsys.readouterr().err
        assert any(part in error for part in why.split("|")), error
        assert not (tmp_path / "new").exists() and not (tmp_path / "new.safetensors").exists()


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_nothing_in_torchs_directories_is_run(tmp_path: Path) -> None:
    _theirs(tmp_path / "theirs")
    metadata = tmp_path / "theirs" / ".metadata"
    good = metadata.read_bytes()
    known = pickle.loads(good)
    known.planner_data = _Runs(tmp_path / "was run")
    metadata.write_bytes(pickle.dumps(known))
    with pytest.raises(sf.ShardError, match=r"theirs' is not what .* writes: it asks for posix.system"):
        dcp.read_directory(tmp_path / "theirs")
    for what in (_Runs(tmp_path / "was run"), 3, b"x"):
        metadata.write_bytes(pickle.dumps(what))
        with pytest.raises(sf.ShardError, match="is not what"):
            dcp.read_directory(tmp_path / "theirs")
    known = pickle.loads(good)
    known.storage_data = {
        index: vars(dcp)["replace"](x, relative_path="../x") for index, x in known.storage_data.items()
    }
    metadata.write_bytes(pickle.dumps(known))
    with pytest.raises(sf.ShardError, match=r"is in '\.\./x', which is no plain file"):
        dcp.read_directory(tmp_path / "theirs")
    assert not (tmp_path / "was").exists()


@pytest.mark.law("P11")
def test_torchs_directories_that_were_changed(tmp_path: Path) -> None:
    """An error, or what somebody else might have written: there are no hashes; and nothing is run."""
    draw, outcomes, ran = random.Random(0), Counter[str](), list[str]()
    _theirs(tmp_path / "theirs")
    want, _ = dcp.read_directory(tmp_path / "theirs")
    files = {path: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    sys.addaudithook(lambda event, _: ran.append(event) if event in ("os.system", "subprocess.Popen", "exec") else None)
    for number in changes():
        path = draw.choice(sorted(files))
        path.write_bytes(changed(bytearray(files[path]), draw))
        del ran[:]
        try:
            outcomes["read"] += dcp.read_directory(tmp_path / "theirs")[0].keys() == want.keys()
        except sf.ShardError:
            outcomes["error"] += 1
        assert not ran, (number, ran)
        path.write_bytes(files[path])
    assert outcomes["error"] > 0.3 * outcomes.total(), outcomes


def _without_collectives(path: str) -> None:
    sf.make_mesh("cpu", fsdp=2)
    writer = sf.checkpoint.StorageWriter(path)
    state_dict_saver.save({"x": torch.ones(2)}, storage_writer=writer, use_collectives=False)


def test_one_manifest_is_not_written_by_each_rank(tmp_path: Path) -> None:
    if "use_collectives" not in inspect.signature(state_dict_saver.save).parameters:
        pytest.skip("this torch always has them")
    match = "StorageWriter: one manifest is of all ranks; leave out use_collectives=False"
    run_raises(Exception, _without_collectives, str(tmp_path / "step-1"), match=match, ranks=2)


def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    writer = sf.checkpoint.StorageWriter(tmp_path / "step-1")
    writer.prepare_global_plan([SavePlan([])])
    assert [path.name[:16] for path in tmp_path.iterdir()] == [".writing-step-1-"]
    del writer
    gc.collect()
    assert not [*tmp_path.iterdir()]
