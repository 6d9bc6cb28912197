"""Checkpoints that are not in one directory: in one of each rank, and in an object store."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import folder
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.checkpoint import storages
from shardfn.testing import on_meshes, run_raises


class Cut(OSError):
    """The connection is gone."""


class Objects:
    """An object store: an object is there when it was sent whole, and a listing is that of `late - 1` others ago.

    Or, with less than zero, it lacks so many of the latest objects.

    Objects are files of a directory here, so that all ranks see them; no file is renamed but to send it at once, and
    none is synced.
    """

    def __init__(self, directory: Path, late: int = 2, cut: int | None = None, once: bool = False) -> None:
        self._directory, self._late, self._cut, self._once, self.met = directory, late, cut, once, False
        self._listings: list[list[str]] = []
        directory.mkdir(exist_ok=True)

    def __repr__(self) -> str:
        return "the store"

    def _operation(self) -> None:
        if self._cut is not None:
            self._cut -= 1
            if self._cut == -1 or (self._cut < 0 and not self._once):
                self.met = True
                raise Cut("the connection is gone")

    @contextmanager
    def create(self, name: str) -> Iterator[io.BytesIO]:
        self._operation()
        sent = io.BytesIO()
        yield sent
        self.put(name, sent.getvalue())

    def put(self, name: str, data: bytes, check: Callable[[], None] | None = None) -> None:
        self._operation()
        if check is not None:
            check()
        part = self._directory.with_name(f"{self._directory.name}-{os.getpid()}")
        part.write_bytes(data)
        part.replace(self._directory / name)

    def read(self, name: str, data: memoryview, at: int) -> None:
        self._operation()
        data[:] = (self._directory / name).read_bytes()[at : at + len(data)]

    def size(self, name: str) -> int:
        self._operation()
        return (self._directory / name).stat().st_size

    def names(self) -> list[str]:
        self._operation()
        there = sorted(os.listdir(self._directory), key=lambda name: (self._directory / name).stat().st_mtime_ns)
        self._listings.append(there)
        return there[: self._late] if self._late < 0 else self._listings[-self._late :][0]

    def remove(self, name: str) -> None:
        self._operation()
        (self._directory / name).unlink()


def _tree(number: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((4,), number), "y": torch.full((2, 3), number)}


def _number(store: sf.checkpoint.Storage) -> float:
    sf.checkpoint.verify(store)
    (number,) = {x for value in sf.checkpoint.load(store, _tree(0)).values() for x in value.flatten().tolist()}
    return number


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 3})
def test_an_object_store(mesh: DeviceMesh) -> None:
    params = sf.shard(nn.Linear(6, 8), mesh, sf.Policy(), src=0)
    with folder() as at:
        for number, async_ in ((1, False), (2, True)):
            done = sf.checkpoint.save(Objects(at), {"p": params, "n": number}, overwrite=number > 1, async_=async_)
            assert not async_ or done.wait()
            loaded = sf.checkpoint.load(Objects(at), {"p": params, "n": 0})
            assert loaded["n"] == number
            assert all(leaf.to_local().equal(params[name].to_local()) for name, leaf in loaded["p"].items())
            sf.checkpoint.verify(Objects(at))
        with pytest.raises(sf.ShardError, match="there is a checkpoint in the store already"):
            sf.checkpoint.save(Objects(at), {"p": params})
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in the store \(no manifest.json\)"):
            sf.checkpoint.notes(Objects(at / "other"))


@pytest.mark.parametrize("late", [1, 3, -1, -2])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_a_connection_that_is_cut_at_any_operation(tmp_path: Path, overwrite: bool, late: int, once: bool) -> None:
    """For good, or only then. What was there is there, or all of the new one, and that if the save says so."""
    cut, met = 0, True
    while met:
        place = tmp_path / f"run-{cut}"
        if overwrite:
            sf.checkpoint.save(Objects(place, late), _tree(1))
        store, saved = Objects(place, late, cut, once), False
        with suppress(Cut):
            sf.checkpoint.save(store, _tree(2), overwrite=overwrite)
            saved = True
        met = store.met
        here = (place / "manifest.json").exists()
        assert here or (not saved and not overwrite)
        assert not here or _number(Objects(place, 1)) in ((2,) if saved else (1, 2)), cut
        sf.checkpoint.save(Objects(place, late), _tree(3), overwrite=True)
        assert _number(Objects(place, late)) == 3, cut
        cut += 1
    assert cut > 5


def _saves_apart(path: str, async_: bool = False) -> sf.Params:
    mesh = sf.make_mesh("cpu", fsdp=2)
    params = sf.shard(nn.Linear(6, 8), mesh, sf.Policy(), src=0)
    mine = sf.checkpoint.LocalDirectory(f"{path}/{dist.get_rank()}")
    saving = sf.checkpoint.save(mine, {"p": params, "n": 4}, async_=async_)
    assert (saving.wait() if async_ else saving) is mine
    return params


@on_meshes({"fsdp": 2})
@pytest.mark.parametrize("async_", [False, True])
def test_a_directory_of_each_rank(mesh: DeviceMesh, async_: bool) -> None:
    """It is a checkpoint when somebody has put them together, and an error until then."""
    with folder() as at:
        params = _saves_apart(str(at), async_)
        like = {"p": params, "n": 0}
        dist.barrier()
        with pytest.raises(sf.ShardError, match=r"rank 1 has 'None' \(None: no checkpoint there\)"):
            sf.checkpoint.load(sf.checkpoint.LocalDirectory(at / f"{dist.get_rank()}"), like)
        with pytest.raises(sf.ShardError, match="give each rank an empty directory"):
            sf.checkpoint.save(sf.checkpoint.LocalDirectory(at / f"{dist.get_rank()}"), like)
        if dist.get_rank() == 0:
            for rank in (1, 0):
                shutil.copytree(at / f"{rank}", at / "whole", dirs_exist_ok=True)
            shutil.copytree(at / "whole", at / "copy")
        dist.barrier()
        own = sf.checkpoint.LocalDirectory(at / ("whole", "copy")[dist.get_rank()])
        for place in (at / "whole", own):
            loaded = sf.checkpoint.load(place, like)
            assert all(leaf.to_local().equal(params[name].to_local()) for name, leaf in loaded["p"].items())


def _loads_two_saves(path: str) -> None:
    for at in (path, f"{path}-2"):
        params = _saves_apart(at)
        dist.barrier()
        if dist.get_rank() == 0:
            for rank in range(2):
                shutil.copytree(f"{at}/{rank}", f"{at}/whole", dirs_exist_ok=True)
        dist.barrier()
    own = sf.checkpoint.LocalDirectory((path, f"{path}-2")[dist.get_rank()] + "/whole")
    sf.checkpoint.load(own, {"p": params, "n": 0})


def test_ranks_that_have_other_saves_are_an_error(tmp_path: Path) -> None:
    match = "ranks differ: rank 0 has the checkpoint of save"
    run_raises(sf.ShardError, _loads_two_saves, str(tmp_path / "run"), match=match, ranks=2)


def test_a_link_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"x" * 10)
    local = sf.checkpoint.LocalDirectory(tmp_path / "step")
    local.path.mkdir()
    local.put("manifest.json", b"{}")
    (tmp_path / "step" / "link").symlink_to(tmp_path / "outside")
    assert not storages.has(local, "link") and storages.has(local, "manifest.json")
    with pytest.raises(OSError, match="link"):
        local.read("link", memoryview(bytearray(3)), 0)


def test_what_is_no_place(tmp_path: Path) -> None:
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"a int is no path and no sf.checkpoint.Storage"):
        sf.checkpoint.verify(wrong)
    with pytest.raises(TypeError, match=r"the path is a int; write save\(path, tree\)"):
        sf.checkpoint.save(wrong, {"x": torch.ones(2)})
