"""Scores and selection of kinds with an index branch (`msa`, `qsa`) from index queries and index keys, as torch
operators, which torch.compile keeps whole.

The score of a block is that of its best token (msa_reference.py, or Triton kernels where they can run: msa_kernels.py)
or, if `pooled`, that of the mean of its index keys (pooled_scores.py). Callers give `operators.layout_arguments`
instead of the layout.

Shape suffixes: n queries of this rank, t a chunk of them, T tokens of the sequence, b blocks of a chunk, H query heads,
K key/value heads, g groups of heads at once, d head width, w index width, x index features of a token, C selected
blocks, S summands.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import QueryBlocks, block_bound
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.kernels.table import triton_multiplies
from moba_train.attention.layout import Layout
from moba_train.mechanisms.gates import msa_reference, pooled_scores
from moba_train.mechanisms.gates.grid import block_grid
from moba_train.mechanisms.layout_operators import with_layout


def _implementation(pooled: bool, reference: bool, *tensors: Tensor) -> ModuleType:
    """The kernels if they can work on these queries, unless the reference is asked for."""
    if pooled:
        return pooled_scores
    if reference or not all(map(triton_multiplies, tensors)):
        return msa_reference
    from moba_train.mechanisms.gates import msa_kernels

    return msa_kernels


@torch.library.custom_op("moba_train::index_select", mutates_args=())
@with_layout
def select(
    q_index: Tensor, k_index: Tensor, layout: Layout, block_size: int, count: int, pooled: bool, reference: bool
) -> Tensor:
    """The history blocks of each query and group of heads, int32 [K, n, C], from the index queries [n, K, w] and the
    index keys of all tokens, [T, w] or, `pooled`, [T, K * w]; `reference`: in plain PyTorch. Without gradient."""
    grid = block_grid(layout, block_size)
    selected_KnC = _unselected(q_index, layout, block_size, count)
    block_scores = _implementation(pooled, reference, q_index).block_scores
    for queries, blocks, scores_Ktb in block_scores(q_index, k_index, layout, block_size):
        # Counted from the chunk's first block, as the scores are.
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
def _(
    q_index: Tensor, k_index: Tensor, layout: Layout, block_size: int, count: int, pooled: bool, reference: bool
) -> Tensor:
    return _unselected(q_index, layout, block_size, count)


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
) -> Tensor:
    """KL divergence [n] of the index's softmax over blocks from attention's probability in the blocks, that of all
    heads of a group; mean over the groups, in nats.

    q [n, H, d] and k [T, K, d] are rotated, lse [H, n] is that of the attention. `selected` [K, n, C]: both
    distributions cover these blocks and, unless `pooled`, the own one, to which the attention went; None: all blocks,
    full attention. Gradients reach the index queries and the index keys, of shapes as for `select`. `reference`: in
    plain PyTorch.
    """
    kl_n = q.new_zeros(q.shape[0], dtype=accumulation_dtype(q.dtype))
    scored = _implementation(pooled, reference, q_index, q).scored
    for part in scored(q_index, k_index, q, k, lse, selected, layout, block_size, scale):
        target_gtb = _share(part.mass_gtb)
        # Blocks that do not count have -inf here and 0 as their target, and the product is NaN.
        log_index_gtb = part.logits_gtb.log_softmax(-1).masked_fill_(target_gtb == 0, 0.0)
        kl_n[part.queries] += (torch.xlogy(target_gtb, target_gtb) - target_gtb * log_index_gtb).sum(-1).sum(0)
    return kl_n / q_index.shape[1]


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
) -> tuple[Tensor, Tensor]:
    """Gradients of the index queries and keys. Computes the distributions again: kept for all queries, they would take
    more memory than attention itself."""
    groups = q_index.shape[1]
    width = k_index.shape[1] // (groups if pooled else 1)
    implementation = _implementation(pooled, reference, q_index, q)
    dq_nKx = torch.zeros_like(q_index)
    parts = min(groups, implementation.KEY_PARTS)
    dk_STx = k_index.new_zeros((parts, *k_index.shape), dtype=accumulation_dtype(q.dtype))
    for part in implementation.scored(q_index, k_index, q, k, lse, selected, layout, block_size, scale):
        grad_t1 = grad_kl[part.queries, None] * (width**-0.5 / groups)
        target_gtb = _share(part.mass_gtb)
        # NaN for a query without a block that counts.
        index_gtb = part.logits_gtb.softmax(-1).masked_fill_(target_gtb.sum(-1, keepdim=True) == 0, 0.0)
        part.add_gradients(index_gtb.sub_(target_gtb).mul_(grad_t1), q_index, k_index, dq_nKx, dk_STx)
    return dq_nKx, dk_STx.sum(0).to(k_index.dtype)


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
