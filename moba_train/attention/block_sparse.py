"""Attention to selected blocks of keys, in the contract of protocol.py: base class of attentions that are full
attention when no block can be left out, and block-sparse attention that the caller selects.

Shape suffixes: T queries, n some of them, S keys, B sequences, H query heads, K key/value heads, D head width,
C selected history blocks of a query.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.facets import Decodes, Probed, SelectedBlocks, TakesSelection, decode_as_trained
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common.cached_keys import CachedKeys
from moba_train.attention.kernels.common.geometry import block_bound, first_blocks, query_blocks
from moba_train.attention.kernels.common.selection import Choice, selection_statistics
from moba_train.attention.kernels.table import kernel_decodes
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import AttentionFacts, BackwardState, Gradients, LocalAttention, Selection
from moba_train.attention.statistics import Statistics
from moba_train.config.base import Length, Section


class BlockOptions(Section):
    """Options of kinds whose queries attend to selected blocks, by a backend of kernels/table.py."""

    block_size: Length
    topk: int
    """Blocks that each query attends to."""
    backend: Literal["auto", "triton", "composed", "reference"] = Field(
        "auto",
        description="of attention to the selected blocks; triton: kernels for CUDA and 16-bit dtypes; composed: varlen "
        "flash attention over gathered queries, then a merge; reference: plain PyTorch, any device, for all else too; "
        "auto: the faster of triton and composed, if one can run, else reference; kernels of full attention if no "
        "document is long enough to leave a block out and the kind is the same as full attention then",
    )

    @property
    def history_blocks(self) -> int:
        """Blocks before its own that a query selects, at most; those that its kernels read as a span do not count."""
        return self.topk - 1


class AttendsToBlocks(Protocol):
    """Attention to a selection: `BlockAttention`, or a wrapper of it that defines its own form of selection."""

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) over the diagonal and the selected blocks."""
        ...

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        ...


