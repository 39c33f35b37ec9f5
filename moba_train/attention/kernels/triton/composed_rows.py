"""The rows that selected each block, list after list, for a varlen kernel to attend to (composed.py).

Lists are padded to whole tiles by rows of zeros, so that tables of tiles (tiles.py) say where each begins. In the
backward pass such rows have lse = inf: probability 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common import softmax
from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.lists import BlockLists
from moba_train.attention.kernels.common.tiles import TileTable, WorkRange, tile_of_program, tile_tables, work_ranges
from moba_train.attention.kernels.composed_rows import keys_end_to_end
from moba_train.attention.kernels.varlen import Segments

_TILE = 64
_WARPS = 4


@dataclass(frozen=True)
class GatheredPart:
    """The slots of a work range: lists of some key/value heads, from all queries or from a range of them."""

    call: BlockCall
    work: WorkRange
    row_E: Tensor
    """int32 [E]: the query row (token x heads + head) of every gathered one; -1 for padding."""
    position_of: Tensor
    """int32 [kv heads, slots]: position of each slot among the gathered rows; undefined for slots without a block."""
    segments: Segments

    def gather(self, x_rows: Tensor) -> Tensor:
        """[rows, D] -> [E, 1, D]."""
        x_ED = x_rows.new_empty(self.row_E.numel(), x_rows.shape[1])
        grid = (self.row_E.numel() // _TILE,)
        rows = x_rows.contiguous()
        # Not through `launch`: `composed` waits for the host in any case, so its calls are not recorded.
        _gather[grid](x=rows, row_of=self.row_E, gathered=x_ED, D=x_rows.shape[1], M=_TILE, num_warps=_WARPS)
        return x_ED.unsqueeze(1)

    def gather_lse(self, lse_rows: Tensor) -> Tensor:
        """[rows] -> [1, E]."""
        return lse_rows[self.row_E.clamp(min=0)].masked_fill_(self.row_E < 0, torch.inf).unsqueeze(0)

    def merge(self, out_THD: Tensor, lse_HT: Tensor, diagonal_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor) -> None:
        """Join the diagonal blocks' results with those of the lists, by online softmax: out in place, lse written."""
        self.call.combine(
            softmax.combine_out,
            self.work,
            position_of=self.position_of,
            out=out_THD,
            lse=lse_HT,
            diagonal_lse=diagonal_lse_HT,
            partial_out=part_ED,
            partial_lse=part_E.contiguous(),
        )

    def add(self, dq_THD: Tensor, part_ED: Tensor) -> None:
        """Add the lists' parts of dq to the diagonal blocks', in place, rounded once."""
        self.call.combine(softmax.combine_dq, self.work, position_of=self.position_of, dq=dq_THD, partial_dq=part_ED)

    def by_slot(self, x_HTC: Tensor) -> Tensor:
        """[H, T, C] -> [E]; 0 for padding."""
        heads, tokens = self._rows
        position_thC = self._position_by_slot()
        # One element more, for slots without a block.
        x_E = x_HTC.new_zeros(self.row_E.numel() + 1)
        x_E.scatter_(0, position_thC.flatten(), x_HTC[heads, tokens].transpose(0, 1).flatten())
        return x_E[:-1]

    def add_lse(self, lse_HT: Tensor, part_E: Tensor) -> None:
        """Add the lists' keys to the log-sum-exp of their queries, in place."""
        heads, tokens = self._rows
        found_ht = torch.nn.functional.pad(part_E, (0, 1), value=-torch.inf)[self._position_by_slot()].logsumexp(-1).T
        lse_HT[heads, tokens] = torch.logaddexp(lse_HT[heads, tokens], found_ht)

    @property
    def _rows(self) -> tuple[slice, slice]:
        """The query heads and the tokens of the work range."""
        group, slots = self.call.group, self.call.group * self.call.history_blocks
        kv_heads, first = self.work.kv_heads, self.work.first_slot // slots
        return slice(kv_heads.start * group, kv_heads.stop * group), slice(first, first + self.work.slots // slots)

    def _position_by_slot(self) -> Tensor:
        """int64 [t, h, C]: position of each slot among the gathered rows; their number for slots without a
        block."""
        heads, tokens = self._rows
        position_ktGC = self.position_of.view(len(self.position_of), -1, self.call.group, self.call.history_blocks)
        position_thC = position_ktGC.transpose(0, 1).flatten(1, 2).long()
        selected_thC = self.call.selected_HTC[heads, tokens].transpose(0, 1)
        return torch.where(selected_thC < 0, self.row_E.numel(), position_thC)


def gathered_parts(
    call: BlockCall, lists: BlockLists, limit: int, most_lists: int, edges: Tensor, longest: int
) -> Iterator[tuple[slice, Iterator[GatheredPart]]]:
    """(key/value heads, their parts), of at most about `limit` slots and `most_lists` lists each. Waits for the GPU
    once, for the longest lists.

    `edges` int32 [blocks + 1]: where blocks begin; `longest`: keys of a block at most.
    """
    per_head = lists.slots.numel() // call.kv_heads
    cut = list(work_ranges(lists, call.kv_heads, min(limit, most_lists // call.tables.blocks * per_head)))
    tables = tile_tables(lists, cut, call.kv_heads, _TILE)
    tiles = [table.splits[: table.lists].max() for table in tables]
    # The host's one wait: varlen kernels need the longest segment as a number.
    most_rows = (torch.stack(tiles) * _TILE).tolist()
    together = zip(cut, tables, most_rows, strict=True)
    for _, mine in groupby(together, key=lambda one: one[0].kv_heads.start):
        several = list(mine)
        first = several[0][0]
        keys = keys_end_to_end(edges, first.heads, call.k_SKD.shape[0])
        yield (
            first.kv_heads,
            (
                _part(call, lists, work, table, Segments(_rows(table), keys, most, longest, causal=False))
                for work, table, most in several
            ),
        )


def _rows(table: TileTable) -> Tensor:
    """int32 [lists + 1]: where each list begins."""
    return torch.nn.functional.pad(table.last_tile[: table.lists] * _TILE, (1, 0))


def _part(call: BlockCall, lists: BlockLists, work: WorkRange, table: TileTable, segments: Segments) -> GatheredPart:
    row_E = torch.empty(table.bound * _TILE, dtype=torch.int32, device=lists.slots.device)
    position_of = torch.empty(work.heads, work.slots, dtype=torch.int32, device=row_E.device)
    _find_rows[(table.bound,)](
        row_of=row_E,
        position_of=position_of,
        heads=call.heads,
        **call.in_lists(lists, table, work),
        G=call.group,
        HISTORY=call.history_blocks,
        M=_TILE,
        num_warps=1,
    )
    return GatheredPart(call, work, row_E, position_of, segments)


@triton.jit(do_not_specialize=["lists", "blocks", "heads", "first_kv_head", "first_slot", "head_slots"])
def _find_rows(
    row_of, position_of, slots, list_of_tile, last_tile, begin, end, lists, blocks, heads, first_kv_head, first_slot,
    head_slots,
    G: tl.constexpr, HISTORY: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One tile of one list: the rows it gathers, and the positions of its slots."""
    tile = tl.program_id(0)
    which, first, stop = tile_of_program(tile, list_of_tile, last_tile, begin, end, lists, M)
    i = tl.arange(0, M)
    at = tile * M + i
    position = first.to(tl.int64) + i
    ok = (position < stop) & (which < lists)
    slot = tl.load(slots + position, mask=ok, other=0)
    row = slot // HISTORY
    part = which // blocks
    head = (first_kv_head + part) * G + row % G
    tl.store(row_of + at, tl.where(ok, row // G * heads + head, -1))
    tl.store(position_of + part.to(tl.int64) * head_slots + (slot - first_slot), at, mask=ok)


@triton.jit
def _gather(x, row_of, gathered, D: tl.constexpr, M: tl.constexpr):
    """Rows of x [rows, D] to a tile of gathered [E, D]; zeros for those of number -1."""
    at = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    row = tl.load(row_of + at)
    column = tl.arange(0, D)[None, :]
    x_MD = tl.load(x + row.to(tl.int64)[:, None] * D + column, mask=(row >= 0)[:, None], other=0.0)
    tl.store(gathered + at[:, None] * D + column, x_MD)
