"""A directory of checkpoints, what was acknowledged of it, and what a process that only loads finds in it.

Before a save the SHA-256 of each leaf of what is to be saved is noted, and again when it is acknowledged. The oracle is
a process of its own, without a group, which loads the newest checkpoint and compares.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import failpoints
import torch
import torch.distributed as dist
from libraries import ROWS, Contender, Tree, barrier, blank_tree, whole_tree
from worlds import Ended, Rank, World, in_world

OK, OLDER, CLEAR, UNCLEAR = "ok", "older acknowledged ok", "clear error", "unclear error"
WRONG, LOST, HANG, NONE, UNBUILT = "silent wrong", "lost", "hang", "n/a", "not built"
WITHOUT = (NONE, UNBUILT)  # neither survived nor not
WORST = (*WITHOUT, OK, OLDER, CLEAR, UNCLEAR, LOST, WRONG, HANG)
MAX_LINES = 12  # of an error


@dataclass(frozen=True)
class Result:
    """What became of a row: the class, whether that is what it must be, how long it took, and what there is to say."""

    outcome: str
    survived: bool
    seconds: float = 0.0
    why: str = ""


def worst(results: Sequence[Result]) -> Result:
    """The one that counts: of those that were not survived, if there are any."""
    found = max(results, key=lambda x: (not x.survived and x.outcome not in WITHOUT, WORST.index(x.outcome)))
    return Result(found.outcome, found.survived, max(x.seconds for x in results), found.why)


@dataclass
class Bench:
    """Where a row happens."""

    contender: Contender
    seed: int = 0
    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="faults-")))

    def __post_init__(self) -> None:
        self.root.chmod(0o755)
        self.folder = self.root / "run"
        self.folder.mkdir()
        (self.root / "table").touch()
        (self.root / "table").chmod(0o666)

    def note(self, what: str, step: int, hashes: dict[str, str]) -> None:
        """Write into the table that something was `tried`, or `acknowledged`."""
        line = json.dumps([what, step, hashes]) + "\n"
        descriptor = os.open(self.root / "table", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def noted(self, what: str) -> list[tuple[int, dict[str, str]]]:
        """What the table has, in order."""
        lines = (self.root / "table").read_text().splitlines()
        return [(step, hashes) for kind, step, hashes in map(json.loads, lines) if kind == what]

    def close(self) -> None:
        """Take it away."""
        shutil.rmtree(self.root, ignore_errors=True)


def hashes_of(tree: Tree) -> dict[str, str]:
    """The SHA-256 of each leaf."""
    return {name: hashlib.sha256(_bytes(x)).hexdigest() for name, x in tree.items()}


def _bytes(x: Any) -> bytes:
    return x.contiguous().numpy().tobytes() if isinstance(x, torch.Tensor) else repr(x).encode()


@dataclass(frozen=True)
class Fault:
    """At which point of which step the actor does what."""

    point: failpoints.Point | None
    step: int
    actor: int
    do: Callable[[Rank], object]


@dataclass(frozen=True)
class Plan:
    """What the ranks of a world save."""

    steps: tuple[int, ...]
    fault: Fault | None = None
    keep: int | None = None
    job: int = 0
    rows: int = ROWS


def save_steps(rank: Rank, bench: Bench, plan: Plan) -> None:
    """Save steps, acknowledge each, and take old ones away."""
    contender = bench.contender
    _watch(contender)
    for step in plan.steps:
        whole = whole_tree(step, plan.rows, plan.job)
        state, hashes = contender.pack(whole, rank.mesh), hashes_of(whole)
        if rank.rank == 0:
            bench.note("tried", step, hashes)
        barrier()
        fault = plan.fault if plan.fault and (plan.fault.step, plan.fault.actor) == (step, rank.rank) else None
        deleting = fault is not None and fault.point is not None and "removing" in fault.point.kinds
        if fault and not deleting:
            arm(rank, fault)
        contender.save(bench.folder, step, state)
        if rank.rank == 0:
            bench.note("acknowledged", step, hashes)
            if fault and deleting:
                arm(rank, fault)
            if plan.keep is not None:
                contender.prune(bench.folder, plan.keep)
        failpoints.disarm()
        barrier()  # as the next step has one: nobody is gone before the others are through


def _watch(contender: Contender) -> None:
    failpoints.watch()
    contender.watch()


def arm(rank: Rank, fault: Fault) -> None:
    """Have a fault happen on this rank."""
    assert fault.point is not None
    failpoints.arm(fault.point, lambda: fault.do(rank))


def save_world(bench: Bench, plan: Plan, ranks: int = 2) -> tuple[list[Ended], float]:
    """How its ranks have ended, and after how many seconds."""
    world = World(ranks, save_steps, bench, plan)
    ends = world.wait()
    return ends, time.monotonic() - world.began


def require_saved(bench: Bench, plan: Plan, ranks: int = 2) -> None:
    """Save without any fault."""
    for end in save_world(bench, plan, ranks)[0]:
        assert end.how == "done", f"{bench.contender.name}: {end.where or end.how}"


def newest(rank: Rank, bench: Bench, rows: int) -> dict[str, str]:
    """What the oracle finds: hashes of the leaves of the newest checkpoint, `step` as it is."""
    contender = bench.contender
    paths = contender.all(bench.folder)
    if not paths:
        return {}
    tree = contender.local(contender.load(paths[0], contender.pack(blank_tree(rows), None)))
    if "params" in tree:
        tree |= tree.pop("params")
    return hashes_of(tree) | {"at": str(tree["step"])}


def judge(bench: Bench, rows: int = ROWS) -> Result:
    """Ask the oracle."""
    (end,) = in_world(1, newest, bench, rows, group=False)
    tried, acknowledged = bench.noted("tried"), bench.noted("acknowledged")
    if end.how != "done":
        why = f"the newest does not load: {shortened(end)}"
        return Result(HANG if end.how == "hang" else LOST, False, why=why)
    if not end.value:
        return Result(LOST, False, why="nothing is there") if acknowledged else Result(OK, True)
    hashes = dict(end.value)
    step = int(hashes.pop("at"))
    if (step, hashes) not in tried:
        parts = [name for name in hashes for n, other in tried if n == step and other[name] != hashes[name]]
        return Result(WRONG, False, why=f"{', '.join(parts) or 'numbers'} of no save of step {step}")
    last = max((n for n, _ in acknowledged), default=0)
    if step < last:
        return Result(LOST, False, why=f"step {last} was acknowledged, {step} is there")
    return Result(OK if step == tried[-1][0] else OLDER, True)


def shortened(end: Ended) -> str:
    """An error in one line."""
    return re.sub(r"\s+", " ", f"{end.kind}: {end.text}")[:200]


def clear(ends: Sequence[Ended], words: Sequence[str], lines: int = MAX_LINES) -> tuple[bool, str]:
    """Whether all ranks have raised a clear error, and what is wrong with it: it has the words, and few lines.

    Ranks say the same, or that another one has failed with it; or each has a problem of its own, of the same kind.
    """
    for end in ends:
        if end.how != "error":
            return False, f"a rank has not raised but is {end.how}"
        if not end.is_exception:
            return False, f"{end.kind} is no Exception"
        if len(end.text.splitlines()) > lines:
            return False, f"{len(end.text.splitlines())} lines"
        if lacking := [word for word in words if not re.search(word, f"{end.kind}: {end.text}")]:
            return False, f"no {lacking} in {shortened(end)}"
    root = min((end.text for end in ends), key=len)
    if not all(root in end.text for end in ends) and len({end.kind for end in ends}) > 1:
        return False, f"ranks say different things: {' | '.join(map(shortened, ends))}"
    return True, ""


def caught(call: Callable[[], Any]) -> Ended:
    """What a call has come to."""
    try:
        return Ended("done", call())
    except BaseException as error:
        return Ended("error", None, str(error), type(error).__name__, isinstance(error, Exception))


def group_works(rank: Rank) -> bool:
    """Whether ranks can still talk."""
    x = torch.ones(3)
    end = caught(lambda: dist.all_reduce(x))
    return end.how == "done" and x.tolist() == [rank.ranks] * 3
