"""The launches for blocks of many tiles of keys: compute-bound, row tiles as large as registers allow."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.moba.triton import backward, combine, forward
from moba_train.attention.moba.triton.call import LOG2_E, Call
from moba_train.attention.moba.triton.lists import Lists
from moba_train.attention.moba.triton.packed import PackedDkdv
from moba_train.attention.moba.triton.tiles import segments, tile_table


@dataclass(frozen=True)
class LongBlocks:
    """One call."""

    call: Call
    lists: Lists

    def attend(self, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Write out [T, H, D] and lse [H, T]."""
        call, lists, shape = self.call, self.lists, self.call.shapes.forward
        own = call.shapes.own
        tiles = call.own_tiles(own)
        own_lse_HT = torch.empty_like(lse_HT) if call.choices else lse_HT
        forward.attend_own[(call.tables.blocks * tiles, call.kv_heads)](
            call.q_THD,
            *call.descriptors(own.keys),
            out_THD,
            own_lse_HT,
            call.tables.bounds,
            call.tokens,
            tiles,
            call.q_THD.stride(0),
            call.scale * LOG2_E,
            PARTIAL=call.partial,
            **call.sizes(own),
        )
        if call.choices == 0:
            return
        k_desc, v_desc = call.descriptors(shape.keys)
        parts = list(segments(lists, call.kv_heads, call.limit))
        partial_out = call.buffer(parts)
        partial_lse = torch.empty(partial_out.shape[0], dtype=torch.float32, device=partial_out.device)
        for segment in parts:
            table = tile_table(lists, segment, call.kv_heads, shape.rows)
            forward.attend_history[(table.bound,)](
                call.q_THD,
                k_desc,
                v_desc,
                partial_out,
                partial_lse,
                *call.in_lists(lists, table),
                segment.kv_heads.start,
                segment.first_entry,
                segment.entries,
                call.q_THD.stride(0),
                call.scale * LOG2_E,
                PARTIAL=call.partial,
                C=call.choices,
                BLOCK=call.block_size,
                **call.sizes(shape),
            )
            call.combine(combine.combine_out, segment, out_THD, lse_HT, own_lse_HT, partial_out, partial_lse)

    def attend_backward(self, dout: Tensor, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq [T, H, D], dk and dv [S, K, D]."""
        call, lists, shape = self.call, self.lists, self.call.shapes.dq
        dk, dv = PackedDkdv(call, dout, stats, lists).run()
        dq = self.dq_own(dout, stats)
        if call.choices == 0:
            return dq, dk, dv
        k_desc, v_desc = call.descriptors(shape.keys)
        parts = list(segments(lists, call.kv_heads, call.limit))
        partial_dq = call.buffer(parts)
        for segment in parts:
            table = tile_table(lists, segment, call.kv_heads, shape.rows)
            backward.dq_history[(table.bound,)](
                call.q_THD,
                dout,
                stats,
                k_desc,
                v_desc,
                partial_dq,
                *call.in_lists(lists, table),
                call.heads,
                segment.kv_heads.start,
                segment.first_entry,
                segment.entries,
                call.q_THD.stride(0),
                call.scale,
                PARTIAL=call.partial,
                C=call.choices,
                BLOCK=call.block_size,
                **call.sizes(shape),
            )
            call.combine(combine.combine_dq, segment, dq, partial_dq)
        return dq, dk, dv

    def dq_own(self, dout: Tensor, stats: Tensor) -> Tensor:
        """The own blocks' part of dq."""
        call, shape, dq = self.call, self.call.shapes.dq, self.call.like_q()
        tiles = call.own_tiles(shape)
        backward.dq_own[(call.tables.blocks * tiles, call.kv_heads)](
            call.q_THD,
            dout,
            stats,
            *call.descriptors(shape.keys),
            dq,
            call.tables.bounds,
            tiles,
            call.q_THD.stride(0),
            call.scale,
            **call.sizes(shape),
        )
        return dq
