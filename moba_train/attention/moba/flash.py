"""MoBA as its paper composes it: varlen flash attention over the queries that chose each block, then a merge
(Lu et al. 2025, arXiv:2502.13189, algorithm 1), forward and backward.

Own blocks are causal segments. For the history, the *entries* (token, head, choice) are sorted by block, stably: the
entries of a list and their block are a segment of a second call. Results do not depend on timing, whatever the kernel:
a row is joined in a fixed order, own block first, then choice by choice, in float32 (float64 for float64).

Partial results exist for a part of the work at a time: some key/value heads or, where one head's are too many, a range
of its tokens (`entries_at_once`). Each part waits for the GPU once, for the length of its longest list.

Shape suffixes: T tokens, t a range of them, H query heads, h some of them, K key/value heads, k some of them, C
choices, E entries of a part, D head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.masked import accumulation_dtype
from moba_train.attention.moba.blocks import block_bound, block_edges
from moba_train.attention.protocol import Layout, Plan
from moba_train.attention.varlen import Gradients, Segments, VarlenKernel, best_kernel, refusals

_MOST_ELEMENTS = 2**30
"""Of a tensor in a backward call: kernels index some of theirs, padded, with 32 bits."""
_ROWS_ELEMENTS = 2**24
"""Elements of float32 in use while rows are joined."""


def refuses(q_THD: Tensor, layout: Layout, block_size: int, scale: float) -> str:
    """Why this cannot be done here; empty when it can."""
    if not layout.is_whole:
        return "a part of the sequence"
    if scale <= 0:
        return f"softmax scale {scale}, a positive one needed"
    return "" if _kernel(q_THD, layout, block_size) else refusals(q_THD, block_bound(layout, block_size))


def kernel_name(q_THD: Tensor, layout: Layout, block_size: int) -> str:
    """What the composition would run on."""
    kernel = _kernel(q_THD, layout, block_size)
    return kernel.name if kernel else "no kernel"


def _kernel(q_THD: Tensor, layout: Layout, block_size: int) -> type[VarlenKernel] | None:
    return best_kernel(q_THD, block_bound(layout, block_size))


def invert_choice(chosen_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Plan:
    """Nothing: entries are sorted where they are needed, a part at a time."""
    return ()


empty_lists = invert_choice


def attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Layout, chosen_HTC: Tensor, *, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] over the own blocks and the chosen ones (int32 [H, T, C], -1 = none)."""
    if layout.total == 0:
        return torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[1], 0, dtype=accumulation_dtype(q_THD.dtype))
    call = _Call.of(q_THD, k_TKD, layout, chosen_HTC, block_size)
    out_THD, lse_HT = call.kernel.forward(q_THD, k_TKD, v_TKD, call.own, scale)
    q_rows = q_THD.reshape(-1, call.head_dim)
    for kv_heads, ranges in call.parts():
        heads = call.query_heads(kv_heads)
        k, v = (_one_below_the_other(x, kv_heads) for x in (k_TKD, v_TKD))
        for tokens in ranges:
            lists = call.lists(kv_heads, tokens)
            if lists.entries == 0:
                continue
            part_E1D, part_1E = call.kernel.forward(lists.gather(q_rows), k, v, lists.segments, scale)
            part_ED, part_E = part_E1D.squeeze(1), part_1E.squeeze(0)
            part_ED[lists.entries :], part_E[lists.entries :] = 0.0, -torch.inf
            _merge(out_THD[tokens, heads], lse_HT[heads, tokens], part_ED, part_E, lists.place_thC)
    return out_THD, lse_HT


