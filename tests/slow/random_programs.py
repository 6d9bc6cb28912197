"""Random programs, each compared with one process in float64.

    python tests/slow/random_programs.py                     # seeds 0 to 199
    python tests/slow/random_programs.py 0:10000             # any number
    python tests/slow/random_programs.py 17 --show           # one, and its text
    python tests/slow/random_programs.py 0:2000 --kind calls --log verdicts.txt

A program (`programs/mains.py`) is given `shardfn` on the ranks of its mesh, and the same names of
`programs/one_process.py` in one process. Its verdict:

    equal    all that it returns is what one process returns, on every rank
    refused  an error of this library, on every rank, that says what to write
    WRONG    it returns something else, on any rank
    unclear  another error, one that names no remedy, or not the same on every rank
    hang     a rank did not answer
    invalid  one process cannot run it, gets numbers that are not finite, or others by data that differ by a rounding
"""

import argparse
import logging
import math
import operator
import re
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import einops
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
import torch.utils.checkpoint
from programs import one_process
from programs.mains import KINDS, Program, program
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardfn as sf
import shardfn.compat.fsdp1
import shardfn.compat.fsdp2
import shardfn.compat.hfai
import shardfn.compat.megatron
from shardfn._torch import pytree
from shardfn.comm.buckets import whole
from shardfn.inspect.check import agrees
from shardfn.testing import RankError, run

TOLERANCE = 1e-8
SECONDS = 60.0  # for one program
COMPILING = 300.0  # for one that compiles; each rank runs a compiler of C++
VERDICTS = ("equal", "refused", "WRONG", "unclear", "hang", "invalid")
BAD = ("WRONG", "unclear", "hang")
# What a refusal says to do.
REMEDY = re.compile(
    r"\b(use|write|pass|give|call|make|say|take|set|load|leave|name|put|add|turn|keep|save|return|differentiate|split|shard|"
    r"change|did you mean|the model has|instead|needs?|must|should|try|remove|are errors that|without|Policy\(|sf\.)",
    re.IGNORECASE,
)
_OURS = str(Path(sf.__file__).parent)
# What torch says of `loss.backward()`, alike without this library; docs/verified.md says what to write.
_TORCHS = ("need to convert all torch.Tensor to DTensor", "element 0 of tensors does not require grad")
_CHECKS = str(Path(torch.distributed.fsdp.__file__).parent)  # torch's own checks of how a model is wrapped


@dataclass(frozen=True)
class Verdict:
    """What became of a program."""

    seed: int
    kind: str
    mesh: dict[str, int]
    verdict: str
    detail: str = ""
    seconds: float = 0.0


class Differs(Exception):
    """Ranks have different values of what they must have alike."""


# ---------------------------------------------------------------------------------------------------------------------
# On a rank

_meshes: dict[tuple[tuple[str, int], ...], Any] = {}


def judged(made: Program, wanted: Mapping[str, Tensor]) -> tuple[str, str]:
    """(verdict, detail) of a program on this rank, given what one process returns. Collective."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    key = tuple(made.mesh.items())
    if key not in _meshes:
        _meshes[key] = sf.make_mesh("cpu", **made.mesh)
    try:
        found = _flat(_main(made, sf, _meshes[key]))
    except Differs as error:
        return "WRONG", str(error)
    except Exception as error:
        return ("refused" if is_ours(error) else "unclear"), _last(error)
    wrong = differences(found, wanted)
    return ("WRONG", "; ".join(wrong[:3])) if wrong else ("equal", "")


def _main(made: Program, functions: ModuleType, mesh: Any) -> Any:
    """What the program returns."""
    ranks = _Ranks(mesh)
    names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "sf": functions}
    names |= {"math": math, "operator": operator, "rearrange": einops.rearrange, "repeat": einops.repeat}
    names |= {"average": ranks.average, "whole": ranks.whole, "full": _full, "__name__": f"program_{made.seed}"}
    torch.manual_seed(0)
    exec(compile(made.text, f"<program {made.seed}>", "exec"), names)
    return names["main"](functions, mesh)


class _Ranks:
    """Values of the data ranks together; those of ranks with the same samples must be alike."""

    def __init__(self, mesh: Any) -> None:
        self._index = sf.data.rank(mesh)[0] if mesh is not None else None

    def _parts(self, value: Any) -> list[Tensor]:
        """The value of each data rank."""
        value = torch.as_tensor(value).detach()
        if self._index is None:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self._index, value))
        parts: dict[int, Tensor] = dict(reversed(gathered))
        for index, each in gathered:
            if each.shape != parts[index].shape or not torch.allclose(each, parts[index], 1e-9, 1e-12):
                raise Differs("a value differs between ranks that have the same samples")
        return [parts[index] for index in sorted(parts)]

    def average(self, value: Any) -> Tensor:
        """The mean over data ranks."""
        return torch.stack(self._parts(value)).double().mean(0)

    def whole(self, value: Any) -> Tensor:
        """The samples of all data ranks."""
        return torch.cat(self._parts(value))


def _full(value: Tensor) -> Tensor:
    return whole(value) if isinstance(value, DTensor) else value.detach()  # `full_tensor` may die; see there


def _flat(tree: Any) -> dict[str, Tensor]:
    paths, _ = pytree.tree_flatten_with_path(tree)
    return {pytree.keystr(path): _full(torch.as_tensor(leaf)).clone() for path, leaf in paths}


def differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """What differs from what one process gives, by name; errors are relative to a tensor's norm, or to that of all."""
    if found.keys() != wanted.keys():
        names = sorted(found.keys() ^ wanted.keys())
        return [f"{name} is there {'only here' if name in found else 'on one process only'}" for name in names[:3]]
    floor = 1e-3 * max(1.0, *(float(x.double().norm()) for x in wanted.values()))
    wrong = []
    for name, right in wanted.items():
        given = found[name]
        if given.shape != right.shape:
            wrong.append(f"{name} has shape {tuple(given.shape)}, on one process {tuple(right.shape)}")
            continue
        if not agrees(given, right, floor, TOLERANCE):
            error = float((given.double() - right.double()).norm()) / max(float(right.double().norm()), 1e-30)
            wrong.append(f"{name} is {error:.1e} off")
    return wrong


