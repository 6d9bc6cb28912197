"""Functions that run on many ranks: `run`, `run_raises`, `on_meshes`."""

from __future__ import annotations

import atexit
import functools
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from shardfn.testing import process_pool
from shardfn.testing.process_pool import Answer, Failure

T = TypeVar("T")


class RankError(AssertionError):
    """A function failed on at least one rank.

    The message holds the traceback of every rank that failed, causes before echoes, then lowest rank first; equal
    tracebacks are shown once. `errors` maps ranks to exceptions, and `__cause__` is the exception of the lowest rank
    that failed by itself. A rank that did not answer in time has a `TimeoutError` and its stack, one whose process
    ended has a `ChildProcessError`. It is an `AssertionError`, so that test runners report a failed test and not a
    broken one.

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


def run(fn: Callable[..., T], *args: Any, ranks: int = 4, timeout: float = 240, **kwargs: Any) -> list[T]:
    """Call `fn(*args, **kwargs)` on every rank of a gloo process group and return the results in rank order.

    The ranks are processes of a session-wide pool with torch already imported: the first call takes seconds, later ones
    milliseconds. Each call starts with `torch.manual_seed(0)` and default dtype float32, and sees the caller's
    `sys.path`, working directory, environment (plus `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`; minus
    `MASTER_*`) and warning filters: where pytest turns warnings into errors, the ranks do too. Module globals live on
    in the ranks from one call to the next, until a call fails: then new processes take over.

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
    name, answers = process_pool.call_ranks(fn, args, kwargs, ranks, timeout)
    if any(isinstance(answer, Failure) for answer in answers):
        _raise_failures(name, answers)
    return [process_pool.load_result(name, rank, answer) for rank, answer in enumerate(answers)]


def run_raises(
    exc_type: type[BaseException],
    fn: Callable[..., Any],
    *args: Any,
    match: str | None = None,
    ranks: int = 4,
    timeout: float = 240,
    **kwargs: Any,
) -> list[str]:
    """Call `fn` as `run` does and require that every rank raises `exc_type`.

    An error that only some ranks raise is a hang on the others, which is why all of them must.

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
    name, answers = process_pool.call_ranks(fn, args, kwargs, ranks, timeout)
    wanted = process_pool.class_name(exc_type)
    expected = exc_type.__name__ if match is None else f"{exc_type.__name__} matching {match!r}"
    for rank, answer in enumerate(answers):
        if not isinstance(answer, Failure):
            what = f"rank {rank} of {ranks} returned {reprlib.repr(process_pool.load_result(name, rank, answer))}"
        elif wanted not in answer.kinds or (match is not None and not re.search(match, answer.message)):
            what = f"rank {rank} of {ranks} raised {answer.line}"
        else:
            continue
        _raise_failures(name, answers, f"run_raises: {name}: expected {expected} on every rank, but {what}")
    return [answer.message for answer in answers if isinstance(answer, Failure)]


def on_meshes(*meshes: Mapping[str, int], timeout: float = 240) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a pytest test so that it runs once per mesh, on all ranks of that mesh at the same time.

    The test's first parameter receives the `DeviceMesh` (on CPU), the others come from `pytest.mark.parametrize`,
    fixtures or hypothesis in the parent process and must pickle. Without arguments the meshes are (fsdp, tp) = (4, 1),
    (2, 2) and (1, 4).

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
        TypeError: the test takes no parameter.
    """
    import pytest

    chosen = [dict(axes) for axes in meshes] or [{"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}]

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        parameters = list(inspect.signature(test).parameters)
        if not parameters:
            raise TypeError(f"on_meshes: {test.__name__}() takes no parameter; its first one receives the mesh.")

        @functools.wraps(test)
        def run_on_mesh(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            values = {**dict(zip(parameters, args, strict=False)), **kwargs}
            axes = values.pop(parameters[0])
            target, ranks = process_pool.find_target(test), math.prod(axes.values())
            run(process_pool.call_on_mesh, target, axes, values, ranks=ranks, timeout=timeout)

        ids = ["-".join(f"{axis}{size}" for axis, size in axes.items()) for axes in chosen]
        return pytest.mark.parametrize(parameters[0], chosen, ids=ids)(run_on_mesh)

    return decorate


@atexit.register
def shutdown() -> None:
    """End the pool's processes now; the next `run` starts new ones.

    Runs at interpreter exit by itself. Call it to free memory earlier.

        >>> from shardfn.testing import shutdown
        >>> shutdown()
    """
    with process_pool.teams_lock:
        for ranks in list(process_pool.teams):
            process_pool.end_team(ranks)


def _raise_failures(name: str, answers: Sequence[Answer], headline: str | None = None) -> NoReturn:
    __tracebackhide__ = True
    failures = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Failure)}
    ordered = sorted(failures, key=lambda rank: (failures[rank].is_echo, rank))
    if headline is None and [failure.kinds[0] for failure in failures.values()] == ["builtins.Skipped"] * len(answers):
        import pytest

        pytest.skip(failures[0].message)  # a test that skips itself on every rank is skipped
    errors = {rank: failures[rank].load() for rank in sorted(failures)}
    lines = [headline or f"{name} failed on rank {ordered[0]} of {len(answers)}: {failures[ordered[0]].line}"]
    groups: dict[str, list[int]] = {}
    for rank in ordered:
        groups.setdefault(re.sub(r"\]:\d+", "]", failures[rank].text), []).append(rank)  # but for gloo's ports
    lines += [f"\n--- rank {', '.join(map(str, alike))} ---\n{text}" for text, alike in groups.items()]
    returned = [str(rank) for rank in range(len(answers)) if rank not in failures]
    if returned:
        lines.append(f"\n--- rank {', '.join(returned)} ---\nreturned")
    raise RankError("\n".join(lines), errors) from (errors[ordered[0]] if ordered else None)
