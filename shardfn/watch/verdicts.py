"""Whether ranks can still go on together, from what all of them say of themselves. Functions of records alone.

[Note: who waits for whom]
A rank that waits in a collective waits for those that have begun fewer: of the collectives of a group, of the entries
of a journal. A rank that is behind and computes, evaluates, saves or loads comes sooner or later, and is no reason to
end anything. One that has ended, or has left the call that the others are in by an error, never comes. And ranks that
wait for one another never come either: everybody who waits is taken to be stuck, but for those that wait only for ranks
which are not stuck, over and over until nothing changes. Who is left waits in a circle.

A rank that waits, and for nobody, is in a collective that is under way, which may take its time. Unless the journals
differ, which says that it is not the same one everywhere.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardfn.watch.records import Record

Records = Mapping[int, Record]

_ADVICE = {
    "differ": "All ranks must do the same in the same order: what depends on the rank, on data or on random numbers "
    "must go the same way on all of them, and `if rank == 0:` goes around no call of shardfn.",
    "ended": "All ranks must make as many steps: give each as many batches, and let an error end all of them.",
    "failed": "An error that one rank alone meets is raised on all of them: do not catch it there.",
    "gone": "Its own output, or that of the launcher, says why: a signal, out of memory, a lost machine.",
    "late": "Raise make_mesh(timeout=...) if it was to take as long.",
}


class Question(NamedTuple):
    """Two ranks have to tell what is in a line of their journals, so that the verdict can say what differs."""

    key: str
    ranks: tuple[int, int]  # one of the few that differ, and one of the others


def behind(record: Record, other: Record) -> bool:
    """Whether a rank has begun less than another one of what both do."""
    return any(count < other.counts[key] for key, count in record.counts.items() if key in other.counts)


def stuck(records: Records) -> set[int]:
    """Ranks that wait for one another, see [Note: who waits for whom]."""
    waiting = {rank for rank, record in records.items() if record.waits is not None and record.ended is None}
    for_whom = {rank: {other for other, theirs in records.items() if behind(theirs, records[rank])} for rank in waiting}
    while free := {rank for rank in waiting if not for_whom[rank] & waiting or for_whom[rank] - waiting}:
        waiting -= free
    return waiting


def verdict(
    records: Records, stands: Mapping[int, int], states: Mapping[int, str], waited: Mapping[int, float]
) -> str | Question | None:
    """Why the run is over, if it is: the same message for all ranks, or what has to be known for it.

    Args:
        records: of all ranks that have said something.
        stands: for how many looks each has not moved.
        states: how their processes are, see `records.state_of`.
        waited: seconds for which each has waited in the collective that it is in.
    """
    if (apart := _difference(records)) is not None:
        question, few = apart
        if not all(question.key in records[rank].entries for rank in question.ranks):
            return question
        return _told("differ", *(_went_on(records) or (_first_difference(question, records), few)), records)
    waiting = {r: x for r, x in records.items() if x.ended is None and (_asks(x) or (x.waits and stands[r]))}
    lost = {rank: why for rank, record in records.items() if (why := _never_comes(record, states[rank])) is not None}
    for rank, (kind, why) in sorted(lost.items(), key=lambda each: "lost its connection" in each[1][1]):
        others = {other: x for other, x in waiting.items() if other != rank and not _left_the_same(records[rank], x)}
        if any(behind(records[rank], x) or _asks(x) for x in others.values()):
            return _told(kind, f"{records[rank].name} {why}", {rank}, records)
    circle = stuck({rank: record for rank, record in records.items() if stands[rank] >= 3 or record.waits is None})
    if circle:
        few = _minority([records[rank].waits or "" for rank in sorted(circle)], sorted(circle))
        why = f"ranks {sorted(circle)} wait for one another in different collectives"
        return _told("differ", *(_went_on(records) or (why, few)), records)
    if (crossed := _crossed({rank: record for rank, record in records.items() if stands[rank] >= 4})) is not None:
        return _told("differ", *(_went_on(records) or crossed), records)
    for rank in waiting:
        if waited[rank] >= (timeout := records[rank].timeout):
            late = {r for r, x in records.items() if x.ended is None and behind(x, records[rank])} or {rank}
            names = ", ".join(records[r].name for r in sorted(late))
            return _told("late", f"{names} did not come within {timeout:g} s", late, records)
    return None


def _asks(record: Record) -> bool:
    """Whether a rank waits to hear of the others."""
    return record.asks or record.awaits


def _left_the_same(record: Record, other: Record) -> bool:
    """Whether both have left the same call by an error, as all ranks may."""
    if record.ended is not None or record.failed is None or other.failed is None:
        return False
    return record.failed.partition(" by ")[0] == other.failed.partition(" by ")[0]


def _never_comes(record: Record, state: str) -> tuple[str, str] | None:
    """Why nobody may wait for a rank, in words after its name."""
    if record.ended is not None:
        return "ended", f"has ended {record.ended}"
    if record.failed is not None:
        return "failed", f"left {record.failed}"
    if state == "gone":
        return "gone", "has ended without a word"
    if state == "stopped":
        return "gone", "is stopped: its process does not run"
    return ("gone", "does not answer any more") if state == "silent" else None


def _went_on(records: Records) -> tuple[str, set[int]] | None:
    """Ranks that left something by an error and do something else, if not all do."""
    ranks = {rank for rank, record in records.items() if record.broke is not None}
    if not ranks or len(ranks) == len(records):
        return None
    first = records[min(ranks)]
    return f"{first.name} left {first.broke}, and went on without the others", ranks


def _difference(records: Records) -> tuple[Question, set[int]] | None:
    """The line of journals that is not alike on all ranks, and the ranks of which there are fewest."""
    for key in sorted({key for record in records.values() for key in record.marks}):
        hashes = {rank: dict(record.marks[key]) for rank, record in sorted(records.items()) if key in record.marks}
        for number in sorted(set.intersection(*map(set, hashes.values()))):
            marks = [of_rank[number] for of_rank in hashes.values()]
            if len(set(marks)) > 1:
                few = _minority(marks, [*hashes])
                return Question(key, (min(few), next(rank for rank in hashes if rank not in few))), few
    return None


def _first_difference(question: Question, records: Records) -> str:
    """What two ranks did where their journals begin to differ."""
    one, other = question.ranks
    mine, theirs = ({n: (mark, text) for n, mark, text in records[rank].entries[question.key]} for rank in (one, other))
    for number in sorted(mine.keys() & theirs.keys()):
        if mine[number] != theirs[number]:
            where = f"ranks like {other} to {theirs[number][1]}"
            if mine[number][1] != theirs[number][1]:
                return f"{records[one].name} was to {mine[number][1]}, and {where}"
            break
    return f"{records[one].name} has done something else than ranks like {other}"


def _crossed(records: Records) -> tuple[str, set[int]] | None:
    """Ranks that wait in the same call of a group, which is another collective for some."""
    for key in sorted({key for record in records.values() for key in record.calls}):
        calls = {rank: record.calls[key] for rank, record in sorted(records.items()) if key in record.calls}
        if len(set(calls.values())) > 1:
            few = _minority([*calls.values()], [*calls])
            others = next(rank for rank in calls if rank not in few)
            return f"{records[min(few)].name} calls {calls[min(few)]}, and ranks like {others} {calls[others]}", few
    return None


def _minority(values: Sequence[object], ranks: Sequence[int]) -> set[int]:
    """The ranks with the value that is rarest, the last one of several."""
    counts = Counter(values)
    rarest = min(reversed(counts), key=counts.__getitem__)
    return {rank for rank, value in zip(ranks, values, strict=True) if value == rarest}


def _told(kind: str, what: str, ranks: set[int], records: Records) -> str:
    """The message: what happened, where each rank is, what to do."""
    places: dict[str, list[int]] = {}
    for rank in sorted(records, key=lambda rank: (rank not in ranks, rank)):
        places.setdefault(_place(records[rank]), []).append(rank)
    rows = []
    for place, group in list(places.items())[:8]:
        name = records[group[0]].name if len(group) == 1 else f"ranks {', '.join(map(str, group[:16]))}"
        rows.append(f"  {name}{', ...' * (len(group) > 16)}: {place}")
    return "\n".join([f"the run is over: {what}.", *rows, _ADVICE[kind]])


def _place(record: Record) -> str:
    now = "has ended" if record.ended is not None else f"waits in {record.waits}" if record.waits else "runs"
    last = f"last: {record.last[-1]}" if record.last and record.last[-1] != record.doing else ""
    return ", ".join(filter(None, [record.doing, last, now, *(f"at {place}" for place in record.at[:1])]))


def report(records: Records) -> str:
    """Where all ranks are: what they did last, and their stacks, each once. For the log, by the one who decides."""
    stacks: dict[tuple[str, ...], list[int]] = {}
    for rank, record in sorted(records.items()):
        stacks.setdefault((", ".join(record.last), " < ".join(record.at)), []).append(rank)
    rows = [f"  ranks {ranks}: did {last or 'nothing'}; at {at or '?'}" for (last, at), ranks in stacks.items()]
    return "\n".join(["where all ranks are, innermost first:", *rows])
