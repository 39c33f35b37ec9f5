"""All gradients of blocks of 128 keys, one tile, in one pass over gathered rows (gradients_key_tile.py), on Hopper.

Four producer warps gather a tile of rows of q and dout, with what the backward pass needs of each, while two consumer
warpgroups multiply the tile before. So rows are not packed beforehand (blocks_256_to_4096_gradients.py), nothing but dq
is held in memory, and a row's dq goes to the position of its slot. For longer blocks, of which each tile of keys would
gather the rows again, packing is faster: 32K 512/3 6.77 ms, 7.65 gathered (benchmarks/LOG.md).
"""

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moba_train.attention.kernels.common import softmax
from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.launch import launch
from moba_train.attention.kernels.common.lists import BlockLists
from moba_train.attention.kernels.common.tiles import TileTable, WorkRange, work_ranges
from moba_train.attention.kernels.hopper import descriptors, gather_to_shared, thread_barrier
from moba_train.attention.kernels.hopper.blocks_256_to_4096_gradients import OnePass
from moba_train.attention.kernels.hopper.gradients_key_tile import allocate_shared, copy_keys, multiply, store_parts
from moba_train.attention.kernels.triton.blocks_from_144_dkdv import SplitSums
from moba_train.attention.protocol import Gradients

_WARPS = gl.constexpr(4)
_ROWS = gl.constexpr(16)
"""Rows whose addresses are in registers at a time: the warps that gather have 24 registers a thread."""


