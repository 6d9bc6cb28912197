"""Files in the safetensors format: parts of their tensors read and written, a few megabytes at a time.

The library checks files that are read. Bytes are moved here: its reader (0.8) takes the whole tensor when a part is
asked for, or maps the file, whose pages then count as memory, and its writer wants all tensors of a file at once.

A file is eight bytes with the length of a header, the header (JSON), then the tensors. A directory has
`model.safetensors`, or several files and `model.safetensors.index.json`, which says in which of them a tensor is.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import bytes_of
from shardfn.checkpoint.block_writer import pread, sync, write_at
from shardfn.checkpoint.storages import NEW, LocalDirectory
from shardfn.layout import Box, blocks, narrowed
from shardfn.notation import ShardError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK_BYTES = 4 * 2**20
_PAGE = 4096
_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")  # one of a directory
# Names of dtypes in files, and in torch. The order in which a file has tensors: last dtype first, then by name.
_PAIRS = (
    "BOOL=bool U8=uint8 I8=int8 F8_E5M2=float8_e5m2 F8_E4M3=float8_e4m3fn I16=int16 U16=uint16 F16=float16 "
    "BF16=bfloat16 I32=int32 U32=uint32 F32=float32 C64=complex64 F64=float64 I64=int64 U64=uint64"
).split()
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in (pair.split("=") for pair in _PAIRS)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

AnyPath = str | os.PathLike[str]
Described = tuple[tuple[int, ...], torch.dtype]  # the shape of a tensor and its dtype


def needs_hub(library: str) -> ImportError:
    """What to say when a library for files of transformers is not there."""
    return ImportError(f"safetensors files need {library}: pip install 'shardfn[hf]'")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, where it begins at `start`."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


class Reader:
    """Reads parts of tensors that are in files, a few megabytes at a time."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read_from(self, stored: Stored, box: Box, out: Tensor) -> None:
        """Fill `out`, of any dtype and on any device, with a part of a tensor."""
        first, size = tuple(start for start, _ in box), tuple(n for _, n in box)
        in_one = prod(size[: _rows(size, stored.shape)]) == 1
        if in_one and out.device.type == "cpu" and out.dtype == stored.dtype and out.is_contiguous() and out.numel():
            ((start, _),) = _segments(stored.shape, first, size, stored.dtype.itemsize)
            return self._pread(stored.file, bytes_of(out).numpy().data, stored.start + start)
        for block in blocks(out.shape, BLOCK_BYTES // stored.dtype.itemsize, stored.shape):
            first = tuple(start + at for (start, _), (at, _) in zip(box, block, strict=True))
            narrowed(out, block).copy_(self._value(stored, first, tuple(n for _, n in block)))

    def _value(self, stored: Stored, first: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """A small part of a tensor, in memory that the next one takes."""
        shape, item = stored.shape, stored.dtype.itemsize
        rows = _rows(size, shape)
        if prod(size[:rows]) > 1 and prod(size[rows:]) * item < _PAGE:  # the system would read all of it anyway
            dim = next(d for d, n in enumerate(size) if n > 1) + 1
            whole = self._value(stored, (*first[:dim], *[0] * len(shape[dim:])), (*size[:dim], *shape[dim:]))
            inner = zip(first[dim:], size[dim:], strict=True)
            return whole[(*[slice(None)] * dim, *(slice(start, start + n) for start, n in inner))]
        nbytes = prod(size) * item
        if self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        staging = self._staging[:nbytes]
        data, at = staging.numpy().data, 0
        for start, length in _segments(shape, first, size, item):
            self._pread(stored.file, data[at : at + length], stored.start + start)
            at += length
        return staging.view(stored.dtype).view(size)

    def _pread(self, file: Path, data: memoryview, at: int) -> None:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
        if not pread(self._descriptors[file], data, at):
            raise ShardError(f"'{file}' has become shorter")

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}


class TensorFiles(Reader):
    """The tensors of some files, by name."""

    def __init__(self, path: AnyPath | Sequence[AnyPath]) -> None:
        """Reads the headers.

        Raises:
            FileNotFoundError: there are no such files.
            ShardError: a file is not one, or is cut off; two files have a tensor of one name.
        """
        super().__init__()
        self.tensors: dict[str, Stored] = {}
        for file in _find(path):
            for name, stored in _read_header(file).items():
                if name in self.tensors:
                    raise ShardError(f"load_safetensors: '{name}' is in '{self.tensors[name].file}' and in '{file}'")
                self.tensors[name] = stored

    @property
    def digest(self) -> str:
        """A hash of names, shapes and dtypes."""
        lines = sorted(f"{name} {x.file.name} {x.shape} {x.dtype}" for name, x in self.tensors.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out` with a part of a tensor."""
        self.read_from(self.tensors[name], box, out)


def _segments(shape: Sequence[int], first: Sequence[int], size: Sequence[int], item: int) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes) of every piece of memory that a part of a tensor is."""
    rows = _rows(size, shape)
    length = prod(size[rows:]) * item
    strides = [prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
    begin = sum(start * stride for start, stride in zip(first, strides, strict=True))
    for index in product(*map(range, size[:rows])):
        yield begin + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def _find(path: AnyPath | Sequence[AnyPath]) -> list[Path]:
    """The files that a path stands for."""
    if not isinstance(path, str | os.PathLike):
        return [Path(file) for file in path]
    target = Path(path)
    if target.is_dir() and (target / SINGLE).is_file():
        return [target / SINGLE]
    index = target / INDEX if target.is_dir() else target
    if not index.is_file():
        what = f"no {SINGLE} and no {INDEX} in" if target.is_dir() else "no file or directory"
        raise FileNotFoundError(f"load_safetensors: {what} '{path}'")
    return _indexed(index) if index.suffix == ".json" else [index]


def _indexed(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [index.parent / name for name in dict.fromkeys(weight_map.values())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"load_safetensors: '{index}' is not an index of safetensors files: {error!r}") from error
    for file in files:
        if not file.is_relative_to(index.parent) or ".." in file.relative_to(index.parent).parts:
            raise ShardError(f"load_safetensors: '{index}' names '{file}', which is in another directory")
        if not file.is_file():
            raise FileNotFoundError(f"load_safetensors: '{index}' names '{file.name}', which is not there")
    return files


def _read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a file that the library has found to be a whole one."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise needs_hub("safetensors") from error
    try:
        safe_open(str(file), framework="pt")
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"load_safetensors: there is no file '{file}'") from error
    except (SafetensorError, OSError) as error:
        raise ShardError(f"load_safetensors: '{file}' cannot be read: {error}") from error
    header.pop("__metadata__", None)
    if (odd := next((name for name, x in header.items() if x["dtype"] not in _DTYPES), None)) is not None:
        raise ShardError(f"load_safetensors: '{odd}' in '{file}' is of dtype {header[odd]['dtype']}")
    return _stored(file, header, 8 + length)


def _stored(file: Path, header: Mapping[str, Any], front: int) -> dict[str, Stored]:
    """The tensors of a file, by its header; they begin `front` bytes after its own beginning."""
    return {
        name: Stored(file, tuple(x["shape"]), _DTYPES[x["dtype"]], front + x["data_offsets"][0])
        for name, x in header.items()
    }


@dataclass(frozen=True)
class FilePlan:
    """A file that is to be written: its header, and its tensors."""

    name: str
    header: bytes
    tensors: Mapping[str, Stored]
    nbytes: int


@dataclass(frozen=True)
class FilesPlan:
    """All files that are to be written, and the text of their index when there are several.

    One that is `alone` leaves the other files of its directory as they are.
    """

    files: tuple[FilePlan, ...]
    index: str | None = None
    alone: bool = False

    @property
    def digest(self) -> str:
        """A hash of all headers."""
        return hashlib.sha256(b"".join(file.header for file in self.files)).hexdigest()[:16]


def plan_files(tensors: Mapping[str, Described], max_shard_size: int | str, parameters: int) -> FilesPlan:
    """Which file gets which tensor, as `save_pretrained` decides it; `parameters` is the number of elements to note."""
    try:
        from huggingface_hub import split_torch_state_dict_into_shards
    except ImportError as error:
        raise needs_hub("huggingface_hub") from error
    blank = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()}
    split = split_torch_state_dict_into_shards(blank, max_shard_size=max_shard_size)
    names_in = split.filename_to_tensors
    files = [plan_file(file, {x: tensors[x] for x in names}) for file, names in names_in.items()]
    about = {"metadata": {"total_parameters": parameters, **split.metadata}, "weight_map": split.tensor_to_filename}
    index = json.dumps(about, indent=2, sort_keys=True) + "\n" if split.is_sharded else None
    return FilesPlan(tuple(files), index)


def plan_file(name: str, tensors: Mapping[str, Described]) -> FilePlan:
    """All tensors in one file.

    Raises:
        ShardError: a dtype that the format does not have.
    """
    odd = next((f"'{key}' is of dtype {dtype}" for key, (_, dtype) in tensors.items() if dtype not in _NAMES), None)
    if odd is not None:
        raise ShardError(f"save_safetensors: {odd}, which the format does not have")
    rank = {dtype: number for number, dtype in enumerate(_NAMES)}
    header: dict[str, Any] = {}
    end = 0
    for key in sorted(tensors, key=lambda key: (-rank[tensors[key][1]], key)):
        (shape, dtype), start = tensors[key], end
        end += prod(shape) * dtype.itemsize
        header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    about = {"__metadata__": {"format": "pt"}}  # which transformers asks for
    text = json.dumps(about | header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    front = len(text).to_bytes(8, "little") + text
    return FilePlan(name, front, _stored(Path(name), header, len(front)), len(front) + end)


class TensorWriter:
    """Writes the files of a plan under temporary names; they get their own when all are whole."""

    def __init__(self, directory: Path, plan: FilesPlan) -> None:
        self._directory, self._plan = directory, plan
        self._descriptors: dict[str, int] = {}
        self._places = {name: stored for file in plan.files for name, stored in file.tensors.items()}

    def open(self) -> None:
        """Make the files, without tensors; what a save that was killed has left is taken away."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for begun in () if self._plan.alone else (self._temporary("model*").name, f"{NEW}model*"):
            for old in self._directory.glob(begun):
                old.unlink()
        for file in self._plan.files:
            descriptor = os.open(self._temporary(file.name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._descriptors[file.name] = descriptor
            write_at(descriptor, memoryview(file.header), 0)
            os.ftruncate(descriptor, file.nbytes)

    def _temporary(self, name: str) -> Path:
        return self._directory / f".writing-{name}"

    def write(self, name: str, box: Box, value: Tensor) -> None:
        """Write a part of a tensor."""
        stored, item = self._places[name], value.element_size()
        descriptor = self._descriptors[stored.file.name]
        for block in blocks(value.shape, BLOCK_BYTES // item):
            part = narrowed(value, block)
            data, at = bytes_of(part).numpy().data, 0
            first = [begin + within for (begin, _), (within, _) in zip(box, block, strict=True)]
            for there, length in _segments(stored.shape, first, part.shape, item):
                write_at(descriptor, data[at : at + length], stored.start + there)
                at += length

    def finish(self) -> None:
        """Give the files their names, and take away those of an older save.

        An old index goes first and a new one comes last, so that no index ever names files of two saves.
        """
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
        names = {file.name for file in self._plan.files}
        if not self._plan.alone:
            (self._directory / INDEX).unlink(missing_ok=True)
        for name in names:
            self._temporary(name).replace(self._directory / name)
        if self._plan.index is not None:
            LocalDirectory(self._directory).put(INDEX, self._plan.index.encode())
        for old in () if self._plan.alone else self._directory.iterdir():
            if _FILE.fullmatch(old.name) and old.name not in names:
                old.unlink()
        sync(self._directory)

    def close(self) -> None:
        """Close what is open, and remove what has no name yet."""
        for name, descriptor in self._descriptors.items():
            os.close(descriptor)
            self._temporary(name).unlink(missing_ok=True)
        self._descriptors = {}


def _rows(part: Sequence[int], whole: Sequence[int]) -> int:
    """How many dims lie in front of those that are one piece of memory: those before the last that is cut."""
    return next((dim for dim in reversed(range(len(part))) if part[dim] != whole[dim]), 0)
