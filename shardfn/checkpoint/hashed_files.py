"""Files of a checkpoint: written with a hash of each block, and read no other way than with these hashes.

Each tensor is written as `torch.save` does, so that torch.distributed.checkpoint can read what is here. Where the bytes
of its numbers are is noted: shardfn reads these alone, and nothing is ever unpickled.
"""

import hashlib
import os
import shutil
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, serialization

from shardfn.checkpoint.commits import METADATA, is_being_replaced, strangers
from shardfn.checkpoint.manifest import BLOCK, Damaged, HashedFile, Manifest, StoredLeaf
from shardfn.checkpoint.tensor_files import Reader, Stored, write_at
from shardfn.layout import Box, as_runs, narrowed, overlaps
from shardfn.notation import ShardError

_NUMBERS = b"archive/data/0"  # how torch.save calls the part of its file in which the numbers of a tensor are
_KEPT_BLOCKS = 4  # of a reader, beside each other


class Piece(NamedTuple):
    """Where a tensor is in a file: from `start` on as `torch.save` writes it, in `length` bytes; its numbers `at`."""

    start: int
    length: int
    at: int


class HashingWriter:
    """A file in the making."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hasher, self._hashes, self._size = hashlib.sha256(), list[str](), 0
        self._flusher, self._flushed = ThreadPoolExecutor(1), Future[None]()  # the disk works while hashes are made
        self._flushed.set_result(None)
        self._names: list[bytes] = []  # what has been written last, if it may be the name of a part
        self._at: int | None = None

    def add(self, x: Tensor) -> Piece:
        """Write a tensor of this rank."""
        numbers = _bytes(x)
        start, self._at = self._size, self._size if not len(numbers) else None
        sink: Any = self
        crc = serialization.get_crc32_options()
        serialization.set_crc32_options(False)  # a weaker hash beside ours
        try:
            own = torch.from_numpy(numbers).view(x.dtype).view(x.shape) if len(numbers) else torch.empty_like(x.cpu())
            torch.save(own, sink)  # whose storage is no larger
        finally:
            serialization.set_crc32_options(crc)
        if self._at is None:
            raise RuntimeError("torch.save writes files in another way than this version of shardfn knows")
        return Piece(start, self._size - start, self._at)

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes to its end."""
        view = memoryview(data).cast("B")
        if self._names[:1] == [_NUMBERS]:
            self._at = self._size
        self._names = [*self._names[-1:], view.tobytes() if len(view) == len(_NUMBERS) else b""]
        try:
            write_at(self._descriptor, view, self._size)
        except OSError as error:
            free = shutil.disk_usage(self._path.parent).free
            raise OSError(error.errno, f"{error.strerror} ({free} bytes are free)", str(self._path)) from error
        while len(view):
            part = view[: BLOCK - self._size % BLOCK]
            self._hasher.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size % BLOCK == 0:
                self._end_block()
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""

    def _end_block(self) -> None:
        self._hashes.append(self._hasher.hexdigest())
        self._hasher = hashlib.sha256()
        if self._flushed.done():
            self._flushed = self._flusher.submit(os.fdatasync, self._descriptor)

    def finish(self) -> HashedFile:
        """Have it on the disk."""
        if self._size % BLOCK:
            self._end_block()
        self._flushed.result()
        os.fsync(self._descriptor)
        return HashedFile(self._size, tuple(self._hashes))

    def close(self) -> None:
        """Close it."""
        self._flusher.shutdown()
        os.close(self._descriptor)


def hashed(data: bytes) -> HashedFile:
    """What a file with these bytes is to have."""
    starts = range(0, len(data), BLOCK)
    return HashedFile(len(data), tuple(hashlib.sha256(data[at : at + BLOCK]).hexdigest() for at in starts))


def hash_of(x: Tensor) -> str:
    """The SHA-256 of the numbers of a tensor."""
    return hashlib.sha256(_bytes(x)).hexdigest()


def _bytes(x: Tensor) -> Any:
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()


class VerifiedReader(Reader):
    """Reads parts of the leaves of a checkpoint; of a block with another hash nothing is read."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Raises:
        Damaged: a file is missing, has another size, or is one too many.
        """
        super().__init__()
        self._directory, self._files = directory, manifest.files
        if others := strangers(directory, manifest):
            raise Damaged(f"checkpoint: '{directory / others[0]}' is no part of it; take it away")
        self._blocks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        for name, file in manifest.files.items():
            path = directory / name
            size = path.lstat().st_size if path.is_file() and not path.is_symlink() else None
            if size != file.nbytes and name != METADATA:
                found = "is missing" if size is None else f"has {size} bytes"
                raise Damaged(f"checkpoint: '{path}' {found}; {file.nbytes} were written")

    def read_leaf(self, leaf: StoredLeaf, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of a leaf, from all parts that have some of it.

        Raises:
            Damaged: a block is damaged.
        """
        for part in leaf.parts:
            for _, here, there in overlaps(as_runs(box), as_runs(part.box)):
                stored = Stored(Path(part.file), tuple(n for _, n in part.box), leaf.dtype, part.at)
                self.read_from(stored, there, narrowed(out, here))

    def _pread(self, file: Path, data: memoryview, at: int) -> None:
        while len(data):
            number, start = divmod(at, BLOCK)
            part = self._block(file.name, number)[start : start + len(data)]
            data[: len(part)] = part
            data, at = data[len(part) :], at + len(part)

    def _block(self, name: str, number: int) -> memoryview:
        """A block of a file, once it is known to be what was written."""
        key = name, number
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        old = self._blocks.popitem(last=False)[1].obj if len(self._blocks) == _KEPT_BLOCKS else bytearray(BLOCK)
        file = self._files[name]
        view = memoryview(old)[: min(BLOCK, file.nbytes - number * BLOCK)]
        try:
            super()._pread(self._directory / name, view, number * BLOCK)
        except (ShardError, OSError) as error:
            raise Damaged(f"checkpoint: {error}") from error
        if hashlib.sha256(view).hexdigest() != file.hashes[number]:
            where = f"bytes {number * BLOCK} to {number * BLOCK + len(view)}"
            raise Damaged(f"checkpoint: '{self._directory / name}' is damaged: {where} are not what was written")
        self._blocks[key] = view
        return view

    def verify(self) -> None:
        """Read every block.

        Raises:
            Damaged: one is damaged.
        """
        replaced = is_being_replaced(self._directory)
        for name, file in self._files.items():
            for number in range(0 if name == METADATA and replaced else len(file.hashes)):
                self._block(name, number)
