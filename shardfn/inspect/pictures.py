"""See which rank has what: `visualize` draws a layout (`typeof`, in `views`, prints it in the rule notation).

Everything is read from a plan, or from a DTensor's own mesh and placements: nothing here communicates or looks at a
tensor's values. A layout becomes a `TensorView` first; text and picture are two ways to draw one.

    side     one dim of the tensor as it is drawn: a row of blocks (one, or those of a fused dim)
    segment  a run of indices along a side that the same ranks hold
    cell     where a segment of the rows meets one of the columns
"""

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from shardfn.inspect.views import At, TensorView, ranks_text, views_of
from shardfn.notation import in_one, without_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 60  # columns of a terminal that a picture may take
_MAX_ROWS = 12


# ---------------------------------------------------------------------------------------------------------------------
# Text


@dataclass(frozen=True)
class _Strip:
    """What is drawn of one side: where it is cut, who holds a segment (None: a gap), and what its blocks are called."""

    cuts: tuple[int, ...]
    held: tuple[At | None, ...]
    labels: tuple[tuple[str, int, int], ...]  # text, start, stop

    def short(self, most: int) -> "_Strip":
        """At most `most` segments: the first ones, a gap, the last one."""
        if len(self.held) <= most:
            return self
        first = max(most - 2, 1)
        cuts = (*self.cuts[: first + 1], *self.cuts[-2:])
        return replace(self, cuts=cuts, held=(*self.held[:first], None, self.held[-1]))

    def place(self, index: int, positions: Sequence[Any]) -> Any:
        """Where an index lies when the cuts are drawn at `positions`."""
        return positions[bisect_left(self.cuts, index)]


def _strip(view: TensorView, dim: int) -> _Strip:
    labels, start = [], 0
    for part in view.sides[dim]:
        size = prod(part.extent)
        says_size = part.label.partition("@")[0].isdecimal()
        labels.append((part.label if says_size else f"{part.label} = {size}", start, start + size))
        start += size
    segments = view.segments[dim]
    return _Strip((0, *(piece.stop for piece in segments)), tuple(piece.at for piece in segments), tuple(labels))


def _cell_text(view: TensorView, row: At | None, column: At | None) -> str:
    return "…" if row is None or column is None else ranks_text(view.owners((*row, *column)))


def _strips(view: TensorView) -> tuple[_Strip, ...]:
    """Rows and columns; one without a name for what the tensor does not have."""
    whole = _Strip((0, 1), ((),), ())
    return (whole, whole, *(_strip(view, dim) for dim in view.drawn))[-2:]


def _cells(rows: _Strip, columns: _Strip, ys: Sequence[Any], xs: Sequence[Any]) -> Iterator[Any]:
    """((who holds the row, its edges), (who holds the column, its edges)) of every cell."""
    return product(zip(rows.held, pairwise(ys), strict=True), zip(columns.held, pairwise(xs), strict=True))


class _Canvas(list[str]):
    """Lines of text that grow as they are written."""

    def put(self, line: int, column: int, text: str) -> None:
        """Write `text` from `column` on."""
        self += [""] * (line + 1 - len(self))
        before = self[line].ljust(column)
        self[line] = before[:column] + text + before[column + len(text) :]


