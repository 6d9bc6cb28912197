"""The rank pool, and the checks that every other test relies on: each must be seen to fail when it should."""

import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.testing import (
    Collectives,
    RankError,
    assert_close,
    assert_parity,
    assert_trees_close,
    count_collectives,
    on_meshes,
    process_pool,
    run,
    run_raises,
    shutdown,
)

ENVIRON = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SHARDFN_TEST")


# --- bodies, imported by the ranks ---


class UnpicklableError(ValueError):
    """Cannot be built again from its message."""

    def __init__(self, *, rank: int) -> None:
        super().__init__(f"special {rank}")


class Shapes:
    @staticmethod
    def area(width: int, height: int) -> int:
        return width * height


def all_reduce(offset: float = 0.0) -> tuple[int, float]:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return dist.get_rank(), x.item() + offset


def group_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def environment() -> dict[str, str | None]:
    os.environ["SHARDFN_LEAK"] = "1"
    return {name: os.environ.get(name) for name in ENVIRON}


def leaked() -> bool:
    return "SHARDFN_LEAK" in os.environ


def draw() -> Tensor:
    return torch.rand(3)


def threads_and_dtype() -> tuple[int, torch.dtype]:
    seen = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    return seen


def identity(value: Any) -> Any:
    return value


def unpicklable() -> Callable[[], None]:
    return lambda: None


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the cause")
    dist.barrier()


def fail_all() -> None:
    raise KeyError(f"key {dist.get_rank()}")


def fail_alike() -> None:
    raise KeyError("key")


def fail_some() -> int:
    if dist.get_rank() % 2:
        raise ValueError("odd")
    return 5


def fail_special() -> None:
    raise UnpicklableError(rank=dist.get_rank())


def fail_chain() -> None:
    dist.barrier()
    if dist.get_rank() == 2:
        raise ValueError("the cause")
    if dist.get_rank() == 0:  # looks as if the peer were to blame, and is lower
        raise RuntimeError("Connection closed by peer [127.0.0.1]:12345")


def leave() -> None:
    sys.exit(3)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()
    dist.barrier()


def die_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGABRT)
    dist.barrier()


def die_with_a_child(fifo: str) -> None:
    """The child holds the pipe to the parent open until somebody writes to `fifo`."""
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads
            child = os.fork()
        if child == 0:
            Path(fifo).read_text()
        os._exit(9)
    dist.barrier()


def leave_collective_open() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def destroy_group() -> None:
    dist.destroy_process_group()


def many_groups() -> int:
    for _ in range(30):
        dist.new_group([0, 1])
    return len(os.listdir("/dev/fd"))


def warn() -> None:
    warnings.warn("beware", UserWarning, stacklevel=2)


def nested() -> None:
    run(group_size, ranks=1)


# --- run ---


def test_results_come_in_rank_order() -> None:
    assert run(all_reduce, offset=0.5) == [(0, 10.5), (1, 10.5), (2, 10.5), (3, 10.5)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 2])
def test_group_has_the_size_asked_for(ranks: int) -> None:
    assert run(group_size, ranks=ranks) == [(rank, ranks) for rank in range(ranks)]


def test_processes_are_kept() -> None:
    pids = run(os.getpid)
    assert len(set(pids)) == 4
    assert os.getpid() not in pids
    assert run(os.getpid) == pids


def test_environment_is_the_callers_plus_the_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("SHARDFN_TEST", "here")
    monkeypatch.chdir(tmp_path)
    expected = [(str(rank), str(rank), "2", "2", None, None, "here") for rank in range(2)]
    assert [tuple(seen.values()) for seen in run(environment, ranks=2)] == expected
    assert run(leaked, ranks=2) == [False, False]
    assert run(os.getcwd, ranks=2) == [str(tmp_path)] * 2


def test_state_is_reset_between_calls() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    for _ in range(2):
        for actual in run(draw, ranks=2):
            assert torch.equal(actual, expected)
        assert run(threads_and_dtype, ranks=2) == [(1, torch.float32)] * 2