def attend_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
    chosen_HTC: Tensor,
    *,
    block_size: int,
    scale: float,
) -> Gradients:
    """(dq, dk, dv) of `attend`; `out` and `lse` are the merged ones."""
    dq_THD, dk_TKD, dv_TKD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TKD, v_TKD))
    if layout.total == 0:
        return dq_THD, dk_TKD, dv_TKD
    call = _Call.of(q_THD, k_TKD, layout, chosen_HTC, block_size)
    wide = accumulation_dtype(q_THD.dtype)
    rows = [x.reshape(-1, call.head_dim) for x in (dout_THD, q_THD, out_THD)]
    lse_rows = lse_HT.T.reshape(-1)
    rows_of_k = k_TKD.shape[0], k_TKD.shape[2]
    for kv_heads, ranges in call.parts():
        heads = call.query_heads(kv_heads)
        dk_kTD, dv_kTD = (x.new_zeros(kv_heads.stop - kv_heads.start, *rows_of_k, dtype=wide) for x in (k_TKD, v_TKD))
        for some, shared in call.own_heads(kv_heads):
            dq_THD[:, some], dk_TkD, dv_TkD = call.kernel.backward(
                dout_THD[:, some],
                q_THD[:, some],
                k_TKD[:, shared],
                v_TKD[:, shared],
                out_THD[:, some],
                lse_HT[some],
                call.own,
                scale,
                deterministic=True,
            )
            where = slice(shared.start - kv_heads.start, shared.stop - kv_heads.start)
            dk_kTD[where] += dk_TkD.transpose(0, 1)
            dv_kTD[where] += dv_TkD.transpose(0, 1)
        k, v = (_one_below_the_other(x, kv_heads) for x in (k_TKD, v_TKD))
        for tokens in ranges:
            lists = call.lists(kv_heads, tokens)
            if lists.entries == 0:
                continue
            dout, q, out = (lists.gather(x) for x in rows)
            lse = lse_rows[lists.rows].unsqueeze(0)
            dq, dk, dv = call.kernel.backward(dout, q, k, v, out, lse, lists.segments, scale, deterministic=True)
            dq[lists.entries :] = 0.0
            _add(dq_THD[tokens, heads], dq.squeeze(1), lists.place_thC)
            dk_kTD += dk.view_as(dk_kTD)
            dv_kTD += dv.view_as(dv_kTD)
        dk_TKD[:, kv_heads], dv_TKD[:, kv_heads] = dk_kTD.transpose(0, 1), dv_kTD.transpose(0, 1)
    return dq_THD, dk_TKD, dv_TKD


