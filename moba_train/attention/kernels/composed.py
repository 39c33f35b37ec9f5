"""Attention to selected blocks as MoBA's paper composes it: varlen flash attention over the queries that selected each
block, then a merge (Lu et al. 2025, arXiv:2502.13189, algorithm 1), forward and backward.

Diagonal blocks are causal segments, in a shard of queries as in a whole sequence. For the history, the query slots
(token, head, j-th selected block; common/lists.py) are sorted by block, stably: the slots of a list and their block are
a segment of a second call. Results do not depend on timing, whatever the kernel: a row is joined in a fixed order,
diagonal block first, then the selected blocks one by one, in float32 (float64 for float64).

A parameter says how results are joined:

`ONE_SOFTMAX` one softmax over the keys of all blocks, by online softmax (attention/kernels/common/merge.py)
`WeightedSum` (mechanisms/moba_v1.py) a softmax for each block, and the results added up; it needs their (out, lse)
              again in the backward pass, which computes them again

Partial results exist for a part of the work at a time: some key/value heads or, where one head's are too many, a range
of its tokens (`slots_at_once`). Sorting, gathering and joining have Triton kernels (triton/composed_rows.py) and, for
other devices and head dims, PyTorch (composed_rows.py): 569 and 772 ms at 128K 4096/12. Both wait for the GPU to know
how long the longest list is.

Shape suffixes: T queries, t a range of them, S keys, H query heads, h some of them, K key/value heads, k some of them,
C history blocks of a query, E slots of a part, D head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_bound, block_edges, in_one_range, rows_before
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.composed_rows import sorted_parts
from moba_train.attention.kernels.table import triton_runs_on
from moba_train.attention.kernels.varlen import Segments, VarlenKernel, best_kernel, refusals
from moba_train.attention.layout import Layout, joined_ranges, kept
from moba_train.attention.protocol import BackwardState, Gradients, Selection


class Part(Protocol):
    """The slots of some key/value heads, from all tokens or from a range of them, in list order."""

    @property
    def segments(self) -> Segments:
        """The lists and their blocks, the keys of each key/value head behind those of the head before."""
        ...

    def gather(self, x_rows: Tensor) -> Tensor:
        """[T * H, D] -> [E, 1, D]."""
        ...

    def gather_lse(self, lse_rows: Tensor) -> Tensor:
        """[T * H] -> [1, E]."""
        ...

    def merge(self, out_THD: Tensor, lse_HT: Tensor, diagonal_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor) -> None:
        """Join the slots' out and lse with the diagonal blocks', by online softmax: out in place, lse written."""
        ...

    def add(self, dq_THD: Tensor, part_ED: Tensor) -> None:
        """Add the slots' parts of dq, in place."""
        ...

    def by_slot(self, x_HTC: Tensor) -> Tensor:
        """One number for each slot of every query, [H, T, C] -> [E]."""
        ...

    def add_lse(self, lse_HT: Tensor, part_E: Tensor) -> None:
        """Add the keys of the slots to the log-sum-exp of their queries, in place."""
        ...


class Rows(NamedTuple):
    """The tensors of a backward pass that belong to queries, a row for each query and head."""

    dout: Tensor
    """[T * H, D]"""
    q: Tensor
    out: Tensor
    lse: Tensor
    """[T * H]"""

    @classmethod
    def from_state(cls, state: BackwardState) -> "Rows":
        """Rows of `state`."""
        dout, q, out = (x.reshape(-1, x.shape[2]) for x in (state.dout, state.q, state.out))
        return cls(dout, q, out, state.lse.T.reshape(-1))


