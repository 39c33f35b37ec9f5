"""The index of a checkpoint, `index.json`: its tensors, and which bytes of which file hold each part of them.

    {"tensors": {"model.embedding.weight": {
        "dtype": "F32", "shape": [64, 32],
        "chunks": [["rank_0_0.safetensors", 856, [0, 0], [32, 32]], ["rank_1_0.safetensors", 904, [32, 0], [32, 32]]]}}}

A chunk is a box of a tensor, stored in row-major order: file, first byte, offsets in the tensor and sizes. An index is
read as untrusted input: every number of every tensor must be stored once, in the checkpoint's files, and no bytes may
be left over after their headers. A reader that took an index with a gap would leave in a model, or in an exported file,
what the memory of the process held before.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moba_train.checkpoint.manifest import FileEntry, parse_object, read_verified
from moba_train.errors import CheckpointError
from moba_train.optim.gradients import local_part

INDEX = "index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of numbers by their names in safetensors files."""

_SMALLEST_LIMIT = 1 << 20
_MOST_DIMENSIONS = 16

Sizes = tuple[int, ...]


class Chunk(NamedTuple):
    """A box of a tensor, and where it is stored."""

    file: str
    begin: int
    """First byte in the file."""
    offsets: Sizes
    sizes: Sizes


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: Sizes
    chunks: list[Chunk]


