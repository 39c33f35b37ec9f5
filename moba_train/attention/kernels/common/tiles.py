"""Tiles: their shapes, the ranges of work whose partial results are in memory together, and the rows of each program.

Rows of one list are cut into tiles of M; a program takes one. How many tiles there are is only known on the device, so
the grid is their upper bound, and programs beyond the last tile leave at once. One launch makes the tables of all work
ranges of a pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.launch import ceil_div, launch
from moba_train.attention.kernels.common.lists import BlockLists

_LISTS = 64
"""Lists of a program. It finds what comes before them by itself, from all other lists, so that one launch suffices."""
_FILL = 128
_ALIGNED = 4
"""Tables begin at multiples of 16 bytes: Triton compiles a kernel again for pointers of another alignment."""


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

    diagonal: TileShape
    forward: TileShape
    dq: TileShape
    dkdv: TileShape
    dkdv_diagonal: TileShape
    short_forward: TileShape | None = None
    """Shape of blocks_to_128.py; None: the block is too long."""
    short_backward: TileShape | None = None


SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program may have on data-center GPUs from Hopper on."""


@cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may have: 227 KiB on H100 and B200, 163 on A100, 99 on consumer cards."""
    if device.type != "cuda":
        return SHARED_MEMORY
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def tile_shapes(head_dim: int, block_size: int, shared_memory: int = SHARED_MEMORY) -> TileShapes:
    """The fastest shapes, from a small table: no autotuning, so equal calls always run equal code.

    The rate of long blocks is that of the matrix units; tiles are as large as registers allow. Short blocks have few
    keys to spread a gathered row's cost over, and lists of a few hundred rows; smaller tiles waste less at their ends
    and more programs hide the gathers' latency.
    """
    # Whole stages at 128K 4096/12 on an H200: forward 128x128x8x3 160 ms (others 162 to 229), dq 128x64x8x3 209 (216 to
    # 261), dk and dv packed 64x128x8x3 356 (64x64x4x2 395).
    dq = TileShape(128, 64, 8, 3) if head_dim == 128 else TileShape(128, 128, 8, 2)
    dkdv = TileShape(64, 128, 8, 3)
    # Diagonal blocks in 64x64 tiles with 4 warps: 4.9 ms at 64K 4096/12, 5.8 before. A shape of 64x64x4x2 for their dk
    # and dv was within the noise (0.26 and 0.27 ms at 8K 512/3; benchmarks/LOG.md, "Gradients").
    long = TileShapes(TileShape(64, 64, 4, 3), TileShape(128, 128, 8, 3), dq, dkdv, dkdv_diagonal=dkdv)
    few = shared_memory < SHARED_MEMORY and head_dim == 128
    if few:
        # Compiled for sm_80, 89 and 120 the shapes above need up to 160 KiB and spill up to 6.8 KB; these need 96 KiB,
        # and spill least of those tried. Not timed on such a GPU.
        square, tall = TileShape(64, 64, 8, 2), TileShape(128, 64, 8, 2)
        long = TileShapes(tall, tall, dq=square, dkdv=square, dkdv_diagonal=square)
    if block_size > 128:
        return long
    # One tile holds all keys. At 64K 128/8 the forward pass takes 4.7 ms by 128 rows (5.5 by other shapes), the
    # backward pass 10.2 by 32 rows, 11.6 by 64, which spill 330 bytes, and 20 or more with 16 warps.
    keys = 128 if block_size > 64 else 64
    rows, stages = (64, 2) if few else (128, 3)
    return replace(long, short_forward=TileShape(rows, keys, 8, stages), short_backward=TileShape(32, keys, 8, stages))


@dataclass(frozen=True)
class WorkRange:
    """Key/value heads and chunks of slots worked on at once: their partial results are in memory together."""

    kv_heads: slice
    chunks: slice
    first_slot: int
    """The first slot of the first chunk."""
    slots: int
    """Slots of each key/value head in these chunks, a multiple of G * HISTORY."""

    @property
    def heads(self) -> int:
        """Key/value heads."""
        return self.kv_heads.stop - self.kv_heads.start


def work_ranges(lists: BlockLists, kv_heads: int, limit: int) -> Iterator[WorkRange]:
    """Work ranges of at most about `limit` slots each: cut by key/value heads, then by queries."""
    total = lists.slots.numel() // kv_heads
    if total <= limit:
        # By heads first: heads share no sums, while ranges of queries add to the same dk and dv.
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


@dataclass(frozen=True)
class RowTiles:
    """The row tiles of some lists."""

    bound: int
    """Programs to start for all tiles."""
    list_of_tile: Tensor
    """int32 [bound]: list of each tile, counted within the work range; number of lists for tiles that do not exist."""
    last_tile: Tensor
    """int32 [lists]: one past each list's last tile."""
    begin: Tensor
    end: Tensor
    """int [lists]: slice of the slots that belongs to each list."""


