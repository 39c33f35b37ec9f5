"""Scores and selection of the kind `qsa` from index queries and index keys, as torch operators, which torch.compile
keeps whole.

The score of an entry, a block of a few tokens, is that of the mean of its index keys. A query scores the entries that
end before its own, so that no mean holds a later token than the query. Callers give `layout_arguments` instead of the
layout.

Shape suffixes: n queries of this rank, t a chunk of them, T tokens of the sequence, N entries, b entries of a chunk, B
tokens of an entry, H query heads, K key/value heads, one index query and key each, G query heads of a group, d head
width, w index width, C selected entries.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import QueryBlocks, block_bound
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.layout import Layout
from moba_train.mechanisms.gates.grid import BlockGrid, block_grid, causal_chunks
from moba_train.mechanisms.layout_operators import with_layout


def _pooled(k_index: Tensor, groups: int, grid: BlockGrid) -> Tensor:
    """Mean index key of each entry and group, [K, N, w]; of an entry without tokens 0."""
    dtype = accumulation_dtype(k_index.dtype)
    k_NBKw = k_index.to(dtype)[grid.tokens_NB].unflatten(-1, (groups, -1)) * grid.present_NB[..., None, None]
    return (k_NBKw.sum(1) / _sizes(grid)[:, None, None]).transpose(0, 1)


def _sizes(grid: BlockGrid) -> Tensor:
    """Tokens of each entry, [N]; 1 for entries without any."""
    return grid.present_NB.sum(1).clamp(min=1)


def _before(grid: BlockGrid, queries: slice, blocks: slice) -> Tensor:
    """Mask, bool [t, b]: the entries of a query's document that end before its own."""
    ids_b = torch.arange(blocks.start, blocks.stop, device=grid.own_n.device)
    return (ids_b >= grid.first_n[queries, None]) & (ids_b < grid.own_n[queries, None])


@torch.library.custom_op("moba_train::qsa_select", mutates_args=())
@with_layout
def select(q_index: Tensor, k_index: Tensor, layout: Layout, block_size: int, count: int) -> Tensor:
    """The entries before its own that each query and group selects, int32 [K, n, C], from the index queries [n, K, w]
    and the index keys [T, K * w] of all tokens. Without gradient."""
    grid = block_grid(layout, block_size)
    groups, width = q_index.shape[1:]
    selected_KnC = _unselected(q_index, layout, block_size, count)
    pooled_KNw = _pooled(k_index, groups, grid)
    for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, groups, q_index.device):
        q_Ktw = q_index[queries].to(pooled_KNw.dtype).transpose(0, 1)
        scores_Ktb = (q_Ktw @ pooled_KNw[:, blocks].transpose(1, 2)).mul_(width**-0.5)
        own = QueryBlocks(grid.own_n[queries] - blocks.start, grid.first_n[queries] - blocks.start)
        chosen_Ktj = choose_blocks(scores_Ktb, own, count)
        chosen_Ktj = torch.where(chosen_Ktj < 0, chosen_Ktj, chosen_Ktj + blocks.start)
        selected_KnC[:, queries, : chosen_Ktj.shape[2]] = chosen_Ktj
    return selected_KnC


def _unselected(q_index: Tensor, layout: Layout, block_size: int, count: int) -> Tensor:
    """A selection of nothing, int32 [K, n, C]."""
    shape = (q_index.shape[1], q_index.shape[0], min(count, block_bound(layout, block_size)))
    return torch.full(shape, -1, dtype=torch.int32, device=q_index.device)


@select.register_fake
@partial(with_layout, traced=True)
def _(q_index: Tensor, k_index: Tensor, layout: Layout, block_size: int, count: int) -> Tensor:
    return _unselected(q_index, layout, block_size, count)


class _Compared(NamedTuple):
    """Distributions of one group over the entries before those of some queries, 0 where they do not count."""

    group: int
    queries: slice
    blocks: slice
    counts_tb: Tensor
    """True for the entries that are compared; none for a query without any of attention's probability in them."""
    log_index_tb: Tensor
    target_tb: Tensor


