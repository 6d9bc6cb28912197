"""The file in which torch.distributed.checkpoint (`filesystem.py` of it) looks up where tensors are.

It is a pickle of torch's own classes, one of which is private: written so that torch's tools read what we write, and
never read.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

# (starts, sizes) of a box of a tensor, and in which file, where and how many bytes long it is as torch.save writes it.
StoredBox = tuple[Sequence[int], Sequence[int], str, int, int]


def checkpoint_metadata(tensors: Mapping[str, tuple[Sequence[int], torch.dtype, Iterable[StoredBox]]]) -> bytes:
    """The contents of that file, from (shape, dtype, boxes) of each tensor."""
    metadata = Metadata({}, {}, {}, StorageMeta(), filesystem.CURRENT_DCP_VERSION)
    for name, (shape, dtype, boxes) in tensors.items():
        chunks: list[ChunkStorageMetadata] = []
        for starts, sizes, file, at, length in boxes:
            chunks.append(ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes)))
            index = MetadataIndex(name, torch.Size(starts))
            metadata.storage_data[index] = filesystem._StorageInfo(file, at, length)
        properties = TensorProperties(dtype=dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        metadata.planner_data[name] = (name,)
    return pickle.dumps(metadata)
