"""Scores and selection of `msa`, `qsa` and `indexer` from index queries and index keys, as torch operators, which
torch.compile keeps whole.

The score of a block is that of its best token (msa_reference.py, or Triton kernels where they can run: msa_kernels.py)
or, if `pooled`, that of the mean of its index keys (pooled_scores.py). Callers give `operators.layout_arguments`
instead of the layout.

Shape suffixes: n queries of this rank, t a chunk of them, T tokens of the sequence, b blocks of a chunk, H query heads,
K key/value heads, g groups of heads at once, d head width, w index width, x features of a query (w, or as
pooled_scores.py says), M candidates of a query, C selected blocks, S summands.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from moba_train.attention.block_sparse import listed_blocks
from moba_train.attention.kernels.common.geometry import QueryBlocks
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.kernels.table import triton_multiplies
from moba_train.attention.layout import Layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.mechanisms.gates import msa_reference, pooled_scores
from moba_train.mechanisms.gates.grid import Attended, block_grid
from moba_train.mechanisms.layout_operators import with_layout


def _implementation(pooled: bool, reference: bool, *tensors: Tensor) -> ModuleType:
    """The kernels if they can work on these queries, unless the reference is asked for."""
    if pooled:
        return pooled_scores
    if reference or not all(map(triton_multiplies, tensors)):
        return msa_reference
    from moba_train.mechanisms.gates import msa_kernels

    return msa_kernels


def _scored(pooled: bool, reference: bool, *tensors: Tensor) -> Callable[..., Iterator[Any]]:
    """The function `scored` of the implementation."""
    scored: Callable[..., Iterator[Any]] = _implementation(pooled, reference, *tensors).scored
    return partial(scored, reference=reference) if pooled else scored


@torch.library.custom_op("moba_train::index_select", mutates_args=())
@with_layout
def select(
    q_index: Tensor,
    k_index: Tensor,
    coarse: Tensor | None,
    layout: Layout,
    block_size: int,
    count: int,
    pooled: bool,
    reference: bool,
    first: int = 0,
    local: int = 1,
    top_p: float | None = None,
    coarse_size: int = 0,
) -> Tensor:
    """The history blocks of each query and group of heads, int32 [K, n, C], at most `count`. Without gradient.

    From the index queries [n, K, x] and the index keys of all tokens, [T, w], or [T, K * w], one for each group, as
    always if `pooled`. `first`, `local`: blocks that are selected in any case, as in `choose_blocks`. `top_p`: of the
    others, the best, the fewest with which shares in the softmax of all scores add up to it. `coarse`: result of
    `coarse_blocks`, blocks of `coarse_size` tokens to which the search is confined. `reference`: in plain PyTorch.
    """
    grid = block_grid(layout, block_size)
    selected_KnC = _unselected(q_index, layout, block_size, count)
    count = selected_KnC.shape[2]
    if coarse is None:
        parts = _implementation(pooled, reference, q_index).block_scores(q_index, k_index, layout, block_size)
    else:
        parts = pooled_scores.candidate_scores(q_index, k_index, coarse, layout, block_size, coarse_size)
    for queries, blocks, scores_Ktx in parts:
        own_t, first_t = grid.own_n[queries], grid.first_n[queries]
        if isinstance(blocks, slice) and top_p is None:
            where = QueryBlocks(own_t, first_t)
            chosen_Ktj = choose_blocks(scores_Ktx, where, count, first=first, local=local, start=blocks.start)
            selected_KnC[:, queries, : chosen_Ktj.shape[2]] = chosen_Ktj
            continue
        ids_x = blocks
        if isinstance(blocks, slice):
            ids_x = torch.arange(blocks.start, blocks.stop, device=q_index.device)
        own_t1, first_t1 = own_t[:, None], first_t[:, None]
        scores_Ktx = scores_Ktx.masked_fill(ids_x >= own_t1, -torch.inf)
        forced_Ktx = (ids_x < first_t1 + first) | (ids_x > own_t1 - local)
        chosen_Ktj = _best(scores_Ktx, forced_Ktx & (scores_Ktx > -torch.inf), count, top_p)
        ids_Ktj = ids_x.expand_as(scores_Ktx).gather(2, chosen_Ktj.clamp(min=0).long()).int()
        selected_KnC[:, queries, : chosen_Ktj.shape[2]] = torch.where(chosen_Ktj < 0, chosen_Ktj, ids_Ktj)
    return selected_KnC


def _best(scores_Ktx: Tensor, forced_Ktx: Tensor, count: int, top_p: float | None) -> Tensor:
    """Forced ones and those with the highest scores, none with -inf: int32 [K, t, j], where they are, ascending, -1
    behind. `count` at most; with `top_p` also no more than add up to it."""
    none_t = torch.zeros(scores_Ktx.shape[1], dtype=torch.int64, device=scores_Ktx.device)
    behind = scores_Ktx.shape[2]
    wanted_Ktx = scores_Ktx.masked_fill(forced_Ktx, torch.inf)
    chosen_Ktj = choose_blocks(wanted_Ktx, QueryBlocks(none_t + behind, none_t), count)
    if top_p is None:
        return chosen_Ktj
    at_Ktj = chosen_Ktj.clamp(min=0).long()
    empty_Ktj = chosen_Ktj < 0
    share_Ktj = (scores_Ktx.gather(2, at_Ktj) - scores_Ktx.logsumexp(-1, keepdim=True)).exp()
    share_Ktj = share_Ktj.masked_fill(empty_Ktj, 0.0)
    forced_Ktj = forced_Ktx.gather(2, at_Ktj) & ~empty_Ktj
    order_Ktj = (share_Ktj + 2 * forced_Ktj).sort(dim=-1, descending=True, stable=True).indices
    ordered_Ktj = share_Ktj.gather(2, order_Ktj)
    enough_Ktj = ordered_Ktj.cumsum(-1) - ordered_Ktj >= top_p  # without the block itself
    left_out_Ktj = torch.zeros_like(enough_Ktj).scatter_(2, order_Ktj, enough_Ktj) & ~forced_Ktj
    chosen_Ktj = chosen_Ktj.masked_fill(left_out_Ktj | empty_Ktj, behind).sort(-1).values
    return chosen_Ktj.masked_fill(chosen_Ktj == behind, -1)


def _unselected(q_index: Tensor, layout: Layout, block_size: int, count: int) -> Tensor:
    """A selection of nothing, int32 [K, n, C]."""
    shape = (q_index.shape[1], q_index.shape[0], listed_blocks(count, layout, block_size))
    return torch.full(shape, -1, dtype=torch.int32, device=q_index.device)


@select.register_fake
@partial(with_layout, traced=True)
def _(q_index: Tensor, k_index: Tensor, coarse: Any, layout: Layout, block_size: int, count: int, *_: Any) -> Tensor:
    return _unselected(q_index, layout, block_size, count)


@torch.library.custom_op("moba_train::coarse_blocks", mutates_args=())
@with_layout
def coarse_blocks(q: Tensor, k: Tensor, layout: Layout, block_size: int, topk: int, reference: bool) -> Tensor:
    """The blocks before its own that MoBA's gate selects for each query and group of heads, int32 [K, n, C], topk - 1
    at most, the document's first one and the previous one among them; from rotated q [n, H, d] and k [T, K, d]. Without
    gradient."""
    backend: Literal["reference", "auto"] = "reference" if reference else "auto"
    options = MobaAttention.Options(
        block_size=block_size, topk=topk, select="group", always=("current", "previous", "first"), backend=backend
    )
    moba = MobaAttention(options, q.shape[2])
    return moba.select_blocks(q, moba.summarize(k, layout), layout)[:: q.shape[1] // k.shape[1]].contiguous()


@coarse_blocks.register_fake
@partial(with_layout, traced=True)
def _(q: Tensor, k: Tensor, layout: Layout, block_size: int, topk: int, reference: bool) -> Tensor:
    shape = (k.shape[1], q.shape[0], listed_blocks(topk - 1, layout, block_size))
    return q.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("moba_train::index_distill", mutates_args=())
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
    pooled: bool,
    reference: bool,
    every: int = 1,
) -> Tensor:
    """KL divergence [n] of the index's softmax over blocks from attention's probability in the blocks, that of all
    heads of a group; mean over the groups, in nats.

    q [n, H, d] and k [T, K, d] are rotated, lse [H, n] is that of the attention. `selected` [K, n, C]: both
    distributions cover these blocks and, unless `pooled`, the own one, to which the attention went; None: all blocks,
    full attention. Gradients reach the index queries and the index keys, of shapes as for `select`. `reference`: in
    plain PyTorch. `every`: N times that of every N-th query of a document, 0 for the others.
    """
    attended, rows = _sampled(Attended(q, k, lse, selected, layout, block_size, scale, every))
    kl_t = q.new_zeros(len(attended.q_nHd), dtype=accumulation_dtype(q.dtype))
    scored = _scored(pooled, reference, q_index, q)
    for part in scored(q_index[rows], k_index, attended):
        target_gtb = _share(part.mass_gtb)
        # Blocks that do not count have -inf here and 0 as their target, and the product is NaN.
        log_index_gtb = part.logits_gtb.log_softmax(-1).masked_fill_(target_gtb == 0, 0.0)
        kl_t[part.queries] += (torch.xlogy(target_gtb, target_gtb) - target_gtb * log_index_gtb).sum(-1).sum(0)
    kl_n = kl_t.new_zeros(len(q))
    kl_n[rows] = kl_t * every / q_index.shape[1]
    return kl_n


def _sampled(whole: Attended) -> tuple[Attended, slice | Tensor]:
    """The attention of every N-th of all queries, and the rows of these."""
    rows = slice(None) if whole.every == 1 else whole.grid.rows_n
    selected_KnC = None if whole.selected_KnC is None else whole.selected_KnC[:, rows]
    return whole._replace(q_nHd=whole.q_nHd[rows], lse_Hn=whole.lse_Hn[:, rows], selected_KnC=selected_KnC), rows


def _share(mass_gtb: Tensor) -> Tensor:
    """The share of attention's probability in each block; 0 for all blocks of a query whose own block alone has any."""
    total_gt1 = mass_gtb.sum(-1, keepdim=True)
    return mass_gtb / total_gt1.masked_fill(total_gt1 == 0, 1.0)


