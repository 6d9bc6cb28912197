"""Saves that end anywhere, or fail anywhere; and what is on the disk before what, for the day that the power goes."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import untyped
from torch import nn

import shardfn as sf
from shardfn.checkpoint import commits
from shardfn.checkpoint.background import BACKGROUND
from shardfn.testing import run


class Killed(BaseException):
    """In place of a kill: nothing is done after it."""


# What the next operation on files below a directory does: how many go well, and what the one after them raises.
_NEXT: list[Any] = []


def _interrupt(event: str, args: tuple[Any, ...]) -> None:
    if _NEXT and event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and _NEXT[0] in str(args[0]):
        _NEXT[1] -= 1
        if _NEXT[1] == -1 or (_NEXT[1] < 0 and isinstance(_NEXT[2], Killed)):  # an error comes once
            raise _NEXT[2]


sys.addaudithook(_interrupt)


@contextmanager
def _interrupted(folder: Path, after: int, error: BaseException) -> Iterator[list[Any]]:
    _NEXT[:] = [str(folder), after, error]
    done: list[Any] = []
    try:
        yield done
    finally:
        done += _NEXT
        _NEXT.clear()


def _tree(number: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((4,), number), "y": torch.full((2, 3), number)}


def _number(path: Path) -> float:
    """What all numbers of a checkpoint are."""
    sf.checkpoint.verify(path)
    numbers = {x for value in sf.checkpoint.load(path, _tree(0)).values() for x in value.flatten().tolist()}
    assert len(numbers) == 1, f"torn: {numbers}"
    return numbers.pop()


def _as_if_its_process_were_gone(folder: Path) -> None:
    for path in [*folder.rglob(".new-*"), *folder.rglob(".writing-*")]:
        host, _, began = path.name.rpartition("-")[2].split(".")
        path.rename(path.with_name(f"{path.name.rpartition('-')[0]}-{host}.{2**22 + 1}.{began}"))


@pytest.mark.parametrize("error", [Killed(), OSError(5, "a bad disk")], ids=["killed", "failing"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_ends_anywhere(tmp_path: Path, overwrite: bool, error: BaseException) -> None:
    """At each of its operations on files: the old one is there, or the new one; and the next save is as ever."""
    step, after, met = tmp_path / "run" / "step-1", 0, True
    while met:
        shutil.rmtree(step.parent, ignore_errors=True)
        if overwrite:
            sf.checkpoint.save(step, _tree(1))
        ended = False
        with _interrupted(step.parent, after, error) as done:
            try:
                sf.checkpoint.save(step, _tree(2), overwrite=overwrite)
            except (Killed, OSError):
                ended = True
        met = done[1] < 0
        there = sf.checkpoint.latest(step.parent)
        assert (there is None and not overwrite and ended) or _number(step) in ((1, 2) if ended else (2,)), after
        _as_if_its_process_were_gone(step.parent)
        sf.checkpoint.save(step, _tree(3), overwrite=True)
        assert _number(step) == 3, after
        expected = {"manifest.json", ".metadata", *(x.name for x in step.glob("*.distcp"))}
        assert {x.name for x in step.iterdir()} == expected and len(expected) == 3, after
        assert [x.name for x in step.parent.iterdir()] == ["step-1"], after
        after += 1
    assert after > 5


@pytest.mark.parametrize("error", [Killed(), OSError(5, "a bad disk")], ids=["killed", "failing"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_two_saves_that_end_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, goes_on: bool
) -> None:
    """What the first one has left is no stranger when the second one, of that process or of another, has an error."""
    step, after, met, written = tmp_path / "step-1", 0, True, os.pwrite

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    while met:
        shutil.rmtree(step, ignore_errors=True)
        sf.checkpoint.save(step, _tree(1))
        with _interrupted(tmp_path, after, error) as done, suppress(Killed, OSError):
            sf.checkpoint.save(step, _tree(2), overwrite=True)
        met = done[1] < 0
        if goes_on:
            sf.checkpoint.save(step, _tree(3), overwrite=True)
        _as_if_its_process_were_gone(tmp_path)
        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="No space"):
            sf.checkpoint.save(step, _tree(4), overwrite=True)
        monkeypatch.setattr(os, "pwrite", written)
        assert _number(step) in ((3,) if goes_on else (1, 2)), after
        _as_if_its_process_were_gone(tmp_path)
        sf.checkpoint.save(step, _tree(5), overwrite=True)
        assert _number(step) == 5 and len([*step.iterdir()]) == 3, after
        after += 1
    assert after > 5


@pytest.mark.parametrize("overwrite", [False, True])
def test_everything_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    if overwrite:
        sf.checkpoint.save(tmp_path / "step-1", {"x": torch.zeros(3)})
    done: list[tuple[str, str]] = []
    synced, renamed, replaced = os.fsync, Path.rename, Path.replace

    def fsync(descriptor: int) -> None:
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        synced(descriptor)

    def rename(path: Path, target: Any) -> Any:
        done.append(("name", Path(target).name))
        return renamed(path, target)

    def replace(path: Path, target: Any) -> Any:
        done.append(("name", Path(target).name))
        return replaced(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(Path, "replace", replace)
    path = sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(3)}, overwrite=overwrite)
    named = done.index(("name", "manifest.json" if overwrite else "step-1"))
    before, after = done[:named], done[named + 1 :]
    (data,) = path.glob("*.distcp")
    assert ("sync", data.name) in before
    before = before[before.index(("sync", data.name)) :]
    manifest = next(at for at in reversed(range(len(before))) if before[at][1].startswith(".new-"))
    directories = [name for what, name in before[manifest:] if "step-1" in name]
    assert directories[-1] == "step-1" if overwrite else directories[-1].startswith(".writing-step-1-")
    assert ("sync", "step-1" if overwrite else tmp_path.name) in after
    assert not [x for x in path.parent.rglob("*") if x.name.startswith(".writing")]


def test_two_jobs_that_save_to_one_path_do_not_touch_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one to finish gets an error, and what the first one has written stays."""
    target, started = tmp_path / "step-1", []
    finish = commits.RenamedDirectory.finish

    def between(self: Any, *args: Any) -> None:
        if not started:
            started.append(1)
            vars(BACKGROUND).update(_is_saving=False)  # which another process would not know
            sf.checkpoint.save(target, {"x": torch.full((3,), 2.0)})
        finish(self, *args)

    monkeypatch.setattr(commits.RenamedDirectory, "finish", between)
    with pytest.raises(sf.ShardError, match="another save has made"):
        sf.checkpoint.save(target, {"x": torch.full((3,), 1.0)})
    assert sf.checkpoint.load(target, {"x": torch.zeros(3)})["x"].tolist() == [2, 2, 2]
    assert [x.name for x in tmp_path.iterdir()] == ["step-1"]


