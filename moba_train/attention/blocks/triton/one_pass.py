"""The launches of history_pass.py, gathered_pass.py and own_pass.py: all gradients in one pass, on Hopper.

`OnePass` packs rows as for `dkdv_history`; `GatheredPass`, for blocks of one tile of keys, does not. The rows' dq is
summed row by row, and `combine_dq` adds it to the own blocks' part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from moba_train.attention.blocks.triton import combine
from moba_train.attention.blocks.triton.bulk_copies import descriptor
from moba_train.attention.blocks.triton.dq import own_dq
from moba_train.attention.blocks.triton.gathered_pass import gradients_gathered
from moba_train.attention.blocks.triton.history_pass import gradients_history
from moba_train.attention.blocks.triton.launch import ceil_div, launch
from moba_train.attention.blocks.triton.own_pass import gradients_own
from moba_train.attention.blocks.triton.packed import Packed, PackedDkdv, SplitSums
from moba_train.attention.blocks.triton.tile_tables import TileTable
from moba_train.attention.blocks.triton.tiles import WorkRange, work_ranges

KEYS, ROWS, STAGES, WARPS = 128, 64, 2, 8
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
"""A program of `gradients_own` takes a whole block. Below this share of the multiprocessors in use, it loses what it
gained over two kernels with a program for each tile (0.26 ms for 0.44 at 8K 512/3, where nearly all are)."""


@dataclass(frozen=True)
class OnePass(PackedDkdv):
    """The launches of one call (`BlockCall.one_pass`)."""

    dq: Tensor
    """[T, H, D]: receives the gradients."""

    @property
    def split_tiles(self) -> int:
        """Tiles of a split: fewer rows where there are few in all, so that enough programs are busy."""
        call = self.call
        if call.tokens * call.heads >= _SHORT:
            return super().split_tiles
        return _SHORT_SPLIT * self.key_tiles // ROWS

    @property
    def dq_dtype(self) -> torch.dtype:
        """What the tiles of keys add up a row's dq in."""
        return self.dq.dtype if self.key_tiles <= _ROUNDED else torch.float32

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq [T, H, D], dk and dv [S, K, D]."""
        return self.dq, *self.run()

    def run(self) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D]; dq too is written."""
        parts = self.work_ranges()
        own = self.own(slice(0, self.call.kv_heads))
        room = self.room(parts)
        return self.summed(parts, own, lambda work, table: self.history(work, table, room))

    def summed(
        self,
        parts: list[WorkRange],
        own: tuple[Tensor, Tensor],
        history: Callable[[WorkRange, TileTable], SplitSums],
    ) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D]: those of the `own` blocks, and of all work ranges by `history`."""
        dk, dv = self.call.like_k(), self.call.like_k()
        for heads, several in groupby(zip(parts, self.tables(parts), strict=True), lambda part: part[0].kv_heads):
            mine = list(several)
            for work, table in mine[:-1]:
                self.add(history(work, table), heads.start, own, own)
            self.add(history(*mine[-1]), heads.start, (dk, dv), own)
        return dk, dv

    def own(self, heads: slice, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D] of the own blocks, or of the spans in their place, all `heads` at once; their dq is
        written."""
        call = self.call
        if not self.own_in_one_pass():
            own_dq(call, self.dout, self.stats, self.dq)
            return super().own(heads, dtype)
        sum_dk, sum_dv = (torch.empty(call.k_SKD.shape, dtype=dtype, device=self.stats.device) for _ in range(2))
        launch(
            gradients_own,
            (call.tables.blocks, call.kv_heads),
            *(descriptor(x, ROWS) for x in (call.q_THD, self.dout)),
            self.stats,
            *(descriptor(x, KEYS) for x in (call.k_SKD, call.v_SKD)),
            self.dq,
            sum_dk,
            sum_dv,
            call.tables.bounds,
            call.heads,
            self.key_tiles,
            call.scale,
            G=call.group,
            **self.sizes,
        )
        return sum_dk, sum_dv

    def own_in_one_pass(self) -> bool:
        """Whether there are enough own blocks to keep the GPU busy with a program each; there are no spans. It adds up
        dq in the result itself."""
        call = self.call
        if call.spans is not None or self.dq_dtype != self.dq.dtype:
            return False
        at_once = torch.cuda.get_device_properties(self.dq.device).multi_processor_count
        return busy_share(call.tokens // call.block_size * call.kv_heads, at_once) >= _FULL

    def history(self, work: WorkRange, table: TileTable, room: Packed) -> SplitSums:
        """dk and dv of the rows of a work range, split by split; their dq is added."""
        call = self.call
        place = torch.empty(work.heads, work.entries, dtype=torch.int32, device=self.stats.device)
        self.pack(work, table, room, place)
        packed_dq = torch.empty_like(room.q, dtype=self.dq_dtype)
        done = torch.zeros(len(room.q) // ROWS, dtype=torch.int32, device=place.device)
        splits = table.split_bound * self.key_tiles
        part_dk, part_dv = (self.stats.new_empty(splits * KEYS, call.head_dim) for _ in range(2))
        launch(
            gradients_history,
            (splits,),
            *(descriptor(x, ROWS) for x in (room.q, room.dout, room.lse, room.delta)),
            *(descriptor(x, KEYS) for x in (call.k_SKD, call.v_SKD)),
            packed_dq,
            done,
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
            **self.sizes,
        )
        call.combine(combine.combine_dq, work, self.dq, packed_dq, place=place)
        return SplitSums(table, part_dk, part_dv)

    @property
    def sizes(self) -> dict[str, int]:
        """Compile-time sizes of both kernels."""
        tile = {"D": self.call.head_dim, "M": ROWS, "N": KEYS, "STAGES": STAGES}
        return {**tile, "num_warps": WARPS, "maxnreg": REGISTERS}


@dataclass(frozen=True)
class GatheredPass(OnePass):
    """The launches of one call whose rows are gathered (`BlockCall.gathered`), to blocks of one tile of keys: only the
    rows' dq takes memory."""

    def run(self) -> tuple[Tensor, Tensor]:
        """dk and dv [S, K, D]; dq too is written."""
        return self.summed(self.work_ranges(), self.own(slice(0, self.call.kv_heads)), self.gathered)

    def work_ranges(self) -> list[WorkRange]:
        """Work ranges whose dq is at most twice the size of q, as the partial results of the forward pass."""
        return list(work_ranges(self.lists, self.call.kv_heads, self.call.limit))

    def gathered(self, work: WorkRange, table: TileTable) -> SplitSums:
        """dk and dv of the rows of a work range, split by split; their dq is added."""
        call = self.call
        part_dq = self.dq.new_empty(1 + work.heads * work.entries, call.head_dim)
        part_dk, part_dv = (self.stats.new_empty(table.split_bound * KEYS, call.head_dim) for _ in range(2))
        launch(
            gradients_gathered,
            (table.split_bound,),
            call.q_THD,
            self.dout,
            self.stats,
            *(descriptor(x, KEYS) for x in (call.k_SKD, call.v_SKD)),
            part_dq,
            part_dk,
            part_dv,
            self.lists.entries,
            table.list_of_split,
            table.first_split,
            table.last_tile,
            table.begin,
            table.end,
            call.tables.bounds,
            table.lists,
            call.tables.blocks,
            call.heads,
            work.kv_heads.start,
            self.split_tiles,
            work.first_entry,
            work.entries,
            call.q_THD.stride(0),
            call.scale,
            G=call.group,
            C=call.selected,
            **self.sizes,
        )
        call.combine(combine.combine_dq, work, self.dq, part_dq[1:])
        return SplitSums(table, part_dk, part_dv)


def busy_share(programs: int, at_once: int) -> float:
    """The share of their time in which multiprocessors have one of these equally long programs."""
    return programs / (ceil_div(programs, at_once) * at_once) if programs else 0.0
