"""Rows 1 to 18, 47 and 48: ranks that are killed, in a save or in a load; two jobs that write to one path."""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import (
    HANG,
    LOST,
    NONE,
    OK,
    OLDER,
    UNBUILT,
    UNCLEAR,
    WRONG,
    Bench,
    Fault,
    Plan,
    Result,
    arm,
    clear,
    hashes_of,
    judge,
    require_saved,
    save_steps,
    save_world,
    shortened,
    worst,
)
from failpoints import Point, watch
from libraries import Contender, Shardfn, barrier, blank_tree, whole_tree
from worlds import FLAGS, Ended, Rank, World

POINTS = ("plan", "mid data", "after data", "mid manifest", "before rename", "renamed", "deleting")
BY_ITSELF = ("plan", "mid data", "after data")  # what each rank does; what comes then only the first one does


def variants(contender: Contender) -> list[Contender]:
    """The ways in which a contender saves: shardfn also over what is there."""
    return [contender, Shardfn("replace")] if contender.name == "shardfn" else [contender]


def in_each(row: Callable[[Bench], Result], contender: Contender, seed: int) -> Result:
    """The worst of all variants, each in a directory of its own."""
    return worst([in_one(row, variant, seed) for variant in variants(contender)])


def in_one(row: Callable[[Bench], Result], contender: Contender, seed: int) -> Result:
    """A row in a directory of its own."""
    bench = Bench(contender, seed)
    try:
        return row(bench)
    finally:
        bench.close()


def kill(victim: int) -> Callable[[Rank], None]:
    """What an actor does."""
    return lambda rank: rank.kill(victim)


def kill_all(rank: Rank) -> None:
    """All others, and itself."""
    for victim in {*range(rank.ranks)} - {rank.rank}:
        rank.kill(victim)
    rank.kill(rank.rank)


def after(bench: Bench, ends: list[Ended], seconds: float, again: Plan, expected: str = "killed") -> Result:
    """What is there after a kill, and after one more save, which has to go well."""
    if expected not in [end.how for end in ends]:
        raise RuntimeError(f"{bench.contender.name}: no rank was {expected}: {[*map(shortened, ends)]}")
    if hung := [end.text for end in ends if end.how == "hang"]:
        return Result(HANG, False, seconds, hung[0])
    found = judge(bench)
    if found.survived:
        if found.outcome == OLDER:
            again = Plan((bench.noted("tried")[-1][0],), job=9)  # a run that goes on comes to that step again
        once_more, _ = save_world(bench, again)
        if failed := [end for end in once_more if end.how != "done"]:
            return Result(LOST, False, seconds, f"the next save fails: {shortened(failed[0])}")
        if (then := judge(bench)).outcome != OK:
            return Result(then.outcome, False, seconds, f"after the next save: {then.why or then.outcome}")
    return Result(found.outcome, found.survived, seconds, found.why)


def killed_at(name: str, victim: int) -> Callable[[Contender, int], Result]:
    """Rows 1 to 14; before its first operation on a file is also before its file of data, whatever comes earlier."""

    def row(bench: Bench, late: bool = False) -> Result:
        contender = bench.contender
        if name == "deleting" and (contender.overwrites or contender.variant == "replace"):
            return Result(NONE, True, why="one directory: nothing is taken away")
        actor, last = victim if name in BY_ITSELF else 0, 3 if name == "deleting" else 2
        point = Point("making", contender.data) if late else contender.points[name]
        fault = Fault(point, last, actor, kill(victim))
        ends, seconds = save_world(bench, Plan(tuple(range(1, last + 1)), fault, 2 if name == "deleting" else None))
        return after(bench, ends, seconds, Plan((last + 1,)))

    def all_of(contender: Contender, seed: int) -> Result:
        rows = [row, partial(row, late=True)] if name == "plan" else [row]
        return worst([in_each(one, contender, seed) for one in rows])

    return all_of


def over_a_partial(victim: int) -> Callable[[Contender, int], Result]:
    """Rows 15 and 16: a step that all ranks died in is saved again, and a rank dies in that, or has an error."""

    def fail(_: Rank) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def row(bench: Bench, first: Point, do: Callable[[Rank], None]) -> Result:
        require_saved(bench, Plan((1,)))
        if all(end.how == "done" for end in save_world(bench, Plan((2,), Fault(first, 2, 0, kill_all)))[0]):
            return Result(NONE, True, why="nothing of that name is made")
        second = Fault(bench.contender.points["mid data"], 2, victim, do)
        ends, seconds = save_world(bench, Plan((2,), second, job=1))
        return after(bench, ends, seconds, Plan((2,), job=2), "killed" if do is not fail else "error")

    def all_of(contender: Contender, seed: int) -> Result:
        firsts = [contender.points["before rename"], *(Point("renaming", other) for other in contender.others)]
        rows = [partial(row, first=first, do=do) for first in firsts for do in (kill(victim), fail)]
        return worst([in_each(one, contender, seed) for one in rows])

    return all_of


