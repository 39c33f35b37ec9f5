"""What the index of a checkpoint must say: every number of every tensor is stored, once, in the checkpoint's files.

DCP reads what the index lists and leaves the rest of a tensor as it was in memory, without an error. So an index with a
gap would fill a model, or an exported file, with whatever the memory of the process held before.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moba_train.checkpoint.manifest import FileEntry

Place = tuple[str, torch.Size, Any]
"""A chunk's tensor, its offset in the tensor, and where the index says it is stored: a _StorageInfo, if all is well."""

_CUT_AXES = 6
"""Dimensions along which a tensor may be cut: a chunk has 2^6 corners then. A mesh of our own has fewer axes."""


def checked_storage(
    tensors: Any, places: Iterable[Place], files: Mapping[str, FileEntry]
) -> dict[MetadataIndex, _StorageInfo]:
    """Where each chunk that holds numbers is stored.

    `tensors`, the descriptions of tensors by name, and the values in `places` come from the index and may be anything.
    Raises ValueError, which names the tensor, unless the chunks of every tensor lie inside it and cover it exactly
    once, and each is stored in bytes of its own of one of the `files`.
    """
    if type(tensors) is not dict:
        raise ValueError(f"its tensors are {type(tensors).__name__}, must be a dict by name")
    stored = sum(entry["size"] for entry in files.values())
    places_of: dict[str, list[_StorageInfo]] = {name: [] for name in tensors}
    offsets_of: dict[str, list[torch.Size]] = {name: [] for name in tensors}
    for name, offset, place in places:
        if name not in tensors:
            raise ValueError(f"{shown(name)} is stored, but not described as a tensor")
        places_of[name].append(_checked_place(name, place, files))
        offsets_of[name].append(offset)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    lists: set[int] = set()
    for name, tensor in tensors.items():
        if not _is_described(tensor):
            raise ValueError(f"{shown(name)} is not described as a tensor")
        if not 0 <= math.prod(tensor.size) * tensor.properties.dtype.itemsize <= stored:
            raise ValueError(f"{shown(name)} of shape {list(tensor.size)} is larger than all files")
        if id(tensor.chunks) in lists:  # a thousand tensors with one list of a thousand chunks: a million to check
            raise ValueError(f"{shown(name)} shares its chunks with another tensor")
        lists.add(id(tensor.chunks))
        storage |= _storage_of(name, tensor, offsets_of[name], places_of[name])
    _check_own_bytes(storage)
    return storage


def shown(name: str) -> str:
    """A name from an index as text for a message, quoted and not too long."""
    return repr(name if len(name) <= 200 else name[:200] + "...")


def _checked_place(name: str, place: Any, files: Mapping[str, FileEntry]) -> _StorageInfo:
    if type(place) is not _StorageInfo or type(place.offset) is not int or type(place.length) is not int:
        raise ValueError(f"{shown(name)} has no file, offset and length")
    if type(place.relative_path) is not str or place.relative_path not in files:
        raise ValueError(f"{shown(name)} is in a file that is none of the checkpoint's files")
    if place.transform_descriptors is not None:
        raise ValueError(f"{shown(name)} is stored in a transformed (compressed or encrypted) form")
    if place.offset < 0 or place.length < 0 or place.offset + place.length > files[place.relative_path]["size"]:
        raise ValueError(f"{shown(name)} begins before or ends beyond {place.relative_path}")
    return place


def _is_described(tensor: Any) -> TypeGuard[TensorStorageMetadata]:
    return (
        type(tensor) is TensorStorageMetadata
        and type(tensor.properties) is TensorProperties
        and isinstance(tensor.properties.dtype, torch.dtype)
        and type(tensor.size) is torch.Size
        and all(size >= 0 for size in tensor.size)
        and type(tensor.chunks) is list
    )


