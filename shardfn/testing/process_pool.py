"""Teams of processes that are ranks, kept from call to call; what is sent to them and what they answer.

    team      the worker processes of one group size; one process is one rank, for as long as it lives
    target    a function, sent to the ranks as the name under which they import it
    answer    what one rank says about one call: a result or a failure
    failure   an exception as plain text and bytes, so that it survives the trip between processes
    cause     a failure that explains the others; an echo is a connection that broke because a peer failed

[Note: a process keeps its group for life]
torch, and every library above it, caches by mesh: DTensor's sharding propagation, redistribution plans, compiled
graphs. A process that leaves its group and joins another one finds entries of the first under equal keys; measured on
2.13, `w.sum().full_tensor()` on a mesh like an earlier one raises "Could not resolve the process group registered under
the name 5". So a team has one group size, keeps its group between calls, and is replaced by newly forked processes
after a failure: 0.05 s for four ranks, since they are forked with this package imported (0.7 s where each imports it).

The groups of a process share one device of gloo. A device has a thread that wakes more than a hundred times a second;
370 of them, after some hundred tests, took 29% of the time of two cores.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import math
import multiprocessing.connection
import os
import pickle
import re
import reprlib
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.machinery import PathFinder
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardfn._torch import LAZY_MODULES, is_of_peers, share_device_of_gloo
from shardfn.layout import make_mesh

# Imported once, before the ranks are forked. This package too, where the fork server finds the caller's copy of it.
_PRELOAD = ("torch.distributed.tensor", "torch.distributed.checkpoint", *LAZY_MODULES)
_ROOT = Path(__file__).parents[2]
# Modules of libraries that the caller has imported; that of transformers imports what all models there do.
_PRELOAD_IF_USED = ("einops", "hypothesis", "numpy", "pytest", "transformers.models.llama.modeling_llama")
_START_TIMEOUT = 180.0  # seconds until a new team is ready; the first one imports torch
_GROUP_TIMEOUT = timedelta(hours=2)  # longer than any call, so that a hang is reported by `run`, with stacks
_PATIENCE = 1.0  # seconds that ranks have to fail by themselves after the first one did
_SETTLE_TIMEOUT = 10.0  # seconds for what cannot take long: a barrier, or noticing that a peer has died
_MAX_FILES = 200  # open files of a rank beyond which its team is replaced: every gloo group holds some
_FOREIGN_ENVIRON = ("MASTER_", "TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_")


# ---------------------------------------------------------------------------------------------------------------------
# Targets: functions as names


class _Target(NamedTuple):
    """A function as the name under which every rank imports it; `depth` counts decorators to look through."""

    module: str
    file: str | None
    qualname: str
    depth: int

    def load(self) -> Callable[..., Any]:
        fn = functools.reduce(getattr, self.qualname.split("."), _import_module(self.module, self.file))
        for _ in range(self.depth):
            fn = _undecorated(fn)
        return fn


def find_target(fn: Callable[..., Any]) -> _Target:
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise TypeError(f"run: {fn!r} cannot be imported by name on the ranks; define it with `def` in a module.")
    target: Any = sys.modules.get(module)
    file = getattr(target, "__file__", None)
    if module == "__main__" and file is None:
        raise TypeError(f"run: {qualname} was typed into an interpreter, where no rank can import it; write a file.")
    for part in qualname.split("."):
        target = getattr(target, part, None)
    depth = 0
    while target is not None and target != fn:
        target, depth = _undecorated(target), depth + 1
    if target is None:
        raise TypeError(f"run: {module}.{qualname} is not the function that was passed: ranks import it by name.")
    return _Target(module, file, qualname, depth)


def _undecorated(fn: Any) -> Any:
    """What a decorator wraps: `functools.wraps` leaves `__wrapped__`, hypothesis leaves `hypothesis.inner_test`."""
    return getattr(fn, "__wrapped__", None) or getattr(getattr(fn, "hypothesis", None), "inner_test", None)


def _import_module(name: str, file: str | None) -> Any:
    """Import `name`, from `file` when the name leads nowhere (pytest's importlib mode) or to a namesake `conftest`."""
    if name == "__main__":
        return sys.modules[name]
    by_name = None
    with contextlib.suppress(ModuleNotFoundError):
        by_name = importlib.util.find_spec(name)
    if file is None or (by_name is not None and by_name.origin == file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------------------------
# Messages: what travels between the parent and its ranks


class _Request(NamedTuple):
    """One call. `payload` is (target, args, kwargs, warning filters), which takes `sys_path` to unpickle."""

    payload: bytes
    sys_path: Sequence[str]
    directory: str
    environ: Mapping[str, str]


class _Result(NamedTuple):
    payload: bytes
    reusable: bool  # the process group is the one the call began with, and files are not running out


class Failure(NamedTuple):
    """An exception as plain data; `kinds` are the names of its classes, for tests without the exception itself."""

    line: str
    message: str
    text: str
    kinds: tuple[str, ...]
    payload: bytes  # empty where it cannot be pickled
    is_echo: bool

    @staticmethod
    def of(exc: BaseException, text: str | None = None, is_echo: bool = False) -> Failure:
        line = "".join(traceback.format_exception_only(type(exc), exc)).strip().split("\n")[0]
        kinds = tuple(map(class_name, type(exc).__mro__))
        is_broken = is_of_peers(exc) or is_of_peers(exc.__cause__)
        payload = b""
        with contextlib.suppress(Exception):
            payload = pickle.dumps(exc)
        return Failure(line, str(exc), text or _traceback_text(exc), kinds, payload, is_echo or is_broken)

    def load(self) -> BaseException:
        with contextlib.suppress(Exception):
            return pickle.loads(self.payload)
        return RuntimeError(self.line)  # the class cannot be imported, or be built again, in this process


Answer = _Result | Failure


def class_name(kind: type) -> str:
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _traceback_text(exc: BaseException) -> str:
    """The traceback below this file."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(exc), exc, trace)).rstrip()


def _dump(what: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        why = f"{what} cannot be sent between processes: {error}"
        raise TypeError(f"run: {why}. Send plain tensors and module-level classes.") from error


def load_result(name: str, rank: int, answer: Answer) -> Any:
    assert isinstance(answer, _Result)
    try:
        return pickle.loads(answer.payload)
    except Exception as error:
        raise TypeError(
            f"run: {name} on rank {rank} returned a value that cannot be rebuilt in this process: {error}. "
            "Return plain tensors and numbers, such as x.full_tensor() or x.to_local() of a DTensor."
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# The worker: one process, one rank


def _serve(conn: multiprocessing.connection.Connection, rank: int, ranks: int, directory: str, file: str) -> None:
    """The main function of a rank: join the group, then answer until the parent goes away."""
    assert file == __file__, f"a rank has {__file__}, its caller {file}"
    gc.freeze()  # what is loaded stays: no collection looks at it again
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    stack = open(_stack_path(directory, rank), "w")  # open for as long as the process lives
    faulthandler.enable()  # writes stacks to stderr on SIGABRT, SIGSEGV and their like
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    _this_rank.append(rank)
    try:
        share_device_of_gloo()
        met = f"file://{directory}/store"
        dist.init_process_group("gloo", init_method=met, rank=rank, world_size=ranks, timeout=_GROUP_TIMEOUT)
        conn.send(_Result(b"", reusable=True))
    except Exception as error:
        conn.send(Failure.of(error))
        return
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            conn.send(_answer(conn.recv(), rank, ranks))
    os._exit(0)  # tearing the group down could wait for ranks that are gone too


def _answer(request: _Request, rank: int, ranks: int) -> Answer:
    world = dist.group.WORLD
    try:
        payload = _answer_request(request, rank, ranks)
    except BaseException as error:  # SystemExit and pytest.skip too: nothing may end the process
        return Failure.of(error)
    finally:
        sys.stdout.flush()  # the process may be killed before its buffers are full
        sys.stderr.flush()
    same_group = dist.is_initialized() and dist.group.WORLD is world
    return _Result(payload, reusable=same_group and len(os.listdir("/dev/fd")) <= _MAX_FILES)


def _answer_request(request: _Request, rank: int, ranks: int) -> bytes:
    os.environ.clear()
    os.environ.update({key: value for key, value in request.environ.items() if not key.startswith(_FOREIGN_ENVIRON)})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    sys.path[:] = request.sys_path
    os.chdir(request.directory)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    target, args, kwargs, filters = pickle.loads(request.payload)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters = filters
        result = target.load()(*args, **kwargs)
        return _dump(f"the result {reprlib.repr(result)}", result)


@functools.cache
def _mesh(axes: tuple[tuple[str, int], ...]) -> Any:
    """The mesh of a worker: it holds process groups, and is kept for the next test."""
    return make_mesh("cpu", **dict(axes))


def call_on_mesh(test: _Target, axes: Mapping[str, int], values: Mapping[str, Any]) -> None:
    """The body of `on_meshes` on one rank."""
    test.load()(_mesh(tuple(axes.items())), **values)


def _stack_path(directory: str, rank: int) -> Path:
    return Path(directory) / f"stack-{rank}"


_this_rank: list[int] = []  # in a worker: its rank


# ---------------------------------------------------------------------------------------------------------------------
# The parent: teams of workers


# Ranks that torchrun starts differ in the order of their sets; those of a server would all have the same one.
_ODD_RANKS = forkserver.ForkServer()
_SEED_OF_ODD_RANKS = "1"  # of the hashes of strings


def start_server() -> None:
    """Start the two processes from which ranks are forked, with what they all import, unless they run already."""
    used = [module for module in _PRELOAD_IF_USED if module.partition(".")[0] in sys.modules]
    spec = PathFinder.find_spec("shardfn", [os.getcwd(), str(_ROOT)])  # as the server looks for it
    same = spec is not None and spec.origin == str(_ROOT / "shardfn" / "__init__.py")
    this_module = [__name__] if same and not sys.flags.ignore_environment else []
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for server, seed in ((forkserver, {}), (_ODD_RANKS, {"PYTHONHASHSEED": _SEED_OF_ODD_RANKS})):
        server.set_forkserver_preload([*_PRELOAD, *this_module, *used])
        with patch.dict(os.environ, PYTHONPATH=path, **seed):
            server.ensure_running()


class _Team:
    """The processes of one group size. `ask` sends one request to every rank and waits for all answers."""

    def __init__(self, ranks: int) -> None:
        ctx = multiprocessing.get_context("forkserver")
        start_server()
        self.directory = tempfile.mkdtemp(prefix="shardfn-ranks-")
        self.processes: list[ForkServerProcess] = []
        self.conns: list[multiprocessing.connection.Connection] = []
        for rank in range(ranks):
            conn, worker_conn = ctx.Pipe()
            name = f"shardfn rank {rank} of {ranks}"
            process = ctx.Process(target=_serve, args=(worker_conn, rank, ranks, self.directory, __file__), name=name)
            server = _ODD_RANKS if rank % 2 else forkserver
            with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                process.start()
            worker_conn.close()  # so that the end of the process is the end of the pipe
            self.processes.append(process)
            self.conns.append(conn)

    def ask(self, request: _Request, timeout: float) -> list[Answer]:
        for conn in self.conns:
            with contextlib.suppress(OSError):  # a rank that died is found, and named, while waiting
                conn.send(request)
        return self.wait(timeout)

    def wait(self, timeout: float) -> list[Answer]:
        """Wait for the answers of all ranks; ranks that are late, or dead, get a failure in their place."""
        answers: dict[int, Answer] = {}
        started = time.monotonic()
        deadline, release = started + timeout, math.inf
        while waiting := [rank for rank in range(len(self.conns)) if rank not in answers]:
            sources = [source for rank in waiting for source in (self.conns[rank], self.processes[rank].sentinel)]
            multiprocessing.connection.wait(sources, max(0.0, min(deadline, release) - time.monotonic()))
            answers |= {rank: answer for rank in waiting if (answer := self._receive(rank)) is not None}
            now = time.monotonic()
            if release == math.inf and any(isinstance(answer, Failure) for answer in answers.values()):
                release = now + _PATIENCE
                if not self.is_alive():  # a child it left behind may hold its sockets open
                    deadline = min(deadline, release + _SETTLE_TIMEOUT)
            if now >= deadline:
                answers |= self._hung([rank for rank in waiting if rank not in answers], now - started)
            elif now >= release:
                # Ranks still at work may wait for those that are done. Killing these closes their sockets: gloo raises.
                for rank in answers:
                    self.processes[rank].kill()
                release = now + 0.1
        return [answers[rank] for rank in range(len(self.conns))]

    def _receive(self, rank: int) -> Answer | None:
        """What a rank has answered, or how its process ended; None while it works."""
        process = self.processes[rank]
        ended = process.exitcode is not None  # asked first: an answer may precede the end
        with contextlib.suppress(EOFError, OSError):
            if self.conns[rank].poll():
                return self.conns[rank].recv()
            if not ended:
                return None
        process.join(5)
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Failure.of(ChildProcessError(f"the process of rank {rank} {how} before it answered"))

    def _hung(self, late: Sequence[int], seconds: float) -> dict[int, Answer]:
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        failures: dict[int, Answer] = {}
        for rank in late:
            error = TimeoutError(f"no answer in {round(seconds, 1):g} s")
            stack = _read_stack(_stack_path(self.directory, rank))
            # A rank inside a collective waits for the others: one that is elsewhere is the likelier cause.
            current = stack.partition("Current thread")[2]
            is_echo = "/torch/distributed/" in current.partition("File ")[2].partition("\n")[0]
            failures[rank] = Failure.of(error, text=f"{error}; the rank was here:\n{stack}", is_echo=is_echo)
        return failures

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, conn in zip(self.processes, self.conns, strict=True):
            process.join()
            conn.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _read_stack(path: Path) -> str:
    """The stack below this file, without addresses, that faulthandler writes after SIGUSR1; waits until it is whole."""
    text = ""
    for _ in range(40):
        time.sleep(0.05)
        previous, text = text, path.read_text()
        if text and text == previous:
            break
    threads = (thread.partition(f'  File "{__file__}"')[0].rstrip() for thread in text.split("\n\n"))
    stack = re.sub(r"0x\w+ ", "", "\n".join(threads))
    return stack or "(no stack: the process is stopped, or blocks signals)"


# One team per group size, made on demand; they live as long as the interpreter.
teams: dict[int, _Team] = {}
teams_lock = threading.RLock()
os.register_at_fork(after_in_child=teams.clear)  # the ranks are those of the parent


def _ask(request: _Request, ranks: int, timeout: float) -> list[Answer]:
    with teams_lock:
        reusable = False
        try:
            team = _team(ranks)
            answers = team.ask(request, timeout)
            reusable = all(isinstance(answer, _Result) and answer.reusable for answer in answers)
            if reusable and ranks > 1:
                # A barrier fails where the call left a collective that not every rank joined.
                settle = request._replace(payload=_dump("", (find_target(dist.barrier), (), {}, [])))
                settled = team.ask(settle, min(timeout, _SETTLE_TIMEOUT))
                reusable = not any(isinstance(answer, Failure) for answer in settled)
                answers = answers if reusable else [_unsettled(answer) for answer in settled]
        finally:  # also after KeyboardInterrupt
            if not reusable:
                end_team(ranks)
        return answers


def _team(ranks: int) -> _Team:
    """The team of this size, once its ranks are ready."""
    if ranks in teams and teams[ranks].is_alive():
        return teams[ranks]
    end_team(ranks)
    team = teams[ranks] = _Team(ranks)
    if failed := [answer for answer in team.wait(_START_TIMEOUT) if isinstance(answer, Failure)]:
        why = f"run: {ranks} ranks could not be started: {failed[0].text}\nA script that calls run"
        raise RuntimeError(f"{why} must guard its main part with `if __name__ == '__main__':`.")
    return team


def end_team(ranks: int) -> None:
    if ranks in teams:
        teams.pop(ranks).kill()


def _unsettled(answer: Answer) -> Answer:
    if isinstance(answer, _Result):
        return answer
    what = "fn returned, but left a collective that not every rank joined, or not with the same size"
    text = f"{what}; a barrier after it failed:\n{answer.text}"
    return answer._replace(line=f"{what}: {answer.line}", text=text)


def call_ranks(fn: Callable[..., Any], args: Any, kwargs: Any, ranks: int, timeout: float) -> tuple[str, list[Answer]]:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"run: ranks={ranks!r} is not a group size; pass a whole number of at least 1.")
    if _this_rank:
        raise RuntimeError(f"run: called on rank {_this_rank[0]}; ranks cannot run further ranks.")
    target = find_target(fn)
    payload = _dump(f"the arguments of {target.qualname}", (target, args, kwargs, list(warnings.filters)))
    request = _Request(payload, tuple(sys.path), os.getcwd(), dict(os.environ))
    shown = args[0] if fn is call_on_mesh else target  # a test on a mesh goes by its own name
    return f"{shown.module}.{shown.qualname}", _ask(request, ranks, timeout)
