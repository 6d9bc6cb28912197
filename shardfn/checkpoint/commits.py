"""How a checkpoint comes into being on a file system that all ranks see: its manifest is the last that is written.

A new one is written beside its place and renamed. One that replaces another is written into the same directory, to
files of its own, until its manifest takes the place of the old one. Whatever ends a save, before that there is no
checkpoint, or still the old one. What a dead one has left goes with the next save of a process on the same host; nobody
takes away what another process still writes.

    step-1/                               manifest.json    <nonce>_<rank>.distcp    .metadata
    .writing-step-1-<nonce>-<owner>/      the same, in the making
    step-1/.writing-<old>-<nonce>-<owner> an empty file: a save replaces the one whose nonce is <old>

The owner is a process, by its host, its number and when it began.
"""

import errno
import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardfn.checkpoint.manifest import NAME, Manifest, read_manifest
from shardfn.notation import ShardError

METADATA = ".metadata"  # for torch.distributed.checkpoint; never read here
_WRITING, _REMOVING = ".writing-", ".removing-"


class Commit:
    """A save that is under way; the first rank calls its methods, and all write to its `place`."""

    def __init__(self, target: Path, nonce: str, replaces: bool, owner: str) -> None:
        self._target, self._nonce, self._replaces, self._owner = target, nonce, replaces, owner
        self._undone, self._old = True, ""  # and the nonce of what is replaced
        self.place = target if replaces else target.parent / f"{_WRITING}{target.name}-{nonce}-{owner}"

    def begin(self) -> None:
        """Make the directory that all ranks write to."""
        self._target.parent.mkdir(parents=True, exist_ok=True)
        _collect(self._target.parent)
        if self._replaces:
            _collect_in(self._target)
            self._old = read_manifest(self._target).nonce
            self._marker.touch(exist_ok=False)
        else:
            self.place.mkdir()

    def finish(self, manifest: Manifest, metadata: bytes) -> None:
        """Make it a checkpoint."""
        if not self._replaces:
            _write(self.place / METADATA, metadata)
            _write(self.place / NAME, manifest.text().encode())
            _sync(self.place)
            try:
                self.place.rename(self._target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                raise ShardError(f"checkpoint.save: another save has made '{self._target}' meanwhile") from error
            _sync(self._target.parent)
            return
        written = self.place / f"{self._nonce}.json"
        _write(self.place / f"{self._nonce}{METADATA}", metadata)
        _write(written, manifest.text().encode())
        _sync(self.place)
        if read_manifest(self.place).nonce != self._old:
            raise ShardError(f"checkpoint.save: another save has replaced '{self._target}' meanwhile")
        written.replace(self.place / NAME)
        self._undone = False
        _sync(self.place)
        _settle(self.place, self._nonce, {self._old})
        self._marker.unlink()
        _sync(self.place)

    def abandon(self) -> None:
        """Take away what was written, unless it is the checkpoint by now."""
        if not self._replaces:
            shutil.rmtree(self.place, ignore_errors=True)
        elif self._undone:
            _remove(self.place, self._nonce)
            self._marker.unlink(missing_ok=True)

    @property
    def _marker(self) -> Path:
        return self.place / f"{_WRITING}{self._old}-{self._nonce}-{self._owner}"


def in_the_way(target: Path, overwrite: bool) -> str:
    """What keeps a checkpoint from being written to a path; nothing if it is empty."""
    above = next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir():
        return f"'{above}' is a file; give a path below a directory"
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return ""
    if not (target / NAME).is_file():
        return f"'{target}' is no checkpoint, and would be replaced; give a new name, such as '{target / 'step-1'}'"
    return "" if overwrite else f"'{target}' is there already; give another name, or write overwrite=True"


def strangers(directory: Path, manifest: Manifest) -> list[str]:
    """The files in a checkpoint that are not of it, nor of a save that wanted to replace it or was replaced."""
    known = {*manifest.files, NAME, METADATA}
    others = [nonce for old, new, _ in _markers(directory) for nonce in (old, new)]
    names = (path.name for path in directory.iterdir() if not path.name.startswith(_WRITING))
    return sorted(name for name in names if name not in known and not name.startswith(tuple(others)))


def is_being_replaced(directory: Path) -> bool:
    """Whether a save has begun to replace what is in a directory; it, or its end, may lack the file for torch."""
    return any(_markers(directory))


def _markers(directory: Path) -> Iterator[tuple[str, str, Path]]:
    """Of each save that has begun to replace what is in a directory: the nonce of that, and its own; the marker."""
    for path in directory.glob(f"{_WRITING}*"):
        old, new, _ = path.name.removeprefix(_WRITING).split("-")
        yield old, new, path


def owner() -> str:
    """This process, as no other one is called."""
    return f"{_host()}.{os.getpid()}.{started(os.getpid())}"


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def started(pid: int) -> str | None:
    """When a process began, as the system counts; None if there is none, or if the system does not say."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return None


def _is_dead(path: Path) -> bool:
    """Whether the process whose name a path ends in was on this host, and is no more."""
    host, pid, began = path.name.rpartition("-")[2].split(".")
    return host == _host() and str(started(int(pid))) != began


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
        if _is_dead(place):
            shutil.rmtree(place, ignore_errors=True)


def _collect_in(directory: Path) -> None:
    """Take away what dead saves have left that wanted to replace a checkpoint, or have; bring the last to its end."""
    nonce = read_manifest(directory).nonce
    for old, new, marker in _markers(directory):
        if _is_dead(marker):
            _settle(directory, nonce, {old, new} - {nonce})
            marker.unlink(missing_ok=True)


def _settle(directory: Path, nonce: str, others: set[str]) -> None:
    """What is there is the checkpoint of one save, and nothing of others: also where a save had an error after it."""
    with suppress(FileNotFoundError):
        (directory / f"{nonce}{METADATA}").replace(directory / METADATA)
    for other in others:
        _remove(directory, other)


def _remove(directory: Path, nonce: str) -> None:
    for file in directory.glob(f"{nonce}*"):
        file.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system within says which file it is about, and how much is free: the disk may be full."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(error.errno, f"{error.strerror} ({free} bytes are free)", str(path)) from error


def _write(path: Path, data: bytes) -> None:
    with naming(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
