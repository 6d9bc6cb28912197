"""What the benchmarks find: one kind of row for all, and rows as a markdown table, as JSON and as a picture."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of shardfn beside a peer's, round by round; what counts is the median of the rounds' ratios."""

    what: str
    peer: str
    unit: str
    ours: list[float]
    theirs: list[float]
    bar: float | None = None  # what the ratio must not exceed

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of shardfn's figure over the peer's."""
        ratios = [mine / other for mine, other in zip(self.ours, self.theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios * (2 if len(ratios) == 1 else 1), n=4, method="inclusive")
        return low, middle, high

    @property
    def met(self) -> bool | None:
        """Whether the ratio, to the two digits that are shown, is within the bar; None without a bar."""
        return None if self.bar is None else round(self.quartiles[1], 2) <= self.bar

    def cells(self) -> list[str]:
        """The row of the table."""
        low, middle, high = self.quartiles
        figures = [f"{_rounded(statistics.median(values))} {self.unit}".strip() for values in (self.ours, self.theirs)]
        spread = f"{middle:.2f} ({low:.2f} to {high:.2f})" if len(self.ours) > 1 else f"{middle:.2f}"
        met = {None: "", True: "yes", False: "no"}[self.met]
        return [self.what, self.peer, *figures, spread, "" if self.bar is None else f"{self.bar:.2f}", met]


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(rows: Sequence[Row]) -> str:
    """The table: figures are medians, the ratio is the median of the rounds' ratios with its quartiles."""
    lines = [["what", "peer", "shardfn", "peer's figure", "ratio (quartiles)", "bar", "met?"], ["---"] * 7]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *(row.cells() for row in rows)])


def save(folder: Path, name: str, rows: Sequence[Row], about: dict[str, Any], more: str = "") -> list[Path]:
    """Write `name`.json with every round, `name`.md, and `name`.png where matplotlib is installed; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(row) | {"quartiles": row.quartiles, "met": row.met} for row in rows]
    files = [folder / f"{name}.json", folder / f"{name}.md"]
    files[0].write_text(json.dumps({"about": about, "rows": records}, indent=1) + "\n")
    lines = [f"* {key}: {value}" for key, value in about.items()]
    files[1].write_text("\n".join([*lines, "", markdown(rows), *(["", more] if more else [])]) + "\n")
    return files + [path for path in [folder / f"{name}.png"] if rows and draw(path, rows)]


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """A picture of all ratios with their quartiles and bars; returns whether matplotlib is there to draw it."""
    if not find_spec("matplotlib"):
        print('no picture: matplotlib is not installed (pip install "shardfn[plot]")')
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for y, row in enumerate(rows):
        low, middle, high = row.quartiles
        colour = {None: "tab:gray", True: "tab:green", False: "tab:red"}[row.met]
        axes.plot([low, high], [y, y], color=colour, linewidth=2)
        axes.plot(middle, y, "o", color=colour)
        if row.bar is not None:
            axes.plot(row.bar, y, "|", color="black", markersize=14)
    axes.axvline(1, color="lightgray", zorder=0)
    axes.set_yticks(range(len(rows)), [f"{row.what} / {row.peer}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("shardfn / peer: median and quartiles; black: bar; less is better")
    figure.savefig(path, dpi=150)
    return True
