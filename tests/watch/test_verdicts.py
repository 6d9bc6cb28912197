"""Whether ranks can go on, from records alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shardfn.watch.records import Record
from shardfn.watch.verdicts import Question, Records, behind, report, stuck, verdict


def _record(rank: int, counts: Mapping[str, int] | None = None, **values: Any) -> Record:
    return Record(rank, f"fsdp={rank}", "host", 100 + rank, counts=dict(counts or {}), timeout=60, **values)


def _ranks(*records: Record) -> Records:
    return {record.rank: record for record in records}


def _verdict(records: Records, stands: int = 9, waited: float = 0, **states: str) -> Any:
    of_ranks = {rank: states.get(f"r{rank}", "runs") for rank in records}
    return verdict(records, dict.fromkeys(records, stands), of_ranks, dict.fromkeys(records, waited))


def test_behind() -> None:
    slow, fast = _record(0, {"a": 1, "b": 5}), _record(1, {"a": 2, "b": 5, "c": 9})
    assert behind(slow, fast)
    assert not behind(fast, slow)
    assert not behind(slow, slow)


def test_who_waits_for_one_that_runs_is_not_stuck() -> None:
    records = _ranks(
        _record(0, {"g": 3}, waits="gather"), _record(1, {"g": 2}), _record(2, {"g": 3, "h": 1}, waits="gather")
    )
    assert stuck(records) == set()
    assert _verdict(records) is None


def test_a_chain_to_one_that_runs_is_not_stuck() -> None:
    records = _ranks(_record(0, {"g": 3}, waits="x"), _record(1, {"g": 2, "h": 7}, waits="y"), _record(2, {"h": 6}))
    assert stuck(records) == set()


def test_a_collective_under_way_is_not_stuck() -> None:
    records = _ranks(_record(0, {"g": 3}, waits="gather"), _record(1, {"g": 3}, waits="gather"))
    assert stuck(records) == set()
    assert _verdict(records) is None


def test_a_circle_is_stuck() -> None:
    records = _ranks(
        _record(0, {"g": 3, "h": 1}, waits="gather"),
        _record(1, {"g": 2, "h": 2}, waits="reduce"),
        _record(2, {"g": 3}, waits="gather"),  # waits for 1
        _record(3, {"k": 1}),
    )
    assert stuck(records) == {0, 1, 2}
    text = _verdict(records)
    assert text.startswith("the run is over: ranks [0, 1, 2] wait for one another in different collectives.")
    assert text.splitlines()[1].startswith("  rank 1 (fsdp=1): waits in reduce")  # the rarest comes first


def test_nothing_is_decided_as_long_as_somebody_moves() -> None:
    records = _ranks(_record(0, {"g": 3, "h": 1}, waits="gather"), _record(1, {"g": 2, "h": 2}, waits="reduce"))
    assert _verdict(records, stands=2) is None


@pytest.mark.parametrize(
    ("values", "state", "says"),
    [
        ({"ended": "normally"}, "runs", "has ended normally"),
        ({"ended": "by ValueError: no"}, "runs", "has ended by ValueError: no"),
        ({"failed": "do step 3 by ValueError: no"}, "runs", "left do step 3 by ValueError: no"),
        ({}, "gone", "has ended without a word"),
        ({}, "stopped", "is stopped"),
        ({}, "silent", "does not answer any more"),
    ],
)
def test_who_never_comes(values: dict[str, Any], state: str, says: str) -> None:
    records = _ranks(_record(0, {"g": 3}, waits="gather"), _record(1, {"g": 2}, **values))
    assert says in _verdict(records, r1=state)
    nobody_waits = _ranks(_record(0, {"g": 3}), records[1])
    assert _verdict(nobody_waits, r1=state) is None


def test_an_error_that_all_met_in_the_same_call_is_nobodys() -> None:
    same = "do step 1 by FloatingPointError: "
    first, late = (
        _record(0, {"g": 3}, failed=f"{same}nan on rank 0"),
        _record(1, {"g": 4}, failed=f"{same}nan", waits="x"),
    )
    assert _verdict(_ranks(first, late)) is None
    text = _verdict(_ranks(first, replace(late, failed="save by OSError: no space")))
    assert "rank 0 (fsdp=0) left do step 1 by FloatingPointError" in text
    assert "left do step 1" in _verdict(_ranks(first, replace(late, failed=None)))


def test_one_that_lost_its_connection_is_not_the_cause() -> None:
    records = _ranks(
        _record(0, {"g": 3}, ended="after others, to which it lost its connection"),
        _record(1, {"g": 3}),
        _record(2, {"g": 4}, asks=True),
    )
    assert "rank 1 (fsdp=1) has ended without a word" in _verdict(records, r1="gone")


def test_journals_that_differ() -> None:
    lines = [[(1, 11, "step 0"), (2, 22, "gather a")], [(1, 11, "step 0"), (2, 33, "gather b")]]
    records = {rank: _record(rank, {"k": 2}, marks={"k": [(2, (22, 33)[rank == 1])]}) for rank in range(4)}
    question = _verdict(records, stands=0)
    assert question == Question("k", (1, 0))
    told = {rank: replace(x, entries={"k": lines[rank == 1]}) for rank, x in records.items()}
    assert "rank 1 (fsdp=1) was to gather b, and ranks like 0 to gather a" in _verdict(told, stands=0)


def test_who_left_a_call_and_went_on_is_named_for_that() -> None:
    records = {rank: _record(rank, marks={"k": [(2, rank == 2)]}, entries={"k": []}) for rank in range(3)}
    records[2].broke = "do step 3 by ValueError: no"
    assert "rank 2 (fsdp=2) left do step 3 by ValueError: no, and went on without the others" in _verdict(records)


def test_entries_of_other_times_are_not_compared() -> None:
    records = {0: _record(0, marks={"k": [(1, 11)]}), 1: _record(1, marks={"k": [(2, 22)]})}
    assert _verdict(records) is None


def test_another_collective_in_the_same_call() -> None:
    records = {
        rank: _record(rank, {"g": 7}, waits="wait", calls={"g 7": ("all_reduce" if rank == 2 else "all_gather")})
        for rank in range(4)
    }
    assert "rank 2 (fsdp=2) calls all_reduce, and ranks like 0 all_gather" in _verdict(records)


def test_one_that_does_not_come_in_time() -> None:
    records = _ranks(_record(0, {"g": 3}, waits="gather"), _record(1, {"g": 2}, at=["train.py:7 in load"]))
    assert _verdict(records, waited=59) is None
    text = _verdict(records, waited=61)
    assert "rank 1 (fsdp=1) did not come within 60 s" in text
    assert "train.py:7 in load" in text


def test_messages_are_short_and_reports_have_all() -> None:
    records = {
        rank: _record(rank, {"g": 1 + (rank > 0)}, waits="gather", last=["x"], at=[f"a.py:{rank % 20} in f"])
        for rank in range(64)
    }
    records[0] = _record(0, {"g": 1}, ended="normally")
    assert len(_verdict(records).splitlines()) <= 12
    assert all(f"a.py:{line} in f" in report(records) for line in range(20))