def test_tensors_travel_both_ways() -> None:
    value = {"w": torch.arange(6.0).view(2, 3).requires_grad_(), "n": torch.ones(3, dtype=torch.bfloat16)}
    for actual in run(identity, value, ranks=2):
        assert_trees_close(actual, value, rtol=0, atol=0)
        assert actual["w"].requires_grad


def test_functions_go_by_name() -> None:
    assert run(Shapes.area, 2, height=3, ranks=1) == [6]
    with pytest.raises(TypeError, match="cannot be imported by name on the ranks; define it with `def`"):
        run(lambda: None)

    def local() -> None:
        pass

    with pytest.raises(TypeError, match=r"local.*cannot be imported by name"):
        run(local)
    impostor = types.FunctionType(group_size.__code__, {}, "group_size")
    impostor.__module__ = __name__
    with pytest.raises(TypeError, match="group_size is not the function that was passed"):
        run(impostor)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match="the arguments of identity cannot be sent between processes"):
        run(identity, lambda: None)
    run_raises(TypeError, unpicklable, match="the result .* cannot be sent between processes", ranks=1)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True])
def test_ranks_must_be_a_positive_number(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"run: ranks=.* is not a group size"):
        run(group_size, ranks=ranks)


def test_warning_filters_are_the_callers() -> None:
    run_raises(UserWarning, warn, match="beware", ranks=2)  # pytest makes them errors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(warn, ranks=2)
        warnings.filterwarnings("error", message="BEW", category=UserWarning)
        run_raises(UserWarning, warn, match="beware", ranks=2)


def test_ranks_cannot_run_ranks() -> None:
    run_raises(RuntimeError, nested, match="called on rank 0", ranks=1)


def test_modules_are_found_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, answer in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "namesake.py").write_text(f"def answer():\n    return {answer}\n")
        target = process_pool._Target("namesake", str(tmp_path / folder / "namesake.py"), "answer", 0)
        monkeypatch.syspath_prepend(str(tmp_path / "a"))
        assert run(call_target, target, ranks=1) == [answer]


def call_target(target: process_pool._Target) -> int:
    return target.load()()


# --- errors ---


def test_the_rank_that_failed_is_the_cause() -> None:
    with pytest.raises(RankError, match=r"test_testing.fail_on failed on rank 2 of 4: ValueError: the cause") as info:
        run(fail_on, 2)
    message = str(info.value)
    assert message.index("--- rank 2 ---") < message.index("--- rank 0, 1, 3 ---")
    assert 'in fail_on\n    raise ValueError("the cause")' in message
    assert "shardfn/testing/" not in message
    assert isinstance(info.value.__cause__, ValueError)
    assert str(info.value.__cause__) == "the cause"
    assert sorted(info.value.errors) == [0, 1, 2, 3]


def test_a_lower_rank_that_lost_its_connection_is_not_the_cause() -> None:
    with pytest.raises(RankError, match="failed on rank 2 of 4: ValueError") as info:
        run(fail_chain)
    assert isinstance(info.value.__cause__, ValueError)
    assert str(info.value).endswith("--- rank 1, 3 ---\nreturned")


def test_equal_tracebacks_are_shown_once() -> None:
    with pytest.raises(RankError, match="failed on rank 0 of 4: KeyError: 'key'") as info:
        run(fail_alike)
    assert str(info.value).count("Traceback") == 1 and "--- rank 0, 1, 2, 3 ---" in str(info.value)
    with pytest.raises(RankError, match="failed on rank 0 of 4: KeyError: 'key 0'") as info:
        run(fail_all)
    assert str(info.value).count("Traceback") == 4 and str(info.value).endswith("KeyError: 'key 3'")


def test_sys_exit_is_an_error_like_others() -> None:
    with pytest.raises(RankError, match="failed on rank 0 of 2: SystemExit: 3"):
        run(leave, ranks=2)


