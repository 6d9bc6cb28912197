"""Run a script with torch's FSDP1, which takes CPUs only where it is told to: on_cpus.py SCRIPT ARGUMENT..."""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

_before = FullyShardedDataParallel.__init__


def _on_cpus(self: Any, *args: Any, **kwargs: Any) -> None:
    _before(self, *args, **kwargs | {"device_id": torch.device("cpu")})


if __name__ == "__main__":
    FullyShardedDataParallel.__init__ = _on_cpus
    sys.argv.pop(0)
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
