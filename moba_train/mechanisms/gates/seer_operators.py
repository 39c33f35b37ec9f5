"""Gate of the kind `seer`, computed from q, k and block-level features by torch operators, which torch.compile keeps
whole.

Callers give `operators.layout_arguments` instead of the layout, always the last arguments before the numbers.

Shape suffixes: n queries of this rank, T tokens of the sequence, N blocks of the sequence, l blocks that hold queries
of this rank (a bound), c a chunk of these, B tokens of a block, H query heads, K key/value heads, G = H / K, d head
width, w width of the gate, E edge blocks of a rank, R ranks, C selected blocks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import QueryBlocks, block_bound, block_edges
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.kernels.table import triton_multiplies
from moba_train.attention.layout import Layout
from moba_train.mechanisms.gates.grid import EDGES, QueryRows, block_grid, causal_chunks, query_rows, query_rows_bound
from moba_train.mechanisms.layout_operators import with_layout


@torch.library.custom_op("moba_train::seer_blocks", mutates_args=())
@with_layout
def blocks(layout: Layout, block_size: int) -> tuple[Tensor, Tensor]:
    """int64 [N] each: the position of each block's first token in its document, and the block's number of tokens."""
    edges = block_edges(layout, block_size).long()
    return layout.positions(edges[:-1], layout.documents(edges[:-1])), edges.diff()


@blocks.register_fake
@partial(with_layout, traced=True)
def _(layout: Layout, block_size: int) -> tuple[Tensor, Tensor]:
    like = layout.cu_seqlens.new_empty((block_bound(layout, block_size),), dtype=torch.int64)
    return like, torch.empty_like(like)


@torch.library.custom_op("moba_train::seer_pool", mutates_args=())
@with_layout
def pool(q: Tensor, k: Tensor, layout: Layout, block_size: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the pooled q and k, in float32 or float64: sums [N, H + K, d] of q and k over the rank's
    tokens of each block, and the maxima [N, 2 K, d] of k and -k (-inf without tokens). Without gradient."""
    rows = query_rows(layout, block_size)
    ids_l = rows.ids_l[: rows.count]
    present_lB11 = rows.present_lB[: rows.count, :, None, None]
    dtype = accumulation_dtype(q.dtype)
    blocks = block_bound(layout, block_size)
    sums_NHd = q.new_zeros((blocks, q.shape[1] + k.shape[1], q.shape[2]), dtype=dtype)
    extremes_NKd = q.new_full((blocks, 2 * k.shape[1], q.shape[2]), -torch.inf, dtype=dtype)
    if rows.count:
        for x_nHd, first in ((q, 0), (k, q.shape[1])):
            x_lBHd = x_nHd[rows.queries_lB[: rows.count]].to(dtype).masked_fill(~present_lB11, 0.0)
            sums_NHd[ids_l, first : first + x_nHd.shape[1]] = x_lBHd.sum(1)
        k_lBKd = k[rows.queries_lB[: rows.count]].to(dtype)
        # The minimum as the maximum of -k: one reduction here, and one over the ranks, for both.
        both_lBKd = torch.cat([k_lBKd, -k_lBKd], 2).masked_fill(~present_lB11, -torch.inf)
        extremes_NKd[ids_l] = both_lBKd.amax(1)
    return sums_NHd, extremes_NKd


@pool.register_fake
@partial(with_layout, traced=True)
def _(q: Tensor, k: Tensor, layout: Layout, block_size: int) -> tuple[Tensor, Tensor]:
    blocks = block_bound(layout, block_size)
    dtype = accumulation_dtype(q.dtype)
    shape = (blocks, q.shape[1] + k.shape[1], q.shape[2])
    return q.new_empty(shape, dtype=dtype), q.new_empty((blocks, 2 * k.shape[1], q.shape[2]), dtype=dtype)