def test_exceptions_that_do_not_pickle() -> None:
    with pytest.raises(RankError, match=r"failed on rank 0 of 2: test_testing.UnpicklableError: special 0") as info:
        run(fail_special, ranks=2)
    assert isinstance(info.value.__cause__, RuntimeError)
    assert run_raises(ValueError, fail_special, match=r"special \d", ranks=2) == ["special 0", "special 1"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_run_raises_returns_messages(ranks: int) -> None:
    assert run_raises(LookupError, fail_all, match=r"key \d", ranks=ranks) == [f"'key {n}'" for n in range(ranks)]


def test_run_raises_wants_every_rank() -> None:
    with pytest.raises(RankError, match=r"expected ValueError on every rank, but rank 0 of 4 returned 5") as info:
        run_raises(ValueError, fail_some)
    assert sorted(info.value.errors) == [1, 3]
    with pytest.raises(RankError, match="expected KeyError on every rank, but rank 0 of 2 returned None"):
        run_raises(KeyError, identity, None, ranks=2)


def test_run_raises_wants_type_and_message() -> None:
    with pytest.raises(RankError, match="expected ValueError on every rank, but rank 0 of 2 raised KeyError: 'key 0'"):
        run_raises(ValueError, fail_all, ranks=2)
    with pytest.raises(RankError, match="expected KeyError matching 'key 0' on every rank, but rank 1 of 2 raised"):
        run_raises(KeyError, fail_all, match="key 0", ranks=2)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("fail", ["one", "all", "dead"])
def test_a_failure_leaves_nothing_behind(fail: str) -> None:
    before = run(os.getpid)
    with pytest.raises(RankError):
        run(*{"one": (fail_on, 1), "all": (fail_all,), "dead": (die_on, 3, "exit")}[fail])
    assert run(all_reduce) == [(0, 10.0), (1, 10.0), (2, 10.0), (3, 10.0)]
    assert not set(run(os.getpid)) & set(before)
    assert not any(is_running(pid) for pid in before)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- ranks that hang or die ---


def test_a_hang_shows_where() -> None:
    run(group_size, ranks=3)  # starts the processes and imports this module
    with pytest.raises(RankError, match=r"hang_on failed on rank 1 of 3: TimeoutError: no answer in 2 s") as info:
        run(hang_on, 1, ranks=3, timeout=2)
    cause, echo = str(info.value).split("--- rank 0, 2 ---")
    assert "--- rank 1 ---" in cause
    assert "threading.py" in cause
    assert "in hang_on" in cause
    assert "in barrier" in echo
    assert "in hang_on" in echo
    assert isinstance(info.value.__cause__, TimeoutError)
    assert run(group_size, ranks=3) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("how", "text"),
    [("exit", "ended with exit code 7"), ("kill", "was killed by SIGKILL"), ("abort", "was killed by SIGABRT")],
)
def test_a_rank_that_dies_is_named_at_once(how: str, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=f"die_on failed on rank 2 of 4: .*the process of rank 2 {text}") as info:
        run(die_on, 2, how, timeout=600)
    assert time.monotonic() - started < 50
    assert isinstance(info.value.__cause__, ChildProcessError)


@pytest.mark.slow
def test_a_rank_that_dies_and_leaves_a_child_is_named_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_SETTLE_TIMEOUT", 0.5)
    started = time.monotonic()
    os.mkfifo(tmp_path / "fifo")
    try:
        with pytest.raises(RankError, match="the process of rank 0 ended with exit code 9"):
            run(die_with_a_child, str(tmp_path / "fifo"), ranks=2, timeout=60)
        assert time.monotonic() - started < 50
    finally:
        (tmp_path / "fifo").write_text("")


def test_a_rank_that_died_between_calls_is_replaced() -> None:
    pids = run(os.getpid, ranks=2)
    os.kill(pids[1], signal.SIGKILL)
    while process_pool.teams[2].is_alive():
        os.sched_yield()
    assert run(group_size, ranks=2) == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_a_collective_left_open_is_the_fault_of_its_own_call() -> None:
    run(group_size, ranks=2)
    with pytest.raises(RankError, match="left a collective that not every rank joined"):
        run(leave_collective_open, ranks=2, timeout=2)
    assert run(group_size, ranks=2) == [(0, 2), (1, 2)]


def test_a_call_may_destroy_the_group() -> None:
    run(destroy_group, ranks=2)
    assert run(all_reduce, ranks=2) == [(0, 3.0), (1, 3.0)]


