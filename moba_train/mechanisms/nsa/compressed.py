"""Attention to compressed keys as a LocalAttention: causal attention among rows of queries.

A compressed block has `size` tokens and begins every `stride` tokens from its document's start; only complete blocks
exist. Ids count over the whole packed sequence, as those of kernels/common/geometry.py do. A query sees the blocks of
its document whose last token is not after it.

So `stride` neighbouring queries have the same newest block, and all of them see exactly the blocks up to it. With
these queries side by side as further heads, attention to compressed blocks is plain causal attention in which document
d has as many tokens as compressed blocks: row i holds the queries whose newest block is i.

Keys and values are those of the compressed blocks, in the order of their ids, while the layout is that of the tokens:
it is meant for `Shard.attend`, where every rank has all of them.

Shape suffixes: T tokens of the sequence, n queries of the layout, N compressed blocks (their bound), R rows of S =
stride queries, L = size, H query heads, K key/value heads, G = H / K, D head width.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common.merge import nothing_seen
from moba_train.attention.layout import Layout, TokenRange, TokenRanges, joined_ranges, kept
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection
from moba_train.mechanisms.window import heads_at_once


@dataclass(frozen=True)
class CompressedBlocks:
    """Size and stride of compressed blocks, in tokens; the stride divides the size."""

    size: int
    stride: int

    def count(self, length: int) -> int:
        """Complete blocks of a document of `length` tokens."""
        return max(0, (length - self.size) // self.stride + 1)

    def bound(self, layout: Layout) -> int:
        """An upper bound of the number of blocks, known on the host."""
        return layout.total // self.stride

    @kept
    def first(self, layout: Layout) -> Tensor:
        """int64 [docs + 1]: id of each document's first block; the last entry is the number of blocks."""
        lengths = layout.cu_seqlens.long().diff()
        counts = ((lengths - self.size) // self.stride + 1).clamp_(min=0)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def places(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """int64 [N] each: every block's first token, and its position in its document; any for ids of no block."""
        first = self.first(layout)
        ids_N = torch.arange(self.bound(layout), device=first.device)
        document_N = torch.searchsorted(first[1:], ids_N, right=True).clamp_(max=first.numel() - 2)
        positions_N = torch.where(ids_N < first[-1], (ids_N - first[document_N]) * self.stride, 0)
        return layout.cu_seqlens.long()[document_N] + positions_N, positions_N

    @kept
    def seen(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """int64 [n] each: every query sees the blocks from the first id up to, but not including, the second."""
        first_n = self.first(layout)[layout.q_documents]
        behind_n = layout.positions(layout.q_tokens, layout.q_documents) + 1
        return first_n, first_n + ((behind_n - self.size) // self.stride + 1).clamp_(min=0)

    @kept
    def fold(self, layout: Layout) -> "FoldedQueries":
        """The rows of the layout's queries. Reads the documents' edges on the host."""
        counts = [self.count(stop - start) for start, stop in pairwise(layout.edges)]
        first = [0, *accumulate(counts)]
        rows = self._rows(layout, first)
        device = layout.cu_seqlens.device
        cu_blocks = torch.tensor(first, dtype=torch.int32)
        whole = Layout(cu_blocks.to(device), max(counts, default=0), first[-1], cu_seqlens_cpu=cu_blocks)
        folded = whole if rows == (TokenRange(0, first[-1]),) else whole.part(rows, None)

        first_n, end_n = self.seen(layout)
        positions_n = layout.positions(layout.q_tokens, layout.q_documents)
        starts = torch.tensor([0, *(start for start, _ in rows)], device=device)  # a row that is none comes first
        before = torch.tensor([0, 0, *accumulate(stop - start for start, stop in rows)], device=device)
        among_n = torch.searchsorted(starts, end_n - 1, right=True) - 1
        row_n = end_n - 1 - starts[among_n] + before[among_n]
        slot_n = row_n * self.stride + (positions_n + 1 - self.size) % self.stride
        return FoldedQueries(folded, sum(stop - start for start, stop in rows), slot_n, first_n < end_n)

    def _rows(self, layout: Layout, first: list[int]) -> TokenRanges:
        """Ids of the newest blocks of the layout's queries; `first`: the first id of each document."""
        edges = layout.edges
        found: list[TokenRange] = []
        for begin, end in layout.query_ranges:
            for document in range(bisect_right(edges, begin) - 1, len(edges) - 1):
                start = max(begin - edges[document], 0)
                stop = min(end, edges[document + 1]) - edges[document]
                if edges[document] >= end:
                    break
                newest = first[document] + max(0, self.count(start + 1) - 1)
                if found:  # a range may have ended among the queries of a row
                    newest = max(newest, found[-1].stop)
                if newest < first[document] + self.count(stop):
                    found.append(TokenRange(newest, first[document] + self.count(stop)))
        return joined_ranges(found)


@dataclass(frozen=True)
class FoldedQueries:
    """Places of queries in rows of S queries with the same newest compressed block."""

    layout: Layout
    """The layout whose tokens are compressed blocks: all of them as keys, the rows as queries."""
    rows: int
    """R."""
    slot_n: Tensor
    """int64 [n]: place of each query among R x S; meaningless where it sees no block."""
    sees_n: Tensor
    """bool [n]: whether the query sees any block."""


class CompressedAttention(LocalAttention):
    """Every query attends to the compressed blocks whose last token is not after it; it may see none."""

    def __init__(self, blocks: CompressedBlocks, head_dim: int, backend: str = "auto") -> None:
        """`backend`: auto, or reference for plain PyTorch on any device."""
        self.blocks = blocks
        self.scale = head_dim**-0.5
        options = FullAttention.Options(backend="reference") if backend == "reference" else FullAttention.Options()
        self.rows = FullAttention(options, head_dim)

    def attend(
        self, q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the blocks that each query sees; (0, -inf) where it sees none."""
        folded = self.blocks.fold(layout)
        out_THD, lse_HT = nothing_seen(q_THD)
        if not folded.rows:
            return out_THD, lse_HT
        # Behind the last block, up to the bound, there are rows of no block.
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
            part = state.part(heads=heads, kv_heads=kv_heads)
            k, v = part.k[:count], part.v[:count]
            dout, q, out = (self._fold(x, folded, k.shape[1]) for x in (part.dout, part.q, part.out))
            lse = self._fold(part.lse.T.unsqueeze(-1), folded, k.shape[1]).squeeze(-1).T.contiguous()
            rows = BackwardState(dout, q, k, v, out, lse)
            dq, dk, dv = self.rows.attend_backward(rows, folded.layout, selection)
            dq_THD[:, heads] = self._unfold(dq, folded, k.shape[1])
            dk_NKD[:count, kv_heads] = dk
            dv_NKD[:count, kv_heads] = dv
        # Queries that see no block have been given some other row's gradient.
        return dq_THD.masked_fill_(~folded.sees_n.view(-1, 1, 1), 0), dk_NKD, dv_NKD

    def _fold(self, x_THD: Tensor, folded: FoldedQueries, kv_heads: int) -> Tensor:
        """[T, H, D] -> [R, K * S * G, D]; zeros for places without a query, whose gradients then are zero as well."""
        slots = folded.rows * self.blocks.stride
        # One row more: queries that see no block go there, and it is cut off.
        x_slots = x_THD.new_zeros(slots + 1, *x_THD.shape[1:])
        x_slots[torch.where(folded.sees_n, folded.slot_n, slots)] = x_THD
        x_RSKGD = x_slots[:-1].view(folded.rows, self.blocks.stride, kv_heads, -1, x_THD.shape[2])
        return x_RSKGD.transpose(1, 2).flatten(1, 3)

    def _unfold(self, x_RHD: Tensor, folded: FoldedQueries, kv_heads: int) -> Tensor:
        """The inverse: [R, K * S * G, D] -> [T, H, D]; any rows for queries that see no block."""
        x_RKSGD = x_RHD.view(folded.rows, kv_heads, self.blocks.stride, -1, x_RHD.shape[2])
        x_slots = x_RKSGD.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return x_slots[torch.where(folded.sees_n, folded.slot_n, 0)]
