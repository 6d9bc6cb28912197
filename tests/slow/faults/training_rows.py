"""Rows of training runs: ranks that die, stop or go apart, signals, launchers that end. Of shardfn alone.

Those under the launcher run `tests/run/train.py`, as tests/run/test_run.py does.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / "helpers"), str(Path(__file__).parents[1] / "divergence")]

import go_apart
import ways
from bench import CLEAR, HANG, LOST, NONE, OK, UNCLEAR, WRONG, Result
from launched import Launched, Log, until
from libraries import Contender

TRAIN, STEPS = Path(__file__).parents[2] / "run" / "train.py", 60
Row = Callable[[Contender, int], Result]


def of_shardfn(run: Callable[[Path], Result]) -> Row:
    """A row that has a run of shardfn, in a directory of its own; the others have none."""

    def row(contender: Contender, seed: int) -> Result:
        if contender.name != "shardfn":
            return Result(NONE, False)
        with tempfile.TemporaryDirectory(prefix="faults-run-") as folder:
            began = time.monotonic()
            result = run(Path(folder))
            return Result(result.outcome, result.survived, result.seconds or time.monotonic() - began, result.why)

    return row


def apart(seconds: float, *names: str) -> Row:
    """Every way with such a name ends all ranks within so many seconds, with one error that names the rank."""

    def run(folder: Path) -> Result:
        chosen = [way for way in ways.WAYS if way.do.__name__ in names]
        jobs = [lambda way=way: go_apart.Apart(way) for way in chosen]
        outcomes = [*go_apart.outcomes(jobs, at_once=2)]
        bad = next((x for x in outcomes if not x.good or x.seconds > seconds), outcomes[0])
        good = bad.good and bad.seconds <= seconds
        return Result(CLEAR if good else UNCLEAR, good, max(x.seconds for x in outcomes), bad.says[:200])

    return of_shardfn(run)


def _begun(folder: Path, *deaths: str, restarts: int = 0) -> tuple[Launched, Log]:
    script = [str(TRAIN), str(folder / "run"), str(STEPS), *deaths]
    launched = Launched("--nproc-per-node", "2", "--max-restarts", str(restarts), *script, PAUSE="0.1")
    return launched, Log(folder / "run")


def terminated(whom: str, times: int = 1) -> Row:
    """SIGTERM to the launcher or a rank, perhaps again at once: one checkpoint, status 75, and a run that goes on."""

    def run(folder: Path) -> Result:
        launched, log = _begun(folder)
        until(lambda: log.step >= 12)
        for _ in range(times):
            os.kill(launched.process.pid if whom == "launcher" else launched.ranks()[-1], signal.SIGTERM)
            time.sleep(0.2)
        began = time.monotonic()
        code, output = launched.end()
        seconds, stopped = time.monotonic() - began, log.step
        newest = max((folder / "run").iterdir()).name
        if code != 75 or newest != f"step-{stopped:08}":
            return Result(LOST, False, seconds, f"status {code}, {newest} after step {stopped}: {output[-200:]}")
        return _goes_on(folder, log, seconds, stopped)

    return of_shardfn(run)


def _goes_on(folder: Path, log: Log, seconds: float, since: int) -> Result:
    again, _ = _begun(folder)
    code, output = again.end()
    undisturbed = folder / "other"
    undisturbed.mkdir()
    other, log_of_other = _begun(undisturbed)
    other.end()
    if code != 0:
        return Result(UNCLEAR, False, seconds, output[-200:])
    same = log.losses == log_of_other.losses
    return Result(OK if same else WRONG, same, seconds, f"ended after step {since}, and went on from there")


def without_launcher(folder: Path) -> Result:
    """SIGKILL of the launcher: no rank is left after 5 s."""
    launched, log = _begun(folder)
    until(lambda: log.step >= 5)
    ranks, began = launched.ranks(), time.monotonic()
    launched.process.kill()
    while time.monotonic() < began + 5 and any(Path(f"/proc/{rank}").exists() for rank in ranks):
        time.sleep(0.02)
    left = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    launched.end()
    return Result(HANG if left else OK, not left, time.monotonic() - began, f"{len(ranks)} ranks, {len(left)} left")


def three_deaths(folder: Path) -> Result:
    """Of a rank, with restarts: the losses are those of a run that nobody disturbs, to the bit."""
    launched, log = _begun(folder, "15", "25", "45", restarts=3)
    code, output = launched.end(150)
    undisturbed = folder / "other"
    undisturbed.mkdir()
    other, log_of_other = _begun(undisturbed)
    other.end()
    same = code == 0 and log.losses == log_of_other.losses
    why = f"at most {log.longest_pause:.1f} s between two steps" if same else output[-200:]
    return Result(OK if same else WRONG, same and log.longest_pause < 30, log.longest_pause, why)


ROWS: dict[int, tuple[str, Row]] = {
    19: ("killed in a step", apart(10, "is_killed")),
    20: ("stopped", apart(20, "is_stopped")),
    21: ("SIGTERM to the launcher", terminated("launcher")),
    22: ("SIGTERM to one rank", terminated("rank")),
    23: ("SIGTERM again, in that save", terminated("rank", times=3)),
    24: ("launcher killed", of_shardfn(without_launcher)),
    25: ("three deaths, with restarts", of_shardfn(three_deaths)),
    38: ("another batch on a rank of tp", apart(10, "has_another_batch", "skips_a_sample")),
    39: ("another step, path, collective", apart(10, "leaves_a_step_out", "leaves_a_unit_out", "adds_up_alone")),
    40: ("a gradient that is not finite", apart(10, "has_a_nan")),
}
