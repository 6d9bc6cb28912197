"""Random programs give what one process gives, or are refused with what to write; and the net that says so holds."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from programs.mains import Program, program
from random_programs import BAD, differences, is_ours, line, verdict, verdicts

import shardfn as sf

EVERY_DAY = range(48)  # none of which compiles
PARTS = [range(start, start + 52) for start in range(48, 100, 52)]


def _require_right(seeds: Sequence[int]) -> None:
    found = list(verdicts(seeds))
    bad = [line(result) for result in found if result.verdict in BAD]
    assert not bad, "\n".join(bad)
    counts = Counter(result.verdict for result in found)
    valid = len(seeds) - counts["invalid"]  # of which some are so by how a machine rounds
    assert counts["equal"] > 0.6 * valid > 0.5 * len(seeds), counts  # a net that refuses everything catches nothing


def test_every_day() -> None:
    _require_right(EVERY_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_more(seeds: Sequence[int]) -> None:
    _require_right(seeds)


def test_a_difference_is_found() -> None:
    right = {"a": torch.ones(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    assert not differences({name: value.clone() for name, value in right.items()}, right)
    for name, value in {"a": torch.ones(3).double() + 1e-6, "b": torch.full([2], 1e-9).double()}.items():
        assert differences(right | {name: value}, right)
    assert differences(right | {"a": right["a"] * torch.nan}, right)
    assert differences(right | {"a": torch.ones(4).double()}, right)
    assert differences({"a": right["a"]}, right)


WRONG = """
def main(sf, mesh):
    params = sf.shard(torch.nn.Linear(4, 2).double(), mesh, sf.Policy())
    return {"w": sf.gather(params)["weight"] * (1 if mesh is None else 1 + 1e-6 * torch.distributed.get_rank())}
"""
PLAIN = """
def main(sf, mesh):
    if mesh is not None:
        raise RuntimeError("something else")
    return {"a": torch.ones([])}
"""
LATE = """
def main(sf, mesh):
    if mesh is not None and torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    return {"a": torch.ones([])}
"""


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("text", "wanted"), [(WRONG, "WRONG"), (PLAIN, "unclear"), (LATE, "hang")])
def test_verdicts(text: str, wanted: str) -> None:
    made = Program(0, "blocks", {"fsdp": 2, "tp": 1}, text)
    assert verdict(made, seconds=5).verdict == wanted


def test_a_refusal_says_what_to_write() -> None:
    assert is_ours(sf.ShardError("apply: no. Use sf.jvp"))
    assert not is_ours(sf.ShardError("apply: it is so"))
    assert not is_ours(RuntimeError("use another one"))


def test_the_same_seed_is_the_same_program() -> None:
    assert program(123) == program(123)
    assert program(123).text != program(139).text
