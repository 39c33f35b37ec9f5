"""Scores of blocks of a few tokens, from the mean of their index keys, and attention's probabilities, in plain PyTorch:
any device, any dtype up to float64. The functions are those of msa_reference.py.

A query scores the blocks that end before its own, so that no mean holds a later token than the query; the own block,
which is always attended to, has no score. Scores exist for a chunk of queries at a time.

Shape suffixes: n queries of the layout, t a chunk of them, T tokens of the sequence, N blocks, b blocks of a chunk, B
tokens of a block, K key/value heads, one index query and key each, g groups of heads at once, G query heads of a group,
d head width, w index width, x features of a token, C selected blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.layout import Layout
from moba_train.mechanisms.gates.grid import BlockGrid, block_grid, causal_chunks

KEY_PARTS = 1
"""Summands of the index keys' gradient that `Scored.add_gradients` is given."""


@dataclass(frozen=True)
class Scored:
    """Blocks of some queries of one group, with what the divergence compares. A block that does not count has -inf and
    0; a query without any counts no block at all."""

    group: int
    queries: slice
    blocks: slice
    logits_gtb: Tensor
    """Index score of each block."""
    mass_gtb: Tensor
    """Attention's probability in each block, summed over the heads of the group."""
    pooled_KNw: Tensor
    grid: BlockGrid

    def add_gradients(
        self, dlogits_gtb: Tensor, q_index_nKw: Tensor, k_index_Tx: Tensor, dq_nKw: Tensor, dk_STx: Tensor
    ) -> None:
        """Set these queries' `dq_nKw`, and add to `dk_STx`: the gradients of scores that are not scaled."""
        (dlogits_tb,) = dlogits_gtb
        groups, _, width = self.pooled_KNw.shape
        dq_tw = dlogits_tb @ self.pooled_KNw[self.group, self.blocks]
        dq_nKw[self.queries, self.group] = dq_tw.to(dq_nKw.dtype)
        dmean_bw = dlogits_tb.T @ q_index_nKw[self.queries, self.group].to(dlogits_tb.dtype)
        present_bB = self.grid.present_NB[self.blocks]
        weight_bB1 = (present_bB / _sizes(self.grid)[self.blocks, None]).to(dmean_bw.dtype).unsqueeze(-1)
        # A place without a token adds 0 to another block's, which no order of summation changes.
        dk_Tw = dk_STx[0].unflatten(1, (groups, width))[:, self.group]
        tokens_x = self.grid.tokens_NB[self.blocks].flatten()
        dk_Tw.index_add_(0, tokens_x, (dmean_bw.unsqueeze(1) * weight_bB1).flatten(0, 1))


def _sizes(grid: BlockGrid) -> Tensor:
    """Tokens of each block, [N]; 1 for blocks without any."""
    return grid.present_NB.sum(1).clamp(min=1)


def _pooled(k_index_Tx: Tensor, groups: int, grid: BlockGrid) -> Tensor:
    """Mean index key of each block and group, [K, N, w]; of a block without tokens 0."""
    dtype = accumulation_dtype(k_index_Tx.dtype)
    k_NBKw = k_index_Tx.to(dtype)[grid.tokens_NB].unflatten(-1, (groups, -1)) * grid.present_NB[..., None, None]
    return (k_NBKw.sum(1) / _sizes(grid)[:, None, None]).transpose(0, 1)


def _before(grid: BlockGrid, queries: slice, blocks: slice) -> Tensor:
    """Mask, bool [t, b]: the blocks of a query's document that end before its own."""
    ids_b = torch.arange(blocks.start, blocks.stop, device=grid.own_n.device)
    return (ids_b >= grid.first_n[queries, None]) & (ids_b < grid.own_n[queries, None])


def _scores(q_index_tKw: Tensor, pooled_Kbw: Tensor) -> Tensor:
    """Scaled scores [K, t, b]."""
    q_Ktw = q_index_tKw.to(pooled_Kbw.dtype).transpose(0, 1)
    return (q_Ktw @ pooled_Kbw.transpose(1, 2)).mul_(pooled_Kbw.shape[2] ** -0.5)


def block_scores(
    q_index_nKw: Tensor, k_index_Tx: Tensor, layout: Layout, block_size: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, blocks, scores [K, t, b]) a chunk of queries at a time; -inf for blocks that do not end before the
    query's own."""
    grid = block_grid(layout, block_size)
    groups = q_index_nKw.shape[1]
    pooled_KNw = _pooled(k_index_Tx, groups, grid)
    for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, groups, q_index_nKw.device):
        scores_Ktb = _scores(q_index_nKw[queries], pooled_KNw[:, blocks])
        yield queries, blocks, scores_Ktb.masked_fill_(~_before(grid, queries, blocks), -torch.inf)


def scored(
    q_index_nKw: Tensor,
    k_index_Tx: Tensor,
    q_nHd: Tensor,
    k_TKd: Tensor,
    lse_Hn: Tensor,
    selected_KnC: Tensor | None,
    layout: Layout,
    block_size: int,
    scale: float,
) -> Iterator[Scored]:
    """Every query of every group: with the selected blocks, or with all before its own."""
    grid = block_grid(layout, block_size)
    dtype = accumulation_dtype(q_nHd.dtype)
    kv_heads = k_TKd.shape[1]
    group = q_nHd.shape[1] // kv_heads
    pooled_KNw = _pooled(k_index_Tx, kv_heads, grid)
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        k_NBd = k_TKd[:, kv_head][grid.tokens_NB].to(dtype)
        for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, group * block_size, q_nHd.device):
            counts_tb = _before(grid, queries, blocks)
            if selected_KnC is not None:
                ids_tC = selected_KnC[kv_head, queries].long()
                # Empty slots stand for the own block, which does not count.
                ids_tC = torch.where(ids_tC < 0, grid.own_n[queries, None], ids_tC) - blocks.start
                counts_tb &= torch.zeros_like(counts_tb).scatter_(1, ids_tC, True)
            p_Gts = (q_nHd[queries, heads].to(dtype).transpose(0, 1) @ k_NBd[blocks].flatten(0, 1).T).mul_(scale)
            p_Gts = p_Gts.sub_(lse_Hn[heads, queries].to(dtype).unsqueeze(-1)).exp_()
            # Filled, not multiplied by the mask: what is not attended to may have overflowed to inf.
            mass_tb = p_Gts.unflatten(2, (-1, block_size)).sum((0, 3)).masked_fill_(~counts_tb, 0.0)
            this = slice(kv_head, kv_head + 1)
            logits_gtb = _scores(q_index_nKw[queries, this], pooled_KNw[this, blocks])
            logits_gtb = logits_gtb.masked_fill_(~counts_tb, -torch.inf)
            yield Scored(kv_head, queries, blocks, logits_gtb, mass_tb.unsqueeze(0), pooled_KNw, grid)
