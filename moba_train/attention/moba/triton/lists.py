"""For each block and key/value head, the rows that chose it: a stable counting sort of the entries by block.

Entry `(t * G + g) * C + j` says that head g of the group chose, at token t, as its j-th choice. Entries are cut into
chunks. Counting how often each chunk names each block (integer atomics: the sums do not depend on their order), one
prefix sum over (key/value head, block, chunk), then each chunk puts its entries in place, in order. So a list ascends,
its part that comes from a range of chunks (a range of queries) is one slice, and nothing depends on timing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
"""Entries ranked at once, by one warp; ranking compares each with each."""


@dataclass(frozen=True)
class Lists:
    """The inverse of a choice."""

    entries: Tensor
    """int32 [K * T * G * C]: the entries of list 0, list 1, ...; list `kv_head * blocks + block`. Unused at the end."""
    starts: Tensor
    """int [lists * chunks + 1]: where list l's entries from chunk c begin, at index l * chunks + c."""
    chunks: int
    chunk: int
    """Entries per chunk."""
    lists: int

    @classmethod
    def of(cls, entries: Tensor, starts: Tensor, chosen_HTC: Tensor, kv_heads: int, blocks: int) -> "Lists":
        """From the tensors that `invert` gave for this choice."""
        heads, tokens, choices = chosen_HTC.shape
        lists = kv_heads * blocks
        return cls(entries, starts, *chunking(tokens, heads // kv_heads * choices, lists), lists)


def chunking(tokens: int, row_entries: int, lists: int) -> tuple[int, int]:
    """(chunks, entries per chunk) of one key/value head; a chunk is whole tokens, `row_entries` = G * C entries each.

    Up to 256 chunks per head keep all multiprocessors busy; `starts` stays below 64 MiB beside very many lists.
    """
    wanted = max(1, min(256, tokens * row_entries // 1024, 2**24 // max(lists, 1)))
    chunk_tokens = max(1, triton.cdiv(tokens, wanted))
    return max(1, triton.cdiv(tokens, chunk_tokens)), chunk_tokens * row_entries


def empty_inverse(chosen_HTC: Tensor, kv_heads: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Uninitialised (entries, starts) for a choice of this shape, int32 [H, T, C]."""
    heads, tokens, choices = chosen_HTC.shape
    if choices == 0 or tokens == 0:
        return chosen_HTC.new_empty(0), chosen_HTC.new_empty(1)
    lists = kv_heads * blocks
    chunks, _ = chunking(tokens, heads // kv_heads * choices, lists)
    place = torch.int32 if chosen_HTC.numel() < 2**31 else torch.int64
    return chosen_HTC.new_empty(chosen_HTC.numel()), chosen_HTC.new_empty(lists * chunks + 1, dtype=place)


def invert(chosen_HTC: Tensor, kv_heads: int, blocks: int) -> tuple[Tensor, Tensor]:
    """The (entries, starts) of `Lists` for a choice: int32 [H, T, C], -1 = none."""
    heads, tokens, choices = chosen_HTC.shape
    group = heads // kv_heads
    per_head, lists = tokens * group * choices, kv_heads * blocks
    if per_head >= 2**31:
        raise ValueError(
            f"attention.moba.topk: {choices + 1} given, whose {choices} choices for each of {tokens} tokens and "
            f"{group} query heads of a key/value head are {per_head} entries; fewer than {2**31} allowed"
        )
    entries, starts = empty_inverse(chosen_HTC, kv_heads, blocks)
    starts[0] = 0
    if choices == 0 or tokens == 0:
        return entries, starts
    device = chosen_HTC.device
    chunks, chunk = chunking(tokens, group * choices, lists)
    # Chunk by chunk for the kernels, so that a chunk's counters share cache lines; list by list for the prefix sum.
    counts_KCN = torch.zeros(kv_heads, chunks, blocks, dtype=torch.int32, device=device)
    grid = (chunks, kv_heads)
    sizes = {"G": group, "C": choices, "TILE": _TILE, "num_warps": 1}
    _count[grid](chosen_HTC, counts_KCN, tokens, blocks, chunk, **sizes)
    torch.cumsum(counts_KCN.transpose(1, 2).reshape(-1), 0, dtype=starts.dtype, out=starts[1:])
    cursor_KCN = starts[:-1].view(kv_heads, blocks, chunks).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    _place[grid](chosen_HTC, cursor_KCN, entries, tokens, blocks, chunk, **sizes)
    return entries, starts


@triton.jit
def _chosen_block(chosen, entry, stop, kv_head, tokens, G: tl.constexpr, C: tl.constexpr):
    """The blocks that these entries chose; -1 for none, and from `stop` on."""
    row, choice = entry // C, entry % C
    token, head = row // G, kv_head * G + row % G
    at = (head.to(tl.int64) * tokens + token) * C + choice
    return tl.load(chosen + at, mask=(entry < stop) & (token < tokens), other=-1)


@triton.jit(do_not_specialize=["tokens", "blocks", "chunk"])
def _count(chosen, counts, tokens, blocks, chunk, G: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr):
    which, kv_head = tl.program_id(0), tl.program_id(1)
    mine = counts + (kv_head.to(tl.int64) * tl.num_programs(0) + which) * blocks
    start = which * chunk
    for first in range(start, start + chunk, TILE):
        block = _chosen_block(chosen, first + tl.arange(0, TILE), start + chunk, kv_head, tokens, G, C)
        tl.atomic_add(mine + block, 1, mask=block >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "blocks", "chunk"])
def _place(chosen, cursors, entries, tokens, blocks, chunk, G: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr):
    which, kv_head = tl.program_id(0), tl.program_id(1)
    mine = cursors + (kv_head.to(tl.int64) * tl.num_programs(0) + which) * blocks
    i = tl.arange(0, TILE)
    start = which * chunk
    for first in range(start, start + chunk, TILE):
        entry = first + i
        block = _chosen_block(chosen, entry, start + chunk, kv_head, tokens, G, C)
        same = (block[:, None] == block[None, :]).to(tl.int32)
        rank = tl.sum(tl.where(i[None, :] < i[:, None], same, 0), 1)
        count = tl.sum(same, 1)
        used = block >= 0
        # Past the first-level cache: the cursors change from tile to tile.
        cursor = tl.load(mine + block, mask=used, other=0, cache_modifier=".cg")
        tl.store(entries + cursor.to(tl.int64) + rank, entry, mask=used)
        tl.debug_barrier()  # every cursor is read before any moves on
        tl.store(mine + block, cursor + count, mask=used & (rank == count - 1))
        tl.debug_barrier()
