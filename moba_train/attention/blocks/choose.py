"""The blocks with the highest scores, for kinds that score all blocks of a chunk of queries.

Shape suffixes: t queries of a chunk, N blocks of the packed sequence, H heads (or groups of heads), C selected blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.blocks.geometry import block_ids, first_blocks
from moba_train.attention.protocol import Layout


class QueryBlocks(NamedTuple):
    """Where queries are among the blocks (geometry.py)."""

    own_t: Tensor
    """int64: each query's own block."""
    first_t: Tensor
    """int64: the first block of its document."""

    def rows(self, rows: slice) -> "QueryBlocks":
        """Those of some queries."""
        return QueryBlocks(self.own_t[rows], self.first_t[rows])


def query_blocks(layout: Layout, block_size: int) -> QueryBlocks:
    """Those of the layout's queries; kept with the layout."""

    def make() -> QueryBlocks:
        own = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
        return QueryBlocks(own, first_blocks(layout.cu_seqlens, block_size)[layout.q_documents])

    return layout.cached(("query blocks", block_size), make)


def choose_blocks(scores_HtN: Tensor, queries: QueryBlocks, count: int, *, first: int = 0, local: int = 1) -> Tensor:
    """The `count` history blocks of each query with the highest scores: int32 [H, t, C], ascending, -1 behind.

    C is `count`, or N if there are fewer. Blocks of the future and of other documents are never chosen, whatever their
    scores, nor those with a score of -inf. The `first` blocks of a document and the `local` ones that end with the own
    block are chosen before all others and count towards `count`, except for the own block, which is not listed.
    """
    ids_N = torch.arange(scores_HtN.shape[-1], device=scores_HtN.device)
    own_t1, first_t1 = (x.unsqueeze(-1) for x in queries)
    history_tN = (first_t1 <= ids_N) & (ids_N < own_t1)
    forced_tN = history_tN & ((ids_N < first_t1 + first) | (ids_N > own_t1 - local))
    scores_HtN = scores_HtN.masked_fill(~history_tN, -torch.inf).masked_fill(forced_tN, torch.inf)
    values_HtC, chosen_HtC = scores_HtN.topk(min(count, len(ids_N)), dim=-1)
    chosen_HtC = torch.where(values_HtC == -torch.inf, len(ids_N), chosen_HtC).sort(-1).values
    return torch.where(chosen_HtC == len(ids_N), -1, chosen_HtC).int()
