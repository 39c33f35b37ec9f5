"""The reference backend: attention to selected blocks as a mask over dense attention, in plain PyTorch.

A mask needs the selected blocks alone. Block lists behind them are ignored: kernels may have made them for queries that
then meet keys which the kernels refuse (backends.py).

Shape suffixes: T queries, t a chunk of them, S keys, s a range of them, N blocks, H query heads, C selected blocks.
"""

import torch
from torch import Tensor

from moba_train.attention.blocks.geometry import block_bound, block_ids
from moba_train.attention.masked import Mask, masked_attend, masked_attend_backward
from moba_train.attention.protocol import BackwardState, Gradients, Layout, Selection

NAME = "reference"


def block_lists(selected_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Selection:
    """Nothing."""
    return ()


empty_block_lists = block_lists


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    layout: Layout,
    selection: Selection,
    *,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] of any queries over the given keys of their own and their selected blocks."""
    mask = selected_mask(selection[0], layout, block_size)
    return masked_attend(q_THD, k_SKD, v_SKD, mask, scale, prefix=layout.is_whole)


def attend_backward(
    state: BackwardState, layout: Layout, selection: Selection, *, block_size: int, scale: float
) -> Gradients:
    """(dq, dk, dv) of `attend`."""
    mask = selected_mask(selection[0], layout, block_size)
    return masked_attend_backward(state, mask, scale, prefix=layout.is_whole)


def selected_mask(selected_HTC: Tensor, layout: Layout, block_size: int, *, own: bool = True) -> Mask:
    """The mask of attention to selected history blocks (int [H, T, C], -1 = none) and the own block: [H, rows, keys].

    Without `own`, the own block counts only where it is listed.

    A key counts when its block is the query's own or a selected one and it is not in the future; history blocks lie
    wholly in the past, so the one comparison of token indices makes only the own block causal inside.
    """
    blocks = block_bound(layout, block_size)
    q_blocks_T = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
    k_blocks_S = block_ids(layout.k_tokens, layout.k_documents, layout, block_size)
    q_tokens_T = layout.q_tokens
    k_tokens_S = layout.k_tokens

    def mask(rows: slice, keys: slice) -> Tensor:
        selected_HtC = selected_HTC[:, rows].long()
        own_Ht1 = q_blocks_T[rows].view(1, -1, 1).expand(selected_HtC.shape[0], -1, 1)
        attended_HtN = torch.zeros(*own_Ht1.shape[:2], blocks + 1, dtype=torch.bool, device=selected_HTC.device)
        attended_HtN.scatter_(2, torch.where(selected_HtC < 0, blocks, selected_HtC), True)
        if own:
            attended_HtN.scatter_(2, own_Ht1, True)
        past_ts = k_tokens_S[None, keys] <= q_tokens_T[rows, None]
        return attended_HtN[:, :, k_blocks_S[keys]] & past_ts

    return mask