def entries_at_once(rows: int, head_dim: int) -> int:
    """Entries of a part at most, given the query rows (tokens x heads) of the call.

    Half as many as rows: the backward pass then holds three times the size of q (three gathered tensors, dq, and dq
    again in float32 inside the kernel; fewer entries where a kernel holds that several times). Not so few that calls
    get small, and at most 2**30 elements, which kernels index with 32 bits.
    """
    return min(max(rows // 2, 2**20), _MOST_ELEMENTS // head_dim)


@dataclass(frozen=True)
class _Lists:
    """The entries of a part, list by list: a list for every pair of a key/value head and a block."""

    entries: int
    rows: Tensor
    """int64 [E]: the query row (token x heads + head) of every entry; one row more than entries, if there are choices
    that name no block. They all stand there."""
    place_thC: Tensor
    """int64: where the entry of each choice stands."""
    segments: Segments

    def gather(self, x_rows: Tensor) -> Tensor:
        """[rows, D] -> [E, 1, D]."""
        return x_rows.index_select(0, self.rows).unsqueeze(1)


@dataclass(frozen=True)
class _Call:
    """The sizes of one call, and its work cut into parts."""

    kernel: type[VarlenKernel]
    own: Segments
    chosen_HTC: Tensor
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, q_THD: Tensor, k_TKD: Tensor, layout: Layout, chosen_HTC: Tensor, block_size: int) -> "_Call":
        kernel = _kernel(q_THD, layout, block_size)
        assert kernel, "ask `refuses` first"
        edges, longest = block_edges(layout, block_size), min(block_size, layout.max_seqlen)
        own = Segments(edges, edges, longest, longest, causal=True)
        return cls(kernel, own, chosen_HTC, k_TKD.shape[1], q_THD.shape[2])

    @property
    def group(self) -> int:
        return self.chosen_HTC.shape[0] // self.kv_heads

    @property
    def blocks(self) -> int:
        return self.own.cu_k.numel() - 1

    def query_heads(self, kv_heads: slice) -> slice:
        """The query heads that share these key/value heads."""
        return slice(kv_heads.start * self.group, kv_heads.stop * self.group)

    def own_heads(self, kv_heads: slice) -> Iterator[tuple[slice, slice]]:
        """(query heads, the key/value heads they share): what one call of the own blocks' backward pass takes.

        All, as long as kernels can index their rows with 32 bits; else one key/value head and some of its queries.
        """
        heads, most = self.query_heads(kv_heads), max(1, _MOST_ELEMENTS // (self.chosen_HTC.shape[1] * self.head_dim))
        if heads.stop - heads.start <= most:
            yield heads, kv_heads
            return
        for kv_head in range(kv_heads.start, kv_heads.stop):
            shared = slice(kv_head, kv_head + 1)
            mine = self.query_heads(shared)
            for first in range(mine.start, mine.stop, most):
                yield slice(first, min(first + most, mine.stop)), shared

    def parts(self) -> Iterator[tuple[slice, list[slice]]]:
        """(key/value heads, ranges of tokens): each pair is a part. No ranges if there is no history."""
        heads, tokens, choices = self.chosen_HTC.shape
        buffers = self.kernel.dq_buffers(self.blocks, self.chosen_HTC.device)
        limit = max(1, entries_at_once(tokens * heads, self.head_dim) // buffers)
        per_head = tokens * self.group * max(1, choices)
        together = max(1, min(limit // per_head, self.kernel.most_segments // self.blocks))
        cuts = -(-per_head // limit)
        size = -(-tokens // cuts)
        ranges = [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)] if choices else []
        for first in range(0, self.kv_heads, together):
            yield slice(first, min(first + together, self.kv_heads)), ranges

    def lists(self, kv_heads: slice, tokens: slice) -> _Lists:
        """Sort a part's entries. Waits for the GPU."""
        heads = self.query_heads(kv_heads)
        chosen_thC = self.chosen_HTC[heads, tokens].transpose(0, 1)
        device = chosen_thC.device
        head_h = torch.arange(heads.stop - heads.start, dtype=torch.int32, device=device)
        lists = (kv_heads.stop - kv_heads.start) * self.blocks
        list_thC = torch.where(chosen_thC < 0, lists, chosen_thC + (head_h // self.group * self.blocks).view(1, -1, 1))
        key = torch.int16 if lists < 2**15 else torch.int32  # half the width, about half the time
        sorted_E, order_E = list_thC.flatten().to(key).sort(stable=True)
        edges = torch.searchsorted(sorted_E, torch.arange(lists + 1, dtype=key, device=device), out_int32=True)
        longest, entries = torch.stack([edges.diff().max(), edges[-1]]).tolist()

        place_E = torch.empty_like(order_E).scatter_(0, order_E, torch.arange(order_E.numel(), device=device))
        token_t = torch.arange(tokens.start, tokens.stop, device=device)
        row_th = token_t.view(-1, 1) * self.chosen_HTC.shape[0] + (heads.start + head_h)
        rows_E = row_th.flatten()[order_E[: entries + 1] // chosen_thC.shape[2]]
        segments = Segments(edges, self._keys(kv_heads), longest, self.own.max_k, causal=False)
        return _Lists(entries, rows_E, place_E.clamp_(max=entries).view(chosen_thC.shape), segments)

    def _keys(self, kv_heads: slice) -> Tensor:
        """int32 [lists + 1]: where each list's block begins in `_one_below_the_other`."""
        edges, heads = self.own.cu_k, kv_heads.stop - kv_heads.start
        tokens = self.chosen_HTC.shape[1]
        first_k1 = torch.arange(0, heads * tokens, tokens, dtype=torch.int32, device=edges.device).view(-1, 1)
        return torch.cat([(edges[:-1] + first_k1).flatten(), edges[-1:] + first_k1[-1]])


def _one_below_the_other(x_TKD: Tensor, kv_heads: slice) -> Tensor:
    """[T, K, D] -> [k * T, 1, D]: all tokens of one key/value head, then all of the next, as if of one head."""
    return x_TKD[:, kv_heads].transpose(0, 1).reshape(-1, 1, x_TKD.shape[2])


def _merge(out_thD: Tensor, lse_ht: Tensor, part_ED: Tensor, part_E: Tensor, place_thC: Tensor) -> None:
    """Join the own blocks' results, in place, with those of the entries, by online softmax (attention/merge.py)."""
    own_th1, part_thC = lse_ht.T.unsqueeze(-1), part_E[place_thC]
    lse_th1 = torch.cat([own_th1, part_thC], -1).logsumexp(-1, keepdim=True)
    own_weight_th1, weight_thC = (own_th1 - lse_th1).exp_(), (part_thC - lse_th1).exp_()
    for tokens in _tokens_at_once(out_thD):
        joined_thD = out_thD[tokens] * own_weight_th1[tokens]
        for j in range(place_thC.shape[2]):
            joined_thD.addcmul_(part_ED[place_thC[tokens, :, j]], weight_thC[tokens, :, j, None])
        out_thD[tokens] = joined_thD
    lse_ht.copy_(lse_th1.squeeze(-1).T)


def _add(dq_thD: Tensor, part_ED: Tensor, place_thC: Tensor) -> None:
    """Add the entries' parts of dq to the own blocks', in place, rounded once."""
    for tokens in _tokens_at_once(dq_thD):
        sum_thD = dq_thD[tokens].to(accumulation_dtype(dq_thD.dtype))
        for j in range(place_thC.shape[2]):
            sum_thD += part_ED[place_thC[tokens, :, j]]
        dq_thD[tokens] = sum_thD


def _tokens_at_once(x_thD: Tensor) -> Iterator[slice]:
    size = max(1, _ROWS_ELEMENTS // x_thD[:1].numel())
    for first in range(0, x_thD.shape[0], size):
        yield slice(first, first + size)