@distill.register_fake
def _(q_index: Tensor, k_index: Tensor, q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0],), dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("moba_train::index_distill_backward", mutates_args=())
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
    pooled: bool,
    reference: bool,
    every: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of the index queries and keys. Computes the distributions again: kept for all queries, they would take
    more memory than attention itself."""
    groups = q_index.shape[1]
    width = k_index.shape[1] // groups if pooled else q_index.shape[2]
    attended, rows = _sampled(Attended(q, k, lse, selected, layout, block_size, scale, every))
    q_tKx = q_index[rows]
    dq_tKx = torch.zeros_like(q_tKx)
    shares = k_index.shape[1] == width
    parts = min(groups, _implementation(pooled, reference, q_index, q).KEY_PARTS) if shares else 1
    dk_STx = k_index.new_zeros((parts, *k_index.shape), dtype=accumulation_dtype(q.dtype))
    scored = _scored(pooled, reference, q_index, q)
    grad_t1 = grad_kl[rows, None] * (width**-0.5 * every / groups)
    for part in scored(q_tKx, k_index, attended):
        target_gtb = _share(part.mass_gtb)
        # NaN for a query without a block that counts.
        index_gtb = part.logits_gtb.softmax(-1).masked_fill_(target_gtb.sum(-1, keepdim=True) == 0, 0.0)
        part.add_gradients(index_gtb.sub_(target_gtb).mul_(grad_t1[part.queries]), q_tKx, k_index, dq_tKx, dk_STx)
    dq_nKx = torch.zeros_like(q_index)
    dq_nKx[rows] = dq_tKx
    # The sum of one summand would be a copy: in float32, of the index keys of all groups.
    dk_Tx = dk_STx[0] if parts == 1 else dk_STx.sum(0)
    return dq_nKx, dk_Tx.to(k_index.dtype)


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
