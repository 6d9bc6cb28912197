"""Files of a checkpoint: written with a hash of each block, and read no other way than with these hashes.

Each tensor is written as `torch.save` does, so that torch.distributed.checkpoint can read what is here. Where the bytes
of its numbers are is noted: shardfn reads these alone, and nothing is ever unpickled.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, serialization

from shardfn._torch import bytes_of
from shardfn.checkpoint.block_writer import BLOCK, BlockHasher
from shardfn.checkpoint.commits import METADATA, is_being_replaced, strangers
from shardfn.checkpoint.manifest import EARLIER, Damaged, HashedFile, Manifest, StoredLeaf
from shardfn.checkpoint.storages import Storage, file_of, size_of
from shardfn.checkpoint.tensor_files import Reader, Stored
from shardfn.layout import Box, as_runs, narrowed, overlaps
from shardfn.notation import ShardError

_NUMBERS = b"archive/data/0"  # how torch.save calls the part of its file in which the numbers of a tensor are
_KEPT_BLOCKS = 4  # of a reader, beside each other


class Piece(NamedTuple):
    """Where a tensor is in a file: from `start` on as `torch.save` writes it, in `length` bytes; its numbers `at`."""

    start: int
    length: int
    at: int


class Sink(Protocol):
    """What the bytes of a file go to."""

    def write(self, data: bytes | memoryview) -> None:
        """Bytes that are in memory."""
        ...

    def write_numbers(self, x: Tensor) -> None:
        """Those of a tensor, row after row."""
        ...


class TensorPieces:
    """Tensors one after the other, each as `torch.save` writes it."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._size = sink, 0

    def add(self, x: Tensor) -> Piece:
        """Write a tensor of this rank."""
        before, after = _frame(tuple(x.shape), x.dtype)
        self._sink.write(before)
        self._sink.write_numbers(x.detach())
        self._sink.write(after)
        piece = Piece(self._size, len(before) + x.nbytes + len(after), self._size + len(before))
        self._size += piece.length
        return piece


@cache
def _frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after the numbers of a tensor."""
    parts = 1 if 0 in shape else 2
    file: Any = _Frame(parts)
    crc = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), file)
    finally:
        serialization.set_crc32_options(crc)
    if len(file.parts) != parts:
        raise RuntimeError("torch.save writes files in another way than this version of shardfn knows")
    before, after = [*file.parts, []][:2]
    return b"".join(before), b"".join(after)


class _Frame:
    """A file that keeps all but the numbers, which nobody reads: what is written after their name and some space."""

    def __init__(self, count: int) -> None:
        self._count, self.parts = count, list[list[bytes]]([[]])
        self._names: list[bytes] = []  # what has been written last, if it may be a name

    def write(self, data: bytes | memoryview) -> int:
        """What torch.save calls."""
        view = memoryview(data).cast("B")
        if self._names[:1] == [_NUMBERS] and len(self.parts) < self._count:
            self.parts.append([])
        else:
            self.parts[-1].append(view.tobytes())
        self._names = [*self._names[-1:], view.tobytes() if len(view) == len(_NUMBERS) else b""]
        return len(view)

    def flush(self) -> None:
        """Nothing waits."""


class HashingSink(BlockHasher):
    """Passes what it gets on to a file."""

    def write_numbers(self, x: Tensor) -> None:
        """Those of a tensor, row after row."""
        self.write(bytes_of(x.cpu()).numpy())

    def hashed(self) -> HashedFile:
        """What the file has."""
        self.finish()
        return HashedFile(self.size, tuple(self.hashes))


def write_hashed(storage: Storage, name: str, put: Callable[[Sink], object]) -> HashedFile:
    """A new file of what is put into a sink."""
    with storage.create(name) as file:
        sink = HashingSink(file.write)
        put(sink)
        return sink.hashed()


def hashed(data: bytes) -> HashedFile:
    """What a file with these bytes is to have."""
    starts = range(0, len(data), BLOCK)
    return HashedFile(len(data), tuple(hashlib.sha256(data[at : at + BLOCK]).hexdigest() for at in starts))


def hash_of(x: Tensor) -> str:
    """The SHA-256 of the numbers of a tensor."""
    return hashlib.sha256(bytes_of(x.cpu()).numpy().data).hexdigest()


class VerifiedReader(Reader):
    """Reads parts of the leaves of a checkpoint; of a block with another hash nothing is read."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        """Raises:
        Damaged: a file is missing, has another size, or is one too many.
        """
        super().__init__()
        self._storage, self._files = storage, manifest.files
        if others := strangers(storage, manifest):
            raise ShardError(f"checkpoint: {file_of(storage, others[0])} is no part of it; take it away")
        self._blocks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        for name, file in manifest.files.items():
            if (size := size_of(storage, name)) != file.nbytes and name != METADATA:
                found = "is missing" if size is None else f"has {size} bytes"
                raise Damaged(f"checkpoint: {file_of(storage, name)} {found}; {file.nbytes} were written{EARLIER}")

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
            self._storage.read(name, view, number * BLOCK)
        except (ShardError, OSError) as error:
            raise Damaged(f"checkpoint: {error}{EARLIER}") from error
        if hashlib.sha256(view).hexdigest() != file.hashes[number]:
            where = f"{file_of(self._storage, name)} is damaged: bytes {number * BLOCK} to {number * BLOCK + len(view)}"
            raise Damaged(f"checkpoint: {where} are not what was written{EARLIER}")
        self._blocks[key] = view
        return view

    def verify(self) -> None:
        """Read every block.

        Raises:
            Damaged: one is damaged.
        """
        replaced = is_being_replaced(self._storage)
        for name, file in self._files.items():
            for number in range(0 if name == METADATA and replaced else len(file.hashes)):
                self._block(name, number)