def _threads_of_devices() -> int:
    _groups = [dist.new_group([0, 1]) for _ in range(3)]
    return sum(task.read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").glob("*/comm"))


def test_groups_share_a_device() -> None:
    """Whose thread wakes more than a hundred times a second."""
    assert run(_threads_of_devices, ranks=2) == [1, 1]


@pytest.mark.slow
def test_process_groups_do_not_pile_up() -> None:
    files = [max(run(many_groups, ranks=2)) for _ in range(8)]
    assert max(files) < 2 * process_pool._MAX_FILES
    assert files != sorted(files)  # new processes have taken over


def test_shutdown_ends_the_processes() -> None:
    pids = run(os.getpid, ranks=2)
    shutdown()
    assert not any(is_running(pid) for pid in pids)
    assert not set(run(os.getpid, ranks=2)) & set(pids)


SCRIPT = """
import os
from shardfn.testing import RankError, run

def pid_and_name():
    return os.getpid(), __name__

def fail():
    raise ValueError("in a script")

if __name__ == "__main__":
    print(*[pid for pid, _ in run(pid_and_name, ranks=2)])
    try:
        run(fail, ranks=2)
    except RankError as error:
        print(type(error.__cause__).__name__)
"""


@pytest.mark.slow
def test_a_plain_script_works_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    pids, error = done.stdout.splitlines()
    assert len(pids.split()) == 2
    assert not any(is_running(int(pid)) for pid in pids.split())
    assert error == "ValueError"


COPIES = """
import sys
sys.path.insert(0, sys.argv[1])
import shardfn
from shardfn.testing import run

def place():
    return shardfn.__file__

if __name__ == "__main__":
    print(*{shardfn.__file__, *run(place, ranks=2)})
"""


@pytest.mark.slow
@pytest.mark.parametrize("started_in", ["mine", "other"])
def test_ranks_have_the_copy_of_the_package_that_the_caller_has(started_in: str, tmp_path: Path) -> None:
    """The server from which they are forked imports the one that it finds, which may be another one."""
    for name in ("mine", "other"):
        shutil.copytree(Path(sf.__file__).parent, tmp_path / name / "shardfn")
    (tmp_path / "script.py").write_text(COPIES)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "mine")]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "other")}
    done = subprocess.run(
        command, cwd=tmp_path / started_in, env=environ, capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "mine" / "shardfn" / "__init__.py")]


# --- on_meshes ---


@on_meshes()
def test_default_meshes(mesh: DeviceMesh) -> None:
    assert mesh.mesh_dim_names == ("fsdp", "tp")
    assert mesh.device_type == "cpu"
    assert mesh.shape in ((4, 1), (2, 2), (1, 4))
    assert dist.get_world_size() == 4
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    assert x.item() == mesh["tp"].size()


@on_meshes({"fsdp": 3}, {"fsdp": 2, "tp": 2})
@pytest.mark.parametrize("size", [1, 17])
def test_meshes_with_parameters_and_fixtures(mesh: DeviceMesh, size: int, tmp_path: Path) -> None:
    assert dist.get_world_size() == mesh.size() == (3 if mesh.ndim == 1 else 4)
    assert size in (1, 17)
    assert tmp_path.exists()


@settings(max_examples=5, deadline=None)
@given(size=st.integers(0, 5))
@on_meshes({"fsdp": 2})
def test_meshes_with_hypothesis(mesh: DeviceMesh, size: int) -> None:
    sizes = torch.tensor([float(size), -float(size)])
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    assert sizes.tolist() == [size, -size]  # drawn once, in the parent


def hidden(test: Callable[..., None]) -> Callable[..., None]:
    """Keeps pytest from collecting a test that fails."""
    test.__dict__["__test__"] = False
    return test


@hidden
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1})
def fails_on_one_rank(mesh: DeviceMesh, rank: int) -> None:
    assert dist.get_rank() != rank, "not this one"


@hidden
@on_meshes({"fsdp": 2})
def skips_from_rank(mesh: DeviceMesh, rank: int) -> None:
    if dist.get_rank() >= rank:
        pytest.skip("not today")


def test_a_test_on_a_mesh_can_fail() -> None:
    with pytest.raises(RankError, match=r"test_testing.fails_on_one_rank failed on rank 3 of 4: AssertionError: not"):
        fails_on_one_rank(mesh={"fsdp": 2, "tp": 2}, rank=3)
    fails_on_one_rank(mesh={"fsdp": 2, "tp": 2}, rank=4)


