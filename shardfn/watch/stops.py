"""A run that was asked to end by a signal ends on all ranks after the same call, with a checkpoint if it makes one.

[Note: after which call]
A signal reaches ranks at different times, or one of them alone. The rank that decides says after which call all end, a
little later than where they are; each says whether that is still ahead of it, and who comes there waits to hear whether
it was of all. If not, a later one is said. So a step costs nothing as long as no signal came.
"""

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any


class Stopped(SystemExit):
    """The run was asked to end by SIGTERM, and has saved; the status of the process is 75."""

    STATUS = 75  # try again later, as sysexits.h has it

    def __init__(self) -> None:
        super().__init__(self.STATUS)


class Signal:
    """Whether SIGTERM has come to this process."""

    def __init__(self) -> None:
        self.came = False
        self._ours: list[Any] = []  # functions that handle it

    def listen(self) -> None:
        """From now on it only sets `came`, besides what it did before if that was somebody's function.

        Called again, it goes before a function that has taken its place.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        before: Any = signal.getsignal(signal.SIGTERM)
        if before in self._ours or (self._ours and not callable(before)):
            return

        def note(number: int, frame: Any) -> None:
            self.came = True
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, note)
        if not self._ours:
            default = signal.SIG_DFL if before is None else before
            # What this process forks ends as before: multiprocessing sends SIGTERM to its own, and waits for them.
            os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, default))
        self._ours.append(note)


TERMINATED = Signal()


class Appointment:
    """Of one rank: how many calls it has made, and after how many all end."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: int | None = None  # what was said, if it is ahead
        self.answered = 0  # the number of calls that was answered last: minus it when it is not ahead
        self.agreed: int | None = None

    def hear(self, at: int, agreed: bool) -> None:
        """All may end after so many calls, or will."""
        self.agreed = at if agreed else None
        if at != abs(self.answered):
            self.at = at  # before the calls are looked at: who makes one now looks at this
            if self.calls >= at:
                self.at = None
            self.answered = at if self.at is not None else -at

    def is_now(self) -> bool:
        """Whether all may end here, which remains to be heard."""
        self.calls += 1
        return self.at is not None and self.calls == self.at


def next_appointment(
    calls: Mapping[int, int], before: Mapping[int, int], answers: Mapping[int, int], said: int
) -> tuple[int, bool]:
    """After how many calls all end, and whether that is agreed.

    Args:
        calls: how many each rank has made.
        before: and had made one look before.
        answers: what each has said of `said`.
        said: what was said last; 0: nothing.
    """
    if said and all(answer == said for answer in answers.values()):
        return said, True
    if said and not any(answer == -said for answer in answers.values()):
        return said, False
    pace = max(count - before.get(rank, count) for rank, count in calls.items())
    return max(max(calls.values()) + 1 + 3 * pace, said + 1), False
