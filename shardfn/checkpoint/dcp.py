"""Our checkpoints behind `torch.distributed.checkpoint`, by one argument; and its directories, without running code.

    dcp.save(state, storage_writer=sf.checkpoint.StorageWriter(path))
    dcp.load(state, storage_reader=sf.checkpoint.StorageReader(path))

Torch's planner decides who writes what: of a value that is another one on each rank it keeps one.
"""

import io
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as metadata_
from torch.distributed.checkpoint import planner as planner_
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver, storage
from torch.futures import Future

from shardfn._torch import read_checkpoint_metadata
from shardfn.checkpoint.commits import METADATA, commit_to, in_the_way, name_of_file, nonce_in, require_begun
from shardfn.checkpoint.hashed_files import Sink, TensorPieces, VerifiedReader, write_hashed
from shardfn.checkpoint.leaves import SavedLeaf
from shardfn.checkpoint.manifest import from_json, read_manifest, require_each_once, to_json
from shardfn.checkpoint.saves import Written, manifest_of
from shardfn.checkpoint.storages import AnyPlace, LocalDirectory, Storage, owner, storage_of
from shardfn.layout import narrowed
from shardfn.notation import ShardError

_NOTES = "torch.distributed.checkpoint"  # in notes: what is no tensor, and the paths of all names


class _Anywhere:
    """What torch asks of a writer and of a reader, and ours need not."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def set_up_storage_writer(self, *args: Any, use_collectives: bool = True, **kwargs: Any) -> None:
        """Nothing is to be set up."""
        if not use_collectives:
            raise ShardError("StorageWriter: one manifest is of all ranks; leave out use_collectives=False")

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """What this rank does, as torch has planned."""
        return plan


class StorageWriter(_Anywhere, storage.StorageWriter):
    """Writes a checkpoint of ours from `torch.distributed.checkpoint.save`: with hashes, and whole or not there.

    >>> import tempfile, torch, shardfn as sf
    >>> import torch.distributed.checkpoint as dcp
    >>> mesh = sf.make_mesh("cpu", fsdp=1)  # which begins a process group
    >>> path, state = tempfile.mkdtemp() + "/step-1", {"x": torch.ones(2), "lr": 0.1}
    >>> _ = dcp.save(state, storage_writer=sf.checkpoint.StorageWriter(path))
    >>> state = {"x": torch.zeros(2), "lr": 0.0}
    >>> dcp.load(state, storage_reader=sf.checkpoint.StorageReader(path))
    >>> state
    {'x': tensor([1., 1.]), 'lr': 0.1}

    Args:
        path: as in `sf.checkpoint.save`; not a `LocalDirectory`.
        overwrite: whether a checkpoint of that name is replaced.
    """

    def __init__(self, path: str | os.PathLike[str] | Storage, *, overwrite: bool = False) -> None:
        self._place, self._overwrite = path if isinstance(path, Storage) else Path(path).absolute(), overwrite

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A path given to `dcp.save` counts."""
        if checkpoint_id is not None:
            self._place = Path(checkpoint_id).absolute()

    def prepare_global_plan(self, plans: list[planner_.SavePlan]) -> list[planner_.SavePlan]:
        """The first rank makes a place for files."""
        if problem := in_the_way(self._place, self._overwrite):
            raise ShardError(f"StorageWriter: {problem}")
        self._nonce = secrets.token_hex(8)
        self._commit = commit_to(self._place, self._nonce, nonce_in(storage_of(self._place)), owner())
        self._commit.begin()
        files = [name_of_file(self._nonce, rank) for rank in range(len(plans))]
        self._undo = finalize(self, self._commit.abandon, files)  # torch does not say when a save has failed
        return [replace(x, storage_data=(self._commit, file)) for x, file in zip(plans, files, strict=True)]

    def write_data(self, plan: planner_.SavePlan, planner: planner_.SavePlanner) -> Future[list[storage.WriteResult]]:
        """A file of this rank."""
        commit, name = plan.storage_data
        require_begun(commit)
        tensors = [item for item in plan.items if item.type != planner_.WriteItemType.BYTE_IO]
        places: list[Any] = []

        def put(sink: Sink) -> None:
            pieces = TensorPieces(sink)
            for item in tensors:
                data: Any = item.tensor_data
                box = tuple(zip(data.chunk.offsets, data.chunk.sizes, strict=True))
                value: Any = planner.resolve_data(item)
                places.append((item.index.fqn, box, pieces.add(value)))

        written = write_hashed(commit.storage, name, put) if tensors else None
        results = [storage.WriteResult(item.index, 0, (name, written, places, [])) for item in tensors[:1]]
        for item in plan.items:
            if item.type == planner_.WriteItemType.BYTE_IO:
                pickled: Any = planner.resolve_data(item)
                pickled.seek(0)
                value = _as_json(item.index.fqn, torch.load(pickled, weights_only=True))
                results.append(storage.WriteResult(item.index, 0, value))
        return _done(results)

    def finish(self, metadata: metadata_.Metadata, results: list[list[storage.WriteResult]]) -> None:
        """The first rank makes it a checkpoint."""
        known: dict[str, Any] = metadata.state_dict_metadata
        everyone: list[Written] = [x.storage_data for rank in results for x in rank if _is_tensor(known[x.index.fqn])]
        values = {x.index.fqn: x.storage_data for rank in results for x in rank if not _is_tensor(known[x.index.fqn])}
        leaves = [SavedLeaf((n,), tuple(x.size), x.properties.dtype, "", []) for n, x in known.items() if _is_tensor(x)]
        self._commit.finish(*manifest_of(self._nonce, _noted(values, metadata.planner_data), leaves, everyone))
        self._undo.detach()