def test_a_test_on_a_mesh_is_skipped_when_every_rank_skips() -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        skips_from_rank(mesh={"fsdp": 2}, rank=0)
    with pytest.raises(RankError, match="skips_from_rank failed on rank 1 of 2: Skipped: not today"):
        skips_from_rank(mesh={"fsdp": 2}, rank=1)


def test_mesh_ids_are_readable() -> None:
    (mark,) = fails_on_one_rank.__dict__["pytestmark"]
    assert mark.kwargs["ids"] == ["fsdp2-tp2", "fsdp1"]


def test_a_test_on_meshes_takes_one() -> None:
    with pytest.raises(TypeError, match="its first one receives the mesh"):
        on_meshes()(lambda: None)


# --- comparisons ---


def test_assert_close() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert_close(x, x + 1e-7)
    assert_close(0.1 + 0.2, 0.3)
    with pytest.raises(AssertionError, match=r"w: (.|\n)*Greatest absolute difference: 1\.0 at index \(1, 2\)"):
        assert_close(x, x + torch.tensor([[0, 0, 0], [0, 0, 1.0]]), name="w")
    with pytest.raises(AssertionError, match="not close"):
        assert_close(x, x + 1e-4, rtol=0, atol=1e-5)
    assert_close(x, x + 1e-4, rtol=0, atol=1e-3)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(x, x[:1])
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(x, x.double())
    with pytest.raises(AssertionError, match="not close"):
        assert_close(x * math.nan, x * math.nan)


def test_assert_trees_close() -> None:
    tree = {"a": torch.ones(2), "b": [torch.zeros(0), 3, None], "c": torch.arange(3)}
    assert_trees_close(tree, {**tree, "d": None})
    with pytest.raises(AssertionError, match="keys differ: missing 'd', unexpected none"):
        assert_trees_close(tree, {**tree, "d": torch.ones(1)})
    with pytest.raises(AssertionError, match="keys differ: missing none, unexpected 'c'"):
        assert_trees_close(tree, {"a": tree["a"], "b": tree["b"]})
    with pytest.raises(AssertionError, match=r"2 leaves differ\na: (.|\n)*\nb/1: "):
        assert_trees_close(tree, {**tree, "a": torch.ones(2) + 1, "b": [torch.zeros(0), 4]})
    with pytest.raises(AssertionError, match=r"1 leaf differs\nc: (.|\n)*dtype"):
        assert_trees_close(tree, {**tree, "c": torch.arange(3, dtype=torch.int32)})
    with pytest.raises(AssertionError, match="both trees are empty"):
        assert_trees_close({}, {})
    with pytest.raises(TypeError, match="a is a str"):
        assert_trees_close({"a": "x"}, {"a": "x"})
    with pytest.raises(TypeError, match="two leaves are called '1'"):
        assert_trees_close({1: 1.0, "1": 2.0}, {1: 1.0, "1": 2.0})


def test_assert_parity_is_relative_to_the_leaf() -> None:
    big, small = torch.full((4,), 1e6, dtype=torch.float64), torch.full((4,), 1e4, dtype=torch.float64)
    assert_parity({"big": big, "small": small * (1 + 1e-13)}, {"big": big, "small": small})
    with pytest.raises(
        AssertionError, match=r"1 leaf differs\nsmall: \|actual - expected\| = 2e-06 > 2e-08 = 1e-12 \*"
    ):
        assert_parity({"big": big, "small": small * (1 + 1e-10)}, {"big": big, "small": small})
    assert_parity({"big": big, "small": small * (1 + 1e-10)}, {"big": big, "small": small}, tol=1e-9)


