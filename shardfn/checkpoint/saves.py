"""`save`: what there is in a tree goes to a file of each rank, and a manifest makes it a checkpoint.

    what there is (`leaves`)  ->  a file of each rank (`hashed_files`)  ->  a manifest (`manifest`, `commits`)

Whatever a rank alone does ends in an exchange of outcomes: all go on, or all raise, and the group can be used
afterwards. What is written has the model's names and shapes, whatever the layout.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfn import _torch
from shardfn._torch import pytree
from shardfn.checkpoint.background import BACKGROUND, StagingSink
from shardfn.checkpoint.commits import METADATA, Commit, commit_to, in_the_way, name_of_file, nonce_in, require_begun
from shardfn.checkpoint.hashed_files import Piece, Sink, TensorPieces, hashed, write_hashed
from shardfn.checkpoint.leaves import EACH, SavedLeaf, is_first, to_save
from shardfn.checkpoint.manifest import HashedFile, Manifest, StoredLeaf, StoredPart, no_collection
from shardfn.checkpoint.storages import AnyPlace, LocalDirectory, Storage, owner, storage_of, with_space
from shardfn.comm import agree_on, exchange_numbers, failing_together, gather_objects
from shardfn.layout import Box
from shardfn.notation import ShardError
from shardfn.params import Params, is_tree

_NESTED = 200  # levels of calls that a program may need to get to where it reads a manifest
_FRAME = 8192  # more bytes than torch.save puts around the numbers of a tensor
_DIFFERS = ". Of what differs, save the first one's as sf.checkpoint.OfFirst(x), or each as sf.checkpoint.PerRank(x)"


def save(
    path: AnyPlace,
    tree: Any,
    mesh: DeviceMesh | None = None,
    *,
    notes: Mapping[str, Any] | None = None,
    async_: bool = False,
    overwrite: bool = False,
) -> Any:
    """Write a tree into a new checkpoint directory; it appears under its name when it is whole.

        >>> import tempfile, shardfn as sf
        >>> from torch import nn
        >>> params = sf.shard(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> path = sf.checkpoint.save(tempfile.mkdtemp() + "/step-1", {"params": params})
        >>> restored = sf.checkpoint.load(path, {"params": params})
        >>> sf.gather(restored["params"])["bias"].equal(sf.gather(params)["bias"])
        True

    Args:
        path: the directory to make; the same for every rank, on storage that all see. Or a `LocalDirectory` of each
            rank, or any other `Storage`.
        tree: `Params`, and containers of them, of tensors and of numbers; plain ones are the same on all ranks, or in
            `OfFirst(tensor)`, and loaded as plain ones.
        mesh: whose ranks save together; default: that of the first `Params` in the tree.
        notes: what JSON can hold, of the first rank; `notes(path)` reads it again.
        async_: whether it goes on in the background, once the tree is copied to host memory. One goes on at a time: the
            next save or load waits for it.
        overwrite: whether a checkpoint of that name is replaced: it stays until the new one is whole.

    Returns:
        the path; with `async_` a `Saving`, whose `wait()` returns it.

    Raises:
        TypeError: a leaf that is neither a tensor nor a number.
        ShardError: the mesh does not cover all ranks; that path is taken; ranks have other trees; a save in the
            background has failed. On every rank.
        OSError: a rank cannot write, on that rank; on others a `ShardError` that says so. Nothing has changed then.

    Communication: small exchanges over the mesh, and one of where everything was written; with `async_` that goes over
    a gloo group of its own.
    """
    return save_and(lambda: None, path, tree, mesh, notes, async_, overwrite)


@BACKGROUND.alone()
def save_and(
    then: Callable[[], object],
    path: AnyPlace,
    tree: Any,
    mesh: DeviceMesh | None,
    notes: Mapping[str, Any] | None = None,
    async_: bool = False,
    overwrite: bool = False,
) -> Any:
    """`save`, and what the first rank does once the checkpoint is there."""
    mesh = mesh_of(tree, mesh)
    settle(mesh)
    with together(mesh, "checkpoint.save"):
        if not isinstance(path, str | os.PathLike | Storage):
            raise TypeError(f"checkpoint.save: the path is a {type(path).__name__}; write save(path, tree)")
        if mesh is None and os.environ.get("RANK", "0") != "0":  # the first may save alone, as at its end
            raise ShardError("checkpoint.save: RANK says that there are others, and no group does; call sf.make_mesh")
    place = path if isinstance(path, Storage) else Path(path)
    one = _Save(*_agreed(place, tree, mesh, notes, [f"async_={async_}"], overwrite), then)
    over_mesh = partial(_exchanged, mesh)
    if not async_:
        one.go(over_mesh, one.begin, one.write, one.finish)
        return place
    anew = mesh is not None and any(lost for (lost,) in exchange_numbers(mesh, [BACKGROUND.has_lost()]))
    one.go(over_mesh, one.begin, partial(one.stage, anew))
    return BACKGROUND.begin(place, partial(one.go, BACKGROUND.exchanged, one.write_staged, one.finish))


def _agreed(
    place: Path | Storage, tree: Any, mesh: DeviceMesh | None, notes: Any, facts: list[str], overwrite: bool
) -> tuple[Commit, list[SavedLeaf], dict[str, Any], str]:
    """How it is written, leaves, notes and a nonce: all ranks are given the same facts, and nothing is in the way."""
    nonce = f"{require_one_path(mesh, 'checkpoint.save', place):016x}"
    with together(mesh, "checkpoint.save"):
        leaves = to_save(tree)
        told = _as_json(dict(notes or {}))
        of_each = isinstance(place, LocalDirectory)
        problem = in_the_way(place, overwrite) if is_first() or of_each else ""
        if of_each and problem:
            raise ShardError(f"checkpoint.save: {problem}")
        where = place if isinstance(place, Storage) else place.absolute()
        facts_of_first = problem, nonce_in(storage_of(place)) if is_first() else "", owner()
    if mesh is not None:
        agree_on(mesh, "checkpoint.save", [*facts, *(x for leaf in leaves for x in leaf.facts)], instead=_DIFFERS)
    problem, old, by = of_first(facts_of_first)
    if problem:
        raise ShardError(f"checkpoint.save: {problem}")
    return commit_to(where, nonce, old, by), leaves, told, nonce


def _as_json(notes: dict[str, Any]) -> Any:
    """What is read again; of the notes of other ranks nothing is written."""
    try:
        text = json.dumps(notes)
        json.loads("[" * _NESTED + text + "]" * _NESTED)  # in a manifest, and wherever that will be read
        if json.dumps(read := json.loads(text)) != text:
            raise ValueError("two keys that are one text")
        return read
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"checkpoint.save: notes= is what JSON has; tensors go into the tree ({error})") from error


# The file of a rank, if it has one, where each box is in it, and the leaves of which each rank has one.
Written = tuple[str, HashedFile | None, list[tuple[str, Box, Piece]], list[SavedLeaf]]


class _Save:
    """What a rank does for a save. Each step is given what the ranks have of the step before, on the first one."""

    def __init__(
        self, commit: Commit, leaves: list[SavedLeaf], notes: dict[str, Any], nonce: str, then: Callable[[], object]
    ) -> None:
        self._commit, self._leaves, self._notes, self._nonce, self._then = commit, leaves, notes, nonce, then
        self._is_first = is_first()  # in the background there may be no process group any more
        rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._name = name_of_file(nonce, rank)
        self._own = [replace(leaf, parts=[]) for leaf in leaves if leaf.kind == EACH]
        self._places: list[tuple[str, Box, Piece]] = []
        self._staged: Tensor | None = None

    def go(self, exchange: Callable[[Callable[[], Any]], list[Any]], *steps: Callable[[list[Any]], Any]) -> None:
        """Do steps; when one fails on a rank, all raise, and nothing is left of the save."""
        results: list[Any] = []
        try:
            for step in steps:
                results = exchange(partial(self._step, step, results))
        except Exception as error:
            of_network = any(isinstance(x, RuntimeError) for x in (error, error.__cause__))  # others may still write
            if not of_network and (self._is_first or self._commit.of_each_rank):
                self._commit.abandon([name_of_file(self._nonce, rank) for rank in range(self._ranks)])
            raise

    def _step(self, step: Callable[[list[Any]], Any], results: list[Any]) -> Any:
        try:
            return step(results)
        except OSError as error:
            raise with_space(error, self._commit.storage) from error

    def begin(self, _: list[Any]) -> None:
        """The first rank makes a place for files, or each one its own."""
        if self._commit.of_each_rank and isinstance(place := self._commit.storage, LocalDirectory):
            place.path.mkdir(parents=True, exist_ok=True)
        if self._is_first:
            self._commit.begin()

    def write(self, _: list[Any]) -> Written:
        """A file of what this rank has to write, if there is something."""
        require_begun(self._commit)
        has_parts = any(leaf.parts for leaf in self._leaves)
        file = write_hashed(self._commit.storage, self._name, self._put) if has_parts else None
        return self._name, file, self._places, self._own

    def stage(self, anew: bool, _: list[Any]) -> None:
        """Copy what this rank has to write to host memory; exchanges to come need a new process group, or the last."""
        BACKGROUND.meet(self._nonce, anew)
        sizes = [x.nbytes + _FRAME for leaf in self._leaves for _, x in leaf.parts]
        sink = StagingSink(BACKGROUND.memory.fit(sum(sizes)))  # also of nothing: with it the end of a process waits
        self._put(sink)
        self._staged = sink.staged() if sizes else None
        self._leaves = [replace(leaf, parts=[]) for leaf in self._leaves]

    def write_staged(self, _: list[Any]) -> Written:
        """A file of what was copied."""
        require_begun(self._commit)
        file = None if self._staged is None else BACKGROUND.write(self._commit.storage, self._name, self._staged)
        return self._name, file, self._places, self._own

    def _put(self, sink: Sink) -> None:
        pieces = TensorPieces(sink)
        self._places = [(leaf.names[0], box, pieces.add(x)) for leaf in self._leaves for box, x in leaf.parts]

    def finish(self, everyone: list[Written]) -> None:
        """The first rank makes it a checkpoint."""
        if self._is_first:
            self._commit.finish(*manifest_of(self._nonce, self._notes, self._leaves, everyone))
            self._then()


@no_collection()
def manifest_of(
    nonce: str, notes: Mapping[str, Any], leaves: Sequence[SavedLeaf], everyone: Sequence[Written]
) -> tuple[Manifest, bytes]:
    """What all ranks have written, for us and for torch.distributed.checkpoint."""
    leaves = [*(leaf for leaf in leaves if leaf.kind != EACH), *(leaf for *_, own in everyone for leaf in own)]
    parts: dict[str, list[tuple[Box, str, Piece]]] = {leaf.names[0]: [] for leaf in leaves}  # by first names
    for file, _, places, _ in everyone:
        for name, box, piece in places:
            parts[name].append((box, file, piece))
    of_ranks = {name: tuple(StoredPart(box, file, x.at) for box, file, x in of_leaf) for name, of_leaf in parts.items()}
    first_names = {name: leaf for leaf in leaves for name in leaf.names}
    stored = {n: StoredLeaf(x.shape, x.dtype, of_ranks[x.names[0]]) for n, x in first_names.items()}
    tensors = ((name, (leaf.shape, leaf.dtype, parts[leaf.names[0]])) for leaf in leaves for name in leaf.names)
    metadata = _torch.checkpoint_metadata(dict(tensors))
    files = {name: file for name, file, *_ in everyone if file is not None}
    files[METADATA] = hashed(metadata)
    return Manifest(nonce, files, stored, dict(notes)), metadata


def settle(mesh: DeviceMesh | None) -> None:
    """Wait for the save in the background.

    Raises:
        ShardError: it has failed, and nobody has heard of it. On every rank.
    """
    with BACKGROUND.alone(within=True), together(mesh, "checkpoint"):
        BACKGROUND.settle()


def mesh_of(tree: Any, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh whose ranks save or load together, which is of all ranks; None without a process group."""
    if _torch.has_no_memory():
        raise ShardError("checkpoint: in sf.jit no values are known: return what is to be saved, and save it outside")
    if _torch.simulated():
        raise ShardError("checkpoint: in sf.simulate all ranks are one process; save and load on real ranks")
    if not dist.is_initialized():
        return None
    if mesh is None:
        leaves = pytree.tree_leaves(tree, is_leaf=is_tree)
        mesh = next((leaf.mesh for leaf in leaves if isinstance(leaf, Params)), None)
    if mesh is not None and mesh.size() != dist.get_world_size():
        why = f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks"
        raise ShardError(f"checkpoint: {why}; all ranks must save and load together")
    return mesh or init_device_mesh("cuda" if "nccl" in dist.get_backend() else "cpu", (dist.get_world_size(),))


def together(mesh: DeviceMesh | None, verb: str) -> AbstractContextManager[None]:
    """All ranks raise when one does."""
    return nullcontext() if mesh is None else failing_together(mesh, verb)


def _exchanged(mesh: DeviceMesh | None, work: Callable[[], Any]) -> list[Any]:
    """What that gives on every rank, on the first one; all raise if it fails on one."""
    with together(mesh, "checkpoint.save"):
        result = work()
    return [result] if mesh is None or result is None else gather_objects(mesh, result)  # all are None


def of_first(value: Any) -> Any:
    """What the first rank has: of what ranks may see in another way, such as the names in a directory."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def require_one_path(mesh: DeviceMesh | None, verb: str, path: object) -> int:
    """Ranks that write to, or read from, different places would mix checkpoints; returns a number that all share.

    Raises:
        ShardError: on every rank.
    """
    number, none = secrets.randbits(62), " (None: no checkpoint there)" * verb.endswith("load")
    instead = f"{none}; give all ranks one directory that all see, not tempfile.mkdtemp() of each"
    known = type(path).__name__ if isinstance(path, Storage) else path
    return number if mesh is None else agree_on(mesh, verb, [f"'{known}'"], number, instead)
