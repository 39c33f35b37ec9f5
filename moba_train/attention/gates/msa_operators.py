"""What the kind `msa` computes from index queries and index keys, as torch operators: torch.compile keeps them whole.

The score of a block is that of its best token, so gradients go to one token of each block.

Shape suffixes: n queries of this rank, t a chunk of them, T tokens of the sequence, N blocks, b blocks of a chunk, B
tokens of a block, H query heads, K key/value heads and index query heads, G = H / K, d head width, w index width, C
selected blocks, j the blocks that a query's softmax covers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moba_train.attention.blocks.choose import QueryBlocks, choose_blocks
from moba_train.attention.blocks.geometry import block_bound
from moba_train.attention.gates.grid import BlockGrid, block_grid, causal_chunks, row_chunks
from moba_train.attention.masked import accumulation_dtype
from moba_train.attention.operators import argument_layout
from moba_train.attention.protocol import Layout


@torch.library.custom_op("moba_train::msa_select", mutates_args=())
def select(
    q_index: Tensor,
    k_index: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    q_ranges: Sequence[int],
    block_size: int,
    count: int,
) -> Tensor:
    """The history blocks of each query and group of heads, int32 [K, n, C], from the index queries [n, K, w] and the
    index keys [T, w] of all tokens. Without gradient."""
    layout = argument_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total, q_ranges)
    grid = block_grid(layout, block_size)
    groups = q_index.shape[1]
    listed = min(count, block_bound(layout, block_size))
    selected_KnC = torch.full((groups, q_index.shape[0], listed), -1, dtype=torch.int32, device=q_index.device)
    k_NBw = k_index.to(accumulation_dtype(k_index.dtype))[grid.tokens_NB]
    scores_per_block = groups * block_size
    for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, scores_per_block, q_index.device):
        scores_Ktb = _index_scores(q_index[queries], k_NBw[blocks], grid.visible(queries, blocks)).amax(-1)
        # Counted from the chunk's first block, as the scores are.
        own = QueryBlocks(grid.own_n[queries] - blocks.start, grid.first_n[queries] - blocks.start)
        chosen_Ktj = choose_blocks(scores_Ktb, own, count)
        chosen_Ktj = torch.where(chosen_Ktj < 0, chosen_Ktj, chosen_Ktj + blocks.start)
        selected_KnC[:, queries, : chosen_Ktj.shape[2]] = chosen_Ktj
    return selected_KnC


@select.register_fake
def _(
    q_index: Tensor,
    k_index: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    q_ranges: Sequence[int],
    block_size: int,
    count: int,
) -> Tensor:
    listed = min(count, block_bound(Layout(cu_seqlens, max_seqlen, total), block_size))
    return q_index.new_empty((q_index.shape[1], q_index.shape[0], listed), dtype=torch.int32)


def _index_scores(q_tKw: Tensor, k_bBw: Tensor, seen_tbB: Tensor) -> Tensor:
    """Scaled index scores [K, t, b, B], -inf for tokens that a query does not see."""
    q_Ktw = q_tKw.to(k_bBw.dtype).transpose(0, 1)
    scores_KtbB = (q_Ktw @ k_bBw.flatten(0, 1).T).mul_(q_tKw.shape[-1] ** -0.5).unflatten(2, k_bBw.shape[:2])
    return scores_KtbB.masked_fill_(~seen_tbB, -torch.inf)


@torch.library.custom_op("moba_train::msa_distill", mutates_args=())
def distill(
    q_index: Tensor,
    k_index: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    selected: Tensor | None,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    q_ranges: Sequence[int],
    block_size: int,
    scale: float,
) -> Tensor:
    """KL divergence [n] of the index's softmax over blocks from attention's probability in the blocks, mean over the
    heads of a group; mean over the groups, in nats.

    q [n, H, d] and k [T, K, d] are rotated, lse [H, n] is that of the attention. `selected` [K, n, C]: both
    distributions cover these blocks and the own one, to which the attention went; None: all blocks, full attention.
    Gradients reach the index queries [n, K, w] and the index keys [T, w].
    """
    layout = argument_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total, q_ranges)
    grid = block_grid(layout, block_size)
    kl_n = q.new_zeros(q.shape[0], dtype=accumulation_dtype(q.dtype))
    for chunk in _chunks(q_index, k_index, q, k, lse, selected, grid, -(-max_seqlen // block_size), scale):
        target_tj = chunk.target_tj
        log_index_tj = chunk.logits_tj.log_softmax(-1).masked_fill_(target_tj == 0, 0.0)
        kl_n[chunk.queries] += (torch.xlogy(target_tj, target_tj) - target_tj * log_index_tj).sum(-1)
    return kl_n / q_index.shape[1]


@distill.register_fake
def _(q_index: Tensor, k_index: Tensor, q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0],), dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("moba_train::msa_distill_backward", mutates_args=())
def _distill_backward(
    grad_kl: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    selected: Tensor | None,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    q_ranges: Sequence[int],
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of the index queries and keys. Computes the distributions again: kept for all queries, they would take
    more memory than attention itself."""
    layout = argument_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total, q_ranges)
    grid = block_grid(layout, block_size)
    dtype = accumulation_dtype(q.dtype)
    groups, width = q_index.shape[1:]
    dq_nKw = torch.zeros_like(q_index, dtype=dtype)
    dk_Tw = torch.zeros_like(k_index, dtype=dtype)
    k_Tw = k_index.to(dtype)
    for chunk in _chunks(q_index, k_index, q, k, lse, selected, grid, -(-max_seqlen // block_size), scale):
        grad_t1 = grad_kl[chunk.queries, None] * (width**-0.5 / groups)
        dlogits_tj = (chunk.logits_tj.softmax(-1) - chunk.target_tj) * grad_t1
        dq_nKw[chunk.queries, chunk.group] = (dlogits_tj.unsqueeze(1) @ k_Tw[chunk.best_tj]).squeeze(1)
        q_t1w = q_index[chunk.queries, chunk.group].to(dtype).unsqueeze(1)
        dk_Tw.index_add_(0, chunk.best_tj.flatten(), (dlogits_tj.unsqueeze(-1) * q_t1w).flatten(0, 1))
    return dq_nKw.to(q_index.dtype), dk_Tw.to(k_index.dtype)


@_distill_backward.register_fake
def _(grad_kl: Tensor, q_index: Tensor, k_index: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_index), torch.empty_like(k_index)


class _Chunk(NamedTuple):
    """Some queries of one group."""

    group: int
    queries: slice
    logits_tj: Tensor
    """Index score of each block; -inf for blocks that the query does not see."""
    best_tj: Tensor
    """int64: the token that gave the score."""
    target_tj: Tensor
    """Share of attention's probability in each block."""


def _chunks(
    q_index: Tensor,
    k_index: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    selected: Tensor | None,
    grid: BlockGrid,
    longest: int,
    scale: float,
) -> Iterator[_Chunk]:
    """Every query of every group, in chunks with a bounded number of scores; `longest`: blocks of the longest
    document."""
    dtype = accumulation_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    few = selected is not None and longest > _GATHERED_FROM * (selected.shape[2] + 1)
    over = _over_gathered if few else _over_all
    k_index_NBw = k_index.to(dtype)[grid.tokens_NB]
    for kv_head in range(k.shape[1]):
        own = slice(kv_head * group, (kv_head + 1) * group)
        q_ntGd = q[:, own].to(dtype)
        k_NBd = k[:, kv_head].to(dtype)[grid.tokens_NB]
        one = q_index[:, kv_head], k_index_NBw, q_ntGd, k_NBd, lse[own].to(dtype)
        every = over(*one, None if selected is None else selected[kv_head], grid, scale)
        for queries, logits_tj, best_tj, mass_tj in every:
            target_tj = mass_tj / mass_tj.sum(-1, keepdim=True)
            yield _Chunk(kv_head, queries, logits_tj, best_tj, target_tj)


_GATHERED_FROM = 16
"""Blocks of a document for each block that a query attends to from which on it pays to gather the keys of these: they
are d + w numbers a token, the scores of all keys G + 1."""

_Scored = Iterator[tuple[slice, Tensor, Tensor, Tensor]]
"""(queries, logits [t, j], best tokens [t, j], probability in each block [t, j], up to a factor for each query)."""


def _over_all(
    q_index_nw: Tensor,
    k_index_NBw: Tensor,
    q_nGd: Tensor,
    k_NBd: Tensor,
    lse_Gn: Tensor,
    selected_nC: Tensor | None,
    grid: BlockGrid,
    scale: float,
) -> _Scored:
    """For one group, from the scores of all keys; of the selected blocks and the own one, or of all."""
    block_size = k_NBd.shape[1]
    scores_per_block = q_nGd.shape[1] * block_size
    for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, scores_per_block, q_nGd.device):
        seen_tbB = grid.visible(queries, blocks)
        if selected_nC is not None:
            own_t1 = grid.own_n[queries, None]
            ids_tj = torch.cat([torch.where(selected_nC[queries] < 0, own_t1, selected_nC[queries]), own_t1], 1)
            seen_tbB &= torch.zeros_like(seen_tbB[..., 0]).scatter_(1, ids_tj - blocks.start, True).unsqueeze(-1)
        scores_tbB = _index_scores(q_index_nw[queries, None], k_index_NBw[blocks], seen_tbB)[0]
        logits_tb, place_tb = scores_tbB.max(-1)
        best_tb = grid.tokens_NB[blocks].expand(len(seen_tbB), -1, -1).gather(2, place_tb.unsqueeze(-1)).squeeze(-1)
        p_Gts = (q_nGd[queries].transpose(0, 1) @ k_NBd[blocks].flatten(0, 1).T).mul_(scale)
        p_Gts = p_Gts.sub_(lse_Gn[:, queries, None]).exp_().masked_fill_(~seen_tbB.flatten(1), 0.0)
        yield queries, logits_tb, best_tb, p_Gts.unflatten(2, (-1, block_size)).sum((0, 3))


def _over_gathered(
    q_index_nw: Tensor,
    k_index_NBw: Tensor,
    q_nGd: Tensor,
    k_NBd: Tensor,
    lse_Gn: Tensor,
    selected_nC: Tensor | None,
    grid: BlockGrid,
    scale: float,
) -> _Scored:
    """As `_over_all`, from the gathered keys of the selected blocks and of the own one alone."""
    assert selected_nC is not None
    block_size = k_NBd.shape[1]
    width = q_index_nw.shape[-1]
    gathered = (selected_nC.shape[1] + 1) * block_size * (width + k_NBd.shape[2])
    for queries in row_chunks(len(selected_nC), gathered, q_nGd.device):
        ids_tj = torch.cat([selected_nC[queries].long(), grid.own_n[queries, None]], 1)
        chosen_tj1 = (ids_tj >= 0).unsqueeze(-1)
        ids_tj = ids_tj.clamp(min=0)
        tokens_tjB = grid.tokens_NB[ids_tj]
        seen_tjB = grid.present_NB[ids_tj] & chosen_tj1 & (tokens_tjB <= grid.tokens_n[queries, None, None])
        q_t1w = q_index_nw[queries, None].to(k_index_NBw.dtype)
        scores_tjB = (q_t1w @ k_index_NBw[ids_tj].flatten(1, 2).transpose(1, 2)).view(seen_tjB.shape) * width**-0.5
        logits_tj, place_tj = scores_tjB.masked_fill_(~seen_tjB, -torch.inf).max(-1)
        best_tj = tokens_tjB.gather(2, place_tj.unsqueeze(-1)).squeeze(-1)
        p_tGs = (q_nGd[queries] @ k_NBd[ids_tj].flatten(1, 2).transpose(1, 2)).mul_(scale)
        p_tGs = p_tGs.sub_(lse_Gn[:, queries].T.unsqueeze(-1)).exp_().masked_fill_(~seen_tjB.flatten(1)[:, None], 0.0)
        yield queries, logits_tj, best_tj, p_tGs.unflatten(2, (-1, block_size)).sum((1, 3))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, max_seqlen, total, q_ranges, block_size, scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = max_seqlen, total, q_ranges, block_size, scale


def _gradients(ctx: Any, grad_kl: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
    grads = _distill_backward(grad_kl, *saved, *ctx.rest)
    return (*grads, *[None] * (len(saved) - 2 + len(ctx.rest)))


distill.register_autograd(_gradients, setup_context=_save)
