"""One thread of each rank that tells the others where it is, and ends the run when ranks have gone apart.

[Note: how ranks watch one another]
Twice a second the thread writes a `Record` of its process into the key-value store of the process group, and reads
whether there is a verdict. The first rank reads the records of all and decides (`verdicts`); when it has ended, the
next one does. No collective is involved, so that nothing waits for a rank that has stopped, and a step costs nothing
but the entries of the journal. With a verdict every rank closes its connections: whoever waits in a collective gets an
error, whoever computes gets it with the next entry of the journal, and who does neither is interrupted, at last ended.
"""

import atexit
import json
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from time import monotonic, sleep
from types import TracebackType
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn import _torch
from shardfn._torch import is_of_peers
from shardfn.comm import Journal, Line, exchange_numbers, journal_of, keep_journal
from shardfn.layout import axes_of
from shardfn.notation import ShardError
from shardfn.watch import records, verdicts
from shardfn.watch.records import Record
from shardfn.watch.stops import TERMINATED, Appointment, next_appointment

_INTERVAL = 0.5  # seconds between two looks, on few ranks
_MANY = 512  # ranks, on which they are twice as far apart
_SUCCESSION = 6  # looks at the same sign of life of the one who decides, until the next one does
# Looks without a sign of life of a rank, until its process is looked for, until one that is stopped is given up, and
# until one on another host is.
_QUIET = 2, 10, 120
_LONG = 20  # looks at which a rank has not moved, until its calls are read though it does not wait
_PATIENCE = 6.0  # seconds that an error of a communication waits for the verdict
_NOTICE = 2.0  # seconds after a verdict until a rank is interrupted, and from then until it is ended
_REMEMBERED = 100  # calls after one that was left by an error, until that is forgotten
_FAREWELL = 12  # half intervals that a rank which ends by an error stays for those that wait for it
EXIT_CODE = 70  # of a rank that had to be ended
_MARGIN = 0.9  # of the timeout of a group: ours is said before theirs


