"""Attention to blocks that all query heads of a key/value head select together, kept once for the group, and to local
blocks besides, which need no ids at all.

`BlockAttention` keeps ids for each query head, and the kernels' lists beside them: with 64 blocks more bytes than q
has. Here a selection is the ids of each key/value head alone. Ids for all heads and lists exist for some heads at a
time, and are made anew in the backward pass.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, G = H / K, D head width, C selected blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.blocks.attention import BlockAttention
from moba_train.attention.blocks.spans import KeySpans, LocalBlocks, with_local_blocks
from moba_train.attention.protocol import BackwardState, Gradients, Layout, Selection

_ENTRIES = 2**25
"""Selected blocks of all query heads that are attended to at once: 128 MiB of ids, and as much of lists."""


@dataclass(frozen=True)
class SharedBlocks:
    """`BlockAttention` for selections that the query heads of a key/value head share, and to local blocks.

    The Triton kernels attend to the local blocks as one span of keys; other backends are given their ids, too.
    """

    blocks: BlockAttention
    local: LocalBlocks

    def selection(self, selected_KTC: Tensor, q_THD: Tensor, layout: Layout) -> Selection:
        """The selected blocks of the layout's queries, int32 [K, T, C], none of them local; their local history blocks,
        int32 [T, 2], and a tensor without elements whose first sizes are H and L, the most of these."""
        sizes = q_THD.shape[1], self.local.most(layout), 0
        return selected_KTC, self.local.history(layout).clone(), selected_KTC.new_empty(sizes)

    def empty_selection(self, selected: int, q_THD: Tensor, layout: Layout, kv_heads: int) -> Selection:
        """Tensors of the shapes and dtypes of `selection`'s for C = `selected`, contents undefined."""
        tokens, heads, _ = q_THD.shape
        shapes = (kv_heads, tokens, selected), (tokens, 2), (heads, self.local.most(layout), 0)
        return tuple(q_THD.new_empty(shape, dtype=torch.int32) for shape in shapes)

    def selected_blocks(self, selection: Selection) -> Tensor:
        """All blocks that a query attends to besides its own, local ones included: int32 [H, T, C]."""
        kv_heads = list(self.selected_by_kv_head(selection))
        return torch.stack(kv_heads).repeat_interleave(selection[2].shape[0] // len(kv_heads), dim=0)

    def selected_by_kv_head(self, selection: Selection) -> Iterator[Tensor]:
        """All blocks that a query attends to besides its own, int32 [T, C], for one key/value head after the other."""
        selected_KTC, local_T2, sizes_HL0 = selection
        for selected_1TC in selected_KTC.split(1):
            yield with_local_blocks(selected_1TC, local_T2, sizes_HL0.shape[1]).squeeze(0)

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """out [T, H, D] and lse [H, T] over the own, the local and the selected blocks, as far as their keys are
        given."""
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        lse_HT = torch.empty(q_THD.shape[1::-1], dtype=wide, device=q_THD.device)
        for kv, of in self._parts(selection):
            part, spans = self._part(selection, kv, q_THD[:, of], layout)
            tensors = q_THD[:, of], k_SKD[:, kv], v_SKD[:, kv]
            out_THD[:, of], lse_HT[of] = self.blocks.attend(*tensors, layout, part, spans)
        return out_THD, lse_HT

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (state.q, state.k, state.v))
        for kv, of in self._parts(selection):
            some = state.with_heads(of, kv)
            part, spans = self._part(selection, kv, some.q, layout)
            dq[:, of], dk[:, kv], dv[:, kv] = self.blocks.attend_backward(some, layout, part, spans)
        return dq, dk, dv

    def _parts(self, selection: Selection) -> Iterator[tuple[slice, slice]]:
        """Key/value heads that are attended to at once, and their query heads."""
        selected_KTC, _, sizes_HL0 = selection
        kv_heads, tokens, selected = selected_KTC.shape
        group = len(sizes_HL0) // kv_heads
        together = max(1, _ENTRIES // max(1, tokens * group * selected))
        for first in range(0, kv_heads, together):
            last = min(first + together, kv_heads)
            yield slice(first, last), slice(first * group, last * group)

    def _part(
        self, selection: Selection, kv: slice, q_THD: Tensor, layout: Layout
    ) -> tuple[Selection, KeySpans | None]:
        """The selection of some heads as `BlockAttention` takes it, and the spans of local blocks; None where these
        are among the selected."""
        selected_KTC, local_T2, sizes_HL0 = selection
        selected_KTC = selected_KTC[kv]
        spans = None
        if self.blocks.takes_spans(q_THD, layout, selected_KTC.shape[2]):
            spans = self.local.spans(layout)
        else:
            selected_KTC = with_local_blocks(selected_KTC, local_T2, sizes_HL0.shape[1])
        selected_HTC = selected_KTC.repeat_interleave(q_THD.shape[1] // len(selected_KTC), dim=0)
        return self.blocks.selection(selected_HTC, q_THD, layout, kv_heads=len(selected_KTC)), spans
