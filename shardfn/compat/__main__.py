"""`python -m shardfn.compat script.py args...`: run a script with the import switch on.

torchrun --nproc-per-node 4 -m shardfn.compat script.py args...
python -m shardfn.compat -m package.module args...
"""

import runpy
import sys
from pathlib import Path

from shardfn.compat import switch

_USAGE = "usage: python -m shardfn.compat [-m module | script.py] args..."


def main(argv: list[str]) -> None:
    """Run the script or module that comes first, with the rest as its arguments."""
    if not argv or (argv[0] == "-m" and len(argv) < 2) or (argv[0].startswith("-") and argv[0] != "-m"):
        raise SystemExit(_USAGE)
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise SystemExit(f"{_USAGE}\nthere is no file '{argv[0]}'")
    switch.on()
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
