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
    long = TileShapes(TileShape(64, 64, 4, 3), TileShape(128, 128, 8, 3), dq, TileShape(64, 128, 8, 3))
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
    cuts = triton.cdiv(lists.chunks, max(1, limit // lists.chunk))
    together = triton.cdiv(lists.chunks, cuts)
    for head in range(kv_heads):
        for first in range(0, lists.chunks, together):
            chunks = slice(first, min(first + together, lists.chunks))
            begin = first * lists.chunk
            end = min(chunks.stop * lists.chunk, total)
            yield WorkRange(slice(head, head + 1), chunks, begin, end - begin)


@dataclass(frozen=True)
class TileTable:
    """The row tiles of a work range."""

    bound: int
    """Programs to start."""
    list_of_tile: Tensor
    """int32 [bound]: list of each tile, counted within the work range; number of lists for tiles that do not exist."""
    last_tile: Tensor
    """int32 [lists]: one past each list's last tile."""
    begin: Tensor
    end: Tensor
    """int [lists]: slice of `BlockLists.entries` that belongs to the work range."""

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `tile_of_program`: list_of_tile, last_tile, begin, end."""
        return self.list_of_tile, self.last_tile, self.begin, self.end


def tile_table(lists: BlockLists, work: WorkRange, kv_heads: int, rows: int, at_least: int = 0) -> TileTable:
    """Cut the lists of a work range into tiles of `rows` rows, empty lists into `at_least` (0 or 1)."""
    blocks = lists.lists // kv_heads
    mine = slice(work.kv_heads.start * blocks, work.kv_heads.stop * blocks)
    if lists.entries.numel():
        begin = lists.starts[:-1].view(lists.lists, lists.chunks)[mine, work.chunks.start].contiguous()
        end = lists.starts[1:].view(lists.lists, lists.chunks)[mine, work.chunks.stop - 1].contiguous()
    else:
        begin = end = torch.zeros(mine.stop - mine.start, dtype=torch.int32, device=lists.entries.device)
    bound = triton.cdiv(work.heads * work.entries, rows) + work.heads * blocks
    return cut_lists(begin, end, bound, rows, at_least)


def cut_lists(begin: Tensor, end: Tensor, bound: int, rows: int, at_least: int = 0) -> TileTable:
    """Cut lists into tiles of `rows` rows, at most `bound` in all; `begin`, `end`: int [lists]."""
    last_tile = torch.cumsum(((end - begin + (rows - 1)) // rows).clamp(min=at_least), 0, dtype=torch.int32)
    return TileTable(bound, _list_of(last_tile, bound), last_tile, begin, end)


def _list_of(last: Tensor, bound: int) -> Tensor:
    """int32 [bound]: the list of each tile, or the number of lists."""
    tiles = torch.arange(bound, dtype=torch.int32, device=last.device)
    return torch.searchsorted(last, tiles, right=True, out_int32=True)


@dataclass(frozen=True)
class ListSplitTable:
    """Lists cut into splits of many rows, so that a block that all queries selected keeps several programs busy."""

    bound: int
    """Programs to start."""
    order: Tensor
    """int64 [lists]: longest first."""
    rank_of_split: Tensor
    """int32 [bound]: each split's list, by its place in `order`; the number of lists for splits that do not exist."""
    last_split: Tensor
    """int32 [lists]: one past the last split of each list, lists in `order`."""
    splits: Tensor
    """int32 [lists]: number of splits of each list."""
    first_split: Tensor
    """int32 [lists]: number of each list's first split, lists in their own order."""


def split_table(table: TileTable, tiles: int) -> ListSplitTable:
    """Splits of `tiles` tiles each, of the lists of `table`."""
    splits = (steps(table.last_tile) + (tiles - 1)) // tiles
    order = torch.sort(table.end - table.begin, descending=True, stable=True).indices
    last_split = torch.cumsum(splits[order], 0, dtype=torch.int32)
    bound = triton.cdiv(table.bound, tiles) + splits.numel()
    return ListSplitTable(bound, order, _list_of(last_split, bound), last_split, splits, sums_before(splits))


def steps(last: Tensor) -> Tensor:
    """[n]: difference of each element and the one before."""
    return torch.diff(last, prepend=last.new_zeros(1))


def sums_before(counts: Tensor) -> Tensor:
    """int32 [n]: sum of all elements before each."""
    return torch.cumsum(counts, 0, dtype=torch.int32) - counts


@triton.jit
def tile_of_program(pid, list_of_tile, last_tile, begin, end, lists, M: tl.constexpr):
    """(list of the work range, first entry position, one past its last); `list >= lists`: nothing to do."""
    which = tl.load(list_of_tile + pid)
    safe = tl.minimum(which, lists - 1)
    before = tl.load(last_tile + safe - 1, mask=safe > 0, other=0)
    first = tl.load(begin + safe) + (pid - before) * M
    return which, first, tl.load(end + safe)
