"""Leaves of a tree into another layout: slice by slice, from ranks that have them to ranks that lack them.

`layout/slices.py` says what goes where, `comm/slice_messages.py` sends it; in a simulation it is copied from rank to
rank. Not here: autograd, and graphs, in which there are no messages; see `reshard.py`.
"""

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn._torch import on_each_rank, part_of_rank, simulated, unwrap_local
from shardfn.comm import Shipment, exchange_slices
from shardfn.layout import Grid, Held, Layout, Ranks, Slice, grid_of, narrowed, received, sent
from shardfn.params.tree import Params


def move(tree: Params, layouts: Mapping[str, Layout], grid: Grid, shards: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards of new layouts on `grid`, by first names, from a tree; zeros where they are padded.

    Communication: each rank receives what it lacks, and holds 16 MiB besides.
    """
    outs = dict[str, Tensor]()
    for leaf in (leaf for layout in layouts.values() for leaf in layout.leaves):
        shard = shards[leaf.name].zero_() if leaf.shape != leaf.extent else shards[leaf.name]
        outs[leaf.name] = shard if set(leaf.merges) <= {1} else shard.contiguous()  # the shard itself, if it is

    def place(part: Slice) -> Tensor:
        out = part_of_rank(outs[part.into.name], part.target)
        return narrowed(out.view(part.into.merged(out.shape)), part.here)

    _move(tree, layouts, grid, place, {})
    for name, out in outs.items():
        if out is not shards[name]:
            shards[name].copy_(out)


def collect(tree: Params, dtypes: Mapping[str, torch.dtype], rank: int, wholes: Mapping[str, Tensor]) -> None:
    """Fill tensors that one rank alone has, of the shapes and by the first names of parameters, in these dtypes.

    Communication: that rank receives what it lacks, and each holds 16 MiB besides.
    """
    owners = {leaf.name: name for name in dtypes for leaf in tree.plan.layouts[name].leaves}
    layouts = {name: tree.plan.layouts[name].without(tree.plan.layouts[name].axes) for name in dtypes}

    def place(part: Slice) -> Tensor:
        return narrowed(part_of_rank(wholes[owners[part.leaf.name]], part.target), part.box)

    _move(tree, layouts, Ranks(sizes={}, ranks=(rank,)), place, {leaf: dtypes[name] for leaf, name in owners.items()})


def _move(
    tree: Params,
    layouts: Mapping[str, Layout],
    ranks: Ranks,
    place: Callable[[Slice], Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Have `ranks` fill the `place` of each slice; `dtypes` of old leaves say in which it is wanted there."""
    grid, in_one = grid_of(tree.mesh, tree.plan.roles.storage), simulated()
    moves = [(Held(tree.plan.layouts[name], grid), Held(layout, ranks)) for name, layout in layouts.items()]

    @cache
    def merged(name: str, rank: int) -> Tensor:
        local = part_of_rank(unwrap_local(tree[name]).detach(), rank)
        return local.reshape(tree.plan.leaves[name][1].merged(local.shape))

    def value(part: Slice) -> Tensor:
        return narrowed(merged(part.leaf.name, part.source), part.there)

    def shipment(rank: int, view: Tensor, part: Slice) -> Shipment:
        have = tree[part.leaf.name].dtype
        return Shipment(rank, view, min(have, dtypes.get(part.leaf.name, have), key=lambda dtype: dtype.itemsize))

    def fill(rank: int) -> list[Shipment]:
        from_others = list[Shipment]()
        for part in (part for old, new in moves if rank in ranks.ranks for part in received(old, new, rank)):
            if in_one or part.source == rank:
                place(part).copy_(value(part))
            else:
                from_others.append(shipment(part.source, place(part), part))
        return from_others

    if in_one:
        on_each_rank(lambda rank, _: [x.view for x in fill(rank)], [])  # which receives nothing
        return
    rank = dist.get_rank()
    from_others = fill(rank)
    to_others = [shipment(part.target, value(part), part) for old, new in moves for part in sent(old, new, rank)]
    exchange_slices(to_others, from_others, grid.ranks, grid.device)