def save_asynchronously(rank: Rank, bench: Bench, victim: int, point: str) -> None:
    """Acknowledge step 1, and die while step 2 is under way; its values change as soon as the call has returned."""
    contender = bench.contender
    save_steps(rank, bench, Plan((1,)))
    whole = whole_tree(2)
    state = contender.pack(whole, rank.mesh)
    if rank.rank == 0:
        bench.note("tried", 2, hashes_of(whole))
    barrier()
    if rank.rank == victim and point != "returned":
        arm(rank, Fault(contender.points[point], 2, victim, kill(victim)))
    handle = contender.save_async(bench.folder, 2, state)
    for x in contender.local(state).values():
        if hasattr(x, "fill_"):
            x.fill_(-9)
    if rank.rank == victim and point == "returned":
        rank.kill(victim)
    handle.wait() if hasattr(handle, "wait") else handle.result()
    if rank.rank == 0:
        bench.note("acknowledged", 2, hashes_of(whole))


def killed_asynchronous(contender: Contender, seed: int) -> Result:
    """Row 17."""
    if not contender.has_async():
        return Result(UNBUILT, False, why="save has no parameter async_")

    def of(victim: int, point: str) -> Result:
        def row(bench: Bench) -> Result:
            world = World(2, save_asynchronously, bench, victim, point)
            ends = world.wait()
            return after(bench, ends, time.monotonic() - world.began, Plan((3,)))

        return in_each(row, contender, seed)

    return worst([of(victim, point) for victim in (0, 1) for point in contender.dies_at(victim)])


def load_newest(rank: Rank, bench: Bench, victim: int) -> None:
    """Load, and die while a file is read."""
    contender = bench.contender
    watch()
    state = contender.pack(blank_tree(), rank.mesh)
    barrier()
    if rank.rank == victim:
        arm(rank, Fault(Point("reading", contender.data), 0, victim, kill(victim)))
    contender.load(contender.all(bench.folder)[0], state)


def contents(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed_loading(contender: Contender, seed: int) -> Result:
    """Row 18."""

    def of(victim: int) -> Result:
        def row(bench: Bench) -> Result:
            require_saved(bench, Plan((1, 2)))
            before = contents(bench.folder)
            world = World(2, load_newest, bench, victim)
            ends = world.wait()
            seconds = time.monotonic() - world.began
            if contents(bench.folder) != before:
                return Result(WRONG, False, seconds, "a load has changed the checkpoint")
            return after(bench, ends, seconds, Plan((3,)))

        return in_each(row, contender, seed)

    return worst([of(0), of(1)])


def two_jobs(contender: Contender, seed: int) -> Result:
    """Row 47: another job saves to the same path when one rank of this one has written its file, and one has not."""

    def row(bench: Bench) -> Result:
        def pause(rank: Rank) -> None:
            rank.board[FLAGS] = 1
            rank.board.wait_for(FLAGS + 1)

        require_saved(bench, Plan((1,)))
        point = Point("making", bench.contender.data)
        world = World(2, save_steps, bench, Plan((2,), Fault(point, 2, 1, pause)))
        if not world.board.wait_for(FLAGS):
            raise RuntimeError(f"{bench.contender.name}: the first job did not come to its pause")
        other, _ = save_world(bench, Plan((2,), job=1))
        world.board[FLAGS + 1] = 1
        ends = world.wait()
        seconds = time.monotonic() - world.began
        if "hang" in [end.how for end in [*ends, *other]]:
            return Result(HANG, False, seconds)
        found = judge(bench)
        if found.survived and not any(end.how == "done" for end in [*ends, *other]):
            return Result(LOST, False, seconds, f"neither job has saved: {shortened(ends[0])}")
        done = all(end.how == "done" for end in ends)
        is_clear, why = (True, "") if done else clear(ends, ["step-|/one", "another|already|occupied"])
        if found.survived and not is_clear:
            return Result(UNCLEAR, False, seconds, f"the first job: {why}")
        return Result(found.outcome, found.survived, seconds, found.why)

    return in_each(row, contender, seed)


def killed_before_deleting(contender: Contender, seed: int) -> Result:
    """Row 48: three partial saves are there, and a rank dies before old ones are taken away; 2 have to stay."""
    if contender.overwrites:
        return Result(NONE, True, why="one directory: nothing is taken away")

    def row(bench: Bench) -> Result:
        require_saved(bench, Plan((1, 2, 3)))
        for step in (5, 6, 7):
            save_world(bench, Plan((step,), Fault(contender.points["before rename"], step, 0, kill_all)))
        if contender.name == "shardfn":  # a copy of a checkpoint that was interrupted
            shutil.copytree(bench.folder / "step-00000003", bench.folder / "step-00000009")
            (bench.folder / "step-00000009" / "manifest.json").unlink()
        fault = Fault(Point("renaming removing", ""), 4, 0, kill(0))
        ends, seconds = save_world(bench, Plan((4,), fault, keep=2))
        found = after(bench, ends, seconds, Plan((8,), keep=2))
        left = contender.all(bench.folder)
        if found.survived and len(left) != 2:
            return Result(LOST, False, seconds, f"{len(left)} checkpoints are left, not 2: {[x.name for x in left]}")
        return found

    return in_one(row, contender, seed)
