"""Attention to selected blocks, one block at a time, for a transport that sends queries to the owners of keys.

Own blocks are causal segments of one call of a varlen kernel. For earlier blocks, the *entries* (query, j-th selected
block) are sorted by block: the entries of a block and its keys are a segment of a second call. A query's results are
joined in the order of its blocks, so nothing depends on timing. As in composed.py, whose parts these are, but keys are
those of the given blocks only, and a query comes with one head and without its own block.

Shape suffixes: T queries, U rows of complete blocks, H query heads, K key/value heads, D head width, N blocks of the
sequence, F gathered queries, C selected blocks of a query, E entries of a part.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moba_train.attention.block_sparse import DenseOrSparse
from moba_train.attention.kernels.common.geometry import block_edges, history_blocks, history_bound, rows_before
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.composed import MOST_ELEMENTS, heads_at_once
from moba_train.attention.kernels.composed_rows import SortedPart, sorted_parts
from moba_train.attention.kernels.varlen import Segments, VarlenKernel, best_kernel, refusals
from moba_train.attention.layout import Layout, kept
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.observer import Observed
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection

_ENTRIES_AT_ONCE = 2**22
"""Entries of a part at most: 1 GiB for each tensor of 16-bit rows of width 128, six of them in the backward pass."""


class UnitQueries(NamedTuple):
    """Queries of single heads, from any tokens, with the earlier units that each attends to. All share one key/value
    head."""

    q_FD: Tensor
    units_FC: Tensor
    """int32: ids of the units, at least one for each query; -1 for none."""
    weights_FC: Tensor | None
    """Weight of each unit's result, see `BlocksByUnit`; None: joined by online softmax."""


