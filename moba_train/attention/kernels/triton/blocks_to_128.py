"""Forward and backward of blocks to 128 keys: the keys are one tile and stay on chip while the rows of their list
stream past.

A program takes a split of a list. It loads the block's keys and values once; its rows, gathered by address, are in
flight while the rows before them are worked on. The diagonal block, causal, follows at the end of the list's first
split. With 128 keys a row costs 2 * D bytes of gathering and 2 * D of partial result against 4 * D * 128 operations,
128 a byte.

`backward_to_128` makes a row's part of dq along with dk and dv: five matrix products and one gather, where separate
passes take seven and two. A list of several splits leaves float32 parts of dk and dv, which `sum_splits` adds in order.
Where one head's partial dq is too large, the queries are cut into ranges, and all lists add to float32 sums.

If the call has spans (spans.py), they replace the diagonal blocks, and the programs here only work on lists.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common import softmax
from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.launch import launch
from moba_train.attention.kernels.common.lists import BlockLists, key_rows, query_rows
from moba_train.attention.kernels.common.softmax import LOG2_E, LOWEST, load_rows, normalised
from moba_train.attention.kernels.common.tiles import TileShape, TileTable, WorkRange, tile_tables, work_ranges
from moba_train.attention.kernels.triton.spans import SpanCall
from moba_train.attention.protocol import Gradients

_SPLIT = 4096
"""Rows of a list that one program takes, at most: a block that all queries select costs balance."""


@triton.jit
def _split(pid, list_of_tile, last_tile, begin, end, lists, SPLIT: tl.constexpr):
    """(list or `lists`, its splits, number of this split, first slot, one past the last)."""
    which = tl.load(list_of_tile + pid)
    safe = tl.minimum(which, lists - 1)
    before = tl.load(last_tile + safe - 1, mask=safe > 0, other=0)
    splits = tl.load(last_tile + safe) - before
    first = tl.load(begin + safe) + (pid - before) * SPLIT
    return which, splits, pid - before, first, tl.minimum(first + SPLIT, tl.load(end + safe))


@triton.jit
def _softmax(s_MN, v_ND, scale_log2, PARTIAL: tl.constexpr):
    """(out [M, D] normalised, lse [M], natural) of rows whose keys are all here."""
    top_M = tl.max(s_MN, 1) * scale_log2
    if PARTIAL:
        top_M = tl.maximum(top_M, LOWEST)
    p_MN = tl.math.exp2(s_MN * scale_log2 - top_M[:, None])
    return normalised(tl.dot(p_MN.to(v_ND.dtype), v_ND), top_M, tl.sum(p_MN, 1), PARTIAL)


@triton.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "heads", "tokens", "first_slot", "head_slots"])
def forward_to_128(
    q, k_desc, v_desc, out, lse, partial_out, partial_lse, slots, list_of_tile, last_tile, begin, end, bounds, lists,
    blocks, first_kv_head, heads, tokens, first_slot, head_slots, stride_t, scale_log2,
    DIAGONAL: tl.constexpr, PARTIAL: tl.constexpr, G: tl.constexpr, HISTORY: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One split: the partial (out, lse) of each slot; if DIAGONAL, with a list's first split out [T, H, D], lse [H, T]
    of the diagonal block, in the work range that has the first slots."""
    which, _, number, first, last = _split(tl.program_id(0), list_of_tile, last_tile, begin, end, lists, SPLIT)
    if which >= lists:
        return
    part, block = which // blocks, which % blocks
    kv_head = first_kv_head + part
    start, stop, key_shift = key_rows(bounds, block)
    k_ND = k_desc.load([start, kv_head * D])
    v_ND = v_desc.load([start, kv_head * D])
    column = tl.arange(0, D)
    key = start + tl.arange(0, N)
    if PARTIAL:
        # The block's keys are elsewhere: no rows of its list, but the diagonal block's queries still get (0, -inf).
        last = tl.where(start < stop, last, first)
    for at in tl.range(first, last, M):
        position = at + tl.arange(0, M)
        ok = position < last
        slot = tl.load(slots + position, mask=ok, other=0)
        row = slot // HISTORY
        q_at = (row // G).to(tl.int64) * stride_t + (kv_head * G + row % G) * D
        s = tl.dot(tl.load(q + q_at[:, None] + column[None, :], mask=ok[:, None], other=0.0), k_ND.T)
        if BLOCK < N or PARTIAL:
            s = tl.where((key < stop)[None, :], s, float("-inf"))
        out_MD, lse_M = _softmax(s, v_ND, scale_log2, False)
        offset = part.to(tl.int64) * head_slots + (slot - first_slot)
        tl.store(partial_out + offset[:, None] * D + column[None, :], out_MD.to(v_ND.dtype), mask=ok[:, None])
        tl.store(partial_lse + offset, lse_M, mask=ok)
    # Once for each block: by its list's first split, in the work range with the first queries.
    if not DIAGONAL or (number > 0) | (first_slot > 0):
        return
    first_row, last_row, shift = query_rows(bounds, block)
    for at in tl.range(0, (last_row - first_row) * G, M):
        row = at + tl.arange(0, M)
        at_M, head = first_row + row // G, kv_head * G + row % G
        ok = at_M < last_row
        q_at = at_M.to(tl.int64) * stride_t + head * D
        s = tl.dot(tl.load(q + q_at[:, None] + column[None, :], mask=ok[:, None], other=0.0), k_ND.T)
        visible = key[None, :] <= (at_M + shift - key_shift)[:, None]
        if PARTIAL:
            visible = visible & (key < stop)[None, :]
        out_MD, lse_M = _softmax(tl.where(visible, s, float("-inf")), v_ND, scale_log2, PARTIAL)
        out_at = (at_M.to(tl.int64) * heads + head) * D
        tl.store(out + out_at[:, None] + column[None, :], out_MD.to(v_ND.dtype), mask=ok[:, None])
        tl.store(lse + head.to(tl.int64) * tokens + at_M, lse_M, mask=ok)


@triton.jit
def _gradients(q_MD, dout_MD, p_NM, dp_NM, delta_M, k_ND, dk_ND, dv_ND):
    """(dq [M, D], dk, dv [N, D]) with the rows' part, dq and dk not yet scaled."""
    dv_ND = tl.dot(p_NM.to(q_MD.dtype), dout_MD, dv_ND)
    ds_NM = (p_NM * (dp_NM - delta_M[None, :])).to(q_MD.dtype)
    dk_ND = tl.dot(ds_NM, q_MD, dk_ND)
    # dq is not computed transposed: that would use the large matrix instruction for 32 rows, was predicted to gain 10 %
    # and took 11.0 ms for 10.3 at 64K 128/8 (benchmarks/LOG.md, "Gradients").
    return tl.dot(ds_NM.T, k_ND), dk_ND, dv_ND


@triton.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "heads", "first_slot", "head_slots"])
def backward_to_128(
    q, dout, stats, k_desc, v_desc, dq, dk, dv, partial_dq, part_dk, part_dv, first_split, slots, list_of_tile,
    last_tile, begin, end, bounds, lists, blocks, first_kv_head, heads, first_slot, head_slots, stride_t, scale,
    DIAGONAL: tl.constexpr, SUM: tl.constexpr, PARTIAL: tl.constexpr, G: tl.constexpr, HISTORY: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One split: each slot's part of dq, and dk and dv [S, K, D]; if DIAGONAL, with a list's first split the diagonal
    block and its dq [T, H, D], in the work range that has the first slots.

    dk and dv of a list of several splits go in parts to part_dk and part_dv [splits, N, D]; if SUM, those of all lists.
    """
    which, splits, number, first, last = _split(tl.program_id(0), list_of_tile, last_tile, begin, end, lists, SPLIT)
    if which >= lists:
        return
    part, block = which // blocks, which % blocks
    kv_head = first_kv_head + part
    start, stop, key_shift = key_rows(bounds, block)
    first_row, last_row, shift = query_rows(bounds, block)
    k_ND = k_desc.load([start, kv_head * D])
    v_ND = v_desc.load([start, kv_head * D])
    column = tl.arange(0, D)
    key = start + tl.arange(0, N)
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    scale_log2 = scale * LOG2_E
    if PARTIAL:
        last = tl.where(start < stop, last, first)
    for at in tl.range(first, last, M):
        position = at + tl.arange(0, M)
        ok = position < last
        slot = tl.load(slots + position, mask=ok, other=0)
        row = slot // HISTORY
        q_MD, dout_MD, lse_M, delta_M = load_rows(
            q, dout, stats, row // G, kv_head * G + row % G, heads, ok, stride_t, D
        )
        s = tl.dot(k_ND, q_MD.T)
        dp = tl.dot(v_ND, dout_MD.T)
        p = tl.math.exp2(s * scale_log2 - lse_M[None, :])
        if BLOCK < N or PARTIAL:
            p = tl.where((key < stop)[:, None], p, 0.0)
        dq_MD, dk_ND, dv_ND = _gradients(q_MD, dout_MD, p, dp, delta_M, k_ND, dk_ND, dv_ND)
        offset = part.to(tl.int64) * head_slots + (slot - first_slot)
        at_MD = partial_dq + offset[:, None] * D + column[None, :]
        tl.store(at_MD, (dq_MD * scale).to(q_MD.dtype), mask=ok[:, None])
    if DIAGONAL and (number == 0) & (first_slot == 0):
        shift -= key_shift
        for at in tl.range(0, (last_row - first_row) * G, M):
            row = at + tl.arange(0, M)
            at_M, head = first_row + row // G, kv_head * G + row % G
            ok = at_M < last_row
            q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, at_M, head, heads, ok, stride_t, D)
            s = tl.dot(k_ND, q_MD.T)
            dp = tl.dot(v_ND, dout_MD.T)
            p = tl.math.exp2(s * scale_log2 - lse_M[None, :])
            visible = key[:, None] <= (at_M + shift)[None, :]
            if PARTIAL:
                visible = visible & (key < stop)[:, None]
            p = tl.where(visible, p, 0.0)
            dq_MD, dk_ND, dv_ND = _gradients(q_MD, dout_MD, p, dp, delta_M, k_ND, dk_ND, dv_ND)
            at_MD = dq + (at_M.to(tl.int64) * heads + head)[:, None] * D + column[None, :]
            tl.store(at_MD, (dq_MD * scale).to(q_MD.dtype), mask=ok[:, None])
    if not SUM and splits == 1:
        offset = (key.to(tl.int64) * (heads // G) + kv_head) * D
        at_ND = offset[:, None] + column[None, :]
        mask = (key < stop)[:, None]
        tl.store(dk + at_ND, (dk_ND * scale).to(dk.dtype.element_ty), mask=mask)
        tl.store(dv + at_ND, dv_ND.to(dv.dtype.element_ty), mask=mask)
    else:
        split = tl.load(first_split + which).to(tl.int64) + number
        at_ND = (split * N + tl.arange(0, N))[:, None] * D + column[None, :]
        tl.store(part_dk + at_ND, dk_ND * scale)
        tl.store(part_dv + at_ND, dv_ND)


@dataclass(frozen=True)
class ShortBlocks:
    """The launches of one call."""

    call: BlockCall
    lists: BlockLists

    def attend(self, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Write out [T, H, D] and lse [H, T]."""
        call = self.call
        shape = self.call.shapes.short_forward
        assert shape
        parts = list(work_ranges(self.lists, call.kv_heads, call.limit))
        partial_out = call.buffer(parts)
        partial_lse = torch.empty(partial_out.shape[0], dtype=torch.float32, device=partial_out.device)
        diagonal_lse_HT = torch.empty_like(lse_HT) if call.history_blocks else lse_HT
        if call.spans is not None:
            SpanCall(call, call.spans).attend(out_THD, diagonal_lse_HT)
        # Slices of work after one another reuse the same buffers: launches on a stream follow in order.
        for work, table in zip(parts, self.splits(parts), strict=True):
            launch(
                forward_to_128,
                (table.bound,),
                q=call.q_THD,
                **call.descriptors(shape.keys),
                out=out_THD,
                lse=diagonal_lse_HT,
                partial_out=partial_out,
                partial_lse=partial_lse,
                **call.in_lists(self.lists, table, work),
                bounds=call.tables.bounds,
                heads=call.heads,
                tokens=call.tokens,
                stride_t=call.q_THD.stride(0),
                scale_log2=call.scale_log2,
                **self.sizes(shape),
            )
            if call.history_blocks:
                call.combine(
                    softmax.combine_out,
                    work,
                    out=out_THD,
                    lse=lse_HT,
                    diagonal_lse=diagonal_lse_HT,
                    partial_out=partial_out,
                    partial_lse=partial_lse,
                )

    def attend_backward(self, dout: Tensor, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq [T, H, D], dk and dv [S, K, D]."""
        call = self.call
        spans = None if call.spans is None else SpanCall(call, call.spans)
        dq, dk, dv = call.like_q(), call.like_k(), call.like_k()
        if spans is not None:
            spans.dq(dout, stats, dq)
        parts = list(work_ranges(self.lists, call.kv_heads, call.limit))
        partial_dq = call.buffer(parts)
        # Then several launches add to the same dk and dv, which takes sums in float32.
        add = spans is not None or parts[0].chunks != slice(0, self.lists.chunks)  # cut by queries
        tables = self.splits(parts, count_all=add)
        for heads, together in groupby(zip(parts, tables, strict=True), lambda part: part[0].kv_heads):
            if not add:
                for work, table in together:
                    self._history(work, table, dout, stats, (dq, partial_dq), heads.start, (dk, dv))
                continue
            mine = list(together)
            sums = self._zero_sums(heads) if spans is None else spans.dkdv(dout, stats, heads)
            for work, table in mine[:-1]:
                self._history(work, table, dout, stats, (dq, partial_dq), 0, sums, diagonal=sums)
            self._history(*mine[-1], dout, stats, (dq, partial_dq), heads.start, (dk, dv), diagonal=sums)
        return dq, dk, dv

    def _zero_sums(self, heads: slice) -> tuple[Tensor, Tensor]:
        """float32 zeros for dk and dv of some heads."""
        shape = (self.call.k_SKD.shape[0], heads.stop - heads.start, self.call.head_dim)
        sum_dk = torch.zeros(shape, dtype=torch.float32, device=self.call.k_SKD.device)
        return sum_dk, torch.zeros_like(sum_dk)

    def _history(
        self,
        work: WorkRange,
        table: TileTable,
        dout: Tensor,
        stats: Tensor,
        dqs: tuple[Tensor, Tensor],
        first_kv_head: int,
        sums: tuple[Tensor, Tensor],
        diagonal: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """The lists of a work range: their parts of dq, added to it (`dqs`: dq, memory for the parts); dk and dv to
        `sums`, with `diagonal` added to these."""
        call = self.call
        shape = self.call.shapes.short_backward
        assert shape
        # A list has one split more than it fills, or none if all are empty; without `diagonal`, only those of lists
        # that have several leave parts.
        # At 128/8 with four query heads a key/value head a list has about 3,600 rows, less than a split: few leave
        # parts.
        most = table.bound * (work.slots > 0) if diagonal else 2 * work.heads * work.slots // _SPLIT
        part_dk, part_dv = (stats.new_empty(most * shape.keys, call.head_dim) for _ in range(2))
        launch(
            backward_to_128,
            (table.bound,),
            q=call.q_THD,
            dout=dout,
            stats=stats,
            **call.descriptors(shape.keys),
            dq=dqs[0],
            dk=sums[0],
            dv=sums[1],
            partial_dq=dqs[1],
            part_dk=part_dk,
            part_dv=part_dv,
            first_split=table.first_split,
            **call.in_lists(self.lists, table, work),
            bounds=call.tables.bounds,
            heads=call.heads,
            stride_t=call.q_THD.stride(0),
            scale=call.scale,
            SUM=diagonal is not None,
            **self.sizes(shape),
        )
        if most or diagonal:
            call.add_splits(table, first_kv_head, sums, (part_dk, part_dv), shape.keys, diagonal)
        if call.history_blocks:
            call.combine(softmax.combine_dq, work, dq=dqs[0], partial_dq=dqs[1])

    def splits(self, parts: list[WorkRange], *, count_all: bool = False) -> list[TileTable]:
        """The splits of each work range; without spans at least one for each list, as the diagonal block goes with
        it."""
        at_least = int(self.call.spans is None)
        return tile_tables(self.lists, parts, self.call.kv_heads, _SPLIT, at_least=at_least, count_all=count_all)

    def sizes(self, shape: TileShape) -> dict[str, Any]:
        """Compile-time sizes of the kernels here."""
        call = self.call
        return {
            "DIAGONAL": call.spans is None,
            "PARTIAL": call.partial,
            "HISTORY": max(call.history_blocks, 1),
            "BLOCK": call.block_size,
            "SPLIT": _SPLIT,
            **call.sizes(shape),
        }


def attend(call: BlockCall, lists: BlockLists, out_THD: Tensor, lse_HT: Tensor) -> None:
    """Write out [T, H, D] and lse [H, T]."""
    ShortBlocks(call, lists).attend(out_THD, lse_HT)


def attend_backward(call: BlockCall, lists: BlockLists, dout_THD: Tensor, stats_TH2: Tensor) -> Gradients:
    """(dq, dk, dv) of `attend`."""
    return ShortBlocks(call, lists).attend_backward(dout_THD, stats_TH2)
