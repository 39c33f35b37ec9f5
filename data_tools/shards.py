"""Shards: the input split into parts of similar size, each of which any process can read by itself.

The shards are a pure function of the files, so any number of processes can do the work, and it can be stopped and
continued.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

SHARD_BYTES = (256 << 10, 64 << 20)
"""Smallest and largest target size of a shard."""
SHARDS = 512
"""Target number of shards, as far as `SHARD_BYTES` allows."""


@dataclass(frozen=True)
class Chunk:
    """The lines of a JSON lines file that begin in bytes [start, stop); any other file is one chunk."""

    path: str
    start: int
    stop: int


Shard = tuple[Chunk, ...]


def cut_shards(files: Sequence[str]) -> list[Shard]:
    """Split `files`, in order, into about `SHARDS` shards of similar size in bytes, within the limits `SHARD_BYTES`."""
    sizes = [os.path.getsize(file) for file in files]
    limit = min(max(sum(sizes) // SHARDS, SHARD_BYTES[0]), SHARD_BYTES[1])
    shards: list[Shard] = []
    open_shard: list[Chunk] = []
    room = limit
    for file, size in zip(files, sizes, strict=True):
        # Only plain JSON lines can be read from the middle of a file.
        step = limit if file.endswith(".jsonl") else max(size, 1)
        for start in range(0, size, step):
            chunk = Chunk(file, start, min(start + step, size))
            open_shard.append(chunk)
            room -= chunk.stop - chunk.start
            if room <= 0:
                shards.append(tuple(open_shard))
                open_shard = []
                room = limit
    return [*shards, tuple(open_shard)] if open_shard else shards


def shard_bytes(shard: Shard) -> int:
    """Size of a shard in bytes."""
    return sum(chunk.stop - chunk.start for chunk in shard)