class DenseOrSparse(LocalAttention, Decodes, Probed):
    """Base class of attentions that select blocks: a subclass selects."""

    scale: float
    """Factor on the scores."""
    full: FullAttention
    blocks: AttendsToBlocks
    backend: str
    """auto, triton, composed or reference; full attention takes the place of blocks for auto alone."""
    block_size: int
    full_up_to: int
    """Length in tokens of the longest document of which no query leaves a block out."""

    def is_full(self, layout: Layout) -> bool:
        """True if no document is long enough for a query to leave a block out: then full attention, whose kernels are
        faster, takes the place of blocks, and selections are ()."""
        return self.backend == "auto" and layout.max_seqlen <= self.full_up_to

    @abstractmethod
    def select_blocks(self, q_THD: Tensor, summaries: Tensor, layout: Layout) -> Tensor:
        """int32 [H, T, C]: the history blocks that queries select, without what else a selection holds."""

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the given keys of the own and the selected blocks."""
        attend = self.full.attend if self.is_full(layout) else self.blocks.attend
        return attend(q_THD, k_SKD, v_SKD, layout, selection)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        attend_backward = self.full.attend_backward if self.is_full(layout) else self.blocks.attend_backward
        return attend_backward(state, layout, selection)

    def decode(self, q_BHD: Tensor, cached: CachedKeys) -> tuple[Tensor, Tensor]:
        """(out [B, H, D], lse [H, B]) of the newest token of each sequence; with a kernel of its own on CUDA."""
        layout, block_size = cached.layout, self.block_size
        if self.is_full(layout):
            return self.full.decode(q_BHD, cached)
        if self.backend not in ("auto", "triton") or not kernel_decodes(q_BHD, block_size):
            return decode_as_trained(self, q_BHD, cached)
        from moba_train.attention.kernels.triton.decode import decode

        assert cached.summaries is not None
        ids_HBC = self.select_blocks(q_BHD, cached.summaries, layout)
        if self.facts.couples_heads:  # equal lists in a group: one for each key/value head
            ids_HBC = ids_HBC[:: q_BHD.shape[1] // cached.k_RKD.shape[1]]
        first_B = layout.cached(("first blocks", block_size), lambda: first_blocks(layout.cu_seqlens, block_size)[:-1])
        # The kernel counts blocks from each sequence's first token, the selection over the packed sequence.
        selected_HBC = torch.where(ids_HBC < 0, -1, ids_HBC - first_B[:, None]).int()
        return decode(q_BHD, cached, scale=self.scale, block_size=block_size, selected_HBC=selected_HBC)


def listed_blocks(history_blocks: int, layout: Layout, block_size: int) -> int:
    """C: the most blocks that the selection of a query lists, from sizes alone, which tracing knows."""
    return min(history_blocks, block_bound(layout, block_size))


class GivenBlocks(LocalAttention, TakesSelection, Probed):
    """Each query and head attends to its own block, causally, and to the history blocks that the caller selects."""

    def __init__(
        self,
        block_size: int,
        history_blocks: int,
        head_dim: int,
        backend: str,
        key: str,
        *,
        first: int = 0,
        local: int = 1,
    ) -> None:
        """`history_blocks`: the most that the caller selects for a query. `backend` and its YAML `key`, for messages:
        those of `BlockAttention`. `first`, `local`: blocks that are not chosen freely, as in `Choice`."""
        self.facts = AttentionFacts(alignment=block_size)
        self.history_blocks = history_blocks
        self.blocks = BlockAttention(block_size, head_dim**-0.5, backend, key)
        self.choice = Choice(block_size, history_blocks + 1, first, local)

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """Refused: blocks are given (`given_selection`)."""
        raise RuntimeError("GivenBlocks selects nothing by itself: call Shard.attend with the selected blocks")

    def given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """The given blocks, and what the backend keeps with them.

        Raises ValueError, on a CPU alone, for blocks that Triton's kernels would read wrongly: they mask nothing in a
        selected block.
        """
        if selected_HTC.device.type == "cpu":
            self._check(selected_HTC, layout)
        return self.blocks.selection(selected_HTC, q_THD, layout, kv_heads=k_SKD.shape[1])

    def _check(self, selected_HTC: Tensor, layout: Layout) -> None:
        own_T, first_T = query_blocks(layout, self.blocks.block_size)
        before_HTC = torch.nn.functional.pad(selected_HTC[..., :-1], (1, 0), value=-2)
        is_next = (selected_HTC > before_HTC) & (before_HTC != -1)
        is_history = (first_T[:, None] <= selected_HTC) & (selected_HTC < own_T[:, None])
        if wrong := ((selected_HTC != -1) & ~(is_next & is_history)).nonzero()[:1].tolist():
            head, query, _ = wrong[0]
            raise ValueError(
                f"blocks of query {query} in head {head}: given {selected_HTC[head, query].tolist()}; allowed: blocks "
                f"from {first_T[query]} up to, and without, its own block {own_T[query]}, ascending, -1 behind"
            )

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `given_selection`'s, contents undefined."""
        listed = listed_blocks(self.history_blocks, layout, self.blocks.block_size)
        return self.blocks.empty_selection(listed, q_THD, layout, kv_heads=k_SKD.shape[1])

    def selected_by(self, rows_n: Tensor, selection: Selection, layout: Layout) -> SelectedBlocks:
        """The given blocks of these queries."""
        return SelectedBlocks(selection[0][:, rows_n], self.blocks.block_size)

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """`selection_statistics` of the given blocks."""
        return selection_statistics(selection[0], layout, self.choice)

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the given keys of the diagonal and the selected blocks."""
        return self.blocks.attend(q_THD, k_SKD, v_SKD, layout, selection)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        return self.blocks.attend_backward(state, layout, selection)


def too_long(context: StageContext, options: Section, *keys: str) -> Iterator[str]:
    """Problems of those of these options, numbers of tokens, that do not fit in the stage's sequences."""
    for key in keys:
        if (size := getattr(options, key)) > context.seq_len:
            yield (
                f"{key}: given {size} {context.layers}, which does not fit in a sequence of {context.seq_len} tokens; "
                "allowed: at most seq_len"
            )


def refused_triton(context: StageContext, backend: str, reason: str) -> Iterator[str]:
    """Problem of an option `backend` that asks for Triton kernels, which cannot run for this reason; empty: can."""
    if backend == "triton" and reason:
        yield f"backend: given 'triton' {context.layers}, which cannot run: {reason}; set auto"
