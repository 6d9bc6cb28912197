"""How a checkpoint comes into being: its manifest is the last that is written.

A new directory is written beside its place and renamed. Where that cannot be done, or a checkpoint is replaced, files
that have the save's nonce in their names are written to the place itself, and a manifest takes the place of the old
one. Whatever ends a save, before that there is no checkpoint, or still the old one. What a dead one has left goes with
the next save of a process on the same host; nobody takes away what another process still writes.

    step-1/                               manifest.json    <nonce>_<rank>.distcp    .metadata
    .writing-step-1-<nonce>-<owner>/      the same, in the making
    step-1/.writing-<old>-<nonce>-<owner> an empty file: a save replaces the one whose nonce is <old>, or none

The owner is a process, by its host, its number and when it began.
"""

import errno
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardfn.checkpoint.block_writer import sync
from shardfn.checkpoint.manifest import NAME, Damaged, Manifest, read_manifest
from shardfn.checkpoint.storages import NEW, LocalDirectory, Storage, has, is_dead, storage_of
from shardfn.notation import ShardError

METADATA = ".metadata"  # for torch.distributed.checkpoint; never read here
_WRITING, _REMOVING, _NONE, _UNREADABLE = ".writing-", ".removing-", "none", "unreadable"
_OF_SAVE = re.compile(r"([0-9a-f]{16})(_\d+\.distcp|\.metadata)")


