"""Attention whose queries see the last tokens alone: a rank needs the keys before its own tokens, no others.

The ranks exchange these edges by one uneven all-to-all, whatever the transport, and their gradients go back the same
way. What travels does not grow with the sequence.

Shape suffixes: L rows of a shard, n tokens in it, e rows that a rank sends, S keys that it attends to, H query heads, K
key/value heads, D head width.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.layout import TokenRange, TokenRanges, joined_ranges
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.attention.shard import padded
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.base import ShardedCall, padded_lse


class Edges(NamedTuple):
    """The exchange of one rank."""

    keys: TokenRanges
    """Tokens whose keys the rank's queries see."""
    sent_e: Tensor
    """Rows of its shard that it sends, first those for rank 0; int64."""
    sent_rows: list[int]
    received_rows: list[int]
    order_S: Tensor
    """For each key in the sequence's order, its row among the rank's own and the received ones; int64."""


@lru_cache(maxsize=64)
def edges(sequence: SequenceLayout, rank: int, reach: int, device: torch.device) -> Edges:
    """The exchange for queries that see their last `reach` tokens, their own included."""

    def needed(of: int) -> TokenRanges:
        found: list[TokenRange] = []
        last = 0
        for start, stop in sequence.ranges[of]:
            found += [TokenRange(max(last, start - reach + 1), stop)] * (start < stop)
            last = stop
        return joined_ranges(found)

    def held(ranges: TokenRanges, by: int) -> Tensor:
        both = [(max(a, c), min(b, d)) for a, b in ranges for c, d in sequence.ranges[by]]
        return _tokens((start, stop) for start, stop in both if start < stop)

    others = [other for other in range(sequence.ranks) if other != rank]
    sent = {other: held(needed(other), rank) for other in others}
    received = {other: held(needed(rank), other) for other in others}
    every = torch.cat([_tokens(sequence.ranges[rank]), *received.values()])
    return Edges(
        needed(rank),
        sequence.local_rows(torch.cat([*sent.values(), _tokens(())]), rank).to(device),
        [len(sent.get(other, ())) for other in range(sequence.ranks)],
        [len(received.get(other, ())) for other in range(sequence.ranks)],
        every.argsort().to(device),
    )


def _tokens(ranges: Iterable[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in ranges)])


@dataclass(frozen=True)
class WindowExchange:
    """The exchange of a window, as `AttentionFacts.exchange`."""

    reach: int
    """Last tokens that a query sees, its own included."""

    def __call__(self, communicator: Communicator, call: ShardedCall, device: torch.device) -> "EdgeExchange":
        """The exchange of one call."""
        return EdgeExchange(communicator, call, device, reach=self.reach)

    def received_tokens(self, strategy: CPStrategy, tokens: int) -> int:
        """Tokens of other ranks whose keys the busiest rank receives, of a sequence of that many."""
        ranges = 2 if strategy.layout == "zigzag" else 1
        return min((self.reach - 1) * ranges, tokens - tokens // strategy.ranks)


class EdgeExchange:
    """One rank's attention over its own keys and the edges of other ranks."""

    def __init__(self, communicator: Communicator, call: ShardedCall, device: torch.device, *, reach: int) -> None:
        self._communicator = communicator
        self._attention = call.attention
        self._tokens = call.sequence.tokens(communicator.rank)
        self._edges = edges(call.sequence, communicator.rank, reach, device)
        self._part = call.layout.part(call.sequence.ranges[communicator.rank], self._edges.keys)

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, _call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """(out, lse, selection) of the rank's queries."""
        q_nHD = q_LHD[: self._tokens]
        k_SKD, v_SKD = self._keys_and_values(k_LKD, v_LKD)
        if not self._tokens:
            nothing_H0 = q_LHD.new_empty(q_LHD.shape[1], 0, dtype=accumulation_dtype(q_LHD.dtype))
            return torch.zeros_like(q_LHD), padded_lse(nothing_H0, len(q_LHD)), ()
        selection = self._attention.select(q_nHD, None, self._part)
        out_nHD, lse_Hn = self._attention.attend(q_nHD, k_SKD, v_SKD, self._part, selection)
        return padded(out_nHD, len(q_LHD)), padded_lse(lse_Hn, len(q_LHD)), selection

    def backward(self, state: BackwardState, selection: Selection, _call: ShardedCall) -> Gradients:
        """(dq, dk, dv) of the rank's shard."""
        tokens = self._tokens
        found = self._edges
        k_SKD, v_SKD = self._keys_and_values(state.k, state.v)
        dq_LHD = torch.zeros_like(state.q)
        both_SxD = torch.zeros_like(torch.cat([k_SKD, v_SKD], 1))
        if tokens:
            own = state.part(rows=slice(tokens))._replace(k=k_SKD, v=v_SKD)
            dq_LHD[:tokens], dk_SKD, dv_SKD = self._attention.attend_backward(own, self._part, selection)
            both_SxD[found.order_S] = torch.cat([dk_SKD, dv_SKD], 1)
        back_exD = self._communicator.all_to_all_uneven(
            both_SxD[tokens:].contiguous(), found.received_rows, found.sent_rows
        )
        sum_LxD = both_SxD.new_zeros((len(state.k), *both_SxD.shape[1:]), dtype=accumulation_dtype(both_SxD.dtype))
        sum_LxD[:tokens] = both_SxD[:tokens].to(sum_LxD.dtype)
        sum_LxD.index_add_(0, found.sent_e, back_exD.to(sum_LxD.dtype))
        dk_LKD, dv_LKD = sum_LxD.to(state.k.dtype).chunk(2, 1)
        return dq_LHD, dk_LKD, dv_LKD

    def _keys_and_values(self, k_LKD: Tensor, v_LKD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that the rank's queries see, [S, K, D], in the order of the sequence."""
        found = self._edges
        both_LxD = torch.cat([k_LKD, v_LKD], 1)
        received = self._communicator.all_to_all_uneven(both_LxD[found.sent_e], found.sent_rows, found.received_rows)
        both_SxD = torch.cat([both_LxD[: self._tokens], received])[found.order_S]
        k_SKD, v_SKD = both_SxD.chunk(2, 1)
        return k_SKD.contiguous(), v_SKD.contiguous()