class StorageReader(_Anywhere, storage.StorageReader):
    """Reads a checkpoint of ours for `torch.distributed.checkpoint.load`; see `StorageWriter`.

    Args:
        path: as in `sf.checkpoint.load`.
    """

    def __init__(self, path: AnyPlace) -> None:
        self._storage = storage_of(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A path given to `dcp.load` counts."""
        if checkpoint_id is not None:
            self._storage = LocalDirectory(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata_.Metadata:
        """What there is, in torch's words."""
        self._manifest = read_manifest(self._storage)
        noted = self._manifest.notes.get(_NOTES, _noted({}, None)[_NOTES])
        known: dict[str, Any] = {name: metadata_.BytesStorageMetadata() for name in noted["values"]}
        for name, leaf in ((name, leaf) for name, leaf in self._manifest.leaves.items() if name not in known):
            boxes = (tuple(zip(*part.box, strict=True)) or ((), ()) for part in leaf.parts)
            chunks = [metadata_.ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes]
            about = metadata_.TensorProperties(leaf.dtype), torch.Size(leaf.shape), chunks
            known[name] = metadata_.TensorStorageMetadata(*about)
        return metadata_.Metadata(known, {name: tuple(noted["paths"].get(name, [name])) for name in known}, {})

    def prepare_global_plan(self, plans: list[planner_.LoadPlan]) -> list[planner_.LoadPlan]:
        """What all ranks read."""
        return plans

    def read_data(self, plan: planner_.LoadPlan, planner: planner_.LoadPlanner) -> Future[None]:
        """Read it, and compare it with the hashes of what was written."""
        with closing(VerifiedReader(self._storage, self._manifest)) as reader:
            for item in plan.items:
                name = item.storage_index.fqn
                if item.type == planner_.LoadItemType.BYTE_IO:
                    value = io.BytesIO()
                    torch.save(from_json(self._manifest.notes[_NOTES]["values"][name], name, _no_tensor), value)
                    value.seek(0)
                    planner.load_bytes(item, value)
                    continue
                offset = item.storage_index.offset or [0] * len(item.lengths)
                starts = (a + b for a, b in zip(offset, item.storage_offsets, strict=True))
                target = planner.resolve_tensor(item).detach()
                reader.read_leaf(self._manifest.leaves[name], tuple(zip(starts, item.lengths, strict=True)), target)
                planner.commit_tensor(item, target)
        return _done(None)


def write_directory(source: Path, target: Path) -> None:
    """What is in a checkpoint, as torch.distributed.checkpoint writes it."""
    manifest = read_manifest(storage_of(source))
    state: dict[str, Any] = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in manifest.leaves.items()}
    state |= dict.fromkeys(manifest.notes.get(_NOTES, {"values": ()})["values"])
    state_dict_loader.load(state, storage_reader=StorageReader(source), no_dist=True)
    state_dict_saver.save(state, checkpoint_id=target, no_dist=True)


