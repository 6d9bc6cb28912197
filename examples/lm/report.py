"""What a run leaves behind: the losses in a file, a curve as text and as a picture.

matplotlib is used when it is installed; without it there is text only.
"""

import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # {"step": int, "loss": float}, with "valid": float where the validation loss was measured


def read_history(path: Path, last: int) -> list[Record]:
    """Return the records up to step `last`; a line that a killed run left unfinished is dropped."""
    records: list[Record] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [record for record in records if record["step"] <= last]


def write_history(path: Path, records: Sequence[Record]) -> None:
    """Replace the file by `records`, one JSON object a line."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    part.replace(path)


def curve(values: Sequence[float], *, width: int = 72, height: int = 12) -> str:
    """Draw `values` as text, each column the mean of its share of them.

    Example:
        >>> print(curve([3.0, 2.0, 1.0], width=3, height=3))
         3.00 |*
         2.00 | *
         1.00 |  *
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "(no losses)"
    width = min(width, len(values))
    cuts = [len(values) * column // width for column in range(width + 1)]
    columns = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(columns), max(columns)
    rows = [round((high - value) / ((high - low) or 1.0) * (height - 1)) for value in columns]
    labels = [high - (high - low) * row / max(height - 1, 1) for row in range(height)]
    return "\n".join(f"{labels[row]:5.2f} |{''.join(' *'[r == row] for r in rows)}".rstrip() for row in range(height))


def can_draw() -> bool:
    """Say whether there is a matplotlib for pictures."""
    return find_spec("matplotlib") is not None


def draw_curve(path: Path, records: Sequence[Record], bigram: float) -> None:
    """Write the losses as a picture, if there is something to do it with."""
    if not can_draw():
        return
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=0.8, label="training")
    valid = [r for r in records if "valid" in r]
    axes.plot([r["step"] for r in valid], [r["valid"] for r in valid], "o-", label="validation")
    axes.axhline(bigram, color="grey", linestyle="--", label="byte bigram table")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(1.0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