def test_assert_parity_has_a_floor_for_zero_leaves() -> None:
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    assert_parity({"one": one, "zero": zero + 5e-16}, {"one": one, "zero": zero})
    with pytest.raises(AssertionError, match=r"zero: .*largest difference 5e-15 at \(0,\): 5e-15 instead of 0"):
        assert_parity({"one": one, "zero": zero + 5e-15}, {"one": one, "zero": zero})
    assert_parity(zero, zero)
    with pytest.raises(AssertionError, match="tensor: "):
        assert_parity(zero + 1e-300, zero)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_assert_parity_never_passes_nan_or_infinity(bad: float) -> None:
    good, wrong = torch.ones(3), torch.tensor([1.0, bad, 1.0])
    for actual, expected, who in ((wrong, good, "actual"), (good, wrong, "expected"), (wrong, wrong, "actual")):
        with pytest.raises(AssertionError, match=f"w: {who} has 1 elements that are NaN or infinite, of 3"):
            assert_parity({"w": actual}, {"w": expected}, tol=math.inf)
    with pytest.raises(AssertionError, match="w: "):
        assert_parity({"w": good, "v": wrong}, {"w": good + 1, "v": wrong})


def test_assert_parity_checks_what_is_not_a_float() -> None:
    assert_parity({"n": torch.tensor([3]), "e": torch.zeros(0, 2)}, {"n": torch.tensor([3]), "e": torch.zeros(0, 2)})
    for actual in (torch.tensor([4]), torch.tensor([3.0]), torch.tensor(3), 3.0):
        with pytest.raises(AssertionError, match="n: "):
            assert_parity({"n": actual}, {"n": torch.tensor([3])}, tol=1.0)
    with pytest.raises(AssertionError, match="z: "):
        assert_parity({"z": torch.tensor([1 + 1j])}, {"z": torch.tensor([1 - 1j])})
    with pytest.raises(AssertionError, match="number: "):
        assert_parity(1.0 + 1e-10, 1.0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 3), (3, 1), (0,)])
def test_assert_parity_wants_equal_shapes_and_dtypes(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        AssertionError, match=rf"w: torch.float32 {re.escape(str(shape))} instead of torch.float32 \(3,\)"
    ):
        assert_parity({"w": torch.ones(shape)}, {"w": torch.ones(3)})
    with pytest.raises(AssertionError, match=r"w: torch.float32 .* instead of torch.float64"):
        assert_parity({"w": torch.ones(shape)}, {"w": torch.ones(shape, dtype=torch.float64)})


