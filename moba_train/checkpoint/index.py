"""DCP's index of a checkpoint, `.metadata`: a pickle, read so that it can neither run code nor name other files."""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moba_train.checkpoint.manifest import FileEntry
from moba_train.errors import CheckpointError

INDEX = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its home in Python 3.13
}


def read_index(path: Path, files: Mapping[str, FileEntry]) -> Metadata:
    """The index of checkpoint `path`, whose manifest lists `files`. Raises CheckpointError when the file is not an
    index, or refers to bytes outside these files."""
    file = path / INDEX
    try:
        with file.open("rb") as stream:
            index = _Unpickler(stream).load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise CheckpointError(f"{file}: cannot be read ({error!r}); use another checkpoint of this run") from error
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{file}: holds {type(index).__name__}, must hold DCP's Metadata")
    try:
        problem = _problem(index, files)
    except Exception as error:  # attributes may be missing or of any type
        problem = repr(error)
    if problem is not None:
        raise CheckpointError(f"{file}: is not an index ({problem}); use another checkpoint of this run")
    return index


def _problem(index: Metadata, files: Mapping[str, FileEntry]) -> str | None:
    stored = sum(entry["size"] for entry in files.values())
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        sound = isinstance(entry, TensorStorageMetadata) and isinstance(entry.properties, TensorProperties)
        if not sound or type(entry.size) is not torch.Size or not isinstance(entry.properties.dtype, torch.dtype):
            return f"{name!r} is not described as a tensor"
        if not 0 <= math.prod(entry.size) * entry.properties.dtype.itemsize <= stored:
            return f"{name!r} of shape {list(entry.size)} is larger than all files"
    for key, place in (index.storage_data or {}).items():
        if not isinstance(key, MetadataIndex) or not isinstance(place, _StorageInfo):
            return f"{key!r} is stored at {place!r}"
        if place.relative_path not in files:
            return f"{key.fqn!r} is in {place.relative_path!r}, which is none of the checkpoint's files"
        if place.transform_descriptors or not 0 <= place.offset <= place.offset + place.length:
            return f"{key.fqn!r} is stored at {place!r}"
        if place.offset + place.length > files[place.relative_path]["size"]:
            return f"{key.fqn!r} ends beyond {place.relative_path}"
    return None


class _Unpickler(pickle._Unpickler):
    """An unpickler that knows the classes of an index and no others. Python's own, not the one in C, where a single
    opcode of a hostile pickle can claim 64 GB of memory."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")
        return super().find_class(module, name)
