"""The rows before each of a rank's token ranges, from the ranks that hold them.

Shape suffixes: n tokens of this rank, m rows that every rank sends, r ranges of this rank, c rows before each, R ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.protocol import Layout, TokenRanges
from moba_train.parallel.context.layout import SequenceLayout


@dataclass(frozen=True)
class Edges:
    """What a rank sends and receives, so that all ranks have the rows before their ranges."""

    sent_n: Tensor
    """int64: this rank's rows that others need."""
    rows: int
    """m: as many as any rank sends."""
    heads_rc: Tensor
    """int64: which of the rows that all ranks send come before each range; R * m where there is no token."""

    def to_send(self, x_nx: Tensor) -> Tensor:
        """This rank's rows, filled up with zeros: [m, ...]."""
        sent_x = x_nx[self.sent_n]
        return torch.cat([sent_x, sent_x.new_zeros((self.rows - len(sent_x), *sent_x.shape[1:]))])

    def heads(self, sent_Rmx: Tensor) -> Tensor:
        """The rows before each range, [r, c, ...], from those of all ranks; zeros where there is no token."""
        return torch.cat([sent_Rmx, sent_Rmx.new_zeros((1, *sent_Rmx.shape[1:]))])[self.heads_rc]

    def heads_backward(self, grad_rcx: Tensor, ranks: int) -> Tensor:
        """The gradient [R * m, ...] of `heads`."""
        grad_Rmx = grad_rcx.new_zeros((ranks * self.rows + 1, *grad_rcx.shape[2:]))
        return grad_Rmx.index_put_((self.heads_rc,), grad_rcx, accumulate=True)[:-1]


def edges(layout: Layout, sequence: SequenceLayout, rank: int, count: int) -> Edges:
    """The edges of `count` rows before each range of `rank`; kept with the layout of the sequence."""
    return layout.cached(
        ("edges", sequence, rank, count), lambda: _edges(sequence, rank, count, layout.cu_seqlens.device)
    )


def _edges(sequence: SequenceLayout, rank: int, count: int, device: torch.device) -> Edges:
    needed = sorted({token for ranges in sequence.ranges for token in _tokens_before(ranges, count) if token >= 0})
    owned: list[list[int]] = [[] for _ in sequence.ranges]
    for token in needed:
        owned[sequence.owner(token)].append(token)
    rows = max(map(len, owned))
    place = {token: owner * rows + i for owner, tokens in enumerate(owned) for i, token in enumerate(tokens)}
    before = [place.get(token, sequence.ranks * rows) for token in _tokens_before(sequence.ranges[rank], count)]
    sent_n = sequence.local_rows(torch.tensor(owned[rank], dtype=torch.int64), rank)
    heads_rc = torch.tensor(before, dtype=torch.int64).view(-1, count)
    return Edges(sent_n.to(device), rows, heads_rc.to(device))


def _tokens_before(ranges: TokenRanges, count: int) -> Iterator[int]:
    """The `count` tokens before each of the ranges, negative before the sequence."""
    return (token for start, _ in ranges for token in range(start - count, start))
