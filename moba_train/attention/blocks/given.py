"""Attention to blocks that the caller selects: for kinds whose selection has parameters or looks at more than keys.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width, C selected blocks of a query.
"""

from torch import Tensor

from moba_train.attention.blocks.attention import BlockAttention
from moba_train.attention.blocks.statistics import Choice, selection_statistics
from moba_train.attention.protocol import BackwardState, Gradients, Layout, LocalAttention, Selection
from moba_train.attention.statistics import Statistics
from moba_train.config.base import Section


class GivenBlocks(LocalAttention):
    """Each query and head attends to its own block, causally, and to the earlier blocks that the caller names."""

    Options = Section  # those of the kind that gives the blocks

    def __init__(
        self, block_size: int, head_dim: int, backend: str, key: str, *, first: int = 0, local: int = 1
    ) -> None:
        """`backend` and its YAML `key`, for messages: those of `BlockAttention`. `first`, `local`: blocks that are not
        chosen, as in `blocks.statistics.Choice`."""
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
        """(out [T, H, D], lse [H, T]) over the given keys of the own and the selected blocks."""
        return self.blocks.attend(q_THD, k_SKD, v_SKD, layout, selection)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        return self.blocks.attend_backward(state, layout, selection)