@torch.library.custom_op("moba_train::seer_select", mutates_args=())
@with_layout
def select(
    q_gate: Tensor, k_gate: Tensor, layout: Layout, queries: int, block_size: int, count: int, threshold: float | None
) -> Tensor:
    """The history blocks of each query, int32 [H, n, C], equal for all queries of a block; from the gate's features of
    all blocks, [N, H, w] and [N, K, w]. Without gradient."""
    rows = query_rows(layout, block_size)
    listed = min(count, block_bound(layout, block_size))
    selected_HlC = torch.full((q_gate.shape[1], rows.bound, listed), -1, dtype=torch.int32, device=q_gate.device)
    for part, blocks, logits_Hcb in _gate_logits(q_gate, k_gate, rows):
        if threshold is not None:
            logits_Hcb.masked_fill_(logits_Hcb.softmax(-1) <= threshold, -torch.inf)
        own = QueryBlocks(rows.ids_l[part], rows.first_l[part])
        chosen_Hcj = choose_blocks(logits_Hcb, own, count, start=blocks.start)
        selected_HlC[:, part, : chosen_Hcj.shape[2]] = chosen_Hcj
    return selected_HlC[:, rows.row_n]


@select.register_fake
@partial(with_layout, traced=True)
def _(q_gate: Tensor, k_gate: Tensor, layout: Layout, queries: int, block_size: int, count: int, _: Any) -> Tensor:
    listed = min(count, block_bound(layout, block_size))
    return q_gate.new_empty((q_gate.shape[1], queries, listed), dtype=torch.int32)


def _gate_logits(q_gate_NHw: Tensor, k_gate_NKw: Tensor, rows: QueryRows) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, blocks, scaled scores [H, rows, blocks]) a chunk of rows at a time; -inf for blocks of the future and of
    other documents."""
    dtype = accumulation_dtype(q_gate_NHw.dtype)
    heads = q_gate_NHw.shape[1]
    kv_heads, width = k_gate_NKw.shape[1:]
    device = q_gate_NHw.device
    for part, blocks in causal_chunks(rows.ids_on_host, rows.first_on_host, heads, device):
        q_Kxw = q_gate_NHw[rows.ids_l[part]].to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        k_Kwb = k_gate_NKw[blocks].to(dtype).permute(1, 2, 0)
        logits_Hcb = (q_Kxw @ k_Kwb).mul_(width**-0.5).view(heads, part.stop - part.start, -1)
        yield part, blocks, logits_Hcb.masked_fill_(~_candidates(rows, part, blocks), -torch.inf)


def _candidates(rows: QueryRows, part: slice, blocks: slice) -> Tensor:
    """Mask, bool [c, blocks]: True where a block is in the row's document and not after the row's own block."""
    ids_b = torch.arange(blocks.start, blocks.stop, device=rows.ids_l.device)
    return (rows.first_l[part, None] <= ids_b) & (ids_b <= rows.ids_l[part, None])


@torch.library.custom_op("moba_train::seer_map", mutates_args=())
@with_layout
def attention_map(
    q: Tensor, k: Tensor, lse: Tensor, layout: Layout, block_size: int, scale: float, reference: bool, every: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest probability of full attention between the queries of each of this rank's blocks and the keys of each
    block, float32 or float64 [H, l, N]; and those of its rows that other ranks may share: their block ids [E] (-1:
    none) and the rows [E, H, N]. Without gradient.

    q [n, H, d] of this rank, k [T, K, d] of all tokens, both rotated; lse [H, n] of full attention.
    `reference`: in plain PyTorch; else by a Triton kernel where it can run. `every`: of every N-th block of a document.
    """
    if not reference and (kernel := _kernel(q, block_size)):
        map_HlN = kernel(q, k, lse, layout, block_size, scale, every)
    else:
        map_HlN = _block_maxima(q, k, lse, layout, block_size, scale, every)
    rows = query_rows(layout, block_size, every)
    # Four places, used or not: ranks gather tensors of equal sizes.
    edge_ids_E = torch.full((EDGES,), -1, device=q.device)
    edge_rows_EHN = map_HlN.new_zeros((EDGES, *map_HlN.shape[::2]))
    for place, row in enumerate(rows.edges):
        edge_ids_E[place] = rows.ids_l[row]
        edge_rows_EHN[place] = map_HlN[:, row]
    return map_HlN, edge_ids_E, edge_rows_EHN


