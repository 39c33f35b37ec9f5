"""The forward pass of blocks from 512 keys on, on Hopper: of history blocks, over the rows of their lists, and of
diagonal blocks, causal.

Two producer warps gather the rows of q of a tile, one copies tiles of keys and one tiles of values, all as far ahead as
stages are empty; two consumer warpgroups have half of the tile's rows each, and share its keys (forward_row_tile.py).
32K 512/3 takes 1.83 ms, by Triton's kernels 2.27; handing over each half of a row tile when it is there gained most,
1.97 to 1.79 ms (benchmarks/LOG.md).

There are as many programs as multiprocessors, and each takes one tile of rows after the other: their gathers and stores
overlap with products of other rows. Every role walks through the same tiles by itself.

A stage of q is also the stage of its results: it is empty once these are stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.launch import launch
from moba_train.attention.kernels.common.lists import BlockLists
from moba_train.attention.kernels.common.tiles import TileTable, WorkRange
from moba_train.attention.kernels.hopper import copy_to_shared, descriptors, gather_to_shared, thread_barrier
from moba_train.attention.kernels.hopper.forward_row_tile import attend_rows
from moba_train.attention.kernels.triton import blocks_from_144_forward
from moba_train.attention.kernels.triton.blocks_from_144_forward import LongForward


@gluon.jit
def _tile(tile, tables, M: gl.constexpr, N: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr):
    """(first key, key/value head, tiles of keys, first row, rows before, one past the last row, the last key that row 0
    sees, one past the last key) of a tile of M rows.

    A row is a position in the lists, or DIAGONAL a token of q, of which each has G rows.
    """
    if DIAGONAL:
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
    tile, tiles, tables, M: gl.constexpr, N: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr
):
    """(number, its `_tile`) of this program's first tile with rows from `tile` on; `tiles` or more: there is none."""
    # Clamped, as the last tile's successor is looked up as well, before the loop ends.
    found = _tile(gl.maximum(gl.minimum(tile, tiles - 1), 0), tables, M, N, G, BLOCK, DIAGONAL)
    if DIAGONAL:
        while (tile < tiles) & (found[2] == 0):
            tile += gl.num_programs(0)
            found = _tile(gl.minimum(tile, tiles - 1), tables, M, N, G, BLOCK, DIAGONAL)
    return tile, found


