"""dq of blocks from 144 keys on: a second pass over the forward pass's tiles of rows.

Three matrix products for each pair of a row and a key; a tile writes the parts of dq of its slots. dk and dv have a
pass of their own (four products, blocks_from_144_dkdv.py): two products more than one pass with atomics would need.
"""

import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common import softmax
from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.launch import launch
from moba_train.attention.kernels.common.lists import BlockLists, key_rows, query_rows
from moba_train.attention.kernels.common.softmax import LOG2_E, load_rows
from moba_train.attention.kernels.common.tiles import tile_of_program, tile_tables, work_ranges
from moba_train.attention.kernels.triton.blocks_from_144_dkdv import PackedDkdv
from moba_train.attention.kernels.triton.spans import SpanCall
from moba_train.attention.protocol import Gradients


@triton.jit
def _dq_tile(
    q_MD, dout_MD, lse_M, delta_M, last_M, k_desc, v_desc, start, length, column, scale,
    DIAGONAL: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq [M, D] of one tile from the rows start .. start + length of k; DIAGONAL: a row sees no keys after `last_M`."""
    dq_MD = tl.zeros([M, D], tl.float32)
    for j in tl.range(0, length, N):
        k_ND = k_desc.load([start + j, column])
        v_ND = v_desc.load([start + j, column])
        s = tl.dot(q_MD, k_ND.T)
        p = tl.math.exp2(s * (scale * LOG2_E) - lse_M[:, None])
        if DIAGONAL:
            p = tl.where((start + j + tl.arange(0, N))[None, :] <= last_M[:, None], p, 0.0)
        elif not EVEN:
            p = tl.where((j + tl.arange(0, N) < length)[None, :], p, 0.0)
        dp = tl.dot(dout_MD, v_ND.T)
        ds = p * (dp - delta_M[:, None])
        dq_MD = tl.dot(ds.to(q_MD.dtype), k_ND, dq_MD)
    return dq_MD * scale


@triton.jit(do_not_specialize=["lists", "blocks", "heads", "first_kv_head", "first_slot", "head_slots"])
def dq_history(
    q, dout, stats, k_desc, v_desc, partial_dq, slots, list_of_tile, last_tile, begin, end, bounds, lists, blocks,
    heads, first_kv_head, first_slot, head_slots, stride_t, scale,
    PARTIAL: tl.constexpr, G: tl.constexpr, HISTORY: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One row tile of one list: each slot's part of dq, in the order of the work range's slots."""
    which, first, stop = tile_of_program(tl.program_id(0), list_of_tile, last_tile, begin, end, lists, M)
    if which >= lists:
        return
    part, block = which // blocks, which % blocks
    kv_head = first_kv_head + part
    start, stop_key, _ = key_rows(bounds, block)
    if start >= stop_key:
        return
    length = stop_key - start if PARTIAL else BLOCK
    position = first.to(tl.int64) + tl.arange(0, M)
    ok = position < stop
    slot = tl.load(slots + position, mask=ok, other=0)
    row = slot // HISTORY
    token = row // G
    q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, token, kv_head * G + row % G, heads, ok, stride_t, D)
    dq_MD = _dq_tile(
        q_MD, dout_MD, lse_M, delta_M, last_M=None, k_desc=k_desc, v_desc=v_desc, start=start, length=length,
        column=kv_head * D, scale=scale, DIAGONAL=False, EVEN=BLOCK % N == 0 and not PARTIAL, D=D, M=M, N=N,
    )  # fmt: skip
    offset = part.to(tl.int64) * head_slots + (slot - first_slot)
    tl.store(partial_dq + offset[:, None] * D + tl.arange(0, D)[None, :], dq_MD.to(q_MD.dtype), mask=ok[:, None])


@triton.jit(do_not_specialize=["tiles"])
def dq_diagonal(
    q, dout, stats, k_desc, v_desc, dq, bounds, tiles, stride_t, scale,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One row tile of one diagonal block, causal: dq [T, H, D]."""
    pid, kv_head = tl.program_id(0), tl.program_id(1)
    # The last rows see the most keys, so they go first.
    block, tile = pid // tiles, tiles - 1 - pid % tiles
    first, end, shift = query_rows(bounds, block)
    start, stop, key_shift = key_rows(bounds, block)
    if first + tile * M // G >= end:
        return
    row = tile * M + tl.arange(0, M)
    at_M = first + row // G
    ok = at_M < end
    heads = tl.num_programs(1) * G
    head = kv_head * G + row % G
    q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, at_M, head, heads, ok, stride_t, D)
    shift -= key_shift
    last_M = tl.minimum(at_M + shift, stop - 1)
    length = tl.minimum(stop - start, first + (tile * M + M - 1) // G + 1 + shift - start)
    dq_MD = _dq_tile(
        q_MD, dout_MD, lse_M, delta_M, last_M=last_M, k_desc=k_desc, v_desc=v_desc, start=start, length=length,
        column=kv_head * D, scale=scale, DIAGONAL=True, EVEN=False, D=D, M=M, N=N,
    )  # fmt: skip
    offset = (at_M.to(tl.int64) * heads + head) * D
    tl.store(dq + offset[:, None] + tl.arange(0, D)[None, :], dq_MD.to(q_MD.dtype), mask=ok[:, None])


def diagonal_dq(call: BlockCall, dout: Tensor, stats: Tensor, dq: Tensor) -> None:
    """Write to dq [T, H, D] the part of the diagonal blocks, or of the spans that replace them."""
    if call.spans is not None:
        SpanCall(call, call.spans).dq(dout, stats, dq)
        return
    shape = call.shapes.dq
    tiles = call.diagonal_tiles(shape)
    launch(
        dq_diagonal,
        (call.tables.blocks * tiles, call.kv_heads),
        q=call.q_THD,
        dout=dout,
        stats=stats,
        **call.descriptors(shape.keys),
        dq=dq,
        bounds=call.tables.bounds,
        tiles=tiles,
        stride_t=call.q_THD.stride(0),
        scale=call.scale,
        **call.sizes(shape),
    )


def attend_backward(call: BlockCall, lists: BlockLists, dout: Tensor, stats: Tensor) -> Gradients:
    """dq [T, H, D], dk and dv [S, K, D]; these by blocks_from_144_dkdv.py."""
    shape = call.shapes.dq
    dk, dv = PackedDkdv(call, dout, stats, lists).run()
    # Allocated behind dk and dv, whose packed rows are free again by now.
    dq = call.like_q()
    diagonal_dq(call, dout, stats, dq)
    if call.history_blocks == 0:
        return dq, dk, dv
    descriptors = call.descriptors(shape.keys)
    parts = list(work_ranges(lists, call.kv_heads, call.limit))
    partial_dq = call.buffer(parts)
    for work, table in zip(parts, tile_tables(lists, parts, call.kv_heads, shape.rows), strict=True):
        launch(
            dq_history,
            (table.bound,),
            q=call.q_THD,
            dout=dout,
            stats=stats,
            **descriptors,
            partial_dq=partial_dq,
            **call.in_lists(lists, table, work),
            bounds=call.tables.bounds,
            heads=call.heads,
            stride_t=call.q_THD.stride(0),
            scale=call.scale,
            PARTIAL=call.partial,
            HISTORY=call.history_blocks,
            BLOCK=call.block_size,
            **call.sizes(shape),
        )
        call.combine(softmax.combine_dq, work, dq=dq, partial_dq=partial_dq)
    return dq, dk, dv
