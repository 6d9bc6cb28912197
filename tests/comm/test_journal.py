"""What is written down of what ranks do."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfn as sf
from shardfn.comm.journal import JOURNALS, Journal, Line, journal_of, keep_journal, note, note_of_ranks
from shardfn.testing import RankError, run


class _Watcher:
    def explained(self, error: RuntimeError) -> Exception:
        return sf.ShardError("rank 1 has ended")

    def call(self, journal: Journal, what: str) -> Any:
        raise NotImplementedError


def _journal() -> Journal:
    return Journal({"tp": "line of tp", "": "line of all"}, _Watcher())


def test_lines_that_did_the_same_have_the_same_hash() -> None:
    first, second = _journal(), _journal()
    for journal in (first, second):
        journal.note("gather a")
        journal.note("gather b")
        journal.note("psum", "tp")
    assert first.lines["line of all"].marks() == second.lines["line of all"].marks()
    assert first.lines["line of tp"].count == 1
    first.note("gather c")
    second.note("gather d")
    assert first.lines["line of all"].marks()[:2] == second.lines["line of all"].marks()[:2]
    assert first.lines["line of all"].marks()[2] != second.lines["line of all"].marks()[2]


def test_order_counts() -> None:
    first, second = _journal(), _journal()
    for journal, order in ((first, "ab"), (second, "ba")):
        for name in order:
            journal.note(f"gather {name}")
    assert first.lines["line of all"].marks()[-1] != second.lines["line of all"].marks()[-1]


def test_marks_reach_back() -> None:
    line = Line()
    for number in range(10_000):
        line.add("x", number)
    numbers = [number for number, _ in line.marks()]
    assert len(numbers) < 64
    assert numbers[0] <= 10_000 - 1500
    assert numbers[-1] == 10_000


def test_nobody_goes_on_when_the_run_is_over() -> None:
    journal = _journal()
    journal.note("a")
    journal.over = "the run is over"
    assert not journal.heard
    with pytest.raises(sf.ShardError, match="the run is over"):
        journal.note("b")
    assert journal.heard
    assert journal.lines["line of all"].count == 1


def test_errors_of_peers_are_explained_and_no_others() -> None:
    journal = _journal()
    mine = RuntimeError("shapes do not fit")
    assert journal.explained(mine) is mine
    assert str(journal.explained(RuntimeError("Connection reset by peer"))) == "rank 1 has ended"


def test_a_mesh_without_a_journal() -> None:
    mesh = sf.make_mesh("cpu", fsdp=1)
    note(mesh, "nothing")
    assert journal_of(mesh) is None
    journal = _journal()
    keep_journal(mesh, journal)
    note(mesh, "gather")
    note_of_ranks(mesh, "step")
    assert list(journal.last) == ["gather", "step"]
    keep_journal(mesh, None)
    assert mesh not in JOURNALS


def test_steps_of_ranks_go_into_their_newest_journal() -> None:
    """Of two meshes of the same ranks that somebody watches; each may be watched anew."""
    first, other = (sf.make_mesh("cpu", **axes) for axes in ({"fsdp": 1}, {"fsdp": 1, "tp": 1}))
    journals = [_journal() for _ in range(3)]
    for mesh, journal in zip((first, other, first), journals, strict=True):
        keep_journal(mesh, journal)
        note_of_ranks(other, "step")
    keep_journal(first, None)
    note_of_ranks(first, "another step")
    keep_journal(other, None)
    assert [[*journal.last] for journal in journals] == [["step"], ["step", "another step"], ["step"]]


def _fails_on_one_rank(kind: str) -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params = sf.shard(model, mesh, sf.Policy())
    if dist.get_rank() == 1:
        raise ArithmeticError
    if kind == "step":
        sf.grad(lambda p: sf.apply(model, p, torch.ones(2, 4)).sum())(params)
    else:
        sf.collectives.psum(torch.ones(2), mesh, "fsdp")


@pytest.mark.parametrize("kind", ["step", "psum"])
def test_who_waits_for_a_rank_that_failed_learns_how_to_find_out_which(kind: str) -> None:
    with pytest.raises(RankError, match=r"another rank has failed or ended. With sf\.collectives\.watch\(mesh\)"):
        run(_fails_on_one_rank, kind, ranks=2)
