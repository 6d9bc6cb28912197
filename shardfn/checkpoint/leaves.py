"""What is in a tree that is saved or loaded, by names: which boxes of which tensor this rank writes, and reads.

{"params": Params, "step": 3, "plain": [x]}   ->   params.layers.0.weight   step   plain.0

Each part of a leaf is written by one rank: along axes that do not split it, that one whose place a hash of its name
says, so that whole leaves are spread over the ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import EllipsisType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardfn._torch import pytree, unwrap_local, unwrap_locals, with_local, with_locals
from shardfn.checkpoint.hashed_files import VerifiedReader, hash_of
from shardfn.checkpoint.manifest import Manifest
from shardfn.checkpoint.tensor_files import Described
from shardfn.comm import flat_memory
from shardfn.layout import Axes, Box, Grid, Layout, Leaf, grid_of, in_turn, local_boxes, narrowed, per_rank
from shardfn.notation import ShardError
from shardfn.params import Params, is_tree, path_name, sharding

EACH = " of each rank"  # the kind of a leaf of which there are as many as ranks


def of_rank(name: str) -> str:
    """The name of what this rank has of a leaf of which each has one."""
    return f"{name}@{dist.get_rank() if dist.is_initialized() else 0}"


def is_first() -> bool:
    """Whether this is the rank whose plain tensors count, and that makes and renames directories."""
    return not dist.is_initialized() or dist.get_rank() == 0


class OfFirst(NamedTuple):
    """A tensor that may be another one on each rank, of which the first rank's is saved.

    >>> import tempfile, torch, shardfn as sf
    >>> x = torch.ones(2)
    >>> path = sf.checkpoint.save(tempfile.mkdtemp() + "/step-1", {"mean": sf.checkpoint.OfFirst(x)})
    >>> sf.checkpoint.load(path, {"mean": x})
    {'mean': tensor([1., 1.])}
    """

    tensor: Tensor


class PerRank(NamedTuple):
    """A tensor of which each rank has one of its own, and gets its own again: on as many ranks as it was saved by.

    >>> import tempfile, torch, shardfn as sf
    >>> mine = sf.checkpoint.PerRank(torch.get_rng_state())
    >>> path = sf.checkpoint.save(tempfile.mkdtemp() + "/step-1", {"random": mine})
    >>> sf.checkpoint.load(path, {"random": mine})["random"].tensor.equal(mine.tensor)
    True
    """

    tensor: Tensor


_DECLARED = OfFirst, PerRank


@dataclass
class SavedLeaf:
    """A tensor to save: its names, and what this rank writes of it, as (box, values)."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    parts: list[tuple[Box, Tensor]]

    @property
    def facts(self) -> list[str]:
        """What must be the same on all ranks."""
        if self.kind == EACH:
            return [f"'{self.names[0].rpartition('@')[0]}'{self.kind}"]
        return [f"'{name}' {self.shape} {self.dtype}, {self.kind}" for name in self.names]


def to_save(tree: Any) -> list[SavedLeaf]:
    """What there is to save, by names that no two have.

    Raises:
        TypeError: something is no tensor and no number.
        ShardError: it cannot be saved.
    """
    leaves: list[SavedLeaf] = []
    for name, value in values_of(tree).items():
        if isinstance(value, Params):
            leaves += _of_tree(name, value)
        elif isinstance(value, DTensor):
            box, splits = _box_of(name, value)
            axes = {str(dim): size for dim, size in enumerate(value.device_mesh.shape)}
            places = dict(zip(axes, value.device_mesh.get_coordinate() or (), strict=True))
            here = _is_written_here(name, [str(dim) for dim in splits], axes, places)
            parts = [(box, local)] if here and (local := unwrap_local(value)).numel() else []
            ranks = value.device_mesh.mesh.flatten()
            kind = f"a DTensor of {len(ranks)} ranks from rank {ranks[0]} on"
            leaves.append(SavedLeaf((name,), tuple(value.shape), value.dtype, kind, parts))
        elif value is not ...:
            plain = value.tensor if isinstance(value, _DECLARED) else value
            plain = plain.detach() if isinstance(plain, Tensor) else _number(name, plain)
            _require_plain(name, plain)
            each = isinstance(value, PerRank)
            parts = [(tuple((0, n) for n in plain.shape), plain)] if each or is_first() else []
            kind = EACH if each else "of the first rank" if isinstance(value, OfFirst) else _described(value)
            leaves.append(SavedLeaf((of_rank(name) if each else name,), tuple(plain.shape), plain.dtype, kind, parts))
    return leaves