def _noted(values: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None) -> dict[str, Any]:
    """Notes: what is no tensor, and where in a state dict things are."""
    return {_NOTES: {"values": values, "paths": {name: [*path] for name, path in (paths or {}).items()}}}


def _done(value: Any) -> Any:
    done: Future[Any] = Future()
    done.set_result(value)
    return done


def _as_json(name: str, value: Any) -> Any:
    tensors_in: dict[str, Tensor] = {}
    as_json = to_json(value, name, tensors_in)
    if tensors_in:
        raise ShardError(f"checkpoint: '{min(tensors_in)}' is a tensor in what is none")
    return as_json


def _is_tensor(known: object) -> bool:
    return isinstance(known, metadata_.TensorStorageMetadata)


def _no_tensor(path: str, _: Mapping[str, Any]) -> Any:
    raise ShardError(f"StorageReader: '{path}' is a tensor in what is none")


def read_directory(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is in a directory of torch.distributed.checkpoint, by names, and notes as of `StorageWriter`.

    Nothing it says is called.

    Raises:
        ShardError: it asks for more than tensors and plain values, names a file elsewhere, or is damaged; there are no
            hashes in it, so that damaged numbers are not noticed.
    """
    try:
        metadata = read_checkpoint_metadata((directory / METADATA).read_bytes())
        found = {name: _read(directory, metadata, name, known) for name, known in metadata.state_dict_metadata.items()}
        values = {name: _as_json(name, value) for name, value in found.items() if not isinstance(value, Tensor)}
        return found, _noted(values, metadata.planner_data)
    except ShardError:
        raise
    except Exception as error:  # of bytes that anybody may have written
        why = f"'{directory}' is not what torch.distributed.checkpoint writes: {error}"
        raise ShardError(f"checkpoint: {why[:1000]}") from error


def _read(directory: Path, metadata: Any, name: str, known: Any) -> Any:
    if not isinstance(known, metadata_.TensorStorageMetadata):
        return _item(directory, metadata, name, None)
    boxes = [tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in known.chunks]
    require_each_once(name, known.size, boxes)
    whole = torch.empty(known.size, dtype=known.properties.dtype)  # no memory is taken before it is written
    for box in boxes:
        part = _item(directory, metadata, name, torch.Size(start for start, _ in box))
        if tuple(part.shape) != tuple(n for _, n in box) or part.dtype != known.properties.dtype:
            raise ShardError(f"checkpoint: a part of '{name}' is {tuple(part.shape)} {part.dtype}, not as it is said")
        narrowed(whole, box).copy_(part)
    return whole


def _item(directory: Path, metadata: Any, name: str, offset: Any) -> Any:
    where = next(x for index, x in metadata.storage_data.items() if index.fqn == name and index.offset == offset)
    path = directory / where.relative_path
    if path.parent != directory or path.is_symlink() or getattr(where, "transform_descriptors", None):
        raise ShardError(f"checkpoint: '{name}' is in '{where.relative_path}', which is no plain file of '{directory}'")
    if not 0 <= where.offset <= where.offset + where.length <= path.stat().st_size:
        raise ShardError(f"checkpoint: '{name}' is not within '{path}'")
    with path.open("rb") as file:
        file.seek(where.offset)
        return torch.load(io.BytesIO(file.read(where.length)), map_location="cpu", weights_only=True)
