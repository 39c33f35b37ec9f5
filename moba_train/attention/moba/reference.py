"""The reference backend: MoBA as a mask over dense attention. Clear before fast.

A mask needs the choice alone. Lists beside it are passed over: kernels may have planned for queries that then meet keys
which the kernels cannot take (backends.py).

Shape suffixes: T queries, t a chunk of them, S keys, s a range of them, N blocks, H query heads, C choices.
"""

import torch
from torch import Tensor

from moba_train.attention.masked import Mask, masked_attend, masked_attend_backward
from moba_train.attention.moba.blocks import block_bound, block_ids
from moba_train.attention.protocol import Layout, Plan


def invert_choice(chosen_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Plan:
    """Nothing."""
    return ()


empty_lists = invert_choice


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    layout: Layout,
    chosen_HTC: Tensor,
    *lists: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] of any queries over those of the given keys that are chosen or their own block's."""
    mask = chosen_mask(chosen_HTC, layout, block_size)
    return masked_attend(q_THD, k_SKD, v_SKD, mask, scale, prefix=layout.is_whole)


def attend_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
    chosen_HTC: Tensor,
    *lists: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attend`."""
    mask = chosen_mask(chosen_HTC, layout, block_size)
    return masked_attend_backward(dout_THD, q_THD, k_SKD, v_SKD, out_THD, lse_HT, mask, scale, prefix=layout.is_whole)


def chosen_mask(chosen_HTC: Tensor, layout: Layout, block_size: int) -> Mask:
    """The mask of MoBA attention for a given choice of history blocks (int [H, T, C], -1 = none): [H, rows, keys].

    A key counts when its block is the query's own or a chosen one and it is not in the future; history blocks lie
    wholly in the past, so the one comparison of token indices makes only the own block causal inside.
    """
    blocks = block_bound(layout, block_size)
    q_blocks_T = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
    k_blocks_S = block_ids(layout.k_tokens, layout.k_documents, layout, block_size)
    q_tokens_T, k_tokens_S = layout.q_tokens, layout.k_tokens

    def mask(rows: slice, keys: slice) -> Tensor:
        choices_HtC = chosen_HTC[:, rows].long()
        own_Ht1 = q_blocks_T[rows].view(1, -1, 1).expand(choices_HtC.shape[0], -1, 1)
        attended_HtN = torch.zeros(*own_Ht1.shape[:2], blocks + 1, dtype=torch.bool, device=chosen_HTC.device)
        attended_HtN.scatter_(2, torch.where(choices_HtC < 0, blocks, choices_HtC), True)
        attended_HtN.scatter_(2, own_Ht1, True)
        past_ts = k_tokens_S[None, keys] <= q_tokens_T[rows, None]
        return attended_HtN[:, :, k_blocks_S[keys]] & past_ts

    return mask
