"""What a run leaves behind: the losses in a file, a curve as text and as a picture, pictures of who owns what.

matplotlib is used when it is installed; without it there is text only.
"""

import json
import math
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import shardfn as sf

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


class History:
    """A callback of the trainer: the losses of a run since its very first step, in files that the first rank writes."""

    def __init__(self, out: Path, trainer: sf.Trainer, bigram: float) -> None:
        self._began, self._out, self._trainer, self._bigram = time.monotonic(), out, trainer, bigram
        self._writes, self._file = trainer.mesh.get_rank() == 0, out / "losses.jsonl"
        self._records = read_history(self._file, trainer.steps) if self._writes else []
        if self._writes:
            (out / "layout.txt").write_text(sf.visualize(trainer.params))
            if can_draw():
                sf.visualize(trainer.params, file=out / "layout.png")
            if trainer.steps:
                print(f"going on after step {trainer.steps}", flush=True)

    def __call__(self, trainer: sf.Trainer, out: dict[str, Any]) -> None:
        """A step is done."""
        self._records.append({"step": trainer.steps, "loss": float(out["loss"])})

    def add(self, **more: float) -> None:
        """Add to the record of the last step, and write them all: the file is never behind a checkpoint."""
        self._records[-1] |= more
        self._write()

    def _write(self) -> None:
        if self._writes:
            part = self._file.with_suffix(".part")
            part.write_text("".join(json.dumps(record) + "\n" for record in self._records))
            part.replace(self._file)

    def close(self) -> None:
        """The run is over, or was stopped: write the losses and draw them."""
        self._write()
        if self._writes and self._records:
            draw_curve(self._out / "losses.png", self._records, self._bigram)

    def print_report(self, losses: dict[str, float], code: str) -> None:
        """Print what the run came to, on the first rank."""
        if not self._writes:
            return
        out, params = self._out, self._trainer.params
        print(f"\nTraining loss, nats per byte\n{curve([record['loss'] for record in self._records])}")
        print(f"\nWho owns what (more in {out}/layout.txt)\n{sf.visualize(params, 'layers.0.mlp.w1.weight')}")
        print(f"\nWritten by the model\n{'-' * 72}\n{code}\n{'-' * 72}")
        print(f"validation loss    {losses['valid']:.3f} nats per byte")
        print(f"byte bigram table  {losses['bigram']:.3f} nats per byte, counted on the same training text")
        pictures = f"pictures: {out}/losses.png, {out}/layout.png"
        print(pictures if can_draw() else "no pictures: matplotlib is not installed")
        print(f"took {time.monotonic() - self._began:.0f} s")


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
