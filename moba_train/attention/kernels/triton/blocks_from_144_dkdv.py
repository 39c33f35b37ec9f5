"""dk and dv of blocks from 144 keys on, from rows copied side by side.

A row of a list is read once for every tile of its block's keys, 32 times for 4096 keys. Gathering it each time, through
slot, row and two 64-bit addresses for every 16 bytes, costs registers and issue slots in the loop that should only
feed the matrix units. Instead

1. `pack` copies the rows of a work range (q, dout, lse, delta) in list order, each list filled up with rows of
   probability 0 to whole tiles, so that no reader needs a mask or a bound;
2. `dkdv_history` reads them as plain tiles, by bulk copies: a program has a tile of keys and a split of its list;
3. `dkdv_diagonal` writes the diagonal blocks' part, in float32;
4. `softmax.sum_splits` adds the results of the splits to it, in order, and rounds.

Launches follow one another, so the order of all sums is fixed. The price is 6 * D bytes of traffic per row of a list
in addition to what the gathers cost once, against 8 * D * BLOCK operations.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.launch import ceil_div, launch
from moba_train.attention.kernels.common.lists import BlockLists, key_rows, query_rows
from moba_train.attention.kernels.common.softmax import LOG2_E, load_rows, load_stats
from moba_train.attention.kernels.common.tiles import TileTable, WorkRange, tile_of_program, tile_tables, work_ranges
from moba_train.attention.kernels.triton.spans import SpanCall

_PACK_WARPS = 4
# With every head on block 0, 128K 512/8 took 219 ms with whole lists and takes 108 in splits, as with uniform routing;
# splits of 1,024 rows at 8K 512/3 lose (benchmarks/LOG.md, "Gradients").
_SPLIT = 4096
"""Rows of a split for each tile of keys, at most: at 512 keys 16,384. Longer blocks keep enough programs busy."""
# One work range for short sequences: a layer at 8K 512/3 has 18 launches instead of 23 and takes the host 0.47 ms
# (benchmarks/results/attention-host-h200-18-launches.json).
_LEAST_ROWS = 2**19
"""Rows packed together at least, 256 MiB at D = 128: q and dout."""


@triton.jit(do_not_specialize=["first_kv_head", "heads", "key_tiles"])
def dkdv_diagonal(
    q_desc, dout_desc, stats, k_desc, v_desc, sum_dk, sum_dv, bounds, first_kv_head, heads, key_tiles, scale,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dk and dv [S, some K, D] of one tile of keys from its diagonal block, causal; float32 where more is added."""
    pid, part = tl.program_id(0), tl.program_id(1)
    block = pid // key_tiles
    first_row, last_row, shift = query_rows(bounds, block)
    start, stop, key_shift = key_rows(bounds, block)
    first_key = start + pid % key_tiles * N
    if first_key >= stop:
        return
    kv_head = first_kv_head + part
    k_ND = k_desc.load([first_key, kv_head * D])
    v_ND = v_desc.load([first_key, kv_head * D])
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    key = first_key + tl.arange(0, N)
    shift -= key_shift
    first_row = tl.maximum(first_row, first_key - shift)  # the rows before do not see this tile
    tiles = tl.maximum(tl.cdiv(last_row - first_row, M), 0)
    # Dividing by zero tiles is undefined: the compiler may then assume that there are some, and prefetch the first.
    # They arrived in the middle of what follows the loop and corrupted dk of keys whose queries are elsewhere.
    divisor = tl.maximum(tiles, 1)
    for i in tl.range(0, tiles * G):
        at, head = first_row + i % divisor * M, kv_head * G + i // divisor
        q_MD = q_desc.load([at, head * D])
        dout_MD = dout_desc.load([at, head * D])
        s = tl.dot(k_ND, q_MD.T)
        dp = tl.dot(v_ND, dout_MD.T)
        at_M = at + tl.arange(0, M)
        lse_M, delta_M = load_stats(stats, at_M, head, heads, at_M < last_row)
        p = tl.math.exp2(s * (scale * LOG2_E) - lse_M[None, :])
        p = tl.where(key[:, None] <= (at_M + shift)[None, :], p, 0.0)
        dv_ND = tl.dot(p.to(q_MD.dtype), dout_MD, dv_ND)
        ds = p * (dp - delta_M[None, :])
        dk_ND = tl.dot(ds.to(q_MD.dtype), q_MD, dk_ND)
    offset = (key.to(tl.int64) * tl.num_programs(1) + part) * D
    at = offset[:, None] + tl.arange(0, D)[None, :]
    mask = (key < stop)[:, None]
    tl.store(sum_dk + at, (dk_ND * scale).to(sum_dk.dtype.element_ty), mask=mask)
    tl.store(sum_dv + at, dv_ND.to(sum_dv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lists", "blocks", "heads", "first_kv_head", "first_slot", "head_slots"])
def pack(
    q, dout, stats, packed_q, packed_dout, packed_lse, packed_delta, position_of, slots, list_of_tile, last_tile, begin,
    end, bounds, lists, blocks, heads, first_kv_head, first_slot, head_slots, stride_t,
    STORE_POSITIONS: tl.constexpr, G: tl.constexpr, HISTORY: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One row tile of one list: its rows to packed_q and packed_dout [tiles * M, D], their stats to [tiles * M].

    STORE_POSITIONS: rows of its slots, to position_of [kv heads, head_slots].

    Rows past the list's end get q = dout = 0 and lse = inf.
    """
    tile = tl.program_id(0)
    which, first, stop = tile_of_program(tile, list_of_tile, last_tile, begin, end, lists, M)
    if which >= lists:
        return
    first_key, last_key, _ = key_rows(bounds, which % blocks)
    # A block whose keys are elsewhere: nothing reads its rows.
    if first_key >= last_key:
        return
    i = tl.arange(0, M)
    position = first.to(tl.int64) + i
    ok = position < stop
    slot = tl.load(slots + position, mask=ok, other=0)
    row = slot // HISTORY
    head = (first_kv_head + which // blocks) * G + row % G
    q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, row // G, head, heads, ok, stride_t, D)
    # int64: at 1M tokens and head width 128 the offset passes 2**31.
    packed = tile.to(tl.int64) * M + i
    at = packed[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(packed_q + at, q_MD)
    tl.store(packed_dout + at, dout_MD)
    tl.store(packed_lse + packed, lse_M)
    tl.store(packed_delta + packed, delta_M)
    if STORE_POSITIONS:
        part = (which // blocks).to(tl.int64)
        tl.store(position_of + part * head_slots + (slot - first_slot), tile * M + i, mask=ok)


@triton.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "key_tiles", "split"])
def dkdv_history(
    q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc, part_dk, part_dv, list_of_split, first_split, last_tile,
    bounds, lists, blocks, first_kv_head, key_tiles, split, scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """float32 dk and dv of one tile of a block's keys from a split of the packed rows of its list, to part_dk and
    part_dv [splits, key tiles, N, D].

    Programs of one split are neighbours, and read its rows at about the same time; lists come longest first.

    Stats too come by bulk copies: as plain loads every thread copies its share of them 16 times over, and the
    addresses are what makes registers spill.
    """
    pid, key_tile = tl.program_id(0) // key_tiles, tl.program_id(0) % key_tiles
    which = tl.load(list_of_split + pid)
    if which >= lists:
        return
    part, block = which // blocks, which % blocks
    start, stop, _ = key_rows(bounds, block)
    first_key = start + key_tile * N
    number = pid - tl.load(first_split + which)
    first = tl.load(last_tile + which - 1, mask=which > 0, other=0) + number * split
    last = tl.minimum(first + split, tl.load(last_tile + which))
    if (first_key >= stop) | (first >= last):
        return
    column = (first_kv_head + part) * D
    k_ND = k_desc.load([first_key, column])
    v_ND = v_desc.load([first_key, column])
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    # No mask in this loop: rows that fill up a list have lse = inf, so that their probability is 0. Scores one tile
    # ahead were predicted to be faster and were not: 368 ms for 356 at 128K 4096/12 (benchmarks/LOG.md, "Gradients").
    scale_log2 = scale * LOG2_E
    for tile in tl.range(first, last):
        row = tile * M
        dout_MD = dout_desc.load([row, 0])
        q_MD = q_desc.load([row, 0])
        s = tl.dot(k_ND, q_MD.T)
        dp = tl.dot(v_ND, dout_MD.T)
        p = tl.math.exp2(s * scale_log2 - lse_desc.load([row])[None, :])
        dv_ND = tl.dot(p.to(q_MD.dtype), dout_MD, dv_ND)
        ds = p * (dp - delta_desc.load([row])[None, :])
        dk_ND = tl.dot(ds.to(q_MD.dtype), q_MD, dk_ND)
    at = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    offset = (pid.to(tl.int64) * key_tiles + key_tile) * N * D
    tl.store(part_dk + offset + at, dk_ND * scale)
    tl.store(part_dv + offset + at, dv_ND)


@dataclass(frozen=True)
class PackedRows:
    """Memory for the rows of one work range."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor

    def descriptors(self, rows: int) -> dict[str, TensorDescriptor]:
        """Descriptors for bulk copies of tiles of these rows."""
        tensors = {"q_desc": self.q, "dout_desc": self.dout, "lse_desc": self.lse, "delta_desc": self.delta}
        return {
            name: TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, *x.shape[1:]])
            for name, x in tensors.items()
        }


@dataclass(frozen=True)
class SplitSums:
    """float32 dk and dv of every split of the lists of a work range: [splits * keys of a block, D]."""

    table: TileTable
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class PackedDkdv:
    """The launches of one call. `stats`: what `softmax.prepare` computed."""

    call: BlockCall
    dout: Tensor
    stats: Tensor
    lists: BlockLists

    @property
    def key_tiles(self) -> int:
        """Tiles of the longest block."""
        return ceil_div(self.call.longest, self.call.shapes.dkdv.keys)

    @property
    def split_tiles(self) -> int:
        """Tiles of a split."""
        return _SPLIT * self.key_tiles // self.call.shapes.dkdv.rows

    def run(self) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D]."""
        call = self.call
        parts = self.work_ranges()
        if not parts:
            dk, dv = self.diagonal(slice(0, call.kv_heads), call.k_SKD.dtype)
            return dk.to(call.k_SKD.dtype), dv.to(call.k_SKD.dtype)
        dk = call.like_k()
        dv = call.like_k()
        tables = self.tables(parts)
        if len(parts) == 1:
            # Before the diagonal blocks' sums are allocated: 8K 512/3 peaks at 0.60 GiB instead of 0.69
            # (benchmarks/LOG.md, "Memory of attention").
            splits = self.history(parts[0], tables[0], self.allocate(parts))  # their memory is given back at once
            self.add(splits, 0, (dk, dv), self.diagonal(parts[0].kv_heads))
            return dk, dv
        packed = self.allocate(parts)
        for heads, several in groupby(zip(parts, tables, strict=True), lambda part: part[0].kv_heads):
            mine = list(several)
            diagonal = self.diagonal(heads)
            for work, table in mine[:-1]:
                self.add(self.history(work, table, packed), 0, diagonal, diagonal)
            self.add(self.history(*mine[-1], packed), heads.start, (dk, dv), diagonal)
        return dk, dv

    def work_ranges(self) -> list[WorkRange]:
        """Work ranges of as many rows as q has: twice its size, three times with their dq.

        Short sequences take some more at once, as fewer launches are faster: 18 instead of 23 at 8K 512/3.
        """
        call = self.call
        if call.history_blocks == 0:
            return []
        return list(work_ranges(self.lists, call.kv_heads, max(call.tokens * call.heads, _LEAST_ROWS)))

    def allocate(self, parts: list[WorkRange]) -> PackedRows:
        """Memory for any of these work ranges."""
        call = self.call
        rows = self.call.shapes.dkdv.rows
        tiles = max(part.heads * (ceil_div(part.slots, rows) + call.tables.blocks) for part in parts)
        q, dout = (self.dout.new_empty(tiles * rows, call.head_dim) for _ in range(2))
        lse, delta = (self.stats.new_empty(tiles * rows) for _ in range(2))
        return PackedRows(q, dout, lse, delta)

    def tables(self, parts: list[WorkRange]) -> list[TileTable]:
        """The tiles and splits of each work range."""
        rows = self.call.shapes.dkdv.rows
        return tile_tables(self.lists, parts, self.call.kv_heads, rows, split_tiles=self.split_tiles)

    def diagonal(self, heads: slice, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """dk and dv [S, heads, D] of the diagonal blocks, or in float32 of the spans that replace them."""
        call = self.call
        if call.spans is not None:
            return SpanCall(call, call.spans).dkdv(self.dout, self.stats, heads)
        shape = self.call.shapes.dkdv_diagonal
        key_tiles = ceil_div(call.longest, shape.keys)
        count = heads.stop - heads.start
        size = call.k_SKD.shape[0], count, call.head_dim
        sum_dk, sum_dv = (torch.empty(size, dtype=dtype, device=self.stats.device) for _ in range(2))
        launch(
            dkdv_diagonal,
            (call.tables.blocks * key_tiles, count),
            q_desc=call.descriptor(call.q_THD, shape.rows),
            dout_desc=call.descriptor(self.dout, shape.rows),
            stats=self.stats,
            **call.descriptors(shape.keys),
            sum_dk=sum_dk,
            sum_dv=sum_dv,
            bounds=call.tables.bounds,
            first_kv_head=heads.start,
            heads=call.heads,
            key_tiles=key_tiles,
            scale=call.scale,
            **call.sizes(shape),
        )
        return sum_dk, sum_dv

    def pack(self, work: WorkRange, table: TileTable, packed: PackedRows, position_of: Tensor | None = None) -> None:
        """Copy the rows of a work range to `packed`, and the row of each slot to `position_of`: int32 [kv heads,
        slots]."""
        call = self.call
        launch(
            pack,
            (table.bound,),
            q=call.q_THD,
            dout=self.dout,
            stats=self.stats,
            packed_q=packed.q,
            packed_dout=packed.dout,
            packed_lse=packed.lse,
            packed_delta=packed.delta,
            # Any tensor: without STORE_POSITIONS the kernel does not look at it.
            position_of=table.last_tile if position_of is None else position_of,
            **call.in_lists(self.lists, table, work),
            bounds=call.tables.bounds,
            heads=call.heads,
            stride_t=call.q_THD.stride(0),
            STORE_POSITIONS=position_of is not None,
            G=call.group,
            HISTORY=call.history_blocks,
            D=call.head_dim,
            M=call.shapes.dkdv.rows,
            num_warps=_PACK_WARPS,
        )

    def history(self, work: WorkRange, table: TileTable, packed: PackedRows) -> SplitSums:
        """dk and dv of the rows of a work range, split by split."""
        call = self.call
        shape = call.shapes.dkdv
        self.pack(work, table, packed)
        keys = self.key_tiles * shape.keys
        part_dk, part_dv = (self.stats.new_empty(table.split_bound * keys, call.head_dim) for _ in range(2))
        sizes = call.sizes(shape)
        # Packed rows know no groups: the kernel has no such parameter.
        del sizes["G"]
        launch(
            dkdv_history,
            (table.split_bound * self.key_tiles,),
            **packed.descriptors(shape.rows),
            **call.descriptors(shape.keys),
            part_dk=part_dk,
            part_dv=part_dv,
            **self.in_splits(work, table),
            scale=call.scale,
            **sizes,
        )
        return SplitSums(table, part_dk, part_dv)

    def in_splits(self, work: WorkRange, table: TileTable) -> dict[str, Any]:
        """The arguments by which a kernel over the splits of packed lists finds its rows and its block."""
        return {
            "list_of_split": table.list_of_split,
            "first_split": table.first_split,
            "last_tile": table.last_tile,
            "bounds": self.call.tables.bounds,
            "lists": table.lists,
            "blocks": self.call.tables.blocks,
            "first_kv_head": work.kv_heads.start,
            "key_tiles": self.key_tiles,
            "split": self.split_tiles,
        }

    def add(
        self, splits: SplitSums, first_kv_head: int, sums: tuple[Tensor, Tensor], diagonal: tuple[Tensor, Tensor]
    ) -> None:
        """Write to `sums` the sums of the splits and the `diagonal` blocks of a work range."""
        keys = self.key_tiles * self.call.shapes.dkdv.keys
        self.call.add_splits(splits.table, first_kv_head, sums, (splits.dk, splits.dv), keys, diagonal)
