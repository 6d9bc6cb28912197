"""All ranks end after the same call, whenever each hears of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shardfn.watch.stops import Appointment, Signal, next_appointment

RANKS = 3


class _World:
    """Ranks in lockstep but for a call, each of which looks at times of its own; rank 0 decides."""

    def __init__(self) -> None:
        self.ranks = [Appointment() for _ in range(RANKS)]
        self.waiting = [False] * RANKS  # at the end of a call
        self.ended: dict[int, int] = {}
        self.said, self.before = (0, False), dict[int, int]()

    def call(self, rank: int) -> None:
        """A rank makes a call, unless it waits to hear, or others are behind."""
        mine = self.ranks[rank]
        if rank in self.ended or self.waiting[rank] or mine.calls > min(each.calls for each in self.ranks):
            return
        self.waiting[rank] = mine.is_now()

    def look(self, rank: int) -> None:
        """A rank looks: the first one decides, all hear."""
        if rank == 0:
            calls = {i: each.calls for i, each in enumerate(self.ranks)}
            answers = {i: each.answered for i, each in enumerate(self.ranks)}
            self.said = next_appointment(calls, self.before, answers, self.said[0])
            self.before = calls
        if self.said[0]:
            self.ranks[rank].hear(*self.said)
        mine = self.ranks[rank]
        if self.waiting[rank] and mine.agreed == mine.calls:
            self.ended[rank] = mine.calls
        elif self.waiting[rank] and mine.at != mine.calls:
            self.waiting[rank] = False


@given(st.lists(st.tuples(st.booleans(), st.integers(0, RANKS - 1)), max_size=60))
def test_all_end_after_the_same_call(events: list[tuple[bool, int]]) -> None:
    world = _World()
    for looks, rank in events:
        (world.look if looks else world.call)(rank)
    for _ in range(200):  # now everybody goes on
        for rank in range(RANKS):
            world.call(rank)
        for rank in range(RANKS):
            world.look(rank)
    assert len(world.ended) == RANKS
    assert len(set(world.ended.values())) == 1


def test_what_is_not_ahead_is_refused() -> None:
    mine = Appointment()
    for _ in range(5):
        assert not mine.is_now()
    mine.hear(5, False)
    assert mine.answered == -5
    mine.hear(6, False)
    assert mine.answered == 6
    assert mine.is_now()
    assert mine.agreed is None
    mine.hear(6, True)
    assert mine.agreed == 6


def test_who_makes_many_calls_between_two_looks_gets_more_time() -> None:
    assert next_appointment({0: 100}, {0: 100}, {0: 0}, 0) == (101, False)
    assert next_appointment({0: 100}, {0: 60}, {0: 0}, 0) == (221, False)
    assert next_appointment({0: 100}, {0: 60}, {0: 120}, 120) == (120, True)
    assert next_appointment({0: 100}, {0: 100}, {0: -120}, 120) == (
        121,
        False,
    )  # one that was refused is not said again
    assert next_appointment({0: 100, 1: 100}, {}, {0: 120, 1: 0}, 120) == (120, False)


_FORKS = """
import multiprocessing, time
import shardfn as sf
sf.collectives.asked_to_stop(sf.make_mesh("cpu", fsdp=1))
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=True)
child.start()
print("the end", flush=True)
"""


def test_processes_that_were_forked_end_by_sigterm() -> None:
    """As multiprocessing ends those that are daemons, and waits for them."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", _FORKS], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the end\n")


def test_a_function_that_takes_the_place_of_ours_is_called_besides() -> None:
    outer, heard, called = signal.getsignal(signal.SIGTERM), Signal(), list[str]()
    try:
        signal.signal(signal.SIGTERM, lambda *_: called.append("before"))
        heard.listen()
        signal.signal(signal.SIGTERM, lambda *_: called.append("after"))
        signal.raise_signal(signal.SIGTERM)
        assert called == ["after"] and not heard.came
        for _ in range(2):  # at the next steps
            heard.listen()
        signal.raise_signal(signal.SIGTERM)
        assert called == ["after", "after"] and heard.came
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which somebody means
        heard.listen()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, outer)