class Part(NamedTuple):
    """A box of a tensor that a rank holds."""

    name: str
    dtype: torch.dtype
    shape: Sizes
    """Shape of the whole tensor."""
    offsets: Sizes
    sizes: Sizes

    @classmethod
    def from_whole(cls, name: str, tensor: Tensor) -> "Part":
        """All of a tensor."""
        return cls(name, tensor.dtype, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def label(self) -> str:
        """Name in a safetensors file: the tensor's, followed by the box unless it is the whole tensor."""
        if self.sizes == self.shape:
            return self.name
        box = ", ".join(f"{begin}:{begin + size}" for begin, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{box}]"


class PackedTensor(NamedTuple):
    """A tensor of a checkpoint as rank 0 sends it to the others: its chunks are numbers, searched without a loop."""

    dtype: torch.dtype
    shape: Sizes
    chunks: np.ndarray[Any, np.dtype[np.int64]]
    """[chunks, 2 + 2 x dimensions]: number of the file, first byte, offsets, sizes."""

    @classmethod
    def pack(cls, saved: SavedTensor, files: Mapping[str, int]) -> "PackedTensor":
        """`saved`, in `files` with these numbers."""
        rows = [(files[chunk.file], chunk.begin, *chunk.offsets, *chunk.sizes) for chunk in saved.chunks]
        return cls(saved.dtype, saved.shape, np.array(rows, np.int64).reshape(len(rows), 2 + 2 * len(saved.shape)))

    def overlapping(self, part: Part, files: Sequence[str]) -> SavedTensor:
        """The tensor with those chunks alone that have a number of `part`. `files`: their names, by number."""
        at = 2 + len(self.shape)
        begins_CD = self.chunks[:, 2:at]
        ends_CD = begins_CD + self.chunks[:, at:]
        wanted_C = ((begins_CD < np.add(part.offsets, part.sizes)) & (ends_CD > part.offsets)).all(axis=1)
        rows = self.chunks[wanted_C].tolist()
        chunks = [Chunk(files[row[0]], row[1], tuple(row[2:at]), tuple(row[at:])) for row in rows]
        return SavedTensor(self.dtype, self.shape, chunks)


def own_parts(tensors: Mapping[str, Tensor]) -> list[tuple[Part, Tensor]]:
    """The part of each tensor that this rank holds, with its numbers: of a DTensor the local shard, else all of it."""
    parts = []
    for name, tensor in tensors.items():
        part = Part.from_whole(name, tensor)
        if isinstance(tensor, DTensor):
            # torch's own rule for DTensors, uneven ones included; the method is what torch.distributed.checkpoint
            # calls.
            (chunk,) = tensor.__create_chunk_list__()
            part = part._replace(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes))
        parts.append((part, local_part(tensor)))
    return parts


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which may be written to."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def index_json(tensors: Mapping[str, SavedTensor]) -> bytes:
    """The content of index.json."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries = {
        name: {"dtype": names[tensor.dtype], "shape": tensor.shape, "chunks": tensor.chunks}
        for name, tensor in tensors.items()
    }
    return json.dumps({"tensors": entries}).encode()


def read_index(path: Path, files: Mapping[str, FileEntry]) -> dict[str, SavedTensor]:
    """The tensors of checkpoint `path`, whose manifest lists `files`, by name.

    The index may be as long as the other files together, because a chunk takes more bytes in the header of its file,
    and nothing else limits it: the shards of a large model on thousands of ranks make gigabytes of it. Raises
    CheckpointError when it is damaged or not an index, UnreadableError when it could not be read.
    """
    file = path / INDEX
    sizes = {name: entry["size"] for name, entry in files.items() if name != INDEX}
    limit = max(_SMALLEST_LIMIT, sum(sizes.values()))
    content = parse_object(file, read_verified(path, INDEX, files, limit))
    try:
        entries = content.get("tensors")
        if type(entries) is not dict:
            raise ValueError("its `tensors` must be a JSON object by name")
        tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
        check_coverage(tensors, sizes)
    except ValueError as error:
        raise CheckpointError(f"{file}: is not an index ({error}); use another checkpoint of this run") from error
    return tensors


def _tensor(name: str, entry: Any) -> SavedTensor:
    match entry:
        case {"dtype": str(dtype), "shape": shape, "chunks": list(chunks)} if dtype in DTYPES and _are_sizes(shape):
            return SavedTensor(DTYPES[dtype], tuple(shape), [_chunk(name, chunk) for chunk in chunks])
    raise ValueError(f"{shown(name)} is not described as a tensor")


def _chunk(name: str, entry: Any) -> Chunk:
    match entry:
        case [str(file), begin, offsets, sizes] if all(map(_are_sizes, ([begin], offsets, sizes))):
            return Chunk(file, begin, tuple(offsets), tuple(sizes))
    raise ValueError(f"{shown(name)} has a chunk without file, first byte, offsets and sizes")


def _are_sizes(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) <= _MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )


def check_coverage(tensors: Mapping[str, SavedTensor], file_sizes: Mapping[str, int]) -> None:
    """Raises ValueError, which names the tensor, unless the chunks of every tensor cover it exactly once, and fill the
    files that they are in, whose sizes are given by name, one after the other up to the end. Takes the time of a sort.
    """
    ranges = []
    for name, tensor in tensors.items():
        if not _is_grid(tensor.chunks, tensor.shape):
            raise ValueError(f"{shown(name)} of shape {list(tensor.shape)}: its chunks do not cover it exactly once")
        for chunk in tensor.chunks:
            end = chunk.begin + math.prod(chunk.sizes) * tensor.dtype.itemsize
            ranges.append((chunk.file, chunk.begin, end, name))
    ranges.sort()
    for (file, _, end, name), (next_file, begin, _, next_name) in pairwise([*ranges, ("", 0, 0, "")]):
        if file not in file_sizes:
            raise ValueError(f"{shown(name)} is in a file that is none of the checkpoint's files")
        if file == next_file and begin != end:
            raise ValueError(f"{shown(next_name)} does not begin where {shown(name)} ends in {file}")
        if file != next_file and end != file_sizes[file]:
            raise ValueError(f"{shown(name)} does not end with {file}")


def shown(name: str) -> str:
    """A name from an index as text for a message, quoted and not too long."""
    return repr(name if len(name) <= 200 else name[:200] + "...")


def _is_grid(chunks: Sequence[Chunk], shape: Sizes) -> bool:
    """True if the chunks are the cells of a grid over a tensor, each of them once, as the parts of a DTensor are: along
    one axis they are cut alike wherever they lie along the others. They then cover it exactly once.

    Sorted, not put into a set: the hash of a tuple of numbers is one that a hostile index can make collide.
    """
    if 0 in shape:
        return not chunks
    if any(not len(chunk.offsets) == len(chunk.sizes) == len(shape) or 0 in chunk.sizes for chunk in chunks):
        return False
    cells = 1
    for axis, whole in enumerate(shape):
        cuts = sorted((chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]) for chunk in chunks)
        distinct = [cut for cut, _ in groupby(cuts)]
        if [0, *(end for _, end in distinct)] != [*(begin for begin, _ in distinct), whole]:
            return False
        cells *= len(distinct)
    offsets = sorted(chunk.offsets for chunk in chunks)
    return len(offsets) == cells and all(one != other for one, other in pairwise(offsets))
