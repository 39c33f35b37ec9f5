"""dq, dk and dv of the lists of long blocks in one pass over packed rows, on Hopper, in Gluon (Triton's lower level).

Where `dkdv_history` and `dq_history` take seven matrix products, this takes five. One warp copies tiles of rows to
shared memory, two warpgroups multiply. A program has a tile of keys, whose dk and dv stay in registers, and a split of
its list; of each tile of rows it writes the part of dq from its keys. `combine_dq` adds these parts, in order.

In a turn of the loop the products of the turn before are still under way: its dq is taken out while the next scores are
computed.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moba_train.attention.blocks.triton import combine
from moba_train.attention.blocks.triton.call import BlockCall
from moba_train.attention.blocks.triton.dq import own_dq
from moba_train.attention.blocks.triton.packed import Packed, PackedDkdv, SplitSums
from moba_train.attention.blocks.triton.tile_tables import TileTable
from moba_train.attention.blocks.triton.tiles import WorkRange

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _wait_for_turn(turn, key_tile):
    """Until the tile of keys before has added its part of dq to this tile of rows."""
    seen = key_tile * 0
    while seen < key_tile:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [turn], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _pass_turn(turn, key_tile):
    """What this program's warps have written is there for the program of the next tile of keys."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [turn, key_tile + 1],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _copy(descriptors, turns, room, bars, first_row, tiles, first_key, key_tile, column):
    """One warp: the keys, then tile after tile of rows, as soon as there is room."""
    q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc = descriptors
    k_room, v_room, q_room, dout_room, lse_room, delta_room, _ds_room, _dq_room = room
    ready, free, keys_ready = bars
    stages: gl.constexpr = q_room.type.shape[0]
    M: gl.constexpr = q_desc.block_type.shape[0]
    mbarrier.expect(keys_ready, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [first_key, column], keys_ready, k_room.index(0))
    tma.async_copy_global_to_shared(v_desc, [first_key, column], keys_ready, v_room.index(0))
    for i in range(tiles):
        stage = i % stages
        mbarrier.wait(free.index(stage), (i // stages & 1) ^ 1)
        if i >= stages:
            _pass_turn(turns + i - stages, key_tile)
        bar = ready.index(stage)
        row = first_row + i * M
        mbarrier.expect(bar, q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 8 * M)
        tma.async_copy_global_to_shared(q_desc, [row, 0], bar, q_room.index(stage))
        tma.async_copy_global_to_shared(lse_desc, [row], bar, lse_room.index(stage))
        tma.async_copy_global_to_shared(dout_desc, [row, 0], bar, dout_room.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [row], bar, delta_room.index(stage))
        _wait_for_turn(turns + i, key_tile)
        mbarrier.arrive(bar)
    for i in range(gl.maximum(tiles - stages, 0), tiles):
        mbarrier.wait(free.index(i % stages), i // stages & 1)
        _pass_turn(turns + i, key_tile)


@gluon.jit
def _multiply(dq_out, room, bars, first_row, tiles, key_tile, scale, N: gl.constexpr, D: gl.constexpr):
    """Two warpgroups: (dk, dv [N, D]) of the tile of keys; dq of every tile of rows goes out."""
    k_room, v_room, q_room, dout_room, lse_room, delta_room, ds_room, dq_room = room
    ready, free, keys_ready = bars
    stages: gl.constexpr = q_room.type.shape[0]
    M: gl.constexpr = q_room.type.shape[1]
    dtype: gl.constexpr = q_room.dtype
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, M, 16])
    keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, keys, 2)
    whole_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(0, score)

    scale_log2 = scale * LOG2_E
    dk = gl.zeros([N, D], gl.float32, keys)
    dv = gl.zeros([N, D], gl.float32, keys)
    no_score = gl.zeros([N, M], gl.float32, score)
    no_dq = gl.zeros([M, D], gl.float32, rows)
    mbarrier.wait(keys_ready, 0)
    mbarrier.wait(ready.index(0), 0, pred=tiles > 0)
    token = warpgroup_mma(k_room.index(0), q_room.index(0).permute([1, 0]), no_score, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[token])
    exponent = s * scale_log2 - lse_room.index(0).load(of_row)[None, :]
    for i in range(tiles):
        stage, following = i % stages, (i + 1) % stages
        zero = i >> 30
        k_tile, v_tile, ds_tile = k_room.index(zero), v_room.index(zero), ds_room.index(zero)
        dq_tile = dq_room.index(zero)
        q_tile, dout_tile = q_room.index(stage), dout_room.index(stage)
        dp_token = warpgroup_mma(v_tile, dout_tile.permute([1, 0]), no_score, use_acc=False, is_async=True)
        p = gl.exp2(exponent)
        dv_token = warpgroup_mma(gl.convert_layout(p.to(dtype), left), dout_tile, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_token])
        delta = delta_room.index(stage).load(of_row)
        ds = (p * (dp - delta[None, :])).to(dtype)
        ds_tile.store(ds)
        fence_async_shared()
        gl.thread_barrier()
        dq_token = warpgroup_mma(ds_tile.permute([1, 0]), k_tile, no_dq, use_acc=False, is_async=True)
        dk_token = warpgroup_mma(ds_tile, q_tile, dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[dv_token])
        mbarrier.wait(ready.index(following), (i + 1) // stages & 1, pred=i + 1 < tiles)
        s_token = warpgroup_mma(k_tile, q_room.index(following).permute([1, 0]), no_score, use_acc=False, is_async=True)
        row_M = first_row + i * M + gl.arange(0, M, gl.SliceLayout(1, whole_rows))
        place = dq_out + (row_M.to(gl.int64) * D)[:, None] + gl.arange(0, D, gl.SliceLayout(0, whole_rows))[None, :]
        before = gl.load(place, mask=(row_M >= 0)[:, None] & (key_tile > 0), other=0.0, cache_modifier=".cg")
        dk, dq = warpgroup_mma_wait(1, deps=[dk_token, dq_token])
        dq_tile.store((dq * scale).to(dtype))
        gl.thread_barrier()
        part = dq_tile.load(whole_rows)
        gl.store(place, (part.to(gl.float32) + before.to(gl.float32)).to(dtype))
        mbarrier.arrive(free.index(stage))
        s = warpgroup_mma_wait(0, deps=[s_token])
        lse = lse_room.index(following).load(of_row)
        exponent = s * scale_log2 - lse[None, :]
    return dk, dv


@gluon.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "key_tiles", "split"])
def gradients_history(
    q_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    k_desc,
    v_desc,
    part_dq,
    turns,
    part_dk,
    part_dv,
    list_of_split,
    first_split,
    last_tile,
    bounds,
    lists,
    blocks,
    first_kv_head,
    key_tiles,
    split,
    scale,
    D: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """float32 dk and dv of one tile of a block's keys from a split of the packed rows of its list, to their place in
    part_dk and part_dv [splits, key tiles, N, D]; these rows' dq from these keys to dq [key tiles, rows, D]."""
    pid, key_tile = gl.program_id(0) // key_tiles, gl.program_id(0) % key_tiles
    which = gl.load(list_of_split + pid)
    exists = which < lists
    which = gl.minimum(which, lists - 1)
    part, block = which // blocks, which % blocks
    first_key = gl.load(bounds + block * 6 + 3) + key_tile * N
    number = pid - gl.load(first_split + which)
    first = gl.load(last_tile + which - 1, mask=which > 0, other=0) + number * split
    last = gl.minimum(first + split, gl.load(last_tile + which))
    tiles = gl.where(exists, gl.maximum(last - first, 0), 0)
    dtype: gl.constexpr = q_desc.dtype

    q_room = gl.allocate_shared_memory(dtype, [STAGES, M, D], q_desc.layout)
    dout_room = gl.allocate_shared_memory(dtype, [STAGES, M, D], dout_desc.layout)
    lse_room = gl.allocate_shared_memory(gl.float32, [STAGES, M], lse_desc.layout)
    delta_room = gl.allocate_shared_memory(gl.float32, [STAGES, M], delta_desc.layout)
    k_room = gl.allocate_shared_memory(dtype, [1, N, D], k_desc.layout)
    v_room = gl.allocate_shared_memory(dtype, [1, N, D], v_desc.layout)
    ds_room = gl.allocate_shared_memory(dtype, [1, N, M], gl.NVMMASharedLayout(128, 16, 2))
    dq_room = gl.allocate_shared_memory(dtype, [1, M, D], q_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=2)
        mbarrier.init(free.index(stage), count=1)
    mbarrier.init(keys_ready, count=1)
    fence_async_shared()

    descriptors = (q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc)
    room = (k_room, v_room, q_room, dout_room, lse_room, delta_room, ds_room, dq_room)
    bars = (ready, free, keys_ready)
    column = (first_kv_head + part) * D
    dk_ND, dv_ND = gl.warp_specialize(
        [
            (_multiply, (part_dq, room, bars, first * M, tiles, key_tile, scale, N, D)),
            (_copy, (descriptors, turns + first, room, bars, first * M, tiles, first_key, key_tile, column)),
        ],
        [1],
        [24],
    )
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    key = gl.arange(0, N, gl.SliceLayout(1, layout))
    at = key[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    place = (pid.to(gl.int64) * key_tiles + key_tile) * N * D
    gl.store(part_dk + place + at, dk_ND * scale, mask=exists)
    gl.store(part_dv + place + at, dv_ND, mask=exists)


@gluon.jit
def _copy_own(
    descriptors, stats, room, bars, rows, key_range, key_tiles, kv_head, heads, G: gl.constexpr, D: gl.constexpr
):
    q_desc, dout_desc, k_desc, v_desc = descriptors
    k_room, v_room, q_room, dout_room, lse_room, delta_room, ds_room, dq_room = room
    ready, free, keys_ready, keys_free = bars
    first_row, last_row, shift = rows
    start, stop = key_range
    stages: gl.constexpr = q_room.type.shape[0]
    M: gl.constexpr = q_desc.block_type.shape[0]
    N: gl.constexpr = k_desc.block_type.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    i_M = gl.arange(0, M, layout)
    step = 0
    for key_tile in range(key_tiles):
        first_key = start + key_tile * N
        mbarrier.wait(keys_free, (key_tile & 1) ^ 1)
        mbarrier.expect(keys_ready, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [first_key, kv_head * D], keys_ready, k_room.index(0))
        tma.async_copy_global_to_shared(v_desc, [first_key, kv_head * D], keys_ready, v_room.index(0))
        first = gl.maximum(first_row, first_key - shift)
        tiles = gl.maximum(gl.cdiv(last_row - first, M), 0)
        divisor = gl.maximum(tiles, 1)
        for i in range(tiles * G):
            at, head = first + i % divisor * M, kv_head * G + i // divisor
            stage = step % stages
            mbarrier.wait(free.index(stage), (step // stages & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, q_desc.block_type.nbytes + dout_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [at, head * D], bar, q_room.index(stage))
            tma.async_copy_global_to_shared(dout_desc, [at, head * D], bar, dout_room.index(stage))
            ok = at + i_M < last_row
            place = stats + ((at + i_M).to(gl.int64) * heads + head) * 2
            lse = gl.load(place, mask=ok, other=float("inf"))
            delta = gl.load(place + 1, mask=ok, other=0.0)
            lse_room.index(stage).store(lse)
            delta_room.index(stage).store(delta)
            mbarrier.arrive(bar, count=1)
            step += 1


@gluon.jit
def _exponent(s, lse_room, key_N, at_M, scale_log2):
    score: gl.constexpr = s.type.layout
    lse = lse_room.load(gl.SliceLayout(0, score))
    return gl.where(key_N[:, None] <= at_M[None, :], s * scale_log2 - lse[None, :], float("-inf"))


@gluon.jit
def _multiply_own(
    out,
    room,
    bars,
    rows,
    key_range,
    key_tiles,
    part,
    kv_head,
    heads,
    scale,
    G: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
):
    dq_out, sum_dk, sum_dv = out
    k_room, v_room, q_room, dout_room, lse_room, delta_room, ds_room, dq_room = room
    ready, free, keys_ready, keys_free = bars
    first_row, last_row, shift = rows
    start, stop = key_range
    stages: gl.constexpr = q_room.type.shape[0]
    M: gl.constexpr = q_room.type.shape[1]
    dtype: gl.constexpr = q_room.dtype
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, M, 16])
    keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    row: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, keys, 2)
    whole_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    scale_log2 = scale * LOG2_E
    no_score = gl.zeros([N, M], gl.float32, score)
    no_dq = gl.zeros([M, D], gl.float32, row)
    step = 0
    for key_tile in range(key_tiles):
        first_key = start + key_tile * N
        first = gl.maximum(first_row, first_key - shift)
        tiles = gl.maximum(gl.cdiv(last_row - first, M), 0)
        divisor = gl.maximum(tiles, 1)
        turns = tiles * G
        key_N = first_key - shift + gl.arange(0, N, gl.SliceLayout(1, score))
        i_M = gl.arange(0, M, gl.SliceLayout(0, score))
        dk = gl.zeros([N, D], gl.float32, keys)
        dv = gl.zeros([N, D], gl.float32, keys)
        mbarrier.wait(keys_ready, key_tile & 1)
        mbarrier.wait(ready.index(step % stages), step // stages & 1, pred=turns > 0)
        token = warpgroup_mma(
            k_room.index(0), q_room.index(step % stages).permute([1, 0]), no_score, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[token])
        exponent = _exponent(s, lse_room.index(step % stages), key_N, first + i_M, scale_log2)
        for i in range(turns):
            zero = i >> 30
            k_tile, v_tile, ds_tile = k_room.index(zero), v_room.index(zero), ds_room.index(zero)
            stage, following = step % stages, (step + 1) % stages
            at, head = first + i % divisor * M, kv_head * G + i // divisor
            q_tile, dout_tile = q_room.index(stage), dout_room.index(stage)
            dp_token = warpgroup_mma(v_tile, dout_tile.permute([1, 0]), no_score, use_acc=False, is_async=True)
            p = gl.exp2(exponent)
            dv_token = warpgroup_mma(gl.convert_layout(p.to(dtype), left), dout_tile, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp_token])
            delta = delta_room.index(stage).load(gl.SliceLayout(0, score))
            ds = (p * (dp - delta[None, :])).to(dtype)
            ds_tile.store(ds)
            fence_async_shared()
            gl.thread_barrier()
            dq_token = warpgroup_mma(ds_tile.permute([1, 0]), k_tile, no_dq, use_acc=False, is_async=True)
            dk_token = warpgroup_mma(ds_tile, q_tile, dk, is_async=True)
            dv = warpgroup_mma_wait(2, deps=[dv_token])
            mbarrier.wait(ready.index(following), (step + 1) // stages & 1, pred=i + 1 < turns)
            s_token = warpgroup_mma(
                k_tile, q_room.index(following).permute([1, 0]), no_score, use_acc=False, is_async=True
            )
            row_M = at + gl.arange(0, M, gl.SliceLayout(1, whole_rows))
            place = dq_out + ((row_M.to(gl.int64) * heads + head) * D)[:, None]
            place = place + gl.arange(0, D, gl.SliceLayout(0, whole_rows))[None, :]
            ok = (row_M < last_row)[:, None]
            before = gl.load(place, mask=ok & (key_tile > 0), other=0.0)
            dk, dq = warpgroup_mma_wait(1, deps=[dk_token, dq_token])
            dq_tile = dq_room.index(zero)
            dq_tile.store((dq * scale).to(dtype))
            gl.thread_barrier()
            total = dq_tile.load(whole_rows).to(gl.float32) + before.to(gl.float32)
            gl.store(place, total.to(dtype), mask=ok)
            mbarrier.arrive(free.index(stage))
            s = warpgroup_mma_wait(0, deps=[s_token])
            next_at = first + (i + 1) % divisor * M
            exponent = _exponent(s, lse_room.index(following), key_N, next_at + i_M, scale_log2)
            step += 1
        mbarrier.arrive(keys_free)
        key = first_key + gl.arange(0, N, gl.SliceLayout(1, keys))
        at_ND = ((key.to(gl.int64) * gl.num_programs(1) + part) * D)[:, None]
        at_ND = at_ND + gl.arange(0, D, gl.SliceLayout(0, keys))[None, :]
        mask = (key < stop)[:, None]
        gl.store(sum_dk + at_ND, (dk * scale).to(sum_dk.dtype.element_ty), mask=mask)
        gl.store(sum_dv + at_ND, dv.to(sum_dv.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["first_kv_head", "heads", "key_tiles"])
def gradients_own(
    q_desc,
    dout_desc,
    stats,
    k_desc,
    v_desc,
    dq,
    sum_dk,
    sum_dv,
    bounds,
    first_kv_head,
    heads,
    key_tiles,
    scale,
    G: gl.constexpr,
    D: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One block's own rows, causal: dq [T, H, D]; dk and dv [S, K, D], float32 where more is added."""
    block, part = gl.program_id(0), gl.program_id(1)
    kv_head = first_kv_head + part
    at = bounds + block * 6
    first_row = gl.load(at)
    last_row = gl.load(at + 1)
    start = gl.load(at + 3)
    stop = gl.load(at + 4)
    shift = gl.load(at + 2) - gl.load(at + 5)  # row of k minus row of q
    key_tiles = gl.minimum(key_tiles, gl.cdiv(stop - start, N))
    dtype: gl.constexpr = q_desc.dtype
    q_room = gl.allocate_shared_memory(dtype, [STAGES, M, D], q_desc.layout)
    dout_room = gl.allocate_shared_memory(dtype, [STAGES, M, D], dout_desc.layout)
    lse_room = gl.allocate_shared_memory(gl.float32, [STAGES, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    delta_room = gl.allocate_shared_memory(gl.float32, [STAGES, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_room = gl.allocate_shared_memory(dtype, [1, N, D], k_desc.layout)
    v_room = gl.allocate_shared_memory(dtype, [1, N, D], v_desc.layout)
    ds_room = gl.allocate_shared_memory(dtype, [1, N, M], gl.NVMMASharedLayout(128, 16, 2))
    dq_room = gl.allocate_shared_memory(dtype, [1, M, D], q_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=2)
        mbarrier.init(free.index(stage), count=1)
    mbarrier.init(keys_ready, count=1)
    mbarrier.init(keys_free, count=1)
    fence_async_shared()
    room = (k_room, v_room, q_room, dout_room, lse_room, delta_room, ds_room, dq_room)
    bars = (ready, free, keys_ready, keys_free)
    rows = (first_row, last_row, shift)
    key_range = (start, stop)
    gl.warp_specialize(
        [
            (
                _multiply_own,
                ((dq, sum_dk, sum_dv), room, bars, rows, key_range, key_tiles, part, kv_head, heads, scale, G, N, D),
            ),
            (
                _copy_own,
                (
                    (q_desc, dout_desc, k_desc, v_desc),
                    stats,
                    room,
                    bars,
                    rows,
                    key_range,
                    key_tiles,
                    kv_head,
                    heads,
                    G,
                    D,
                ),
            ),
        ],
        [1],
        [24],
    )


_KEYS, _ROWS = 128, 64
_STAGES = 2
_WARPS = 8
_REGISTERS = 168
"""A thread's, before warps divide them: 12 warps, of which one copies with 24 and eight multiply with 240."""


def usable(call: BlockCall) -> bool:
    """Whether the kernel here takes these blocks on this GPU."""
    return (
        call.q_THD.is_cuda
        and torch.cuda.get_device_capability(call.q_THD.device) == (9, 0)
        and call.q_THD.dtype in (torch.bfloat16, torch.float16)
        and call.head_dim == 128
        and call.block_size % _KEYS == 0
        and call.selected > 0
        and not call.partial
    )


def own_usable(call: BlockCall) -> bool:
    """Whether `gradients_own` takes the own blocks."""
    return call.spans is None


@dataclass(frozen=True)
class OnePass(PackedDkdv):
    """The launches of one call; with dk and dv of a work range's lists, their dq is added to `dq`."""

    dq: Tensor
    """[T, H, D]: the own blocks' part; receives the sum."""

    def run(self) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D]; dq too is written."""
        call = self.call
        parts = self.work_ranges()
        dk, dv = call.like_k(), call.like_k()
        room = self.room(parts)
        own = self.own(slice(0, call.kv_heads))
        for heads, several in groupby(zip(parts, self.tables(parts), strict=True), lambda part: part[0].kv_heads):
            mine = list(several)
            for work, table in mine[:-1]:
                self.add(self.history(work, table, room), heads.start, own, own)
            self.add(self.history(*mine[-1], room), heads.start, (dk, dv), own)
        return dk, dv

    def own(self, heads: slice, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """dk and dv [S, heads, D] of the own blocks; their dq is written."""
        call = self.call
        if not own_usable(call):
            if heads.start == 0:
                own_dq(call, self.dout, self.stats, self.dq)
            return super().own(heads, dtype)
        many = heads.stop - heads.start
        size = call.k_SKD.shape[0], many, call.head_dim
        sum_dk, sum_dv = (torch.empty(size, dtype=dtype, device=self.stats.device) for _ in range(2))
        gradients_own[(call.tables.blocks, many)](
            *(_descriptor(x.flatten(1), _ROWS, call.head_dim) for x in (call.q_THD, self.dout)),
            self.stats,
            *(_descriptor(x.flatten(1), _KEYS, call.head_dim) for x in (call.k_SKD, call.v_SKD)),
            self.dq,
            sum_dk,
            sum_dv,
            call.tables.bounds,
            heads.start,
            call.heads,
            self.key_tiles,
            call.scale,
            G=call.group,
            D=call.head_dim,
            M=_ROWS,
            N=_KEYS,
            STAGES=_STAGES,
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
        )
        return sum_dk, sum_dv

    def history(self, work: WorkRange, table: TileTable, room: Packed) -> SplitSums:
        """dk and dv of the rows of a work range, split by split; their dq is added."""
        call = self.call
        place = torch.empty(work.heads, work.entries, dtype=torch.int32, device=self.stats.device)
        self.pack(work, table, room, place)
        part_dq = torch.empty_like(room.q)
        turns = torch.zeros(len(room.q) // _ROWS, dtype=torch.int32, device=place.device)
        part_dk, part_dv = (
            self.stats.new_empty(table.split_bound * self.key_tiles * _KEYS, call.head_dim) for _ in range(2)
        )
        gradients_history[(table.split_bound * self.key_tiles,)](
            *(_descriptor(x, _ROWS) for x in (room.q, room.dout, room.lse, room.delta)),
            *(_descriptor(x.flatten(1), _KEYS, call.head_dim) for x in (call.k_SKD, call.v_SKD)),
            part_dq,
            turns,
            part_dk,
            part_dv,
            table.list_of_split,
            table.first_split,
            table.last_tile,
            call.tables.bounds,
            table.lists,
            call.tables.blocks,
            work.kv_heads.start,
            self.key_tiles,
            self.split_tiles,
            call.scale,
            D=call.head_dim,
            M=_ROWS,
            N=_KEYS,
            STAGES=_STAGES,
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
        )
        call.combine(combine.combine_dq, work, self.dq, part_dq, place=place)
        return SplitSums(table, part_dk, part_dv)


def _descriptor(x: Tensor, many: int, columns: int | None = None) -> TensorDescriptor:
    """For bulk copies of `many` rows of x, and of so many columns of them."""
    block = [many, *([columns or x.shape[1]] if x.dim() == 2 else [])]
    layout = gl.NVMMASharedLayout.get_default_for(block, _KINDS[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


_KINDS: dict[torch.dtype, Any] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
