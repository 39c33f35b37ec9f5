"""All gradients of blocks of 256 to 4096 keys in one pass (gradients_key_tile.py), on Hopper.

`backward_history`: a program has a tile of keys and a split of its list, whose rows are packed. The tiles of keys of a
block add to the dq of a tile of rows one after the other: the program of each waits until the tile before has added its
part. That program was started before, so it never waits for this one; they soon run one tile of rows apart.

`backward_diagonal`: the diagonal blocks, causal. A program has a block and a key/value head, and takes one tile of keys
after the other; each thread adds to the parts of dq that it has written before.

The rows' dq is summed row by row, and `combine_dq` adds it to the part of the diagonal blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moba_train.attention.kernels.common import softmax
from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.launch import ceil_div, launch
from moba_train.attention.kernels.common.lists import BlockLists
from moba_train.attention.kernels.common.tiles import TileTable, WorkRange
from moba_train.attention.kernels.hopper import copy_to_shared, descriptor, descriptors
from moba_train.attention.kernels.hopper.gradients_key_tile import (
    allocate_shared,
    copy_keys,
    multiply,
    row_tile,
    store_parts,
)
from moba_train.attention.kernels.triton.blocks_from_144_dkdv import PackedDkdv, PackedRows, SplitSums
from moba_train.attention.kernels.triton.blocks_from_144_dq import diagonal_dq
from moba_train.attention.protocol import Gradients


@gluon.jit
def wait_for_earlier_tiles(done, key_tile):
    """Until the tiles of keys before this one have added their parts of a row tile's dq."""
    # A value that the compiler cannot fold, so that the loop keeps its load.
    seen = key_tile * 0
    while seen < key_tile:
        # Acquire, at the scope of the GPU: other multiprocessors' parts of dq must be seen once their counter is.
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [done], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def release_next_tile(done, key_tile):
    """Let the next tile of keys add its part: what this program has written is there for the program that has it."""
    gl.inline_asm_elementwise(
        # A fence for all of the program's threads, whose arrival at `empty` the producer has seen; without the fences
        # the kernel gained 0.02 ms at 8K 512/3 (by a script; benchmarks/LOG.md, "Gradients").
        "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;",
        "=r,l,r", [done, key_tile + 1], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copy_packed(descriptors, done, smem, barriers, first, tiles, key_tile, first_key, column):
    """Producer warp: the keys, then tile after tile of rows, as soon as a stage is empty and their dq may be added
    to."""
    q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc = descriptors
    _k_smem, _v_smem, q_smem, dout_smem, lse_smem, delta_smem, _ds_smem, _dq_smem = smem
    full, empty, keys_full = barriers
    stages: gl.constexpr = q_smem.type.shape[0]
    M: gl.constexpr = q_desc.block_type.shape[0]
    copy_keys(k_desc, v_desc, smem, keys_full, first_key, column)
    for i in range(tiles):
        stage = i % stages
        mbarrier.wait(empty.index(stage), (i // stages & 1) ^ 1)
        if i >= stages:
            release_next_tile(done + i - stages, key_tile)
        barrier = full.index(stage)
        row = first + i * M
        # 8 * M: lse and delta, float32 each.
        mbarrier.expect(barrier, q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 8 * M)
        copy_to_shared(q_desc, [row, 0], barrier, q_smem.index(stage))
        copy_to_shared(lse_desc, [row], barrier, lse_smem.index(stage))
        copy_to_shared(dout_desc, [row, 0], barrier, dout_smem.index(stage))
        copy_to_shared(delta_desc, [row], barrier, delta_smem.index(stage))
        # After the copies are under way: waiting for the turn then costs nothing (measured without it;
        # benchmarks/LOG.md, "Gradients").
        wait_for_earlier_tiles(done + i, key_tile)
        mbarrier.arrive(barrier)
    # The last stages' rows, which no later filling releases.
    for i in range(gl.maximum(tiles - stages, 0), tiles):
        mbarrier.wait(empty.index(i % stages), i // stages & 1)
        release_next_tile(done + i, key_tile)


@gluon.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "key_tiles", "split"])
def backward_history(
    q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc, packed_dq, done, part_dk, part_dv, list_of_split,
    first_split, last_tile, bounds, lists, blocks, first_kv_head, key_tiles, split, scale,
    D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """float32 dk and dv of one tile of a block's keys from a split of the packed rows of its list, to part_dk and
    part_dv [splits, key tiles, N, D]; the rows' dq from these keys, added to packed_dq [rows, D].

    `done` int32 [row tiles], 0 before: how many tiles of keys have added their part.
    """
    # Tiles of keys of a split are neighbours in the order of launch, so the one that is waited for runs already.
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
    smem, barriers = allocate_shared(k_desc, M, STAGES, 2)
    descriptors = (q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc)
    column = (first_kv_head + part) * D
    row, end = first * M, (first + tiles) * M
    dk_ND, dv_ND = gl.warp_specialize(
        [
            (
                multiply,
                (packed_dq, 0, smem, barriers, row, end, tiles, tiles, 0, key_tile, 0, 0, 1, scale, N, D, False, False),
            ),
            (_copy_packed, (descriptors, done + first, smem, barriers, row, tiles, key_tile, first_key, column)),
        ],
        [1],
        [24],
    )
    store_parts(part_dk, part_dv, dk_ND, dv_ND, scale, pid.to(gl.int64) * key_tiles + key_tile, exists)


@gluon.jit
def _first_row(first_row, first_key, shift, M: gl.constexpr):
    """The first tile of rows that sees keys from `first_key` on, counted in whole tiles from the block's first row: a
    row's dq stays with one thread."""
    return first_row + gl.maximum(first_key - shift - first_row, 0) // M * M


@gluon.jit
def _load_diagonal(
    descriptors, stats, smem, barriers, keys_empty, rows, start, key_tiles, kv_head, heads, G: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Producer warp: for every tile of keys, these and the rows that see them, head by head."""
    q_desc, dout_desc, k_desc, v_desc = descriptors
    _k_smem, _v_smem, q_smem, dout_smem, lse_smem, delta_smem, _ds_smem, _dq_smem = smem
    full, empty, keys_full = barriers
    first_row, last_row, shift = rows
    stages: gl.constexpr = q_smem.type.shape[0]
    M: gl.constexpr = q_desc.block_type.shape[0]
    N: gl.constexpr = k_desc.block_type.shape[0]
    # lse and delta by plain loads: the numbers of a head's rows are not neighbours in `stats`, as bulk copies need
    # them.
    i_M = gl.arange(0, M, gl.BlockedLayout([2], [32], [1], [0]))
    step = 0
    for key_tile in range(key_tiles):
        first_key = start + key_tile * N
        mbarrier.wait(keys_empty, (key_tile & 1) ^ 1)
        copy_keys(k_desc, v_desc, smem, keys_full, first_key, kv_head * D)
        first = _first_row(first_row, first_key, shift, M)
        tiles = gl.maximum(gl.cdiv(last_row - first, M), 0)
        for i in range(tiles * G):
            at, head = row_tile(i, first, tiles, M, True)
            head += kv_head * G
            stage = step % stages
            mbarrier.wait(empty.index(stage), (step // stages & 1) ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, q_desc.block_type.nbytes + dout_desc.block_type.nbytes)
            copy_to_shared(q_desc, [at, head * D], barrier, q_smem.index(stage))
            copy_to_shared(dout_desc, [at, head * D], barrier, dout_smem.index(stage))
            ok = at + i_M < last_row
            address = stats + ((at + i_M).to(gl.int64) * heads + head) * 2
            lse_M = gl.load(address, mask=ok, other=float("inf"))
            delta_M = gl.load(address + 1, mask=ok, other=0.0)
            lse_smem.index(stage).store(lse_M)
            delta_smem.index(stage).store(delta_M)
            mbarrier.arrive(barrier)
            step += 1


@gluon.jit
def _diagonal_key_tiles(
    out, smem, barriers, keys_empty, rows, start, stop, key_tiles, kv_head, heads, scale, G: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Two consumer warpgroups: dq of a block's rows, dk and dv of its keys, one tile of keys after the other."""
    dq, sum_dk, sum_dv = out
    first_row, last_row, shift = rows
    M: gl.constexpr = smem[2].type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    iterations_before = 0
    for key_tile in range(key_tiles):
        first_key = start + key_tile * N
        first = _first_row(first_row, first_key, shift, M)
        tiles = gl.maximum(gl.cdiv(last_row - first, M), 0)
        dk_ND, dv_ND = multiply(
            dq, 0, smem, barriers, first, last_row, tiles, tiles * G, iterations_before, key_tile, first_key - shift,
            kv_head * G, heads, scale, N, D, True, False,
        )  # fmt: skip
        iterations_before += tiles * G
        mbarrier.arrive(keys_empty)
        key = first_key + gl.arange(0, N, gl.SliceLayout(1, layout))
        at_ND = ((key.to(gl.int64) * (heads // G) + kv_head) * D)[:, None]
        at_ND = at_ND + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
        mask = (key < stop)[:, None]
        gl.store(sum_dk + at_ND, (dk_ND * scale).to(sum_dk.dtype.element_ty), mask=mask)
        gl.store(sum_dv + at_ND, dv_ND.to(sum_dv.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["heads", "key_tiles"])
def backward_diagonal(
    q_desc, dout_desc, stats, k_desc, v_desc, dq, sum_dk, sum_dv, bounds, heads, key_tiles, scale,
    G: gl.constexpr, D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One diagonal block, causal: dq [T, H, D]; dk and dv [S, K, D], float32 where more is added."""
    block, kv_head = gl.program_id(0), gl.program_id(1)
    at = bounds + block * 6
    start, stop = gl.load(at + 3), gl.load(at + 4)
    rows = (gl.load(at), gl.load(at + 1), gl.load(at + 2) - gl.load(at + 5))
    key_tiles = gl.minimum(key_tiles, gl.cdiv(stop - start, N))
    smem, barriers = allocate_shared(k_desc, M, STAGES, 2)
    # Only here: in `backward_history` a program has one tile of keys, and a barrier that no role waits for may share
    # its memory with data (`allocate_shared`).
    keys_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_empty, count=1)
    fence_async_shared()
    descriptors = (q_desc, dout_desc, k_desc, v_desc)
    out = (dq, sum_dk, sum_dv)
    gl.warp_specialize(
        [
            (
                _diagonal_key_tiles,
                (out, smem, barriers, keys_empty, rows, start, stop, key_tiles, kv_head, heads, scale, G, N, D),
            ),
            (
                _load_diagonal,
                (descriptors, stats, smem, barriers, keys_empty, rows, start, key_tiles, kv_head, heads, G, D),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


STAGES = 2
REGISTERS = 168
"""A thread's, before the warps divide them: four warps that copy keep 24 each, eight that multiply have 240."""
_SHORT_SPLIT = 1024
"""Rows of a split for each tile of keys where there are fewer than `_SHORT` rows."""
_SHORT = 2**19
_ROUNDED = 8
"""Tiles of keys that may add to a row's dq in the dtype of q, which rounds it each time. With random numbers in bf16 dq
is off by 0.0047 in norm after 8 tiles and 0.0076 after 32, where two passes have 0.0029 and attention written plainly
in bf16 0.0066; more where all keys have something in common (benchmarks/LOG.md)."""
_FULL = 0.65
"""A program of `backward_diagonal` takes a whole block. Below this share of the multiprocessors in use, it loses what
it gained over two kernels with a program for each tile (0.26 ms for 0.44 at 8K 512/3, where nearly all are)."""


@dataclass(frozen=True)
class OnePass(PackedDkdv):
    """The launches of one call."""

    dq: Tensor
    """[T, H, D]: receives the gradients."""

    @property
    def split_tiles(self) -> int:
        """Tiles of a split: fewer rows where there are few in all, so that enough programs are busy."""
        call = self.call
        # The same limit below which rows are packed in one work range (blocks_from_144_dkdv.py).
        if call.tokens * call.heads >= _SHORT:
            return super().split_tiles
        return _SHORT_SPLIT * self.key_tiles // call.shapes.dkdv.rows

    @property
    def dq_dtype(self) -> torch.dtype:
        """Dtype in which the tiles of keys add up a row's dq."""
        return self.dq.dtype if self.key_tiles <= _ROUNDED else torch.float32

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq [T, H, D], dk and dv [S, K, D]."""
        return self.dq, *self.run()

    def run(self) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D]; dq too is written."""
        parts = self.work_ranges()
        diagonal = self.diagonal(slice(0, self.call.kv_heads))
        packed = self.allocate(parts)
        return self.summed(parts, diagonal, lambda work, table: self.history(work, table, packed))

    def summed(
        self,
        parts: list[WorkRange],
        diagonal: tuple[Tensor, Tensor],
        history: Callable[[WorkRange, TileTable], SplitSums],
    ) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D]: those of the `diagonal` blocks, and of all work ranges by `history`."""
        dk, dv = self.call.like_k(), self.call.like_k()
        # A head's work ranges add to float32 sums; only the last one rounds.
        for heads, several in groupby(zip(parts, self.tables(parts), strict=True), lambda part: part[0].kv_heads):
            mine = list(several)
            for work, table in mine[:-1]:
                self.add(history(work, table), heads.start, diagonal, diagonal)
            self.add(history(*mine[-1]), heads.start, (dk, dv), diagonal)
        return dk, dv

    def diagonal(self, heads: slice, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D] of the diagonal blocks, or of the spans that replace them, all `heads` at once; their dq
        is written."""
        call = self.call
        if not self.diagonal_in_one_pass():
            diagonal_dq(call, self.dout, self.stats, self.dq)
            return super().diagonal(heads, dtype)
        shape = call.shapes.dkdv
        sum_dk, sum_dv = (torch.empty(call.k_SKD.shape, dtype=dtype, device=self.stats.device) for _ in range(2))
        launch(
            backward_diagonal,
            (call.tables.blocks, call.kv_heads),
            q_desc=descriptor(call.q_THD, shape.rows),
            dout_desc=descriptor(self.dout, shape.rows),
            stats=self.stats,
            **descriptors(call, shape.keys),
            dq=self.dq,
            sum_dk=sum_dk,
            sum_dv=sum_dv,
            bounds=call.tables.bounds,
            heads=call.heads,
            key_tiles=self.key_tiles,
            scale=call.scale,
            G=call.group,
            **self.sizes,
        )
        return sum_dk, sum_dv

    def diagonal_in_one_pass(self) -> bool:
        """True if there are enough diagonal blocks to keep the GPU busy with a program each, and no spans. dq is added
        up in the result itself, so its dtype must do."""
        call = self.call
        if call.spans is not None or self.dq_dtype != self.dq.dtype:
            return False
        at_once = torch.cuda.get_device_properties(self.dq.device).multi_processor_count
        return busy_share(call.tokens // call.block_size * call.kv_heads, at_once) >= _FULL

    def history(self, work: WorkRange, table: TileTable, packed: PackedRows) -> SplitSums:
        """dk and dv of the rows of a work range, split by split; their dq is added."""
        call, shape = self.call, self.call.shapes.dkdv
        # dq lies in the order of packed rows, and `combine_dq` reads it in the order of slots.
        position_of = torch.empty(work.heads, work.slots, dtype=torch.int32, device=self.stats.device)
        self.pack(work, table, packed, position_of)
        packed_dq = torch.empty_like(packed.q, dtype=self.dq_dtype)
        # A counter for each tile of rows, zero before each work range.
        done = torch.zeros(len(packed.q) // shape.rows, dtype=torch.int32, device=position_of.device)
        splits = table.split_bound * self.key_tiles
        part_dk, part_dv = (self.stats.new_empty(splits * shape.keys, call.head_dim) for _ in range(2))
        launch(
            backward_history,
            (splits,),
            q_desc=descriptor(packed.q, shape.rows),
            dout_desc=descriptor(packed.dout, shape.rows),
            lse_desc=descriptor(packed.lse, shape.rows),
            delta_desc=descriptor(packed.delta, shape.rows),
            **descriptors(call, shape.keys),
            packed_dq=packed_dq,
            done=done,
            part_dk=part_dk,
            part_dv=part_dv,
            **self.in_splits(work, table),
            scale=call.scale,
            **self.sizes,
        )
        call.combine(softmax.combine_dq, work, position_of=position_of, dq=self.dq, partial_dq=packed_dq)
        return SplitSums(table, part_dk, part_dv)

    @property
    def sizes(self) -> dict[str, int]:
        """Compile-time sizes of both kernels."""
        shape = self.call.shapes.dkdv
        tile = {"D": self.call.head_dim, "M": shape.rows, "N": shape.keys, "STAGES": STAGES}
        return {**tile, "num_warps": shape.warps, "maxnreg": REGISTERS}


def busy_share(programs: int, at_once: int) -> float:
    """The share of their time in which multiprocessors have one of these equally long programs."""
    return programs / (ceil_div(programs, at_once) * at_once) if programs else 0.0


def attend_backward(call: BlockCall, lists: BlockLists, dout_THD: Tensor, stats_TH2: Tensor) -> Gradients:
    """dq [T, H, D], dk and dv [S, K, D]."""
    return OnePass(call, dout_THD, stats_TH2, lists, call.like_q()).gradients()