def cut_lists(begin: Tensor, end: Tensor, bound: int, rows: int) -> RowTiles:
    """Cut lists into tiles of `rows` rows, at most `bound` in all; `begin`, `end`: int [lists]."""
    last_tile = torch.cumsum((end - begin + (rows - 1)) // rows, 0, dtype=torch.int32)
    tiles = torch.arange(bound, dtype=torch.int32, device=begin.device)
    return RowTiles(bound, torch.searchsorted(last_tile, tiles, right=True, out_int32=True), last_tile, begin, end)


@dataclass(frozen=True)
class TileTable(RowTiles):
    """The row tiles of a work range, and with them the splits of its lists.

    A split is some consecutive tiles, so that a block that all queries selected keeps several programs busy (128K
    512/8 with every head on block 0: 219 ms, then 108, as uniform routing; benchmarks/LOG.md); one tile, unless
    `tile_tables` was given `split_tiles`.
    """

    lists: int
    split_bound: int
    """Programs to start for all splits."""
    splits: Tensor
    """int32 [lists]: number of splits of each list."""
    first_split: Tensor
    """int32 [lists]: number of each list's first split. With `split_tiles` longest lists come first; without, only
    lists of several splits are counted, unless all are wanted."""
    list_of_split: Tensor
    """int32 [split_bound]: list of each split; number of lists for splits that do not exist."""


def tile_tables(
    lists: BlockLists,
    parts: list[WorkRange],
    kv_heads: int,
    rows: int,
    *,
    at_least: int = 0,
    split_tiles: int = 0,
    count_all: bool = False,
) -> list[TileTable]:
    """Cut the lists of each of the `work_ranges` into tiles of `rows` rows, empty lists into `at_least` (0 or 1).

    `split_tiles`: tiles of a split; 0: one, and then `count_all` numbers the splits of all lists, not only those of
    lists with several.
    """
    blocks = lists.lists // kv_heads
    first = parts[0]
    cuts = sum(work.kv_heads == first.kv_heads for work in parts)
    lists_of = [work.heads * blocks for work in parts]
    sizes = [(most, ceil_div(work.heads * work.slots, rows) + most) for most, work in zip(lists_of, parts, strict=True)]
    # Equal widths for all work ranges, so that one launch writes the tables of all of them: 8K 512/3 went from 73
    # launches of a layer to 20 (benchmarks/LOG.md, "Selection and lists").
    most_lists, bound = (_aligned(max(counts)) for counts in zip(*sizes, strict=True))
    split_bound = _aligned(ceil_div(bound, split_tiles) + most_lists) if split_tiles else 0
    ends = torch.empty(len(parts), 2, most_lists, dtype=lists.starts.dtype, device=lists.starts.device)
    numbers = torch.empty(
        len(parts), bound + 3 * most_lists + split_bound, dtype=torch.int32, device=lists.starts.device
    )
    launch(
        _tile_tables,
        (ceil_div(most_lists, _LISTS), len(parts)),
        starts=lists.starts,
        ends=ends,
        numbers=numbers,
        slot_count=lists.slots.numel(),
        blocks=blocks,
        kv_heads=kv_heads,
        together=first.heads,
        cuts=cuts,
        chunks=lists.chunks,
        chunks_together=first.chunks.stop - first.chunks.start,
        most_lists=most_lists,
        bound=bound,
        split_bound=split_bound,
        split_tiles=split_tiles,
        RANKED=split_tiles > 0,
        COUNTED=1 if count_all else 2,
        AT_LEAST=at_least,
        ROWS=rows,
        LISTS=_LISTS,
        FILL=_FILL,
    )
    tables = []
    for (count, tiles), two, mine in zip(sizes, ends.unbind(0), numbers.unbind(0), strict=True):
        begin, end = two.unbind(0)
        of_tile, last_tile, splits, first_split, of_split = mine.split(
            [bound, most_lists, most_lists, most_lists, split_bound]
        )
        split_programs = ceil_div(tiles, split_tiles) + count if split_tiles else tiles
        tables.append(
            TileTable(tiles, of_tile, last_tile, begin, end, count, split_programs, splits, first_split, of_split)
        )
    return tables


def _aligned(count: int) -> int:
    return ceil_div(count, _ALIGNED) * _ALIGNED


@triton.jit
def _begin_and_end(starts, lists_at, which, ok, chunks, first_chunk, last_chunk):
    """Begin and end of lists in a range of chunks; 0, 0 for lists that are not `ok`."""
    at = starts + (lists_at + which).to(tl.int64) * chunks
    return tl.load(at + first_chunk, mask=ok, other=0), tl.load(at + last_chunk, mask=ok, other=0)


@triton.jit
def _tile_count(begin, end, exists, ROWS: tl.constexpr, AT_LEAST: tl.constexpr):
    return tl.where(exists, tl.maximum(tl.cdiv((end - begin).to(tl.int32), ROWS), AT_LEAST), 0)


@triton.jit(
    do_not_specialize=[
        *("slot_count", "blocks", "kv_heads", "together", "cuts", "chunks", "chunks_together", "most_lists", "bound"),
        *("split_bound", "split_tiles"),
    ]
)
def _tile_tables(
    starts, ends, numbers, slot_count, blocks, kv_heads, together, cuts, chunks, chunks_together, most_lists, bound,
    split_bound, split_tiles,
    RANKED: tl.constexpr, COUNTED: tl.constexpr, AT_LEAST: tl.constexpr, ROWS: tl.constexpr, LISTS: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """The tables of LISTS lists of one work range: `together` key/value heads, a range of `chunks_together` chunks."""
    work = tl.program_id(1)
    first_head = work // cuts * together
    lists = tl.minimum(together, kv_heads - first_head) * blocks
    first_chunk = work % cuts * chunks_together
    last_chunk = tl.minimum(first_chunk + chunks_together, chunks)
    first_list = tl.program_id(0) * LISTS
    lane = tl.arange(0, LISTS)
    mine = first_list + lane
    ok = (mine < lists) & (slot_count > 0)  # without slots, `starts` has no list
    begin, end = _begin_and_end(starts, first_head * blocks, mine, ok, chunks, first_chunk, last_chunk)
    tiles = _tile_count(begin, end, mine < lists, ROWS, AT_LEAST)

    before = 0
    first_split = tl.zeros([LISTS], tl.int32)
    all_splits = 0
    # Every program sums up what comes before its lists by itself: a scan over programs would be another launch.
    for first in range(0, lists if RANKED else first_list, LISTS):
        other = first + lane
        ok = (other < lists) & (slot_count > 0)
        its_begin, its_end = _begin_and_end(starts, first_head * blocks, other, ok, chunks, first_chunk, last_chunk)
        its_tiles = _tile_count(its_begin, its_end, other < lists, ROWS, AT_LEAST)
        before += tl.sum(tl.where(other < first_list, its_tiles, 0))
        # The longest first, of equally long lists the first: else 32K 512/3 takes 11.1 ms instead of 10.5 (LOG.md).
        if RANKED:
            length = its_end - its_begin
            longer = length[None, :] > (end - begin)[:, None]
            longer = longer | ((length[None, :] == (end - begin)[:, None]) & (other[None, :] < mine[:, None]))
            splits = tl.cdiv(its_tiles, split_tiles)
            first_split += tl.sum(tl.where(longer, splits[None, :], 0), 1)
            all_splits += tl.sum(splits)
        else:
            first_split += tl.sum(tl.where(its_tiles >= COUNTED, its_tiles, 0))
    last_tile = before + tl.cumsum(tiles, 0)
    total = before + tl.sum(tiles)
    if RANKED:
        splits = tl.cdiv(tiles, split_tiles)
    else:
        splits = tiles
        several = tl.where(tiles >= COUNTED, tiles, 0)
        first_split += tl.cumsum(several, 0) - several

    exists = mine < most_lists
    ends_at = ends + work.to(tl.int64) * 2 * most_lists + mine
    tl.store(ends_at, begin, mask=exists)
    tl.store(ends_at + most_lists, end, mask=exists)
    of_tile = numbers + work.to(tl.int64) * (bound + 3 * most_lists + split_bound)
    of_list = of_tile + bound + mine
    tl.store(of_list, last_tile, mask=exists)
    tl.store(of_list + most_lists, splits, mask=exists)
    tl.store(of_list + 2 * most_lists, first_split, mask=exists)

    is_last = tl.program_id(0) == tl.num_programs(0) - 1
    for first in range(before, total, FILL):
        tile = first + tl.arange(0, FILL)
        which = first_list + tl.sum((last_tile[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(of_tile + tile, which, mask=tile < total)
    # Programs past the last tile must find a list that does not exist: the table is uninitialised memory.
    for first in range(total, bound if is_last else total, 1024):
        tile = first + tl.arange(0, 1024)
        tl.store(of_tile + tile, tl.zeros([1024], tl.int32) + lists, mask=tile < bound)
    if RANKED:
        of_split = of_tile + bound + 3 * most_lists
        for number in range(0, tl.max(splits)):
            tl.store(of_split + first_split + number, mine, mask=number < splits)
        for first in range(all_splits, split_bound if is_last else all_splits, 1024):
            split = first + tl.arange(0, 1024)
            tl.store(of_split + split, tl.zeros([1024], tl.int32) + lists, mask=split < split_bound)


@triton.jit
def tile_of_program(pid, list_of_tile, last_tile, begin, end, lists, M: tl.constexpr):
    """(list of the work range, its first position among the slots, one past its last); `list >= lists`: nothing to
    do."""
    which = tl.load(list_of_tile + pid)
    safe = tl.minimum(which, lists - 1)
    before = tl.load(last_tile + safe - 1, mask=safe > 0, other=0)
    first = tl.load(begin + safe) + (pid - before) * M
    return which, first, tl.load(end + safe)