class Watcher:
    """Of the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """All ranks of the mesh make theirs at the same point."""
        self.ranks = sorted(map(int, mesh.mesh.flatten()))
        (number,), *_ = exchange_numbers(mesh, [secrets.randbits(62)])
        under: Any = dist.__dict__["PrefixStore"]
        self._store = under(f"shardfn/watch/{number}", _torch.other_client(_torch.default_store()))
        self._store.set_timeout(timedelta(seconds=5))
        self._world, self._trains = dist.group.WORLD, threading.get_ident()  # the thread that does
        self.record = Record(dist.get_rank(), "", records.this_host(), os.getpid())
        self.journals: dict[DeviceMesh, Journal] = {}
        self._owners = self._eras = 0  # for whom it ends a run; how many there ever were
        self._still = 0  # looks at which it had not moved
        self._messages = dict[str, int]()  # how many calls of a group were messages, which are not alike on all ranks
        self._calls = -1, dict[str, str]()  # where it was when its last calls were read, and these
        self.verdict: str | None = None
        self._inside = 0  # calls
        self._since_broken = 0  # calls
        self._without_store = self._late = False  # the store has gone, or has not answered in time
        self._known: dict[int, Record] = {}
        self._stands: dict[int, int] = {}  # rank -> for how many looks it has not moved
        self._silent: dict[int, int] = {}  # rank -> for how many looks it has not said anything
        self._since: dict[int, float] = {}  # rank -> since when it waits in the same collective
        self.appointment = Appointment()
        self._steps, self._stops = dict[int, int](), (0, False)  # calls one look before
        self._leader = ("", 0)  # what the one who decides said last, and for how many looks
        self._stop = threading.Event()
        self._tell()  # so that it is known of a rank that ends at once
        self._thread = threading.Thread(target=self._run, name="shardfn watcher", daemon=True)
        self._thread.start()

    @property
    def is_of_now(self) -> bool:
        """Whether the process groups are those that it was made for."""
        return self._world is dist.group.WORLD

    def begin(self, owner: object, mesh: DeviceMesh) -> Journal:
        """A new journal of a mesh, as long as there is an owner."""
        self._owners, self._eras = self._owners + 1, self._eras + 1
        weakref.finalize(owner, self._forget).atexit = False
        places = {axis: mesh.get_local_rank(axis) for axis in axes_of(mesh)}
        of_mesh = f"{self._eras} {crc32(repr((axes_of(mesh), mesh.mesh.tolist())).encode())}"
        keys = {axis: f"{of_mesh} {axis} {places | {axis: None}}" for axis in places}
        self.journals[mesh] = journal = Journal(keys | {"": of_mesh}, self)
        keep_journal(mesh, journal)
        return journal

    def _forget(self) -> None:
        """An owner is gone, when its garbage was collected; the last one's journals go with it."""
        self._owners -= 1
        if not self._owners:
            for mesh, journal in list(self.journals.items()):
                if journal_of(mesh) is journal:  # and not that of a later watcher on an equal mesh
                    keep_journal(mesh, None)
            self.journals.clear()

    # -- the main thread ----------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, journal: Journal, what: str) -> Iterator[None]:
        """Within it, all ranks do `what`; one that leaves it by an error does not come back.

        Raises:
            ShardError: why the run is over, where a communication failed for that.
        """
        self.record.doing, self.record.asks = what, False
        journal.note(what)
        self._inside += 1
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError) and is_of_peers(error):
                if (why := self.explained(error)) is not error:
                    raise why from error
            self.record.broke, self._since_broken = f"{what} by {records.described(error)}", 0
            raise
        finally:
            self._inside -= 1
        self.record.doing, self._since_broken = f"after {what}", self._since_broken + 1
        if self._since_broken > _REMEMBERED:
            self.record.broke = None

    def explained(self, error: RuntimeError) -> Exception:
        """Why a communication failed: the verdict, which may take a moment."""
        self.record.asks = True
        self._until(lambda: self.verdict is not None or not self._thread.is_alive(), _PATIENCE)
        if self.verdict is None and not self._without_store:
            return error
        for journal in self.journals.values():
            journal.heard = True
        return ShardError(self.verdict or _NO_STORE)

    def ends_here(self) -> bool:
        """Whether all ranks end after this call, since a signal came to one."""
        appointment = self.appointment
        if not appointment.is_now():
            return False
        here = appointment.calls
        self.record.awaits = True  # a rank that has ended, or has left a call by an error, does not answer any more
        try:
            while appointment.at == here and appointment.agreed != here and self._thread.is_alive():
                for journal in self.journals.values():
                    journal.require_going_on()
                sleep(_INTERVAL / 20)
        finally:
            self.record.awaits = False
        return appointment.agreed == here

    def ends(self) -> None:
        """The process ends: the others hear of it, and after an error of who waits for it."""
        if os.getpid() != self.record.process:  # a child, which shares the connection
            return
        self.record.ended = self.record.ended or "normally"
        self._stop.set()
        self._thread.join(20 * _INTERVAL)
        if self.verdict is not None and self.record.rank == 0:  # whose process may have the store
            with suppress(RuntimeError, dist.DistError):
                gone = sum(self._state_of(rank) in ("gone", "stopped") for rank in self._known)
                self._until(lambda: self._store.add("heard", 0) >= len(self.ranks) - gone, _NOTICE)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        seconds = _INTERVAL * (1 + len(self.ranks) / _MANY)
        while not self._stop.wait(seconds) and dist.is_initialized() and self.is_of_now:
            if not self._look():
                return
            if self.verdict is not None:
                self._end()
                return
        self.record.ended = self.record.ended or "normally"
        looks = 1 + _FAREWELL * (self.record.ended != "normally")
        while self._look() and self.verdict is None and (self._late or (looks > 1 and self._is_missed())):
            looks -= 1
            sleep(_INTERVAL / 2)

    def _is_missed(self) -> bool:
        """Whether somebody may wait for this rank."""
        return any(record.ended is None for rank, record in self._known.items() if rank != self.record.rank)

    def _look(self) -> bool:
        """Tell and hear; whether the store is still there."""
        try:
            self._tell()
            self._hear()
            self._late = False
        except dist.DistStoreError:  # it takes its time
            self._late = True
        except (RuntimeError, dist.DistError):
            self._without_store = self.verdict is None
        return not self._without_store

    def _tell(self) -> None:
        """Write the record of this rank."""
        me = self.record
        journals = [*self.journals.values()]  # to which another thread may add
        lines = {key: line for journal in journals for key, line in journal.lines.items()}
        moves, me.moves = me.moves, sum(records.counts_of(lines, {}).values())
        self._still = self._still + 1 if moves == me.moves else 0
        me.marks = {key: line.marks() for key, line in lines.items()}
        me.waits, me.at, me.failed, me.calls = None, [], None, {}
        # A frame that is looked at keeps alive what it has, longer than on other ranks: only where nothing moves.
        if self._still and me.ended is None and not me.asks:
            me.waits, me.at = records.look_at(self._trains)
            me.failed = (None if self._inside or self._since_broken else me.broke) or records.broken_off(self._trains)
        if me.waits is not None or me.ended is not None or self._still == _LONG:
            known = self._read_calls(lines)
            me.calls = known if me.waits is not None else {}
            me.waits = me.waits if self._calls[0] == me.moves else None  # it has gone on
        me.counts = records.counts_of(lines, self._messages)
        me.timeout = _MARGIN * _torch.longest_timeout().total_seconds()
        if self._store.check(["question"]) and not me.entries:
            key, ranks = json.loads(self._store.get("question"))
            me.entries = {key: list(lines[key].recent)} if me.rank in ranks and key in lines else {}
        me.last = [text for journal in journals for text in [*journal.last]]
        me.terminated, me.steps, me.answer = TERMINATED.came, self.appointment.calls, self.appointment.answered
        me.tick += 1
        self._store.set(str(me.rank), me.dumps())

    def _read_calls(self, lines: Mapping[str, Line]) -> dict[str, str]:
        """What was called last in each group, and how many calls were messages: once, as long as this rank stands."""
        if self._calls[0] != (here := self.record.moves):
            calls, messages = _torch.last_calls()
            if sum(records.counts_of(lines, {}).values()) == here:  # else it has gone on meanwhile
                self._messages |= messages
                self._calls = here, {f"{name} {number}": what for (name, number), what in calls.items()}
        return self._calls[1]

    def _hear(self) -> None:
        """Decide, if that is this rank's, and read what was decided."""
        if self._decides():
            self._read()
            why = self._judge()
            if isinstance(why, verdicts.Question):
                self._store.compare_set("question", "", json.dumps(why))
            elif why is None and any(record.terminated for record in self._known.values()):
                self._make_appointment()
            elif why is not None and self._store.compare_set("verdict", "", why) == why.encode():
                print(verdicts.report(self._known), file=sys.stderr, flush=True)
        if self._store.check(["stop"]):
            self.appointment.hear(*json.loads(self._store.get("stop")))
        if self._store.check(["verdict"]):
            self.verdict = self._store.get("verdict").decode()
            self._store.add("heard", 1)

    def _decides(self) -> bool:
        """Whether this rank is the one who decides: the first one of which there are signs of life."""
        said = self._store.get("leader").decode() if self._store.check(["leader"]) else ""
        same, looks = self._leader
        self._leader = said, looks + 1 if said == same else 0
        place = self.ranks.index(self.record.rank)
        if (
            said.partition(" ")[0] == str(self.record.rank)
            or (self._leader[1] >= _SUCCESSION + 2 * place)
            or (not said and not place)
        ):
            self._leader = f"{self.record.rank} {self.record.tick}", 0
            self._store.set("leader", self._leader[0])
            return True
        return False

    def _read(self) -> None:
        """The records of all ranks that have written one."""
        keys = [str(rank) for rank in self.ranks if rank in self._known or self._store.check([str(rank)])]
        now, self._steps = monotonic(), {rank: record.steps for rank, record in self._known.items()}
        for record in map(Record.loads, self._store.multi_get(keys)):
            rank, before = record.rank, self._known.get(record.rank)
            moved = before is None or before.progress != record.progress
            self._stands[rank] = (
                0 if moved else self._stands[rank] + (before is not None and before.tick != record.tick)
            )
            self._silent[rank] = 0 if before is None or before.tick != record.tick else self._silent[rank] + 1
            if moved or record.waits is None:
                self._since.pop(rank, None)
            if record.waits is not None:
                self._since.setdefault(rank, now)
            record.awaits = record.awaits and not self._stops[1]
            self._known[rank] = record

    def _make_appointment(self) -> None:
        steps, answers = ({r: getattr(x, name) for r, x in self._known.items()} for name in ("steps", "answer"))
        self._stops = next_appointment(steps, self._steps, answers, self._stops[0])
        self._store.set("stop", json.dumps(self._stops))

    def _judge(self) -> str | verdicts.Question | None:
        now = monotonic()
        waited = {rank: now - self._since.get(rank, now) for rank in self._known}
        states = {rank: self._state_of(rank) for rank in self._known}
        return verdicts.verdict(self._known, self._stands, states, waited)

    def _state_of(self, rank: int) -> str:
        gone, stopped, elsewhere = _QUIET
        if (silent := self._silent[rank]) < gone:
            return "runs"
        state = records.state_of(self._known[rank])
        if state == "stopped" and silent < stopped:
            return "runs"
        return "silent" if state == "unknown" and silent >= elsewhere else state

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Have the main thread raise the verdict, wherever it is; unless nobody asked for that."""
        assert self.verdict is not None
        if not self._owners or self.record.ended is not None:
            return
        for journal in self.journals.values():
            journal.over = self.verdict
        _torch.close_all_connections()
        if self._heard_within(_NOTICE):
            return
        _torch.interrupt(self._trains, _raises(self.verdict))
        if self._heard_within(_NOTICE):
            return
        print(f"rank {self.record.rank} had to be ended: {self.verdict}", file=sys.stderr)
        for path, line, function in reversed(_torch.stacks_of_threads().get(self._trains, [])):
            print(f'  File "{path}", line {line}, in {function}', file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    def _heard_within(self, seconds: float) -> bool:
        """Whether the main thread raises it, or is at its end."""
        return self._until(lambda: self.record.ended or any(x.heard for x in self.journals.values()), seconds)

    @staticmethod
    def _until(holds: Callable[[], object], seconds: float) -> bool:
        """Wait until something holds; whether it did within so many seconds."""
        end = monotonic() + seconds
        while not holds():
            if monotonic() > end:
                return False
            sleep(_INTERVAL / 20)
        return True


def _raises(message: str) -> type[ShardError]:
    """A kind of error whose only one has a message."""

    def init(self: ShardError) -> None:
        ShardError.__init__(self, message)

    return type("ShardError", (ShardError,), {"__init__": init, "__module__": ShardError.__module__})


@cache
def _at_exit() -> None:
    """From now on the others hear of it when this process ends, and its error is the verdict where there is one."""
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for watcher in (watcher for watcher in _WATCHERS.values() if watcher.record.process == os.getpid()):
            if isinstance(error, RuntimeError) and is_of_peers(error):
                if (why := watcher.explained(error)) is not error:
                    kind, error = type(why), why.with_traceback(trace)
            lost = isinstance(error, RuntimeError) and is_of_peers(error)
            how = "after others, to which it lost its connection" if lost else f"by {records.described(error)}"
            watcher.record.ended = watcher.record.ended or how
        otherwise(kind, error, trace)

    sys.excepthook = hook
    atexit.register(lambda: [watcher.ends() for watcher in _WATCHERS.values()])


_NO_STORE = (
    "the run is over: the process that has the key-value store of the process group has ended, which is rank 0, or "
    "torchrun. Its own output says why: an error, a signal, out of memory, a lost machine."
)
_WATCHERS: dict[tuple[int, ...], Watcher] = {}  # by ranks


def watch_for(owner: object, mesh: DeviceMesh) -> None:
    """From now on, and as long as there is the `owner`, the ranks of a mesh watch one another.

    Communication: one small all-gather over the mesh, the first time.
    """
    if mesh.size() > 1 and not _torch.simulated() and _torch.has_store() and mesh.get_coordinate() is not None:
        _watcher_of(mesh).begin(owner, mesh)


def _watcher_of(mesh: DeviceMesh) -> Watcher:
    ranks = tuple(sorted(map(int, mesh.mesh.flatten())))
    watcher = _WATCHERS.get(ranks)
    if watcher is None or not watcher.is_of_now:
        _at_exit()
        watcher = _WATCHERS[ranks] = Watcher(mesh)
    # On the newest mesh of these ranks.
    watcher.record.coordinates = ", ".join(f"{axis}={mesh.get_local_rank(axis)}" for axis in axes_of(mesh))
    return watcher


class _Loop:
    """The owner of what goes on within `watch`."""


@contextmanager
def watch(mesh: DeviceMesh) -> Iterator[None]:
    """Within it the ranks of a mesh watch one another: when one does not come, all end with an error that says why.

    For loops of functions; a `Trainer` and the compatible classes do it by themselves. A thread of each rank tells the
    others twice a second where it is. When a rank has ended, has left the loop by an error, is in another collective
    than the others, computes with other inputs or random numbers than its neighbours along `tp`, or does not come
    within 0.9 of the longest timeout of its process groups, all raise a `ShardError` that names it. A rank that
    computes, saves, or waits for its data is no reason, however long the others wait for it.

        >>> import torch, shardfn as sf
        >>> mesh = sf.make_mesh("cpu", fsdp=1)
        >>> with sf.collectives.watch(mesh):
        ...     total = sf.collectives.psum(torch.ones(2), mesh, "fsdp")

    Args:
        mesh: a mesh with axis names; over one rank there is nothing to watch.

    Raises:
        ShardError: ranks have gone apart; the message says who, where each rank is, and what differs.

    Communication: one small all-gather over the mesh, the first time; none in the loop.
    """
    loop = _Loop()
    watch_for(loop, mesh)
    with call(mesh, "run the loop"):
        yield


def asked_to_stop(mesh: DeviceMesh) -> bool:
    """Whether to save and end now, because SIGTERM came to a rank: the same answer on all ranks, once they are asked.

    Call it once a step, on every rank. `Trainer(resume=...)` does it by itself. From the first call on SIGTERM does not
    end the process; a function that handles it already is called besides.

        >>> import shardfn as sf
        >>> sf.collectives.asked_to_stop(sf.make_mesh("cpu", fsdp=1))
        False

    Communication: one small all-gather over the mesh the first time, none afterwards.
    """
    TERMINATED.listen()
    if mesh.size() == 1 or _torch.simulated() or not _torch.has_store():
        return TERMINATED.came
    return _watcher_of(mesh).ends_here()


def call(mesh: DeviceMesh, what: str) -> AbstractContextManager[None]:
    """Within it all ranks of a mesh do `what`, see `Watcher.call`; where nobody watches that is nothing."""
    journal = journal_of(mesh)
    return nullcontext() if journal is None else journal.watcher.call(journal, what)
