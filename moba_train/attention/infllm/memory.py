"""InfLLM's memory: the tokens that lie before a query's window (Xiao et al. 2024, arXiv:2402.04617).

With a window of L tokens, the query at position p has the tokens up to p - L as its memory. It attends to the complete
blocks with the highest scores, to the document's first blocks, and to the block that the window is leaving, up to
p - L. That is attention to selected blocks (blocks/attention.py) for a query that stands at p - L.

Shape suffixes: n queries that have a memory, t a chunk of them, T keys of the whole sequence, N blocks, B tokens of a
block, H query heads, K key/value heads, D head width, C selected blocks.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.blocks.attention import BlockAttention
from moba_train.attention.blocks.choose import choose_blocks, query_blocks
from moba_train.attention.blocks.geometry import block_edges
from moba_train.attention.masked import accumulation_dtype, query_chunks
from moba_train.attention.protocol import Layout, joined_ranges


class MemorySizes(NamedTuple):
    """What a memory looks at."""

    window: int
    """Tokens of the window, L."""
    block_size: int
    representatives: int
    """Tokens of a block whose keys stand for it."""
    first_blocks: int
    topk: int
    """Blocks besides the first ones."""


class Readers(NamedTuple):
    """The queries that have a memory."""

    rows_n: Tensor
    """int64: their rows among the layout's queries."""
    layout: Layout
    """The sequence, with these queries at p - L."""


def readers(layout: Layout, window: int) -> Readers:
    """The layout's queries at positions from `window` on. Kept with the layout."""

    def make() -> Readers:
        rows = []
        ranges = []
        row = 0
        for start, stop in ((0, layout.total),) if layout.q_ranges is None else layout.q_ranges:
            for begin, end in pairwise(layout.edges):
                first, last = max(start, begin + window), min(stop, end)
                if first < last:
                    rows.append(torch.arange(row + first - start, row + last - start))
                    ranges.append((first - window, last - window))
            row += stop - start
        rows_n = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        device = layout.cu_seqlens.device
        return Readers(rows_n.to(device, non_blocking=True), layout.part(joined_ranges(ranges), None))

    return layout.cached(("readers of a memory", window), make)


def representative_keys(
    queries_TKD: Tensor, k_TKD: Tensor, far_k_TKD: Tensor, layout: Layout, sizes: MemorySizes
) -> Tensor:
    """The sum of the representative keys of each block, [N, K, D] in float32 (float64 for float64).

    A token's representative score is the mean of q . k over the L queries after it, here summed over the
    query heads that share its key/value head. The tokens of a block with the highest scores represent it. Blocks that a
    window still reaches have no meaning; nothing reads them.

    queries_TKD  rotated queries, summed over the query heads of each key/value head
    k_TKD        rotated keys
    far_k_TKD    keys as a query sees them from beyond its window
    """
    tokens_NB = block_edges(layout, sizes.block_size)[:-1, None].long()
    tokens_NB = tokens_NB + torch.arange(sizes.block_size, device=k_TKD.device)
    tokens_NB = tokens_NB.clamp(max=max(layout.total - 1, 0))
    last_T = (torch.arange(layout.total, device=k_TKD.device) + sizes.window).clamp(max=layout.total - 1)
    sums = []
    for head in range(k_TKD.shape[1]):  # a head at a time: prefix sums of long sequences need float64
        prefix_TD = queries_TKD[:, head].double().cumsum(0)
        score_T = ((prefix_TD[last_T] - prefix_TD) * k_TKD[:, head]).sum(-1)
        best_NR = score_T[tokens_NB].topk(sizes.representatives, dim=-1).indices
        keys_NRD = far_k_TKD[:, head][tokens_NB.gather(1, best_NR)]
        sums.append(keys_NRD.to(accumulation_dtype(keys_NRD.dtype)).sum(1))
    return torch.stack(sums, 1)


def select_blocks(far_q_nHD: Tensor, representatives_NKD: Tensor, layout: Layout, sizes: MemorySizes) -> Tensor:
    """The blocks of memory that each reader attends to, int32 [H, n, C]: the first ones, and those with the highest
    scores.

    A block's score is the sum of q . representative key over all query heads, so that a token's heads
    read the same blocks, as in the authors' code.
    """
    queries, heads, _ = far_q_nHD.shape
    blocks, kv_heads, _ = representatives_NKD.shape
    where = query_blocks(layout, sizes.block_size)
    representatives_EN = representatives_NKD.flatten(1).T
    chosen = []
    for rows in query_chunks(queries, blocks, far_q_nHD.device):
        grouped_tKD = far_q_nHD[rows].to(representatives_EN.dtype).unflatten(1, (kv_heads, -1)).sum(2)
        scores_1tN = (grouped_tKD.flatten(1) @ representatives_EN).unsqueeze(0)
        count = sizes.first_blocks + sizes.topk
        chosen.append(choose_blocks(scores_1tN, where.rows(rows), count, first=sizes.first_blocks))
    return torch.cat(chosen, 1).repeat(heads, 1, 1)


def attend_to_memory(
    far_q_nHD: Tensor,
    far_k_TKD: Tensor,
    v_TKD: Tensor,
    representatives_NKD: Tensor,
    readers_layout: Layout,
    blocks: BlockAttention,
    sizes: MemorySizes,
) -> tuple[Tensor, Tensor]:
    """(out [n, H, D], lse [H, n]) of the readers over their memories."""
    selected_HnC = select_blocks(far_q_nHD, representatives_NKD, readers_layout, sizes)
    selection = blocks.selection(selected_HnC, far_q_nHD, readers_layout, kv_heads=far_k_TKD.shape[1])
    return blocks.attend(far_q_nHD, far_k_TKD, v_TKD, readers_layout, selection)
