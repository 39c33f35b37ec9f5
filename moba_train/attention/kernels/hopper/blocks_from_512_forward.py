"""The forward pass of long blocks on Hopper: over the rows of the lists, and over the blocks' own rows, causal.

Warps have roles. Two gather the rows of q of a tile, one copies tiles of keys and one tiles of values, all as far ahead
as there is room; two warpgroups have half of the tile's rows each, and share its keys (row_tile.py).

There are as many programs as multiprocessors, and each takes one tile of rows after the other: their gathers and stores
take place while the matrix units work for other rows. Every role walks through the same tiles by itself.

A place in shared memory has two barriers: `ready`, once it is filled, and `free`, once the products that read it have
ended in both warpgroups, or, of rows, once the results that take their place are stored. What fills a place for the
n-th time, counted from 0, waits for n phases of `free`, and what reads it then for n + 1 phases of `ready`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.launch import launch
from moba_train.attention.kernels.common.lists import BlockLists
from moba_train.attention.kernels.common.tiles import TileTable, WorkRange
from moba_train.attention.kernels.hopper import descriptors
from moba_train.attention.kernels.hopper.forward_row_tile import attend_rows
from moba_train.attention.kernels.triton.blocks_from_144_forward import LongForward


@gluon.jit
def _tile(tile, tables, M: gl.constexpr, N: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, OWN: gl.constexpr):
    """(first key, key/value head, tiles of keys, first row, rows before, one past the last row, the last key that row 0
    sees, one past the last key) of a tile of M rows; a row is a position in the lists, or OWN a token of q, of which
    each has G rows."""
    if OWN:
        bounds, blocks, row_tiles = tables
        kv_head, pid = tile // (blocks * row_tiles), tile % (blocks * row_tiles)
        at = bounds + pid // row_tiles * 6
        before = pid % row_tiles * M
        first, end, start, stop = gl.load(at), gl.load(at + 1), gl.load(at + 3), gl.load(at + 4)
        shift = gl.load(at + 2) - gl.load(at + 5)
        keys = gl.minimum(stop - start, first + (before + M - 1) // G + 1 + shift - start)
        keys = gl.where(first + before // G < end, keys, 0)
        return start, kv_head, gl.cdiv(keys, N), first, before, end, shift, stop
    else:
        list_of_tile, last_tile, begin, end, bounds, lists, blocks, first_kv_head = tables
        which = gl.minimum(gl.load(list_of_tile + tile), lists - 1)
        tiles_before = gl.load(last_tile + which - 1, mask=which > 0, other=0)
        start = gl.load(bounds + which % blocks * 6 + 3)
        first, before = gl.load(begin + which), (tile - tiles_before) * M
        return start, first_kv_head + which // blocks, BLOCK // N, first, before, gl.load(end + which), 0, 0


@gluon.jit
def _next_tile(
    tile, tiles, tables, M: gl.constexpr, N: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, OWN: gl.constexpr
):
    """(number, its `_tile`) of this program's first tile with rows from `tile` on; `tiles` or more: there is none."""
    found = _tile(gl.maximum(gl.minimum(tile, tiles - 1), 0), tables, M, N, G, BLOCK, OWN)
    if OWN:
        while (tile < tiles) & (found[2] == 0):
            tile += gl.num_programs(0)
            found = _tile(gl.minimum(tile, tiles - 1), tables, M, N, G, BLOCK, OWN)
    return tile, found


