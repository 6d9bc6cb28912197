"""Where a checkpoint is: files by name, of which the manifest is the last that is written.

a path                  a directory that all ranks see
LocalDirectory(path)    one of each rank, which somebody puts together later, as Ray Train does
any `Storage`           an object store: no renaming, no fsync, listings that may be late
"""

import errno
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from shardfn.checkpoint.block_writer import DiskFile, pread, sync
from shardfn.notation import ShardError

NEW = ".new-"  # how a small file is called in the making, with its owner


@runtime_checkable
class Storage(Protocol):
    """What `save` and `load` ask of a place that is not a path: one checkpoint, its files by their names.

    Several processes use it at once, each its own object. Whatever fails raises an `OSError`, and what is not there a
    `FileNotFoundError`.
    """

    def create(self, name: str) -> AbstractContextManager[Any]:
        """A new file, in a `with`: `write` takes bytes, and at the end of the `with` it is stored."""
        ...

    def put(self, name: str, data: bytes, check: Callable[[], None] | None = None) -> None:
        """A small file, which may replace one: who reads it finds all of the old or all of the new one.

        `check` is called right before, and may raise.
        """
        ...

    def read(self, name: str, data: memoryview, at: int) -> None:
        """Fill `data` with what a file has from `at` on."""
        ...

    def size(self, name: str) -> int:
        """How many bytes a file has."""
        ...

    def names(self) -> Iterable[str]:
        """The files that there are; late news do no harm."""
        ...

    def remove(self, name: str) -> None:
        """Take a file away."""
        ...


class LocalDirectory:
    """A directory of this rank alone: all of them together, put into one, are the checkpoint.

    Ray Train does that with the directories that its workers report. As long as it is not done there is no checkpoint,
    or an error that says which file is missing.

        >>> import tempfile, torch, shardfn as sf
        >>> mine = sf.checkpoint.LocalDirectory(tempfile.mkdtemp())
        >>> sf.checkpoint.save(mine, {"x": torch.ones(2)})
        '...'
        >>> sf.checkpoint.load(mine, {"x": torch.empty(2)})
        {'x': tensor([1., 1.])}

    Args:
        path: the directory; it is made if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path).absolute()  # which stays, wherever the process goes

    def __repr__(self) -> str:
        return f"'{self.path}'"

    def __fspath__(self) -> str:
        return str(self.path)

    def create(self, name: str) -> DiskFile:
        """A new file."""
        return DiskFile(str(self.path / name))

    def put(self, name: str, data: bytes, check: Callable[[], None] | None = None) -> None:
        """A small file, by a temporary name."""
        written = self.path / f"{NEW}{name}-{owner()}"
        written.unlink(missing_ok=True)
        try:
            with self.create(written.name) as file:
                file.write(data)
            sync(self.path)
            if check is not None:
                check()
            written.replace(self.path / name)
        except Exception:
            written.unlink(missing_ok=True)
            raise
        with suppress(FileNotFoundError):  # all of it may have been taken away by now
            sync(self.path)

    def read(self, name: str, data: memoryview, at: int) -> None:
        """Fill `data`."""
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if not pread(descriptor, data, at):
                raise ShardError(f"'{self.path / name}' has become shorter")
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int:
        """How many bytes a file has; what a link points at is none."""
        found = (self.path / name).lstat()
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(f"'{self.path / name}' is no file")
        return found.st_size

    def names(self) -> list[str]:
        """The files that there are."""
        return os.listdir(self.path) if self.path.is_dir() else []

    def remove(self, name: str) -> None:
        """Take a file away."""
        (self.path / name).unlink()


AnyPlace = str | os.PathLike[str] | Storage  # what stands for a checkpoint


def storage_of(place: AnyPlace) -> Storage:
    """What reads and writes there.

    Raises:
        TypeError: it is neither a path nor a storage.
    """
    if isinstance(place, Storage):
        return place
    if not isinstance(place, str | os.PathLike):
        raise TypeError(f"checkpoint: a {type(place).__name__} is no path and no sf.checkpoint.Storage")
    return LocalDirectory(place)


def size_of(storage: Storage, name: str) -> int | None:
    """How many bytes a file has; None if it is not there."""
    try:
        return storage.size(name)
    except (FileNotFoundError, NotADirectoryError):
        return None


def has(storage: Storage, name: str) -> bool:
    """Whether a file is there."""
    return size_of(storage, name) is not None


def file_of(storage: Storage, name: str) -> str:
    """How errors call a file."""
    return f"'{storage.path / name}'" if isinstance(storage, LocalDirectory) else f"'{name}' in {storage}"


def with_space(error: OSError, storage: Storage) -> OSError:
    """The same error, with how much space is left there."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not isinstance(storage, LocalDirectory):
        return error
    free = shutil.disk_usage(next(path for path in (storage.path, *storage.path.parents) if path.exists())).free
    return OSError(error.errno, f"{error.strerror} ({free} bytes are free)", error.filename or str(storage.path))


def owner() -> str:
    """This process, as no other one is called."""
    return f"{_host()}.{os.getpid()}.{started(os.getpid())}"


def _host() -> str:
    """This one; containers of one host may share its name, but not the numbers of processes."""
    processes = ""
    with suppress(OSError):
        processes = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {processes}".encode()).hexdigest()[:8]


def started(pid: int) -> str | None:
    """When a process began, as the system counts; None if there is none, or if the system does not say."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return None


def is_dead(owner: str) -> bool:
    """Whether that process was on this host, and is no more."""
    host, pid, began = owner.split(".") if owner.count(".") == 2 else ("", "", "")
    return host == _host() and str(started(int(pid))) != began