def _kernel(q_nHd: Tensor, block_size: int) -> Callable[..., Tensor] | None:
    """`_block_maxima` in Triton, imported at the first use; None where it cannot take these queries and blocks."""
    if not triton_multiplies(q_nHd):
        return None
    from moba_train.mechanisms.gates import seer_kernel

    return seer_kernel.block_maxima if seer_kernel.able(block_size) else None


def _block_maxima(
    q: Tensor, k: Tensor, lse: Tensor, layout: Layout, block_size: int, scale: float, every: int
) -> Tensor:
    """The largest probabilities [H, l, N]; 0 for blocks that a row does not see."""
    grid = block_grid(layout, block_size)
    rows = query_rows(layout, block_size, every)
    dtype = accumulation_dtype(q.dtype)
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    blocks_N = block_bound(layout, block_size)
    map_HlN = q.new_zeros((heads, rows.bound, blocks_N), dtype=dtype)
    for kv_head in range(kv_heads):
        own = slice(kv_head * group, (kv_head + 1) * group)
        k_NBd = k[:, kv_head][grid.tokens_NB].to(dtype)
        for part, blocks in causal_chunks(rows.ids_on_host, rows.first_on_host, group * block_size**2, q.device):
            at_x = rows.queries_lB[part].flatten()
            q_Gxd = q[at_x, own].to(dtype).transpose(0, 1)
            p_Gxs = (q_Gxd @ k_NBd[blocks].flatten(0, 1).T).mul_(scale)
            p_Gxs = p_Gxs.sub_(lse[own][:, at_x].to(dtype).unsqueeze(-1)).exp_()
            seen_xbB = grid.visible_from(grid.tokens_n[at_x], grid.first_n[at_x], blocks)
            seen_xs = (seen_xbB & rows.present_lB[part].reshape(-1, 1, 1)).flatten(1)
            p_Gxs.masked_fill_(~seen_xs, 0.0)
            p_GcBbB = p_Gxs.view(group, part.stop - part.start, block_size, -1, block_size)
            map_HlN[own, part, blocks] = p_GcBbB.amax((2, 4))
    return map_HlN