@gluon.jit
def _copy(desc, room, bars, tiles, tables, M: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, OWN: gl.constexpr):
    """One warp: the keys, or the values, of one tile of rows after the other."""
    ready, free = bars
    stages: gl.constexpr = room.type.shape[0]
    N: gl.constexpr = desc.block_type.shape[0]
    D: gl.constexpr = desc.block_type.shape[1]
    step = 0
    tile, coming = _next_tile(gl.program_id(0), tiles, tables, M, N, G, BLOCK, OWN)
    while tile < tiles:
        first_key, kv_head, many, _first, _before, _end, _shift, _stop = coming
        tile, coming = _next_tile(tile + gl.num_programs(0), tiles, tables, M, N, G, BLOCK, OWN)
        for j in range(many):
            stage = step % stages
            mbarrier.wait(free.index(stage), (step // stages & 1) ^ 1)
            mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
            place = [first_key + j * N, kv_head * D]
            tma.async_copy_global_to_shared(desc, place, ready.index(stage), room.index(stage))
            step += 1


@gluon.jit
def _gather(
    q, stride_t, entries, room, bars, tiles, tables, heads, first_kv_head, first_entry, head_entries, N: gl.constexpr,
    G: gl.constexpr, C: gl.constexpr, BLOCK: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """Two warps: the rows of q of one tile after the other, each half to a place of its own.

    With them how many tiles of keys they meet (0: there are no more rows); where their results belong, a place in the
    buffers of a work range, or OWN a row of out (-1: there is no such row); and OWN how many keys each row sees.
    """
    q_room, place_room, seen_room, many_room = room
    ready, free = bars
    places: gl.constexpr = q_room.type.shape[0]
    M: gl.constexpr = q_room.type.shape[1]
    D: gl.constexpr = q_room.type.shape[2]
    R: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [2, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    i_R = gl.arange(0, R, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    turn = 0
    tile, coming = _next_tile(gl.program_id(0), tiles, tables, 2 * M, N, G, BLOCK, OWN)
    while tile < tiles:
        first_key, kv_head, many, first, before, end, shift, stop = coming
        tile, coming = _next_tile(tile + gl.num_programs(0), tiles, tables, 2 * M, N, G, BLOCK, OWN)
        for half in range(2):
            at = turn % places
            mbarrier.wait(free.index(at), (turn // places & 1) ^ 1)
            for part in gl.static_range(M // R):
                row = before + half * M + part * R + i_R
                if OWN:
                    token, head = first + row // G, kv_head * G + row % G
                    ok = token < end
                    place_R = token * heads + head
                    seen_R = gl.minimum(token + shift + 1, stop) - first_key
                    seen_room.index(at).slice(part * R, R).store(seen_R)
                else:
                    ok = first + row < end
                    entry = gl.load(entries + first + row, mask=ok, other=0)
                    token, head = entry // C // G, kv_head * G + entry // C % G
                    place_R = (kv_head - first_kv_head) * head_entries + entry - first_entry
                place_room.index(at).slice(part * R, R).store(gl.where(ok, place_R, -1))
                rows = q + token.to(gl.int64) * stride_t + head * D
                async_copy.async_copy_global_to_shared(
                    q_room.index(at).slice(part * R, R), rows[:, None] + column[None, :], mask=ok[:, None]
                )
            many_room.index(at).store(gl.full([1], many, gl.int32, flat))
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(at))
            turn += 1
    for _half in range(2):
        at = turn % places
        mbarrier.wait(free.index(at), (turn // places & 1) ^ 1)
        many_room.index(at).store(gl.full([1], 0, gl.int32, flat))
        gl.thread_barrier()
        mbarrier.arrive(ready.index(at))
        turn += 1


@gluon.jit
def _barriers(PLACES: gl.constexpr, READERS: gl.constexpr):
    """(ready, free): barriers of each of some places, for what fills it and for the warpgroups that read it."""
    ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(free.index(place), count=READERS)
    return ready, free


@gluon.jit
def _attend_tiles(
    q, stride_t, entries, k_desc, v_desc, out, lse, tiles, tables, heads, tokens, first_kv_head, first_entry,
    head_entries, scale_log2, G: gl.constexpr, C: gl.constexpr, BLOCK: gl.constexpr, M: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """The results of all tiles of M rows."""
    N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    places: gl.constexpr = 2 * Q_STAGES
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M // 2, D], k_desc.dtype)
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    q_room = gl.allocate_shared_memory(k_desc.dtype, [places, M // 2, D], q_layout)
    place_room = gl.allocate_shared_memory(gl.int32, [places, M // 2], flat)
    seen_room = gl.allocate_shared_memory(gl.int32, [places, M // 2], flat)
    many_room = gl.allocate_shared_memory(gl.int32, [places, 1], flat)
    k_room = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, N, D], k_desc.layout)
    v_room = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, N, D], v_desc.layout)
    q_bars = _barriers(places, 1)
    k_bars = _barriers(K_STAGES, 2)
    v_bars = _barriers(V_STAGES, 2)
    fence_async_shared()
    q_rooms = (q_room, place_room, seen_room, many_room)
    room = (q_room, place_room, seen_room, many_room, k_room, v_room)
    bars = (q_bars, k_bars, v_bars)
    gl.warp_specialize(
        [
            (attend_rows, (out, lse, room, bars, 0, heads, tokens, scale_log2, BLOCK, OWN)),
            (attend_rows, (out, lse, room, bars, 1, heads, tokens, scale_log2, BLOCK, OWN)),
            (
                _gather,
                (q, stride_t, entries, q_rooms, q_bars, tiles, tables, heads, first_kv_head, first_entry, head_entries,
                 N, G, C, BLOCK, OWN),
            ),
            (_copy, (k_desc, k_room, k_bars, tiles, tables, M, G, BLOCK, OWN)),
            (_copy, (v_desc, v_room, v_bars, tiles, tables, M, G, BLOCK, OWN)),
        ],
        [4, 2, 1, 1],
        [224, 56, 56, 56],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["lists", "blocks", "heads", "first_kv_head", "first_entry", "head_entries"])
def forward_history(
    q,
    k_desc,
    v_desc,
    partial_out,
    partial_lse,
    entries,
    list_of_tile,
    last_tile,
    begin,
    end,
    bounds,
    lists,
    blocks,
    heads,
    first_kv_head,
    first_entry,
    head_entries,
    stride_t,
    scale_log2,
    G: gl.constexpr,
    C: gl.constexpr,
    BLOCK: gl.constexpr,
    M: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
):
    """The rows of all lists: the partial (out, lse) of each entry, to its place in the work range's buffers."""
    tiles = gl.load(last_tile + lists - 1)
    tables = (list_of_tile, last_tile, begin, end, bounds, lists, blocks, first_kv_head)
    _attend_tiles(
        q, stride_t, entries, k_desc, v_desc, partial_out, partial_lse, tiles, tables, heads, 0, first_kv_head,
        first_entry, head_entries, scale_log2, G, C, BLOCK, M, K_STAGES, V_STAGES, Q_STAGES, False,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["blocks", "row_tiles", "heads", "tokens"])
def forward_diagonal(
    q,
    k_desc,
    v_desc,
    out,
    lse,
    bounds,
    blocks,
    row_tiles,
    heads,
    tokens,
    stride_t,
    scale_log2,
    G: gl.constexpr,
    M: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
):
    """Blocks' own rows, causal: out [T, H, D] and lse [H, T]."""
    tiles = blocks * row_tiles * (heads // G)
    _attend_tiles(
        q, stride_t, bounds, k_desc, v_desc, out, lse, tiles, (bounds, blocks, row_tiles), heads, tokens, 0, 0, 0,
        scale_log2, G, 1, 0, M, K_STAGES, V_STAGES, Q_STAGES, True,
    )  # fmt: skip


STAGES = {"K_STAGES": 2, "V_STAGES": 2, "Q_STAGES": 2}
OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Registers of a thread, before the warps divide them: eight warps that multiply have 224, four that copy 56."""


@dataclass(frozen=True)
class SpecialisedForward(LongForward):
    """The launches of one call. Tiles have the shape of those of the kernels in Triton (`TileShapes.forward`), so both
    work from the same tables."""

    def history(self, work: WorkRange, table: TileTable, partial_out: Tensor, partial_lse: Tensor) -> None:
        """The partial results of a work range's entries, in their order."""
        call = self.call
        launch(
            forward_history,
            (_programs(call, table.bound),),
            q=call.q_THD,
            **descriptors(call, call.shapes.forward.keys),
            partial_out=partial_out,
            partial_lse=partial_lse,
            **call.in_lists(self.lists, table, work),
            bounds=call.tables.bounds,
            heads=call.heads,
            stride_t=call.q_THD.stride(0),
            scale_log2=call.scale_log2,
            C=call.selected,
            BLOCK=call.block_size,
            **self._sizes,
        )

    def own(self, out_THD: Tensor, lse_HT: Tensor) -> None:
        """out [T, H, D] and lse [H, T] of the own blocks."""
        call = self.call
        row_tiles = call.own_tiles(call.shapes.forward)
        launch(
            forward_diagonal,
            (_programs(call, call.tables.blocks * row_tiles * call.kv_heads),),
            q=call.q_THD,
            **descriptors(call, call.shapes.forward.keys),
            out=out_THD,
            lse=lse_HT,
            bounds=call.tables.bounds,
            blocks=call.tables.blocks,
            row_tiles=row_tiles,
            heads=call.heads,
            tokens=call.tokens,
            stride_t=call.q_THD.stride(0),
            scale_log2=call.scale_log2,
            **self._sizes,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        """Compile-time sizes of both kernels, and how they are compiled."""
        return {"G": self.call.group, "M": self.call.shapes.forward.rows, **STAGES, **OPTIONS}


def _programs(call: BlockCall, tiles: int) -> int:
    """One for each multiprocessor, if there are tiles for all of them."""
    return min(tiles, torch.cuda.get_device_properties(call.q_THD.device).multi_processor_count)


def attend(call: BlockCall, lists: BlockLists, out_THD: Tensor, lse_HT: Tensor) -> None:
    """Write out [T, H, D] and lse [H, T]."""
    SpecialisedForward(call, lists).attend(out_THD, lse_HT)
