"""The forward pass of blocks from 144 keys on, which are several tiles of keys, by tiles of rows.

A program has a tile of rows, gathered from a block's list, or of a diagonal block, causally, and walks the block's
keys. All rows that selected a block are in its list, so tiles are full however long the sequence is, and a block's
keys are read by consecutive programs (from L2). A program's row costs its gather (2 * D bytes) and its partial result
(2 * D bytes, and once more to combine it) against 4 * D * BLOCK operations: with 128 keys 85 operations per byte, bound
by memory; from 512 keys on bound by the matrix units, so row tiles are as large as registers allow.

History blocks are complete and wholly past: their scores need no mask. Under PARTIAL, k and v are a part of the keys: a
block may be here in part or not at all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common import softmax
from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.launch import launch
from moba_train.attention.kernels.common.lists import BlockLists, key_rows, query_rows
from moba_train.attention.kernels.common.softmax import LOWEST, normalised
from moba_train.attention.kernels.common.tiles import TileTable, WorkRange, tile_of_program, tile_tables, work_ranges
from moba_train.attention.kernels.triton.spans import SpanCall


@triton.jit
def _attend_tile(
    q_MD, last_M, k_desc, v_desc, start, length, column, scale_log2,
    DIAGONAL: tl.constexpr, EVEN: tl.constexpr, PARTIAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """(out [M, D] normalised, lse [M], natural) of one tile over the rows start .. start + length of k.

    DIAGONAL: a row sees no keys after `last_M`. PARTIAL: some rows may see no key, and get (0, -inf).
    """
    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    out_MD = tl.zeros([M, D], tl.float32)
    for j in tl.range(0, length, N):
        k_ND = k_desc.load([start + j, column])
        v_ND = v_desc.load([start + j, column])
        s = tl.dot(q_MD, k_ND.T)
        if DIAGONAL:
            s = tl.where((start + j + tl.arange(0, N))[None, :] <= last_M[:, None], s, float("-inf"))
        elif not EVEN:
            s = tl.where((j + tl.arange(0, N) < length)[None, :], s, float("-inf"))
        new_M = tl.maximum(top_M, tl.max(s, 1) * scale_log2)
        if PARTIAL:
            new_M = tl.maximum(new_M, LOWEST)
        p = tl.math.exp2(s * scale_log2 - new_M[:, None])
        shrink_M = tl.math.exp2(top_M - new_M)
        sum_M = sum_M * shrink_M + tl.sum(p, 1)
        out_MD = tl.dot(p.to(q_MD.dtype), v_ND, out_MD * shrink_M[:, None])
        top_M = new_M
    return normalised(out_MD, top_M, sum_M, PARTIAL)


@triton.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "first_slot", "head_slots"])
def forward_history(
    q, k_desc, v_desc, partial_out, partial_lse, slots, list_of_tile, last_tile, begin, end, bounds, lists, blocks,
    first_kv_head, first_slot, head_slots, stride_t, scale_log2,
    PARTIAL: tl.constexpr, G: tl.constexpr, HISTORY: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One row tile of one list: the partial (out, lse) of each slot, in the order of the work range's slots."""
    which, first, stop = tile_of_program(tl.program_id(0), list_of_tile, last_tile, begin, end, lists, M)
    if which >= lists:
        return
    part, block = which // blocks, which % blocks
    kv_head = first_kv_head + part
    start, stop_key, _ = key_rows(bounds, block)
    if start >= stop_key:
        return
    # A constant where the block is whole: the compiler then knows the number of iterations.
    length = stop_key - start if PARTIAL else BLOCK
    position = first.to(tl.int64) + tl.arange(0, M)
    ok = position < stop
    slot = tl.load(slots + position, mask=ok, other=0)
    row = slot // HISTORY
    token = row // G
    column = tl.arange(0, D)
    at = token.to(tl.int64) * stride_t + (kv_head * G + row % G) * D
    q_MD = tl.load(q + at[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    out_MD, lse_M = _attend_tile(
        q_MD, last_M=None, k_desc=k_desc, v_desc=v_desc, start=start, length=length, column=kv_head * D,
        scale_log2=scale_log2, DIAGONAL=False, EVEN=BLOCK % N == 0 and not PARTIAL, PARTIAL=False, D=D, M=M, N=N,
    )  # fmt: skip
    offset = part.to(tl.int64) * head_slots + (slot - first_slot)
    tl.store(partial_out + offset[:, None] * D + column[None, :], out_MD.to(q_MD.dtype), mask=ok[:, None])
    tl.store(partial_lse + offset, lse_M, mask=ok)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def forward_diagonal(
    q, k_desc, v_desc, out, lse, bounds, tokens, tiles, stride_t, scale_log2,
    PARTIAL: tl.constexpr, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One row tile of one diagonal block, causal: out [T, H, D] and lse [H, T]."""
    pid, kv_head = tl.program_id(0), tl.program_id(1)
    block, tile = pid // tiles, tiles - 1 - pid % tiles  # the last rows see the most keys: they go first
    first, end, shift = query_rows(bounds, block)
    start, stop, key_shift = key_rows(bounds, block)
    row = tile * M + tl.arange(0, M)
    at_M = first + row // G
    if first + tile * M // G >= end:
        return
    ok = at_M < end
    last_M = tl.minimum(at_M + (shift - key_shift), stop - 1)
    heads = tl.num_programs(1) * G
    head = kv_head * G + row % G
    column = tl.arange(0, D)
    at = at_M.to(tl.int64) * stride_t + head * D
    q_MD = tl.load(q + at[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    length = tl.minimum(stop - start, first + (tile * M + M - 1) // G + 1 + (shift - key_shift) - start)
    out_MD, lse_M = _attend_tile(
        q_MD, last_M=last_M, k_desc=k_desc, v_desc=v_desc, start=start, length=length, column=kv_head * D,
        scale_log2=scale_log2, DIAGONAL=True, EVEN=False, PARTIAL=PARTIAL, D=D, M=M, N=N,
    )  # fmt: skip
    offset = (at_M.to(tl.int64) * heads + head) * D
    tl.store(out + offset[:, None] + column[None, :], out_MD.to(q_MD.dtype), mask=ok[:, None])
    tl.store(lse + head.to(tl.int64) * tokens + at_M, lse_M, mask=ok)


@dataclass(frozen=True)
class LongForward:
    """The launches of one call."""

    call: BlockCall
    lists: BlockLists

    def history(self, work: WorkRange, table: TileTable, partial_out: Tensor, partial_lse: Tensor) -> None:
        """The partial results of a work range's slots, in their order."""
        call = self.call
        shape = call.shapes.forward
        launch(
            forward_history,
            (table.bound,),
            q=call.q_THD,
            **call.descriptors(shape.keys),
            partial_out=partial_out,
            partial_lse=partial_lse,
            **call.in_lists(self.lists, table, work),
            bounds=call.tables.bounds,
            stride_t=call.q_THD.stride(0),
            scale_log2=call.scale_log2,
            PARTIAL=call.partial,
            HISTORY=call.history_blocks,
            BLOCK=call.block_size,
            **call.sizes(shape),
        )

    def diagonal(self, out_THD: Tensor, lse_HT: Tensor) -> None:
        """out [T, H, D] and lse [H, T] of the diagonal blocks."""
        call = self.call
        shape = call.shapes.diagonal
        tiles = call.diagonal_tiles(shape)
        launch(
            forward_diagonal,
            (call.tables.blocks * tiles, call.kv_heads),
            q=call.q_THD,
            **call.descriptors(shape.keys),
            out=out_THD,
            lse=lse_HT,
            bounds=call.tables.bounds,
            tokens=call.tokens,
            tiles=tiles,
            stride_t=call.q_THD.stride(0),
            scale_log2=call.scale_log2,
            PARTIAL=call.partial,
            **call.sizes(shape),
        )


def attend(
    call: BlockCall,
    lists: BlockLists,
    out_THD: Tensor,
    lse_HT: Tensor,
    launches: Callable[[BlockCall, BlockLists], LongForward] = LongForward,
) -> None:
    """Write out [T, H, D] and lse [H, T]."""
    # hopper/ replaces the launches alone; tables, work ranges and combining are these.
    run = launches(call, lists)
    # Not `lse_HT` itself: `combine_out` would read and write the same numbers (see there).
    diagonal_lse_HT = torch.empty_like(lse_HT) if call.history_blocks else lse_HT
    if call.spans is None:
        run.diagonal(out_THD, diagonal_lse_HT)
    else:
        SpanCall(call, call.spans).attend(out_THD, diagonal_lse_HT)
    if call.history_blocks == 0:
        return
    parts = list(work_ranges(lists, call.kv_heads, call.limit))
    partial_out = call.buffer(parts)
    partial_lse = torch.empty(partial_out.shape[0], dtype=torch.float32, device=partial_out.device)
    tables = tile_tables(lists, parts, call.kv_heads, call.shapes.forward.rows)
    for work, table in zip(parts, tables, strict=True):
        run.history(work, table, partial_out, partial_lse)
        call.combine(
            softmax.combine_out,
            work,
            out=out_THD,
            lse=lse_HT,
            diagonal_lse=diagonal_lse_HT,
            partial_out=partial_out,
            partial_lse=partial_lse,
        )