def _of_tree(prefix: str, tree: Params) -> Iterator[SavedLeaf]:
    grid = grid_of(tree.mesh, tree.plan.roles.storage)
    for names, layout in _parameters(prefix, tree):
        shards = {leaf.name: tree[leaf.name] for leaf in layout.leaves}
        for name, shard in shards.items():
            sharding.require_reduced("checkpoint", name, shard)
        parts = [*_stored_parts(layout, shards, grid.sizes, grid.coords)]
        yield SavedLeaf(names, layout.shape, next(iter(shards.values())).dtype, "a parameter", parts)


def _parameters(prefix: str, tree: Params) -> Iterator[tuple[tuple[str, ...], Layout]]:
    """(names in the checkpoint, layout) of what a tree has."""
    layouts = sharding.selected_layouts(tree, None)
    if part := tree.keys() - {leaf.name for layout in layouts for leaf in layout.leaves}:
        raise ShardError(f"checkpoint: '{min(part)}' is only a part of a parameter; select parameters by their names")
    for layout in layouts:
        yield tuple(f"{prefix}.{name}".removeprefix(".") for name in layout.names), layout


def is_leaf(x: Any) -> bool:
    """Whether nothing that is in it is a leaf by itself."""
    return is_tree(x) or isinstance(x, _DECLARED)


def values_of(tree: Any) -> dict[str, Any]:
    """What there is in a tree, by names: trees of shards, tensors, numbers, and `...`.

    Raises:
        TypeError: something else.
        ShardError: two have one name.
    """
    values: dict[str, Any] = {}
    known = set[str]()
    for path, value in pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        if value is None:
            continue
        name = name_of(path)
        held = value.tensor if isinstance(value, _DECLARED) else value
        if not isinstance(held, Tensor if held is not value else Params | Tensor | int | float | EllipsisType):
            what = f"is a {type(held).__name__}; a tree has tensors and numbers"
            raise TypeError(f"checkpoint: '{name}' {what}, and notes= what else JSON can hold")
        names = {name}
        if isinstance(value, Params):  # under an empty key its parameters are beside the other leaves
            names = {each for names, _ in _parameters(name, value) for each in names}
        if name in values or known & names:
            twice = name if name in values else min(known & names)
            raise ShardError(f"checkpoint: two leaves of the tree have the name '{twice}'")
        known |= names
        values[name] = value
    return values


def name_of(path: Sequence[Any]) -> str:
    """The name of a leaf: the keys on the way to it, with dots between; in a key, `~` is `~0`, a dot `~1`, `@` `~2`."""
    return ".".join(path_name((key,)).replace("~", "~0").replace(".", "~1").replace("@", "~2") for key in path)


def top_of(name: str) -> str:
    """The key at the top of the tree."""
    return name.split(".")[0]


def keys_of(name: str) -> str:
    """A name with the characters that were in its keys."""
    return name.replace("~2", "@").replace("~1", ".").replace("~0", "~")


def _described(value: Any) -> str:
    same = f"values {hash_of(value)}" if isinstance(value, Tensor) else value
    return f"the same on all ranks: {same}"


def _number(name: str, number: float) -> Tensor:
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ShardError(f"checkpoint: '{name}' is {number}, which does not fit into 64 bits; save it in notes=")
    return torch.tensor(number, dtype=_dtype_of(number), device="cpu")


def _dtype_of(number: float) -> torch.dtype:
    return torch.bool if isinstance(number, bool) else torch.float64 if isinstance(number, float) else torch.int64


class Wanted(NamedTuple):
    """(shape, dtype) of what is to be read, by names; names of what each rank has one of, and of what is skipped."""

    leaves: dict[str, Described]
    each: set[str]
    skipped: set[str]


def wanted_by(like: Any) -> Wanted:
    """What is to be read."""
    wanted, each, skipped = dict[str, Described](), set[str](), set[str]()
    for name, value in values_of(like).items():
        if isinstance(value, Params):
            for names, layout in _parameters(name, value):
                wanted |= dict.fromkeys(names, (layout.shape, value[layout.leaves[0].name].dtype))
        elif value is ...:
            skipped.add(name)
        else:
            plain = value.tensor if isinstance(value, _DECLARED) else value
            each |= {name} if isinstance(value, PerRank) else set()
            stored = of_rank(name) if name in each else name
            if isinstance(plain, Tensor) and not isinstance(value, DTensor):
                _require_plain(name, plain)
            wanted[stored] = (tuple(plain.shape), plain.dtype) if isinstance(plain, Tensor) else ((), _dtype_of(plain))
    return Wanted(wanted, each, skipped)


