"""Scores of blocks of a few tokens, from the mean of their index keys, and attention's probabilities. The functions are
those of msa_reference.py.

A query scores the blocks that end before its own, so that no mean holds a later token than the query; the own block,
which is always attended to, has no score. An index query is one head, whose product with the mean is the score; or J
heads and their weights, and the score is the weighted sum of the products that are positive, as in the lightning
indexer of DeepSeek-V3.2 (arXiv:2512.02556, equation 1). Scores exist for a chunk of queries at a time.

Probabilities come from the kernels of `msa` where these can run; all else is plain PyTorch: any device, any dtype up to
float64.

Shape suffixes: n queries of the layout, t a chunk of them, T tokens of the sequence, N blocks, b blocks of a chunk, B
tokens of a block, M candidates of a query, K key/value heads, g groups of heads at once, G query heads of a group, d
head width, J index heads of a group, w index width, x features of a token: w, or J * w and J weights; y all groups'
index keys side by side, K * w; C selected blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import query_blocks
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.table import triton_multiplies
from moba_train.attention.layout import Layout
from moba_train.mechanisms.gates.grid import Attended, BlockGrid, block_grid, causal_chunks, row_chunks

KEY_PARTS = 1
"""Summands of the index keys' gradient that `Scored.add_gradients` is given."""
_COPIES = 4
"""Tensors of a chunk's scores that exist at once, for `causal_chunks`: 16 MiB each in float32 on a GPU."""


@dataclass(frozen=True)
class Scored:
    """Blocks of some queries of some groups, with what the divergence compares. A block that does not count has -inf
    and 0; a query without any counts no block at all."""

    groups: slice
    queries: slice
    blocks: slice
    logits_gtb: Tensor
    """Index score of each block."""
    mass_gtb: Tensor
    """Attention's probability in each block, summed over the heads of the group."""
    pooled_KNw: Tensor
    grid: BlockGrid

    def add_gradients(
        self, dlogits_gtb: Tensor, q_index_nKx: Tensor, k_index_Ty: Tensor, dq_nKx: Tensor, dk_STy: Tensor
    ) -> None:
        """Set these queries' `dq_nKx`, and add to `dk_STy`: the gradients of scores that are not scaled."""
        k_gbw = self.pooled_KNw[self.groups, self.blocks]
        groups, _, width = self.pooled_KNw.shape
        q_gtJw, weights_gtJ1 = _heads(q_index_nKx[self.queries, self.groups].to(k_gbw.dtype), width)
        dproducts_gtJb = dlogits_gtb.unsqueeze(2)
        dweights_gtJ = dlogits_gtb[..., :0]
        if weights_gtJ1 is not None:
            products_gtJb = _products(q_gtJw, k_gbw).relu_()
            dweights_gtJ = (products_gtJb @ dlogits_gtb.unsqueeze(-1)).squeeze(-1) * q_gtJw.shape[2] ** -0.5
            dproducts_gtJb = dproducts_gtJb * weights_gtJ1 * (products_gtJb > 0)
        dproducts_gsb = dproducts_gtJb.flatten(1, 2)
        dq_gty = (dproducts_gsb @ k_gbw).view(*dlogits_gtb.shape[:2], -1)
        dq_gtx = torch.cat([dq_gty, dweights_gtJ], -1)
        dq_nKx[self.queries, self.groups] = dq_gtx.transpose(0, 1).to(dq_nKx.dtype)
        dmean_gbw = dproducts_gsb.transpose(1, 2) @ q_gtJw.flatten(1, 2)
        present_bB = self.grid.present_NB[self.blocks].to(dmean_gbw.dtype)
        weight_bB11 = (present_bB / _sizes(self.grid)[self.blocks, None])[..., None, None]
        dk_bBgw = dmean_gbw.transpose(0, 1).unsqueeze(1) * weight_bB11
        # A place without a token adds 0 to another block's, which no order of summation changes.
        dk_Tgw = dk_STy[0].unflatten(1, (groups, width))[:, self.groups]
        dk_Tgw.index_add_(0, self.grid.tokens_NB[self.blocks].flatten(), dk_bBgw.flatten(0, 1))


def _sizes(grid: BlockGrid) -> Tensor:
    """Tokens of each block, [N]; 1 for blocks without any."""
    return grid.present_NB.sum(1).clamp(min=1)


def _pooled(k_index_Ty: Tensor, groups: int, grid: BlockGrid) -> Tensor:
    """Mean index key of each block and group, [K, N, w]; of a block without tokens 0."""
    dtype = accumulation_dtype(k_index_Ty.dtype)
    k_NBKw = k_index_Ty.to(dtype)[grid.tokens_NB].unflatten(-1, (groups, -1)) * grid.present_NB[..., None, None]
    return (k_NBKw.sum(1) / _sizes(grid)[:, None, None]).transpose(0, 1)


