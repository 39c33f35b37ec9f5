"""Tile shapes, and which program works on which rows.

Rows of one list are cut into tiles of M; a program takes one. How many tiles there are is only known on the device, so
the grid is their upper bound, and programs beyond the last tile leave at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.moba.triton.lists import Lists


@dataclass(frozen=True)
class Shape:
    """Rows and keys of a tile, warps and pipeline stages of its program."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Shapes:
    """One for each kernel that multiplies matrices."""

    own: Shape
    forward: Shape
    dq: Shape
    dkdv: Shape
    short_forward: Shape | None = None
    """Of short.py; None: the block is too long."""
    short_backward: Shape | None = None


def shapes(head_dim: int, block_size: int) -> Shapes:
    """What is fastest, from a small table: no autotuning, so the same call always runs the same code.

    The rate of long blocks is that of the matrix units; tiles are as large as registers allow. Short blocks have few
    keys to spread a gathered row's cost over, and lists of a few hundred rows; smaller tiles waste less at their ends
    and more programs hide the gathers' latency.
    """
    dq = Shape(128, 64, 8, 3) if head_dim == 128 else Shape(128, 128, 8, 2)
    long = Shapes(Shape(64, 64, 4, 3), Shape(128, 128, 8, 3), dq, Shape(64, 128, 8, 3))
    if block_size > 128:
        return long
    keys = 128 if block_size > 64 else 64
    return replace(long, short_forward=Shape(128, keys, 8, 3), short_backward=Shape(32, keys, 8, 3))


@dataclass(frozen=True)
class Segment:
    """Key/value heads and chunks of entries worked on at once: what partial results must be stored for."""

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


def segments(lists: Lists, kv_heads: int, limit: int) -> Iterator[Segment]:
    """Cut the work so that at most about `limit` entries are under way: by key/value heads, then by queries."""
    total = lists.entries.numel() // kv_heads
    if total <= limit:
        together = min(kv_heads, max(1, limit // max(total, 1)))
        for first in range(0, kv_heads, together):
            heads = slice(first, min(first + together, kv_heads))
            yield Segment(heads, slice(0, lists.chunks), 0, total)
        return
    cuts = triton.cdiv(lists.chunks, max(1, limit // lists.chunk))
    together = triton.cdiv(lists.chunks, cuts)
    for head in range(kv_heads):
        for first in range(0, lists.chunks, together):
            chunks = slice(first, min(first + together, lists.chunks))
            begin, end = first * lists.chunk, min(chunks.stop * lists.chunk, total)
            yield Segment(slice(head, head + 1), chunks, begin, end - begin)


@dataclass(frozen=True)
class TileTable:
    """The row tiles of a segment."""

    bound: int
    """Programs to start."""
    list_of_tile: Tensor
    """int32 [bound]: list of each tile, counted within the segment; the number of lists for tiles that do not exist."""
    last_tile: Tensor
    """int32 [lists]: one past each list's last tile."""
    begin: Tensor
    end: Tensor
    """int [lists]: slice of `Lists.entries` that belongs to the segment."""

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `tile_of_program` reads: list_of_tile, last_tile, begin, end."""
        return self.list_of_tile, self.last_tile, self.begin, self.end


def tile_table(lists: Lists, segment: Segment, kv_heads: int, rows: int, at_least: int = 0) -> TileTable:
    """Cut the lists of a segment into tiles of `rows` rows, empty lists into `at_least` (0 or 1)."""
    blocks = lists.lists // kv_heads
    mine = slice(segment.kv_heads.start * blocks, segment.kv_heads.stop * blocks)
    if lists.entries.numel():
        begin = lists.starts[:-1].view(lists.lists, lists.chunks)[mine, segment.chunks.start].contiguous()
        end = lists.starts[1:].view(lists.lists, lists.chunks)[mine, segment.chunks.stop - 1].contiguous()
    else:
        begin = end = torch.zeros(mine.stop - mine.start, dtype=torch.int32, device=lists.entries.device)
    bound = triton.cdiv(segment.heads * segment.entries, rows) + segment.heads * blocks
    last_tile = torch.cumsum(((end - begin + (rows - 1)) // rows).clamp(min=at_least), 0, dtype=torch.int32)
    return TileTable(bound, _list_of(last_tile, bound), last_tile, begin, end)


def _list_of(last: Tensor, bound: int) -> Tensor:
    """int32 [bound]: the list of each tile, or the number of lists."""
    tiles = torch.arange(bound, dtype=torch.int32, device=last.device)
    return torch.searchsorted(last, tiles, right=True, out_int32=True)


@dataclass(frozen=True)
class SpanTable:
    """Lists cut into spans of many rows, so that one that everyone chose keeps several programs busy."""

    bound: int
    """Programs to start."""
    order: Tensor
    """int64 [lists]: longest first."""
    rank_of_span: Tensor
    """int32 [bound]: each span's list, by its place in `order`; the number of lists for spans that do not exist."""
    last_span: Tensor
    """int32 [lists]: one past the last span of each list, in that order."""
    spans: Tensor
    """int32 [lists]: how many there are of each list."""
    slots: Tensor
    """int32 [lists]: number of each list's first span, lists in their own order."""


def span_table(table: TileTable, tiles: int) -> SpanTable:
    """Spans of `tiles` tiles each, of the lists of `table`."""
    spans = (steps(table.last_tile) + (tiles - 1)) // tiles
    order = torch.sort(table.end - table.begin, descending=True, stable=True).indices
    last_span = torch.cumsum(spans[order], 0, dtype=torch.int32)
    bound = triton.cdiv(table.bound, tiles) + spans.numel()
    return SpanTable(bound, order, _list_of(last_span, bound), last_span, spans, sums_before(spans))


def steps(last: Tensor) -> Tensor:
    """[n]: by how much each is more than the one before."""
    return torch.diff(last, prepend=last.new_zeros(1))


def sums_before(counts: Tensor) -> Tensor:
    """int32 [n]: the sum of all before each."""
    return torch.cumsum(counts, 0, dtype=torch.int32) - counts


@triton.jit
def tile_of_program(pid, list_of_tile, last_tile, begin, end, lists, M: tl.constexpr):
    """(list of this segment, first entry position, one past its last); `list >= lists`: nothing to do."""
    which = tl.load(list_of_tile + pid)
    safe = tl.minimum(which, lists - 1)
    before = tl.load(last_tile + safe - 1, mask=safe > 0, other=0)
    first = tl.load(begin + safe) + (pid - before) * M
    return which, first, tl.load(end + safe)
