"""Jobs that save into one directory, are killed, stop and go on, and prune; a model says what must be there."""

import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from drawing import EXAMPLES, PROPERTY
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import shardfn as sf
from shardfn.checkpoint import directories

SHARE, LENGTH = 0.1, 12  # of the usual number of examples; steps of each
STEPS, LATE = st.integers(1, 3), 24  # a save is over before so many operations on files
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir")
WENT_WELL, REFUSED, NO_FILE, BROKE = 0, 3, 4, 5  # how a job ends


def tree_of(number: int) -> dict[str, Any]:
    """All of whose numbers are the same."""
    return {"x": torch.full((4,), number), "y": [torch.full((2, 3), float(number))], "n": number}


def number_in(path: Path) -> int:
    """What all numbers of a checkpoint are."""
    sf.checkpoint.verify(path)
    read = sf.checkpoint.load(path, tree_of(0))
    found = {int(x) for leaf in (read["x"], read["y"][0]) for x in leaf.flatten().tolist()} | {read["n"]}
    assert len(found) == 1, f"torn: {found}"
    return found.pop()


@dataclass
class Job:
    """A process that saves, and has been stopped meanwhile; `was` is what was there, and `touched` if others came."""

    pid: int
    step: int
    number: int
    may_save: bool
    touched: bool = False
    committed: bool = False