def _before(grid: BlockGrid, queries: slice, blocks: slice) -> Tensor:
    """Mask, bool [t, b]: the blocks of a query's document that end before its own."""
    ids_b = torch.arange(blocks.start, blocks.stop, device=grid.own_n.device)
    return (ids_b >= grid.first_n[queries, None]) & (ids_b < grid.own_n[queries, None])


def index_heads(features: int, width: int) -> int:
    """J of features x, which are J * w and J weights; 0 for one head without a weight."""
    return features // (width + 1)


def _heads(q_index_tgx: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Index queries [g, t, J, w], and the factors of their products [g, t, J, 1]; None for one head without."""
    q_gtx = q_index_tgx.transpose(0, 1)
    heads = index_heads(q_gtx.shape[2], width)
    if not heads:
        return q_gtx.unsqueeze(2), None
    q_gty, weights_gtJ = q_gtx.split([heads * width, heads], -1)
    return q_gty.unflatten(-1, (heads, width)), weights_gtJ.unsqueeze(-1) * heads**-0.5


def _products(q_gtJw: Tensor, k_gxw: Tensor) -> Tensor:
    """[g, t, J, b] of the keys [g, b, w] of all queries, or of those of each query, [g, t, b, w]."""
    if k_gxw.dim() == 4:
        return q_gtJw @ k_gxw.transpose(2, 3)
    return (q_gtJw.flatten(1, 2) @ k_gxw.transpose(1, 2)).unflatten(1, q_gtJw.shape[1:3])


def _scores(q_index_tgx: Tensor, k_gxw: Tensor) -> Tensor:
    """Scaled scores [g, t, b] of the keys as `_products` takes them."""
    q_gtJw, weights_gtJ1 = _heads(q_index_tgx.to(k_gxw.dtype), k_gxw.shape[-1])
    products_gtJb = _products(q_gtJw, k_gxw).mul_(k_gxw.shape[-1] ** -0.5)
    if weights_gtJ1 is None:
        return products_gtJb.squeeze(2)
    return (weights_gtJ1.transpose(2, 3) @ products_gtJb.relu_()).squeeze(2)


def block_scores(
    q_index_nKx: Tensor, k_index_Ty: Tensor, layout: Layout, block_size: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, blocks, scores [K, t, b]) a chunk of queries at a time; -inf for blocks that do not end before the
    query's own."""
    grid = block_grid(layout, block_size)
    groups = q_index_nKx.shape[1]
    pooled_KNw = _pooled(k_index_Ty, groups, grid)
    numbers = _COPIES * groups * max(1, index_heads(q_index_nKx.shape[2], pooled_KNw.shape[2]))
    for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, numbers, q_index_nKx.device):
        scores_Ktb = _scores(q_index_nKx[queries], pooled_KNw[:, blocks])
        yield queries, blocks, scores_Ktb.masked_fill_(~_before(grid, queries, blocks), -torch.inf)


