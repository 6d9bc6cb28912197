"""What a run shows and leaves behind: a progress bar, the losses in a file, a curve as text and as a picture.

tqdm and matplotlib are used when they are installed; without them there is a line now and then, and text only.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # {"step": int, "loss": float}, with "valid": float where the validation loss was measured


class Progress:
    """A progress bar with loss, tokens per second and bytes communicated; silent where `shown` is false.

    Not a terminal (a log file, CI): one line every ten seconds in place of a bar.
    """

    def __init__(self, total: int, start: int, *, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._since = self._printed = time.monotonic()
        self._tokens = 0
        self._bar: Any = None
        if shown and sys.stderr.isatty() and find_spec("tqdm"):
            from tqdm import tqdm

            line = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
            self._bar = tqdm(total=total, initial=start, bar_format=line, nrows=2)  # some terminals claim 0 rows

    def update(self, step: int, *, loss: float, tokens: int, comm_bytes: int) -> None:
        """Show that `step` steps are done: this one had `loss` and `tokens`; `comm_bytes` were communicated so far."""
        self._tokens += tokens
        now = time.monotonic()
        rate = self._tokens / max(now - self._since, 1e-9)
        line = f"loss {loss:.3f}  {rate:,.0f} tokens/s  {comm_bytes / 1e6:,.0f} MB communicated"
        if self._bar is not None:
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.update()
        elif self._shown and (now - self._printed > 10 or step == self._total):
            self._printed = now
            print(f"step {step}/{self._total}  {line}", flush=True)

    def close(self) -> None:
        """Leave the bar as it is, so that what follows starts on a line of its own."""
        if self._bar is not None:
            self._bar.close()


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


def draw_curve(path: Path, records: Sequence[Record], bigram: float) -> bool:
    """Write the losses as a picture; return whether there is a matplotlib to do it with."""
    if not find_spec("matplotlib"):
        return False
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
    return True