@dataclass(frozen=True)
class BlockKernel:
    """The kernel of a call, and the segments of its diagonal blocks."""

    kernel: type[VarlenKernel]
    diagonal: Segments
    scale: float

    def attend_diagonal(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], contiguous, lse [H, T]) over the diagonal blocks."""
        # FlashAttention-2's out has the memory order of q, and results are joined into it row by row.
        out_THD, lse_HT = self.kernel.forward(q_THD, k_SKD, v_SKD, self.diagonal, self.scale)
        return out_THD.contiguous(), lse_HT


class Join:
    """The steps that depend on how results are joined: by one softmax over the keys of the diagonal block and the
    selected ones, unless a subclass joins them in another way."""

    def attend_diagonal(
        self, blocks: BlockKernel, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) of the diagonal blocks, to which the selected ones are joined."""
        return blocks.attend_diagonal(q_THD, k_SKD, v_SKD)

    def join(
        self, part: Part, out_THD: Tensor, lse_HT: Tensor, diagonal_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor
    ) -> None:
        """Join the slots' out and lse to those of their queries, in place; `part_ED` may be overwritten."""
        part.merge(out_THD, lse_HT, diagonal_lse_HT, part_ED, part_E)

    def diagonal_state(
        self, blocks: BlockKernel, state: BackwardState, heads: slice, kv_heads: slice
    ) -> BackwardState | None:
        """The state of the diagonal blocks' backward pass for some heads: the results over all blocks are what the
        gradients through some of them need. None: there are no diagonal blocks."""
        return state.part(heads=heads, kv_heads=kv_heads)

    def slots_state(self, blocks: BlockKernel, part: Part, rows: Rows, k: Tensor, v: Tensor) -> BackwardState:
        """The state of the slots' backward pass, with the keys and values [k * S, 1, D] of their heads: the results
        over all blocks, a row for each slot."""
        dout, q, out = (part.gather(x) for x in (rows.dout, rows.q, rows.out))
        return BackwardState(dout, q, k, v, out, part.gather_lse(rows.lse))


ONE_SOFTMAX = Join()


NAME = "composed"

MOST_ELEMENTS = 2**30
"""The most elements of a tensor in a backward call: kernels index some of theirs, padded, with 32 bits."""


def composes(layout: Layout, block_size: int) -> bool:
    """True if the diagonal blocks of these queries are segments: all keys are there, no block's queries have a gap."""
    return layout.k_ranges is None and in_one_range(layout.q_ranges, block_size)


def refuses(q_THD: Tensor, layout: Layout, block_size: int) -> str:
    """The reason why the composition cannot do this call; empty if it can."""
    if not composes(layout, block_size):
        return "some of the keys, or queries of one block with a gap between"
    return "" if _kernel(q_THD, layout, block_size) else refusals(q_THD, _most_segments(layout, block_size))


def _kernel(q_THD: Tensor, layout: Layout, block_size: int) -> type[VarlenKernel] | None:
    return best_kernel(q_THD, _most_segments(layout, block_size))


def _most_segments(layout: Layout, block_size: int) -> int:
    return block_bound(layout, block_size) + len(layout.q_ranges or ())


@kept
def _diagonal_segments(layout: Layout, block_size: int) -> Segments:
    """The queries of each block and its keys, up to that of the last query; if a range of queries ends inside a block,
    the block's other keys are a segment without queries."""
    longest = min(block_size, layout.max_seqlen)
    edges = block_edges(layout, block_size)
    if layout.q_ranges is None:
        return Segments(edges, edges, longest, longest, causal=True)
    ranges = joined_ranges(layout.q_ranges)
    # The kernels end causal masks at a segment's last key, so a block's keys behind the last query are cut off from it.
    cu_k = torch.cat([edges, edges.new_tensor([stop for _, stop in ranges])]).sort().values
    return Segments(rows_before(cu_k, ranges), cu_k, longest, longest, causal=True)


