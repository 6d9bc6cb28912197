"""Faults that hit runs which train, save and load, row by row: which of four libraries lose nothing?

    python tests/slow/faults/faults.py                                  # all rows and columns, half an hour
    python tests/slow/faults/faults.py --rows 1-16 --only shardfn       # some
    python tests/slow/faults/faults.py --repeats 5                      # the worst of five

Each row prints what became of it (ok; an older checkpoint that was acknowledged is ok; a clear error, an unclear one;
numbers that are wrong without a word; something acknowledged that is lost; a hang), whether that is what the row must
come to, and after how many seconds all ranks had ended. `libraries` says what the four are. The status is 1 if shardfn
does not survive a row.
"""

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from attack_rows import attacked, by_link, by_name, differing, fewer, in_item, in_metadata, longer, more, narrower
from bench import UNCLEAR, WITHOUT, Result, worst
from kill_rows import (
    POINTS,
    killed_asynchronous,
    killed_at,
    killed_before_deleting,
    killed_loading,
    over_a_partial,
    two_jobs,
)
from libraries import Contender, contenders
from load_rows import by_trainer, listed_otherwise, n_to_m, refused_meshes
from storage_rows import damaged, exchange, flip, full_disk, read_only, take_away, truncate
from training_rows import ROWS


def rows() -> dict[int, tuple[str, Callable[[Contender, int], Result]]]:
    """The title of each row, and what it does to a contender."""
    kills = {
        2 * i + victim + 1: (f"rank {victim} killed: {name}", killed_at(name, victim))
        for i, name in enumerate(POINTS)
        for victim in (0, 1)
    }
    return (
        kills
        | ROWS
        | {
            15: ("rank 0 killed: saving over a partial", over_a_partial(0)),
            16: ("rank 1 killed: saving over a partial", over_a_partial(1)),
            17: ("killed in an asynchronous save", killed_asynchronous),
            18: ("killed in a load", killed_loading),
            26: ("disk full: data", full_disk("data")),
            27: ("disk full: manifest", full_disk("manifest")),
            28: ("no right to write", read_only),
            29: ("bit flip", by_trainer(damaged(flip), flip)),
            30: ("truncation", by_trainer(damaged(truncate), truncate)),
            31: ("missing file", by_trainer(damaged(take_away), take_away)),
            32: ("file of another step", by_trainer(damaged(exchange), exchange)),
            33: ("pickle payload: metadata", attacked(in_metadata)),
            34: ("pickle payload: item", attacked(in_item)),
            35: ("path: symlink, ../", attacked(by_link, by_name)),
            36: ("keys differ over ranks", differing(more, fewer)),
            37: ("shape, dtype differ over ranks", differing(longer, narrower)),
            41: ("meshes that do not fit", refused_meshes),
            42: ("load: wrong dtype", by_trainer(differing(narrower, ranks=(0, 1), saving=False), dtype=torch.float32)),
            43: ("load: missing key", by_trainer(differing(more, ranks=(0, 1), saving=False), width=9)),
            44: ("load: unexpected key", by_trainer(differing(fewer, ranks=(0, 1), saving=False), width=7)),
            45: ("N ranks save, M load", n_to_m),
            46: ("ranks list differently", listed_otherwise),
            47: ("two jobs, one path", two_jobs),
            48: ("killed before taking away old ones", killed_before_deleting),
        }
    )


@dataclass
class Score:
    """Of a contender: rows survived, and those that it has nothing for."""

    survived: int = 0
    without: int = 0
    failed: list[int] = field(default_factory=list)


def numbers_of(text: str) -> set[int]:
    """`1-3,7` as numbers."""
    parts = [part.split("-") for part in text.split(",") if part]
    return {n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)}


def result_of(run: Callable[[Contender, int], Result], contender: Contender, repeats: int) -> Result:
    """The worst of some runs of a row."""
    try:
        return worst([run(contender, seed) for seed in range(repeats)])
    except Exception as error:
        traceback.print_exc()
        return Result(UNCLEAR, False, why=f"THE HARNESS FAILS: {type(error).__name__}: {str(error)[-200:]}")


def table(chosen: set[int], columns: Sequence[Contender], repeats: int, details: bool) -> dict[str, Score]:
    """Print a line for each row, and count."""
    scores = {contender.name: Score() for contender in columns}
    print(f"{'row':>3}  {'fault':36}" + "".join(f"{contender.name:34}" for contender in columns), flush=True)
    for number, (title, run) in sorted(rows().items()):
        if number not in chosen:
            continue
        print(f"{number:3}  {title:36}", end="", flush=True)
        notes: list[str] = []
        for contender in columns:
            result = result_of(run, contender, repeats)
            score = scores[contender.name]
            without = result.outcome in WITHOUT
            score.survived += result.survived and not without
            score.without += without
            score.failed += [] if result.survived or without else [number]
            mark = " " if without else "+" if result.survived else "-"
            seconds = f"{result.seconds:.1f} s" if result.seconds else ""
            print(f"{mark} {result.outcome:21} {seconds:>7}   ", end="", flush=True)
            notes += [f"{contender.name}: {result.why}"] if result.why else []
        print(flush=True)
        for note in notes if details else ():
            print(f"       {note}", flush=True)
    return scores


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1-48", help="such as 1-16,45")
    parser.add_argument("--only", nargs="+", help="names of columns")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--brief", action="store_true", help="only the table, not what was seen")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # ranks are forked, and a pool of threads that has begun does not go on in them
    columns: list[Contender] = []
    for contender in contenders():
        if options.only is None or contender.name in options.only:
            if why := contender.missing():
                print(f"{contender.name}: {why}")
            else:
                columns.append(contender)
    began, chosen = time.monotonic(), numbers_of(options.rows)
    scores = table(chosen, columns, options.repeats, not options.brief)
    count = len(rows().keys() & chosen)
    for name, score in scores.items():
        without = f", {score.without} it has nothing for" if score.without else ""
        print(f"{name}: survived {score.survived}/{count}{without}")
    print(f"+ survived, - not; {time.monotonic() - began:.0f} s")
    return 1 if "shardfn" in scores and scores["shardfn"].failed else 0


if __name__ == "__main__":
    sys.exit(main())
