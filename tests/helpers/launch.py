"""Scripts on ranks as torchrun starts them, in processes that are forked from one which has imported torch.

Each rank that torchrun starts imports torch: for four ranks 17 seconds of one core, most of what a small script takes.
"""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardfn.testing.process_pool import start_server

PATIENCE = 10.0  # seconds for the other ranks, once one has failed


def run_script(argv: Sequence[str], ranks: int, folder: Path, timeout: float = 240) -> None:
    """Run `python *argv` in a folder on so many ranks; 0: one process that no launcher has started.

    Raises:
        AssertionError: a rank failed, or was not done in time; with what all of them printed.
    """
    start_server()
    make_store: Any = vars(dist)["TCPStore"]  # exported, but not declared
    store = make_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # which torchrun's agent would have
    context: Any = multiprocessing.get_context("forkserver")
    logs = [folder / f".rank-{rank}.log" for rank in range(max(ranks, 1))]
    args = [(rank, ranks, store.port, [*argv], str(folder), str(log)) for rank, log in enumerate(logs)]
    processes = [context.Process(target=_be_a_rank, args=each) for each in args]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    while alive := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + PATIENCE)
        if not wait([process.sentinel for process in alive], max(0.0, deadline - time.monotonic())):
            for process in alive:
                process.kill()
    codes = [process.exitcode for process in processes]
    printed = "\n".join(f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs) if log.exists())
    assert not any(codes), f"{' '.join(argv)} ended with {codes}\n{printed}"


def _be_a_rank(rank: int, ranks: int, port: int, argv: list[str], folder: str, log: str) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if ranks:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GROUP_RANK": "0"}
        os.environ |= {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        os.environ |= {"TORCHELASTIC_RUN_ID": "none"}
    os.chdir(folder)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")