def block_lists(selected_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Selection:
    """The lists of the rows that selected each block, where Triton runs; else nothing: a part at a time is sorted."""
    if not triton_runs_on(selected_HTC):
        return ()
    from moba_train.attention.kernels.triton import backend

    return backend.block_lists(selected_HTC, layout, kv_heads, block_size)


def empty_block_lists(selected_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Selection:
    """Uninitialised tensors of the shapes and dtypes of `block_lists`'s, for tracing."""
    if not triton_runs_on(selected_HTC):
        return ()
    from moba_train.attention.kernels.triton import backend

    return backend.empty_block_lists(selected_HTC, layout, kv_heads, block_size)


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    layout: Layout,
    selection: Selection,
    *,
    block_size: int,
    scale: float,
    join: Join = ONE_SOFTMAX,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] over the diagonal blocks and the selected ones (int32 [H, T, C], -1 = none)."""
    if q_THD.shape[0] == 0:
        return torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[1], 0, dtype=accumulation_dtype(q_THD.dtype))
    call = _Call.from_tensors(q_THD, k_SKD, v_SKD, layout, selection, block_size, scale)
    kernel = call.blocks.kernel
    out_THD, diagonal_lse_HT = join.attend_diagonal(call.blocks, q_THD, k_SKD, v_SKD)
    lse_HT = diagonal_lse_HT.clone()
    q_rows = q_THD.reshape(-1, call.head_dim)
    for kv_heads, parts in call.parts():
        k, v = (_heads_end_to_end(x, kv_heads) for x in (k_SKD, v_SKD))
        for part in parts:
            part_E1D, part_1E = kernel.forward(part.gather(q_rows), k, v, part.segments, scale)
            join.join(part, out_THD, lse_HT, diagonal_lse_HT, part_E1D.squeeze(1), part_1E.squeeze(0))
    return out_THD, lse_HT


def attend_backward(
    state: BackwardState,
    layout: Layout,
    selection: Selection,
    *,
    block_size: int,
    scale: float,
    join: Join = ONE_SOFTMAX,
) -> Gradients:
    """(dq, dk, dv) of `attend`; the state's `out` and `lse` are the joined ones."""
    _, q_THD, k_SKD, v_SKD, _, _ = state
    if q_THD.shape[0] == 0:
        return torch.empty_like(q_THD), torch.zeros_like(k_SKD), torch.zeros_like(v_SKD)
    dq_THD, dk_SKD, dv_SKD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_SKD, v_SKD))
    call = _Call.from_tensors(q_THD, k_SKD, v_SKD, layout, selection, block_size, scale)
    kernel = call.blocks.kernel
    wide = accumulation_dtype(q_THD.dtype)
    rows = Rows.from_state(state)
    rows_of_k = k_SKD.shape[0], k_SKD.shape[2]
    for kv_heads, parts in call.parts():
        # Sums over parts in float32: a block that many queries select gets a term from each part.
        dk_kSD, dv_kSD = (x.new_zeros(kv_heads.stop - kv_heads.start, *rows_of_k, dtype=wide) for x in (k_SKD, v_SKD))
        for some, shared in heads_at_once(q_THD, k_SKD, kv_heads):
            # Diagonal blocks first and by assignment: `dq` is uninitialised, and the slots add to it.
            diagonal = join.diagonal_state(call.blocks, state, some, shared)
            if diagonal is None:
                dq_THD[:, some] = 0
                continue
            dq_THD[:, some], dk_SkD, dv_SkD = kernel.backward(diagonal, call.blocks.diagonal, scale, deterministic=True)
            where = slice(shared.start - kv_heads.start, shared.stop - kv_heads.start)
            dk_kSD[where] += dk_SkD.transpose(0, 1)
            dv_kSD[where] += dv_SkD.transpose(0, 1)
        k, v = (_heads_end_to_end(x, kv_heads) for x in (k_SKD, v_SKD))
        for part in parts:
            dk, dv = _slots_backward(call, join, part, rows, k, v, dq_THD)
            dk_kSD += dk.view_as(dk_kSD)
            dv_kSD += dv.view_as(dv_kSD)
        dk_SKD[:, kv_heads], dv_SKD[:, kv_heads] = dk_kSD.transpose(0, 1), dv_kSD.transpose(0, 1)
    return dq_THD, dk_SKD, dv_SKD


def _slots_backward(
    call: "_Call", join: Join, part: Part, rows: Rows, k: Tensor, v: Tensor, dq_THD: Tensor
) -> tuple[Tensor, Tensor]:
    """(dk, dv) [k * S, 1, D] of the slots of a part, whose dq is added in place. What was gathered is freed again."""
    gathered = join.slots_state(call.blocks, part, rows, k, v)
    # Deterministic in any case: MoBA's gradients repeat bit by bit by every backend on a GPU.
    dq, dk, dv = call.blocks.kernel.backward(gathered, part.segments, call.blocks.scale, deterministic=True)
    part.add(dq_THD, dq.squeeze(1))
    return dk, dv


