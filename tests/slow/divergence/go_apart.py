"""Runs that go apart, and slow ones that do not: what each rank says, and when.

    python tests/slow/divergence/go_apart.py                 # all ways, several at once
    python tests/slow/divergence/go_apart.py --only barrier,alone  # some
    python tests/slow/divergence/go_apart.py --healthy 60    # slow runs, whose rank 1 stands for 60 s

The status is 1 if a rank has not ended within 10 s, or with another message than the others, or if a healthy run ended
with an error.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "faults"), str(Path(__file__).parent)]

import torch
import torch._dynamo
import ways
from scripts import Exit, Scripts

import shardfn as sf

RANKS, LIMIT, MAX_LINES = 4, 10.0, 12


@dataclass(frozen=True)
class Outcome:
    """Of a run: whether it is as it has to be, and what there is to say."""

    name: str
    good: bool
    seconds: float
    says: str
    exits: list[Exit]


class Job:
    """A run that has to come to an end of some kind."""

    def __init__(self, name: str, scripts: Scripts, patience: float, victims: Sequence[int] = ()) -> None:
        self.name, self._scripts, self._patience, self._victims = name, scripts, patience, victims

    def over(self) -> bool:
        """Whether it has come."""
        return self._scripts.over(self._patience, self._victims)

    def outcome(self) -> Outcome:
        """Which it was."""
        raise NotImplementedError


class Apart(Job):
    """Every rank but a dead one ends, with an error, within 10 s, and all say the same, which names the rank."""

    def __init__(self, way: ways.Way) -> None:
        self.way = way
        victims = (ways.BAD,) if way.do in (ways.is_killed, ways.is_stopped) else ()
        scripts = Scripts(RANKS, ways.main, way.do, way.api, way.axes, ways.STEPS, 60.0)
        super().__init__(way.name, scripts, 40, victims)

    def outcome(self) -> Outcome:
        exits = self._scripts.exits()
        others = [one for rank, one in enumerate(exits) if rank not in self._victims]
        seconds = max(one.seconds for one in others)
        told = {one.verdict for one in others}
        if by_itself := any("rank 1" in text and " has ended " in text for text in told):
            told = {one.verdict for rank, one in enumerate(others) if rank != ways.BAD}  # it has its own error, or none
        ended = all(one.code is not None and (one.code != 0 or by_itself) for one in others)
        full = max((one.output for one in others), key=lambda text: text.count("\n  rank"))
        says = next(iter(told)) if len(told) == 1 else f"{len(told)} MESSAGES {told}"
        names = "rank 1 (" in says or "ranks [" in says
        good = ended and seconds <= LIMIT and len(told) == 1 and self.way.says in full and names
        return Outcome(self.name, good, seconds, says, exits)


class Healthy(Job):
    """All ranks end without an error."""

    def __init__(self, way: Callable[..., Any], seconds: float, api: str) -> None:
        axes = ways.ALONG if api == "fsdp2" else {"fsdp": 2, "tp": 2}
        slow = partial(way, seconds=seconds)
        scripts = Scripts(RANKS, ways.main, slow, api, axes, ways.AT + 5, 10 * seconds + 60)
        super().__init__(f"{way.__name__}-{api}", scripts, 3 * seconds + 60)

    def outcome(self) -> Outcome:
        exits = self._scripts.exits()
        good = all(one.code == 0 and "finished" in one.output for one in exits)
        says = next((one.verdict or one.output[-300:] for one in exits if one.code), "")
        return Outcome(self.name, good, max(one.seconds for one in exits), says, exits)


def outcomes(begin: Iterable[Callable[[], Job]], at_once: int) -> Iterator[Outcome]:
    """Of all jobs, some at a time: they wait for most of theirs."""
    left, jobs = list(begin)[::-1], list[Job]()
    while left or jobs:
        jobs += [left.pop()() for _ in range(min(len(left), at_once - len(jobs)))]
        for job in [job for job in jobs if job.over()]:
            jobs.remove(job)
            yield job.outcome()
        time.sleep(0.01)


def _is_asked(names: str, name: str) -> bool:
    return any(part in name for part in names.split(","))


def warm_up() -> None:
    """What every child would import, or find out, for itself."""
    torch.set_num_threads(1)
    with sf.simulate(fsdp=2, tp=2):
        pass


def main() -> int:
    """Run them and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--healthy", type=float, metavar="SECONDS")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--output", action="store_true", help="what ranks have printed, too")
    asked = parser.parse_args()
    warm_up()
    began = time.monotonic()
    if asked.healthy is not None:
        pairs = [(way, api) for way in ways.HEALTHY for api in ("trainer", "fsdp2")]
        chosen = [(way, api) for way, api in pairs if _is_asked(asked.only, f"{way.__name__}-{api}")]
        begin: list[Callable[[], Job]] = [partial(Healthy, way, asked.healthy, api) for way, api in chosen]
    else:
        begin = [partial(Apart, way) for way in ways.WAYS if _is_asked(asked.only, way.name)]
    good = 0
    for outcome in outcomes(begin, asked.at_once):
        good += outcome.good
        print(f"{'+' if outcome.good else '-'} {outcome.name:45} {outcome.seconds:5.1f} s  {outcome.says[:230]}")
        if asked.output:
            for rank, one in enumerate(outcome.exits):
                print(f"--- rank {rank}: {one.code}\n{one.output}")
        sys.stdout.flush()
    print(f"{good}/{len(begin)} in {time.monotonic() - began:.0f} s")
    return good != len(begin)


if __name__ == "__main__":
    sys.exit(main())
