"""A rank's part of a checkpoint: which parts of which tensors it writes, and the safetensors files that hold them.

The save plan says which rank writes which part. It serves all saves of the same tensors, so a save is little more than
writing. To plan a thousand tensors again would take 0.4 s of Python, more with more ranks, during which the training
thread of the same process would hardly get a turn (benchmarks/results/checkpoint-python-cpu.json).

Any program that reads safetensors can read the files; a part that is not a whole tensor has its box in its name
(`model.norm.weight[0:16]`). They are written here rather than by the package safetensors because a file is hashed while
it is written, by threads that release Python's lock, and without a copy of it in memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from moba_train.checkpoint import manifest
from moba_train.checkpoint.files import evenly, in_threads
from moba_train.checkpoint.index import (
    DTYPES,
    INDEX,
    Chunk,
    Part,
    SavedTensor,
    byte_view,
    check_coverage,
    index_json,
    own_parts,
)
from moba_train.checkpoint.manifest import META, FileEntry
from moba_train.checkpoint.process_group import SaveGroup
from moba_train.output_files import new_file, write_new

_WRITE_BYTES = 4 << 20
"""Written, then hashed, at a time: the hash finds them in the processor's cache."""

Shapes = dict[str, tuple[object, ...]]
"""Global shape, local shape, dtype and placements of each tensor: all that a save plan depends on."""


class ShardFile(NamedTuple):
    """A safetensors file that is to be written."""

    name: str
    header: bytes
    parts: list[Part]
    """Parts in the order of the file: those of wider types first, so that all are aligned."""

    @classmethod
    def from_parts(cls, name: str, parts: Iterable[Part]) -> "ShardFile":
        """The file `name` with these parts. Raises ValueError for a dtype that the format has no name for."""
        ordered = sorted(parts, key=lambda part: -part.dtype.itemsize)
        names = {dtype: name for name, dtype in DTYPES.items()}
        entries: dict[str, object] = {}
        end = 0
        for part in ordered:
            if part.dtype not in names:
                raise ValueError(f"{part.name} is {part.dtype}; allowed: {', '.join(map(str, names))}")
            begin = end
            end += part.nbytes
            entries[part.label] = {"dtype": names[part.dtype], "shape": part.sizes, "data_offsets": [begin, end]}
        text = json.dumps(entries).encode()
        # The format asks for it: numbers behind the header are then aligned.
        text += b" " * (-len(text) % 8)
        return cls(name, len(text).to_bytes(8, "little") + text, ordered)

    @property
    def chunks(self) -> list[Chunk]:
        """Places of the parts in the file."""
        chunks = []
        begin = len(self.header)
        for part in self.parts:
            chunks.append(Chunk(self.name, begin, part.offsets, part.sizes))
            begin += part.nbytes
        return chunks

    def write(self, folder: Path, value_of: Callable[[Part], Tensor]) -> FileEntry:
        """Writes the file into `folder` and fsyncs it. `value_of` gives the numbers of a part, on the CPU; it is called
        for one after the other."""
        digest = hashlib.sha256()
        size = 0

        def put(content: memoryview) -> None:
            nonlocal size
            while content:
                written = stream.write(content[:_WRITE_BYTES])
                digest.update(content[:written])
                content = content[written:]
                size += written

        # The folder is new, so a file of this name would be another rank's. Unbuffered: 4 MiB are written at a time.
        with new_file(folder / self.name, buffering=0) as stream:
            put(memoryview(self.header))
            for part in self.parts:
                value = value_of(part)
                assert (tuple(value.shape), value.dtype) == (part.sizes, part.dtype), part.name
                put(byte_view(value.contiguous()))
            os.fsync(stream.fileno())
        return {"size": size, "sha256": digest.hexdigest()}


def build_index(files: Iterable[ShardFile], tensors: Iterable[Part] = ()) -> dict[str, SavedTensor]:
    """The index of a checkpoint with these files, which must cover the tensors in them, and those that `tensors` are
    parts of. Raises ValueError when they do not."""
    files = list(files)
    index: dict[str, SavedTensor] = {}
    for part in (*tensors, *(part for file in files for part in file.parts)):
        described = index.setdefault(part.name, SavedTensor(part.dtype, part.shape, []))
        if (described.dtype, described.shape) != (part.dtype, part.shape):
            raise ValueError(f"{part.name} is {described[:2]} on one rank and {part.dtype, part.shape} on another")
    for file in files:
        for part, chunk in zip(file.parts, file.chunks, strict=True):
            index[part.name].chunks.append(chunk)
    sizes = {file.name: len(file.header) + sum(part.nbytes for part in file.parts) for file in files}
    check_coverage(index, sizes)
    return index


