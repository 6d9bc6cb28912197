"""Rows 33 to 37: checkpoints that somebody else has changed, and ranks that save or load different things.

What is put into a checkpoint makes a directory when it is unpickled. Whoever changes one can also write its hashes
anew, which are there against damage: so this is done for shardfn. Both happen in the loading world's own directory.
"""

import json
import pickle
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench import (
    CLEAR,
    HANG,
    NONE,
    OK,
    OLDER,
    UNCLEAR,
    WRONG,
    Bench,
    Plan,
    Result,
    caught,
    clear,
    group_works,
    judge,
    require_saved,
    save_steps,
    shortened,
    worst,
)
from kill_rows import in_one
from libraries import Contender, blank_tree, whole_tree
from storage_rows import is_of, load_any
from torch.distributed.checkpoint.metadata import Metadata
from worlds import Ended, Rank, World, in_world

from shardfn.checkpoint.hashed_files import hashed
from shardfn.checkpoint.manifest import digest


class Payload:
    """What makes a directory when it is unpickled, and is a number then."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"__import__('os').makedirs({str(self.marker)!r}, exist_ok=True) or 2",)


def in_metadata(newest: Path, bench: Bench, marker: Path) -> None:
    """Row 33: whatever is a pickle by its name is one with a payload; for shardfn its manifest also becomes one."""
    for name in (".metadata", "metadata.pkl"):
        if (path := newest / name).exists():
            path.write_bytes(pickle.dumps([Payload(marker), path.read_bytes()]))
    if bench.seed % 2 and (newest / "manifest.json").exists():
        (newest / "manifest.json").write_bytes(pickle.dumps(Payload(marker)))


def in_item(newest: Path, bench: Bench, marker: Path) -> None:
    """Row 34: an item that is stored as a pickle."""
    if (newest / "manifest.json").exists():
        for path in newest.glob("*.distcp"):
            with path.open("wb") as file:
                torch.save({"a": Payload(marker), "filler": torch.zeros(200_000)}, file)
        _rehash(newest)
        return
    shutil.rmtree(newest)
    (end, *_) = in_world(2, _save_payload, bench, marker)
    assert end.how == "done", end.where
    if marker.exists():
        marker.rmdir()


def _save_payload(rank: Rank, bench: Bench, marker: Path) -> None:
    """As row 34 for those that save any object."""
    state = bench.contender.pack(whole_tree(2), rank.mesh) | {"plain": Payload(marker)}
    bench.contender.save(bench.folder, 2, state)


def _rehash(newest: Path, replaced: tuple[str, str] | None = None) -> None:
    """A manifest whose hashes are those of what is there, and in which a file may have another name."""
    text = (newest / "manifest.json").read_text()
    about = json.loads(text.replace(*replaced) if replaced else text)["manifest"]
    for name, file in about["files"].items():
        of_file = hashed((newest / name).read_bytes())
        file |= {"size": of_file.nbytes, "sha256": [*of_file.hashes]}
    (newest / "manifest.json").write_text(json.dumps({"manifest": about, "sha256": digest(about)}))


def by_link(newest: Path, bench: Bench, marker: Path) -> None:
    """Row 35: a file of data is a symbolic link to one of another save."""
    data = sorted(path for path in newest.iterdir() if is_of(path, bench.contender.data))[-1]
    other = sorted(path for path in (bench.root / "aside").iterdir() if is_of(path, bench.contender.data))[-1]
    data.unlink()
    data.symlink_to(other)
    if (newest / "manifest.json").exists():
        _rehash(newest)


def by_name(newest: Path, bench: Bench, marker: Path) -> None:
    """Row 35: the name of a file leads out of the directory, to one of another save."""
    aside = bench.root / "aside"
    data = sorted(path for path in newest.iterdir() if is_of(path, bench.contender.data))[-1].name
    if (newest / "manifest.json").exists():
        other = sorted(aside.glob("*.distcp"))[-1].name
        _rehash(newest, (data, f"../../aside/{other}"))
        (newest / data).unlink()
    elif (newest / ".metadata").exists():
        metadata: Metadata = pickle.loads((newest / ".metadata").read_bytes())
        for stored in (metadata.storage_data or {}).values():
            if stored.relative_path == data:
                stored.relative_path = f"../../aside/{data}"
        (newest / ".metadata").write_bytes(pickle.dumps(metadata))


Attack = Callable[[Path, Bench, Path], None]


def attacked(*attacks: Attack) -> Callable[[Contender, int], Result]:
    """Rows 33 to 35: nothing runs, and no file from elsewhere is read; what is there may be as good as ever."""

    def of(attack: Attack) -> Callable[[Bench], Result]:
        def row(bench: Bench) -> Result:
            contender, marker = bench.contender, bench.root / "was-run"
            if attack is by_name and contender.name == "torch_checkpointing":
                return Result(NONE, True, why="names of files are not stored")
            require_saved(bench, Plan((1,)))
            shutil.copytree(contender.path(bench.folder, 1), bench.root / "aside")
            require_saved(bench, Plan((2,)))
            attack(contender.all(bench.folder)[0], bench, marker)
            world = World(2, load_any, bench)
            ends = world.wait()
            seconds = time.monotonic() - world.began
            if attack is in_item and not marker.exists() and all(end.how == "done" for end in ends):
                return Result(OK, True, seconds, "nothing was run")  # numbers may be whatever was put there
            return _of_attack(ends, marker, seconds)

        return row

    def all_of(contender: Contender, seed: int) -> Result:
        seeds = [seed, seed + 1] if attacks == (in_metadata,) else [seed]
        return worst([in_one(of(attack), contender, number) for attack in attacks for number in seeds])

    return all_of


def _of_attack(ends: Sequence[Ended], marker: Path, seconds: float) -> Result:
    if marker.exists():
        return Result(WRONG, False, seconds, "code in it was run")
    if bad := [end for end in ends if end.how != "done"]:
        return Result(HANG if bad[0].how == "hang" else UNCLEAR, False, seconds, shortened(bad[0]))
    tries = [end.value[0] for end in ends]
    if all(end.how == "done" and right for end, right in tries):
        return Result(OK, True, seconds)
    if any(end.how == "done" for end, _ in tries):
        return Result(WRONG, False, seconds, "a file from elsewhere was read")
    is_clear, why = clear([end for end, _ in tries], [r"step-\d+|/one"])
    older = all(end.value[-1][0].how == "done" for end in ends)
    return Result((OLDER if older else CLEAR) if is_clear else UNCLEAR, is_clear, seconds, why)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that differ


def more(state: dict[str, Any]) -> dict[str, Any]:
    """A key that others do not have."""
    return state | {"extra": torch.zeros(3)}


def fewer(state: dict[str, Any]) -> dict[str, Any]:
    """Without a key that others have."""
    return {name: x for name, x in state.items() if name != "plain"}


def longer(state: dict[str, Any]) -> dict[str, Any]:
    """Another shape."""
    return state | {"plain": torch.zeros(6, dtype=torch.float64)}


def narrower(state: dict[str, Any]) -> dict[str, Any]:
    """Another dtype."""
    return state | {"plain": torch.zeros(5)}


Change = Callable[[dict[str, Any]], dict[str, Any]]


def differ(rank: Rank, bench: Bench, change: Change, saves: bool, ranks: Sequence[int]) -> tuple[Ended, bool, bool]:
    """Some ranks save or load something else: how it went, whether all is as it was, and whether it goes on."""
    contender = bench.contender
    state = contender.pack(whole_tree(2) if saves else blank_tree(), rank.mesh)
    before = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in contender.local(state).items()}
    other = change(state) if rank.rank in ranks else state
    path = contender.all(bench.folder)[0]
    end = caught(lambda: contender.save(bench.folder, 2, other) if saves else contender.load(path, other))
    after = contender.local(state)
    same = all(torch.equal(x, after[name]) if isinstance(x, torch.Tensor) else True for name, x in before.items())
    works = group_works(rank)
    again = caught(lambda: save_steps(rank, bench, Plan((3,)))) if works else Ended("error")
    return Ended(end.how, None, end.text, end.kind, end.is_exception), same, works and again.how == "done"


def differing(*changes: Change, ranks: Sequence[int] = (1,), saving: bool = True) -> Callable[[Contender, int], Result]:
    """Rows 36, 37 on one rank, saving and loading; 42 to 44 on all ranks, loading.

    All name the key; those that have no problem of their own also name the rank that has one.
    """

    def of(change: Change, saves: bool) -> Callable[[Bench], Result]:
        def row(bench: Bench) -> Result:
            require_saved(bench, Plan((1,)))
            world = World(2, differ, bench, change, saves, ranks)
            ends = world.wait()
            seconds = time.monotonic() - world.began
            what = f"{'save' if saves else 'load'}, {change.__name__} on {'a rank' if len(ranks) == 1 else 'all'}: "
            if bad := [end for end in ends if end.how != "done"]:
                how = HANG if bad[0].how == "hang" else UNCLEAR
                return Result(how, False, seconds, what + shortened(bad[0]))
            name = "extra" if change is more else "plain"
            others = [end.value[0] for rank, end in enumerate(ends) if rank not in ranks]
            is_named = all(end.how != "error" or re.search(r"[Rr]anks? ?\d|RANK \d", end.text) for end in others)
            found = _of_difference(bench, [end.value for end in ends], [name], seconds, what)
            if found.survived and not is_named:
                return Result(UNCLEAR, False, seconds, f"{what}no rank in {shortened(others[0])}")
            return found

        return row

    def all_of(contender: Contender, seed: int) -> Result:
        both = (True, False) if saving else (False,)
        return worst([in_one(of(change, saves), contender, seed) for change in changes for saves in both])

    return all_of


def _of_difference(
    bench: Bench, ends: Sequence[tuple[Ended, bool, bool]], words: Sequence[str], seconds: float, what: str
) -> Result:
    if all(end.how == "done" for end, _, _ in ends):
        return Result(WRONG, False, seconds, f"{what}nobody says anything")
    is_clear, why = clear([end for end, _, _ in ends], words)
    if not all(same for _, same, _ in ends):
        return Result(UNCLEAR, False, seconds, f"{what}tensors have changed when it raises")
    if not is_clear:
        return Result(UNCLEAR, False, seconds, what + why)
    if not all(goes_on for *_, goes_on in ends):
        return Result(UNCLEAR, False, seconds, f"{what}the ranks cannot go on")
    found = judge(bench)
    return Result(CLEAR if found.survived else found.outcome, found.survived, seconds, found.why)
