"""The tables that kernels read: for each block and key/value head the query slots that selected it, and the rows of
each block.

A *row* is one query of one head. Inside a key/value head, row `t * G + g` is head g of its group at token t, and *slot*
`(t * G + g) * HISTORY + j` stands for that row's j-th selected block. The lists are in CSR form: the slots of all lists
one after the other, and where each list starts; list `kv_head * blocks + block` has the slots that selected the block.

Three documents of 5, 3 and 9 tokens in blocks of 4, two query heads that share a key/value head, topk 2: each query
selects one history block; the diagonal block is attended to in any case and not listed. Blocks start with each
document; the host knows an upper bound of their number, 7, of which 6 exist.

>>> import torch
>>> from moba_train.attention.kernels.common.geometry import block_bound, block_edges, block_ids
>>> from moba_train.attention.layout import packed_layout
>>> layout = packed_layout([5, 3, 9])
>>> block_ids(layout.q_tokens, layout.q_documents, layout, 4).tolist()
[0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5]
>>> block_edges(layout, 4).tolist(), block_bound(layout, 4)
([0, 4, 5, 8, 12, 16, 17, 17], 7)

Queries in a document's first block have no history. The others select a block before theirs; the two heads of token 16
may choose.

>>> selected_HTC = torch.full((2, 17, 1), -1, dtype=torch.int32)
>>> selected_HTC[:, 4], selected_HTC[:, 12:16] = 0, 3
>>> selected_HTC[:, 16] = torch.tensor([[4], [3]])

Slot `(t * 2 + g) * 1 + j` is 8 and 9 for token 4, 24 to 31 for tokens 12 to 15, 32 and 33 for token 16. Sorted by
block, stably, they are the lists of blocks 0, 3 and 4; the other blocks have none.

>>> block_of_slot = selected_HTC.transpose(0, 1).flatten()
>>> slots = block_of_slot.argsort(stable=True)[(block_of_slot < 0).sum() :]
>>> slots.tolist()
[8, 9, 24, 25, 26, 27, 28, 29, 30, 31, 33, 32]
>>> [0, *torch.bincount(block_of_slot[slots], minlength=7).cumsum(0).tolist()]
[0, 2, 2, 2, 11, 12, 12, 12]

`invert` makes the same lists by a counting sort. Slots are cut into chunks. Each chunk counts how often it names each
block (integer atomics: the sums do not depend on their order); after a prefix sum over (key/value head, block, chunk),
in two launches, each chunk scatters its slots, in order. So a list ascends, its part that comes from a range of chunks
(a range of queries) is one slice, and nothing depends on timing.

Queries and keys may each be a part of the sequence (a shard, made of token ranges). A block is consecutive tokens, so
its given rows are consecutive; where it also lies in one range, its rows and its tokens differ by one number.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_bound, first_blocks, rows_before
from moba_train.attention.kernels.common.launch import ceil_div, launch
from moba_train.attention.layout import Layout, TokenRanges, kept

_TILE = 64
"""Slots ranked at once, by one warp; ranking compares each with each. Lists of 128 slots by four warps took 2.43 ms
instead of 0.61 (benchmarks/LOG.md)."""
_SCANNED = 32
"""Chunks and blocks whose counts are summed at once."""


@dataclass(frozen=True)
class BlockLists:
    """The inverse of a selection, in CSR form."""

    slots: Tensor
    """int32 [K * T * G * C]: the slots of list 0, list 1, ...; unused at the end."""
    starts: Tensor
    """int [lists * chunks + 1]: where list l's slots from chunk c begin, at index l * chunks + c."""
    chunks: int
    chunk: int
    """Slots per chunk."""
    lists: int

    @classmethod
    def from_tensors(
        cls, slots: Tensor, starts: Tensor, selected_HTC: Tensor, kv_heads: int, blocks: int
    ) -> "BlockLists":
        """Lists of what `invert` returned for this selection."""
        heads, tokens, history_blocks = selected_HTC.shape
        lists = kv_heads * blocks
        return cls(slots, starts, *chunking(tokens, heads // kv_heads * history_blocks, lists), lists)


def chunking(tokens: int, row_slots: int, lists: int) -> tuple[int, int]:
    """(chunks, slots per chunk) of one key/value head; a chunk is whole tokens, `row_slots` = G * HISTORY slots each.

    Up to 256 chunks per head keep all multiprocessors busy; `starts` stays below 64 MiB even for very many lists.
    """
    wanted = max(1, min(256, tokens * row_slots // 1024, 2**24 // max(lists, 1)))
    chunk_tokens = max(1, ceil_div(tokens, wanted))
    return max(1, ceil_div(tokens, chunk_tokens)), chunk_tokens * row_slots


def empty_inverse(selected_HTC: Tensor, kv_heads: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Uninitialised (slots, starts) for selected blocks of this shape, int32 [H, T, C]."""
    heads, tokens, history_blocks = selected_HTC.shape
    if history_blocks == 0 or tokens == 0:
        return selected_HTC.new_empty(0), selected_HTC.new_empty(1)
    lists = kv_heads * blocks
    chunks, _ = chunking(tokens, heads // kv_heads * history_blocks, lists)
    # Half the bytes wherever they suffice.
    start = torch.int32 if selected_HTC.numel() < 2**31 else torch.int64
    return selected_HTC.new_empty(selected_HTC.numel()), selected_HTC.new_empty(lists * chunks + 1, dtype=start)


def invert(selected_HTC: Tensor, kv_heads: int, blocks: int) -> tuple[Tensor, Tensor]:
    """The (slots, starts) of `BlockLists` for selected blocks: int32 [H, T, C], -1 = none."""
    heads, tokens, history_blocks = selected_HTC.shape
    group = heads // kv_heads
    lists = kv_heads * blocks
    if history_blocks == 0 or tokens == 0:
        slots, starts = empty_inverse(selected_HTC, kv_heads, blocks)
        return slots, starts.zero_()
    chunks, chunk = chunking(tokens, group * history_blocks, lists)
    if chunks * chunk >= 2**31:  # the kernels count to the end of the last chunk in int32
        given = tokens * group * history_blocks
        raise ValueError(
            f"{history_blocks} history blocks for each of {tokens} tokens and {group} query heads of a key/value head "
            f"are {given} entries; fewer than {2**31}, up to rounding, allowed: select fewer blocks (topk), or set "
            "parallel.cp"
        )
    slots, starts = empty_inverse(selected_HTC, kv_heads, blocks)
    device = selected_HTC.device
    # Chunk by chunk for `_count` and `_scatter`, so that a chunk's counters share cache lines; `starts` is list by
    # list.
    counts_KCN = torch.empty(kv_heads, chunks, blocks, dtype=torch.int32, device=device)
    cursor_KCN = torch.empty_like(counts_KCN, dtype=starts.dtype)
    totals = torch.empty(lists, dtype=torch.int32, device=device)
    by_chunk, by_block = (chunks, kv_heads), (ceil_div(blocks, _SCANNED), kv_heads)
    # One warp: ranking 64 slots against each other needs no exchange between warps.
    sizes = {"G": group, "HISTORY": history_blocks, "TILE": _TILE, "num_warps": 1}
    tile = {"CHUNKS": _SCANNED, "BLOCKS": _SCANNED}
    launch(
        _count, by_chunk, selected=selected_HTC, counts=counts_KCN, tokens=tokens, blocks=blocks, chunk=chunk, **sizes
    )
    launch(_sum_chunks, by_block, counts=counts_KCN, totals=totals, blocks=blocks, chunks=chunks, **tile)
    launch(
        _find_starts,
        by_block,
        counts=counts_KCN,
        totals=totals,
        cursors=cursor_KCN,
        starts=starts,
        blocks=blocks,
        chunks=chunks,
        **tile,
    )
    launch(
        _scatter,
        by_chunk,
        selected=selected_HTC,
        cursors=cursor_KCN,
        slots=slots,
        tokens=tokens,
        blocks=blocks,
        chunk=chunk,
        **sizes,
    )
    return slots, starts


@triton.jit
def _selected_block(selected, slot, stop, kv_head, tokens, G: tl.constexpr, HISTORY: tl.constexpr):
    """The selected blocks of these slots; -1 for none, and from `stop` on."""
    row, j = slot // HISTORY, slot % HISTORY
    token, head = row // G, kv_head * G + row % G
    at = (head.to(tl.int64) * tokens + token) * HISTORY + j
    return tl.load(selected + at, mask=(slot < stop) & (token < tokens), other=-1)


@triton.jit(do_not_specialize=["tokens", "blocks", "chunk"])
def _count(selected, counts, tokens, blocks, chunk, G: tl.constexpr, HISTORY: tl.constexpr, TILE: tl.constexpr):
    which, kv_head = tl.program_id(0), tl.program_id(1)
    mine = counts + (kv_head.to(tl.int64) * tl.num_programs(0) + which) * blocks
    for first in range(0, blocks, 1024):
        block = first + tl.arange(0, 1024)
        tl.store(mine + block, tl.zeros([1024], tl.int32), mask=block < blocks)
    # Within the program alone, which is enough: no other one touches its chunk's counters.
    tl.debug_barrier()  # all counters are zero before any is raised
    start = which * chunk
    for first in range(start, start + chunk, TILE):
        block = _selected_block(selected, first + tl.arange(0, TILE), start + chunk, kv_head, tokens, G, HISTORY)
        # Integers: the sum does not depend on the order, unlike that of floating-point atomics.
        tl.atomic_add(mine + block, 1, mask=block >= 0, sem="relaxed")


@triton.jit
def _counts_of(counts, kv_head, first, block, blocks, chunks, CHUNKS: tl.constexpr):
    """(counts [chunks, blocks] of a tile, the tile's chunks, where it exists)."""
    chunk = first + tl.arange(0, CHUNKS)
    exists = (chunk < chunks)[:, None] & (block < blocks)[None, :]
    at = (kv_head * chunks + chunk).to(tl.int64)[:, None] * blocks + block[None, :]
    return tl.load(counts + at, mask=exists, other=0), at, chunk, exists


@triton.jit(do_not_specialize=["blocks", "chunks"])
def _sum_chunks(counts, totals, blocks, chunks, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr):
    """totals [key/value heads, blocks]: slots of each list."""
    kv_head = tl.program_id(1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    total = tl.zeros([BLOCKS], tl.int32)
    for first in range(0, chunks, CHUNKS):
        count, _, _, _ = _counts_of(counts, kv_head, first, block, blocks, chunks, CHUNKS)
        total += tl.sum(count, 0)
    tl.store(totals + kv_head * blocks + block, total, mask=block < blocks)


@triton.jit(do_not_specialize=["blocks", "chunks"])
def _find_starts(counts, totals, cursors, starts, blocks, chunks, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Begin of each list's slots from each chunk: starts [lists, chunks] and one past the last; cursors alike, but
    [key/value heads, chunks, blocks]."""
    kv_head = tl.program_id(1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    first_list = kv_head * blocks + tl.program_id(0) * BLOCKS
    begin = tl.zeros([BLOCKS], starts.dtype.element_ty)
    # Sums of all lists before, again by every program: cheaper than a third launch for a scan.
    for first in range(0, first_list, 1024):
        which = first + tl.arange(0, 1024)
        begin += tl.sum(tl.load(totals + which, mask=which < first_list, other=0).to(starts.dtype.element_ty))
    total = tl.load(totals + kv_head * blocks + block, mask=block < blocks, other=0).to(starts.dtype.element_ty)
    begin += tl.cumsum(total, 0) - total
    for first in range(0, chunks, CHUNKS):
        count, at, chunk, exists = _counts_of(counts, kv_head, first, block, blocks, chunks, CHUNKS)
        count = count.to(starts.dtype.element_ty)
        start = begin[None, :] + tl.cumsum(count, 0) - count
        tl.store(cursors + at, start, mask=exists)
        which = (kv_head * blocks + block).to(tl.int64)[None, :] * chunks + chunk[:, None]
        tl.store(starts + which, start, mask=exists)
        begin += tl.sum(count, 0)
    lists = tl.num_programs(1) * blocks
    # The last entry says where the last list ends; exactly one program has it.
    is_last = kv_head * blocks + block == lists - 1
    tl.store(starts + lists.to(tl.int64) * chunks + block * 0, begin, mask=is_last & (block < blocks))


@triton.jit(do_not_specialize=["tokens", "blocks", "chunk"])
def _scatter(
    selected, cursors, slots, tokens, blocks, chunk, G: tl.constexpr, HISTORY: tl.constexpr, TILE: tl.constexpr
):
    which, kv_head = tl.program_id(0), tl.program_id(1)
    mine = cursors + (kv_head.to(tl.int64) * tl.num_programs(0) + which) * blocks
    i = tl.arange(0, TILE)
    start = which * chunk
    for first in range(start, start + chunk, TILE):
        slot = first + i
        block = _selected_block(selected, slot, start + chunk, kv_head, tokens, G, HISTORY)
        same = (block[:, None] == block[None, :]).to(tl.int32)
        # How many earlier slots of this tile name the same block: this makes the sort stable, so that lists ascend.
        rank = tl.sum(tl.where(i[None, :] < i[:, None], same, 0), 1)
        count = tl.sum(same, 1)
        used = block >= 0
        # Past the first-level cache: the cursors change from tile to tile.
        cursor = tl.load(mine + block, mask=used, other=0, cache_modifier=".cg")
        tl.store(slots + cursor.to(tl.int64) + rank, slot, mask=used)
        tl.debug_barrier()  # every cursor is read before any moves on
        tl.store(mine + block, cursor + count, mask=used & (rank == count - 1))
        tl.debug_barrier()


@dataclass(frozen=True)
class BlockTables:
    """The documents and blocks of a layout, as kernels read them."""

    blocks: int
    """Upper bound of the number of blocks, known on the host."""
    block_T: Tensor
    """int32 [T]: each token's block, diagonal for its query."""
    first_T: Tensor
    """int32 [T]: the first block of each token's document."""
    bounds: Tensor
    """int32 [blocks, 6]: first row of q, one past the last, token minus row; then these three for the rows of k. First
    and last are equal for blocks without given rows and for ids that name no block."""


@kept
def block_tables(layout: Layout, block_size: int) -> BlockTables:
    """The tables of a layout."""
    blocks = block_bound(layout, block_size)
    tokens = layout.total
    device = layout.cu_seqlens.device
    documents = layout.cu_seqlens.numel() - 1
    first = first_blocks(layout.cu_seqlens, block_size).to(torch.int32)
    block_T, first_T = (torch.empty(tokens, dtype=torch.int32, device=device) for _ in range(2))
    bounds = torch.empty(blocks, 6, dtype=torch.int32, device=device)
    steps = documents.bit_length()
    size = 256
    if tokens:
        launch(
            _token_tables,
            (ceil_div(tokens, size),),
            cu_seqlens=layout.cu_seqlens,
            first=first,
            block_of=block_T,
            first_of=first_T,
            tokens=tokens,
            documents=documents,
            block_size=block_size,
            steps=steps,
            SIZE=size,
        )
    if blocks:
        launch(
            _block_bounds,
            (ceil_div(blocks, size),),
            cu_seqlens=layout.cu_seqlens,
            first=first,
            bounds=bounds,
            blocks=blocks,
            documents=documents,
            block_size=block_size,
            steps=steps,
            SIZE=size,
        )
    if layout.q_ranges is not None:
        # Tables are made for the whole sequence and then cut: the kernels above need no case for shards.
        block_T, first_T = block_T[layout.q_tokens], first_T[layout.q_tokens]
        bounds[:, :3] = _rows_of(bounds[:, :2].clone(), layout.q_ranges)
    if layout.k_ranges is not None:
        bounds[:, 3:] = _rows_of(bounds[:, 3:5].clone(), layout.k_ranges)
    return BlockTables(blocks, block_T, first_T, bounds)


def _rows_of(tokens_N2: Tensor, ranges: TokenRanges) -> Tensor:
    """[blocks, 3] for a part made of `ranges`, from each block's first token and one past its last."""
    rows_N2 = rows_before(tokens_N2, ranges)
    token_N = tokens_N2[:, 1].clone()
    # From the last range on, so that what stays is the first range that holds a part of the block.
    for start, stop in reversed(ranges):
        here = (tokens_N2[:, 0] < stop) & (tokens_N2[:, 1] > start)
        token_N = torch.where(here, tokens_N2[:, 0].clamp(min=start), token_N)
    return torch.cat([rows_N2, (token_N - rows_N2[:, 0])[:, None]], 1)


@triton.jit
def _document_of(edges, x, documents, steps):
    """Largest i < documents with edges[i] <= x, so that empty documents own nothing (edges ascend, edges[0] = 0)."""
    low = tl.zeros_like(x)
    high = low + documents
    for _ in range(steps):
        middle = (low + high) // 2
        inside = middle > low
        below = tl.load(edges + middle, mask=inside, other=0) <= x
        high = tl.where(inside & (below == 0), middle, high)
        low = tl.where(inside & below, middle, low)
    return low


@triton.jit(do_not_specialize=["tokens", "documents", "steps"])
def _token_tables(cu_seqlens, first, block_of, first_of, tokens, documents, block_size, steps, SIZE: tl.constexpr):
    token = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = token < tokens
    document = _document_of(cu_seqlens, token, documents, steps)
    first_block = tl.load(first + document, mask=ok, other=0)
    position = token - tl.load(cu_seqlens + document, mask=ok, other=0)
    tl.store(block_of + token, first_block + position // block_size, mask=ok)
    tl.store(first_of + token, first_block, mask=ok)


@triton.jit(do_not_specialize=["blocks", "documents", "steps"])
def _block_bounds(cu_seqlens, first, bounds, blocks, documents, block_size, steps, SIZE: tl.constexpr):
    block = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = block < blocks
    document = _document_of(first, block, documents, steps)
    stop = tl.load(cu_seqlens + document + 1, mask=ok, other=0)
    begin = tl.load(cu_seqlens + document, mask=ok, other=0)
    begin += (block - tl.load(first + document, mask=ok, other=0)) * block_size
    begin = tl.minimum(begin, stop)
    stop = tl.minimum(begin + block_size, stop)
    for part in tl.static_range(2):
        tl.store(bounds + block * 6 + part * 3, begin, mask=ok)
        tl.store(bounds + block * 6 + part * 3 + 1, stop, mask=ok)
        tl.store(bounds + block * 6 + part * 3 + 2, tl.zeros_like(block), mask=ok)


@triton.jit
def query_rows(bounds, block):
    """(first row of q, one past the last, token minus row) of a block."""
    at = bounds + block * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def key_rows(bounds, block):
    """(first row of k, one past the last, token minus row) of a block."""
    at = bounds + block * 6 + 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)
