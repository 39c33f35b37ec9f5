"""Attention to selected blocks with a softmax for each block, whose results are added up.

Nothing joins by (out, lse) here: the sum over blocks is not a softmax over their keys, so all keys of a block must be
given at once (`LocalAttention.merges`).

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width, C selected blocks of a query.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.blocks import composed
from moba_train.attention.blocks.joins import WeightedSum
from moba_train.attention.blocks.reference import selected_mask
from moba_train.attention.masked import Mask, accumulation_dtype, masked_attend, masked_attend_backward
from moba_train.attention.protocol import BackwardState, Gradients, Layout, Selection


@dataclass(frozen=True)
class SummedBlocks:
    """Each query and head attends to its own block, causally, and to selected earlier blocks of its document; each of
    them has a softmax of its own, and the results are added up, those of the selected blocks times their weights.

    The selector gives block ids as for `BlockAttention` (attention.py), and the weights where there are any. `lse` is
    the log-sum-exp over all keys.
    """

    block_size: int
    scale: float
    """Factor on the scores: positive, finite."""
    backend: str
    """auto, composed or reference."""
    key: str
    """YAML key of `backend`, for messages."""
    weighted: bool = False
    """Whether `selection` is given weights; otherwise all are 1."""
    own: bool = True
    """Whether queries attend to their own block at all."""

    def selection(
        self, selected_HTC: Tensor, weights_HTC: Tensor | None, q_THD: Tensor, layout: Layout, kv_heads: int
    ) -> Selection:
        """(selected blocks, weights if there are any, what `composed` keeps with them).

        `weights_HTC`: float32 or float64.
        """
        lists: Selection = ()
        if self._composes(q_THD, layout):
            lists = composed.block_lists(selected_HTC, layout, kv_heads, self.block_size)
        return (selected_HTC, *([] if weights_HTC is None else [weights_HTC]), *lists)

    def empty_selection(self, selected: int, q_THD: Tensor, layout: Layout, kv_heads: int) -> Selection:
        """Tensors of the shapes and dtypes of `selection`'s for C = `selected`, contents undefined."""
        shape = q_THD.shape[1], q_THD.shape[0]
        selected_HTC = q_THD.new_empty((*shape, selected), dtype=torch.int32)
        weights = [selected_HTC.new_empty(selected_HTC.shape, dtype=accumulation_dtype(q_THD.dtype))]
        lists: Selection = ()
        if self._can_compose(q_THD, layout):  # not kept: sizes may be symbolic in torch.compile's tracing
            lists = composed.empty_block_lists(selected_HTC, layout, kv_heads, self.block_size)
        return (selected_HTC, *(weights if self.weighted else []), *lists)

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """out [T, H, D] and lse [H, T]."""
        selected_HTC, join, lists = self._taken_apart(selection)
        if self._composes(q_THD, layout):
            made = selected_HTC, *lists
            return composed.attend(
                q_THD, k_SKD, v_SKD, layout, made, block_size=self.block_size, scale=self.scale, join=join
            )
        out_THD = torch.zeros(q_THD.shape, dtype=accumulation_dtype(q_THD.dtype), device=q_THD.device)
        lse_HT = out_THD.new_full((q_THD.shape[1], q_THD.shape[0]), -torch.inf)
        for mask, weight_HT in self._slots(selected_HTC, join.weights_HTC, layout):
            part_THD, part_HT = masked_attend(q_THD, k_SKD, v_SKD, mask, self.scale, prefix=layout.is_whole)
            out_THD += _times(part_THD, weight_HT)
            lse_HT = torch.logaddexp(lse_HT, part_HT)
        return out_THD.to(q_THD.dtype), lse_HT

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`; computes the results of each block anew."""
        selected_HTC, join, lists = self._taken_apart(selection)
        if self._composes(state.q, layout):
            made = selected_HTC, *lists
            return composed.attend_backward(
                state, layout, made, block_size=self.block_size, scale=self.scale, join=join
            )
        _, q_THD, k_SKD, v_SKD, _, _ = state
        sums = [torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in (q_THD, k_SKD, v_SKD)]
        for mask, weight_HT in self._slots(selected_HTC, join.weights_HTC, layout):
            out, lse = masked_attend(q_THD, k_SKD, v_SKD, mask, self.scale, prefix=layout.is_whole)
            own = state._replace(dout=_times(state.dout, weight_HT).to(q_THD.dtype), out=out, lse=lse)
            grads = masked_attend_backward(own, mask, self.scale, prefix=layout.is_whole)
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q_THD, k_SKD, v_SKD), strict=True))
        return dq, dk, dv

    def _taken_apart(self, selection: Selection) -> tuple[Tensor, WeightedSum, Selection]:
        """(selected blocks, how they are joined, the lists of `composed`)."""
        weights = selection[1] if self.weighted else None
        return selection[0], WeightedSum(weights, self.own), selection[1 + self.weighted :]

    def _slots(
        self, selected_HTC: Tensor, weights_HTC: Tensor | None, layout: Layout
    ) -> Iterator[tuple[Mask, Tensor | None]]:
        """The mask and the weight of one block of each query after the other: the own one, then the selected ones."""
        if self.own:
            yield selected_mask(selected_HTC[..., :0], layout, self.block_size), None
        for slot in range(selected_HTC.shape[2]):
            mask = selected_mask(selected_HTC[..., slot : slot + 1], layout, self.block_size, own=False)
            yield mask, None if weights_HTC is None else weights_HTC[..., slot]

    def _composes(self, q_THD: Tensor, layout: Layout) -> bool:
        """Whether composed.py takes the call, and not the plain PyTorch below; kept with the layout."""
        key = ("summed blocks compose", self, q_THD.shape, q_THD.dtype, q_THD.device)
        return layout.cached(key, lambda: self._can_compose(q_THD, layout))

    def _can_compose(self, q_THD: Tensor, layout: Layout) -> bool:
        if self.backend == "reference" or (self.backend == "auto" and not q_THD.is_cuda):
            return False
        refused = composed.refuses(q_THD, layout, self.block_size)
        if refused and self.backend == "composed" and composed.composes(layout, self.block_size):
            raise ValueError(f"{self.key}: 'composed' cannot run this call: {refused}; use 'auto'")
        if refused and q_THD.is_cuda:
            slow = f"{self.key}: {self.backend} takes plain PyTorch, which is very much slower than the kernels"
            warnings.warn(f"{slow}: {refused}", stacklevel=2)  # shown once per place, Python's default
        return not refused


def _times(x_THD: Tensor, weight_HT: Tensor | None) -> Tensor:
    return x_THD if weight_HT is None else x_THD * weight_HT.T.unsqueeze(-1)
