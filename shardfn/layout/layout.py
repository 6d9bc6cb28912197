"""How one parameter is stored and seen: integers only.

A parameter has a *model* shape (what an ordinary state dict holds). It is stored as one or more *leaves*, each a
tensor whose dims are split by plain chunking, and a module computes with its *gathered* form: whole over the data
axes, still split over the compute axes.

    model      [3*heads*d, c]        "(3 heads@tp d) c@fsdp"
    leaf       [3, heads, d, c]      split: dim 1 over tp, dim 3 over fsdp
    gathered   [3*heads/tp*d, c]

Which part of a parameter a rank has is said in three ways. A layout is what there is; functions here make one of the
others of it:

    stored     `Layout`, `Leaf`    the axes that split the factors of its dims, as the rule says         here
    integers   `Box`               (start, length) of each dim of the model's tensor, for one rank       here
    abstract   `Part`              blocks along one dim, of which each rank of an axis has a part        partition.py

What a `Part` becomes in a view, a slice or a product stands in partition.py, and where boxes lie in tensors of files
that are joined and cut in stored_names.py. Functions on tensors here only reshape, narrow and pad; none communicates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor

from shardfn.layout.mesh import Grid, nested_chunk, per_rank
from shardfn.layout.model_info import ParamInfo
from shardfn.layout.partition import Part
from shardfn.notation import Spec

Axes = Mapping[str, int]
Box = tuple[tuple[int, int], ...]  # (start, length) of each dim
Run = tuple[int, int, int]  # neighbouring elements of a dim: (start, length, start in a part)
Along = Sequence[Sequence[Run]]  # the runs of each dim


@dataclass(frozen=True)
class Leaf:
    """One stored tensor.

    `extent` is its true shape and `shape` the padded one; `splits[d]` are the axes of dim d, outermost first;
    `merges[m]` is how many of its dims make up model dim m.
    """

    name: str
    shape: tuple[int, ...]
    extent: tuple[int, ...]
    splits: tuple[tuple[str, ...], ...]
    merges: tuple[int, ...]
    rule: Spec

    def factors(self, dim: int) -> slice:
        """The dims of it that make up model dim `dim`."""
        first = sum(self.merges[:dim])
        return slice(first, first + self.merges[dim])

    def merged(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape with a size for each of its dims, with one for each dim of the model."""
        return tuple(prod(shape[self.factors(dim)]) for dim in range(len(self.merges)))

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that split this leaf."""
        return tuple(axis for split in self.splits for axis in split)

    @property
    def padded_axes(self) -> frozenset[str]:
        """The axes that split a padded dim."""
        dims = zip(self.splits, self.extent, self.shape, strict=True)
        return frozenset(axis for split, true, stored in dims if true != stored for axis in split)

    def local_range(self, sizes: Axes, coords: Axes, keep: Sequence[str] | None = None) -> tuple[tuple[int, int], ...]:
        """(start, length) of each dim on the rank at `coords`, split only over the axes in `keep` (default: all)."""
        return tuple(
            nested_chunk(size, [(sizes[a], coords[a]) for a in split if keep is None or a in keep])
            for size, split in zip(self.shape, self.splits, strict=True)
        )

    def local_shape(self, sizes: Axes, coords: Axes, keep: Sequence[str] | None = None) -> tuple[int, ...]:
        """Shape on the rank at `coords`."""
        return tuple(length for _, length in self.local_range(sizes, coords, keep))

    def gathered_shape(self, data: Sequence[str], sizes: Axes) -> tuple[int, ...]:
        """Shape when it is whole over the data axes, with its padding."""
        return self.without(data).local_shape(sizes, dict.fromkeys(sizes, 0))

    def stacked(self, size: int, axes: Sequence[str] = ()) -> "Leaf":
        """With a new first dim of `size`, split over `axes`."""
        first = {"shape": size, "extent": size, "splits": tuple(axes), "merges": 1}
        changes = {name: (value, *getattr(self, name)) for name, value in first.items()}
        return replace(self, **changes, rule=self.rule.stacked(axes))

    def member(self) -> "Leaf":
        """Without the first dim."""
        changes = {name: getattr(self, name)[1:] for name in ("shape", "extent", "splits", "merges")}
        return replace(self, **changes, rule=self.rule.member())

    def without(self, axes: Sequence[str]) -> "Leaf":
        """Whole over `axes`."""
        splits = tuple(tuple(axis for axis in split if axis not in axes) for split in self.splits)
        return replace(self, splits=splits, rule=self.rule.without(axes))

    def split_dim(self, axis: str) -> int | None:
        """The dim that `axis` splits."""
        return next((dim for dim, split in enumerate(self.splits) if axis in split), None)


@dataclass(frozen=True, kw_only=True)
class Layout(ParamInfo):
    """One parameter of the model: its rule, where the rule came from, and its stored leaves.

    When it is `placed`, modules compute with a DTensor over these axes.
    """

    rule: Spec
    source: str  # the pattern that matched, or which default applied
    leaves: tuple[Leaf, ...]
    block_dim: int = 0  # the model dim along which several leaves are concatenated
    unit: str = ""
    # (axis, n) of `kv@tp?` on dim 0 when its n parts do not divide: whole in storage, and where the model meets it
    # with values that are split over the axis, each rank takes the part that its share of them belongs to
    shared: tuple[tuple[str, int], ...] = ()
    kept: tuple[str, ...] = ()  # the data axes over which its module computes with a part, see [Note: kept axes]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that split this parameter, each once."""
        return tuple(dict.fromkeys(axis for leaf in self.leaves for axis in leaf.axes))

    @property
    def plain(self) -> bool:
        """Whether the one stored leaf has the model's shape."""
        return len(self.leaves) == 1 and self.leaves[0].shape == self.shape

    @property
    def numel(self) -> int:
        """Number of elements in the model."""
        return prod(self.shape)

    def block(self, leaf: Leaf) -> tuple[int, int]:
        """(start, length) of a leaf on `block_dim`."""
        lengths = [prod(each.extent[each.factors(self.block_dim)]) for each in self.leaves]
        at = self.leaves.index(leaf)
        return sum(lengths[:at]), lengths[at]

    def part(self, leaf: Leaf, full: Tensor) -> Tensor:
        """Of a tensor of the model's shape, what a leaf stores."""
        return full if len(self.leaves) == 1 else full.narrow(self.block_dim, *self.block(leaf))

    def stored_as(self, other: "Layout") -> bool:
        """Whether two layouts of one parameter differ in the words of their rules at most."""
        mine, theirs = ([(leaf.name, leaf.shape, leaf.extent, leaf.splits) for leaf in x.leaves] for x in (self, other))
        return mine == theirs

    def stacked(self, size: int, axes: Sequence[str] = ()) -> "Layout":
        """With a new first dim of `size`, split over `axes`."""
        leaves, rule = tuple(leaf.stacked(size, axes) for leaf in self.leaves), self.rule.stacked(axes)
        return replace(self, shape=(size, *self.shape), leaves=leaves, rule=rule, block_dim=self.block_dim + 1)

    def member(self) -> "Layout":
        """Without the first dim."""
        leaves, rule = tuple(map(Leaf.member, self.leaves)), self.rule.member()
        return replace(self, shape=self.shape[1:], leaves=leaves, rule=rule, block_dim=self.block_dim - 1)

    def without(self, axes: Sequence[str]) -> "Layout":
        """Whole over `axes`."""
        leaves, kept = tuple(leaf.without(axes) for leaf in self.leaves), tuple(a for a in self.kept if a not in axes)
        return replace(self, leaves=leaves, rule=self.rule.without(axes), kept=kept)

    def model_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that split model dim `dim`, in any of its leaves."""
        splits = (split for leaf in self.leaves for split in leaf.splits[leaf.factors(dim)])
        return tuple(dict.fromkeys(axis for split in splits for axis in split))


def to_leaves(layout: Layout, full: Tensor) -> list[Tensor]:
    """The stored leaves, whole and padded, of a tensor of model shape (views where nothing is padded)."""
    return [_pad(layout.part(leaf, full).reshape(leaf.extent), leaf.shape) for leaf in layout.leaves]


def compute_view(layout: Layout, gathered: Sequence[Tensor]) -> Tensor:
    """What a module computes with, from leaves that are whole over the data axes.

    Padding stays on dims that compute axes split, so that every rank has the same shape; elsewhere it is trimmed. Of
    leaves that are whole over all axes, the tensor of model shape: the inverse of `to_leaves`.
    """
    merged = []
    for leaf, x in zip(layout.leaves, gathered, strict=True):
        inside = compute_shape(leaf, x.shape)
        x = x if x.shape == inside else x[tuple(map(slice, inside))]
        # [3, heads, d, c] -> [3*heads*d, c]
        merged.append(x if all(merge == 1 for merge in leaf.merges) else x.reshape(leaf.merged(x.shape)))
    return merged[0] if len(merged) == 1 else torch.cat(merged, dim=layout.block_dim)


def from_compute_view(layout: Layout, value: Tensor, data: Sequence[str], sizes: Axes) -> list[Tensor]:
    """Leaves that are whole over the data axes, from the tensor a module computes with; inverse of `compute_view`."""
    padded = [leaf.gathered_shape(data, sizes) for leaf in layout.leaves]
    trimmed = [compute_shape(leaf, shape) for leaf, shape in zip(layout.leaves, padded, strict=True)]
    parts: Sequence[Tensor] = [value]
    if len(padded) > 1:
        lengths = [leaf.merged(x)[layout.block_dim] for leaf, x in zip(layout.leaves, trimmed, strict=True)]
        parts = value.split(lengths, layout.block_dim)
    return [_pad(part.reshape(inside), all_) for part, inside, all_ in zip(parts, trimmed, padded, strict=True)]


def compute_view_shape(layout: Layout, data: Sequence[str], sizes: Axes) -> tuple[int, ...]:
    """The shape of what a module computes with."""
    shapes = [leaf.merged(compute_shape(leaf, leaf.gathered_shape(data, sizes))) for leaf in layout.leaves]
    dims = enumerate(zip(*shapes, strict=True))
    return tuple(sum(sizes) if dim == layout.block_dim else sizes[0] for dim, sizes in dims)


def compute_shape(leaf: Leaf, gathered: Sequence[int]) -> tuple[int, ...]:
    """The gathered shape of a leaf without the padding of dims that are whole."""
    dims = zip(gathered, leaf.shape, leaf.extent, strict=True)
    return tuple(extent if size == whole else size for size, whole, extent in dims)


def clear_padding_(leaf: Leaf, local: Tensor, sizes: Axes, coords: Axes, keep: Sequence[str] | None = None) -> None:
    """Zeros beyond the true extent of a local part: gradients of padding must not train it."""
    for dim, (start, length) in enumerate(leaf.local_range(sizes, coords, keep)):
        inside = max(0, min(length, leaf.extent[dim] - start))
        if inside < length:
            local.narrow(dim, inside, length - inside).zero_()


def local_slice(leaf: Leaf, whole: Tensor, sizes: Axes, coords: Axes, keep: Sequence[str] | None = None) -> Tensor:
    """The part of a whole leaf that the rank at `coords` holds (a view)."""
    return narrowed(whole, leaf.local_range(sizes, coords, keep))


def own_parts(leaves: Sequence[Leaf], full: Sequence[Tensor], grid: Grid, keep: Sequence[str] | None) -> list[Tensor]:
    """The parts of whole leaves that this rank holds, or in a simulation each."""

    def parts(coords: Axes, wholes: Sequence[Tensor]) -> list[Tensor]:
        return [local_slice(leaf, x, grid.sizes, coords, keep) for leaf, x in zip(leaves, wholes, strict=True)]

    return per_rank(grid, parts, full)


def _pad(x: Tensor, shape: Sequence[int]) -> Tensor:
    sizes = zip(reversed(x.shape), reversed(shape), strict=True)
    widths = [width for have, want in sizes for width in (0, want - have)]
    return torch.nn.functional.pad(x, widths) if any(widths) else x


# -- which part a rank has, in integers and as a `Part` ----------------------------------------------------------------


def runs(extent: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """What a rank has of a dim that is made of factors, as runs of neighbouring elements, in order.

        >>> from shardfn.layout.layout import runs
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


