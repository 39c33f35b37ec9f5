"""Block geometry: the tokens of each block, and the neighbouring blocks that a query attends to without a selection.

Blocks are aligned at each document's start and never cross a document; ids count over the whole packed sequence, so a
document's blocks are consecutive and an earlier block has a smaller id. The host need not know the lengths.

Local blocks of every query, and all blocks of queries near a document's start, need no ids: they are one span of keys,
which dense tiles attend to (triton/spans.py) at a fraction of what lists of selected blocks cost.

Shape suffixes: T queries, S keys, K heads with a selection of their own, C selected blocks, L local blocks.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.layout import Layout, TokenRanges


def block_bound(layout: Layout, block_size: int) -> int:
    """An upper bound of the number of blocks, known on the host: sum of ceil(length / B) <= total // B + documents."""
    # Not the exact number, for which the host would wait for the GPU; surplus ids name no block.
    return layout.total // block_size + layout.cu_seqlens.numel() - 1


def first_blocks(cu_seqlens: Tensor, block_size: int) -> Tensor:
    """int64 [docs + 1]: id of each document's first block; the last entry is the number of blocks."""
    lengths = cu_seqlens.long().diff()
    blocks = (lengths + block_size - 1) // block_size
    return torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])


def block_edges(layout: Layout, block_size: int) -> Tensor:
    """int32 [block_bound + 1]: each block's first token; the number of tokens for ids that name no block.

    Kept with the layout.
    """
    return layout.cached(("block edges", block_size), lambda: _edges(layout, block_size))


def _edges(layout: Layout, block_size: int) -> Tensor:
    first = first_blocks(layout.cu_seqlens, block_size)
    ids = torch.arange(block_bound(layout, block_size) + 1, device=first.device)
    document = torch.searchsorted(first[1:], ids, right=True).clamp_(max=first.numel() - 2)
    edges = layout.cu_seqlens.long()[document] + (ids - first[document]) * block_size
    return edges.clamp_(max=layout.total).to(torch.int32)


def block_ids(tokens: Tensor, documents: Tensor, layout: Layout, block_size: int) -> Tensor:
    """int64, the shape of `tokens`: block of each token, given its index in the packed sequence and its document."""
    first = first_blocks(layout.cu_seqlens, block_size)
    return first[documents] + layout.positions(tokens, documents) // block_size


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
    first_T = first_blocks(layout.cu_seqlens, block_size)[layout.q_documents]
    diagonal_T = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
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


def query_blocks(layout: Layout, block_size: int) -> QueryBlocks:
    """Blocks of the layout's queries; kept with the layout."""

    def make() -> QueryBlocks:
        own = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
        return QueryBlocks(own, first_blocks(layout.cu_seqlens, block_size)[layout.q_documents])

    return layout.cached(("query blocks", block_size), make)


@dataclass(frozen=True)
class KeySpans:
    """The keys that each query sees, neighbours among the given keys. int32; all four ascend."""

    first_T: Tensor
    """Row of each query's first key."""
    end_T: Tensor
    """One past its last."""
    first_row_S: Tensor
    """The first query that sees each key."""
    end_row_S: Tensor
    """One past the last."""


@dataclass(frozen=True)
class LocalBlocks:
    """A query attends to the `count` blocks that end with its own, and at the first `dense_len` positions of its
    document to everything before it."""

    block_size: int
    count: int
    dense_len: int

    def most(self, layout: Layout) -> int:
        """L: local history blocks of a query at most; from sizes alone, which tracing knows."""
        dense_blocks = -(-min(self.dense_len, layout.max_seqlen) // self.block_size)
        return max(self.count, dense_blocks) - 1

    def history(self, layout: Layout) -> Tensor:
        """int32 [T, 2]: each query's first local block, and its own. Kept with the layout."""

        def make() -> Tensor:
            diagonal_T, first_T = query_blocks(layout, self.block_size)
            positions_T = layout.positions(layout.q_tokens, layout.q_documents)
            local_T = torch.maximum(first_T, diagonal_T - (self.count - 1))
            return torch.stack([torch.where(positions_T < self.dense_len, first_T, local_T), diagonal_T], 1).int()

        return layout.cached(("local blocks", self), make)

    def spans(self, layout: Layout) -> KeySpans:
        """The keys of the local blocks that each of the layout's queries sees; kept with the layout."""
        return layout.cached(("key spans", self), lambda: self._spans(layout))

    def _spans(self, layout: Layout) -> KeySpans:
        first_tokens_T = block_edges(layout, self.block_size).long()[self.history(layout)[:, 0].long()]
        # Spans are rows of the given keys: in a shard some of a span's tokens are elsewhere.
        first_T = torch.searchsorted(layout.k_tokens, first_tokens_T)
        end_T = torch.searchsorted(layout.k_tokens, layout.q_tokens, right=True)
        rows_S = torch.arange(len(layout.k_tokens), device=first_T.device)
        first_row_S = torch.searchsorted(end_T, rows_S, right=True)
        end_row_S = torch.searchsorted(first_T, rows_S, right=True)
        return KeySpans(first_T.int(), end_T.int(), first_row_S.int(), end_row_S.int())


def with_local_blocks(selected_KTC: Tensor, local_T2: Tensor, most: int) -> Tensor:
    """The selected blocks and the local ones before the diagonal block (`LocalBlocks.history`), of which none is
    selected: int32 [K, T, C + L], ascending, -1 behind. `most`: L."""
    first_T1, diagonal_T1 = local_T2.split(1, dim=1)
    local_TL = first_T1 + torch.arange(most, dtype=torch.int32, device=local_T2.device)
    local_TL = torch.where(local_TL < diagonal_T1, local_TL, -1)
    both_KTC = torch.cat([selected_KTC, local_TL.expand(len(selected_KTC), -1, -1)], -1)
    none = torch.iinfo(torch.int32).max
    # Absent blocks as the largest number, so that they are sorted behind all others.
    both_KTC = both_KTC.masked_fill_(both_KTC < 0, none).sort(-1).values
    return both_KTC.masked_fill_(both_KTC == none, -1)
