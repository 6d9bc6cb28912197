"""What a checkpoint is made of: one JSON file, the last that a save writes, so that a directory without it is none.

    {"manifest": {"format": 1, "nonce": ..., "notes": ..., "files": {name: {"size": ..., "sha256": [...]}},
                  "leaves": {name: {"dtype": ..., "shape": ..., "parts": [[[start, ...], [length, ...], file, at]]}}},
     "sha256": of the text of the manifest}

A file has a hash for each of its blocks, so that ranks make and check them side by side, and a reader of a slice reads
no more than the blocks that it is in. A part of a leaf is a box of it, and where in which file its numbers begin.
"""

import gc
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint.block_writer import BLOCK
from shardfn.checkpoint.storages import AnyPlace, Storage, file_of, has, storage_of
from shardfn.layout import Box
from shardfn.notation import ShardError

FORMAT = 1
NAME = "manifest.json"
_FILE = re.compile(r"\.metadata|[0-9a-f]{16}_\d+\.distcp")
_HASH = re.compile(r"[0-9a-f]{64}")
EARLIER = "; load an earlier one"  # what errors say of a checkpoint that is damaged
_PLAIN = (int, float, str, bool, type(None))


class Damaged(ShardError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class HashedFile:
    """A file, and the SHA-256 of each block of it."""

    nbytes: int
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class StoredPart:
    """A box of a leaf: row after row in a file, from `at` on."""

    box: Box
    file: str
    at: int


@dataclass(frozen=True)
class StoredLeaf:
    """A tensor of a checkpoint, whose parts are all of it, each once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of; `nonce` tells two saves of one name apart."""

    nonce: str
    files: Mapping[str, HashedFile]
    leaves: Mapping[str, StoredLeaf]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, leaf in self.leaves.items():
            require_each_once(name, leaf.shape, [part.box for part in leaf.parts])

    def text(self) -> str:
        """As it is written."""
        files = {name: {"size": x.nbytes, "sha256": [*x.hashes]} for name, x in self.files.items()}
        leaves = {
            name: {
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "shape": [*leaf.shape],
                "parts": [[[a for a, _ in x.box], [n for _, n in x.box], x.file, x.at] for x in leaf.parts],
            }
            for name, leaf in self.leaves.items()
        }
        about = {"format": FORMAT, "nonce": self.nonce, "notes": dict(self.notes), "files": files, "leaves": leaves}
        return json.dumps({"manifest": about, "sha256": digest(about)}, separators=(",", ":"), ensure_ascii=False)


def digest(about: Any) -> str:
    """The hash of a manifest, whatever way its JSON is written."""
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def no_collection() -> Iterator[None]:
    """Python looks for no garbage while many small objects are made: of 4096 ranks it would be half of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@no_collection()
def read_manifest(storage: Storage) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is none, so that this is no checkpoint, or one that was never finished.
        ShardError: it is damaged, or of a format that is not known.
    """
    file = file_of(storage, NAME)
    try:
        text = bytearray(storage.size(NAME))
        storage.read(NAME, memoryview(text), 0)
        read = json.loads(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"checkpoint: no checkpoint in {storage} (no {NAME}){_instead(storage)}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint: {file} is damaged: {str(error)[:100]}{EARLIER}") from error
    try:
        about = read["manifest"]
        if read["sha256"] != digest(about):
            raise ValueError("its hash is another one")
        if (found := about["format"]) == FORMAT:
            files = {name: _file(name, **x) for name, x in about["files"].items()}
            leaves = {name: _leaf(name, files, **x) for name, x in about["leaves"].items()}
            return Manifest(about["nonce"], files, leaves, about["notes"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"checkpoint: {file} is damaged: {str(error)[:100]}{EARLIER}") from error
    why = f"has format {str(found)[:100]}, and this shardfn reads format {FORMAT}"
    raise ShardError(f"checkpoint: {file} {why}; load it by the version that saved it, or a newer one")


def _instead(storage: Storage) -> str:
    """What is there that is no checkpoint."""
    names = [*storage.names()]
    if ".metadata" in names and not any(_FILE.fullmatch(name) for name in names if name != ".metadata"):
        return "; one of torch.distributed.checkpoint becomes one by python -m shardfn.checkpoint convert SOURCE TARGET"
    step = max((name for name in names if name.startswith("step-")), default="")
    return f"; there is '{step}' in it, and sf.checkpoint.latest(directory) finds the newest" * bool(step)


def is_checkpoint(place: AnyPlace) -> bool:
    """Whether there is one that was finished."""
    return has(storage_of(place), NAME)


def require_each_once(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that parts are all of a leaf, and none of it twice.

    Raises:
        Damaged: they are not.
    """
    whole = tuple((0, n) for n in shape)
    split = [dim for dim, span in enumerate(whole) if not span[1] or any(box[dim] != span for box in boxes)]
    changes = dict[tuple[int, ...], int]()  # of how often it is there, at the corners of boxes
    for box, times in (*((box, 1) for box in boxes), (whole, -1)):
        corners = [((), times)]
        for start, n in (box[dim] for dim in split):
            corners = [((*at, end), change) for at, by in corners for end, change in ((start, by), (start + n, -by))]
        for at, change in corners:
            changes[at] = changes.get(at, 0) + change
    if any(changes.values()):
        raise Damaged(f"checkpoint: parts of '{name}' that are not all of it, or some of it twice{EARLIER}")


def _file(name: str, size: int, sha256: Sequence[str]) -> HashedFile:
    if _FILE.fullmatch(name) is None:
        raise ValueError(f"a file {name!r}")
    if type(size) is not int or len(sha256) != -(-size // BLOCK) or not all(map(_HASH.fullmatch, sha256)):
        raise ValueError(f"the hashes of {name!r}")
    return HashedFile(size, tuple(sha256))


def _leaf(
    name: str, files: Mapping[str, HashedFile], dtype: str, shape: Sequence[int], parts: Sequence[Any]
) -> StoredLeaf:
    kind = getattr(torch, dtype)
    stored = [StoredPart(tuple(zip(start, size, strict=True)), file, at) for start, size, file, at in parts]
    numbers = [*shape, *(n for part in stored for span in part.box for n in span), *(x.at for x in stored)]
    if not isinstance(kind, torch.dtype) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"the leaf {name!r}")
    for part in stored:
        ends = all(start + n <= whole for (start, n), whole in zip(part.box, shape, strict=True))
        if not ends or part.at + prod(n for _, n in part.box) * kind.itemsize > files[part.file].nbytes:
            raise ValueError(f"a part of {name!r} that is outside of it or of its file")
    return StoredLeaf(tuple(shape), kind, tuple(stored))


def to_json(state: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON part of a state, such as an optimizer's; its tensors go into `tensors`, by their paths.

    Raises:
        TypeError: something that is neither a tensor, a number, a string nor a container of these.
    """
    if isinstance(state, Tensor):
        if path in tensors:
            raise TypeError(f"checkpoint: two values of a state have the path '{path}'; rename one")
        tensors[path] = state
        return {"tensor": list(state.shape), "dtype": str(state.dtype).removeprefix("torch.")}
    if isinstance(state, Mapping):
        if odd := [key for key in state if not isinstance(key, _PLAIN)]:
            raise TypeError(f"checkpoint: '{path}' has the key {odd[0]!r}; keys are numbers and strings")
        items = [[key, to_json(value, f"{path}.{key}", tensors)] for key, value in state.items()]
        return {"counter" if isinstance(state, Counter) else "dict": items}
    if isinstance(state, list | tuple):
        items = [to_json(value, f"{path}.{index}", tensors) for index, value in enumerate(state)]
        return {"tuple": items} if isinstance(state, tuple) else items
    if isinstance(state, _PLAIN):
        return state
    raise TypeError(f"checkpoint: '{path}' is a {type(state).__name__}, not a tensor, number, string or container")


def from_json(part: Any, path: str, tensor: Callable[[str, Mapping[str, Any]], Tensor]) -> Any:
    """The state of a JSON part, whose tensors are `tensor(path, what JSON says of it)`."""
    if isinstance(part, list):
        return [from_json(value, f"{path}.{index}", tensor) for index, value in enumerate(part)]
    if not isinstance(part, dict):
        return part
    if "tensor" in part:
        return tensor(path, part)
    if "tuple" in part:
        return tuple(from_json(part["tuple"], path, tensor))
    items = part["counter"] if "counter" in part else part["dict"]
    joined = {key: from_json(value, f"{path}.{key}", tensor) for key, value in items}
    return Counter(joined) if "counter" in part else joined