def along(layout: Layout, leaf: Leaf, sizes: Axes, coords: Axes) -> Along:
    """What a rank has of a leaf, dim by dim of the model's tensor: runs, with starts in the leaf's merged part."""
    ranges, out = leaf.local_range(sizes, coords), list[list[Run]]()
    for dim in range(len(leaf.merges)):
        factors = leaf.factors(dim)
        before = layout.block(leaf)[0] if dim == layout.block_dim else 0
        out.append([(start + before, n, local) for start, n, local in runs(leaf.extent[factors], ranges[factors])])
    return out


def local_boxes(layout: Layout, leaf: Leaf, sizes: Axes, coords: Axes) -> Iterator[tuple[Box, Box]]:
    """(box in the model's tensor, the same in this rank's part of a leaf once its factors are merged) for all of it.

    What lies beyond the true extent of a padded leaf is in no box.
    """
    for chosen in product(*along(layout, leaf, sizes, coords)):
        yield tuple((start, n) for start, n, _ in chosen), tuple((local, n) for _, n, local in chosen)


def blocks(size: Sequence[int], limit: int, whole: Sequence[int] | None = None) -> Iterator[Box]:
    """Boxes that fill a tensor, in order, each at most `limit` elements from its first to its last.

    With `whole`, the tensor is a part of one of that shape, in whose memory the elements are counted.

        >>> from shardfn.layout.layout import blocks
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


def part_for(layout: Layout, axis: str, sizes: Mapping[str, int], computed: Sequence[str]) -> Part:
    """Which part of a parameter that `axis` splits a module computes with: whole over all axes but `computed`."""
    zero, split = dict.fromkeys(sizes, 0), list[tuple[int, int]]()
    dim = next(dim for dim in range(len(layout.shape)) if axis in layout.model_axes(dim))
    leaves = layout.leaves if dim == layout.block_dim else layout.leaves[:1]
    for leaf in leaves:
        factors = leaf.factors(dim)
        local = leaf.local_shape(sizes, zero, computed)[factors]
        at = next((i for i, axes in enumerate(leaf.splits[factors]) if axis in axes), None)
        split += [] if at is None else [(prod(local[:at]), prod(local[at:]))]
    if len(split) < len(leaves):
        return Part("lost", why=f"only some blocks of '{layout.rule}' are split over '{axis}'", cure="rules")
    return Part("split", dim, tuple(split))
