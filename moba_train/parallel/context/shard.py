"""One rank's shard of a packed sequence, as a layer's kind sees it (attention/shard.py).

Shape suffixes: L rows of a shard (padding included), n tokens in it, T tokens of the sequence, R ranks.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.operators import OperatorEngine, OperatorShard, all_ranks, shifted
from moba_train.attention.protocol import Layout, TokenRanges
from moba_train.parallel.context.layout import SequenceLayout


class RankShard(OperatorShard):
    """The tokens of this rank. Attention runs on this rank alone, over keys that it has gathered."""

    def __init__(self, engine: OperatorEngine, layout: Layout, sequence: SequenceLayout, rank: int) -> None:
        """`layout`: of the whole packed sequence; `sequence`: how it is shared."""
        super().__init__(engine, layout.part(sequence.ranges[rank], None))
        self._sequence = sequence
        self._rank = rank
        self._tokens = sequence.tokens(rank)

    def own(self, x_Lx: Tensor) -> Tensor:
        """The rows before the padding."""
        return x_Lx[: self._tokens]

    def padded(self, x_nx: Tensor) -> Tensor:
        """Zeros appended up to the rows of a shard."""
        missing = self._sequence.rows - self._tokens
        return F.pad(x_nx, (0, 0) * (x_nx.dim() - 1) + (0, missing)) if missing else x_nx

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows of all ranks in the order of the packed sequence, by one all-gather; gradients are sent back to the
        owners, which sum them in float32 or float64."""
        return self._sequence.to_packed(self._all_shards(self.padded(x_nx)))

    def _rows_before(self, x_nx: Tensor, count: int) -> list[Tensor]:
        """The rows before each of this rank's ranges come from their owners, by one small all-gather."""
        sent, head_of_ranges = self.layout.cached(
            ("rows before", self._sequence, self._rank, count, x_nx.device),
            lambda: _rows_before(self._sequence, self._rank, count, x_nx.device),
        )
        edges_m = self._all_shards(self.padded(x_nx)[sent])
        heads_rcx = torch.cat([edges_m, edges_m.new_zeros(1, *x_nx.shape[1:])])[head_of_ranges]
        if not len(heads_rcx):  # a rank without tokens; its gradients must reach the others all the same
            return [x_nx + edges_m[:0].sum()] * count
        parts = x_nx.split([stop - start for start, stop in self._sequence.ranges[self._rank]])
        by_range = [shifted(torch.cat([*pair]), count) for pair in zip(heads_rcx, parts, strict=True)]
        return [torch.cat(same_distance) for same_distance in zip(*by_range, strict=True)]

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` of all ranks, [R, ...], by one all-gather."""
        return self._all_shards(x.unsqueeze(0))

    def _all_shards(self, x_Lx: Tensor) -> Tensor:
        return all_ranks(x_Lx, self._sequence.ranks, self._engine.handle)


def _rows_before(sequence: SequenceLayout, rank: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(rows of its shard that this rank sends, filled up to as many as every rank sends; [ranges, count]: which of the
    rows that all send lie before each of its ranges, and where there is none the one behind the last)."""
    needed = sorted({token for ranges in sequence.ranges for token in _tokens_before(ranges, count) if token >= 0})
    owners = [sequence.owner(token) for token in needed]
    most = max((owners.count(owner) for owner in set(owners)), default=0)
    place: dict[int, int] = {}
    for owner in range(sequence.ranks):
        mine = (token for token, its_owner in zip(needed, owners, strict=True) if its_owner == owner)
        place |= {token: owner * most + index for index, token in enumerate(mine)}
    own = torch.tensor([token for token in needed if place[token] // most == rank], dtype=torch.int64)
    sent = torch.zeros(most, dtype=torch.int64)
    sent[: len(own)] = sequence.local_rows(own, rank)
    nothing = sequence.ranks * most
    head_of_ranges = torch.tensor([place.get(token, nothing) for token in _tokens_before(sequence.ranges[rank], count)])
    return sent.to(device), head_of_ranges.long().view(-1, count).to(device)


def _tokens_before(ranges: TokenRanges, count: int) -> Iterable[int]:
    """The `count` tokens before each of the ranges, negative before the sequence."""
    return (token for start, _ in ranges for token in range(start - count, start))