def restored(manifest: Manifest, reader: VerifiedReader, name: str, like: Any) -> Any:
    """A leaf of the checkpoint, as the one that it is like."""

    def read(stored: str, boxes: Sequence[tuple[Box, Box]], out: Tensor) -> None:
        for box, here in boxes:
            reader.read_leaf(manifest.leaves[stored], box, narrowed(out, here))

    if isinstance(like, Params):
        grid, new = grid_of(like.mesh, like.plan.roles.storage), _emptied(like)
        for names, layout in _parameters(name, like):
            stored = [each for each in names if each in manifest.leaves]
            apart = [x for x in stored[1:] if manifest.leaves[x].parts != manifest.leaves[stored[0]].parts]
            for leaf in layout.leaves:
                local, values = unwrap_local(new[leaf.name]), set[str]()
                for each in (*apart, *stored[:1]):  # of tied parameters one, unless they were not tied then
                    fill(layout, leaf, grid, local, partial(read, each))
                    values |= {hash_of(local)} if apart else set()
                if len(values) > 1:
                    raise ShardError(f"checkpoint: {[*names]} are tied here, and there they have different values")
                if not stored:
                    local.copy_(unwrap_local(like[leaf.name]))
        return new
    if isinstance(like, _DECLARED):
        stored = of_rank(name) if isinstance(like, PerRank) else name
        return type(like)(restored(manifest, reader, stored, like.tensor))
    if like is None or like is ... or name not in manifest.leaves:
        return like
    new = _emptied(like) if isinstance(like, Tensor) else torch.empty((), dtype=_dtype_of(like), device="cpu")
    local = unwrap_local(new)
    box = _box_of(name, like)[0] if isinstance(like, DTensor) else tuple((0, n) for n in new.shape)
    read(name, [(box, tuple((0, n) for n in local.shape))], local)
    return new if isinstance(like, Tensor) else type(like)(new.item())


def _emptied(leaf: Any) -> Any:
    """Memory for values like those of a leaf: side by side and pinned where they are."""
    if isinstance(leaf, Params):
        locals_ = flat_memory.map_runs(lambda flats: [_empty(flat) for flat in flats], unwrap_locals([*leaf.values()]))
        return leaf.like(zip(leaf, with_locals([*leaf.values()], locals_), strict=True))
    return with_local(leaf, _empty(unwrap_local(leaf))) if isinstance(leaf, Tensor) else leaf


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, pin_memory=torch.cuda.is_available() and x.is_pinned())


def _is_written_here(name: str, splits: Sequence[str], sizes: Axes, coords: Axes) -> bool:
    """Whether this rank writes what all ranks have that are elsewhere along other axes than `splits` only."""
    return in_turn(name, sizes, {axis: coords[axis] for axis in splits}) == coords


def _stored_parts(
    layout: Layout, shards: Mapping[str, Tensor], sizes: Axes, coords: Axes
) -> Iterator[tuple[Box, Tensor]]:
    """(box of the model's tensor, its values) of all that this rank writes of a parameter."""
    for leaf in layout.leaves:
        if _is_written_here(leaf.name, leaf.axes, sizes, coords):
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


def _box_of(name: str, x: DTensor) -> tuple[Box, tuple[int, ...]]:
    """What this rank has of a DTensor, and the dims of its mesh that split it."""
    sharding.require_reduced("checkpoint", name, x)
    if x.device_mesh.get_coordinate() is None:
        raise ShardError(f"checkpoint: '{name}' is on a mesh without this rank; leave it out here")
    (chunk,) = x.__create_chunk_list__()
    split: list[tuple[int, Any]] = [(at, x.placements[at]) for at in range(x.device_mesh.ndim)]
    split = [(at, placement) for at, placement in split if not isinstance(placement, Replicate)]
    for at, placement in split:  # one that is split in strides has a box only if that undoes what axes after it split
        after = prod(x.device_mesh.size(other) for other, y in split if other > at and y.dim == placement.dim)
        if getattr(placement, "split_factor", after) != after or tuple(chunk.sizes) != tuple(unwrap_local(x).shape):
            raise ShardError(f"checkpoint: '{name}' is {x.placements}, of which no rank has a box; redistribute it")
    return tuple(zip(chunk.offsets, chunk.sizes, strict=True)), tuple(at for at, _ in split)


def _require_plain(name: str, x: Tensor) -> None:
    """Check a tensor that is not split.

    Raises:
        ShardError: it is no array of numbers in memory.
    """
    kinds = {"sparse": x.layout is not torch.strided, "quantized": x.is_quantized, "nested": x.is_nested}
    kinds |= {"meta": x.is_meta, type(x).__name__: hasattr(x, "__tensor_flatten__")}
    if kind := next((kind for kind, is_one in kinds.items() if is_one), ""):
        raise ShardError(f"checkpoint: '{name}' is a {kind} tensor; write a dense one that has its numbers")
