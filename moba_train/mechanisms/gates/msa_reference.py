"""The index scores of `msa`, and attention's probabilities, in plain PyTorch: any device, any dtype up to float64.

Scores exist for a chunk of queries at a time. What the kernels (msa_kernels.py) compute is held to this.

Shape suffixes: n queries of the layout, t a chunk of them, T tokens of the sequence, N blocks, b blocks of a chunk, B
tokens of a block, K key/value heads and index query heads, g groups of heads at once, G heads of a group, d head width,
w index width, J index keys of a token: one for all groups, or one for each; y these side by side, J * w; C selected
blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.layout import Layout
from moba_train.mechanisms.gates.grid import Attended, block_grid, causal_chunks

KEY_PARTS = 1
"""Summands of the index keys' gradient that `Scored.add_gradients` is given."""


@dataclass(frozen=True)
class Scored:
    """Blocks of some queries, with what the divergence compares. A block that does not count has -inf and 0."""

    groups: slice
    queries: slice
    logits_gtb: Tensor
    """Index score of each block."""
    best_gtb: Tensor
    """int64: the token that gave it."""
    mass_gtb: Tensor
    """Attention's probability in each block, summed over the heads of the group."""

    def add_gradients(
        self, dlogits_gtb: Tensor, q_index_nKw: Tensor, k_index_Ty: Tensor, dq_nKw: Tensor, dk_STy: Tensor
    ) -> None:
        """Set these queries' `dq_nKw`, and add to `dk_STy`: the gradients of scores that are not scaled."""
        dtype = dlogits_gtb.dtype
        q_gtw = q_index_nKw[self.queries, self.groups].to(dtype).transpose(0, 1)
        best_gtbw = _key_of(k_index_Ty, q_gtw.shape[2], self.groups).to(dtype)[self.best_gtb]
        dq_nKw[self.queries, self.groups] = (dlogits_gtb.unsqueeze(2) @ best_gtbw).squeeze(2).transpose(0, 1)
        dbest_gtbw = dlogits_gtb.unsqueeze(-1) * q_gtw.unsqueeze(2)
        # index_add_ would be faster, but its order of summation on CUDA changes from call to call.
        dk_Tw = _key_of(dk_STy[0], q_gtw.shape[2], self.groups)
        dk_Tw.index_put_((self.best_gtb.flatten(),), dbest_gtbw.flatten(0, 2), accumulate=True)


def _key_of(k_index_Ty: Tensor, width: int, groups: slice) -> Tensor:
    """The index keys [T, w] of this one group: a view."""
    k_TJw = k_index_Ty.unflatten(1, (-1, width))
    return k_TJw[:, groups.start if k_TJw.shape[1] > 1 else 0]


def block_scores(
    q_index_nKw: Tensor, k_index_Ty: Tensor, layout: Layout, block_size: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, blocks, the scores of their best tokens [K, t, b]) a chunk of queries at a time; -inf for blocks that a
    query does not see."""
    grid = block_grid(layout, block_size)
    k_TJw = k_index_Ty.to(accumulation_dtype(k_index_Ty.dtype)).unflatten(1, (-1, q_index_nKw.shape[2]))
    k_NBJw = k_TJw[grid.tokens_NB]
    scores_per_block = q_index_nKw.shape[1] * block_size
    for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, scores_per_block, k_NBJw.device):
        seen_tbB = grid.visible(queries, blocks)
        yield queries, blocks, _token_scores(q_index_nKw[queries], k_NBJw[blocks], seen_tbB).amax(-1)


def scored(q_index_nKw: Tensor, k_index_Ty: Tensor, attended: Attended) -> Iterator[Scored]:
    """Every query of every group: with the selected blocks and the own one, or with all."""
    q_nHd, k_TKd, lse_Hn, selected_KnC, _, block_size, scale, _ = attended
    grid = attended.grid
    dtype = accumulation_dtype(q_nHd.dtype)
    group = q_nHd.shape[1] // k_TKd.shape[1]
    for kv_head in range(k_TKd.shape[1]):
        groups = slice(kv_head, kv_head + 1)
        k_index_NB1w = _key_of(k_index_Ty, q_index_nKw.shape[2], groups).to(dtype)[grid.tokens_NB].unsqueeze(2)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        k_NBd = k_TKd[:, kv_head].to(dtype)[grid.tokens_NB]
        for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, group * block_size, q_nHd.device):
            seen_tbB = grid.visible(queries, blocks)
            if selected_KnC is not None:
                own_t1 = grid.own_n[queries, None]
                selected_tC = selected_KnC[kv_head, queries]
                ids_tj = torch.cat([torch.where(selected_tC < 0, own_t1, selected_tC), own_t1], 1)
                seen_tbB &= torch.zeros_like(seen_tbB[..., 0]).scatter_(1, ids_tj - blocks.start, True).unsqueeze(-1)
            logits_gtb, place_gtb = _token_scores(q_index_nKw[queries, groups], k_index_NB1w[blocks], seen_tbB).max(-1)
            best_gtb = grid.tokens_NB[blocks].expand(len(seen_tbB), -1, -1).gather(2, place_gtb[0].unsqueeze(-1))
            q_Gtd = q_nHd[queries, heads].to(dtype).transpose(0, 1)
            p_Gts = (q_Gtd @ k_NBd[blocks].flatten(0, 1).T).mul_(scale)
            p_Gts = p_Gts.sub_(lse_Hn[heads, queries].to(dtype).unsqueeze(-1)).exp_()
            # Filled, not multiplied by the mask: what is not seen is not in the LSE and may have overflowed to inf.
            p_Gts = p_Gts.masked_fill_(~seen_tbB.flatten(1), 0.0)
            mass_tb = p_Gts.unflatten(2, (-1, block_size)).sum((0, 3))
            yield Scored(groups, queries, logits_gtb, best_gtb.squeeze(-1).unsqueeze(0), mass_tb.unsqueeze(0))


def _token_scores(q_tgw: Tensor, k_bBJw: Tensor, seen_tbB: Tensor) -> Tensor:
    """Scaled index scores [g, t, b, B], -inf for tokens that a query does not see."""
    q_gtw = q_tgw.to(k_bBJw.dtype).transpose(0, 1)
    k_Jws = k_bBJw.flatten(0, 1).permute(1, 2, 0)
    scores_gts = (q_gtw @ (k_Jws if len(k_Jws) > 1 else k_Jws[0])).mul_(q_tgw.shape[-1] ** -0.5)
    scores_gtbB = scores_gts.unflatten(2, k_bBJw.shape[:2])
    return scores_gtbB.masked_fill_(~seen_tbB, -torch.inf)
