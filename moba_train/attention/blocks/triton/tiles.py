"""Tile shapes, and the ranges of work whose partial results are in memory together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moba_train.attention.blocks.triton.launch import ceil_div
from moba_train.attention.blocks.triton.lists import BlockLists


@dataclass(frozen=True)
class TileShape:
    """Rows and keys of a tile, warps and pipeline stages of its program."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TileShapes:
    """The tile shape of each kernel that multiplies matrices."""

    own: TileShape
    forward: TileShape
    dq: TileShape
    dkdv: TileShape
    dkdv_own: TileShape
    short_forward: TileShape | None = None
    """For short_blocks.py; None: the block is too long."""
    short_backward: TileShape | None = None


def tile_shapes(head_dim: int, block_size: int) -> TileShapes:
    """The fastest shapes, from a small table: no autotuning, so equal calls always run equal code.

    The rate of long blocks is that of the matrix units; tiles are as large as registers allow. Short blocks have few
    keys to spread a gathered row's cost over, and lists of a few hundred rows; smaller tiles waste less at their ends
    and more programs hide the gathers' latency.
    """
    dq = TileShape(128, 64, 8, 3) if head_dim == 128 else TileShape(128, 128, 8, 2)
    dkdv = TileShape(64, 128, 8, 3)
    long = TileShapes(TileShape(64, 64, 4, 3), TileShape(128, 128, 8, 3), dq, dkdv, dkdv_own=dkdv)
    if block_size > 128:
        return long
    keys = 128 if block_size > 64 else 64
    return replace(long, short_forward=TileShape(128, keys, 8, 3), short_backward=TileShape(32, keys, 8, 3))


@dataclass(frozen=True)
class WorkRange:
    """Key/value heads and chunks of entries worked on at once: their partial results are in memory together."""

    kv_heads: slice
    chunks: slice
    first_entry: int
    """The first entry of the first chunk."""
    entries: int
    """Entries of each key/value head in these chunks, a multiple of G * C."""

    @property
    def heads(self) -> int:
        """Key/value heads."""
        return self.kv_heads.stop - self.kv_heads.start


def work_ranges(lists: BlockLists, kv_heads: int, limit: int) -> Iterator[WorkRange]:
    """Work ranges of at most about `limit` entries each: cut by key/value heads, then by queries."""
    total = lists.entries.numel() // kv_heads
    if total <= limit:
        together = min(kv_heads, max(1, limit // max(total, 1)))
        for first in range(0, kv_heads, together):
            heads = slice(first, min(first + together, kv_heads))
            yield WorkRange(heads, slice(0, lists.chunks), 0, total)
        return
    cuts = ceil_div(lists.chunks, max(1, limit // lists.chunk))
    together = ceil_div(lists.chunks, cuts)
    for head in range(kv_heads):
        for first in range(0, lists.chunks, together):
            chunks = slice(first, min(first + together, lists.chunks))
            begin = first * lists.chunk
            end = min(chunks.stop * lists.chunk, total)
            yield WorkRange(slice(head, head + 1), chunks, begin, end - begin)
