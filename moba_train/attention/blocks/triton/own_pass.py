"""All gradients of long blocks' own rows, causal, in one pass (key_tile.py): one kernel.

A program has a block and a key/value head, and takes one tile of keys after the other; each thread adds to the parts of
dq that it has written before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moba_train.attention.blocks.triton.key_tile import copy_keys, multiply, rooms, row_tile


@gluon.jit
def _first_row(first_row, first_key, shift, M: gl.constexpr):
    """The first tile of rows that sees keys from `first_key` on, counted in whole tiles from the block's first row: a
    row's dq stays with one thread."""
    return first_row + gl.maximum(first_key - shift - first_row, 0) // M * M


@gluon.jit
def _copy_own(
    descriptors, stats, room, bars, keys_free, rows, start, key_tiles, kv_head, heads, G: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """One warp: for every tile of keys, these and the rows that see them, head by head."""
    q_desc, dout_desc, k_desc, v_desc = descriptors
    _k_room, _v_room, q_room, dout_room, lse_room, delta_room, _ds_room, _dq_room = room
    ready, free, keys_ready = bars
    first_row, last_row, shift = rows
    stages: gl.constexpr = q_room.type.shape[0]
    M: gl.constexpr = q_desc.block_type.shape[0]
    N: gl.constexpr = k_desc.block_type.shape[0]
    i_M = gl.arange(0, M, gl.BlockedLayout([2], [32], [1], [0]))
    step = 0
    for key_tile in range(key_tiles):
        first_key = start + key_tile * N
        mbarrier.wait(keys_free, (key_tile & 1) ^ 1)
        copy_keys(k_desc, v_desc, room, keys_ready, first_key, kv_head * D)
        first = _first_row(first_row, first_key, shift, M)
        tiles = gl.maximum(gl.cdiv(last_row - first, M), 0)
        for i in range(tiles * G):
            at, head = row_tile(i, first, tiles, M, True)
            head += kv_head * G
            stage = step % stages
            mbarrier.wait(free.index(stage), (step // stages & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, q_desc.block_type.nbytes + dout_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [at, head * D], bar, q_room.index(stage))
            tma.async_copy_global_to_shared(dout_desc, [at, head * D], bar, dout_room.index(stage))
            ok = at + i_M < last_row
            place = stats + ((at + i_M).to(gl.int64) * heads + head) * 2
            lse_M = gl.load(place, mask=ok, other=float("inf"))
            delta_M = gl.load(place + 1, mask=ok, other=0.0)
            lse_room.index(stage).store(lse_M)
            delta_room.index(stage).store(delta_M)
            mbarrier.arrive(bar)
            step += 1


@gluon.jit
def _own_key_tiles(
    out, room, bars, keys_free, rows, start, stop, key_tiles, kv_head, heads, scale, G: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Two warpgroups: dq of a block's own rows, dk and dv of its keys, one tile of keys after the other."""
    dq, sum_dk, sum_dv = out
    first_row, last_row, shift = rows
    M: gl.constexpr = room[2].type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    turns_before = 0
    for key_tile in range(key_tiles):
        first_key = start + key_tile * N
        first = _first_row(first_row, first_key, shift, M)
        tiles = gl.maximum(gl.cdiv(last_row - first, M), 0)
        dk_ND, dv_ND = multiply(
            dq, 0, room, bars, first, last_row, tiles, tiles * G, turns_before, key_tile, first_key - shift,
            kv_head * G, heads, scale, N, D, True, False,
        )  # fmt: skip
        turns_before += tiles * G
        mbarrier.arrive(keys_free)
        key = first_key + gl.arange(0, N, gl.SliceLayout(1, layout))
        at_ND = ((key.to(gl.int64) * (heads // G) + kv_head) * D)[:, None]
        at_ND = at_ND + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
        mask = (key < stop)[:, None]
        gl.store(sum_dk + at_ND, (dk_ND * scale).to(sum_dk.dtype.element_ty), mask=mask)
        gl.store(sum_dv + at_ND, dv_ND.to(sum_dv.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["heads", "key_tiles"])
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
    block, kv_head = gl.program_id(0), gl.program_id(1)
    at = bounds + block * 6
    start, stop = gl.load(at + 3), gl.load(at + 4)
    rows = (gl.load(at), gl.load(at + 1), gl.load(at + 2) - gl.load(at + 5))
    key_tiles = gl.minimum(key_tiles, gl.cdiv(stop - start, N))
    room, bars = rooms(k_desc, M, STAGES, 2)
    keys_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_free, count=1)
    fence_async_shared()
    descriptors = (q_desc, dout_desc, k_desc, v_desc)
    out = (dq, sum_dk, sum_dv)
    gl.warp_specialize(
        [
            (
                _own_key_tiles,
                (out, room, bars, keys_free, rows, start, stop, key_tiles, kv_head, heads, scale, G, N, D),
            ),
            (_copy_own, (descriptors, stats, room, bars, keys_free, rows, start, key_tiles, kv_head, heads, G, D)),
        ],
        [1],
        [24],
    )  # fmt: skip
