"""MoBA's parameter-free gate in plain PyTorch: mean key of each block, query . mean key, and the top-k of these scores
(Lu et al. 2025, arXiv:2502.13189, section 2.2).

Shape suffixes: T queries, t a chunk of them, S keys, N blocks, H query heads, K key/value heads, D head width,
C selected blocks.
"""

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import QueryBlocks, block_bound, block_ids, query_blocks
from moba_train.attention.kernels.common.reference import accumulation_dtype, query_chunks
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.layout import Layout


def pool_keys(k_SKD: Tensor, layout: Layout, block_size: int) -> Tensor:
    """Mean of the given keys in each block, [N, K, D] in k's dtype; zeros for blocks without any.

    Keys come after RoPE. The sum runs in float32 (float64 for float64) in the order of the tokens, then is rounded.
    """
    ids_S = block_ids(layout.k_tokens, layout.k_documents, layout, block_size)
    # Counts by searchsorted: bincount would wait for the GPU to learn its length.
    edges = torch.arange(block_bound(layout, block_size) + 1, device=k_SKD.device)
    counts_N = torch.searchsorted(ids_S, edges).diff()
    keys_SE = k_SKD.detach().to(accumulation_dtype(k_SKD.dtype)).flatten(1)
    # segment_reduce adds in the order of the tokens, so that the kernels can give the same bits; a matrix product or
    # index_add on a GPU would not.
    sums_NE = torch.segment_reduce(keys_SE, "sum", lengths=counts_N, axis=0, initial=0.0, unsafe=True)
    means_NE = sums_NE / counts_N.clamp(min=1).unsqueeze(1)
    return means_NE.to(k_SKD.dtype).unflatten(1, k_SKD.shape[1:])


def gate_scores(q_THD: Tensor, pooled_NKD: Tensor, select: str) -> Tensor:
    """q . block key, unscaled, in float32 (float64 for float64).

    [H, T, N] with `select="head"`; with "group" the gates of the query heads that share a key/value head are summed:
    [K, T, N]. Operands are rounded to the input dtype, as they arrive; their products are exact, and summed in float64:
    matrix products of other sizes add in another order, which in float32 selected the other of two blocks that fit
    equally well when a rank had one query (test_moba_selection.py).
    """
    queries = q_THD.shape[0]
    kv_heads = pooled_NKD.shape[1]
    q_KND = q_THD.detach().double().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    scores_KNN = (q_KND @ pooled_NKD.double().permute(1, 2, 0)).to(accumulation_dtype(q_THD.dtype))
    scores_KGTN = scores_KNN.unflatten(1, (-1, queries))
    return scores_KGTN.sum(1) if select == "group" else scores_KGTN.flatten(0, 1)


def select_blocks(
    q_THD: Tensor,
    pooled_NKD: Tensor,
    layout: Layout,
    *,
    block_size: int,
    history_blocks: int,
    select: str,
    always: tuple[str, ...],
    local: int = 1,
) -> Tensor:
    """The history blocks that each query selects: int32 [H, T, C] with C = `history_blocks` <= N, ascending, -1 behind.

    Candidates are the blocks of the query's document before the `local` ones up to its own; min(C, candidates) of them
    are selected. Blocks forced by `always` come first, then the highest gates; of equal gates the lower block id wins,
    so the selection is deterministic. The diagonal block is always attended to and not listed.
    """
    queries, heads, _ = q_THD.shape
    selected_HTC = torch.full((heads, queries, history_blocks), -1, dtype=torch.int32, device=q_THD.device)
    diagonal_T, first_T = query_blocks(layout, block_size)
    first, previous = (int(name in always) for name in ("first", "previous"))
    for rows in query_chunks(queries, heads * block_bound(layout, block_size), q_THD.device):
        gates = gate_scores(q_THD[rows], pooled_NKD, select)
        # Finite, so that exactly min(C, candidates) are taken: `choose_blocks` takes none with -inf. In float64 it has
        # no kernel: this is what kernels are held to.
        gates = gates.clamp(torch.finfo(gates.dtype).min, torch.finfo(gates.dtype).max).double()
        candidates = QueryBlocks(diagonal_T[rows] - (local - 1), first_T[rows])
        chosen = choose_blocks(gates, candidates, history_blocks, first=first, local=1 + previous)
        selected_HTC[:, rows] = chosen.repeat_interleave(heads // chosen.shape[0], dim=0)
    return selected_HTC