def write_checkpoint(
    folder: Path, files: Iterable[ShardFile], value_of: Callable[[Part], Tensor], meta: dict[str, Any]
) -> dict[str, FileEntry]:
    """Writes all of a checkpoint into `folder`, without other ranks, and holds one tensor at a time: `value_of` as in
    `ShardFile.write`. Returns the entries of its files for the manifest."""
    files = list(files)
    entries = {INDEX: _write_index(folder, index_json(build_index(files)))}
    entries |= {file.name: file.write(folder, value_of) for file in files}
    return entries | write_meta(folder, meta)


def write_meta(folder: Path, meta: dict[str, Any]) -> dict[str, FileEntry]:
    """Writes meta.json into `folder`. Returns its entry for the manifest, by its name."""
    manifest.write_json(folder / META, meta)
    return {META: manifest.hash_file(folder / META)}


def _write_index(folder: Path, index: bytes) -> FileEntry:
    write_new(folder / INDEX, index)
    return manifest.hash_file(folder / INDEX)


class ShardWriter:
    """Writes tensors whose parts lie on many ranks, by one save plan for all saves of the same tensors."""

    def __init__(self, group: SaveGroup) -> None:
        self._group = group
        self._shapes: Shapes | None = None
        self._files: list[ShardFile] = []
        """Files of this rank."""
        self._index = b""
        """index.json; on rank 0 only."""

    def plan(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Makes the save plan, unless the one at hand is for such tensors. `copies`: this rank's part of each tensor.
        Called on all ranks. Raises SaveFailedError."""
        shapes: Shapes = {
            name: (tensor.shape, copies[name].shape, tensor.dtype, getattr(tensor, "placements", None))
            for name, tensor in tensors.items()
        }
        if self._group.agree(lambda: shapes == self._shapes, all):
            return
        self._shapes = None  # a failure below leaves no save plan
        held = self._group.gather(self._group.run(lambda: [part for part, _ in own_parts(tensors)]))
        own = self._group.scatter(_each_once(held))
        self._files = self._group.run(lambda: _files_of_rank(self._group.rank, own))
        files = self._group.gather(self._files)

        def index() -> bytes:
            everything = [part for parts in held for part in parts]
            return index_json(build_index((file for of_rank in files for file in of_rank), everything))

        self._index = self._group.run(lambda: index() if self._group.rank == 0 else b"")
        self._shapes = shapes

    def write(self, folder: Path, copies: Mapping[str, Tensor]) -> dict[str, FileEntry]:
        """Writes this rank's files into `folder`, each by a thread; rank 0 also writes the index. `copies`: this rank's
        part of each tensor, on the CPU. Returns the entries of the files for the manifest."""

        def write(file: ShardFile) -> FileEntry:
            return file.write(folder, lambda part: copies[part.name])

        entries = in_threads(write, self._files, len(self._files))
        written = {file.name: entry for file, entry in zip(self._files, entries, strict=True)}
        return written | ({INDEX: _write_index(folder, self._index)} if self._group.rank == 0 else {})


def _each_once(held: list[list[Part]]) -> list[list[Part]]:
    """Parts to be written by each rank, of those that the ranks hold: each part by one of the ranks that hold it, the
    one with the fewest bytes so far."""
    holders: dict[Part, list[int]] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            if part.nbytes:
                holders.setdefault(part, []).append(rank)
    written: list[list[Part]] = [[] for _ in held]
    sizes = [0] * len(held)
    for part, ranks in holders.items():
        # Copies of a weight are spread over the ranks that hold it; else rank 0 would write most.
        rank = min(ranks, key=sizes.__getitem__)
        written[rank].append(part)
        sizes[rank] += part.nbytes
    return written


def _files_of_rank(rank: int, parts: list[Part]) -> list[ShardFile]:
    """A file for each thread of the rank: `rank_0_0.safetensors`, `rank_0_1.safetensors` and so on."""
    return [
        ShardFile.from_parts(f"rank_{rank}_{number}.safetensors", some)
        for number, some in enumerate(evenly(parts, lambda part: part.nbytes))
    ]
