"""What a process is before it is the script of a rank: it ends with its launcher, and its error is written down."""

import ctypes
import importlib.util
import os
import signal
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

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
    # It stays the main module until the process is over, as it does under Python: `atexit` and threads may pickle.
    module = ModuleType("__main__")
    if is_module:
        module.__spec__, name, code = _found(name)
        module.__package__ = module.__spec__.parent
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        code = compile(Path(name).read_bytes(), name, "exec")
    module.__file__ = name
    sys.modules["__main__"], sys.argv[:] = module, [name, *arguments]
    exec(code, module.__dict__)


def _found(name: str) -> tuple[ModuleSpec, str, CodeType]:
    """The module that `-m name` runs, its file and its code.

    Raises:
        ImportError: there is none.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or spec.origin is None or code is None:
        raise ImportError(f"no module named {name!r}, or it is a package without __main__")
    return spec, spec.origin, code


if __name__ == "__main__":
    main()