def candidate_scores(
    q_index_nKx: Tensor, k_index_Ty: Tensor, coarse_KnC: Tensor, layout: Layout, block_size: int, coarse_size: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(queries, their candidates: int64 [K, t, M], ascending, scores [K, t, M]) a chunk of queries at a time; -inf for
    what is no candidate.

    Candidates are the blocks before a query's own in the `coarse_KnC` blocks of `coarse_size` tokens, int32 [K, n, C],
    ascending, -1 behind, and in the query's own one of these.
    """
    grid = block_grid(layout, block_size)
    groups, queries, listed = coarse_KnC.shape
    pooled_KNw = _pooled(k_index_Ty, groups, grid)
    width = pooled_KNw.shape[2]
    own_n, first_n = query_blocks(layout, coarse_size)
    inside_j = torch.arange(coarse_size // block_size, device=own_n.device)
    for rows in row_chunks(queries, groups * (listed + 1) * len(inside_j) * width, own_n.device):
        coarse_KtC = torch.cat([coarse_KnC[:, rows].long(), own_n[rows, None].expand(groups, -1, 1)], 2)
        blocks_KtC = grid.first_n[rows, None] + (coarse_KtC - first_n[rows, None]) * len(inside_j)
        ids_KtM = (blocks_KtC.unsqueeze(-1) + inside_j).flatten(2)
        given_KtM = (coarse_KtC >= 0).repeat_interleave(len(inside_j), 2) & (ids_KtM < grid.own_n[rows, None])
        ids_KtM = ids_KtM.clamp_(0, pooled_KNw.shape[1] - 1)
        k_KtMw = pooled_KNw.gather(1, ids_KtM.flatten(1).unsqueeze(-1).expand(-1, -1, width)).view(
            *ids_KtM.shape, width
        )
        yield rows, ids_KtM, _scores(q_index_nKx[rows], k_KtMw).masked_fill_(~given_KtM, -torch.inf)


def scored(q_index_nKx: Tensor, k_index_Ty: Tensor, attended: Attended, reference: bool) -> Iterator[Scored]:
    """Every query of every group: with the selected blocks, or with all before its own."""
    grid = attended.grid
    selected_KnC = attended.selected_KnC
    pooled_KNw = _pooled(k_index_Ty, q_index_nKx.shape[1], grid)
    for groups, queries, blocks, mass_gtb in block_masses(attended, reference):
        counts_gtb = _before(grid, queries, blocks).expand_as(mass_gtb)
        if selected_KnC is not None:
            ids_gtC = _places(selected_KnC[groups, queries], grid, queries, blocks)
            counts_gtb = counts_gtb & torch.zeros_like(counts_gtb).scatter_(2, ids_gtC, True)
        logits_gtb = _scores(q_index_nKx[queries, groups], pooled_KNw[groups, blocks])
        yield Scored(
            groups,
            queries,
            blocks,
            logits_gtb.masked_fill_(~counts_gtb, -torch.inf),
            mass_gtb.masked_fill_(~counts_gtb, 0.0),
            pooled_KNw,
            grid,
        )


def _places(selected_gtC: Tensor, grid: BlockGrid, queries: slice, blocks: slice) -> Tensor:
    """int64: the selected blocks, counted from the first of `blocks`; empty slots stand for the own block, which does
    not count."""
    return torch.where(selected_gtC < 0, grid.own_n[queries, None], selected_gtC) - blocks.start


Masses = Iterator[tuple[slice, slice, slice, Tensor]]
"""(groups, queries, blocks, attention's probability in these blocks [g, t, b], any number where it does not count)."""


def block_masses(attended: Attended, reference: bool) -> Masses:
    """The probability of the attention with this `lse`, summed over the heads of a group, a chunk of queries at a
    time. By kernels where they can run, unless the reference is asked for; these may skip what is not selected."""
    # Their tiles have 16 keys of a block at least: of shorter ones they would multiply padding.
    kernels = not reference and attended.block_size >= 16 and triton_multiplies(attended.q_nHd)
    return _masses_by_kernels(attended) if kernels else _masses(attended)


def _masses(attended: Attended) -> Masses:
    """In plain PyTorch, one group at a time."""
    q_nHd, k_TKd, lse_Hn, _, _, block_size, scale, _ = attended
    grid = attended.grid
    dtype = accumulation_dtype(q_nHd.dtype)
    group = q_nHd.shape[1] // k_TKd.shape[1]
    for kv_head in range(k_TKd.shape[1]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        k_NBd = k_TKd[:, kv_head][grid.tokens_NB].to(dtype)
        for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, group * block_size, q_nHd.device):
            p_Gts = (q_nHd[queries, heads].to(dtype).transpose(0, 1) @ k_NBd[blocks].flatten(0, 1).T).mul_(scale)
            p_Gts = p_Gts.sub_(lse_Hn[heads, queries].to(dtype).unsqueeze(-1)).exp_()
            mass_tb = p_Gts.unflatten(2, (-1, block_size)).sum((0, 3))
            yield slice(kv_head, kv_head + 1), queries, blocks, mass_tb.unsqueeze(0)


def _masses_by_kernels(attended: Attended) -> Masses:
    """By the kernels of `msa`, all groups at once, float32; of the selected blocks alone, if some are."""
    from moba_train.mechanisms.gates import msa_kernels

    q_nHd, k_TKd, _, selected_KnC, *_ = attended
    grid = attended.grid
    groups = slice(0, k_TKd.shape[1])
    # The kernels score tokens as well: these index queries and keys are as narrow as a tile can be.
    index = q_nHd.new_zeros((len(q_nHd), groups.stop, 16)), k_TKd.new_zeros((len(k_TKd), 16))
    for part in msa_kernels.scored(*index, attended):
        if selected_KnC is None:
            yield groups, part.queries, part.pairs.blocks, part.mass_gtb
            continue
        numbers = _COPIES * groups.stop
        for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, numbers, q_nHd.device):
            places_KtC = _places(selected_KnC[:, queries], grid, queries, blocks)
            mass_Ktb = part.mass_gtb.new_zeros((*places_KtC.shape[:2], blocks.stop - blocks.start))
            yield groups, queries, blocks, mass_Ktb.scatter_(2, places_KtC, part.mass_gtb[:, queries, :-1])