@gluon.jit
def _gather(
    rows, strides, slots, left, shift, descriptors, column, first_key, destination_smem, smem, barriers, tiles,
    G: gl.constexpr, HISTORY: gl.constexpr,
):  # fmt: skip
    """Producer: the keys, then tile after tile of rows, as soon as a stage is empty.

    `rows`: q, dout and stats of token 0 and the group's first head, and `strides` from token to token; `slots`: the
    `left` slots of these rows and those behind them; `shift`: from a slot to the row of its dq. `destination_smem`:
    rows of dq, for `multiply`.

    Rows past the end are zeros, and so are their gradients, with destination 0, which nothing reads.
    """
    q, dout, stats = rows
    q_stride, heads = strides
    k_desc, v_desc = descriptors
    _k_smem, _v_smem, q_smem, dout_smem, lse_smem, delta_smem, _ds_smem, _dq_smem = smem
    full, empty, keys_full = barriers
    stages: gl.constexpr = q_smem.type.shape[0]
    M: gl.constexpr = q_smem.type.shape[1]
    D: gl.constexpr = q_smem.type.shape[2]
    # 16 bytes a thread, the widest asynchronous copy.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [_WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    i_M = gl.arange(0, M, flat)
    i_R = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    copy_keys(k_desc, v_desc, smem, keys_full, first_key, column)
    for i in range(tiles):
        stage = i % stages
        # Inverted, so that the first filling of each stage does not wait.
        mbarrier.wait(empty.index(stage), (i // stages & 1) ^ 1)
        ok = i_M < left
        slot = gl.load(slots + i_M, mask=ok, other=0)
        # Row 0 is never read: a mask for each row instead made the warps spill 28 bytes a thread, some of it in the
        # loop that multiplies (compiled for Hopper).
        destination_smem.index(stage).store(gl.where(ok, slot + shift, 0))
        stat = stats + (slot // HISTORY // G).to(gl.int64) * heads * 2 + slot // HISTORY % G * 2
        gather_to_shared(lse_smem.index(stage), stat, mask=ok)
        gather_to_shared(delta_smem.index(stage), stat + 1, mask=ok)
        for part in gl.static_range(M // _ROWS):
            ok = part * _ROWS + i_R < left
            row = gl.load(slots + part * _ROWS + i_R, mask=ok, other=0) // HISTORY
            from_q = q + ((row // G).to(gl.int64) * q_stride + row % G * D)[:, None] + columns[None, :]
            to_q = q_smem.index(stage).slice(part * _ROWS, _ROWS)
            gather_to_shared(to_q, from_q, mask=ok[:, None])
            from_dout = dout + ((row // G).to(gl.int64) * heads + row % G)[:, None] * D + columns[None, :]
            to_dout = dout_smem.index(stage).slice(part * _ROWS, _ROWS)
            gather_to_shared(to_dout, from_dout, mask=ok[:, None])
        async_copy.commit_group()
        slots += M
        left -= M
        # Asynchronous copies of this kind cannot arrive at a barrier by themselves: a thread waits for its own copies,
        # then all threads' copies are made visible to the matrix units, then one arrival is counted.
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(full.index(stage))


@gluon.jit(do_not_specialize=["lists", "blocks", "heads", "first_kv_head", "split", "first_slot", "head_slots"])
def backward_gathered(
    q, dout, stats, k_desc, v_desc, part_dq, part_dk, part_dv, slots, list_of_split, first_split, last_tile, begin, end,
    bounds, lists, blocks, heads, first_kv_head, split, first_slot, head_slots, stride_t, scale,
    G: gl.constexpr, HISTORY: gl.constexpr, D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """float32 dk and dv of a block's keys from a split of the rows of its list, to part_dk and part_dv [splits, N, D];
    the rows' dq from these keys, to part_dq [1 + slots, D]."""
    pid = gl.program_id(0)
    which = gl.load(list_of_split + pid)
    exists = which < lists
    which = gl.minimum(which, lists - 1)
    part, block = which // blocks, which % blocks
    first_key = gl.load(bounds + block * 6 + 3)
    before = (pid - gl.load(first_split + which)) * split
    first = gl.load(last_tile + which - 1, mask=which > 0, other=0) + before
    last = gl.minimum(first + split, gl.load(last_tile + which))
    # Leaving early would leave the warps behind that copy.
    tiles = gl.where(exists, gl.maximum(last - first, 0), 0)
    position = gl.load(begin + which) + before * M
    kv_head = first_kv_head + part
    rows = (q + kv_head * G * D, dout + kv_head * G * D, stats + kv_head * G * 2)
    # One arrival a stage, the gatherers' (packed rows have two: bulk copies and the turn at dq).
    smem, barriers = allocate_shared(k_desc, M, STAGES, 1)
    destination_smem = gl.allocate_shared_memory(gl.int32, [STAGES, M], gl.NVMMASharedLayout(0, 32, 1))
    dk_ND, dv_ND = gl.warp_specialize(
        [
            (
                multiply,
                (part_dq, destination_smem, smem, barriers, 0, 0, tiles, tiles, 0, 0, 0, 0, 1, scale, N, D, False,
                 True),
            ),
            (
                _gather,
                (rows, (stride_t, heads), slots + position, gl.load(end + which) - position,
                 part * head_slots - first_slot + 1, (k_desc, v_desc), kv_head * D, first_key, destination_smem, smem,
                 barriers, tiles, G, HISTORY),
            ),
        ],
        [_WARPS],
        [24],
    )  # fmt: skip
    store_parts(part_dk, part_dv, dk_ND, dv_ND, scale, pid.to(gl.int64), exists)


@dataclass(frozen=True)
class GatheredPass(OnePass):
    """The launches of one call whose rows are gathered to blocks of one tile of keys: only the
    rows' dq takes memory."""

    def run(self) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D]; dq too is written."""
        return self.summed(self.work_ranges(), self.diagonal(slice(0, self.call.kv_heads)), self.gathered)

    def work_ranges(self) -> list[WorkRange]:
        """Work ranges whose dq takes as much memory as the partial results of the forward pass, at most."""
        return list(work_ranges(self.lists, self.call.kv_heads, self.call.limit))

    def gathered(self, work: WorkRange, table: TileTable) -> SplitSums:
        """dk and dv of the rows of a work range, split by split; their dq is added."""
        call, keys = self.call, self.call.shapes.dkdv.keys
        part_dq = self.dq.new_empty(1 + work.heads * work.slots, call.head_dim)
        part_dk, part_dv = (self.stats.new_empty(table.split_bound * keys, call.head_dim) for _ in range(2))
        launch(
            backward_gathered,
            (table.split_bound,),
            q=call.q_THD,
            dout=self.dout,
            stats=self.stats,
            **descriptors(call, keys),
            # One row in front, for the destination of rows past the end.
            part_dq=part_dq,
            part_dk=part_dk,
            part_dv=part_dv,
            slots=self.lists.slots,
            list_of_split=table.list_of_split,
            first_split=table.first_split,
            last_tile=table.last_tile,
            begin=table.begin,
            end=table.end,
            bounds=call.tables.bounds,
            lists=table.lists,
            blocks=call.tables.blocks,
            heads=call.heads,
            first_kv_head=work.kv_heads.start,
            split=self.split_tiles,
            first_slot=work.first_slot,
            head_slots=work.slots,
            stride_t=call.q_THD.stride(0),
            scale=call.scale,
            G=call.group,
            HISTORY=call.history_blocks,
            **self.sizes,
        )
        call.combine(softmax.combine_dq, work, dq=self.dq, partial_dq=part_dq[1:])
        return SplitSums(table, part_dk, part_dv)


def attend_backward(call: BlockCall, lists: BlockLists, dout_THD: Tensor, stats_TH2: Tensor) -> Gradients:
    """dq [T, H, D], dk and dv [S, K, D]."""
    return GatheredPass(call, dout_THD, stats_TH2, lists, call.like_q()).gradients()
