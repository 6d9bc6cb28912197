"""Which part of a parameter a rank has, in the three ways in which this library says so. Layer 1.

    stored     `Layout`, `Leaf`    the axes that split the factors of its dims, as the rule says         layout.py
    integers   `Box`               (start, length) of each dim of the model's tensor, for one rank       here
    abstract   `Part`              blocks along one dim, of which each rank of an axis has a part        parts.py

A layout is what there is; everything here makes one of the others of it. What a `Part` becomes in a view, a slice or a
product stands in parts.py, and where boxes lie in tensors of files that are joined and cut in stored_names.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from torch import Tensor

from shardfn.core.layout import Axes, Layout, Leaf
from shardfn.core.parts import Part

Box = tuple[tuple[int, int], ...]  # (start, length) of each dim


def runs(extent: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """What a rank has of a dim that is made of factors, as runs of neighbouring elements, in order.

        >>> from shardfn.core.ownership import runs
        >>> list(runs((2, 4), [(0, 2), (2, 2)]))  # the second half of four, twice
        [(2, 2, 0), (6, 2, 2)]

    Args:
        extent: the true sizes of the factors, outermost first.
        ranges: (start, length) of each factor on the rank; what lies beyond its true size is in no run.

    Returns:
        (start in the dim, length, start in the rank's part of it).
    """
    if not extent:
        yield (0, 1, 0)
        return
    (start, length), inner = ranges[0], list(runs(extent[1:], ranges[1:]))
    inside = max(0, min(length, extent[0] - start))
    size, local = prod(extent[1:]), prod(n for _, n in ranges[1:])
    if inner != [(0, size, 0)] or local != size:
        yield from (((start + i) * size + a, n, i * local + b) for i in range(inside) for a, n, b in inner)
    elif inside * size:
        yield (start * size, inside * size, 0)


def local_boxes(layout: Layout, leaf: Leaf, sizes: Axes, coords: Axes) -> Iterator[tuple[Box, Box]]:
    """(box in the model's tensor, the same in this rank's part of a leaf once its factors are merged) for all of it.

    What lies beyond the true extent of a padded leaf is in no box.
    """
    ranges = leaf.local_range(sizes, coords)
    along = []
    for dim in range(len(leaf.merges)):
        own = leaf.factors(dim)
        before = layout.block(leaf)[0] if dim == layout.block_dim else 0
        along.append([(start + before, n, local) for start, n, local in runs(leaf.extent[own], ranges[own])])
    for chosen in product(*along):
        yield tuple((start, n) for start, n, _ in chosen), tuple((local, n) for _, n, local in chosen)


def blocks(size: Sequence[int], limit: int, whole: Sequence[int] | None = None) -> Iterator[Box]:
    """Boxes that fill a tensor, in order, each at most `limit` elements from its first to its last.

    With `whole`, the tensor is a part of one of that shape, in whose memory the elements are counted.

        >>> from shardfn.core.ownership import blocks
        >>> list(blocks((3, 4), 8))
        [((0, 2), (0, 4)), ((2, 1), (0, 4))]
    """
    shape = tuple(size if whole is None else whole)
    if 0 in size:
        return
    dim = next((d for d, n in enumerate(size) if n > 1), None)
    if dim is None or prod(size[: dim + 1]) * prod(shape[dim + 1 :]) <= limit:
        yield tuple((0, n) for n in size)
        return
    step = max(1, limit // prod(shape[dim + 1 :]))
    for start in range(0, size[dim], step):
        part = (*size[:dim], min(step, size[dim] - start), *size[dim + 1 :])
        inner = blocks(part, limit, shape) if step == 1 else iter([tuple((0, n) for n in part)])
        yield from ((*box[:dim], (start, box[dim][1]), *box[dim + 1 :]) for box in inner)


def narrowed(x: Tensor, box: Box) -> Tensor:
    """The view of a tensor that a box is."""
    return x[tuple(slice(start, start + length) for start, length in box)]


def parts_of(layout: Layout, axes: Sequence[str], sizes: Mapping[str, int], computed: Sequence[str]) -> dict[str, Part]:
    """By each of `axes`, which part of a parameter a module computes with: whole over all axes but `computed`."""
    return {axis: part for axis in axes for part in [_part_of(layout, axis, sizes, computed)] if part is not None}


def _part_of(layout: Layout, axis: str, sizes: Mapping[str, int], computed: Sequence[str]) -> Part | None:
    zero, found = dict.fromkeys(sizes, 0), None
    for dim in range(len(layout.shape)):
        blocks = layout.leaves if dim == layout.block_dim else layout.leaves[:1]
        split: list[tuple[int, int]] = []
        for leaf in blocks:
            own = leaf.factors(dim)
            local = leaf.local_shape(sizes, zero, computed)[own]
            at = next((i for i, axes in enumerate(leaf.splits[own]) if axis in axes), None)
            split += [] if at is None else [(prod(local[:at]), prod(local[at:]))]
        if len(split) == len(blocks):
            found = Part("split", dim, tuple(split))
        elif split:
            why = f"only some blocks of '{layout.rule}' are split over '{axis}'"
            found = Part("lost", why=why, cure="rules")
    return found