def test_two_jobs_that_replace_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, started = sf.checkpoint.save(tmp_path / "step-1", {"x": torch.zeros(3)}), []
    finish = commits.ReplacedManifest.finish

    def between(self: Any, *args: Any) -> None:
        if not started:
            started.append(1)
            vars(BACKGROUND).update(_is_saving=False)
            sf.checkpoint.save(target, {"x": torch.full((3,), 2.0)}, overwrite=True)
        finish(self, *args)

    monkeypatch.setattr(commits.ReplacedManifest, "finish", between)
    with pytest.raises(sf.ShardError, match="another save, or removal, has replaced"):
        sf.checkpoint.save(target, {"x": torch.full((3,), 1.0)}, overwrite=True)
    assert sf.checkpoint.load(target, {"x": torch.zeros(3)})["x"].tolist() == [2, 2, 2]
    assert len([*target.iterdir()]) == 3


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing behind, and what was there."""
    path = sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(3)})
    before = sorted(tmp_path.rglob("*"))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for name, overwrite in (("step-1", True), ("step-2", False)):
        with pytest.raises(OSError, match=r"No space left on device \(\d+ bytes are free\): .*distcp") as error:
            sf.checkpoint.save(tmp_path / name, {"x": torch.zeros(3)}, overwrite=overwrite)
        assert error.value.errno == 28
        assert sorted(tmp_path.rglob("*")) == before
    assert sf.checkpoint.load(path, {"x": torch.zeros(3)})["x"].tolist() == [1, 1, 1]


def test_a_disk_that_is_full_at_any_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what torch's writer says, which is closed without what it wanted to write."""
    written, after, left = os.pwrite, 0, [0]

    def full(descriptor: int, data: memoryview, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return written(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    while True:
        left[0] = after
        try:
            sf.checkpoint.save(tmp_path / "step-1", {"x": torch.zeros(3000)})
            break
        except OSError as error:
            assert error.errno == 28 and "bytes are free): " in str(error)
            assert any(name in str(error) for name in (".distcp", "manifest.json", ".metadata"))
        assert not [*tmp_path.iterdir()]
        after += 1
    assert after >= 5


def test_a_disk_that_is_full_for_the_manifest_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").partition("manifest.json")[1]:
            raise OSError(28, "No space left on device")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device \(\d+ bytes are free\): .*manifest\.json"):
        sf.checkpoint.save(tmp_path / "step-1", {"x": torch.zeros(3)})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("what", ["empty", "of no use"])
def test_a_damaged_manifest_is_replaced(tmp_path: Path, what: str) -> None:
    path = sf.checkpoint.save(tmp_path / "step-1", _tree(1))
    (path / "manifest.json").write_text("" if what == "empty" else "{}")
    with pytest.raises(sf.checkpoint.Damaged):
        sf.checkpoint.load(path, _tree(0))
    sf.checkpoint.save(path, _tree(2), overwrite=True)
    assert _number(path) == 2 and len([*path.iterdir()]) == 3


def test_a_checkpoint_that_is_there_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be taken away of the old one is, by the next save of another process."""
    path = sf.checkpoint.save(tmp_path / "step-1", _tree(1))

    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(sf.checkpoint.LocalDirectory, "remove", fail)
        sf.checkpoint.save(path, _tree(2), overwrite=True)
    assert _number(path) == 2
    _as_if_its_process_were_gone(tmp_path)
    sf.checkpoint.save(path, _tree(3), overwrite=True)
    assert _number(path) == 3 and len([*path.iterdir()]) == 3


def _saves_where_each_rank_has_a_copy(folder: str) -> None:
    """As on nodes with disks of their own, which all have it under one name."""
    mesh = sf.make_mesh("cpu", fsdp=2)
    os.chdir(f"{folder}/{dist.get_rank()}")
    params = sf.shard(nn.Linear(4, 4), mesh, sf.Policy(), src=0)
    try:
        with pytest.raises(sf.ShardError, match="give a directory that all ranks see"):
            sf.checkpoint.save("step-1", {"p": params}, overwrite=True)
    finally:
        os.chdir(folder)
    sf.checkpoint.verify(f"{folder}/{dist.get_rank()}/step-1")


def test_copies_of_each_rank_are_not_replaced(tmp_path: Path) -> None:
    for rank in range(2):
        sf.checkpoint.save(tmp_path / str(rank) / "step-1", _tree(1))
        if rank:
            shutil.rmtree(tmp_path / "1")
            shutil.copytree(tmp_path / "0", tmp_path / "1")
    run(_saves_where_each_rank_has_a_copy, str(tmp_path), ranks=2)
    assert _number(tmp_path / "0" / "step-1") == _number(tmp_path / "1" / "step-1") == 1


def _saves_to_what_is_no_path(folder: str) -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    for name in ("loop", "a\0b"):
        with pytest.raises((OSError, ValueError)):
            sf.checkpoint.save(f"{folder}/{name}", {"x": 5}, mesh)
    with pytest.raises((TypeError, ValueError)):
        sf.checkpoint.save(untyped(3) if dist.get_rank() else f"{folder}/a", {"x": 5}, mesh)
    dist.barrier()


def test_what_is_no_path_is_an_error_of_all(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    run(_saves_to_what_is_no_path, str(tmp_path), ranks=2, timeout=30)
