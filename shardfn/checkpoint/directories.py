"""What is in checkpoints: trees loaded on any mesh, notes, and which there are in a directory.

load    the manifest  ->  compared with what is wanted  ->  each rank reads its boxes, block by block, each verified
"""

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfn._torch import pytree
from shardfn.checkpoint.commits import remove
from shardfn.checkpoint.hashed_files import VerifiedReader
from shardfn.checkpoint.leaves import Wanted, is_leaf, name_of, of_rank, restored, top_of, wanted_by
from shardfn.checkpoint.manifest import Manifest, StoredLeaf, is_checkpoint, read_manifest
from shardfn.checkpoint.saves import mesh_of, require_one_path, settle, together
from shardfn.checkpoint.storages import AnyPlace, storage_of
from shardfn.comm import agree_on
from shardfn.layout import is_in
from shardfn.notation import did_you_mean, raise_problems

STEP = "step-{:08d}"
_INSTEAD = "Write `...` for what is not to be read; or unexpected='ignore', missing='ignore', cast=True for rounding"
_LINES = 12  # of what does not fit: a model of another dtype has as many problems as parameters


def load(
    path: AnyPlace,
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
        path: a directory made by `save`; or the `Storage`, or a `LocalDirectory` in which each rank has all of it.
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
    mesh, storage = mesh_of(like, mesh), storage_of(path)
    settle(mesh)
    with together(mesh, "checkpoint.load"):
        there = path if is_checkpoint(path) else None
    require_one_path(mesh, "checkpoint.load", there)
    with together(mesh, "checkpoint.load"):
        manifest = read_manifest(storage)
        wanted = wanted_by(like)
        _require_same(str(path), manifest, wanted, (missing, unexpected, cast), whole)
    own = {of_rank(name) for name in wanted.each}
    facts = [f"'{name}' {shape} {dtype}" for name, (shape, dtype) in wanted.leaves.items() if name not in own]
    if mesh is not None:
        agree_on(mesh, "checkpoint.load", [f"the checkpoint of save {manifest.nonce}", *facts])
    with together(mesh, "checkpoint.load"), closing(VerifiedReader(storage, manifest)) as reader:
        restore = partial(restored, manifest, reader)
        return pytree.tree_map_with_path(lambda keys, leaf: restore(name_of(keys), leaf), like, is_leaf=is_leaf)


def notes(path: AnyPlace) -> dict[str, Any]:
    """What a checkpoint was saved with besides its tree."""
    return dict(read_manifest(storage_of(path)).notes)


def verify(path: AnyPlace) -> None:
    """Compare every byte of a checkpoint with the hashes of what was written.

        >>> import tempfile, shardfn as sf
        >>> path = sf.checkpoint.save(tempfile.mkdtemp() + "/step-1", {"x": torch.ones(3)})
        >>> sf.checkpoint.verify(path)

    Raises:
        FileNotFoundError: there is no checkpoint.
        ShardError: a file is damaged, missing, or one too many.
    """
    storage = storage_of(path)
    with closing(VerifiedReader(storage, read_manifest(storage))) as reader:
        reader.verify()


def described(path: AnyPlace) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], Counter[str]]:
    """Notes, shapes of leaves by names, and by how many ranks one was saved of which each has one of its own."""
    manifest = read_manifest(storage_of(path))
    shapes = {name: leaf.shape for name, leaf in manifest.leaves.items()}
    return dict(manifest.notes), shapes, Counter(map(_base, shapes))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest finished checkpoint `step-N` in a directory, or None."""
    return next(iter(steps(directory)), None)


def steps(directory: str | os.PathLike[str]) -> list[Path]:
    """The finished checkpoints `step-N` in a directory, the newest first."""
    found = [p for p in Path(directory).glob("step-*") if is_checkpoint(p) and p.name[5:].isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The number of a checkpoint `step-N`."""
    return int(path.name[5:])


def _require_same(
    path: str, manifest: Manifest, wanted: Wanted, how: tuple[str, str, bool], whole: Sequence[str]
) -> None:
    """What is wanted is there with its shape and dtype, and nothing else is, as far as that is asked for."""
    missing, unexpected, cast = how
    lacking, others, problems = list[str](), list[str](), list[str]()
    for name, (shape, dtype) in wanted.leaves.items():
        have = manifest.leaves.get(name)
        if have is None and missing == "error" and _base(name) not in wanted.each:
            lacking.append(name)
        elif have and not (have.shape == shape and (have.dtype == dtype or (cast and _rounds(have, dtype)))):
            problems.append(f"'{name}' is {have.shape} {have.dtype}, wanted {shape} {dtype}")
    ranks = Counter(map(_base, manifest.leaves))
    here = dist.get_world_size() if dist.is_initialized() else 1
    lacking += sorted(name for name in wanted.each if not ranks[name] and missing == "error")
    misfits = sorted(name for name in wanted.each if ranks[name] not in (0, here))
    problems += [f"'{name}' of each rank is of {ranks[name]} ranks, and {here} are here" for name in misfits]
    for name in sorted(x for x in manifest.leaves if x not in wanted.leaves and _base(x) not in wanted.each):
        left_out = any(is_in(name, part) or name == part for part in wanted.skipped)
        if top_of(name) in whole or (unexpected == "error" and not left_out):
            others.append(name)
    if missing == "ignore" and wanted.leaves and wanted.leaves.keys().isdisjoint(manifest.leaves):
        problems.append("nothing that was asked for is in it")
    hint = did_you_mean(lacking[0], manifest.leaves.keys() - wanted.leaves.keys()) if lacking else ""
    problems += _by_tops(lacking, [*manifest.leaves], "is not in it", hint)
    problems += _by_tops(others, [*wanted.leaves, *wanted.skipped, *wanted.each], "is in it and was not asked for")
    raise_problems(f"checkpoint.load: '{path}' does not fit", problems, _LINES, _INSTEAD)


def _by_tops(names: Sequence[str], others: Sequence[str], what: str, hint: str = "") -> Iterator[str]:
    """What is said of some names, once of those of a top that none of `others` has, and a hint of the first one."""
    tops = set(map(top_of, others))
    for top, group in groupby(names, top_of):
        alike = [*group]
        more = f" (and {len(alike) - 1} more of '{top}')" if top not in tops and len(alike) > 1 else ""
        yield f"'{alike[0]}' {what}{hint}{more}"
        yield from (f"'{name}' {what}" for name in alike[1:] if not more)
        hint = ""


def _base(name: str) -> str:
    """Without the number of a rank."""
    return name.rpartition("@")[0]


def _rounds(stored: StoredLeaf, dtype: torch.dtype) -> bool:
    return stored.dtype.is_floating_point and dtype.is_floating_point


def prune(directory: str | os.PathLike[str], last: int, keep: int | None, every: int | None = None) -> None:
    """Of the checkpoints `step-N` up to step `last`, take away all but the newest `keep` and multiples of `every`."""
    try:
        older = [path for path in steps(directory) if step_of(path) <= last]
        for path in older[keep:] if keep is not None else ():
            if every is None or step_of(path) % every:
                remove(path)
    except OSError as error:
        warnings.warn(f"checkpoint: an old one stays, which cannot be taken away: {error}", stacklevel=2)
