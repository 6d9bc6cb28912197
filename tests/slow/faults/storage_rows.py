"""Rows 26 to 32: a disk that is full, or may not be written to; and what is damaged on it.

A full disk is a tmpfs of 1 MiB, filled at a point of a save. Where none can be mounted, writes fail with ENOSPC.
"""

import errno
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from bench import (
    CLEAR,
    HANG,
    LOST,
    OK,
    OLDER,
    UNCLEAR,
    WRONG,
    Bench,
    Fault,
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
from failpoints import Point, disarm
from kill_rows import in_each, in_one
from libraries import Contender, Tree, barrier, blank_tree, whole_tree
from worlds import NOBODY, Ended, Rank, World

TRIALS = 6  # damages of one kind


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """A file system of 1 MiB at a path, and whether there is one."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "faults", path], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", path], check=True)


def fill(folder: Path) -> None:
    """Leave nothing free."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            for size in (65536, 4096, 1):
                while file.write(b"x" * size) == size:
                    pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def no_space(_: Rank) -> None:
    """Where no small disk can be mounted."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "injected")


def save_in_trouble(rank: Rank, bench: Bench, fault: Fault | None, nobody: bool = False) -> tuple[Ended, bool, Ended]:
    """Acknowledge step 1; step 2 fails; then step 3: how those went, and whether ranks could talk in between."""
    save_steps(rank, bench, Plan((1,)))
    barrier()
    if nobody:
        _become_nobody(bench.folder)
    failed = caught(lambda: save_steps(rank, bench, Plan((2,), fault)))
    disarm()
    works = group_works(rank)
    (bench.folder / "ballast").unlink(missing_ok=True)
    return failed, works, Ended("done") if nobody or not works else caught(lambda: save_steps(rank, bench, Plan((3,))))


def _become_nobody(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        with suppress(OSError):  # of another rank, which has changed it
            path.chmod(0o555 if path.is_dir() else 0o444)
    barrier()
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _of_trouble(bench: Bench, fault: Fault | None, words: Sequence[str], nobody: bool = False) -> Result:
    world = World(2, save_in_trouble, bench, fault, nobody)
    ends = world.wait()
    seconds = time.monotonic() - world.began
    for path in [bench.folder, *bench.folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    if hung := [end for end in ends if end.how == "hang"]:
        return Result(HANG, False, seconds, hung[0].text)
    if broken := [end for end in ends if end.how != "done"]:
        return Result(UNCLEAR, False, seconds, f"the process ends: {shortened(broken[0])}")
    found = judge(bench)
    if found.outcome in (LOST, WRONG):
        return Result(found.outcome, False, seconds, found.why)
    is_clear, why = clear([end.value[0] for end in ends], words)
    if not is_clear:
        return Result(UNCLEAR, False, seconds, why)
    if not all(end.value[1] for end in ends):
        return Result(UNCLEAR, False, seconds, "the group does not work afterwards")
    if failed := [end.value[2] for end in ends if end.value[2].how != "done"]:
        return Result(UNCLEAR, False, seconds, f"the next save fails: {shortened(failed[0])}")
    require_saved(bench, Plan((4,)))  # by another job
    found = judge(bench)
    return Result(CLEAR if found.outcome == OK else found.outcome, found.outcome == OK, seconds, found.why)


def full_disk(where: str) -> Callable[[Contender, int], Result]:
    """Rows 26 and 27: in the data of the second rank, or in the manifest."""

    in_data = where == "data"

    def of(pattern: str, bench: Bench) -> Result:
        point = bench.contender.points["mid data"] if in_data else Point("making", pattern)
        with small_disk(bench.folder) as mounted:
            do = (lambda rank: fill(bench.folder)) if mounted else no_space
            words = ["No space left", "free", str(bench.folder) if mounted else "injected"]
            return _of_trouble(bench, Fault(point, 2, 1 if in_data else 0, do), words)

    def all_of(contender: Contender, seed: int) -> Result:
        patterns = [""] if in_data else [contender.manifest, *contender.others]
        return worst([in_each(partial(of, pattern), contender, seed) for pattern in patterns])

    return all_of


def read_only(contender: Contender, seed: int) -> Result:
    """Row 28."""
    return in_each(lambda b: _of_trouble(b, None, ["Permission denied", str(b.folder)], nobody=True), contender, seed)


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def load_any(rank: Rank, bench: Bench, attempts: int = 2) -> list[tuple[Ended, bool]]:
    """Try the newest, step 2, then step 1: how it went, and whether the numbers are right, or after an error as before.

    Where the ranks cannot talk any more after an error, there is no other attempt.
    """
    contender, tries = bench.contender, list[tuple[Ended, bool]]()
    for step, path in zip((2, 1)[:attempts], contender.all(bench.folder), strict=False):
        state = contender.pack(blank_tree(), rank.mesh)
        before = {name: _copied(x) for name, x in contender.local(state).items()}
        end = caught(lambda path=path, state=state: contender.load(path, state))
        expected = before if end.how == "error" else contender.local(contender.pack(whole_tree(step), rank.mesh))
        right = _same(contender.local(state if end.how == "error" else end.value), expected)
        tries.append((Ended(end.how, None, end.text, end.kind, end.is_exception), right))
        if end.how == "done" or not group_works(rank):
            break
    return tries


def _copied(x: object) -> object:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _same(some: Tree, others: Tree) -> bool:
    return all(
        torch.equal(x, others[name]) if isinstance(x, torch.Tensor) else x == others[name] for name, x in some.items()
    )


Damage = Callable[[Path, Path, random.Random, str], list[Path]]


def flip(newest: Path, _: Path, draw: random.Random, data: str) -> list[Path]:
    """A bit of any file; two times of three of the data."""
    files = sorted(newest.iterdir())
    path = draw.choice([x for x in files if is_of(x, data)] if draw.random() < 0.67 else files)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return [path]


def truncate(newest: Path, _: Path, draw: random.Random, data: str) -> list[Path]:
    """The end of a file of data."""
    path = draw.choice(sorted(x for x in newest.iterdir() if is_of(x, data)))
    os.truncate(path, draw.randrange(path.stat().st_size))
    return [path]


def take_away(newest: Path, _: Path, draw: random.Random, data: str) -> list[Path]:
    """A file of data."""
    path = draw.choice(sorted(x for x in newest.iterdir() if is_of(x, data)))
    path.unlink()
    return [path]


def exchange(newest: Path, other: Path, draw: random.Random, data: str) -> list[Path]:
    """A file of data against that of the same rank of another step."""
    new, old = (sorted((x for x in path.iterdir() if is_of(x, data)), key=_rank_of) for path in (newest, other))
    path, replaced_by = draw.choice([*zip(new, old, strict=True)])
    shutil.copyfile(replaced_by, path)
    return [path]


def is_of(path: Path, data: str) -> bool:
    """Whether a file is one of data."""
    return re.search(data, path.name) is not None


def _rank_of(path: Path) -> str:
    return path.name[-10:] if path.suffix != ".pt" else path.name


def damaged(damage: Damage) -> Callable[[Contender, int], Result]:
    """Rows 29 to 32: the worst of some draws."""

    def row(bench: Bench) -> Result:
        contender, aside = bench.contender, bench.root / "aside"
        require_saved(bench, Plan((1,)))
        shutil.copytree(contender.path(bench.folder, 1), aside)
        require_saved(bench, Plan((2,)))
        bench.folder.rename(bench.root / "whole")
        results: list[Result] = []
        for trial in range(TRIALS):
            shutil.copytree(bench.root / "whole", bench.folder)
            draw = random.Random(1000 * bench.seed + trial)
            (path,) = damage(contender.all(bench.folder)[0], aside, draw, contender.data)
            results.append(_loaded(bench, path))
            shutil.rmtree(bench.folder)
        return worst(results)

    return lambda contender, seed: in_one(row, contender, seed)


def _loaded(bench: Bench, path: Path) -> Result:
    """What loading comes to, when a file is damaged."""
    world = World(2, load_any, bench)
    ends = world.wait()
    seconds = time.monotonic() - world.began
    if hung := [end for end in ends if end.how != "done"]:
        return Result(HANG if hung[0].how == "hang" else UNCLEAR, False, seconds, shortened(hung[0]))
    of_first = [end.value[0] for end in ends]
    if any(end.how == "done" and not right for end, right in of_first):
        return Result(WRONG, False, seconds, f"loaded, with numbers that were not saved, after a change of {path.name}")
    if all(end.how == "done" for end, _ in of_first):
        return Result(OK, True, seconds)
    if not all(same for _, same in of_first):
        return Result(UNCLEAR, False, seconds, "tensors have changed when it raises")
    is_clear, why = clear([end for end, _ in of_first], [path.name.replace(".", r"\.")])
    if not is_clear:
        return Result(UNCLEAR, False, seconds, why)
    last = [end.value[-1] for end in ends]
    if all(end.how == "done" and right for end, right in last):
        return Result(OLDER, True, seconds)
    if bench.contender.overwrites:
        return Result(CLEAR, False, seconds, "and there is no older one")
    return Result(LOST, False, seconds, f"the older one does not load: {shortened(last[0][0])}")
