"""Block geometry: the tokens of each block, the block of each query, and spans of neighbouring keys.

Blocks are aligned at each document's start and never cross a document; ids count over the whole packed sequence, so a
document's blocks are consecutive and an earlier block has a smaller id. The host need not know the lengths.

Local blocks of every query, and all blocks of queries near a document's start, need no ids: they are one span of keys,
which dense tiles attend to (triton/spans.py) at a fraction of what lists of selected blocks cost.

Shape suffixes: T queries, S keys.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.layout import Layout, TokenRanges, kept


def block_bound(layout: Layout, block_size: int) -> int:
    """An upper bound of the number of blocks, known on the host: sum of ceil(length / B) <= total // B + documents."""
    # Not the exact number, for which the host would wait for the GPU; surplus ids name no block.
    return layout.total // block_size + layout.cu_seqlens.numel() - 1


def first_blocks(cu_seqlens: Tensor, block_size: int) -> Tensor:
    """int64 [docs + 1]: id of each document's first block; the last entry is the number of blocks."""
    lengths = cu_seqlens.long().diff()
    blocks = (lengths + block_size - 1) // block_size
    return torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])


@kept
def block_edges(layout: Layout, block_size: int) -> Tensor:
    """int32 [block_bound + 1]: each block's first token; the number of tokens for ids that name no block."""
    first = first_blocks(layout.cu_seqlens, block_size)
    ids = torch.arange(block_bound(layout, block_size) + 1, device=first.device)
    document = torch.searchsorted(first[1:], ids, right=True).clamp_(max=first.numel() - 2)
    edges = layout.cu_seqlens.long()[document] + (ids - first[document]) * block_size
    return edges.clamp_(max=layout.total).to(torch.int32)


def block_ids(tokens: Tensor, documents: Tensor, layout: Layout, block_size: int) -> Tensor:
    """int64, the shape of `tokens`: block of each token, given its index in the packed sequence and its document."""
    first = first_blocks(layout.cu_seqlens, block_size)
    return first[documents] + layout.positions(tokens, documents) // block_size


def rows_before(tokens: Tensor, ranges: TokenRanges) -> Tensor:
    """The shape of `tokens`: how many of the ranges' tokens come before each, without a lookup or a wait for the
    device."""
    rows = torch.zeros_like(tokens)
    for start, stop in ranges:
        rows += (tokens - start).clamp_(0, stop - start)
    return rows


def in_one_range(ranges: TokenRanges | None, block_size: int) -> bool:
    """True if no block can lie in two of these ranges with a gap between."""
    gaps = [start - stop for (_, stop), (start, _) in pairwise(ranges or ())]
    return all(gap == 0 or gap >= block_size for gap in gaps)


def ranges_problem(layout: Layout, block_size: int) -> str:
    """The reason why kernels that take a block's given rows as neighbours cannot work on this shard; empty if they
    can."""
    for ranges in (layout.q_ranges, layout.k_ranges):
        if not in_one_range(ranges, block_size):
            given = ranges or ()
            parts = ", ".join(f"{start}-{stop}" for start, stop in given[:4]) + ", ..." * (len(given) > 4)
            return f"a shard whose token ranges {parts} are less than block_size {block_size} apart"
    return ""


def history_blocks(layout: Layout, block_size: int) -> Tensor:
    """int32 [T, C]: every block before a query's own in its document, ascending, -1 behind. C: one block less than the
    longest document has."""
    count = history_bound(layout, block_size)
    diagonal_T, first_T = query_blocks(layout, block_size)
    ids_TC = first_T[:, None] + torch.arange(count, device=first_T.device)
    return ids_TC.masked_fill_(ids_TC >= diagonal_T[:, None], -1).to(torch.int32)


def history_bound(layout: Layout, block_size: int) -> int:
    """The most blocks that lie before a query's own in its document."""
    return max(0, -(-layout.max_seqlen // block_size) - 1)


class QueryBlocks(NamedTuple):
    """Blocks of some queries."""

    own_t: Tensor
    """int64: each query's block, the diagonal one."""
    first_t: Tensor
    """int64: the first block of its document."""

    def rows(self, rows: slice) -> "QueryBlocks":
        """Blocks of a part of the queries."""
        return QueryBlocks(self.own_t[rows], self.first_t[rows])


@kept
def query_blocks(layout: Layout, block_size: int) -> QueryBlocks:
    """Blocks of the layout's queries."""
    own = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
    return QueryBlocks(own, first_blocks(layout.cu_seqlens, block_size)[layout.q_documents])


class SinkCopies(NamedTuple):
    """Sinks of documents (d), once for each chunk (C) of the queries behind them; P: sinks, rounded up to whole tiles.
    Rows of keys, int64; their first query and one past the last, int32; chunks of a document; its keys, -1 for none."""

    rows_CP: Tensor
    first_CP: Tensor
    end_CP: Tensor
    chunks_d: Tensor
    rows_dP: Tensor

    def add(self, part_sKD: Tensor, sum_SKD: Tensor) -> None:
        """Add what copies gave, [C * P, K, D], to that of all keys, [S, K, D], always in the same order. Float32."""
        part_CPKD = part_sKD.unflatten(0, self.rows_CP.shape)
        sum_dPKD = torch.segment_reduce(part_CPKD, "sum", lengths=self.chunks_d, unsafe=True)
        sum_dPKD.masked_fill_((self.rows_dP < 0)[..., None, None], 0)
        # Several add to a row only where all but one of them are zeros.
        sum_SKD.index_add_(0, self.rows_dP.clamp(min=0).flatten(), sum_dPKD.flatten(0, 1))


@dataclass(frozen=True)
class KeySpans:
    """The keys that each query sees: neighbours among the given keys, perhaps also the first of its document; int32."""

    first_T: Tensor
    """Row of each query's first key."""
    end_T: Tensor
    """One past its last."""
    first_row_S: Tensor
    """The first query that has each key in its span."""
    end_row_S: Tensor
    """One past the last."""
    sink_first_T: Tensor | None = None
    """Row of the first key before the span that each query sees, the number of keys if there is none."""
    sink_end_T: Tensor | None = None
    """One past the last of these; 0 if there is none."""
    copies: SinkCopies | None = None
