"""Attention to selected blocks by our kernels, for the code of an export: it becomes `__init__.py` of their folder.

Shape suffixes: B texts of T tokens, H query heads, K key/value heads, d head width, C selected blocks of a query.
"""

from functools import lru_cache

import torch
from torch import Tensor

from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.table import interpreted
from moba_train.attention.layout import Layout, packed_layout


def attend_to_blocks(
    q_BHTd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, selected_BHTC: Tensor, block_size: int
) -> tuple[Tensor, Tensor] | None:
    """Output [B, H, T, d] and log-sum-exp of the scores, [B, H, T], over each query's own block, causally, and the
    selected ones; without gradient. None if no kernel takes these tensors.

    selected_BHTC: int32, ids of earlier blocks, counted from the text's first token, ascending, -1 behind
    """
    batch, _, tokens, width = q_BHTd.shape
    layout = _layout(batch, tokens, q_BHTd.device)
    attention = BlockAttention(block_size, width**-0.5, "triton" if interpreted() else "auto", "kernels")
    q_xHd, k_xKd, v_xKd = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTd, k_BKTd, v_BKTd))
    if attention.pick(q_xHd, layout, selected_BHTC.shape[3]).NAME == "reference":
        return None
    # One sequence of all texts, whose blocks are numbered on.
    offsets_B = torch.arange(batch, dtype=torch.int32, device=q_BHTd.device) * -(-tokens // block_size)
    selected_BHTC = torch.where(selected_BHTC < 0, -1, selected_BHTC + offsets_B[:, None, None, None])
    selected_HxC = selected_BHTC.transpose(0, 1).flatten(1, 2).contiguous()
    selection = attention.selection(selected_HxC, q_xHd, layout, k_xKd.shape[1])
    out_xHd, lse_Hx = attention.attend(q_xHd, k_xKd, v_xKd, layout, selection)
    return out_xHd.unflatten(0, (batch, tokens)).transpose(1, 2), lse_Hx.unflatten(1, (batch, tokens)).transpose(0, 1)


@lru_cache(maxsize=4)
def _layout(batch: int, tokens: int, device: torch.device) -> Layout:
    """The layout of a batch, which its layers share."""
    return packed_layout([tokens] * batch, device)