def heads_at_once(q_THD: Tensor, k_SKD: Tensor, kv_heads: slice) -> Iterator[tuple[slice, slice]]:
    """(query heads, the key/value heads they share): the work of one call of the diagonal blocks' backward pass.

    All of `kv_heads`, as long as kernels can index their rows with 32 bits; else one of them and some of its queries.
    """
    tokens, heads, head_dim = q_THD.shape
    group = heads // k_SKD.shape[1]
    most = max(1, MOST_ELEMENTS // (max(tokens, k_SKD.shape[0]) * head_dim))
    if (kv_heads.stop - kv_heads.start) * group <= most:
        yield slice(kv_heads.start * group, kv_heads.stop * group), kv_heads
        return
    for kv_head in range(kv_heads.start, kv_heads.stop):
        for first in range(kv_head * group, (kv_head + 1) * group, most):
            yield slice(first, min(first + most, (kv_head + 1) * group)), slice(kv_head, kv_head + 1)


def slots_at_once(rows: int, head_dim: int) -> int:
    """Slots of a part at most, given the query rows (tokens x heads) of the call.

    Half as many as rows: the backward pass then holds three times the size of q (three gathered tensors, dq, and dq
    again in float32 inside the kernel; fewer slots where a kernel holds that several times). Not so few that calls
    get small, and at most 2**30 elements, which kernels index with 32 bits.
    """
    return min(max(rows // 2, 2**20), MOST_ELEMENTS // head_dim)


@dataclass(frozen=True)
class _Call:
    """The tensors of one call, and its work cut into parts."""

    blocks: BlockKernel
    tensors: tuple[Tensor, Tensor, Tensor]
    """q, k, v."""
    selection: Selection
    layout: Layout
    block_size: int

    @classmethod
    def from_tensors(
        cls, q: Tensor, k: Tensor, v: Tensor, layout: Layout, selection: Selection, block_size: int, scale: float
    ) -> "_Call":
        kernel = _kernel(q, layout, block_size)
        assert kernel, "ask `refuses` first"
        blocks = BlockKernel(kernel, _diagonal_segments(layout, block_size), scale)
        return cls(blocks, (q, k, v), selection, layout, block_size)

    @property
    def head_dim(self) -> int:
        return self.tensors[0].shape[2]

    @property
    def kv_heads(self) -> int:
        return self.tensors[1].shape[1]

    def parts(self) -> Iterator[tuple[slice, Iterator[Part]]]:
        """(key/value heads, their parts); all heads are named, even if there is no history."""
        selected_HTC, *lists = self.selection
        heads, tokens, history_blocks = selected_HTC.shape
        edges = block_edges(self.layout, self.block_size)
        longest = self.blocks.diagonal.max_k
        buffers = self.blocks.kernel.dq_buffers(edges.numel() - 1, selected_HTC.device)
        # FlashAttention-2's deterministic backward pass holds a dq for each of its programs, so parts shrink by that
        # number.
        limit = max(1, slots_at_once(tokens * heads, self.head_dim) // buffers)
        if history_blocks == 0:
            return iter([(slice(0, self.kv_heads), iter(()))])
        # Triton's tiles are powers of 2, so other head widths take the sort in PyTorch.
        if not lists or self.head_dim & (self.head_dim - 1):
            most = self.blocks.kernel.most_segments
            return sorted_parts(selected_HTC, self.kv_heads, limit, most, edges, longest, self.layout.total)
        from moba_train.attention.kernels.common.call import BlockCall
        from moba_train.attention.kernels.common.lists import BlockLists
        from moba_train.attention.kernels.triton.composed_rows import gathered_parts

        slots, starts = lists
        call = BlockCall.from_tensors(*self.tensors, self.layout, selected_HTC, self.block_size, self.blocks.scale)
        found = BlockLists.from_tensors(slots, starts, selected_HTC, self.kv_heads, call.tables.blocks)
        return gathered_parts(call, found, limit, self.blocks.kernel.most_segments, edges, longest)


def _heads_end_to_end(x_SKD: Tensor, kv_heads: slice) -> Tensor:
    """[S, K, D] -> [k * S, 1, D]: all tokens of one key/value head, then all of the next, as one head."""
    return x_SKD[:, kv_heads].transpose(0, 1).reshape(-1, 1, x_SKD.shape[2])
