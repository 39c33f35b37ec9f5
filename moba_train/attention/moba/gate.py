"""The parameter-free gate: how well a query fits a block (MoBA, Lu et al. 2025, arXiv:2502.13189, section 2.2).

Shape suffixes: T queries, S keys, N blocks, H query heads, K key/value heads, D head width.
"""

import torch
from torch import Tensor

from moba_train.attention.masked import accumulation_dtype
from moba_train.attention.moba.blocks import block_bound, block_ids
from moba_train.attention.protocol import Layout


def pool_keys(k_SKD: Tensor, layout: Layout, block_size: int) -> Tensor:
    """Mean of the given keys in each block, [N, K, D] in k's dtype; zeros for blocks without any.

    Keys come after RoPE. The sum runs in float32 (float64 for float64) in the order of the tokens, then is rounded.
    """
    ids_S = block_ids(layout.k_tokens, layout.k_documents, layout, block_size)
    edges = torch.arange(block_bound(layout, block_size) + 1, device=k_SKD.device)
    counts_N = torch.searchsorted(ids_S, edges).diff()
    keys_SE = k_SKD.detach().to(accumulation_dtype(k_SKD.dtype)).flatten(1)
    sums_NE = torch.segment_reduce(keys_SE, "sum", lengths=counts_N, axis=0, initial=0.0, unsafe=True)
    means_NE = sums_NE / counts_N.clamp(min=1).unsqueeze(1)
    return means_NE.to(k_SKD.dtype).unflatten(1, k_SKD.shape[1:])


def gate_scores(q_THD: Tensor, pooled_NKD: Tensor, select: str) -> Tensor:
    """q . block key, unscaled, in float32 (float64 for float64).

    [H, T, N] with `select="head"`; with "group" the gates of the query heads that share a key/value head are summed:
    [K, T, N]. Operands are rounded to the input dtype, as they arrive; their products are exact, and summed in float64:
    matrix products of other sizes add in another order, which in float32 chose other blocks of two that fit equally
    well when a rank had one query (test_moba_selection.py).
    """
    queries, kv_heads = q_THD.shape[0], pooled_NKD.shape[1]
    q_KND = q_THD.detach().double().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    scores_KNN = (q_KND @ pooled_NKD.double().permute(1, 2, 0)).to(accumulation_dtype(q_THD.dtype))
    scores_KGTN = scores_KNN.unflatten(1, (-1, queries))
    return scores_KGTN.sum(1) if select == "group" else scores_KGTN.flatten(0, 1)
