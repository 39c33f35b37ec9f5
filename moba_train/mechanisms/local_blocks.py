"""The blocks next to a query, to which a kind attends without a selection, as ids and as one span of keys.

Shape suffixes: T queries, S keys, K heads with a selection of their own, C selected blocks, L local blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import KeySpans, block_edges, query_blocks
from moba_train.attention.layout import Layout, kept


@dataclass(frozen=True)
class LocalBlocks:
    """A query attends to the `count` blocks that end with its own, and at the first `dense_len` positions of its
    document to everything before it."""

    block_size: int
    count: int
    dense_len: int = 1

    def most(self, layout: Layout) -> int:
        """L: local history blocks of a query at most; from sizes alone, which tracing knows."""
        dense_blocks = -(-min(self.dense_len, layout.max_seqlen) // self.block_size)
        return max(self.count, dense_blocks) - 1

    @kept
    def history(self, layout: Layout) -> Tensor:
        """int32 [T, 2]: each query's first local block, and its own."""
        diagonal_T, first_T = query_blocks(layout, self.block_size)
        positions_T = layout.positions(layout.q_tokens, layout.q_documents)
        local_T = torch.maximum(first_T, diagonal_T - (self.count - 1))
        return torch.stack([torch.where(positions_T < self.dense_len, first_T, local_T), diagonal_T], 1).int()

    @kept
    def spans(self, layout: Layout) -> KeySpans:
        """The keys of the local blocks that each of the layout's queries sees."""
        first_tokens_T = block_edges(layout, self.block_size).long()[self.history(layout)[:, 0].long()]
        return key_spans(first_tokens_T, layout)


def key_spans(first_tokens_T: Tensor, layout: Layout) -> KeySpans:
    """The given keys from each query's first token (int64, ascending) to the query's own."""
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
