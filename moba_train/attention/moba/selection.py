"""Top-k selection of history blocks.

Shape suffixes: T queries, t a chunk of them, N blocks, H query heads, K key/value heads, D head width, C choices.
"""

import torch
from torch import Tensor

from moba_train.attention.masked import query_chunks
from moba_train.attention.moba.blocks import block_bound, block_ids, first_blocks
from moba_train.attention.moba.gate import gate_scores
from moba_train.attention.protocol import Layout


def select_blocks(
    q_THD: Tensor,
    pooled_NKD: Tensor,
    layout: Layout,
    *,
    block_size: int,
    topk: int,
    select: str,
    always: tuple[str, ...],
) -> Tensor:
    """The history blocks each query attends to: int32 [H, T, C] with C = min(topk - 1, N), ascending, -1 behind.

    Candidates are the blocks of the query's document before its own block; min(topk - 1, candidates) of them are
    chosen. Blocks forced by `always` come first, then the highest gates; of equal gates the lower block id wins, so
    the choice is deterministic. The own block is always attended to and not listed.
    """
    blocks = block_bound(layout, block_size)
    choices = min(topk - 1, blocks)
    heads, queries = q_THD.shape[1], q_THD.shape[0]
    chosen_HTC = torch.full((heads, queries, choices), -1, dtype=torch.int32, device=q_THD.device)
    if choices == 0:
        return chosen_HTC

    first_T = first_blocks(layout.cu_seqlens, block_size)[layout.q_documents]
    own_T = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
    ids_N = torch.arange(blocks, device=q_THD.device)
    for rows in query_chunks(queries, heads * blocks, q_THD.device):
        own_t1, first_t1 = own_T[rows, None], first_T[rows, None]
        candidate_tN = (ids_N >= first_t1) & (ids_N < own_t1)
        forced_tN = torch.zeros_like(candidate_tN)
        if "previous" in always:
            forced_tN |= ids_N == own_t1 - 1
        if "first" in always:
            forced_tN |= ids_N == first_t1
        gates = gate_scores(q_THD[rows], pooled_NKD, select)
        # A candidate's gate stays finite: above what is no candidate, so that exactly min(topk - 1, candidates) are
        # taken, and below what is forced.
        gates = gates.clamp(torch.finfo(gates.dtype).min, torch.finfo(gates.dtype).max)
        gates = gates.masked_fill(forced_tN & candidate_tN, torch.inf).masked_fill(~candidate_tN, -torch.inf)
        best = gates.sort(dim=-1, descending=True, stable=True).indices[..., :choices]
        valid = torch.arange(choices, device=q_THD.device) < (own_t1 - first_t1)
        ordered = torch.where(valid, best, blocks).sort(-1).values
        ordered = torch.where(ordered == blocks, -1, ordered).to(torch.int32)
        chosen_HTC[:, rows] = ordered.repeat_interleave(heads // ordered.shape[0], dim=0)
    return chosen_HTC
