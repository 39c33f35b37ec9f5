"""All gradients of the lists of long blocks in one pass over packed rows (key_tile.py): one kernel.

A program has a tile of keys and a split of its list. The tiles of keys of a block take turns at the dq of a tile of
rows: the program of each waits until that of the tile before has added its part. That one was started before, so it
never waits for this one; they soon run one tile of rows apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moba_train.attention.blocks.triton.key_tile import copy_keys, multiply, rooms, store_parts


@gluon.jit
def wait_for_turn(done, key_tile):
    """Until the tiles of keys before this one have added their parts of a row tile's dq."""
    seen = key_tile * 0
    while seen < key_tile:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [done], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def pass_turn(done, key_tile):
    """Let the next tile of keys add its part: what this program has written is there for the program that has it."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;",
        "=r,l,r", [done, key_tile + 1], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copy_packed(descriptors, done, room, bars, first, tiles, key_tile, first_key, column):
    """One warp: the keys, then tile after tile of rows, as soon as there is room and their dq may be added to."""
    q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc = descriptors
    _k_room, _v_room, q_room, dout_room, lse_room, delta_room, _ds_room, _dq_room = room
    ready, free, keys_ready = bars
    stages: gl.constexpr = q_room.type.shape[0]
    M: gl.constexpr = q_desc.block_type.shape[0]
    copy_keys(k_desc, v_desc, room, keys_ready, first_key, column)
    for i in range(tiles):
        stage = i % stages
        mbarrier.wait(free.index(stage), (i // stages & 1) ^ 1)
        if i >= stages:
            pass_turn(done + i - stages, key_tile)
        bar = ready.index(stage)
        row = first + i * M
        mbarrier.expect(bar, q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 8 * M)
        tma.async_copy_global_to_shared(q_desc, [row, 0], bar, q_room.index(stage))
        tma.async_copy_global_to_shared(lse_desc, [row], bar, lse_room.index(stage))
        tma.async_copy_global_to_shared(dout_desc, [row, 0], bar, dout_room.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [row], bar, delta_room.index(stage))
        wait_for_turn(done + i, key_tile)
        mbarrier.arrive(bar)
    for i in range(gl.maximum(tiles - stages, 0), tiles):
        mbarrier.wait(free.index(i % stages), i // stages & 1)
        pass_turn(done + i, key_tile)


@gluon.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "key_tiles", "split"])
def gradients_history(
    q_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    k_desc,
    v_desc,
    packed_dq,
    done,
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
    part_dk and part_dv [splits, key tiles, N, D]; the rows' dq from these keys, added to packed_dq [rows, D].

    `done` int32 [row tiles], 0 before: how many tiles of keys have added their part.
    """
    pid, key_tile = gl.program_id(0) // key_tiles, gl.program_id(0) % key_tiles
    which = gl.load(list_of_split + pid)
    exists = which < lists
    which = gl.minimum(which, lists - 1)
    part, block = which // blocks, which % blocks
    first_key = gl.load(bounds + block * 6 + 3) + key_tile * N
    number = pid - gl.load(first_split + which)
    first = gl.load(last_tile + which - 1, mask=which > 0, other=0) + number * split
    last = gl.minimum(first + split, gl.load(last_tile + which))
    # Leaving early would leave the warps behind that copy.
    tiles = gl.where(exists, gl.maximum(last - first, 0), 0)
    room, bars = rooms(k_desc, M, STAGES, 2)
    descriptors = (q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc)
    column = (first_kv_head + part) * D
    row, end = first * M, (first + tiles) * M
    dk_ND, dv_ND = gl.warp_specialize(
        [
            (
                multiply,
                (packed_dq, 0, room, bars, row, end, tiles, tiles, 0, key_tile, 0, 0, 1, scale, N, D, False, False),
            ),
            (_copy_packed, (descriptors, done + first, room, bars, row, tiles, key_tile, first_key, column)),
        ],
        [1],
        [24],
    )
    store_parts(part_dk, part_dv, dk_ND, dv_ND, scale, pid.to(gl.int64) * key_tiles + key_tile, exists)