def _storage_of(
    name: str, tensor: TensorStorageMetadata, offsets: list[torch.Size], places: list[_StorageInfo]
) -> dict[MetadataIndex, _StorageInfo]:
    """Where the chunks of one tensor are stored. Raises ValueError unless they cover it exactly once."""
    if math.prod(tensor.size) == 0:
        return {}
    # Positions are found by one number each: the hash of a tuple of numbers is one that a hostile index can make
    # collide, and a dict of colliding keys takes quadratic time.
    strides = _strides(tensor.size)
    place_at: dict[int, _StorageInfo] = {}
    for offset, place in zip(offsets, places, strict=True):
        if len(offset) == len(tensor.size) and all(0 <= o < n for o, n in zip(offset, tensor.size, strict=True)):
            position = _dot(offset, strides)
            if position in place_at:
                raise ValueError(f"{shown(name)}: the chunk at {list(offset)} is stored twice")
            place_at[position] = place
    storage = {}
    chunks = [chunk for chunk in tensor.chunks if _holds_numbers(name, chunk, tensor.size)]
    for chunk in chunks:
        stored = place_at.pop(_dot(chunk.offsets, strides), None)
        if stored is None:
            raise ValueError(f"{shown(name)}: the chunk at {list(chunk.offsets)} is listed twice or not stored")
        if stored.length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
            raise ValueError(
                f"{shown(name)}: the chunk at {list(chunk.offsets)} is larger than its {stored.length} bytes"
            )
        storage[MetadataIndex(name, chunk.offsets)] = stored
    if not _tile(chunks, tensor.size):
        raise ValueError(f"{shown(name)} of shape {list(tensor.size)}: its chunks do not cover it exactly once")
    return storage


def _holds_numbers(name: str, chunk: Any, shape: torch.Size) -> bool:
    """Whether a chunk has a number in it. Raises ValueError when it is not a chunk of a tensor of this shape."""
    if type(chunk) is not ChunkStorageMetadata or {type(chunk.offsets), type(chunk.sizes)} != {torch.Size}:
        raise ValueError(f"{shown(name)} has a chunk without offsets and sizes")
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape) or not all(
        0 <= offset <= offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    ):
        raise ValueError(
            f"{shown(name)} of shape {list(shape)}: the chunk of shape {list(chunk.sizes)} at {list(chunk.offsets)} "
            "is not inside it"
        )
    return 0 not in chunk.sizes


def _tile(chunks: list[ChunkStorageMetadata], shape: torch.Size) -> bool:
    """Whether chunks inside a tensor cover it exactly once.

    They do if and only if their indicator functions add up to the tensor's. A box's indicator function is determined by
    its corners with alternating signs (its mixed difference), so these are added up: time is linear in the chunks,
    however they are cut.
    """
    cut = [axis for axis, whole in enumerate(shape) if any(chunk.sizes[axis] != whole for chunk in chunks)]
    if len(cut) > _CUT_AXES:
        return False
    strides = _strides(torch.Size(shape[axis] + 1 for axis in cut))
    balance: dict[int, int] = {}
    boxes = [(chunk.offsets, chunk.sizes, 1) for chunk in chunks] + [(torch.Size([0] * len(shape)), shape, -1)]
    for offsets, sizes, sign in boxes:
        corners = [(0, sign)]
        for axis, stride in zip(cut, strides, strict=True):
            begin = offsets[axis] * stride
            end = begin + sizes[axis] * stride
            corners = [corner for p, s in corners for corner in ((p + begin, s), (p + end, -s))]
        for position, s in corners:
            balance[position] = balance.get(position, 0) + s
    return not any(balance.values())


def _check_own_bytes(storage: Mapping[MetadataIndex, _StorageInfo]) -> None:
    """Raises ValueError when two chunks share bytes of a file: the index could then claim any multiple of the files."""
    ranges = sorted(
        ((place.relative_path, place.offset, place.offset + place.length, key.fqn) for key, place in storage.items()),
        key=itemgetter(0, 1),
    )
    for (file, _, end, name), (next_file, begin, _, next_name) in pairwise(ranges):
        if file == next_file and begin < end:
            raise ValueError(f"{shown(name)} and {shown(next_name)} share bytes of {file}")


def _strides(shape: torch.Size) -> list[int]:
    """Distance of neighbours along each dimension, in elements, in row-major order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return strides


def _dot(a: Iterable[int], b: Iterable[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
