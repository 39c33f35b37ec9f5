"""MoBA attention for a given choice, forward and backward, in bounded memory.

Partial results exist for a segment at a time: some key/value heads or, where one head's are too many, a range of its
queries (at 1M tokens, 4096/12, all of them would be 92 GB). The limit is twice the size of q.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moba_train.attention.moba.blocks import block_bound
from moba_train.attention.moba.triton import backward, combine, forward
from moba_train.attention.moba.triton.lists import Lists, empty_inverse, invert
from moba_train.attention.moba.triton.packed import PackedDkdv
from moba_train.attention.moba.triton.pool import pool_keys
from moba_train.attention.moba.triton.select import select_blocks
from moba_train.attention.moba.triton.tables import BlockTables, block_tables
from moba_train.attention.moba.triton.tiles import Rows, Segment, Shape, Shapes, segments, shapes, tile_table
from moba_train.attention.protocol import Layout

LOG2_E = 1.4426950408889634
_COMBINE_ROWS = 32
_PREPARE_ROWS = 32


def summarize(k_SKD: Tensor, layout: Layout, block_size: int) -> Tensor:
    """Mean key of every block of the whole sequence, [blocks, K, D]."""
    return pool_keys(_rows(k_SKD.detach()), block_tables(layout, block_size))


def choose(
    q_THD: Tensor,
    pooled_NKD: Tensor,
    layout: Layout,
    *,
    block_size: int,
    topk: int,
    select: str,
    always: tuple[str, ...],
) -> Tensor:
    """The chosen history blocks of the layout's queries, int32 [H, T, C] as `selection.select_blocks`."""
    tables = block_tables(layout, block_size)
    own_T, first_T = tables.own_T, tables.first_T
    if layout.q_runs is not None:
        own_T, first_T = own_T[layout.q_tokens], first_T[layout.q_tokens]
    q_THD, pooled_NKD = _rows(q_THD.detach()), pooled_NKD.contiguous()
    return select_blocks(q_THD, pooled_NKD, own_T, first_T, topk=topk, select=select, always=always)