class Directory(RuleBasedStateMachine):
    """`there` is the model: the number of the finished checkpoint of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.there: dict[int, int] = {}
        self.last = 0
        self.jobs: list[Job] = []

    def path(self, step: int) -> Path:
        return self.folder / directories.STEP.format(step)

    def said(self) -> str:
        """What the last job said that did not go well."""
        return (self.folder.parent / f"{self.folder.name}-said").read_text()

    def begin(self, call: Callable[[], object], after: int, with_signal: int) -> int:
        """A process that calls, and sends itself a signal before one of its operations on files."""
        pid = os.fork()
        if pid == 0:
            self._call_and_end(call, after, with_signal)
        return pid

    def _call_and_end(self, call: Callable[[], object], after: int, with_signal: int) -> NoReturn:
        code = BROKE
        try:
            _count_operations(self.folder, after, with_signal)
            call()
            code = WENT_WELL
        except (sf.ShardError, OSError) as error:
            code = REFUSED if isinstance(error, sf.ShardError) else NO_FILE
            (self.folder.parent / f"{self.folder.name}-said").write_text(repr(error))
        except BaseException as error:
            (self.folder.parent / f"{self.folder.name}-said").write_text(repr(error))
        finally:
            os._exit(code)

    def saving(self, step: int, overwrite: bool) -> tuple[int, bool, Callable[[], object]]:
        """(its number, whether it may save, a save)."""
        self.last += 1
        number = self.last
        path, may_save = self.path(step), overwrite or step not in self.there
        return number, may_save, lambda: sf.checkpoint.save(path, tree_of(number), overwrite=overwrite)

    def touch(self, step: int) -> None:
        for job in self.jobs:
            job.touched |= job.step == step

    # What happens

    @rule(step=STEPS, overwrite=st.booleans())
    def save(self, step: int, overwrite: bool) -> None:
        number, may_save, call = self.saving(step, overwrite)
        if may_save:
            call()
            self.there[step] = number
            self.touch(step)
            self.require_tidy(step)
        else:
            with pytest.raises(sf.ShardError, match="is there already"):
                call()

    @rule(step=STEPS, overwrite=st.booleans(), after=st.integers(0, LATE))
    def save_and_die(self, step: int, overwrite: bool, after: int) -> None:
        number, may_save, call = self.saving(step, overwrite)
        _, status = os.waitpid(self.begin(call, after, signal.SIGKILL), 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (-signal.SIGKILL, WENT_WELL if may_save else REFUSED), (code, self.said())
        self.look(step, number if may_save else None, must=may_save and code == WENT_WELL)

    @precondition(lambda self: len(self.jobs) < 2)
    @rule(step=STEPS, overwrite=st.booleans(), after=st.integers(0, LATE))
    def save_and_stop(self, step: int, overwrite: bool, after: int) -> None:
        number, may_save, call = self.saving(step, overwrite)
        pid = self.begin(call, after, signal.SIGSTOP)
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == (WENT_WELL if may_save else REFUSED), self.said()
            self.look(step, number if may_save else None, must=may_save)
            return
        committed = self.look(step, number if may_save else None, must=False)
        self.jobs.append(Job(pid, step, number, may_save, committed=committed))

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 1), dies=st.booleans())
    def go_on(self, which: int, dies: bool) -> None:
        job = self.jobs.pop(which % len(self.jobs))
        os.kill(job.pid, signal.SIGKILL if dies else signal.SIGCONT)
        code = os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])
        if dies or job.committed:
            assert code in (-signal.SIGKILL, WENT_WELL), (code, self.said())
            return
        allowed = (WENT_WELL, REFUSED, NO_FILE) if job.touched else (WENT_WELL if job.may_save else REFUSED,)
        assert code in allowed, (code, self.said())
        if code == WENT_WELL:
            self.there[job.step] = job.number
            self.touch(job.step)

    @rule(keep=st.integers(1, 3), every=st.none() | st.integers(1, 3))
    def prune(self, keep: int, every: int | None) -> None:
        directories.prune(self.folder, 3, keep, every)
        for step in self.pruned(keep, every):
            del self.there[step]
            self.touch(step)

    @rule(keep=st.integers(1, 3), every=st.none() | st.integers(1, 3), after=st.integers(0, LATE))
    def prune_and_die(self, keep: int, every: int | None, after: int) -> None:
        os.waitpid(self.begin(lambda: directories.prune(self.folder, 3, keep, every), after, signal.SIGKILL), 0)
        for step in self.pruned(keep, every):
            if not self.path(step).exists():
                del self.there[step]
                self.touch(step)

    def pruned(self, keep: int, every: int | None) -> list[int]:
        return [step for step in sorted(self.there)[:-keep] if every is None or step % every]

    # What must be there

    def look(self, step: int, number: int | None, must: bool) -> bool:
        """Whether a save that may have ended anywhere has made its checkpoint, which it must have if it says so."""
        path = self.path(step)
        is_new = number is not None and directories.is_checkpoint(path) and number_in(path) == number
        assert is_new or not must
        if is_new and number is not None:
            self.there[step] = number
            self.touch(step)
        return is_new

    def require_tidy(self, step: int) -> None:
        """After a save nothing is left of the dead, in the directory or in the checkpoint that was replaced."""
        left = [x.name for x in self.folder.iterdir() if not x.name.startswith("step-")]
        alive = [str(job.pid) for job in self.jobs]
        assert all(name.split(".")[-2] in alive for name in left), (left, alive)
        if not self.jobs:
            names = {x.name for x in self.path(step).iterdir()}
            assert len(names) == 3 and {"manifest.json", ".metadata"} < names, names

    @invariant()
    def what_is_there_is_whole(self) -> None:
        assert {int(path.name[5:]) for path in directories.steps(self.folder)} == set(self.there)
        newest = sf.checkpoint.latest(self.folder)
        assert newest == (self.path(max(self.there)) if self.there else None)
        for step, number in self.there.items():
            assert number_in(self.path(step)) == number

    def teardown(self) -> None:
        for job in self.jobs:
            os.kill(job.pid, signal.SIGKILL)
            os.waitpid(job.pid, 0)
        shutil.rmtree(self.folder)
        (self.folder.parent / f"{self.folder.name}-said").unlink(missing_ok=True)
        EXAMPLES["ran"] += 1


def _count_operations(below: Path, after: int, with_signal: int) -> None:
    """From now on this process counts its operations on files below a directory, and gets a signal before one."""
    left = [after]

    def count(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS and args and str(below) in str(args[0]):
            left[0] -= 1
            if left[0] == -1:
                os.kill(os.getpid(), with_signal)

    sys.addaudithook(count)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("between", ["save", "prune", "both"])
def test_a_save_that_stops_anywhere_while_others_replace_or_remove_its_checkpoint(between: str) -> None:
    """It goes on and is the last, or refuses; what is there is whole, and the next save leaves nothing else."""
    stopped = 0
    for after in range(LATE):
        jobs = Directory()
        for step in (1, 2):
            jobs.save(step=step, overwrite=False)
        jobs.save_and_stop(step=1, overwrite=True, after=after)
        stopped += len(jobs.jobs)
        if between in ("prune", "both"):
            jobs.prune(keep=1, every=None)
        if between in ("save", "both"):
            jobs.save(step=1, overwrite=True)
        if jobs.jobs:
            jobs.go_on(which=0, dies=False)
        jobs.what_is_there_is_whole()
        jobs.save(step=1, overwrite=True)
        jobs.what_is_there_is_whole()
        jobs.teardown()
    assert stopped > 10


@pytest.mark.law("P10")
def test_jobs_in_one_directory() -> None:
    examples = max(1, int(SHARE * settings().max_examples))
    several = settings(PROPERTY, max_examples=examples, stateful_step_count=LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork, where another test has begun a thread
        run_state_machine_as_test(Directory, settings=several)