def is_ours(error: Exception) -> bool:
    """An error that this library raises itself, with something to do in its text."""
    trace = traceback.extract_tb(error.__traceback__)
    raised = bool(trace) and trace[-1].filename.startswith((_OURS, _CHECKS))
    kind = isinstance(error, sf.ShardError) or (raised and isinstance(error, ValueError | TypeError | RuntimeError))
    return any(words in str(error) for words in _TORCHS) or (kind and REMEDY.search(str(error)) is not None)


def _last(error: Exception) -> str:
    trace = traceback.extract_tb(error.__traceback__)
    where = next((f"{Path(f.filename).name}:{f.lineno}" for f in reversed(trace)), "")
    return f"{type(error).__name__} at {where}: {error}"


# ---------------------------------------------------------------------------------------------------------------------
# All ranks


def compiles(made: Program) -> bool:
    """Whether a program takes a compiler's time."""
    return "sf.jit(" in made.text


def verdict(made: Program, seconds: float | None = None) -> Verdict:
    """Run a program on the ranks of its mesh."""
    seconds = seconds or (COMPILING if compiles(made) else SECONDS)
    start = time.perf_counter()
    try:
        wanted = _on_one_process(made)
    except Exception as error:
        return Verdict(made.seed, made.kind, made.mesh, "invalid", _last(error))
    if broken := [name for name, value in wanted.items() if not value.isfinite().all()]:
        return Verdict(made.seed, made.kind, made.mesh, "invalid", f"{broken[0]} is not finite")
    try:
        answers = run(judged, made, wanted, ranks=prod(made.mesh.values()), timeout=seconds)
        kinds = {kind for kind, _ in answers}
        worst = max(answers, key=lambda answer: VERDICTS.index(answer[0]))
        if len(kinds) > 1 and worst[0] != "WRONG":
            worst = "unclear", f"ranks differ: {[kind for kind, _ in answers]}: {worst[1]}"
    except RankError as error:
        late = any(isinstance(each, TimeoutError) for each in error.errors.values())
        worst = "hang" if late else "unclear", str(error)[:2000]
    if worst[0] == "WRONG":
        with patch.object(torch, "randn", _rounded):
            changed = differences(_on_one_process(made), wanted)
        worst = ("invalid", f"by a rounding, on one process, {changed[0]}") if changed else worst
    return Verdict(made.seed, made.kind, made.mesh, *worst, time.perf_counter() - start)


def _on_one_process(made: Program) -> dict[str, Tensor]:
    # `functional_call` is over when a checkpoint computes again.
    with patch.object(torch.utils.checkpoint, "checkpoint", _called):
        return _flat(_main(made, one_process, None))


def _rounded(*args: Any, of: Callable[..., Tensor] = torch.randn, **kwargs: Any) -> Tensor:
    return of(*args, **kwargs) * (1 + 1e-15)


def _called(fn: Any, *args: Any, use_reentrant: bool) -> Any:
    return fn(*args)


def verdicts(seeds: Iterable[int]) -> Iterator[Verdict]:
    """One program after the other."""
    for seed in seeds:
        yield verdict(program(seed))


def table(results: Sequence[Verdict]) -> str:
    """Counts by kind of program, as markdown."""
    rows = [f"| programs | {' | '.join(VERDICTS)} |", f"|---|{'---|' * len(VERDICTS)}"]
    for kind in (*KINDS, "all"):
        counts = Counter(result.verdict for result in results if kind in (result.kind, "all"))
        if counts:
            rows.append(f"| {kind} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} |")
    return "\n".join(rows)


def line(result: Verdict) -> str:
    """A verdict as one line."""
    mesh = "x".join(map(str, result.mesh.values()))
    detail = re.sub(r"\s+", " ", result.detail)[:600]
    return f"{result.seed}\t{result.kind}\t{mesh}\t{result.verdict}\t{result.seconds:.2f}\t{detail}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 when anything is wrong, unclear, or hangs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seeds", nargs="*", default=["0:200"], help="numbers, or ranges such as 0:200")
    parser.add_argument("--kind", choices=[*KINDS], help="only programs of this kind")
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--log", help="a file that gets a line for each program")
    args = parser.parse_args(argv)
    seeds = [n for text in args.seeds for n in (range(*map(int, text.split(":"))) if ":" in text else [int(text)])]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: list[Verdict] = []
    log = open(args.log, "a") if args.log else None
    for result in verdicts(n for n in seeds if args.kind in (None, program(n).kind)):
        results.append(result)
        if log is not None:
            print(line(result), file=log, flush=True)
        if args.show:
            print(textwrap.indent(program(result.seed).text, "    "))
        if args.show or result.verdict in BAD or (log is None and result.verdict != "equal"):
            print(line(result), flush=True)
    print(table(results))
    return int(any(result.verdict in BAD for result in results))


if __name__ == "__main__":
    sys.exit(main())
