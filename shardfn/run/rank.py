"""What a process is before it is the script of a rank: it ends with its launcher, and its error is written down."""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

_SET_DEATH_SIGNAL = 1  # of prctl(2)


def _end_with_launcher() -> None:
    """Have Linux kill this process when the one that began it ends, however it does."""
    launcher = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended meanwhile
            os.kill(os.getpid(), signal.SIGKILL)


@record
def main() -> None:
    """Run the script, or with `-m` the module, that the arguments name."""
    _end_with_launcher()
    is_module = sys.argv[1] == "-m"
    name, *arguments = sys.argv[1 + is_module :]
    sys.argv[:] = [name, *arguments]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