def _compared(
    q_index: Tensor,
    pooled_KNw: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    selected: Tensor | None,
    grid: BlockGrid,
    scale: float,
) -> Iterator[_Compared]:
    """Every query of every group, a chunk of queries at a time."""
    dtype = pooled_KNw.dtype
    width = q_index.shape[2]
    group = q.shape[1] // k.shape[1]
    block_size = grid.tokens_NB.shape[1]
    for kv_head in range(k.shape[1]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        k_NBd = k[:, kv_head][grid.tokens_NB].to(dtype)
        for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, group * block_size, q.device):
            counts_tb = _before(grid, queries, blocks)
            if selected is not None:
                ids_tC = selected[kv_head, queries].long()
                # Empty slots stand for the own entry, which does not count.
                ids_tC = torch.where(ids_tC < 0, grid.own_n[queries, None], ids_tC) - blocks.start
                counts_tb &= torch.zeros_like(counts_tb).scatter_(1, ids_tC, True)
            p_Gts = (q[queries, heads].to(dtype).transpose(0, 1) @ k_NBd[blocks].flatten(0, 1).T).mul_(scale)
            p_Gts = p_Gts.sub_(lse[heads, queries].to(dtype).unsqueeze(-1)).exp_()
            # Filled, not multiplied by the mask: what is not attended to may have overflowed to inf.
            mass_tb = p_Gts.unflatten(2, (-1, block_size)).sum((0, 3)).masked_fill_(~counts_tb, 0.0)
            total_t1 = mass_tb.sum(-1, keepdim=True)
            logits_tb = (q_index[queries, kv_head].to(dtype) @ pooled_KNw[kv_head, blocks].T).mul_(width**-0.5)
            counts_tb &= total_t1 > 0
            log_index_tb = logits_tb.masked_fill_(~counts_tb, -torch.inf).log_softmax(-1).masked_fill(~counts_tb, 0.0)
            target_tb = (mass_tb / total_t1).masked_fill(~counts_tb, 0.0)
            yield _Compared(kv_head, queries, blocks, counts_tb, log_index_tb, target_tb)


@torch.library.custom_op("moba_train::qsa_distill", mutates_args=())
@with_layout
def distill(
    q_index: Tensor,
    k_index: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    selected: Tensor | None,
    layout: Layout,
    block_size: int,
    scale: float,
) -> Tensor:
    """KL divergence [n] of the index's softmax over entries from the share of attention's probability in each, that of
    all heads of a group; mean over the groups, in nats.

    q [n, H, d] and k [T, K, d] are rotated, lse [H, n] is that of the attention. Both distributions cover the entries
    before a query's own, or those of them that are `selected` [K, n, C], to which the attention went. Gradients reach
    the index queries [n, K, w] and the index keys [T, K * w].
    """
    grid = block_grid(layout, block_size)
    groups = q_index.shape[1]
    kl_n = q.new_zeros(q.shape[0], dtype=accumulation_dtype(q.dtype))
    for part in _compared(q_index, _pooled(k_index, groups, grid), q, k, lse, selected, grid, scale):
        terms_tb = torch.xlogy(part.target_tb, part.target_tb) - part.target_tb * part.log_index_tb
        kl_n[part.queries] += terms_tb.sum(-1) / groups
    return kl_n


@distill.register_fake
def _(q_index: Tensor, k_index: Tensor, q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0],), dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("moba_train::qsa_distill_backward", mutates_args=())
@with_layout
def _distill_backward(
    grad_kl: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    selected: Tensor | None,
    layout: Layout,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of the index queries and keys. Computes the distributions again: kept for all queries, they would take
    more memory than attention itself."""
    grid = block_grid(layout, block_size)
    groups, width = q_index.shape[1:]
    pooled_KNw = _pooled(k_index, groups, grid)
    dq_nKw = torch.zeros_like(q_index)
    dpooled_KNw = torch.zeros_like(pooled_KNw)
    for part in _compared(q_index, pooled_KNw, q, k, lse, selected, grid, scale):
        grad_t1 = grad_kl[part.queries, None] * (width**-0.5 / groups)
        dlogits_tb = (part.log_index_tb.exp() * part.counts_tb - part.target_tb) * grad_t1
        dq_nKw[part.queries, part.group] = (dlogits_tb @ pooled_KNw[part.group, part.blocks]).to(q_index.dtype)
        q_tw = q_index[part.queries, part.group].to(dlogits_tb.dtype)
        dpooled_KNw[part.group, part.blocks] += dlogits_tb.T @ q_tw
    dmean_NKw = dpooled_KNw.transpose(0, 1) / _sizes(grid)[:, None, None]
    dk_Tx = torch.zeros_like(k_index)
    dk_Tx[grid.tokens_NB[grid.present_NB]] = (
        dmean_NKw.flatten(1)[:, None].expand(-1, grid.tokens_NB.shape[1], -1)[grid.present_NB].to(k_index.dtype)
    )
    return dq_nKw, dk_Tx


@_distill_backward.register_fake
def _(grad_kl: Tensor, q_index: Tensor, k_index: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_index), torch.empty_like(k_index)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The first eight inputs are tensors: those of `distill`, and cu_seqlens on the device and the host."""
    ctx.save_for_backward(*inputs[:8])
    ctx.rest = inputs[8:]


def _gradients(ctx: Any, grad_kl: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
    grads = _distill_backward(grad_kl, *saved, *ctx.rest)
    return (*grads, *[None] * (len(saved) - 2 + len(ctx.rest)))


distill.register_autograd(_gradients, setup_context=_save)
