"""Which part of which tensor a rank has, and which of those that have it writes it: integers, nothing is sent.

Each part of a leaf is written by one rank: along axes that do not split it, that one whose place a hash of its name
says, so that whole leaves are spread over the ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfn._torch import unwrap_local
from shardfn.layout import Axes, Box, Grid, Layout, Leaf, in_turn, local_boxes, narrowed, nested_chunk, per_rank


def is_written_here(name: str, splits: Sequence[str], sizes: Axes, coords: Axes) -> bool:
    """Whether this rank writes what all ranks have that are elsewhere along other axes than `splits` only."""
    return in_turn(name, sizes, {axis: coords[axis] for axis in splits}) == coords


def stored_parts(
    layout: Layout, shards: Mapping[str, Tensor], sizes: Axes, coords: Axes
) -> Iterator[tuple[Box, Tensor]]:
    """(box of the model's tensor, its values) of all that this rank writes of a parameter."""
    for leaf in layout.leaves:
        if is_written_here(leaf.name, leaf.axes, sizes, coords):
            local = unwrap_local(shards[leaf.name])
            merged = local.reshape(leaf.merged(local.shape))
            yield from ((box, narrowed(merged, here)) for box, here in local_boxes(layout, leaf, sizes, coords))


def fill(
    layout: Layout, leaf: Leaf, grid: Grid, local: Tensor, read: Callable[[Sequence[tuple[Box, Box]], Tensor], None]
) -> None:
    """Fill this rank's part of a leaf by `read`, of (box in the model's tensor, in the merged shard), and the shard."""

    def filled(coords: Axes, shards: Sequence[Tensor]) -> list[Tensor]:
        out = shards[0].contiguous()  # the shard itself, if it is
        if leaf.shape != leaf.extent:
            out.zero_()  # where it is padded
        read(list(local_boxes(layout, leaf, grid.sizes, coords)), out.view(leaf.merged(out.shape)))
        return [out]

    local.copy_(per_rank(grid, filled, [local])[0])


def box_of(x: DTensor) -> tuple[Box, tuple[int, ...]]:
    """What this rank has of a DTensor, and the dims of its mesh that split it."""
    mesh, coordinate = x.device_mesh, x.device_mesh.get_coordinate()
    assert coordinate is not None, "all ranks of a mesh save together"
    splits: list[list[tuple[int, int]]] = [[] for _ in x.shape]
    for dim, placement in enumerate(x.placements):
        if type(placement) is Shard:
            splits[placement.dim % x.dim()].append((mesh.size(dim), coordinate[dim]))
    box = tuple(nested_chunk(size, split) for size, split in zip(x.shape, splits, strict=True))
    return box, tuple(dim for dim, placement in enumerate(x.placements) if not isinstance(placement, Replicate))
