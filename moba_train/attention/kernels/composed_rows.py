"""Query slots (token, head, j-th selected block) sorted by block, in plain PyTorch: any device, any head dim."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.varlen import Segments

_ROWS_ELEMENTS = 2**24
"""Elements of float32 in use at once while rows are joined."""


@dataclass(frozen=True)
class SortedPart:
    """The slots of some heads and a range of tokens, list by list: a list for every pair of a key/value head and a
    block."""

    heads: slice
    tokens: slice
    slots: int
    rows: Tensor
    """int64 [E]: the query row (token x heads + head) of every slot; one row more than slots if some slots name no
    block: all of these have their position there."""
    position_thC: Tensor
    """int64: position of each slot in the lists."""
    segments: Segments

    def gather(self, x_rows: Tensor) -> Tensor:
        """[rows, D] -> [E, 1, D]."""
        return x_rows.index_select(0, self.rows).unsqueeze(1)

    def gather_lse(self, lse_rows: Tensor) -> Tensor:
        """[rows] -> [1, E]."""
        return lse_rows[self.rows].unsqueeze(0)

    def merge(self, out_THD: Tensor, lse_HT: Tensor, diagonal_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor) -> None:
        """Join the diagonal blocks' results with those of the slots, by online softmax (common/merge.py): out in place,
        lse written."""
        # Rows behind the lists belong to no segment and are undefined, perhaps NaN, which a weight of 0 would not
        # remove.
        part_ED[self.slots :] = 0.0
        part_E[self.slots :] = -torch.inf
        position_thC = self.position_thC
        out_thD = out_THD[self.tokens, self.heads]
        diagonal_th1 = diagonal_lse_HT[self.heads, self.tokens].T.unsqueeze(-1)
        part_thC = part_E[position_thC]
        lse_th1 = torch.cat([diagonal_th1, part_thC], -1).logsumexp(-1, keepdim=True)
        diagonal_weight_th1 = (diagonal_th1 - lse_th1).exp_()
        weight_thC = (part_thC - lse_th1).exp_()
        for tokens in _tokens_at_once(out_thD):
            total_thD = out_thD[tokens] * diagonal_weight_th1[tokens]
            for j in range(position_thC.shape[2]):
                total_thD.addcmul_(part_ED[position_thC[tokens, :, j]], weight_thC[tokens, :, j, None])
            out_thD[tokens] = total_thD
        lse_HT[self.heads, self.tokens] = lse_th1.squeeze(-1).T

    def by_slot(self, x_HTC: Tensor) -> Tensor:
        """[H, T, C] -> [E]; 0 for the row behind the slots."""
        slots_thC = x_HTC[self.heads, self.tokens].transpose(0, 1)
        x_E = x_HTC.new_zeros(max(self.rows.numel(), self.slots + 1))
        x_E.scatter_(0, self.position_thC.flatten(), slots_thC.flatten())
        x_E[self.slots :] = 0.0
        return x_E[: self.rows.numel()]

    def add_lse(self, lse_HT: Tensor, part_E: Tensor) -> None:
        """Add the slots' keys to the log-sum-exp of their queries, in place."""
        part_E[self.slots :] = -torch.inf
        found_ht = part_E[self.position_thC].logsumexp(-1).T
        lse_HT[self.heads, self.tokens] = torch.logaddexp(lse_HT[self.heads, self.tokens], found_ht)

    def add(self, dq_THD: Tensor, part_ED: Tensor) -> None:
        """Add the slots' parts of dq to the diagonal blocks', in place, rounded once."""
        part_ED[self.slots :] = 0.0
        dq_thD = dq_THD[self.tokens, self.heads]
        for tokens in _tokens_at_once(dq_thD):
            sum_thD = dq_thD[tokens].to(accumulation_dtype(dq_thD.dtype))
            for j in range(self.position_thC.shape[2]):
                sum_thD += part_ED[self.position_thC[tokens, :, j]]
            dq_thD[tokens] = sum_thD


def sorted_parts(
    selected_HTC: Tensor, kv_heads: int, limit: int, most_lists: int, edges: Tensor, longest: int, total: int
) -> Iterator[tuple[slice, Iterator[SortedPart]]]:
    """(key/value heads, their parts), of at most about `limit` slots and `most_lists` lists each. Waits for the GPU
    once for each part.

    `edges` int32 [blocks + 1]: where blocks begin; `longest`: keys of a block at most; `total`: keys.
    """
    heads, tokens, history_blocks = selected_HTC.shape
    group = heads // kv_heads
    blocks = edges.numel() - 1
    per_head = tokens * group * history_blocks
    # FlashAttention-2 takes 65,535 segments at most, the second dimension of its launch.
    together = max(1, min(limit // per_head, most_lists // blocks))
    size = -(-tokens // -(-per_head // limit))
    for first in range(0, kv_heads, together):
        some = slice(first, min(first + together, kv_heads))
        slices = [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]
        parts = (_part(selected_HTC, some, group, where, edges, longest, total) for where in slices)
        yield some, (part for part in parts if part.slots)


def _part(
    selected_HTC: Tensor, kv_heads: slice, group: int, tokens: slice, edges: Tensor, longest: int, total: int
) -> SortedPart:
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    selected_thC = selected_HTC[heads, tokens].transpose(0, 1)
    device = selected_thC.device
    blocks = edges.numel() - 1
    head_h = torch.arange(heads.stop - heads.start, dtype=torch.int32, device=device)
    lists = (kv_heads.stop - kv_heads.start) * blocks
    list_thC = torch.where(selected_thC < 0, lists, selected_thC + (head_h // group * blocks).view(1, -1, 1))
    key = torch.int16 if lists < 2**15 else torch.int32  # half the width, about half the time
    sorted_E, order_E = list_thC.flatten().to(key).sort(stable=True)
    starts = torch.searchsorted(sorted_E, torch.arange(lists + 1, dtype=key, device=device), out_int32=True)
    # One wait for both numbers. Kernels of full attention need the longest segment on the host.
    most, slots = torch.stack([starts.diff().max(), starts[-1]]).tolist()

    position_E = torch.empty_like(order_E).scatter_(0, order_E, torch.arange(order_E.numel(), device=device))
    token_t = torch.arange(tokens.start, tokens.stop, device=device)
    row_th = token_t.view(-1, 1) * selected_HTC.shape[0] + (heads.start + head_h)
    # Slots without a block are sorted last; of these one row stays, to which all their positions point.
    rows_E = row_th.flatten()[order_E[: slots + 1] // selected_thC.shape[2]]
    keys = keys_end_to_end(edges, kv_heads.stop - kv_heads.start, total)
    segments = Segments(starts, keys, most, longest, causal=False)
    return SortedPart(heads, tokens, slots, rows_E, position_E.clamp_(max=slots).view(selected_thC.shape), segments)


def keys_end_to_end(edges: Tensor, heads: int, tokens: int) -> Tensor:
    """int32 [heads * blocks + 1]: where each block begins if the keys of the heads are laid end to end."""
    first_k1 = torch.arange(0, heads * tokens, tokens, dtype=torch.int32, device=edges.device).view(-1, 1)
    return torch.cat([(edges[:-1] + first_k1).flatten(), edges[-1:] + first_k1[-1]])


def _tokens_at_once(x_thD: Tensor) -> Iterator[slice]:
    size = max(1, _ROWS_ELEMENTS // x_thD[:1].numel())
    for first in range(0, x_thD.shape[0], size):
        yield slice(first, first + size)
