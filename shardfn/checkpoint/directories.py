"""Checkpoint directories: trees saved by all ranks together, and loaded on any mesh.

    save    what there is (`leaves`)  ->  a file of each rank (`hashed_files`)  ->  a manifest (`manifest`, `commits`)
    load    the manifest  ->  compared with what is wanted  ->  each rank reads its boxes, block by block, each verified

Whatever a rank alone does ends in an exchange of outcomes: all go on, or all raise, and the group can be used
afterwards. What is written has the model's names and shapes, whatever the layout.
"""

import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfn import _torch
from shardfn._torch import pytree
from shardfn.checkpoint.commits import METADATA, Commit, in_the_way, owner, remove
from shardfn.checkpoint.hashed_files import HashingWriter, Piece, VerifiedReader, hashed
from shardfn.checkpoint.leaves import (
    EACH,
    SavedLeaf,
    is_first,
    is_leaf,
    name_of,
    of_rank,
    restored,
    to_save,
    values_of,
    wanted_by,
)
from shardfn.checkpoint.manifest import (
    NAME,
    HashedFile,
    Manifest,
    StoredLeaf,
    StoredPart,
    read_manifest,
    require_each_once,
)
from shardfn.checkpoint.tensor_files import Described
from shardfn.comm import agree_on, failing_together
from shardfn.layout import Box, is_in
from shardfn.notation import ShardError, did_you_mean, raise_problems
from shardfn.params import Params, is_tree

STEP = "step-{:08d}"
_LINES = 12  # of what does not fit: a model of another dtype has as many problems as parameters


