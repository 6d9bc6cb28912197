"""Run functions on many ranks in tests, and compare the results: public, because users need it too.

What lives here: a session-wide pool of forked ranks (`run`, `run_raises`, `on_meshes`, `shutdown`), comparisons that
raise (`assert_close`, `assert_trees_close`, `assert_parity`) and a counter of collectives (`count_collectives`). What
does not: anything a training run needs. Layer 7: nothing in shardfn imports this module.

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
after a failure: 0.2 s.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import importlib.util
import inspect
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardfn._torch import LAZY_MODULES, TorchDispatchMode, pytree
from shardfn.comm import whole
from shardfn.layout import make_mesh

__all__ = ["Collectives", "RankError", "assert_close", "assert_parity", "assert_trees_close", "count_collectives"]
__all__ += ["on_meshes", "run", "run_raises", "shutdown"]

T = TypeVar("T")

# Imported once, before the ranks are forked. Not shardfn itself: the fork server may find another copy than the caller.
_PRELOAD = ("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.checkpoint", *LAZY_MODULES)
_PRELOAD_IF_USED = ("einops", "hypothesis", "numpy", "pytest")
_START_TIMEOUT = 180.0  # seconds until a new team is ready; the first one imports torch
_GROUP_TIMEOUT = timedelta(hours=2)  # longer than any call, so that a hang is reported by `run`, with stacks
_PATIENCE = 1.0  # seconds that ranks have to fail by themselves after the first one did
_SETTLE_TIMEOUT = 10.0  # seconds for what cannot take long: a barrier, or noticing that a peer has died
_MAX_FILES = 200  # open files of a rank beyond which its team is replaced: every gloo group holds some
_BROKEN = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket (is )?closed|not connected", re.IGNORECASE
)
_FOREIGN_ENVIRON = ("MASTER_", "TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_")


# ---------------------------------------------------------------------------------------------------------------------
# Public: run functions on ranks


class RankError(AssertionError):
    """A function failed on at least one rank.

    The message holds the traceback of every rank that failed, causes before echoes, then lowest rank first; equal
    tracebacks are shown once. `errors` maps ranks to exceptions, and `__cause__` is the exception of the lowest rank
    that failed by itself. A rank that did not answer in time has a `TimeoutError` and its stack, one whose process
    ended has a `ChildProcessError`. It is an `AssertionError`, so that test runners report a failed test and not a
    broken one.

    Example:
        >>> from shardfn.testing import RankError, run
        >>> try:
        ...     run(divmod, 1, 0, ranks=1)
        ... except RankError as error:
        ...     print(type(error.errors[0]).__name__)
        ZeroDivisionError
    """

    def __init__(self, message: str, errors: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.errors: dict[int, BaseException] = dict(errors or {})


def run(fn: Callable[..., T], *args: Any, ranks: int = 4, timeout: float = 60.0, **kwargs: Any) -> list[T]:
    """Call `fn(*args, **kwargs)` on every rank of a gloo process group and return the results in rank order.

    The ranks are processes of a session-wide pool with torch already imported: the first call takes seconds, later ones
    milliseconds. Each call starts with `torch.manual_seed(0)` and default dtype float32, and sees the caller's
    `sys.path`, working directory, environment (plus `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`; minus
    `MASTER_*`) and warning filters: where pytest turns warnings into errors, the ranks do too. Module globals live on
    in the ranks from one call to the next, until a call fails: then new processes take over.

    Example:
        >>> import torch.distributed as dist
        >>> from shardfn.testing import run
        >>> run(dist.get_rank, ranks=2)
        [0, 1]

    Args:
        fn: a function that the ranks can import: defined at the top level of a module, no lambda, no local function.
        *args: its arguments; they must pickle.
        ranks: the size of the process group.
        timeout: seconds for the whole call. Ranks that have not answered by then are killed, and shown with their
            stacks.
        **kwargs: its keyword arguments.

    Returns:
        The results of ranks 0 to `ranks - 1`.

    Raises:
        RankError: a rank raised, did not answer in time, died, or left a collective that not every rank joined.
        TypeError: `fn` cannot be imported by name, or an argument or result does not pickle.
        ValueError: `ranks` is not a positive number.
    """
    __tracebackhide__ = True
    name, answers = _call(fn, args, kwargs, ranks, timeout)
    if any(isinstance(answer, _Failure) for answer in answers):
        _raise_failures(name, answers)
    return [_load_result(name, rank, answer) for rank, answer in enumerate(answers)]


def run_raises(
    exc_type: type[BaseException],
    fn: Callable[..., Any],
    *args: Any,
    match: str | None = None,
    ranks: int = 4,
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[str]:
    """Call `fn` as `run` does and require that every rank raises `exc_type`.

    An error that only some ranks raise is a hang on the others, which is why all of them must.

    Example:
        >>> from shardfn.testing import run_raises
        >>> run_raises(ZeroDivisionError, divmod, 1, 0, match="by zero", ranks=1)
        ['integer division or modulo by zero']

    Args:
        exc_type: the expected type; subclasses pass.
        fn: see `run`.
        *args: arguments of `fn`.
        match: a regular expression searched for in the message of every rank.
        ranks: see `run`.
        timeout: see `run`.
        **kwargs: keyword arguments of `fn`.

    Returns:
        `str(exception)` of every rank.

    Raises:
        RankError: a rank returned, raised another type, or raised a message that does not match.
    """
    __tracebackhide__ = True
    name, answers = _call(fn, args, kwargs, ranks, timeout)
    expected = exc_type.__name__ if match is None else f"{exc_type.__name__} matching {match!r}"
    for rank, answer in enumerate(answers):
        if not isinstance(answer, _Failure):
            what = f"rank {rank} of {ranks} returned {reprlib.repr(_load_result(name, rank, answer))}"
        elif _class_name(exc_type) not in answer.kinds or (match is not None and not re.search(match, answer.message)):
            what = f"rank {rank} of {ranks} raised {answer.line}"
        else:
            continue
        _raise_failures(name, answers, f"run_raises: {name}: expected {expected} on every rank, but {what}")
    return [answer.message for answer in answers if isinstance(answer, _Failure)]


def on_meshes(*meshes: Mapping[str, int], timeout: float = 60.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a pytest test so that it runs once per mesh, on all ranks of that mesh at the same time.

    The test's first parameter receives the `DeviceMesh` (on CPU), the others come from `pytest.mark.parametrize`,
    fixtures or hypothesis in the parent process and must pickle. Without arguments the meshes are (fsdp, tp) = (4, 1),
    (2, 2) and (1, 4).

    Example:
        >>> from shardfn.testing import on_meshes
        >>> @on_meshes({"fsdp": 3}, {"fsdp": 2, "tp": 2})
        ... def test_axes(mesh):
        ...     assert mesh["fsdp"].size() in (2, 3)

    Args:
        *meshes: axis sizes of each mesh, outermost axis first.
        timeout: seconds per mesh, see `run`.

    Returns:
        A decorator for a test function defined at the top level of a module.

    Raises:
        ValueError: a mesh has no axes, or an axis is not a positive size.
        TypeError: the test takes no parameter.
    """
    import pytest

    chosen = [dict(axes) for axes in meshes] or [{"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}]
    for axes in chosen:
        if not axes or not all(isinstance(size, int) and size > 0 for size in axes.values()):
            raise ValueError(
                f"on_meshes: {axes} is not a mesh; write axis sizes as in {{'fsdp': 2, 'tp': 2}}, each at least 1."
            )

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        parameters = list(inspect.signature(test).parameters)
        if not parameters:
            raise TypeError(f"on_meshes: {test.__name__}() takes no parameter; its first one receives the mesh.")

        @functools.wraps(test)
        def run_on_mesh(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            values = {**dict(zip(parameters, args, strict=False)), **kwargs}
            axes = values.pop(parameters[0])
            run(_call_on_mesh, _find_target(test), axes, values, ranks=math.prod(axes.values()), timeout=timeout)

        ids = ["-".join(f"{axis}{size}" for axis, size in axes.items()) for axes in chosen]
        return pytest.mark.parametrize(parameters[0], chosen, ids=ids)(run_on_mesh)

    return decorate


@atexit.register
def shutdown() -> None:
    """End the pool's processes now; the next `run` starts new ones.

    Runs at interpreter exit by itself. Call it to free memory earlier.

    Example:
        >>> from shardfn.testing import shutdown
        >>> shutdown()
    """
    with _lock:
        for ranks in list(_teams):
            _end(ranks)


# ---------------------------------------------------------------------------------------------------------------------
# Public: comparisons that raise


def assert_close(
    actual: torch.Tensor | float,
    expected: torch.Tensor | float,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    name: str = "",
) -> None:
    """Require two tensors of equal shape and dtype to be close.

    Elementwise, `|actual - expected| <= atol + rtol * |expected|`. NaN equals nothing. `DTensor`s are compared as full
    tensors, which is a collective: call it on every rank.

    Example:
        >>> import torch
        >>> from shardfn.testing import assert_close
        >>> assert_close(torch.ones(2) / 3, torch.tensor([0.333333, 0.333333]), rtol=1e-5, atol=0)

    Args:
        actual: the tensor, or number, to check.
        expected: what it should be.
        rtol: relative tolerance; with atol, both or neither. Default: that of `torch.testing.assert_close`.
        atol: absolute tolerance.
        name: what to call it in the message.

    Raises:
        AssertionError: shapes, dtypes or values differ; the message has the largest differences and where they are.
    """
    __tracebackhide__ = True
    problem = _difference(_full(actual), _full(expected), rtol, atol)
    if problem:
        raise AssertionError(f"{name}: {problem}" if name else problem)


def assert_trees_close(actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Require two trees to have the same leaves, each close as in `assert_close`.

    Trees are mappings and sequences, nested or not, of tensors and numbers; `None` counts as absent. Trees without
    leaves are refused, since comparing nothing always succeeds.

    Example:
        >>> import torch
        >>> from shardfn.testing import assert_trees_close
        >>> assert_trees_close({"w": torch.ones(2)}, {"w": torch.ones(2)}, rtol=0, atol=0)

    Args:
        actual: the tree to check.
        expected: what it should be.
        rtol: see `assert_close`.
        atol: see `assert_close`.

    Raises:
        AssertionError: keys, shapes, dtypes or values differ; the message names each leaf with its largest difference.
        TypeError: a leaf is neither a tensor nor a number.
    """
    __tracebackhide__ = True
    pairs = _pair_leaves(actual, expected, "assert_trees_close")
    _raise_problems((name, _difference(a, b, rtol, atol)) for name, a, b in pairs)


def assert_parity(actual: Any, expected: Any, *, tol: float = 1e-12) -> None:
    """Require every leaf to equal its reference in norm.

    In float64, `|a - b| <= tol * max(|b|, 1e-3 * |all of expected|)` with Euclidean norms. Meant for gradients and
    parameters against an unsharded reference: sums in another order change elements that almost cancel by much more
    than their size, and leave norms alone. The second term is for leaves whose true value is zero. NaN and infinity
    never pass; integers and booleans must be equal. Trees are those of `assert_trees_close`; a single tensor is a tree
    too.

    Example:
        >>> import torch
        >>> from shardfn.testing import assert_parity
        >>> w = torch.ones(2, dtype=torch.float64)
        >>> assert_parity({"w": w * 3 / 3}, {"w": w})

    Args:
        actual: the tree to check.
        expected: the reference.
        tol: the largest relative error; 1e-12 is for float64, where float32 needs about 1e-5.

    Raises:
        AssertionError: keys, shapes, dtypes or values differ; the message names each leaf with its error, the limit
            and the worst element.
        TypeError: a leaf is neither a tensor nor a number.
    """
    __tracebackhide__ = True
    pairs = _pair_leaves(actual, expected, "assert_parity")
    total = math.hypot(*(_norm(b) for _, _, b in pairs if b.dtype.is_floating_point or b.dtype.is_complex))
    _raise_problems((name, _disparity(a, b, tol, 1e-3 * total)) for name, a, b in pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Public: counting collectives


@dataclasses.dataclass
class Collectives:
    """How many collectives this process issued, by kind.

    `other` holds barriers, reduces, gathers and scatters. `bytes` is the size of this rank's own input tensors, all
    kinds together, and `bytes_of` the same by kind: what a rank offers, not what the algorithm then sends; of `receive`
    it is what arrives. `total` is the number of calls.

    Example:
        >>> from shardfn.testing import Collectives
        >>> Collectives(all_gather=2, other=1).total
        3
    """

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    all_to_all: int = 0
    broadcast: int = 0
    send: int = 0
    receive: int = 0
    other: int = 0
    bytes_of: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def total(self) -> int:
        return sum(self.as_dict().values())

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of.values())

    def as_dict(self) -> dict[str, int]:
        """The kinds that occurred, as in `{"all_gather": 2}`."""
        return {kind: getattr(self, kind) for kind in _KINDS if getattr(self, kind)}

    def add(self, kind: str, size: int) -> None:
        """Count one collective of `size` bytes."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.bytes_of[kind] = self.bytes_of.get(kind, 0) + size


@contextlib.contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count the collectives that this process issues inside the `with` block.

    Forward and backward count, and what DTensor issues does too; a coalesced collective counts once.

    Example:
        >>> from shardfn.testing import count_collectives
        >>> with count_collectives() as counts:
        ...     pass
        >>> counts.total, counts.bytes
        (0, 0)

    Returns:
        A context manager whose value fills up as collectives are issued.
    """
    with _CollectiveMode() as mode:
        yield mode.counts


# ---------------------------------------------------------------------------------------------------------------------
# Targets: functions as names


class _Target(NamedTuple):
    """A function as the name under which every rank imports it; `depth` counts decorators to look through."""

    module: str
    file: str | None
    qualname: str
    depth: int

    def load(self) -> Callable[..., Any]:
        found = functools.reduce(getattr, self.qualname.split("."), _import_module(self.module, self.file))
        for _ in range(self.depth):
            found = _undecorated(found)
        return found


def _find_target(fn: Callable[..., Any]) -> _Target:
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise TypeError(
            f"run: {fn!r} cannot be imported by name on the ranks; define it with `def` at the top level of a module."
        )
    found: Any = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if module == "__main__" and file is None:
        raise TypeError(
            f"run: {qualname} was typed into an interpreter, where the ranks cannot import it; put it into a file."
        )
    for part in qualname.split("."):
        found = getattr(found, part, None)
    depth = 0
    while found is not None and found != fn:
        found, depth = _undecorated(found), depth + 1
    if found is None:
        raise TypeError(
            f"run: {module}.{qualname} is not the function that was passed, so that the ranks cannot import it by name."
        )
    return _Target(module, file, qualname, depth)


def _undecorated(fn: Any) -> Any:
    """What a decorator wraps: `functools.wraps` leaves `__wrapped__`, hypothesis leaves `hypothesis.inner_test`."""
    return getattr(fn, "__wrapped__", None) or getattr(getattr(fn, "hypothesis", None), "inner_test", None)


def _import_module(name: str, file: str | None) -> Any:
    """Import `name`, from `file` when the name leads nowhere (pytest's importlib mode) or to a namesake `conftest`."""
    if name == "__main__":
        return sys.modules[name]
    found = None
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec(name)
    if file is None or (found is not None and found.origin == file):
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


class _Failure(NamedTuple):
    """An exception as plain data; `kinds` are the names of its classes, for tests without the exception itself."""

    line: str
    message: str
    text: str
    kinds: tuple[str, ...]
    payload: bytes | None
    is_echo: bool

    @staticmethod
    def of(exc: BaseException, text: str | None = None, is_echo: bool = False) -> _Failure:
        line = _shortened("".join(traceback.format_exception_only(type(exc), exc)).strip().split("\n")[0], 300)
        kinds = tuple(map(_class_name, type(exc).__mro__))
        is_broken = isinstance(exc, RuntimeError) and _BROKEN.search(str(exc)) is not None
        payload = None
        with contextlib.suppress(Exception):
            payload = pickle.dumps(exc)
        return _Failure(line, str(exc), text or _traceback_text(exc), kinds, payload, is_echo or is_broken)

    @property
    def place(self) -> str:
        """Equal for failures of one type at one place, which are shown together."""
        return "\n".join([self.kinds[0], *(line for line in self.text.split("\n") if line.startswith("  File "))])

    def load(self) -> BaseException:
        with contextlib.suppress(Exception):
            if self.payload is not None:
                return pickle.loads(self.payload)
        return RuntimeError(self.line)  # the class cannot be imported, or be built again, in this process


_Answer = _Result | _Failure


def _class_name(kind: type) -> str:
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _traceback_text(exc: BaseException) -> str:
    """The traceback below this file, with the local variables of a bare `assert`, which says nothing by itself."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(exc), exc, trace)).rstrip()
    if not isinstance(exc, AssertionError) or exc.args:
        return text
    *_, (frame, _) = traceback.walk_tb(trace)
    lines: list[str] = []
    for name, value in frame.f_locals.items():
        with contextlib.suppress(Exception):
            lines.append(f"\n    {name} = {_shortened(' '.join(repr(value).split()), 200)}")
    return "\n  where".join([text, "".join(lines)]) if lines else text


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _dump(what: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"run: {what} cannot be sent between processes: {error}. Send plain tensors and module-level classes."
        ) from error


def _load_result(name: str, rank: int, answer: _Answer) -> Any:
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


def _serve(conn: multiprocessing.connection.Connection, rank: int, ranks: int, directory: str) -> None:
    """The main function of a rank: join the group, then answer until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    stack = open(_stack_path(directory, rank), "w")  # open for as long as the process lives
    faulthandler.enable(file=stack)  # on SIGABRT, SIGSEGV and their like
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    _this_rank.append(rank)
    try:
        met = f"file://{directory}/store"
        dist.init_process_group("gloo", init_method=met, rank=rank, world_size=ranks, timeout=_GROUP_TIMEOUT)
        conn.send(_Result(b"", reusable=True))
    except Exception as error:
        conn.send(_Failure.of(error))
        return
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            conn.send(_answer(conn.recv(), rank, ranks))
    os._exit(0)  # tearing the group down could wait for ranks that are gone too


def _answer(request: _Request, rank: int, ranks: int) -> _Answer:
    world = dist.group.WORLD
    try:
        payload = _answer_request(request, rank, ranks)
    except BaseException as error:  # SystemExit and pytest.skip too: nothing may end the process
        return _Failure.of(error)
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


def _call_on_mesh(test: _Target, axes: Mapping[str, int], values: Mapping[str, Any]) -> None:
    """The body of `on_meshes` on one rank."""
    test.load()(_mesh(tuple(axes.items())), **values)


def _stack_path(directory: str, rank: int) -> Path:
    return Path(directory) / f"stack-{rank}"


_this_rank: list[int] = []  # in a worker: its rank


# ---------------------------------------------------------------------------------------------------------------------
# The parent: teams of workers


class _Team:
    """The processes of one group size. `ask` sends one request to every rank and waits for all answers."""

    def __init__(self, ranks: int) -> None:
        ctx = multiprocessing.get_context("forkserver")
        ctx.set_forkserver_preload([*_PRELOAD, *(name for name in _PRELOAD_IF_USED if name in sys.modules)])
        self.directory = tempfile.mkdtemp(prefix="shardfn-ranks-")
        self.processes: list[ForkServerProcess] = []
        self.conns: list[multiprocessing.connection.Connection] = []
        for rank in range(ranks):
            conn, worker_conn = ctx.Pipe()
            name = f"shardfn rank {rank} of {ranks}"
            process = ctx.Process(target=_serve, args=(worker_conn, rank, ranks, self.directory), name=name)
            process.start()
            worker_conn.close()  # so that the end of the process is the end of the pipe
            self.processes.append(process)
            self.conns.append(conn)

    def ask(self, request: _Request, timeout: float) -> list[_Answer]:
        for conn in self.conns:
            with contextlib.suppress(OSError):  # a rank that died is found, and named, while waiting
                conn.send(request)
        return self.wait(timeout)

    def wait(self, timeout: float) -> list[_Answer]:
        """Wait for the answers of all ranks; ranks that are late, or dead, get a failure in their place."""
        answers: dict[int, _Answer] = {}
        started = time.monotonic()
        deadline, release = started + timeout, math.inf
        while waiting := [rank for rank in range(len(self.conns)) if rank not in answers]:
            sources = [source for rank in waiting for source in (self.conns[rank], self.processes[rank].sentinel)]
            multiprocessing.connection.wait(sources, max(0.0, min(deadline, release) - time.monotonic()))
            answers |= {rank: answer for rank in waiting if (answer := self._receive(rank)) is not None}
            now = time.monotonic()
            if release == math.inf and any(isinstance(answer, _Failure) for answer in answers.values()):
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

    def _receive(self, rank: int) -> _Answer | None:
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
        error = ChildProcessError(f"the process of rank {rank} {how} before it answered")
        path = _stack_path(self.directory, rank)
        stack = _stack_of(path.read_text()) if path.exists() else ""
        return _Failure.of(error, text=f"{error}; the rank was here:\n{stack}" if stack else str(error))

    def _hung(self, late: Sequence[int], seconds: float) -> dict[int, _Answer]:
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        failures: dict[int, _Answer] = {}
        for rank in late:
            error = TimeoutError(f"no answer in {round(seconds, 1):g} s")
            stack = _read_stack(_stack_path(self.directory, rank))
            # A rank inside a collective waits for the others: one that is elsewhere is the likelier cause.
            current = stack.partition("Current thread")[2]
            is_echo = "/torch/distributed/" in current.partition("File ")[2].partition("\n")[0]
            failures[rank] = _Failure.of(error, text=f"{error}; the rank was here:\n{stack}", is_echo=is_echo)
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
    """The stack below this file that faulthandler writes after SIGUSR1; waits until there is one, and it is whole."""
    text = ""
    for _ in range(40):
        time.sleep(0.05)
        previous, text = text, path.read_text()
        if text and text == previous:
            break
    return _stack_of(text) or "(no stack: the process is stopped, or blocks signals)"


def _stack_of(text: str) -> str:
    """What faulthandler wrote, without addresses, names of extensions, and what this file does."""
    threads = (thread.partition(f'  File "{__file__}"')[0].rstrip() for thread in text.split("\n\n"))
    threads = (thread for thread in threads if not thread.startswith("Extension modules:"))
    return re.sub(r"0x\w+ ", "", "\n".join(threads))


# One team per group size, made on demand; they live as long as the interpreter.
_teams: dict[int, _Team] = {}
_lock = threading.RLock()
os.register_at_fork(after_in_child=_teams.clear)  # the ranks are those of the parent


def _ask(request: _Request, ranks: int, timeout: float) -> list[_Answer]:
    with _lock:
        reusable = False
        try:
            team = _team(ranks)
            answers = team.ask(request, timeout)
            reusable = all(isinstance(answer, _Result) and answer.reusable for answer in answers)
            if reusable and ranks > 1:
                # A barrier fails where the call left a collective that not every rank joined.
                settle = request._replace(payload=_dump("", (_find_target(dist.barrier), (), {}, [])))
                settled = team.ask(settle, min(timeout, _SETTLE_TIMEOUT))
                reusable = not any(isinstance(answer, _Failure) for answer in settled)
                answers = answers if reusable else [_unsettled(answer) for answer in settled]
        finally:  # also after KeyboardInterrupt
            if not reusable:
                _end(ranks)
        return answers


def _team(ranks: int) -> _Team:
    """The team of this size, once its ranks are ready."""
    if ranks in _teams and _teams[ranks].is_alive():
        return _teams[ranks]
    _end(ranks)
    team = _teams[ranks] = _Team(ranks)
    failed = [answer for answer in team.wait(_START_TIMEOUT) if isinstance(answer, _Failure)]
    if failed:
        raise RuntimeError(
            f"run: {ranks} ranks could not be started: {failed[0].text}\n"
            "A script that calls run must guard its main part with `if __name__ == '__main__':`."
        )
    return team


def _end(ranks: int) -> None:
    if ranks in _teams:
        _teams.pop(ranks).kill()


def _unsettled(answer: _Answer) -> _Answer:
    if isinstance(answer, _Result):
        return answer
    what = "fn returned, but left a collective that not every rank joined, or not with the same size"
    text = f"{what}; a barrier after it failed:\n{answer.text}"
    return answer._replace(line=f"{what}: {answer.line}", text=text)


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, ranks: int, timeout: float) -> tuple[str, list[_Answer]]:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"run: ranks={ranks!r} is not a group size; pass a whole number of at least 1.")
    if _this_rank:
        raise RuntimeError(f"run: called on rank {_this_rank[0]}; ranks cannot run further ranks.")
    target = _find_target(fn)
    payload = _dump(f"the arguments of {target.qualname}", (target, args, kwargs, list(warnings.filters)))
    request = _Request(payload, tuple(sys.path), os.getcwd(), dict(os.environ))
    shown = args[0] if fn is _call_on_mesh else target  # a test on a mesh goes by its own name
    return f"{shown.module}.{shown.qualname}", _ask(request, ranks, timeout)


def _raise_failures(name: str, answers: Sequence[_Answer], headline: str | None = None) -> NoReturn:
    __tracebackhide__ = True
    failures = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, _Failure)}
    ordered = sorted(failures, key=lambda rank: (failures[rank].is_echo, rank))
    if headline is None and [failure.kinds[0] for failure in failures.values()] == ["builtins.Skipped"] * len(answers):
        import pytest

        pytest.skip(failures[0].message)  # a test that skips itself on every rank is skipped
    errors = {rank: failures[rank].load() for rank in sorted(failures)}
    lines = [headline or f"{name} failed on rank {ordered[0]} of {len(answers)}: {failures[ordered[0]].line}"]
    groups: dict[str, list[int]] = {}
    for rank in ordered:
        groups.setdefault(failures[rank].place, []).append(rank)
    for first, *others in groups.values():
        lines.append(f"\n--- rank {', '.join(map(str, [first, *others]))} ---\n{failures[first].text}")
        lines += [f"rank {r}: {failures[r].line}" for r in others if failures[r].line != failures[first].line]
    returned = [str(rank) for rank in range(len(answers)) if rank not in failures]
    if returned:
        lines.append(f"\n--- rank {', '.join(returned)} ---\nreturned")
    raise RankError("\n".join(lines), errors) from (errors[ordered[0]] if ordered else None)


# ---------------------------------------------------------------------------------------------------------------------
# Comparisons


def _full(value: Any) -> Any:
    value = whole(value) if isinstance(value, DTensor) else value
    return value.detach() if isinstance(value, torch.Tensor) else value


def _leaves(tree: Any, path: str, caller: str) -> dict[str, torch.Tensor]:
    if tree is None:
        return {}
    if isinstance(tree, torch.Tensor):
        return {path or "tensor": _full(tree)}
    if isinstance(tree, int | float | complex):
        wide = {float: torch.float64, complex: torch.complex128}  # torch would make them float32 and complex64
        return {path or "number": torch.tensor(tree, dtype=wide.get(type(tree)))}
    if not isinstance(tree, Mapping | list | tuple):
        raise TypeError(
            f"{caller}: {path or 'the tree'} is a {type(tree).__name__}; "
            "trees are mappings, lists and tuples of tensors and numbers."
        )
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        below = _leaves(value, f"{path}/{key}" if path else str(key), caller)
        if found.keys() & below.keys():
            raise TypeError(f"{caller}: two leaves are called {min(found.keys() & below.keys())!r}")
        found.update(below)
    return found


def _pair_leaves(actual: Any, expected: Any, caller: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    __tracebackhide__ = True
    a, b = _leaves(actual, "", caller), _leaves(expected, "", caller)
    missing, extra = [name for name in b if name not in a], [name for name in a if name not in b]
    if missing or extra:
        raise AssertionError(f"{caller}: keys differ: missing {_listed(missing)}, unexpected {_listed(extra)}")
    if not b:
        raise AssertionError(f"{caller}: both trees are empty; comparing nothing always succeeds")
    return [(name, a[name], b[name]) for name in b]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def _difference(actual: Any, expected: Any, rtol: float | None, atol: float | None) -> str:
    """What torch.testing has to say about two tensors; empty when they are close."""
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=False, check_device=False)
    except AssertionError as error:
        return str(error).strip()
    return ""


def _disparity(actual: torch.Tensor, expected: torch.Tensor, tol: float, floor: float) -> str:
    """Why `actual` is not `expected` in norm; empty when it is."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return _difference(actual, expected, 0.0, 0.0)
    a, b = _as_float64(actual), _as_float64(expected)
    for what, x in (("actual", a), ("expected", b)):
        if not x.isfinite().all():
            return f"{what} has {int((~x.isfinite()).sum())} elements that are NaN or infinite, of {x.numel()}"
    error, limit = _norm(a - b), tol * max(_norm(b), floor)
    if not a.numel() or (error <= limit and math.isfinite(limit)):
        return ""
    gap = (a - b).abs()
    index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    return (
        f"|actual - expected| = {error:.3g} > {limit:.3g} = {tol:g} * max(|expected| = {_norm(b):.3g}, {floor:.3g}); "
        f"largest difference {float(gap.max()):.3g} at {index}: {a[index].item():.6g} instead of {b[index].item():.6g}"
    )


def _as_float64(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().to(torch.complex128 if x.dtype.is_complex else torch.float64)


def _norm(x: torch.Tensor) -> float:
    """The Euclidean norm in float64, where squares neither overflow nor vanish."""
    x = _as_float64(x)
    largest = float(x.abs().max()) if x.numel() else 0.0
    return largest * float(torch.linalg.vector_norm(x / largest)) if largest else 0.0


def _raise_problems(found: Iterable[tuple[str, str]]) -> None:
    """Raise what is wrong with leaves, by their names, where it is not empty."""
    __tracebackhide__ = True
    problems = [f"{name}: {problem}" for name, problem in found if problem]
    if problems:
        count = f"{len(problems)} leaves differ" if len(problems) > 1 else "1 leaf differs"
        more = [f"... and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise AssertionError("\n".join([count, *problems[:8], *more]))


# ---------------------------------------------------------------------------------------------------------------------
# Counting collectives

_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "receive", "other")
_OTHER = re.compile("barrier|gather|p2p|recv|reduce|scatter|send")  # their namespaces hold waits and wrappers too


class _CollectiveMode(TorchDispatchMode):
    """Sees every operator of this thread, and of autograd's threads while they work for it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts = Collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first, so that the collectives it issues are seen here
        kwargs = kwargs or {}
        namespace, _, name = func.name().partition(".")[0].partition("::")
        kind = _kind(namespace, name)
        if kind is not None:
            self.counts.add(kind, _input_bytes(namespace, name, kind, [*args, *kwargs.values()]))
        return func(*args, **kwargs)


def _kind(namespace: str, name: str) -> str | None:
    """The kind of collective that an operator is, if it is one."""
    if namespace == "_dtensor" and name == "shard_dim_alltoall":
        return "all_to_all"
    if namespace not in ("c10d", "_c10d_functional", "shardfn"):
        return None
    plain = name.replace("_", "").replace("recv", "receive")  # both "allgather_" and "all_gather_into_tensor" occur
    named = next((kind for kind in _KINDS if plain.startswith(kind.replace("_", ""))), None)
    return named or ("other" if _OTHER.search(name) else None)


def _input_bytes(namespace: str, name: str, kind: str, values: Sequence[Any]) -> int:
    if "barrier" in name:
        return 0  # its tensor only names the device
    paired = kind in ("all_gather", "reduce_scatter", "all_to_all") or name in ("gather_", "scatter_")
    outputs_first = namespace in ("c10d", "shardfn") and paired
    given = map(pytree.tree_leaves, values[1:2] if outputs_first else values)
    sizes = (sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor)) for leaves in given)
    return next(filter(None, sizes), 0)
