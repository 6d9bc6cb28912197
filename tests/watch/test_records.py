"""What a rank says of itself."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import until

from shardfn._torch import Place, stacks_of_threads
from shardfn.testing import run
from shardfn.watch import records
from shardfn.watch.records import Record


@contextmanager
def _in_thread(does: Callable[[], Any]) -> Iterator[int]:
    """The number of a thread that does something and, perhaps, stands in it."""
    thread = threading.Thread(target=does, daemon=True)
    thread.start()
    assert thread.ident is not None
    yield thread.ident
    thread.join(20)
    assert not thread.is_alive()


def test_goes_there_and_back() -> None:
    record = Record(3, "fsdp=1, tp=1", "host", 17, counts={"g": 4}, marks={"k": [(1, 2)]}, at=["a.py:1 in f"])
    again = Record.loads(record.dumps())
    assert again.counts == {"g": 4}
    assert again.marks == {"k": [[1, 2]]}
    assert again.name == "rank 3 (fsdp=1, tp=1)"


def test_how_a_process_is() -> None:
    child = subprocess.Popen(["sleep", "60"])
    record = Record(0, "", records.this_host(), child.pid)
    assert records.state_of(record) == "runs"
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert records.state_of(record) == "stopped"
    child.kill()
    child.wait()
    assert records.state_of(record) == "gone"
    assert records.state_of(Record(0, "", "elsewhere", os.getpid())) == "unknown"


def test_a_thread_that_computes_does_not_wait() -> None:
    event = threading.Event()
    with _in_thread(event.wait) as thread:
        waits, stack = records.look_at(thread)
        assert waits is None
        assert "in wait" in stack[0]
        event.set()


def test_where_all_threads_are(tmp_path: Path) -> None:
    """As `traceback` says it, also in a file with another alphabet in its name; the deepest 100 frames."""
    path = tmp_path / "späť.py"
    path.write_text("def down(n, then):\n    return down(n - 1, then) if n else then()\n")
    module: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), module)
    for depth, shown in ((3, 4), (200, 98)):
        event = threading.Event()
        with _in_thread(partial(module["down"], depth, event.wait)) as thread:
            until(lambda thread=thread, shown=shown: len(stacks_of_threads()[thread]) > shown)
            stack = stacks_of_threads()[thread]
            assert [place for place in stack if place.path == str(path)] == [(str(path), 2, "down")] * shown
            assert stack[0].function == "wait" and stack[0].path == threading.__file__
            assert threading.get_ident() in stacks_of_threads()
            event.set()


@pytest.mark.parametrize(("bottom", "waits"), [("train.py", "all_reduce"), (threading.__file__, None)])
def test_a_backward_in_a_thread_of_torch(monkeypatch: pytest.MonkeyPatch, bottom: str, waits: str | None) -> None:
    """Which waits in the place of the one that trains; not so a thread of Python's."""
    in_torch = Place(dist.distributed_c10d.__file__, 7, "all_reduce")
    stacks = {1: [Place("train.py", 3, "main")], 2: [in_torch, Place("model.py", 4, "hook"), Place(bottom, 5, "run")]}
    monkeypatch.setattr("shardfn._torch.stacks_of_threads", lambda: dict(stacks))
    assert records.look_at(1)[0] == waits
    assert records.look_at(1)[1][0] == ("train.py:3 in main" if waits is None else "model.py:4 in hook")


def _waiting_rank() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        event = threading.Event()

        def gathers() -> None:
            event.set()
            dist.all_reduce(torch.ones(2))

        with _in_thread(gathers) as thread:
            event.wait()
            waits, stack = None, list[str]()
            while waits is None:
                waits, stack = records.look_at(thread)
            assert waits == "all_reduce"
            assert stack[0].startswith("test_records.py")
            _store().set("seen", "")
    else:
        _store().wait(["seen"], timedelta(seconds=20))
        dist.all_reduce(torch.ones(2))


def _store() -> Any:
    return vars(dist.distributed_c10d)["_get_default_store"]()


def test_a_thread_that_waits_for_others() -> None:
    run(_waiting_rank, ranks=2)


def _errors(kind: str, event: threading.Event, ready: threading.Event) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def fails(grad: torch.Tensor) -> None:
        raise ValueError("no gradient")

    y.register_hook(fails)
    try:
        if kind == "backward":
            y.sum().backward()
        raise OSError("no disk")
    except (ValueError, OSError):
        ready.set()
        event.wait()


def _broken(kind: str) -> str | None:
    event, ready = threading.Event(), threading.Event()
    with _in_thread(lambda: _errors(kind, event, ready)) as thread:
        ready.wait()
        broken = records.broken_off(thread)
        event.set()
    return broken


def test_an_error_in_a_backward_breaks_off_what_others_do() -> None:
    broken = _broken("backward")
    assert broken is not None
    assert broken.startswith("what the others do by ValueError: no gradient, at test_records.py")


def test_another_error_does_not() -> None:
    assert _broken("loader") is None


def test_what_torch_catches_itself_does_not() -> None:
    event, ready = threading.Event(), threading.Event()
    raises = "def tries():\n    try:\n        raise ValueError('not for these sizes')\n"
    source = f"{raises}    except ValueError:\n        ready.set()\n        event.wait()\n"
    inside: dict[str, Any] = {"event": event, "ready": ready}
    exec(compile(source, str(Path(torch.__file__).parent / "autograd" / "tries.py"), "exec"), inside)
    with _in_thread(inside["tries"]) as thread:
        ready.wait()
        assert records.broken_off(thread) is None
        event.set()


def test_an_error_in_a_line() -> None:
    try:
        raise ValueError("one\ntwo")
    except ValueError as error:
        text = records.described(error)
    assert text.startswith("ValueError: one, at test_records.py:")
    assert "two" not in text
