"""The file in which torch.distributed.checkpoint (`filesystem.py` of it) looks up where tensors are.

It is a pickle of torch's own classes, one of which is private: written so that torch's tools read what we write. Ours
are never read; of directories that torch has written, it is read without any other name that a pickle may call.
"""

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as metadata_

# A box of a tensor, in which file it is, and there its start and length as torch.save writes it, and where its numbers.
StoredBox = tuple[Sequence[tuple[int, int]], str, tuple[int, int, int]]


def checkpoint_metadata(tensors: Mapping[str, tuple[Sequence[int], torch.dtype, Iterable[StoredBox]]]) -> bytes:
    """The contents of that file, from (shape, dtype, boxes) of each tensor."""
    metadata = metadata_.Metadata({}, {}, {}, metadata_.StorageMeta(), filesystem.CURRENT_DCP_VERSION)
    for name, (shape, dtype, boxes) in tensors.items():
        chunks: list[metadata_.ChunkStorageMetadata] = []
        for box, file, (start, length, _) in boxes:
            starts, sizes = torch.Size(a for a, _ in box), torch.Size(n for _, n in box)
            chunks.append(metadata_.ChunkStorageMetadata(starts, sizes))
            metadata.storage_data[metadata_.MetadataIndex(name, starts)] = filesystem._StorageInfo(file, start, length)
        properties = metadata_.TensorProperties(dtype=dtype)
        metadata.state_dict_metadata[name] = metadata_.TensorStorageMetadata(properties, torch.Size(shape), chunks)
        metadata.planner_data[name] = (name,)
    return pickle.dumps(metadata)


_OF_METADATA = "Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata BytesStorageMetadata".split()
_OF_METADATA += ["ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"]
_CLASSES: dict[tuple[str, str], Any] = {(metadata_.__name__, name): vars(metadata_)[name] for name in _OF_METADATA}
_CLASSES[filesystem.__name__, "_StorageInfo"] = filesystem._StorageInfo
_CLASSES |= {("pathlib", name): PurePath for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}


class _Classes(pickle._Unpickler):
    """Knows the classes of that file, and no other ones.

    It is the one in Python: a damaged number makes that in C take memory for minutes.
    """

    def find_class(self, module: str, name: str) -> Any:
        """A class, or a dtype."""
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: torch.strided
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_checkpoint_metadata(data: bytes) -> metadata_.Metadata:
    """What a file like that has.

    Raises:
        pickle.UnpicklingError: it asks for anything else, or is none.
    """
    try:
        metadata = _Classes(io.BytesIO(data)).load()
    except Exception as error:  # of bytes that anybody may have written
        raise pickle.UnpicklingError(str(error)) from error
    if not isinstance(metadata, metadata_.Metadata):
        raise pickle.UnpicklingError(f"it has a {type(metadata).__name__}")
    return metadata