@dataclass(frozen=True)
class BlocksByUnit:
    """Attention to one unit at a time: a block of the attention, counted from its document's start; ids count over the
    packed sequence.

    Every query attends to its own unit, causally, and to the whole of those that `select` gives, all of them earlier in
    its document. Each unit gives a result with a softmax of its own, (out, lse), and these are **joined**:

    - By online softmax, as if one softmax ran over all keys: `select` returns (units,).
    - As a weighted sum with weights that are known before attention: a subclass's `select` returns (units, weights),
      [H, T, 1 + C] of the own unit and of the selected ones, at least float32, and out = sum of weight * out. Ones add
      the results up; a softmax of gates weighs them by their gates. No gradient flows to the weights. `lse` is the
      log-sum-exp over all keys also here.

    The owner of some units joins their results; the parts of several owners are then joined by online softmax or added
    up. Keys, values and, for own units, queries are the rows of complete units: those of the layout's `k_ranges`, in
    their order. `dk` and `dv` are float32 or better.
    """

    attention: DenseOrSparse
    """Selects the blocks."""
    history_units: int
    """Blocks before its own that a query selects, at most."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.attention.block_size

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """(selected blocks,): int32 [H, T, C]; all of the history if no block is left out."""
        if self.attention.is_full(layout):
            return (history_blocks(layout, self.block_size).repeat(q_THD.shape[1], 1, 1),)
        assert summaries is not None
        return (self.attention.select_blocks(q_THD, summaries, layout),)

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """A tensor of the shape and dtype of `select`'s, contents undefined."""
        named = self.attention.empty_selection(q_THD, k_SKD, layout)
        count = history_bound(layout, self.block_size)
        return named[:1] or (q_THD.new_empty((q_THD.shape[1], q_THD.shape[0], count), dtype=torch.int32),)

    def first_tokens(self, layout: Layout) -> Tensor:
        """int32 [N]: first token of each block; the number of tokens for ids that name no block."""
        return block_edges(layout, self.block_size)[:-1]

    def attend_own(self, q_UHD: Tensor, k_UKD: Tensor, v_UKD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(out [U, H, D], lse [H, U]) of every query over its own block."""
        if q_UHD.shape[0] == 0:
            return torch.empty_like(q_UHD), q_UHD.new_empty(q_UHD.shape[1], 0, dtype=accumulation_dtype(q_UHD.dtype))
        kernel = _kernel(q_UHD, layout, self.block_size)
        return kernel.forward(q_UHD, k_UKD, v_UKD, self._own_segments(layout), self.attention.scale)

    def attend_own_backward(self, state: BackwardState, layout: Layout) -> Gradients:
        """(dq, dk, dv) of `attend_own`; the state's `out` and `lse` are the merged ones if units are joined by online
        softmax, else those of `attend_own`."""
        wide = accumulation_dtype(state.q.dtype)
        dq_UHD = torch.empty(state.q.shape, dtype=state.q.dtype, device=state.q.device)
        dk_UKD, dv_UKD = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (state.k, state.v))
        if state.q.shape[0] == 0:
            return dq_UHD, dk_UKD, dv_UKD
        kernel = _kernel(state.q, layout, self.block_size)
        segments = self._own_segments(layout)
        # Kernels index the rows of a call with 32 bits.
        for heads, kv_heads in heads_at_once(state.q, state.k, slice(0, state.k.shape[1])):
            some = state.part(heads=heads, kv_heads=kv_heads)
            dq_UHD[:, heads], dk, dv = kernel.backward(some, segments, self.attention.scale, deterministic=True)
            dk_UKD[:, kv_heads] += dk
            dv_UKD[:, kv_heads] += dv
        return dq_UHD, dk_UKD, dv_UKD

    def attend(self, queries: UnitQueries, k_UD: Tensor, v_UD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(out [F, D], lse [F]) of the queries over their blocks, joined."""
        out_F1D = torch.zeros_like(queries.q_FD).unsqueeze(1)
        lse_1F = torch.full_like(out_F1D[:, 0, 0], -torch.inf, dtype=accumulation_dtype(out_F1D.dtype)).unsqueeze(0)
        nothing_1F = lse_1F.clone()
        for kernel, part in self._parts(queries, layout):
            part_E1D, part_1E = self._forward(kernel, part, part.gather(queries.q_FD), k_UD, v_UD)
            if queries.weights_FC is None:
                part.merge(out_F1D, lse_1F, nothing_1F, part_E1D.squeeze(1), part_1E.squeeze(0))
            else:
                part.add(out_F1D, part_E1D.squeeze(1) * part.by_slot(queries.weights_FC.unsqueeze(0))[:, None])
                part.add_lse(lse_1F, part_1E.squeeze(0))
        return out_F1D.squeeze(1), lse_1F.squeeze(0)

    def attend_backward(
        self, queries: UnitQueries, merged: tuple[Tensor, Tensor, Tensor], k_UD: Tensor, v_UD: Tensor, layout: Layout
    ) -> Gradients:
        """(dq [F, D], dk [U, D], dv [U, D]) of `attend`; `merged`: (dout [F, D], out [F, D], lse [F]) of the queries,
        joined over all their units, wherever these are."""
        dout_FD, out_FD, lse_F = merged
        dq_F1D = torch.zeros_like(queries.q_FD).unsqueeze(1)
        dk_UD, dv_UD = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (k_UD, v_UD))
        for kernel, part in self._parts(queries, layout):
            q, dout = part.gather(queries.q_FD), part.gather(dout_FD)
            if queries.weights_FC is None:
                out, lse = part.gather(out_FD), part.gather_lse(lse_F)
            else:  # every block has a softmax of its own
                out, lse = self._forward(kernel, part, q, k_UD, v_UD)
                dout = (dout * part.by_slot(queries.weights_FC.unsqueeze(0))[:, None, None]).to(q.dtype)
            state = BackwardState(dout, q, k_UD.unsqueeze(1), v_UD.unsqueeze(1), out, lse)
            # Always deterministic: as in the joins, nothing here depends on timing.
            dq, dk, dv = kernel.backward(state, part.segments, self.attention.scale, deterministic=True)
            part.add(dq_F1D, dq.squeeze(1))
            dk_UD += dk.squeeze(1)
            dv_UD += dv.squeeze(1)
        return dq_F1D.squeeze(1), dk_UD, dv_UD

    def _forward(
        self, kernel: type[VarlenKernel], part: SortedPart, q_E1D: Tensor, k_UD: Tensor, v_UD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(out [E, 1, D], lse [1, E]) of every entry."""
        return kernel.forward(q_E1D, k_UD.unsqueeze(1), v_UD.unsqueeze(1), part.segments, self.attention.scale)

    def _parts(self, queries: UnitQueries, layout: Layout) -> Iterator[tuple[type[VarlenKernel], SortedPart]]:
        """The entries, some queries at a time, and the kernel for them. Waits for the GPU once for each part."""
        count, selected = queries.units_FC.shape
        if count * selected == 0:
            return
        edges = _given_edges(layout, self.block_size)
        blocks = edges.numel() - 1
        kernel = _kernel(queries.q_FD.unsqueeze(1), layout, self.block_size)
        limit = min(_ENTRIES_AT_ONCE, MOST_ELEMENTS // queries.q_FD.shape[1])
        # A deterministic backward pass of some kernels has a dq for each group of keys, all in memory at once.
        limit = max(1, limit // kernel.dq_buffers(blocks, queries.q_FD.device))
        longest = min(self.block_size, layout.max_seqlen)
        given = sum(stop - start for start, stop in layout.key_ranges)
        for _, parts in sorted_parts(queries.units_FC.unsqueeze(0), 1, limit, blocks, edges, longest, given):
            yield from ((kernel, part) for part in parts)

    def _own_segments(self, layout: Layout) -> Segments:
        longest = min(self.block_size, layout.max_seqlen)
        edges = _given_edges(layout, self.block_size)
        return Segments(edges, edges, longest, longest, causal=True)


@kept
def _given_edges(layout: Layout, block_size: int) -> Tensor:
    """int32 [N + 1]: where each block begins among the given rows; blocks that are not given are empty."""
    return rows_before(block_edges(layout, block_size), layout.key_ranges)


def _kernel(q_NHD: Tensor, layout: Layout, block_size: int) -> type[VarlenKernel]:
    """The varlen kernel for queries like these. Raises ValueError, naming the YAML key, where there is none."""
    segments = block_edges(layout, block_size).numel() - 1
    kernel = best_kernel(q_NHD, segments)
    if kernel is None:
        raise ValueError(
            f"parallel.cp_transport: 'dispatch' attends with varlen kernels, and none can run: "
            f"{refusals(q_NHD, segments)}; use another transport"
        )
    return kernel


class OffersUnits(ABC):
    """An attention that says itself how it attends to one unit at a time."""

    @property
    @abstractmethod
    def by_unit(self) -> BlocksByUnit:
        """This attention, one unit at a time."""


_FUNCTIONS = {
    "select": "select",
    "attend_own": "attend",
    "attend_own_backward": "attend_backward",
    "attend": "attend",
    "attend_backward": "attend_backward",
}
"""Functions that are observed, and their names for observers."""


def units_of(attention: LocalAttention) -> BlocksByUnit | None:
    """The attention one unit at a time, seen by those that observe the attention; None if it cannot attend so."""
    local = attention.attention if isinstance(attention, Observed) else attention
    if isinstance(local, OffersUnits):
        units = local.by_unit
    elif isinstance(local, MobaAttention):
        units = BlocksByUnit(local, local.options.history_blocks)
    else:
        return None
    if isinstance(attention, Observed):
        return cast(BlocksByUnit, Observed(units, local, attention.observers, _FUNCTIONS))
    return units