class RenamedDirectory:
    """A save to a new directory; all ranks write to its `storage`, the first calls its methods."""

    of_each_rank = False

    def __init__(self, target: Path, nonce: str, owner: str) -> None:
        self._target = target
        self.storage = LocalDirectory(target.parent / f"{_WRITING}{target.name}-{nonce}-{owner}")

    def begin(self) -> None:
        """Make the directory that all ranks write to."""
        self._target.parent.mkdir(parents=True, exist_ok=True)
        _collect(self._target.parent)
        self.storage.path.mkdir()

    def finish(self, manifest: Manifest, metadata: bytes) -> None:
        """Make it a checkpoint."""
        self.storage.put(METADATA, metadata)
        self.storage.put(NAME, manifest.text().encode(errors="surrogatepass"))
        try:
            self.storage.path.rename(self._target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise ShardError(f"checkpoint.save: another save has made '{self._target}' meanwhile") from error
        sync(self._target.parent)

    def abandon(self, names: Sequence[str]) -> None:
        """Take away what was written."""
        shutil.rmtree(self.storage.path, ignore_errors=True)


class ReplacedManifest:
    """A save to where a checkpoint may be; the first rank calls its methods, or all if each has a place of its own."""

    def __init__(self, storage: Storage, save: "_Save", of_each_rank: bool = False) -> None:
        self.storage, self._save, self.of_each_rank = storage, save, of_each_rank

    def begin(self) -> None:
        """Say what is about to be replaced."""
        if isinstance(self.storage, LocalDirectory) and not self.of_each_rank:
            _collect(self.storage.path.parent)
        for save in [*_saves(self.storage)]:
            if is_dead(save.owner):
                _end_replacement(self.storage, save)
        for name in self.storage.names():
            if name.startswith(NEW) and is_dead(name.rpartition("-")[2]):
                _remove(self.storage, name)
        with self.storage.create(self._save.marker):
            pass

    def has_begun(self) -> bool:
        """Whether the first rank has, where this rank is to write."""
        return self.of_each_rank or has(self.storage, self._save.marker)

    def finish(self, manifest: Manifest, metadata: bytes) -> None:
        """Make it the checkpoint."""
        self.storage.put(f"{self._save.new}{METADATA}", metadata)
        self.storage.put(NAME, manifest.text().encode(errors="surrogatepass"), self._require_same)
        with suppress(OSError):  # it is the checkpoint by now; what is left goes with another save
            _end_replacement(self.storage, self._save)

    def _require_same(self) -> None:
        """What is replaced is what was there; its files may be gone by now, or be another save's."""
        if not has(self.storage, self._save.marker) or nonce_in(self.storage) != self._save.old:
            raise ShardError(f"checkpoint.save: another save, or removal, has replaced {self.storage} meanwhile")

    def abandon(self, names: Sequence[str]) -> None:
        """Take away these files, unless they are the checkpoint by now; a listing may be late."""
        with suppress(OSError, ShardError):  # the marker says what the others are, as long as they are there
            if nonce_in(self.storage) != self._save.new:
                for name in (*names, f"{self._save.new}{METADATA}", self._save.marker):
                    _remove(self.storage, name)


Commit = RenamedDirectory | ReplacedManifest


def require_begun(commit: Commit) -> None:
    """The first rank has begun where this rank is to write.

    Raises:
        ShardError: it has not.
    """
    if not (commit.storage.path.is_dir() if isinstance(commit, RenamedDirectory) else commit.has_begun()):
        why = f"this rank sees another {commit.storage} than the first one, which has begun to save there"
        raise ShardError(f"checkpoint.save: {why}; give a directory that all ranks see, or a LocalDirectory")


def name_of_file(nonce: str, rank: int) -> str:
    """What the file of a rank is called."""
    return f"{nonce}_{rank}.distcp"


def commit_to(place: Path | Storage, nonce: str, old: str, owner: str) -> Commit:
    """How a checkpoint comes into being there, where one with the nonce `old` is, or `nonce_in` says that none is."""
    if isinstance(place, Path) and old == _NONE:
        return RenamedDirectory(place, nonce, owner)
    save = _Save(old, nonce, owner, f"{_WRITING}{old}-{nonce}-{owner}")
    return ReplacedManifest(storage_of(place), save, isinstance(place, LocalDirectory))


def in_the_way(target: Path | Storage, overwrite: bool) -> str:
    """What keeps a checkpoint from being written to a place; nothing if it is empty."""
    if isinstance(target, LocalDirectory):
        return f"'{target.path}' has files; give each rank an empty directory" * any(target.names())
    if not isinstance(target, Path):
        there = f"there is a checkpoint in {target} already; give another place, or write overwrite=True"
        return there * (has(target, NAME) and not overwrite)
    above = next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir():
        return f"'{above}' is a file; give a path below a directory"
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        odd = target.is_symlink() or target.resolve() == Path.cwd()
        return f"'{target}' is a link, or where this process is; give the name of a new directory" * odd
    if not (target / NAME).is_file():
        return f"'{target}' is no checkpoint, and would be replaced; give a new name, such as '{target / 'step-1'}'"
    return "" if overwrite else f"'{target}' is there already; give another name, or write overwrite=True"


def strangers(storage: Storage, manifest: Manifest) -> list[str]:
    """The files in a checkpoint that are not of it, nor of a save that wanted to replace it or was replaced."""
    known = {*manifest.files, NAME, METADATA}
    others = (NEW, *(prefix for save in _saves(storage) for prefix in (save.old, save.new, save.marker)))
    names = (name for name in storage.names() if name not in known and not name.startswith(others))
    # A listing of an object store may be late; what a directory has is there, or is no file at all.
    return sorted(name for name in names if isinstance(storage, LocalDirectory) or has(storage, name))


def is_being_replaced(storage: Storage) -> bool:
    """Whether a save has begun to replace what is there; it, or its end, may lack the file for torch."""
    return any(True for _ in _saves(storage))


class _Save(NamedTuple):
    """A save that has begun to replace a checkpoint: the nonce of that, its own, who does it, and its marker."""

    old: str
    new: str
    owner: str
    marker: str


def _saves(storage: Storage) -> Iterator[_Save]:
    for name in storage.names():
        if name.startswith(_WRITING) and name.count("-") == 3:
            old, new, owner = name.removeprefix(_WRITING).split("-")
            yield _Save(old, new, owner, name)


def nonce_in(storage: Storage) -> str:
    """That of the checkpoint which is there, or a word that says that none is, or one that is damaged."""
    try:
        return read_manifest(storage).nonce if has(storage, NAME) else _NONE
    except Damaged:
        return _UNREADABLE


def remove(checkpoint: Path) -> None:
    """Take a checkpoint away: at once it is none any more, whatever comes in between."""
    away = checkpoint.with_name(f"{_REMOVING}{checkpoint.name}")
    checkpoint.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def _collect(directory: Path) -> None:
    """Take away what dead saves of new checkpoints have left, and removals that did not come to their end."""
    for away in directory.glob(f"{_REMOVING}*"):
        shutil.rmtree(away, ignore_errors=True)
    for place in directory.glob(f"{_WRITING}*"):
        if is_dead(place.name.rpartition("-")[2]):
            shutil.rmtree(place, ignore_errors=True)


def _end_replacement(storage: Storage, save: _Save) -> None:
    """Leave nothing of a save that has replaced a checkpoint, or wanted to, but what is there by now.

    Nor of one that ended between its last look at what was there and its manifest. Files are listed before it is read
    which checkpoint is there: those of a later save are not among them.
    """
    names = [*storage.names()]
    others = {nonce for x in _saves(storage) if x.marker != save.marker for nonce in (x.old, x.new)}
    if (nonce := nonce_in(storage)) == _UNREADABLE:
        return
    kept = (others - {save.old}) | {nonce}  # what was replaced may have ended, but for its file for torch
    for name in names:
        if (whose := _OF_SAVE.fullmatch(name)) and whose[1] not in kept:
            _remove(storage, name)
    if save.new == nonce:
        with suppress(FileNotFoundError):
            _move(storage, f"{nonce}{METADATA}", METADATA)
    _remove(storage, save.marker)


def _move(storage: Storage, name: str, to: str) -> None:
    """Give a small file another name."""
    data = bytearray(storage.size(name))
    storage.read(name, memoryview(data), 0)
    storage.put(to, bytes(data))
    storage.remove(name)


def _remove(storage: Storage, name: str) -> None:
    """Take a file away, if it is there."""
    with suppress(FileNotFoundError):
        storage.remove(name)
