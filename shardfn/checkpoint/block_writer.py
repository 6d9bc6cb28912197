"""A file that goes to the disk while it is written, with a hash of each block; also a process that writes such files.

Nothing of torch or of shardfn is imported here, so that the process begins at once and takes no memory. It reads
requests, one line each, `{"path": ..., "size": ...}`, and writes that many bytes of the memory that it shares with the
one that began it; it ends with its input.

    python block_writer.py 5        # the number of the descriptor of the memory
"""

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

BLOCK = 4 * 2**20  # bytes of a file that have a hash
_AT_ONCE = 2**18  # bytes that the system copies before it lets somebody else run: with 4 MiB, steps take half more


class DiskFile:
    """A new file; it is on the disk when its `with` ends well."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._at = self._begun = 0
        self._flusher: Thread | None = None
        self._problem: OSError | None = None

    def write(self, data: Any) -> None:
        """Write bytes to its end; the disk works while more are made."""
        with self._named():
            write_at(self._descriptor, memoryview(data), self._at)
        self._at += len(data)
        if self._at - self._begun >= BLOCK and not (self._flusher and self._flusher.is_alive()):
            self._begun, flusher = self._at, Thread(target=self._flush, daemon=True)
            with suppress(RuntimeError):  # at the end of a process none can begin
                flusher.start()
                self._flusher = flusher

    def _flush(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._problem = error

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors within say which file they are about."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def __enter__(self) -> "DiskFile":
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if self._flusher is not None:
                self._flusher.join()
            if kind is None:
                with self._named():
                    if self._problem is not None:
                        raise self._problem
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class BlockHasher:
    """Passes bytes on, and has the SHA-256 of each block of them."""

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self._write, self._hasher = write, hashlib.sha256()
        self.hashes: list[str] = []
        self.size = 0

    def write(self, data: Any) -> None:
        """More bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: BLOCK - self.size % BLOCK]
            self._write(part)
            self._hasher.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % BLOCK == 0:
                self._end_block()

    def _end_block(self) -> None:
        self.hashes.append(self._hasher.hexdigest())
        self._hasher = hashlib.sha256()

    def finish(self) -> None:
        """No more bytes."""
        if self.size % BLOCK:
            self._end_block()


def write_at(descriptor: int, data: memoryview, at: int) -> None:
    """Write all of it."""
    while len(data):
        done = os.pwrite(descriptor, data[:_AT_ONCE], at)
        data, at = data[done:], at + done


def pread(descriptor: int, data: memoryview, at: int) -> bool:
    """Fill `data`; whether the file has so much."""
    while len(data):
        done = os.preadv(descriptor, [data], at)
        if not done:
            return False
        data, at = data[done:], at + done
    return True


def sync(directory: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _serve(descriptor: int) -> None:
    """Answer requests, one after the other."""
    os.nice(19)  # who trains goes first
    with suppress(OSError):  # Linux weighs sessions against each other, whatever their processes say
        Path("/proc/self/autogroup").write_text("19")
    for line in sys.stdin:
        request = json.loads(line)
        # Closed when nobody has a view of it any more: in Python 3.12 the frames of an error may have one for a while.
        answer = _written(request["path"], memoryview(mmap.mmap(descriptor, request["size"], access=mmap.ACCESS_READ)))
        with suppress(BrokenPipeError):  # nobody is there any more
            os.write(1, json.dumps(answer).encode() + b"\n")


def _written(path: str, data: memoryview) -> dict[str, Any]:
    try:
        with DiskFile(path) as file:
            hasher = BlockHasher(file.write)
            hasher.write(data)
            hasher.finish()
    except OSError as error:
        return {"error": [error.errno, error.strerror, error.filename]}
    return {"size": hasher.size, "sha256": hasher.hashes}


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
