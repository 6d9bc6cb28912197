"""What is in checkpoints: trees loaded on any mesh, notes, and which there are in a directory.

load    the manifest  ->  compared with what is wanted  ->  each rank reads its boxes, block by block, each verified
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
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
from shardfn.checkpoint.leaves import Wanted, is_first, is_leaf, name_of, of_rank, restored, top_of, wanted_by
from shardfn.checkpoint.manifest import Manifest, StoredLeaf, is_checkpoint, read_manifest
from shardfn.checkpoint.saves import mesh_of, require_one_path, settle, together
from shardfn.checkpoint.storages import AnyPlace, storage_of
from shardfn.comm import agree_on
from shardfn.layout import is_in
from shardfn.notation import did_you_mean, raise_problems

STEP = "step-{:08d}"
_INSTEAD = "sf.checkpoint.load takes `...` for what is not read, unexpected=, missing='ignore', and cast=True to round"
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
        wanted = _wanted(str(path), manifest, like, (missing, unexpected, cast), whole)
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
    """The finished checkpoints `step-N` in a directory, the newest first; of one number, what a `Trainer` calls it."""
    found = list[Path]()
    with suppress(FileNotFoundError, NotADirectoryError):  # one that cannot be read is an error
        found += [p for p in Path(directory).iterdir() if re.fullmatch(r"step-\d+", p.name) and is_checkpoint(p)]
    return sorted(found, key=lambda p: (step_of(p), p.name == STEP.format(step_of(p)), p.name), reverse=True)


def step_of(path: Path) -> int:
    """The number of a checkpoint `step-N`."""
    return int(path.name[5:])


def _wanted(path: str, manifest: Manifest, like: Any, how: tuple[str, str, bool], whole: Sequence[str]) -> Wanted:
    """What is to be read: it is there with its shape and dtype, and nothing else is, as far as that is asked for."""
    wanted = wanted_by(like)
    missing, unexpected, cast = how
    problems, ignored = list[str](), list[str]()
    said = {"error": problems, "ignore": ignored}
    if odd := {missing, unexpected} - said.keys():
        raise ValueError(f"checkpoint.load: missing= and unexpected= are 'error' or 'ignore', not {min(odd)!r}")
    ranks = Counter(map(_base, manifest.leaves))
    here = dist.get_world_size() if dist.is_initialized() else 1
    lacking = [name for name in wanted.leaves if name not in manifest.leaves and _base(name) not in wanted.each]
    lacking += sorted(name for name in wanted.each if not ranks[name])
    for name, (shape, dtype) in wanted.leaves.items():
        have = manifest.leaves.get(name, StoredLeaf(shape, dtype, ()))
        if have.shape != shape or not (have.dtype == dtype or (cast and _rounds(have, dtype))):
            problems.append(f"'{name}' is {have.shape} {have.dtype}, wanted {shape} {dtype}")
    misfits = sorted(name for name in wanted.each if ranks[name] not in (0, here))
    problems += [f"'{name}' of each rank is of {ranks[name]} ranks, and {here} are here" for name in misfits]
    asked = [*wanted.leaves, *wanted.skipped, *wanted.each]
    tops = {*map(top_of, asked), *(like if isinstance(like, Mapping) else ())}
    others, left_out = _not_asked_for(manifest, wanted, unexpected == "error", whole)
    if missing == "ignore" and wanted.leaves and wanted.leaves.keys().isdisjoint(manifest.leaves):
        problems.append("nothing that was asked for is in it")
    hint = did_you_mean(lacking[0], manifest.leaves.keys() - wanted.leaves.keys()) if lacking else ""
    hint += " (~1 is a dot in a key: nest dicts instead)" * any("~1" in name for name in lacking[:1])
    said[missing] += _by_tops(lacking, [*manifest.leaves], "is not in it", hint)
    problems += _by_tops(others, asked, "is in it and was not asked for")
    problems += [f"whole= has '{x}', which is no top of it" for x in whole if x not in map(top_of, manifest.leaves)]
    raise_problems(f"checkpoint.load: '{path}' does not fit", problems, _LINES, _INSTEAD, "checkpoints")
    ignored += _by_tops([x for x in left_out if top_of(x) in tops], asked, "is in it and was not asked for")
    if ignored and is_first():
        warnings.warn(f"checkpoint.load: ignored, of '{path}': {'; '.join(ignored)[:1000]}", stacklevel=3)
    return wanted


def _not_asked_for(
    manifest: Manifest, wanted: Wanted, strict: bool, whole: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The names of what else a checkpoint has: of what is an error, and of what is left out."""
    names = sorted(x for x in manifest.leaves if x not in wanted.leaves and _base(x) not in wanted.each)
    skipped = {x for x in names if any(is_in(x, part) or part in (x, _base(x)) for part in wanted.skipped)}
    wrong = [x for x in names if top_of(x) in whole or (strict and x not in skipped)]
    return wrong, sorted({*names} - skipped - {*wrong})


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
    return name.rpartition("@")[0] if "@" in name else "~"  # which no name is


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
