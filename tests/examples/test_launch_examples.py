"""`examples/launch`, as far as one machine can: loopback addresses are its hosts, and Slurm's commands are stubs."""

import os
import shutil
import signal
from pathlib import Path
from socket import socket

import pytest
from launched import Launched, Log, until

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
TRAIN = Path(__file__).parents[1] / "run" / "train.py"
ENV = {"PYTHONPATH": str(TRAIN.parents[2])}

pytestmark = pytest.mark.slow


def test_one_node(tmp_path: Path) -> None:
    started = Launched(str(TRAIN), str(tmp_path / "run"), "5", by=[str(LAUNCH / "one_node.sh")], RANKS="2", **ENV)
    code, output = started.end()
    assert code == 0, output
    assert len(Log(tmp_path / "run").losses) == 5


def test_two_nodes(tmp_path: Path) -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"HEAD": f"127.0.0.1:{port}", "NODES": "2", "RANKS": "1", **ENV}
    script = [str(TRAIN), str(tmp_path / "run"), "5"]
    nodes = [
        Launched("--local-addr", f"127.0.0.{node}", *script, by=[str(LAUNCH / "nodes.sh")], **env) for node in (1, 2)
    ]
    for node in nodes:
        code, output = node.end()
        assert code == 0, output
    assert Log(tmp_path / "run").ranks == [2]


_STUBS = {
    "scontrol": '#!/usr/bin/env bash\n[ "$1" = show ] && echo 127.0.0.1 || echo "$@" > "$REQUEUED"\n',
    "srun": '#!/usr/bin/env bash\nshift\nexec "$@"\n',
}


def test_slurm_puts_a_run_that_was_stopped_into_the_queue_again(tmp_path: Path) -> None:
    """From a copy in another folder, which is what Slurm runs."""
    for name, text in _STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    batch = shutil.copy(LAUNCH / "slurm.sh", tmp_path / "slurm_script")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REQUEUED": str(tmp_path / "requeued"), "RANKS": "2", **ENV}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "1"}
    log = Log(tmp_path / "run")
    script = [str(TRAIN), str(tmp_path / "run")]
    started = Launched(*script, "100", by=[str(batch)], PAUSE="0.2", **env)
    until(lambda: log.step >= 5)
    (launcher,) = started.ranks()
    os.kill(launcher, signal.SIGTERM)
    code, output = started.end()
    assert code == 75, output
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    stopped = log.step
    assert 5 <= stopped < 100
    code, output = Launched(*script, str(stopped + 3), by=[str(batch)], **env).end()
    assert code == 0, output
    assert log.step == stopped + 3