@gluon.jit
def _copy(
    desc, smem, barriers, tiles, tables, M: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr
):
    """Producer warp: the keys, or the values, of one tile of rows after the other."""
    full, empty = barriers
    stages: gl.constexpr = smem.type.shape[0]
    N: gl.constexpr = desc.block_type.shape[0]
    D: gl.constexpr = desc.block_type.shape[1]
    step = 0
    tile, coming = _next_tile(gl.program_id(0), tiles, tables, M, N, G, BLOCK, DIAGONAL)
    while tile < tiles:
        first_key, kv_head, many, _first, _before, _end, _shift, _stop = coming
        # Looked up one tile ahead: its chain of loads is hidden behind this tile's copies.
        tile, coming = _next_tile(tile + gl.num_programs(0), tiles, tables, M, N, G, BLOCK, DIAGONAL)
        for j in range(many):
            stage = step % stages
            mbarrier.wait(empty.index(stage), (step // stages & 1) ^ 1)
            mbarrier.expect(full.index(stage), desc.block_type.nbytes)
            corner = [first_key + j * N, kv_head * D]
            copy_to_shared(desc, corner, full.index(stage), smem.index(stage))
            step += 1


@gluon.jit
def _gather(
    q, stride_t, slots, smem, barriers, tiles, tables, heads, first_kv_head, first_slot, head_slots, N: gl.constexpr,
    G: gl.constexpr, HISTORY: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """Two producer warps: the rows of q of one tile after the other, each half to a stage of its own.

    With them how many tiles of keys they meet (0: there are no more rows); where their results belong, a row of the
    buffers of a work range, or DIAGONAL a row of out (-1: there is no such row); and DIAGONAL how many keys each row
    sees.
    """
    q_smem, destination_smem, seen_smem, key_tiles_smem = smem
    full, empty = barriers
    q_stages: gl.constexpr = q_smem.type.shape[0]
    M: gl.constexpr = q_smem.type.shape[1]
    D: gl.constexpr = q_smem.type.shape[2]
    # Rows whose addresses are in registers at once: these warps have 56 a thread.
    R: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [2, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    i_R = gl.arange(0, R, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    iteration = 0
    tile, coming = _next_tile(gl.program_id(0), tiles, tables, 2 * M, N, G, BLOCK, DIAGONAL)
    while tile < tiles:
        first_key, kv_head, many, first, before, end, shift, stop = coming
        tile, coming = _next_tile(tile + gl.num_programs(0), tiles, tables, 2 * M, N, G, BLOCK, DIAGONAL)
        # Each half is handed over when it is there: 32K 512/3 took 1.97 ms when both were waited for, then 1.79
        # (benchmarks/LOG.md, "Forward pass").
        for half in range(2):
            stage = iteration % q_stages
            mbarrier.wait(empty.index(stage), (iteration // q_stages & 1) ^ 1)
            for part in gl.static_range(M // R):
                row = before + half * M + part * R + i_R
                if DIAGONAL:
                    token, head = first + row // G, kv_head * G + row % G
                    ok = token < end
                    destination_R = token * heads + head
                    seen_R = gl.minimum(token + shift + 1, stop) - first_key
                    seen_smem.index(stage).slice(part * R, R).store(seen_R)
                else:
                    ok = first + row < end
                    slot = gl.load(slots + first + row, mask=ok, other=0)
                    token, head = slot // HISTORY // G, kv_head * G + slot // HISTORY % G
                    destination_R = (kv_head - first_kv_head) * head_slots + slot - first_slot
                destination_smem.index(stage).slice(part * R, R).store(gl.where(ok, destination_R, -1))
                rows = q + token.to(gl.int64) * stride_t + head * D
                gather_to_shared(
                    q_smem.index(stage).slice(part * R, R), rows[:, None] + column[None, :], mask=ok[:, None]
                )
            key_tiles_smem.index(stage).store(gl.full([1], many, gl.int32, flat))
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(full.index(stage))
            iteration += 1
    # Both warpgroups must learn that there are no more rows: a stage with 0 tiles of keys for each.
    for _half in range(2):
        stage = iteration % q_stages
        mbarrier.wait(empty.index(stage), (iteration // q_stages & 1) ^ 1)
        key_tiles_smem.index(stage).store(gl.full([1], 0, gl.int32, flat))
        thread_barrier()
        mbarrier.arrive(full.index(stage))
        iteration += 1


@gluon.jit
def _barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """(full, empty) barriers of each of STAGES stages, for what fills it and for its READERS."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def _attend_tiles(
    q, stride_t, slots, k_desc, v_desc, out, lse, tiles, tables, heads, tokens, first_kv_head, first_slot,
    head_slots, scale_log2, G: gl.constexpr, HISTORY: gl.constexpr, BLOCK: gl.constexpr, M: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """The results of all tiles of M rows."""
    N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    q_stages: gl.constexpr = 2 * Q_STAGES
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M // 2, D], k_desc.dtype)
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [q_stages, M // 2, D], q_layout)
    destination_smem = gl.allocate_shared_memory(gl.int32, [q_stages, M // 2], flat)
    seen_smem = gl.allocate_shared_memory(gl.int32, [q_stages, M // 2], flat)
    key_tiles_smem = gl.allocate_shared_memory(gl.int32, [q_stages, 1], flat)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, N, D], v_desc.layout)
    q_barriers = _barriers(q_stages, 1)
    # Two readers, the warpgroups, which share a tile's keys; each half of q has one.
    k_barriers = _barriers(K_STAGES, 2)
    v_barriers = _barriers(V_STAGES, 2)
    fence_async_shared()
    q_smem_set = (q_smem, destination_smem, seen_smem, key_tiles_smem)
    smem = (q_smem, destination_smem, seen_smem, key_tiles_smem, k_smem, v_smem)
    barriers = (q_barriers, k_barriers, v_barriers)
    gl.warp_specialize(
        [
            (attend_rows, (out, lse, smem, barriers, 0, heads, tokens, scale_log2, BLOCK, DIAGONAL)),
            (attend_rows, (out, lse, smem, barriers, 1, heads, tokens, scale_log2, BLOCK, DIAGONAL)),
            (
                _gather,
                (q, stride_t, slots, q_smem_set, q_barriers, tiles, tables, heads, first_kv_head, first_slot,
                 head_slots, N, G, HISTORY, BLOCK, DIAGONAL),
            ),
            (_copy, (k_desc, k_smem, k_barriers, tiles, tables, M, G, BLOCK, DIAGONAL)),
            (_copy, (v_desc, v_smem, v_barriers, tiles, tables, M, G, BLOCK, DIAGONAL)),
        ],
        [4, 2, 1, 1],
        [224, 56, 56, 56],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["lists", "blocks", "heads", "first_kv_head", "first_slot", "head_slots"])
def forward_history(
    q, k_desc, v_desc, partial_out, partial_lse, slots, list_of_tile, last_tile, begin, end, bounds, lists, blocks,
    heads, first_kv_head, first_slot, head_slots, stride_t, scale_log2,
    G: gl.constexpr, HISTORY: gl.constexpr, BLOCK: gl.constexpr, M: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """The rows of all lists: the partial (out, lse) of each slot, in the order of the work range's slots."""
    tiles = gl.load(last_tile + lists - 1)
    tables = (list_of_tile, last_tile, begin, end, bounds, lists, blocks, first_kv_head)
    _attend_tiles(
        q=q, stride_t=stride_t, slots=slots, k_desc=k_desc, v_desc=v_desc, out=partial_out, lse=partial_lse,
        tiles=tiles, tables=tables, heads=heads, tokens=0, first_kv_head=first_kv_head, first_slot=first_slot,
        head_slots=head_slots, scale_log2=scale_log2, G=G, HISTORY=HISTORY, BLOCK=BLOCK, M=M,
        K_STAGES=K_STAGES, V_STAGES=V_STAGES, Q_STAGES=Q_STAGES, DIAGONAL=False,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["blocks", "row_tiles", "heads", "tokens"])
def forward_diagonal(
    q, k_desc, v_desc, out, lse, bounds, blocks, row_tiles, heads, tokens, stride_t, scale_log2,
    G: gl.constexpr, M: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Diagonal blocks, causal: out [T, H, D] and lse [H, T]."""
    tiles = blocks * row_tiles * (heads // G)
    # Without lists, `slots` is not looked at.
    _attend_tiles(
        q=q, stride_t=stride_t, slots=bounds, k_desc=k_desc, v_desc=v_desc, out=out, lse=lse,
        tiles=tiles, tables=(bounds, blocks, row_tiles), heads=heads, tokens=tokens, first_kv_head=0, first_slot=0,
        head_slots=0, scale_log2=scale_log2, G=G, HISTORY=1, BLOCK=0, M=M,
        K_STAGES=K_STAGES, V_STAGES=V_STAGES, Q_STAGES=Q_STAGES, DIAGONAL=True,
    )  # fmt: skip


# Three stages of keys, or tiles of 64 keys in five, gain nothing: 1.827 and 1.983 ms at 32K 512/3 for 1.817 (printed,
# not kept; benchmarks/LOG.md, "Forward pass").
STAGES = {"K_STAGES": 2, "V_STAGES": 2, "Q_STAGES": 2}
# 8 warps x 224 and 4 x 56 are the 12 x 168 with which the program starts: registers move between warpgroups.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Registers of a thread, before the warps divide them: eight warps that multiply have 224, four that copy 56."""


@dataclass(frozen=True)
class SpecialisedForward(LongForward):
    """The launches of one call. Tiles have the shape of those of the kernels in Triton (`TileShapes.forward`), so both
    work from the same tables."""

    def history(self, work: WorkRange, table: TileTable, partial_out: Tensor, partial_lse: Tensor) -> None:
        """Partial results of a work range's slots, in their order."""
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
            HISTORY=call.history_blocks,
            BLOCK=call.block_size,
            **self._sizes,
        )

    def diagonal(self, out_THD: Tensor, lse_HT: Tensor) -> None:
        """out [T, H, D] and lse [H, T] of the diagonal blocks."""
        call = self.call
        row_tiles = call.diagonal_tiles(call.shapes.forward)
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
    """Programs: one for each multiprocessor, if there are tiles for all of them."""
    return min(tiles, torch.cuda.get_device_properties(call.q_THD.device).multi_processor_count)


def attend(call: BlockCall, lists: BlockLists, out_THD: Tensor, lse_HT: Tensor) -> None:
    """Write out [T, H, D] and lse [H, T]."""
    blocks_from_144_forward.attend(call, lists, out_THD, lse_HT, launches=SpecialisedForward)