def _draw(view: TensorView) -> list[str]:
    """The picture of a view: rows down, columns across, the cuts as ticks, ranks in the cells, which are alike."""
    if not view.numel:
        return ["(empty: there is nothing to hold)"]
    rows, columns = _strips(view)
    rows, columns = rows.short(_MAX_ROWS), columns.short(_WIDTH // 4)
    texts = [[_cell_text(view, row, column) for column in columns.held] for row in rows.held]
    cell = max(max(len(text) for line in texts for text in line) + 2, len(str(columns.cuts[-1])) + 1)
    ticks = max(len(str(cut)) for cut in rows.cuts) + 1
    names = [_clipped(label, _WIDTH // 3) for label, _, _ in rows.labels]
    left = max(map(len, names)) + 1 + ticks if names else 0
    columns = columns.short(max((_WIDTH - left - 1) // (cell + 1), 3))
    width = max(cell, min(12, (_WIDTH - left - 1) // len(columns.held) - 1))
    height = 3 if len(rows.held) <= 4 else 1
    xs = [left + i * (width + 1) for i in range(len(columns.cuts))]
    ys = [(2 if columns.labels else 0) + i * (height + 1) for i in range(len(rows.cuts))]
    canvas = _Canvas()
    _draw_grid(canvas, xs, ys)
    for (row, (top, bottom)), (column, (start, stop)) in _cells(rows, columns, ys, xs):
        canvas.put((top + bottom) // 2, start + 1, _cell_text(view, row, column).center(stop - start - 1).rstrip())
    _name_columns(canvas, columns, xs)
    if rows.labels:
        for cut, y in zip(rows.cuts, ys, strict=True):
            canvas.put(y, left - ticks, str(cut).rjust(ticks - 1))
        for name, (_, start, stop) in zip(names, rows.labels, strict=True):
            canvas.put((rows.place(start, ys) + rows.place(stop, ys)) // 2, 0, name)
    return [line.rstrip() for line in canvas]


def _draw_grid(canvas: _Canvas, xs: Sequence[int], ys: Sequence[int]) -> None:
    for i, y in enumerate(ys):
        start, cross, end = "┌┬┐" if i == 0 else "└┴┘" if y == ys[-1] else "├┼┤"
        canvas.put(y, xs[0], start + cross.join("─" * (b - a - 1) for a, b in pairwise(xs)) + end)
    for y in set(range(ys[0], ys[-1])) - set(ys):
        for x in xs:
            canvas.put(y, x, "│")


def _name_columns(canvas: _Canvas, columns: _Strip, xs: Sequence[int]) -> None:
    """Names over the parts and a tick at each cut; one name over all when the parts have no room for theirs."""
    if not columns.labels:
        return
    rooms = [(columns.place(start, xs), columns.place(stop, xs)) for _, start, stop in columns.labels]
    labels = [label for label, _, _ in columns.labels]
    if any(len(label) > stop - start - 1 for label, (start, stop) in zip(labels, rooms, strict=True)):
        labels, rooms = [_clipped(" + ".join(labels), _WIDTH - xs[0])], [(xs[0], xs[-1])]
    for label, (start, stop) in zip(labels, rooms, strict=True):
        canvas.put(0, start + max((stop - start + 1 - len(label)) // 2, 0), label)
    for cut, x in zip(columns.cuts, xs, strict=True):
        canvas.put(1, x, str(cut))


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _groups(views: Mapping[str, TensorView]) -> list[tuple[TensorView, list[str]]]:
    """Views that look the same, with their names, in the order of the tree."""
    groups: dict[TensorView, list[str]] = {}
    for name, view in views.items():
        groups.setdefault(view, []).append(name)
    return list(groups.items())


def names_text(names: Sequence[str], most: int = 4) -> list[str]:
    """Names that differ in numbers only as one; at most `most` lines.

    >>> from shardfn.inspect.pictures import names_text
    >>> names_text(["h.0.w", "h.1.w", "head.w"])
    ['h.{0,1}.w', 'head.w']
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(without_numbers(name), []).append(name)
    lines: list[str] = []
    for members in alike.values():
        one = in_one(members)
        lines += members if one is None else [one]
    return lines if len(lines) <= most else [*lines[: most - 1], f"and {len(lines) - most + 1} more"]


def _heading(view: TensorView) -> str:
    return f"{view.type}  {' x '.join(map(str, view.shape)) or 'scalar'}"


def visualize(x: Any, name: str | None = None, *, file: str | os.PathLike[str] | None = None) -> str:
    """A picture of which ranks hold which part of a tensor, or of every parameter of a tree.

    Rows and columns are the first two dims that are split, cut where the shards begin; a cell names the global ranks
    that hold it. Parameters that look the same share a picture.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> p = sf.plan(nn.Linear(16, 8), sf.MeshSpec(fsdp=2, tp=2), sf.Policy(rules={"weight": "ff@tp c@fsdp"}))
        >>> print(sf.visualize(p, "weight"))
        weight
        f32[ff@tp c@fsdp]  8 x 16  on fsdp=2, tp=2
                            c@fsdp = 16
                    0            8            16
                  0 ┌────────────┬────────────┐
                    │            │            │
                    │     0      │     2      │
                    │            │            │
        ff@tp = 8 4 ├────────────┼────────────┤
                    │            │            │
                    │     1      │     3      │
                    │            │            │
                  8 └────────────┴────────────┘

    Args:
        x: a tree made by `shard`, a plan (for ranks that do not exist yet), a mapping of tensors, or a tensor.
        name: one parameter of a tree, see `typeof`; default: all of them.
        file: where to draw it in colour as well, for example `"layout.png"` (or .svg, .pdf); needs matplotlib.

    Returns:
        the text; print it.

    Raises:
        KeyError: the tree has no such parameter.
        TypeError: something that is neither a tree nor a tensor.
        ImportError: `file` is given and matplotlib is missing.

    Communication: none.
    """
    views = views_of("visualize", x, name)
    if file is not None:
        _figure(views).savefig(file)
    blocks = []
    for view, names in _groups(views):
        heading = f"{_heading(view)}  on {view.mesh}" if view.axes else _heading(view)
        lines = [*names_text([name for name in names if name]), heading, *_draw(view), *view.notes]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "(an empty tree)"


# ---------------------------------------------------------------------------------------------------------------------
# Picture

_EMPTY = "#eef0f3"  # where nothing is shown, or nobody has anything
_TILE = (4.4, 3.3)  # inches of a picture with its names


def _figure(views: Mapping[str, TensorView]) -> "Figure":
    """One tile a group of parameters that look the same, coloured by rank."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        why = "visualize(file=...) draws with matplotlib, which is missing: pip install shardfn[plot]"
        raise ImportError(why) from None
    groups = _groups(views)
    across = min(4, max(ceil(len(groups) ** 0.5), 1))
    down = max(ceil(len(groups) / across), 1)
    figure = Figure(figsize=(across * _TILE[0], down * _TILE[1] + 0.3), dpi=144, layout="constrained")
    meshes = "; ".join(dict.fromkeys(f"mesh {view.mesh}" for view, _ in groups if view.axes)) or "no mesh"
    figure.suptitle(f"{meshes}; the numbers in the cells are ranks", fontsize=9)
    tiles: Any = figure.subplots(down, across, squeeze=False).flat
    for tile in tiles[len(groups) :]:
        tile.set_axis_off()
    for tile, (view, names) in zip(tiles, groups, strict=False):
        _draw_tile(tile, view, names)
    return figure


def _draw_tile(tile: "Axes", view: TensorView, names: Sequence[str]) -> None:
    """The cells of one view, in the colours of their ranks, with ticks at the cuts."""
    rows, columns = (strip.short(10) for strip in _strips(view))
    xs, ys = ([i / max(len(strip.held), 1) for i in range(len(strip.cuts))] for strip in (columns, rows))
    for (row, (top, bottom)), (column, (left, right)) in _cells(rows, columns, ys, xs) if view.numel else ():
        ranks = view.owners((*row, *column)) if row is not None and column is not None else []
        colours = _colours(ranks[:: max(ceil(len(ranks) / 16), 1)], max(view.ranks)) if ranks else [_EMPTY]
        step = (right - left) / len(colours)
        tile.bar([left + i * step for i in range(len(colours))], bottom - top, step, top, align="edge", color=colours)
        text, middle = _cell_text(view, row, column), ((left + right) / 2, (top + bottom) / 2)
        size = min(10.0, 400 * (right - left) / len(text), 130 * (bottom - top))
        tile.text(*middle, text, ha="center", va="center", fontsize=size)
    tile.vlines(xs, 0, 1, colors="white")
    tile.hlines(ys, 0, 1, colors="white")
    tile.set(xlim=(0, 1), ylim=(1, 0))
    tile.tick_params(length=0, labelsize=6.5)
    tile.spines[:].set_visible(False)
    for axis, strip, at in ((tile.xaxis, columns, xs), (tile.yaxis, rows, ys)):
        axis.set_ticks(at, list(map(str, strip.cuts))) if strip.labels else axis.set_ticks([])
        axis.set_label_text(_clipped(" + ".join(label for label, *_ in strip.labels), 44), fontsize=7)
    lines = [*names_text([name for name in names if name], 2), _heading(view), *view.notes]
    tile.set_title("\n".join(_clipped(line, 80) for line in lines), loc="left", fontsize=6.5, family="monospace")


def _colours(ranks: Sequence[int], last: int) -> list[Any]:
    """A light colour of its own for each rank, of those up to the last one."""
    from matplotlib import colormaps

    return [colormaps["hsv"](rank / (last + 1), alpha=0.5) for rank in ranks]
