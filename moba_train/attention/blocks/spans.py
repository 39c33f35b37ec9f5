"""The neighbouring blocks that a query attends to besides selected ones.

Local blocks of every query, and all blocks of queries near a document's start, need no ids: they are one span of keys,
which dense tiles attend to (triton/spans.py) at a fraction of what lists of selected blocks cost.

Shape suffixes: T queries, S keys, K heads with a selection of their own, C selected blocks, L local blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.blocks.choose import query_blocks
from moba_train.attention.blocks.geometry import block_edges
from moba_train.attention.protocol import Layout


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
            own_T, first_T = query_blocks(layout, self.block_size)
            positions_T = layout.positions(layout.q_tokens, layout.q_documents)
            local_T = torch.maximum(first_T, own_T - (self.count - 1))
            return torch.stack([torch.where(positions_T < self.dense_len, first_T, local_T), own_T], 1).int()

        return layout.cached(("local blocks", self), make)

    def spans(self, layout: Layout) -> KeySpans:
        """The keys of the local blocks that each of the layout's queries sees; kept with the layout."""
        return layout.cached(("key spans", self), lambda: self._spans(layout))

    def _spans(self, layout: Layout) -> KeySpans:
        first_tokens_T = block_edges(layout, self.block_size).long()[self.history(layout)[:, 0].long()]
        first_T = torch.searchsorted(layout.k_tokens, first_tokens_T)
        end_T = torch.searchsorted(layout.k_tokens, layout.q_tokens, right=True)
        rows_S = torch.arange(len(layout.k_tokens), device=first_T.device)
        first_row_S = torch.searchsorted(end_T, rows_S, right=True)
        end_row_S = torch.searchsorted(first_T, rows_S, right=True)
        return KeySpans(first_T.int(), end_T.int(), first_row_S.int(), end_row_S.int())


def with_local_blocks(selected_KTC: Tensor, local_T2: Tensor, most: int) -> Tensor:
    """The selected blocks and the local ones before the own block (`LocalBlocks.history`), of which none is selected:
    int32 [K, T, C + L], ascending, -1 behind. `most`: L."""
    first_T1, own_T1 = local_T2.split(1, dim=1)
    local_TL = first_T1 + torch.arange(most, dtype=torch.int32, device=local_T2.device)
    local_TL = torch.where(local_TL < own_T1, local_TL, -1)
    both_KTC = torch.cat([selected_KTC, local_TL.expand(len(selected_KTC), -1, -1)], -1)
    none = torch.iinfo(torch.int32).max
    both_KTC = both_KTC.masked_fill_(both_KTC < 0, none).sort(-1).values
    return both_KTC.masked_fill_(both_KTC == none, -1)
