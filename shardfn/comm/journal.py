"""What a process does together with others, in order: written where it is done, read by who watches (`watch`).

A journal has a line for what all ranks of a mesh do alike, and one for each axis, along which those of a group do. A
line is a count and a running hash, so that two ranks that counted as far have done the same if the hashes are equal.
There is none for a mesh that nobody watches, and writing costs a microsecond.
"""

from collections import deque
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol
from zlib import crc32

from shardfn._torch import is_of_peers
from shardfn.notation import ShardError, see

_KEPT = 4096  # entries of a line, so that the first one that differs is found
_APART, _MILESTONES, _NEWEST = 64, 32, 16  # of how many entries others hear the hashes, and of which
_MOST_TEXTS = 4096

Entry = tuple[int, int, str]  # its number, the hash of all up to it, what was done


class Line:
    """Things that were done one after the other."""

    def __init__(self) -> None:
        self.count = self._hash = 0
        self.recent: deque[Entry] = deque(maxlen=_KEPT)
        self._milestones: deque[tuple[int, int]] = deque(maxlen=_MILESTONES)

    def add(self, text: str, mark: int) -> None:
        """One more."""
        self.count += 1
        self._hash = (self._hash * 1_000_003 + mark) & 0xFFFF_FFFF_FFFF
        self.recent.append((self.count, self._hash, text))
        if self.count % _APART == 0:
            self._milestones.append((self.count, self._hash))

    def marks(self) -> list[tuple[int, int]]:
        """Hashes of entries by which two ranks that do not count in step find out whether they have done the same."""
        return [*self._milestones, *(entry[:2] for entry in [*self.recent][-_NEWEST:])]


class Watches(Protocol):
    """Who reads journals."""

    def explained(self, error: RuntimeError) -> Exception:
        """Why a communication failed."""
        ...

    def call(self, journal: "Journal", what: str) -> AbstractContextManager[None]:
        """Within it all ranks do `what`."""
        ...


class Journal:
    """Of one process on one mesh."""

    def __init__(self, keys: dict[str, str], watcher: Watches) -> None:
        """`keys`: axis -> the name that the ranks of this one's group along it have for it, and "" -> that of all."""
        self.lines = {key: Line() for key in keys.values()}
        self._of = {axis: self.lines[key] for axis, key in keys.items()}
        self._marks: dict[Hashable, tuple[str, int]] = {}
        self.watcher = watcher
        self.over: str | None = None  # why the run is
        self.last: deque[str] = deque(maxlen=4)  # what was done last
        self.heard = False  # whether somebody was told so

    def note(self, what: Hashable, axis: str = "") -> None:
        """`what` is done now; its `str` is the same on all ranks.

        Raises:
            ShardError: the run is over, since ranks have gone apart.
        """
        self.require_going_on()
        if (known := self._marks.get(what)) is None:
            if len(self._marks) >= _MOST_TEXTS:
                self._marks.clear()
            known = self._marks[what] = str(what), crc32(str(what).encode())
        self.last.append(known[0])
        self._of[axis].add(*known)

    def require_going_on(self) -> None:
        """Raise if the run is over.

        Raises:
            ShardError: it is, since ranks have gone apart.
        """
        if self.over is not None:
            self.heard = True
            raise see(ShardError(self.over), "ranks")

    def explained(self, error: RuntimeError) -> Exception:
        """Why a communication failed."""
        return self.watcher.explained(error) if is_of_peers(error) else error


_WATCH = "With sf.collectives.watch(mesh): around the loop all ranks say which one it was, where and why"
JOURNALS: dict[Any, Journal] = {}  # by mesh; empty unless somebody watches


def journal_of(mesh: Any) -> Journal | None:
    """Where to write what is done on a mesh."""
    return JOURNALS.get(mesh)


def note(mesh: Any, what: Hashable, axis: str = "") -> None:
    """All ranks of a mesh do this, or those along an axis, whether somebody watches or not."""
    if (journal := journal_of(mesh)) is not None:
        journal.note(what, axis)


def note_of_ranks(mesh: Any, what: Hashable) -> None:
    """The same for a mesh that may have the axes in another order: all of its ranks.

    In their newest journal: of older ones a rank may have some that others, whose garbage was collected, have no more.
    """
    ranks = sorted(mesh.mesh.flatten().tolist())
    for known, journal in reversed([*JOURNALS.items()]):
        if sorted(known.mesh.flatten().tolist()) == ranks:
            journal.note(what)
            return


def keep_journal(mesh: Any, journal: Journal | None) -> None:
    """From now on it is written; None: no longer."""
    JOURNALS.pop(mesh, None)
    if journal is not None:
        JOURNALS[mesh] = journal  # the newest comes last


def explained(mesh: Any, error: RuntimeError) -> Exception:
    """Why a communication over a mesh failed, if somebody watches; else the error itself, which says how to watch."""
    journal = journal_of(mesh)
    if journal is None and is_of_peers(error):
        error.add_note(f"shardfn: another rank has failed or ended. {_WATCH}")
    return error if journal is None else journal.explained(error)


def raise_explained(mesh: Any, error: RuntimeError) -> NoReturn:
    """Raise that."""
    if (why := explained(mesh, error)) is error:
        raise error
    raise why from error
