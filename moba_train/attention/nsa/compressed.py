"""Attention to compressed keys as a LocalAttention: causal attention among rows of queries (geometry.py).

Its keys and values are those of the compressed blocks, in the order of their ids, while its layout is that of the
tokens: it is meant for `Shard.attend`, where every rank has all of them.

Shape suffixes: T queries, N compressed blocks, R rows of S queries, H query heads, K key/value heads, G = H / K,
D head width.
"""

import torch
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.merge import nothing_seen
from moba_train.attention.nsa.geometry import CompressedBlocks, FoldedQueries
from moba_train.attention.protocol import BackwardState, Gradients, Layout, LocalAttention, Selection
from moba_train.attention.window import heads_at_once


class CompressedAttention(LocalAttention):
    """Every query attends to the compressed blocks whose last token is not after it; it may see none."""

    alignment = 1

    def __init__(self, blocks: CompressedBlocks, head_dim: int, backend: str = "auto") -> None:
        """`backend`: auto, or reference for plain PyTorch on any device."""
        self.blocks = blocks
        self.scale = head_dim**-0.5
        options = FullAttention.Options(backend="reference") if backend == "reference" else FullAttention.Options()
        self.rows = FullAttention(options, head_dim)

    def summarize(self, k_NKD: Tensor, layout: Layout) -> None:
        """Nothing: all blocks that a query sees are attended to."""
        return None

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """Nothing, as `summarize`."""
        return ()

    def empty_selection(self, q_THD: Tensor, k_NKD: Tensor, layout: Layout) -> Selection:
        """Nothing, as `select`."""
        return ()

    def attend(
        self, q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the blocks that each query sees; (0, -inf) where it sees none."""
        folded = self.blocks.fold(layout)
        out_THD, lse_HT = nothing_seen(q_THD)
        if not folded.rows:
            return out_THD, lse_HT
        k_NKD, v_NKD = (x[: folded.layout.total] for x in (k_NKD, v_NKD))
        for heads, kv_heads in heads_at_once(q_THD, k_NKD):
            k, v = k_NKD[:, kv_heads], v_NKD[:, kv_heads]
            q = self._fold(q_THD[:, heads], folded, k.shape[1])
            out, lse = self.rows.attend(q, k, v, folded.layout, selection)
            out_THD[:, heads] = self._unfold(out, folded, k.shape[1])
            lse_HT[heads] = self._unfold(lse.T.unsqueeze(-1), folded, k.shape[1]).squeeze(-1).T
        unseen_T = ~folded.sees_n
        return out_THD.masked_fill_(unseen_T.view(-1, 1, 1), 0), lse_HT.masked_fill_(unseen_T, -torch.inf)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        folded = self.blocks.fold(layout)
        dq_THD, dk_NKD, dv_NKD = (torch.zeros_like(x) for x in (state.q, state.k, state.v))
        if not folded.rows:
            return dq_THD, dk_NKD, dv_NKD
        count = folded.layout.total
        for heads, kv_heads in heads_at_once(state.q, state.k):
            part = state.with_heads(heads, kv_heads)
            k, v = part.k[:count], part.v[:count]
            dout, q, out = (self._fold(x, folded, k.shape[1]) for x in (part.dout, part.q, part.out))
            lse = self._fold(part.lse.T.unsqueeze(-1), folded, k.shape[1]).squeeze(-1).T.contiguous()
            rows = BackwardState(dout, q, k, v, out, lse)
            dq, dk, dv = self.rows.attend_backward(rows, folded.layout, selection)
            dq_THD[:, heads] = self._unfold(dq, folded, k.shape[1])
            dk_NKD[:count, kv_heads] = dk
            dv_NKD[:count, kv_heads] = dv
        return dq_THD.masked_fill_(~folded.sees_n.view(-1, 1, 1), 0), dk_NKD, dv_NKD

    def _fold(self, x_THD: Tensor, folded: FoldedQueries, kv_heads: int) -> Tensor:
        """[T, H, D] -> [R, K * S * G, D]; zeros for places without a query, whose gradients then are zero as well."""
        slots = folded.rows * self.blocks.stride
        x_slots = x_THD.new_zeros(slots + 1, *x_THD.shape[1:])
        x_slots[torch.where(folded.sees_n, folded.slot_n, slots)] = x_THD
        x_RSKGD = x_slots[:-1].view(folded.rows, self.blocks.stride, kv_heads, -1, x_THD.shape[2])
        return x_RSKGD.transpose(1, 2).flatten(1, 3)

    def _unfold(self, x_RHD: Tensor, folded: FoldedQueries, kv_heads: int) -> Tensor:
        """The inverse: [R, K * S * G, D] -> [T, H, D]; any rows for queries that see no block."""
        x_RKSGD = x_RHD.view(folded.rows, kv_heads, self.blocks.stride, -1, x_RHD.shape[2])
        x_slots = x_RKSGD.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return x_slots[torch.where(folded.sees_n, folded.slot_n, 0)]
