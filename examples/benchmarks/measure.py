"""How the benchmarks measure: options, processes of their own, and actions taken in turn.

Every script runs its cases when started with plain python, and each case starts this script again as `--worker`: under
torchrun on real ranks, or as one process in a group of fake ones (`fake.py`).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from contenders import Job
from results import Row, markdown
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf

# What to show while a case runs -> run it, for rows of the one table or a table of its own in markdown.
Cases = Mapping[str, Callable[[], list[Row]] | Callable[[], str]]
QUICK: dict[str, Any] = {"width": 128, "layers": 2, "vocab": 256, "head": 32, "rounds": 2, "warmup": 1}
TIMEOUT = 900  # seconds for one worker


def parse(doc: str | None, argv: Sequence[str] | None, **defaults: Any) -> argparse.Namespace:
    """The options of a script: those of all, those of a `Job`, and its own; `defaults` adds and overrides."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=about)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds: shows that it works, no more")
    parser.add_argument("--worker", action="store_true", help="be one process of one case, as the options below say")
    parser.add_argument("--json", type=Path, help="where the worker writes what it measured; default: to the terminal")
    options = {"mesh": "fsdp=-1", "rounds": 12, "warmup": 3}
    for name, default in (options | {f.name: f.default for f in fields(Job)} | defaults).items():
        kind = int if isinstance(default, bool) else type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help="(default: %(default)s)")
    return parser.parse_args(argv)


def job_of(args: argparse.Namespace) -> Job:
    """The job that the options describe."""
    return Job(**{f.name: getattr(args, f.name) for f in fields(Job)})


def make_mesh(text: str, device: str = "cpu") -> DeviceMesh:
    """`fsdp=2,tp=2` -> a mesh that always has both axes; starts the process group when none is running."""
    axes = {"fsdp": 1, "tp": 1} | {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
    return sf.make_mesh(device, **axes)


def in_turn(
    actions: Mapping[str, Callable[[int], object]],
    rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every action in every round but the first `warmup`.

    A round is each action once, so that a busy machine slows all alike; in an order drawn anew for every round, alike
    on all ranks, so that no action always follows the same other one. Actions get the number of the round. One process
    that waits for nobody is best measured by `time.process_time`, which leaves out what other programs take.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    drawn = random.Random(0)
    for round_ in range(warmup + rounds):
        for name in drawn.sample(list(actions), len(actions)):
            _barrier()
            start = clock()
            actions[name](round_)
            _barrier()
            if round_ >= warmup:
                seconds[name].append(clock() - start)
    return seconds


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def finish(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """End a worker: the first rank hands over what was found."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = json.dumps(found)
        if args.json is not None:
            args.json.write_text(text)
        else:
            print(text)
    if dist.is_initialized():
        dist.destroy_process_group()


def worker(script: str, options: Mapping[str, Any], path: Path) -> list[str]:
    """What starts one process of a case, after the interpreter and the launcher; it writes what it found to `path`."""
    flags = [f"--{name}={int(value) if isinstance(value, bool) else value}" for name, value in options.items()]
    return [script, "--worker", f"--json={path}", *flags]


def launch(script: str, ranks: int, options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Any:
    """Run `script` as a worker, one process or (`ranks` > 0) under torchrun, and return what it found."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, *(torchrun if ranks else []), *worker(script, options, path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environ or {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        # With its result handed over a worker has succeeded, even if gloo aborts it on its way out: about 1 in 30 does,
        # "terminate called without an active exception" (torch 2.13).
        if not path.exists():
            said = (done.stdout + done.stderr).partition("torch.distributed.elastic")[0]  # the rest is torchrun's
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said[-3000:]}")
        return json.loads(path.read_text())


def run_cases(cases: Cases) -> tuple[list[Row], list[str], list[str]]:
    """The rows of all cases, their own tables, and the names of those that failed; says on stderr where it is."""
    rows: list[Row] = []
    tables: list[str] = []
    failed: list[str] = []
    for number, (name, run) in enumerate(cases.items(), 1):
        start = time.monotonic()
        print(f"[{number}/{len(cases)}] {name} ...", file=sys.stderr, end="", flush=True)
        try:
            found = run()
        except Exception:
            failed.append(name)
            print(f" failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            continue
        if isinstance(found, str):
            tables.append(found)
        else:
            rows += found
        print(f" {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return rows, tables, failed


def report(cases: Cases) -> None:
    """Run the cases of one script and print what they found."""
    rows, tables, failed = run_cases(cases)
    print("\n\n".join([*tables, *([markdown(rows)] if rows else [])]))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def cases_or_worker(
    args: argparse.Namespace, cases: Callable[[bool], Cases], measure: Callable[[argparse.Namespace, DeviceMesh], Any]
) -> None:
    """What a script on real ranks does: run its cases, or be the worker of one."""
    if not args.worker:
        report(cases(args.quick))
    else:
        finish(args, measure(args, make_mesh(args.mesh)))