def invert_choice(chosen_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> tuple[Tensor, Tensor]:
    """(entries, starts): the lists of the rows that chose each block (lists.py), for both passes."""
    return invert(chosen_HTC, kv_heads, block_tables(layout, block_size).blocks)


def empty_lists(chosen_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Uninitialised tensors of the shapes and dtypes of `invert_choice`'s, for tracing."""
    return empty_inverse(chosen_HTC, kv_heads, block_bound(layout, block_size))


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    layout: Layout,
    chosen_HTC: Tensor,
    entries: Tensor,
    starts: Tensor,
    *,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] over the own blocks and the chosen ones; whole sequences only."""
    call = _Call.of(q_THD, k_SKD, v_SKD, layout, chosen_HTC, block_size)
    q_THD, tables, shape = call.q_THD, call.tables, call.shapes.forward
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_HT = torch.empty(call.heads, call.tokens, dtype=torch.float32, device=q_THD.device)
    if call.tokens == 0:
        return out_THD, lse_HT
    own = call.shapes.own
    tiles = call.own_tiles(layout, own)
    forward.attend_own[(tables.blocks * tiles, call.kv_heads)](
        q_THD,
        *call.descriptors(own.keys),
        out_THD,
        lse_HT,
        tables.start_N,
        tables.end_N,
        call.tokens,
        tiles,
        q_THD.stride(0),
        scale * LOG2_E,
        **call.sizes(own),
    )
    if call.choices == 0:
        return out_THD, lse_HT
    k_desc, v_desc = call.descriptors(shape.keys)
    lists = Lists.of(entries, starts, chosen_HTC, call.kv_heads, tables.blocks)
    parts = call.segments(lists)
    partial_out = call.partial(parts)
    partial_lse = torch.empty(partial_out.shape[0], dtype=torch.float32, device=q_THD.device)
    for segment in parts:
        table = tile_table(lists, segment, call.kv_heads, shape.rows)
        forward.attend_history[(table.bound,)](
            q_THD,
            k_desc,
            v_desc,
            partial_out,
            partial_lse,
            entries,
            table.list_of_tile,
            table.last_tile,
            table.begin,
            table.end,
            tables.start_N,
            table.begin.numel(),
            tables.blocks,
            segment.kv_heads.start,
            segment.first_entry,
            segment.entries,
            q_THD.stride(0),
            scale * LOG2_E,
            C=call.choices,
            BLOCK=block_size,
            **call.sizes(shape),
        )
        call.combine(combine.combine_out, segment, out_THD, lse_HT, partial_out, partial_lse, chosen_HTC)
    return out_THD, lse_HT


def attend_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
    chosen_HTC: Tensor,
    entries: Tensor,
    starts: Tensor,
    *,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attend`."""
    call = _Call.of(q_THD, k_SKD, v_SKD, layout, chosen_HTC, block_size)
    dout_THD = dout_THD.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_SKD, v_SKD))
    if call.tokens == 0:
        return dq, dk, dv
    rows = call.tokens * call.heads
    stats_TH2 = torch.empty(call.tokens, call.heads, 2, dtype=torch.float32, device=q_THD.device)
    backward.prepare[(triton.cdiv(rows, _PREPARE_ROWS),)](
        dout_THD,
        out_THD.contiguous(),
        lse_HT.contiguous(),
        stats_TH2,
        rows,
        call.tokens,
        call.heads,
        D=call.head_dim,
        M=_PREPARE_ROWS,
    )
    lists = Lists.of(entries, starts, chosen_HTC, call.kv_heads, call.tables.blocks)
    _dkdv(call, dout_THD, stats_TH2, dk, dv, lists, layout, scale)
    _dq(call, dout_THD, stats_TH2, dq, lists, layout, chosen_HTC, scale)
    return dq, dk, dv


def _dkdv(
    call: "_Call", dout: Tensor, stats: Tensor, dk: Tensor, dv: Tensor, lists: Lists, layout: Layout, scale: float
) -> None:
    tables, shape = call.tables, call.shapes.dkdv
    key_tiles = triton.cdiv(min(call.block_size, layout.max_seqlen), shape.keys)
    if call.choices and call.shapes.dkdv_rows is not Rows.GATHERED:
        PackedDkdv(call, dout, stats, lists, key_tiles, scale).run(dk, dv)
        return
    begin, end = lists.bounds()
    order = torch.sort(end - begin, descending=True, stable=True).indices if call.choices else begin
    backward.dkdv[(lists.lists * key_tiles,)](
        call.q_THD,
        dout,
        stats,
        *call.descriptors(shape.keys),
        dk,
        dv,
        lists.entries,
        order,
        begin,
        end,
        tables.start_N,
        tables.end_N,
        tables.blocks,
        call.kv_heads,
        key_tiles,
        call.q_THD.stride(0),
        scale,
        C=call.choices,
        **call.sizes(shape),
    )


def _dq(
    call: "_Call",
    dout: Tensor,
    stats: Tensor,
    dq: Tensor,
    lists: Lists,
    layout: Layout,
    chosen_HTC: Tensor,
    scale: float,
) -> None:
    tables, shape = call.tables, call.shapes.dq
    k_desc, v_desc = call.descriptors(shape.keys)
    tiles = call.own_tiles(layout, shape)
    backward.dq_own[(tables.blocks * tiles, call.kv_heads)](
        call.q_THD,
        dout,
        stats,
        k_desc,
        v_desc,
        dq,
        tables.start_N,
        tables.end_N,
        tiles,
        call.q_THD.stride(0),
        scale,
        **call.sizes(shape),
    )
    if call.choices == 0:
        return
    parts = call.segments(lists)
    partial_dq = call.partial(parts)
    for segment in parts:
        table = tile_table(lists, segment, call.kv_heads, shape.rows)
        backward.dq_history[(table.bound,)](
            call.q_THD,
            dout,
            stats,
            k_desc,
            v_desc,
            partial_dq,
            lists.entries,
            table.list_of_tile,
            table.last_tile,
            table.begin,
            table.end,
            tables.start_N,
            table.begin.numel(),
            tables.blocks,
            call.heads,
            segment.kv_heads.start,
            segment.first_entry,
            segment.entries,
            call.q_THD.stride(0),
            scale,
            C=call.choices,
            BLOCK=call.block_size,
            **call.sizes(shape),
        )
        call.combine(combine.combine_dq, segment, dq, partial_dq, chosen_HTC)