@attention_map.register_fake
@partial(with_layout, traced=True)
def _(
    q: Tensor, k: Tensor, lse: Tensor, layout: Layout, block_size: int, scale: float, reference: bool, every: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = block_bound(layout, block_size)
    dtype = accumulation_dtype(q.dtype)
    map_HlN = q.new_empty((q.shape[1], query_rows_bound(q.shape[0], layout, block_size, every), blocks), dtype=dtype)
    ids_E = q.new_empty((EDGES,), dtype=torch.int64)
    return map_HlN, ids_E, map_HlN.new_empty((EDGES, q.shape[1], blocks))


@torch.library.custom_op("moba_train::seer_distill", mutates_args=())
@with_layout
def distill(
    q_gate: Tensor,
    k_gate: Tensor,
    attention_map: Tensor,
    edge_ids: Tensor,
    edge_rows: Tensor,
    layout: Layout,
    queries: int,
    block_size: int,
    every: int,
) -> tuple[Tensor, Tensor]:
    """(KL divergence [n] of each query's block, mean over heads, in nats; target [H, l, N]).

    The target is the map [H, l, N], with the maxima of blocks that other ranks share (ids [R, E], rows [R, E, H, N]),
    each row divided by its sum. The divergence is that of the gate's softmax over blocks from it; gradients reach the
    gate's features [N, H, w] and [N, K, w] of all blocks. `every`: N times that of every N-th block of a document, 0
    for queries of others; the map has these blocks alone.
    """
    rows = query_rows(layout, block_size, every)
    # A copy: an operator may not change its argument, and what it returns may not be one.
    target_HlN = attention_map.clone()
    for row in rows.edges:
        shared = (edge_ids == rows.ids_l[row])[..., None, None]
        # Each rank has the maxima of the queries that it holds of this block; those of the block are the largest of
        # them.
        target_HlN[:, row] = torch.where(shared, edge_rows, 0.0).flatten(0, 1).amax(0)
    # Rows that are not in use sum to 0.
    target_HlN /= target_HlN.sum(-1, keepdim=True).clamp_(min=torch.finfo(target_HlN.dtype).tiny)
    kl_l = target_HlN.new_zeros(rows.bound)
    for part, blocks, logits_Hcb in _gate_logits(q_gate, k_gate, rows):
        target_Hcb = target_HlN[:, part, blocks]
        log_gate_Hcb = logits_Hcb.log_softmax(-1).masked_fill_(~_candidates(rows, part, blocks), 0.0)
        kl_l[part] = (torch.xlogy(target_Hcb, target_Hcb) - target_Hcb * log_gate_Hcb).sum(-1).mean(0)
    return (kl_l * every)[rows.row_n], target_HlN


@distill.register_fake
def _(q_gate: Tensor, k_gate: Tensor, attention_map: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, queries, _, _ = rest
    return attention_map.new_empty((queries,)), torch.empty_like(attention_map)


@torch.library.custom_op("moba_train::seer_distill_backward", mutates_args=())
@with_layout
def _distill_backward(
    grad_kl: Tensor,
    q_gate: Tensor,
    k_gate: Tensor,
    target: Tensor,
    layout: Layout,
    queries: int,
    block_size: int,
    every: int,
) -> tuple[Tensor, Tensor]:
    rows = query_rows(layout, block_size, every)
    heads = q_gate.shape[1]
    kv_heads, width = k_gate.shape[1:]
    dq_NHw = torch.zeros_like(q_gate, dtype=target.dtype)
    dk_NKw = torch.zeros_like(k_gate, dtype=target.dtype)
    if queries:
        # Without queries there is nothing to index, and no chunk in the loop.
        grad_l = grad_kl[rows.queries_lB].masked_fill(~rows.present_lB, 0.0).sum(1) * (width**-0.5 * every / heads)
    for part, blocks, logits_Hcb in _gate_logits(q_gate, k_gate, rows):
        dlogits_Hcb = (logits_Hcb.softmax(-1) - target[:, part, blocks]) * grad_l[part, None]
        dlogits_KGcb = dlogits_Hcb.unflatten(0, (kv_heads, -1))
        k_K1bw = k_gate[blocks].to(target.dtype).transpose(0, 1).unsqueeze(1)
        dq_NHw[rows.ids_l[part]] = (dlogits_KGcb @ k_K1bw).flatten(0, 1).transpose(0, 1)
        q_KGcw = q_gate[rows.ids_l[part]].to(target.dtype).transpose(0, 1).unflatten(0, (kv_heads, -1))
        dk_NKw[blocks] += (dlogits_KGcb.flatten(1, 2).transpose(1, 2) @ q_KGcw.flatten(1, 2)).transpose(0, 1)
    return dq_NHw.to(q_gate.dtype), dk_NKw.to(k_gate.dtype)


@_distill_backward.register_fake
def _(grad_kl: Tensor, q_gate: Tensor, k_gate: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_gate), torch.empty_like(k_gate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_gate, k_gate, _map, _ids, _rows, cu_seqlens, cu_seqlens_cpu, *rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q_gate, k_gate, output[1], cu_seqlens, cu_seqlens_cpu)
    ctx.rest = rest


def _gradients(ctx: Any, grad_kl: Tensor, _grad_target: Tensor) -> tuple[Any, ...]:
    return (*_distill_backward(grad_kl, *ctx.saved_tensors, *ctx.rest), *[None] * (5 + len(ctx.rest)))


distill.register_autograd(_gradients, setup_context=_save)