@settings(deadline=None)
@given(size=st.integers(1, 20), scale=st.floats(-5, 5), seed=st.integers(0, 99))
def test_assert_parity_separates_noise_from_errors(size: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(size, dtype=torch.float64, generator=generator) * 10**scale + 10**scale
    wrong = expected.clone()
    wrong[random.Random(seed).randrange(size)] += 1e-6 * float(expected.norm())
    assert_parity(expected * (1 + 1e-14), expected)
    with pytest.raises(AssertionError):
        assert_parity(wrong, expected)


@on_meshes({"fsdp": 2})
def test_comparisons_gather_dtensors(mesh: DeviceMesh) -> None:
    x = torch.arange(6.0)
    shards = distribute_tensor(x, mesh, [Shard(0)])
    assert_close(shards, x)
    assert_trees_close({"x": shards}, {"x": x})
    assert_parity({"x": shards}, {"x": x})
    for check in (assert_trees_close, assert_parity):
        with pytest.raises(AssertionError, match="x: "):
            check({"x": shards}, {"x": x + 1})


# --- counting collectives ---


class Summed(torch.autograd.Function):
    """Forward and backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


def count(kind: str, ranks: int) -> tuple[dict[str, int], int]:
    """Issue one collective of 3 float32 numbers, or of 3 for each rank."""
    x, each = torch.ones(3), [torch.ones(3) for _ in range(ranks)]
    reduce: Callable[..., Any] = dist.all_reduce
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather(each, x),
        "all_gather_object": lambda: dist.all_gather_object([None] * ranks, 1),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce_async": lambda: reduce(x, async_op=True).wait(),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(3 * ranks), torch.ones(3 * ranks)),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(x, 0),
        "gather": lambda: dist.gather(x, each if dist.get_rank() == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter(x, each),
        "reduce": lambda: dist.reduce(x, 0),
        "scatter": lambda: dist.scatter(x, each if dist.get_rank() == 0 else None),
    }
    with count_collectives() as counts:
        calls[kind]()
    assert counts.total == sum(counts.as_dict().values())
    assert set(counts.bytes_of) == set(counts.as_dict())
    return counts.as_dict(), counts.bytes


@pytest.mark.everyday(10)
@pytest.mark.parametrize(
    ("call", "kind", "sizes"),
    [
        ("all_gather", "all_gather", [12, 12]),
        ("all_reduce", "all_reduce", [12, 12]),
        ("all_reduce_async", "all_reduce", [12, 12]),
        ("all_to_all", "all_to_all", [24, 24]),
        ("barrier", "other", [0, 0]),
        ("broadcast", "broadcast", [12, 12]),
        ("gather", "other", [12, 12]),
        ("reduce_scatter", "reduce_scatter", [24, 24]),
        ("reduce", "other", [12, 12]),
        ("scatter", "other", [24, 0]),
    ],
)
def test_each_collective_counts_once(call: str, kind: str, sizes: list[int]) -> None:
    assert run(count, call, 2, ranks=2) == [({kind: 1}, size) for size in sizes]


def count_single() -> Collectives:
    from shardfn._torch import all_gather_single, reduce_scatter_single

    with count_collectives() as counts:
        all_gather_single(torch.empty(4), torch.ones(2))
        reduce_scatter_single(torch.empty(2), torch.ones(4))
        dist.all_reduce(torch.ones(5))
    dist.all_reduce(torch.ones(7))
    return counts


def test_single_tensor_collectives_count() -> None:
    expected = {"all_gather": 8, "reduce_scatter": 16, "all_reduce": 20}
    for counts in run(count_single, ranks=2):
        assert counts.as_dict() == dict.fromkeys(expected, 1)
        assert counts.bytes_of == expected
        assert counts.total == 3
        assert counts.bytes == 44


def count_functional() -> Collectives:
    ops = torch.ops._c10d_functional
    group = dist.group.WORLD
    assert group is not None
    with count_collectives() as counts:
        for out in (
            ops.all_reduce(torch.ones(2), "sum", group.group_name),
            ops.all_gather_into_tensor(torch.ones(2), 2, group.group_name),
            ops.reduce_scatter_tensor(torch.ones(2), "sum", 2, group.group_name),
            ops.all_to_all_single(torch.ones(2), [1, 1], [1, 1], group.group_name),
            ops.broadcast(torch.ones(2), 0, group.group_name),
        ):
            ops.wait_tensor(out)
    return counts


def test_functional_collectives_count() -> None:
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
    for counts in run(count_functional, ranks=2):
        assert counts.as_dict() == dict.fromkeys(kinds, 1)
        assert counts.bytes_of == dict.fromkeys(kinds, 8)


def count_backward() -> tuple[int, int, int]:
    x = torch.ones(4, requires_grad=True)
    with count_collectives() as counts:
        loss = checkpoint(Summed.apply, x, use_reentrant=False).sum()
        forward = counts.all_reduce
        loss.backward()
    assert x.grad is not None
    return forward, counts.all_reduce, int(x.grad[0])


def test_backward_counts() -> None:
    assert run(count_backward, ranks=2) == [(1, 2, 2)] * 2


@on_meshes({"fsdp": 2})
def test_collectives_of_dtensor_count(mesh: DeviceMesh) -> None:
    w = distribute_tensor(torch.ones(4, 4, requires_grad=True), mesh, [Shard(0)])
    w.retain_grad()
    with count_collectives() as counts:
        y = w.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        assert counts.as_dict() == {"all_gather": 1}
        y.sum().backward()
        assert isinstance(w.grad, DTensor)
        partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
        partial.redistribute(placements=[Shard(0)])
        partial.relu()  # needs the sum first, which DTensor's dispatch sees to
    assert counts.as_dict() == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
    assert counts.bytes_of == {"all_gather": 32, "reduce_scatter": 64, "all_reduce": 64}


def test_nothing_issued_counts_nothing() -> None:
    with count_collectives() as counts:
        torch.ones(2).sum()
    assert counts == Collectives()
    assert counts.total == counts.bytes == 0


def test_it_is_imported_when_it_is_first_used() -> None:
    assert sf.__getattr__("testing") is sys.modules["shardfn.testing"]
    with pytest.raises(AttributeError, match="no attribute 'tests'"):
        sf.__getattr__("tests")