@dataclass(frozen=True)
class _Call:
    """The sizes of one call, and the launches that both passes share."""

    q_THD: Tensor
    k_SKD: Tensor
    v_SKD: Tensor
    tables: BlockTables
    shapes: Shapes
    choices: int
    block_size: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, layout: Layout, chosen_HTC: Tensor, block_size: int) -> "_Call":
        tables = block_tables(layout, block_size)
        tile_shapes = shapes(q.shape[-1], block_size)
        return cls(_rows(q), _rows(k), _rows(v), tables, tile_shapes, chosen_HTC.shape[2], block_size)

    @property
    def tokens(self) -> int:
        return self.q_THD.shape[0]

    @property
    def heads(self) -> int:
        return self.q_THD.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q_THD.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k_SKD.shape[1]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def sizes(self, shape: Shape) -> dict[str, Any]:
        """Compile-time sizes of a kernel over tiles of this shape."""
        tile = {"M": shape.rows, "N": shape.keys, "num_warps": shape.warps, "num_stages": shape.stages}
        return {"G": self.group, "D": self.head_dim, **tile}

    def descriptors(self, keys: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """K and V for bulk copies of [keys, D]; what lies past the end reads as zero."""
        k, v = (
            TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [_token_stride(x), 1], [keys, self.head_dim])
            for x in (self.k_SKD, self.v_SKD)
        )
        return k, v

    def own_tiles(self, layout: Layout, shape: Shape) -> int:
        """Row tiles of a block's own rows, at most."""
        return triton.cdiv(min(self.block_size, layout.max_seqlen) * self.group, shape.rows)

    def segments(self, lists: Lists) -> list[Segment]:
        """Twice as many entries at once as there are queries and heads."""
        return list(segments(lists, self.kv_heads, 2 * self.tokens * self.heads))

    def partial(self, parts: list[Segment]) -> Tensor:
        """A buffer for the partial results of any of these segments: [entries, D]."""
        entries = max((part.kv_heads.stop - part.kv_heads.start) * part.entries for part in parts)
        return torch.empty(entries, self.head_dim, dtype=self.q_THD.dtype, device=self.q_THD.device)

    def combine(self, kernel: Any, segment: Segment, *tensors: Tensor) -> None:
        """Join a segment's partial results into the tensors that hold the own blocks' part."""
        row_entries = self.group * self.choices
        first, tokens = segment.first_entry // row_entries, segment.entries // row_entries
        kv_heads = segment.kv_heads.stop - segment.kv_heads.start
        kernel[(triton.cdiv(tokens * self.group, _COMBINE_ROWS), kv_heads)](
            *tensors,
            self.tokens,
            first,
            first + tokens,
            segment.kv_heads.start,
            self.heads,
            G=self.group,
            C=self.choices,
            D=self.head_dim,
            M=_COMBINE_ROWS,
        )


def _token_stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def _rows(x: Tensor) -> Tensor:
    """[tokens, heads, D] with the heads of a token side by side, as kernels and bulk copies need it."""
    beside = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    aligned = _token_stride(x) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    if beside and aligned:
        return x
    return x.clone(memory_format=torch.contiguous_format)
