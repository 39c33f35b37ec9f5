"""The blocks with the highest scores, for kinds that score all blocks of a chunk of queries.

Shape suffixes: t queries of a chunk, N blocks of the packed sequence, H heads (or groups of heads), C selected blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.blocks.available import triton_runs_on
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
    block are chosen before all others and count towards `count`, except for the own block, which is not listed. Of
    equal scores the lower block id wins.
    """
    count = min(count, scores_HtN.shape[-1])
    kernel = _kernel(scores_HtN)
    if kernel is not None:
        return kernel(scores_HtN, queries.own_t, queries.first_t, count, first=first, local=local)
    ids_N = torch.arange(scores_HtN.shape[-1], device=scores_HtN.device)
    own_t1, first_t1 = (x.unsqueeze(-1) for x in queries)
    history_tN = (first_t1 <= ids_N) & (ids_N < own_t1)
    forced_tN = history_tN & ((ids_N < first_t1 + first) | (ids_N > own_t1 - local))
    scores_HtN = scores_HtN.masked_fill(~history_tN, -torch.inf).masked_fill(forced_tN, torch.inf)
    values_HtC, chosen_HtC = _highest(scores_HtN, count)
    chosen_HtC = torch.where(values_HtC == -torch.inf, len(ids_N), chosen_HtC).sort(-1).values
    return torch.where(chosen_HtC == len(ids_N), -1, chosen_HtC).int()


def _kernel(scores_HtN: Tensor) -> Callable[..., Tensor] | None:
    """The Triton kernel that chooses blocks, imported at the first use; None where it cannot take these scores."""
    if not triton_runs_on(scores_HtN):
        return None
    from moba_train.attention.blocks.triton import choose

    return choose.choose_blocks if choose.able(scores_HtN) else None


def _highest(scores_HtN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest scores, descending, and where they are; `topk`, but of equal scores it takes the first ones.

    Which of them `topk` takes depends on the device and on N. Equal scores do occur: a window of keys may be the best
    of both blocks that it overlaps (infllm_v2).
    """
    values_HtC, at_HtC = scores_HtN.topk(count, dim=-1)
    if count == 0:
        return values_HtC, at_HtC
    lowest_Ht1 = values_HtC[..., -1:]
    ids_N = torch.arange(scores_HtN.shape[-1], dtype=torch.float32, device=scores_HtN.device)
    first_equal_HtC = torch.where(scores_HtN == lowest_Ht1, -ids_N, -torch.inf).topk(count, dim=-1).indices
    above_Ht1 = (values_HtC > lowest_Ht1).sum(-1, keepdim=True)
    place_HtC = torch.arange(count, device=scores_HtN.device) - above_Ht1
    equal_HtC = first_equal_HtC.gather(-1, place_HtC.clamp(min=0))
    return values_HtC, torch.where(place_HtC < 0, at_HtC, equal_HtC)
