"""Every benchmark, and one table of what they find: `make bench`.

    python examples/benchmarks/run.py                    # everything: 13 to 18 minutes on two idle cores
    python examples/benchmarks/run.py --only step host   # some
    python examples/benchmarks/run.py --quick            # tiny sizes, to see that all of it works: two minutes

Measured: `step_time.py`, `memory.py`, `loss.py`, `weights.py`, `checkpoints.py`, `host_time.py`, `scaling.py`,
`traffic.py`, `soak.py`, `collectives.py`, `transforms.py`, `llama.py`, `watching.py` and `gpu.py`. Shared:
`contenders.py` (the model and the ways to train it), `measure.py` (in turn, in processes of their own), `fake.py` (one
process as one of many), `results.py` (the table). Every round, the table and a picture of it go to `--out`. A row is
met when the median over rounds of shardfn's figure over the peer's does not exceed the bar.
"""

import argparse
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import checkpoints
import collectives
import gpu
import host_time
import llama
import loss
import memory
import scaling
import soak
import step_time
import torch
import traffic
import transforms
import watching
import weights
from measure import Cases, run_cases
from results import markdown, save

GROUPS: dict[str, Callable[[bool], Cases]] = {
    "step": step_time.cases,
    "memory": memory.cases,
    "loss": loss.cases,
    "weights": weights.cases,
    "checkpoints": checkpoints.cases,
    "host": host_time.cases,
    "scaling": scaling.cases,
    "bytes": traffic.cases,
    "soak": soak.cases,
    "collectives": collectives.cases,
    "transforms": transforms.cases,
    "llama": llama.cases,
    "watching": watching.cases,
    "gpu": gpu.cases,
}


def describe(quick: bool) -> dict[str, str]:
    """Where and with what this was measured."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "sizes": "tiny: the ratios mean nothing" if quick else "full",
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": f"{load} over the last 1, 5 and 15 minutes before the start",
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the groups that were asked for; the exit status tells whether all cases ran, not whether bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds: shows that it works, no more")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups to run (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder to write (default: %(default)s)")
    args = parser.parse_args(argv)
    about, start = describe(args.quick), time.monotonic()
    chosen = {name: run for group in args.only for name, run in GROUPS[group](args.quick).items()}
    rows, tables, failed = run_cases(chosen)
    about["took"] = f"{(time.monotonic() - start) / 60:.1f} minutes"
    files = save(args.out, "quick" if args.quick else "bench", rows, about, "\n\n".join(tables))
    print("\n\n".join([*tables, *([markdown(rows)] if rows else [])]))
    print(f"\n{sum(row.met is True for row in rows)} of {sum(row.bar is not None for row in rows)} bars met")
    print("wrote " + ", ".join(map(str, files)))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
