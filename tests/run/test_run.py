"""The launcher: restarts, ends, signals, the first error. On one machine, whose loopback addresses are its hosts."""

import json
import os
import signal
import time
from pathlib import Path
from socket import socket

import pytest
from launched import Launched, Log, until
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardfn.run.__main__ import first_of, told

TRAIN, STEPS = Path(__file__).with_name("train.py"), 50


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks on (2, 1)."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    code, output = Launched("--nproc-per-node", "2", str(TRAIN), str(directory), str(STEPS)).end()
    assert code == 0, output
    return Log(directory).losses


def test_the_first_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport shardfn as sf, torch.distributed as dist\nmesh = sf.make_mesh('cpu', fsdp=2)\n"
        "if dist.get_rank() == 1:\n    raise ValueError('no such file: ' + sys.argv[1])\ndist.barrier()\n"
    )
    code, output = Launched("--nproc-per-node", "2", str(script), "--its-own").end()
    assert code == 1, output
    assert "shardfn.run: rank 1 failed first, with an error" in output, output
    assert output.rstrip().endswith("ValueError: no such file: --its-own")


def test_the_first_of_two_errors_in_a_second(tmp_path: Path) -> None:
    files = []
    for rank, seconds in ((0, 10.9), (1, 10.1)):
        files.append(tmp_path / f"{rank}.json")
        files[-1].write_text(
            json.dumps({"message": {"message": "", "extraInfo": {"timestamp": "10", "py_callstack": ""}}})
        )
        os.utime(files[-1], (seconds, seconds))
    failures = {rank: ProcessFailure(rank, 0, 1, str(file)) for rank, file in enumerate(files)}
    assert first_of(failures)[0] == 1
    failures[2] = ProcessFailure(2, 0, -9, str(tmp_path / "none"))  # killed without a word, found out about now
    assert first_of(failures)[0] == 1


def test_how_the_first_failed(tmp_path: Path) -> None:
    said = {"message": "no", "extraInfo": {"timestamp": "10", "py_callstack": "ValueError: no"}}
    (file := tmp_path / "0.json").write_text(json.dumps({"message": said}))
    signalled = told(0, ProcessFailure(0, 0, -signal.SIGTERM, str(file)))  # after its error, by the launcher
    assert signalled.startswith("shardfn.run: rank 0 failed first, with an error, at "), signalled
    assert signalled.endswith("\nValueError: no")
    for status, how in ((-signal.SIGKILL, "by SIGKILL"), (3, "with status 3")):
        alone = told(1, ProcessFailure(1, 0, status, str(tmp_path / "none")))
        assert alone.startswith(f"shardfn.run: rank 1 failed first, {how}, at "), alone
        assert alone.endswith("\nit has left no error")


@pytest.mark.slow
def test_a_module_and_what_is_no_script(tmp_path: Path) -> None:
    (script := tmp_path / "mine.py").write_text(
        "import atexit, pickle, sys\nclass Own: pass\n"
        "atexit.register(lambda: print('at the end', pickle.loads(pickle.dumps(Own())).__class__ is Own))\n"
        "print('ran as', __name__, sys.argv[1:])\n"
    )
    for how in (("-m", "mine"), (str(script),)):
        code, output = Launched("--nproc-per-node", "1", *how, "--flag", PYTHONPATH=_path(tmp_path)).end()
        assert code == 0, output
        assert "ran as __main__ ['--flag']" in output
        assert "at the end True" in output
    code, output = Launched("--no-python", "ls").end()
    assert code == 2
    assert "torchrun" in output


def _listens(port: int) -> bool:
    with socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _path(*more: Path) -> str:
    return os.pathsep.join([*map(str, more), str(TRAIN.parents[2])])


@pytest.mark.slow
def test_three_deaths_leave_the_losses_as_they_were(tmp_path: Path, undisturbed: list[float]) -> None:
    deaths = ("15", "25", "45")
    launched = Launched(
        "--nproc-per-node", "2", "--max-restarts", "3", str(TRAIN), str(tmp_path / "run"), "50", *deaths
    )
    code, output = launched.end(150)
    assert code == 0, output
    log = Log(tmp_path / "run")
    assert log.losses == undisturbed
    assert log.longest_pause < 150  # 18 to 25 s on a machine that does nothing else, of which torchrun needs most


@pytest.mark.slow
def test_one_of_two_hosts_dies(tmp_path: Path, undisturbed: list[float]) -> None:
    """The one that does not hold the rendezvous; its ranks go with it, and the other goes on with half of them."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # After 3 seconds torch took a host whose core was busy for dead, and the other began a run of its own.
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
    shared = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    shared += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run", "--rdzv-conf", conf]
    script, log = [str(TRAIN), str(tmp_path / "run"), str(STEPS)], Log(tmp_path / "run")
    first = Launched(*shared, "--local-addr", "127.0.0.1", *script, PAUSE="0.6")
    until(lambda: _listens(port))
    second = Launched(*shared, "--local-addr", "127.0.0.2", *script, PAUSE="0.6")
    until(lambda: log.step >= 15 and log.ranks[-1] == 4)  # on a slow machine it may join when the run has begun
    second.process.kill()
    code, output = first.end(240)
    second.end()
    assert code == 0, output
    assert log.ranks[-2:] == [4, 2]
    assert len(log.losses) == STEPS
    assert max(abs(a - b) / b for a, b in zip(log.losses, undisturbed, strict=True)) <= 1e-12
    assert log.longest_pause < 150  # 18 to 25 s on a machine that does nothing else, of which torchrun needs most


@pytest.mark.slow
def test_another_number_of_ranks_and_tp(tmp_path: Path, undisturbed: list[float]) -> None:
    script = [str(TRAIN), str(tmp_path / "run")]
    for ranks, steps, env in (("4", "20", {"TP": "2"}), ("1", "50", {})):
        code, output = Launched("--nproc-per-node", ranks, *script, steps, **env).end()
        assert code == 0, output
    losses = Log(tmp_path / "run").losses
    assert max(abs(a - b) / b for a, b in zip(losses, undisturbed, strict=True)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "a rank, twice"])
def test_sigterm_ends_all_with_one_checkpoint(tmp_path: Path, whom: str, undisturbed: list[float]) -> None:
    script, log = [str(TRAIN), str(tmp_path / "run"), str(STEPS)], Log(tmp_path / "run")
    launched = Launched("--nproc-per-node", "2", *script, PAUSE="0.2")
    until(lambda: log.step >= 12)
    if whom == "launcher":
        launched.process.terminate()
    else:
        for _ in range(2):
            os.kill(launched.ranks()[-1], signal.SIGTERM)
            time.sleep(0.3)
    code, output = launched.end()
    assert code == 75, output
    newest = max((tmp_path / "run").iterdir()).name
    assert newest == f"step-{log.step:08}", output
    assert 12 <= log.step < STEPS
    if whom != "launcher":
        code, output = Launched("--nproc-per-node", "2", *script).end()
        assert code == 0, output
        assert log.losses == undisturbed


@pytest.mark.slow
def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    log = Log(tmp_path / "run")
    launched = Launched("--nproc-per-node", "2", str(TRAIN), str(tmp_path / "run"), "1000", PAUSE="0.1")
    until(lambda: log.step >= 5)
    ranks = launched.ranks()
    assert len(ranks) == 2
    launched.process.kill()
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), seconds=20)
    launched.end()
