"""Attention to blocks of a few tokens, or to single tokens, that are selected once for the query heads of a group.

The kernels of MoBA take blocks of 64 tokens or more and 127 of them; here a block may be a token, and a query may
select any number. Selections stay by group, so a token keeps 4 bytes for each block and key/value head. By Triton
kernels (short_block_kernels.py), or as a mask over dense attention, a chunk of queries at a time, in plain PyTorch.

Shape suffixes: T queries, n some of them, S keys, H query heads, K key/value heads, D head width, C selected blocks of
a query.
"""

from types import ModuleType

import torch
from torch import Tensor

from moba_train.attention.block_sparse import GivenBlocks, listed_blocks
from moba_train.attention.kernels.common.reference import (
    Mask,
    masked_attend,
    masked_attend_backward,
    selected_mask,
)
from moba_train.attention.kernels.table import triton_multiplies
from moba_train.attention.kernels.table import triton_problem as device_problem
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, Selection

HEAD_WIDTHS = (16, 32, 64, 128)
"""Widths that the kernels take."""


def triton_problem(device: str | None, head_width: int) -> str:
    """The reason why the kernels cannot run in a stage; empty if they can. `device`: None if not known."""
    if head_width not in HEAD_WIDTHS:
        return f"head dim {head_width}, one of {', '.join(map(str, HEAD_WIDTHS))} needed"
    return device_problem(device, head_width=64, block_size=64, history_blocks=0)


class ShortBlocks(GivenBlocks):
    """Each query attends to its own block, causally, and to the history blocks that are selected for its group of
    heads: int32 [K, T, C]."""

    def given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """The given blocks of each group, [K, T, C]."""
        return (selected_HTC,)

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """A tensor of the shape and dtype of `given_selection`'s, contents undefined."""
        listed = listed_blocks(self.history_blocks, layout, self.blocks.block_size)
        return (q_THD.new_empty((k_SKD.shape[1], q_THD.shape[0], listed), dtype=torch.int32),)

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the keys of the own and the selected blocks, of all keys."""
        size, scale = self.blocks.block_size, self.blocks.scale
        if kernels := self._kernels(q_THD):
            out, lse = kernels.attend(q_THD, k_SKD, v_SKD, layout, selection[0], size, scale)
            return out, lse
        mask = self._mask(q_THD, k_SKD, layout, selection)
        return masked_attend(q_THD, k_SKD, v_SKD, mask, scale, prefix=layout.is_whole)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        size, scale = self.blocks.block_size, self.blocks.scale
        if kernels := self._kernels(state.q):
            dq, dk, dv = kernels.attend_backward(state, layout, selection[0], size, scale)
            return dq, dk, dv
        mask = self._mask(state.q, state.k, layout, selection)
        return masked_attend_backward(state, mask, scale, prefix=layout.is_whole)

    def _kernels(self, q_THD: Tensor) -> ModuleType | None:
        """The kernels if they can work on these queries and are not refused."""
        wanted = self.blocks.backend
        if wanted == "reference" or not triton_multiplies(q_THD):
            if wanted == "triton":
                raise ValueError(
                    f"{self.blocks.key}: given 'triton', which cannot run on {q_THD.device.type} in {q_THD.dtype} with "
                    f"a head width of {q_THD.shape[2]}; allowed: auto, reference"
                )
            return None
        from moba_train.mechanisms.gates import short_block_kernels

        return short_block_kernels

    def _mask(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout, selection: Selection) -> Mask:
        """The mask of the selection: [H, rows, keys]."""
        by_group = selected_mask(selection[0], layout, self.blocks.block_size)
        group = q_THD.shape[1] // k_SKD.shape[1]
        return lambda rows, keys: by_group(rows, keys).repeat_interleave(group, 0)