def save(
    path: str | os.PathLike[str],
    tree: Any,
    mesh: DeviceMesh | None = None,
    *,
    notes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a tree into a new checkpoint directory; it appears under its name when it is whole.

        >>> import tempfile, shardfn as sf
        >>> from torch import nn
        >>> params = sf.shard(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> path = sf.checkpoint.save(tempfile.mkdtemp() + "/step-1", {"params": params})
        >>> restored = sf.checkpoint.load(path, {"params": params})
        >>> sf.gather(restored["params"])["bias"].equal(sf.gather(params)["bias"])
        True

    Args:
        path: the directory to make; the same for every rank, on storage that all see.
        tree: `Params`, and containers of them, of tensors and of numbers; plain ones are the same on all ranks, or in
            `OfFirst(tensor)`, and loaded as plain ones.
        mesh: whose ranks save together; default: that of the first `Params` in the tree.
        notes: what JSON can hold, of the first rank; `notes(path)` reads it again.
        overwrite: whether a checkpoint of that name is replaced: it stays until the new one is whole.

    Returns:
        the path.

    Raises:
        TypeError: a leaf that is neither a tensor nor a number.
        ShardError: the mesh does not cover all ranks; that path is taken; ranks have other trees. On every rank.
        OSError: a rank cannot write, on that rank; on others a `ShardError` that says so. Nothing has changed then.

    Communication: small exchanges over the mesh, and one of where everything was written.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"checkpoint.save: the path is a {type(path).__name__}; write save(path, tree)")
    mesh, target = _mesh_of(tree, mesh), Path(path)
    nonce = f"{require_one_path(mesh, 'checkpoint.save', target):016x}"
    with _together(mesh, "checkpoint.save"):
        leaves = to_save(tree)
        if is_first() and (problem := in_the_way(target, overwrite)):
            raise ShardError(f"checkpoint.save: {problem}")
    if mesh is not None:
        instead = ". Of a tensor that each rank may have of its own, save the first rank's: sf.checkpoint.OfFirst(x)"
        agree_on(mesh, "checkpoint.save", [fact for leaf in leaves for fact in leaf.facts], instead=instead)
    first, commit = is_first(), Commit(target, nonce, *of_first((is_checkpoint(target), owner())))
    try:
        with _together(mesh, "checkpoint.save"):
            if first:
                commit.begin()
        with _together(mesh, "checkpoint.save"):
            written = _write(commit.place, f"{nonce}_{dist.get_rank() if mesh is not None else 0}.distcp", leaves)
        everyone = _gathered(written)
        with _together(mesh, "checkpoint.save"):
            if first:
                commit.finish(*_manifest(nonce, notes or {}, leaves, everyone))
    except Exception:
        if first:
            commit.abandon()
        raise
    return target


# The file of a rank, if it has one, where each box is in it, and the leaves of which each rank has one.
_Written = tuple[str, HashedFile | None, list[tuple[str, Box, Piece]], list[SavedLeaf]]


def _write(directory: Path, name: str, leaves: Sequence[SavedLeaf]) -> _Written:
    """Write what this rank has to: the name of its file, its hashes, and where each box is in it."""
    own = [replace(leaf, parts=[]) for leaf in leaves if leaf.kind == EACH]
    if not any(leaf.parts for leaf in leaves):
        return name, None, [], own
    with closing(HashingWriter(directory / name)) as writer:
        places = [(leaf.names[0], box, writer.add(x)) for leaf in leaves for box, x in leaf.parts]
        return name, writer.finish(), places, own


def _manifest(
    nonce: str, notes: Mapping[str, Any], leaves: Sequence[SavedLeaf], everyone: Sequence[_Written]
) -> tuple[Manifest, bytes]:
    """What all ranks have written, for us and for torch.distributed.checkpoint."""
    leaves = [*(leaf for leaf in leaves if leaf.kind != EACH), *(leaf for *_, own in everyone for leaf in own)]
    parts: dict[str, list[tuple[Box, str, Piece]]] = {leaf.names[0]: [] for leaf in leaves}  # by first names
    for file, _, places, _ in everyone:
        for name, box, piece in places:
            parts[name].append((box, file, piece))
    of_ranks = {
        name: tuple(StoredPart(box, file, piece.at) for box, file, piece in of_leaf) for name, of_leaf in parts.items()
    }
    first_names = {name: leaf for leaf in leaves for name in leaf.names}
    stored = {n: StoredLeaf(x.shape, x.dtype, of_ranks[x.names[0]]) for n, x in first_names.items()}
    for name, leaf in stored.items():
        require_each_once(name, leaf.shape, [part.box for part in leaf.parts])
    boxes = {
        name: [([a for a, _ in box], [n for _, n in box], file, x.start, x.length) for box, file, x in of_leaf]
        for name, of_leaf in parts.items()
    }
    tensors = ((name, (leaf.shape, leaf.dtype, boxes[leaf.names[0]])) for leaf in leaves for name in leaf.names)
    metadata = _torch.checkpoint_metadata(dict(tensors))
    files = {name: file for name, file, *_ in everyone if file is not None}
    files[METADATA] = hashed(metadata)
    return Manifest(nonce, files, stored, dict(notes)), metadata


def load(
    path: str | os.PathLike[str],
    like: Any,
    mesh: DeviceMesh | None = None,
    *,
    whole: Sequence[str] = (),
    missing: Literal["error", "ignore"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    cast: bool = False,
) -> Any:
    """Read a checkpoint into a new tree with the layouts of `like`, which may be on another mesh than it was saved on.

    What is read is compared with the hashes of what was written.

    Args:
        path: a directory made by `save`.
        like: a tree of the same structure; its values are not used or changed. `...` stands for what is not read.
        mesh: as in `save`.
        whole: names at the top of the tree of which everything in the checkpoint must be wanted, also with
            `unexpected="ignore"`.
        missing: whether what the checkpoint does not have is an error, or is as in `like`.
        unexpected: whether what `like` does not have is an error, or is left out.
        cast: whether values of another floating dtype are rounded to that of `like`; otherwise they are an error.

    Returns:
        the tree.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ShardError: naming the leaves that are missing, unexpected or have another shape or dtype, before anything is
            read; a file is damaged, missing, or one too many. On every rank.

    Communication: three small exchanges over the mesh.
    """
    mesh = _mesh_of(like, mesh)
    require_one_path(mesh, "checkpoint.load", path if is_checkpoint(path) else None)
    with _together(mesh, "checkpoint.load"):
        manifest = read_manifest(Path(path))
        wanted = wanted_by(like)
        skipped = [name for name, value in values_of(like).items() if value is ...]
        _require_same(str(path), manifest, wanted, (missing, unexpected, cast), whole, skipped)
    facts = [f"'{name}' {shape} {dtype}" for name, (shape, dtype) in wanted.items() if name != of_rank(_base(name))]
    if mesh is not None:
        agree_on(mesh, "checkpoint.load", [f"the checkpoint of save {manifest.nonce}", *facts])
    with _together(mesh, "checkpoint.load"), closing(VerifiedReader(Path(path), manifest)) as reader:
        restore = partial(restored, manifest, reader)
        return pytree.tree_map_with_path(lambda keys, leaf: restore(name_of(keys), leaf), like, is_leaf=is_leaf)


def notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint was saved with besides its tree."""
    return dict(read_manifest(Path(path)).notes)


def verify(path: str | os.PathLike[str]) -> None:
    """Compare every byte of a checkpoint with the hashes of what was written.

        >>> import tempfile, shardfn as sf
        >>> path = sf.checkpoint.save(tempfile.mkdtemp() + "/step-1", {"x": torch.ones(3)})
        >>> sf.checkpoint.verify(path)

    Raises:
        FileNotFoundError: there is no checkpoint.
        ShardError: a file is damaged, missing, or one too many.
    """
    manifest = read_manifest(Path(path))
    with closing(VerifiedReader(Path(path), manifest)) as reader:
        reader.verify()


def saved_by(path: str | os.PathLike[str], name: str) -> int:
    """By how many ranks a leaf was saved of which each has one."""
    return sum(_base(stored) == name for stored in read_manifest(Path(path)).leaves)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether there is one that was finished."""
    return (Path(path) / NAME).is_file()


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest finished checkpoint `step-N` in a directory, or None."""
    return next(iter(steps(directory)), None)


def steps(directory: str | os.PathLike[str]) -> list[Path]:
    """The finished checkpoints `step-N` in a directory, the newest first."""
    found = [p for p in Path(directory).glob("step-*") if is_checkpoint(p) and p.name[5:].isdecimal()]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def _require_same(
    path: str,
    manifest: Manifest,
    wanted: Mapping[str, Described],
    how: tuple[str, str, bool],
    whole: Sequence[str],
    skipped: Sequence[str],
) -> None:
    """What is wanted is there with its shape and dtype, and nothing else is, as far as that is asked for."""
    missing, unexpected, cast = how
    problems: list[str] = []
    for name, (shape, dtype) in wanted.items():
        have = manifest.leaves.get(name)
        if have is None and missing == "error":
            hint = did_you_mean(name, manifest.leaves.keys() - wanted.keys()) if not problems else ""
            problems.append(f"'{name}' is not in it{hint}")
        elif have and not (have.shape == shape and (have.dtype == dtype or (cast and _rounds(have, dtype)))):
            problems.append(f"'{name}' is {have.shape} {have.dtype}, wanted {shape} {dtype}")
    each = {_base(name) for name in wanted if name == of_rank(_base(name))}  # of which each rank has one
    ranks = Counter(map(_base, manifest.leaves))
    here = dist.get_world_size() if dist.is_initialized() else 1
    problems += [f"'{x}' of each rank is of {ranks[x]} ranks, and {here} are here" for x in each if ranks[x] != here]
    for name in sorted(x for x in manifest.leaves if x not in wanted and _base(x) not in each):
        left_out = any(is_in(name, part) or name == part for part in skipped)
        if name.split(".")[0] in whole or (unexpected == "error" and not left_out):
            problems.append(f"'{name}' is in it and was not asked for")
    raise_problems(f"checkpoint.load: '{path}' does not fit", problems, _LINES)


def _base(name: str) -> str:
    """Without the number of a rank."""
    return name.rpartition("@")[0]


def _rounds(stored: StoredLeaf, dtype: torch.dtype) -> bool:
    return stored.dtype.is_floating_point and dtype.is_floating_point


def _mesh_of(tree: Any, mesh: DeviceMesh | None) -> DeviceMesh | None:
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


def _together(mesh: DeviceMesh | None, verb: str) -> AbstractContextManager[None]:
    return nullcontext() if mesh is None else failing_together(mesh, verb)


def prune(directory: str | os.PathLike[str], keep: int, every: int | None = None) -> None:
    """The first rank takes away all but the newest `keep` checkpoints `step-N`, and those of multiples of `every`."""
    for path in steps(directory)[keep:] if is_first() else ():
        if every is None or int(path.name[5:]) % every:
            remove(path)


def of_first(value: Any) -> Any:
    """What the first rank has: of what ranks may see in another way, such as the names in a directory."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def _gathered(value: Any) -> list[Any]:
    """What every rank has, on the first one."""
    if not dist.is_initialized():
        return [value]
    everyone = [None] * dist.get_world_size() if is_first() else None
    dist.gather_object(value, everyone)
    return everyone or []


def require_one_path(mesh: DeviceMesh | None, verb: str, path: object) -> int:
    """Ranks that write to, or read from, different places would mix checkpoints; returns a number that all share.

    Raises:
        ShardError: on every rank.
    """
    number, none = secrets.randbits(62), " (None: no checkpoint there)" * verb.endswith("load")
    instead = f"{none}; give all ranks one directory that all see, not tempfile.mkdtemp() of each"
    return number if mesh is None else agree_on(mesh, verb, [f"'{path}'"], number, instead)
