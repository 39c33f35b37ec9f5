"""Base classes of attentions to selected blocks: `DenseOrSparse`, which is full attention where no block can be left
out, and `GivenBlocks`, whose blocks the caller selects, for kinds whose selection has parameters or looks at more than
keys.

Shape suffixes: T queries, S keys, B sequences, H query heads, K key/value heads, D head width, C history blocks of a
query.
"""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from moba_train.attention.decoding import CachedKeys
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common.geometry import first_blocks
from moba_train.attention.kernels.common.selection import Choice, selection_statistics
from moba_train.attention.kernels.table import kernel_decodes
from moba_train.attention.protocol import BackwardState, Gradients, Layout, LocalAttention, Selection
from moba_train.attention.statistics import Statistics
from moba_train.config.base import Section


class SelectedBlocks(Protocol):
    """Attention to a selection: `BlockAttention` or `SharedBlocks`."""

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) over the diagonal and the selected blocks."""
        ...

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        ...


class DenseOrSparse(LocalAttention):
    """A subclass selects, and says how long documents may be that are attended to completely."""

    dense: FullAttention
    blocks: SelectedBlocks
    backend: str
    """auto, triton, composed or reference; full attention replaces blocks for auto alone."""

    @property
    @abstractmethod
    def dense_tokens(self) -> int:
        """Length of the longest document of which no query leaves a block out."""

    def is_dense(self, layout: Layout) -> bool:
        """True if no document is long enough for a query to leave a block out: then full attention, whose kernels are
        faster, replaces blocks, and selections are ()."""
        return self.backend == "auto" and layout.max_seqlen <= self.dense_tokens

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the given keys of the diagonal and the selected blocks."""
        attend = self.dense.attend if self.is_dense(layout) else self.blocks.attend
        return attend(q_THD, k_SKD, v_SKD, layout, selection)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        attend_backward = self.dense.attend_backward if self.is_dense(layout) else self.blocks.attend_backward
        return attend_backward(state, layout, selection)

    def decode(self, q_BHD: Tensor, cached: CachedKeys) -> tuple[Tensor, Tensor]:
        """(out [B, H, D], lse [H, B]) of the newest token of each sequence; with a kernel of its own on CUDA."""
        layout, block_size = cached.layout, self.block_size
        if self.is_dense(layout):
            return self.dense.decode(q_BHD, cached)
        if self.backend not in ("auto", "triton") or not kernel_decodes(q_BHD, block_size):
            return super().decode(q_BHD, cached)
        from moba_train.attention.kernels.triton.decode import decode

        ids_HBC = self.select_blocks(q_BHD, cached.summaries, layout)
        assert ids_HBC is not None
        if self.couples_heads:  # equal lists in a group: one for each key/value head
            ids_HBC = ids_HBC[:: q_BHD.shape[1] // cached.k_RKD.shape[1]]
        first_B = layout.cached(("first blocks", block_size), lambda: first_blocks(layout.cu_seqlens, block_size)[:-1])
        selected_HBC = torch.where(ids_HBC < 0, -1, ids_HBC - first_B[:, None]).int()
        return decode(q_BHD, cached, scale=self.scale, block_size=block_size, selected_HBC=selected_HBC)


class GivenBlocks(LocalAttention):
    """Each query and head attends to its diagonal block, causally, and to the earlier blocks that the caller names."""

    Options = Section  # those of the kind that gives the blocks

    def __init__(
        self, block_size: int, head_dim: int, backend: str, key: str, *, first: int = 0, local: int = 1
    ) -> None:
        """`backend` and its YAML `key`, for messages: those of `BlockAttention`. `first`, `local`: blocks that are not
        chosen, as in `kernels.common.selection.Choice`."""
        self.alignment = block_size
        self.forced = {"first": first, "local": local}
        self.scale = head_dim**-0.5
        self.blocks = BlockAttention(block_size, self.scale, backend, key)

    def summarize(self, k_SKD: Tensor, layout: Layout) -> None:
        """Nothing: the caller has looked at the keys."""
        return None

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """Refused: blocks are given (`given_selection`)."""
        raise RuntimeError("GivenBlocks selects nothing by itself: call Shard.attend with the selected blocks")

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Refused, as `select`."""
        raise RuntimeError("GivenBlocks selects nothing by itself: call Shard.attend with the selected blocks")

    def given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """The given blocks, and what the backend keeps with them."""
        return self.blocks.selection(selected_HTC, q_THD, layout, kv_heads=k_SKD.shape[1])

    def empty_given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `given_selection`'s, contents undefined."""
        return self.blocks.empty_selection(selected_HTC.shape[2], q_THD, layout, kv_heads=k_SKD.shape[1])

    def selected_blocks(self, selection: Selection) -> Tensor | None:
        """int32 [H, T, C]."""
        return selection[0]

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """`selection_statistics` of the given blocks."""
        selected_HTC = selection[0]
        choice = Choice(self.alignment, selected_HTC.shape[2] + 1, **self.forced)
        return selection_statistics(selected_HTC, layout, choice)

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the given keys of the diagonal and the selected blocks."""
        return self.blocks.attend(q_THD, k_SKD, v_SKD, layout, selection)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        return self.blocks.attend_backward(state, layout, selection)
