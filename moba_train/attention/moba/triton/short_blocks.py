"""The launches for blocks of one tile of keys (short.py)."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from moba_train.attention.moba.triton import combine, short
from moba_train.attention.moba.triton.call import LOG2_E, Call
from moba_train.attention.moba.triton.lists import Lists
from moba_train.attention.moba.triton.tiles import (
    Segment,
    Shape,
    TileTable,
    segments,
    steps,
    sums_before,
    tile_table,
)

_SPAN = 4096
"""Rows of a list that one program takes, at most: what one block everyone chooses costs in balance."""
_SUMMED_KEYS = 16


@dataclass(frozen=True)
class ShortBlocks:
    """One call."""

    call: Call
    lists: Lists

    def attend(self, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Write out [T, H, D] and lse [H, T]."""
        call, shape = self.call, self.call.shapes.short_forward
        assert shape
        parts = list(segments(self.lists, call.kv_heads, call.limit))
        partial_out = call.buffer(parts)
        partial_lse = torch.empty(partial_out.shape[0], dtype=torch.float32, device=partial_out.device)
        own_lse_HT = torch.empty_like(lse_HT) if call.choices else lse_HT
        for segment in parts:
            table = self.spans(segment)
            short.attend[(table.bound,)](
                call.q_THD,
                *call.descriptors(shape.keys),
                out_THD,
                own_lse_HT,
                partial_out,
                partial_lse,
                *call.in_lists(self.lists, table),
                segment.kv_heads.start,
                call.heads,
                call.tokens,
                segment.first_entry,
                segment.entries,
                call.q_THD.stride(0),
                call.scale * LOG2_E,
                **self.sizes(shape),
            )
            if call.choices:
                call.combine(combine.combine_out, segment, out_THD, lse_HT, own_lse_HT, partial_out, partial_lse)

    def pays_backward(self) -> bool:
        """Whether a block's program can have all its rows: one head's partial dq fit into the limit."""
        entries = self.lists.entries.numel() // self.call.kv_heads
        return self.call.shapes.short_backward is not None and entries <= self.call.limit

    def attend_backward(self, dout: Tensor, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq [T, H, D], dk and dv [S, K, D]."""
        call, shape = self.call, self.call.shapes.short_backward
        assert shape
        dq, dk, dv = call.like_q(), call.like_k(), call.like_k()
        parts = list(segments(self.lists, call.kv_heads, call.limit))
        partial_dq = call.buffer(parts)
        slots = 2 * max(part.heads * part.entries for part in parts) // _SPAN
        part_dk, part_dv = (stats.new_empty(slots * shape.keys, call.head_dim) for _ in range(2))
        for segment in parts:
            table = self.spans(segment)
            spans = steps(table.last_tile)
            first_slot = sums_before(spans * (spans > 1))
            short.gradients[(table.bound,)](
                call.q_THD,
                dout,
                stats,
                *call.descriptors(shape.keys),
                dq,
                dk,
                dv,
                partial_dq,
                part_dk,
                part_dv,
                first_slot,
                *call.in_lists(self.lists, table),
                segment.kv_heads.start,
                call.heads,
                segment.entries,
                call.q_THD.stride(0),
                call.scale,
                **self.sizes(shape),
            )
            if slots:
                short.sum_spans[(table.begin.numel(), triton.cdiv(call.longest, _SUMMED_KEYS))](
                    dk,
                    dv,
                    part_dk,
                    part_dv,
                    first_slot,
                    spans,
                    call.tables.bounds,
                    call.tables.blocks,
                    segment.kv_heads.start,
                    call.kv_heads,
                    ADD=False,
                    D=call.head_dim,
                    N=shape.keys,
                    KEYS=_SUMMED_KEYS,
                )
            if call.choices:
                call.combine(combine.combine_dq, segment, dq, partial_dq)
        return dq, dk, dv

    def spans(self, segment: Segment) -> TileTable:
        """At least one for each list: the block's own rows go with it."""
        return tile_table(self.lists, segment, self.call.kv_heads, _SPAN, at_least=1)

    def sizes(self, shape: Shape) -> dict[str, Any]:
        """Compile-time sizes."""
        call = self.call
        return {
            "PARTIAL": call.partial,
            "C": max(call.choices, 1),
            "BLOCK": call.block_size,
            "SPAN": _SPAN,
            **call.sizes(shape),
        }
