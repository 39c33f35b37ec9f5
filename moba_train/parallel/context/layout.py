"""How a packed sequence is cut over ranks. Pure: no process group, no device.

Shape suffixes: T tokens of the packed sequence, L rows of a shard, R ranks.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from moba_train.attention.protocol import TokenRange, TokenRanges, joined_ranges
from moba_train.parallel.context.copies import copy_into

Kind = Literal["contiguous", "zigzag"]


class Piece(NamedTuple):
    """Tokens [start, stop) lie in rows [row, row + stop - start) of the shards laid end to end, rank by rank."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True)
class SequenceLayout:
    """Who holds which tokens of a packed sequence.

    Every shard has the same number of rows: its tokens in ascending order, then padding. Shards know nothing of
    documents, and their edges need not agree with any unit of an attention.
    """

    total: int
    """Tokens of the packed sequence."""
    rows: int
    """Rows of every shard, L."""
    runs: tuple[TokenRanges, ...]
    """The tokens of each rank."""

    @classmethod
    def cut(cls, total: int, ranks: int, kind: Kind) -> Self:
        """A sequence of `total` tokens over `ranks` ranks.

        `contiguous`: rank r holds the r-th of R equal parts. `zigzag`: of 2R equal parts, the r-th and the r-th from
        the end, so that work which grows with the position is balanced. The last parts are short or empty when the
        number of parts does not divide `total`.

        Raises ValueError when there are fewer tokens than ranks.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"parallel.cp_layout: {kind!r} given, allowed: {', '.join(get_args(Kind))}")
        if not 1 <= ranks <= total:
            raise ValueError(f"parallel.cp: {ranks} given for a sequence of {total} tokens; at least one token a rank")
        parts = ranks if kind == "contiguous" else 2 * ranks
        size = -(-total // parts)
        edges = [min(part * size, total) for part in range(parts + 1)]
        ranges = list(pairwise(edges))
        if kind == "contiguous":
            return cls(total, size, tuple(joined_ranges([part]) for part in ranges))
        return cls(total, 2 * size, tuple(joined_ranges([ranges[r], ranges[-1 - r]]) for r in range(ranks)))

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.runs)

    def tokens(self, rank: int) -> int:
        """Rows of a rank's shard that are tokens; the rest is padding."""
        return sum(stop - start for start, stop in self.runs[rank])

    def place(self, rank: int) -> TokenRanges | None:
        """Where a rank's tokens stand, as `attention.protocol.Layout` takes it: None for the whole sequence."""
        return self._unless_whole(self.runs[rank])

    @cached_property
    def together(self) -> TokenRanges | None:
        """Where the tokens of all ranks stand."""
        return self._unless_whole(joined_ranges([run for runs in self.runs for run in runs]))

    def _unless_whole(self, runs: TokenRanges) -> TokenRanges | None:
        return None if runs == (TokenRange(0, self.total),) else runs

    def of(self, ranks: range) -> "SequenceLayout":
        """The shards of these ranks alone."""
        return SequenceLayout(self.total, self.rows, tuple(self.runs[rank] for rank in ranks))

    def in_groups(self, size: int) -> "SequenceLayout":
        """The shards of every `size` consecutive ranks joined to one, in ascending order."""
        groups = [self.runs[first : first + size] for first in range(0, self.ranks, size)]
        together = tuple(joined_ranges([run for runs in group for run in runs]) for group in groups)
        return SequenceLayout(self.total, self.rows * size, together)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The tokens of all ranks, ascending."""
        found = []
        for rank, runs in enumerate(self.runs):
            row = rank * self.rows
            for start, stop in runs:
                found.append(Piece(start, stop, row))
                row += stop - start
        merged: list[Piece] = []
        for piece in sorted(found):
            last = merged[-1] if merged else None
            if last and last.stop == piece.start and last.row + last.stop - last.start == piece.row:
                merged[-1] = last._replace(stop=piece.stop)
            else:
                merged.append(piece)
        return tuple(merged)

    @cached_property
    def _tokens(self) -> int:
        """Of all ranks."""
        return sum(self.tokens(rank) for rank in range(self.ranks))

    @cached_property
    def _is_packed(self) -> bool:
        """Whether the shards laid end to end are the tokens in ascending order, but for padding at the end."""
        first = 0
        for start, stop, row in self.pieces:
            if row != first:
                return False
            first += stop - start
        return True

    def owner(self, token: int) -> int:
        """The rank that holds a token."""
        return next(rank for rank, runs in enumerate(self.runs) if any(start <= token < stop for start, stop in runs))

    def rows_of(self, tokens: Tensor, rank: int) -> Tensor:
        """int64, the shape of `tokens` (int64): their rows in a rank's shard; -1 for those it does not hold."""
        rows, first = torch.full_like(tokens, -1), 0
        for start, stop in self.runs[rank]:
            rows = torch.where((start <= tokens) & (tokens < stop), tokens - start + first, rows)
            first += stop - start
        return rows

    def shard(self, x_T: Tensor, rank: int, padding: float = 0) -> Tensor:
        """A rank's rows [L, ...] of a tensor over the whole sequence [T, ...], `padding` behind."""
        rows = [x_T[start:stop] for start, stop in self.runs[rank]]
        return torch.cat([*rows, x_T.new_full((self.rows - self.tokens(rank), *x_T.shape[1:]), padding)])

    def to_packed(self, shards_RL: Tensor) -> Tensor:
        """The tokens of all ranks in ascending order, from their shards laid end to end [R * L, ...].

        A view where they stand in that order already.
        """
        if self._is_packed:
            return shards_RL[: self._tokens]
        return torch.cat([shards_RL[row : row + stop - start] for start, stop, row in self.pieces])

    def to_shards(self, *packed: Tensor) -> Tensor:
        """The inverse of `to_packed`, zeros for padding; several tensors are laid side by side along dimension 1.

        One tensor that stands in the order of the shards already, and needs no padding, is returned as it is.
        """
        if len(packed) == 1 and self._is_packed and self._tokens == self.ranks * self.rows:
            return packed[0]
        side_by_side = sum(x.shape[1] for x in packed), *packed[0].shape[2:]
        shards_RL = packed[0].new_empty(self.ranks * self.rows, *side_by_side)
        for rank in range(self.ranks):
            shards_RL[rank * self.rows + self.tokens(rank) : (rank + 1) * self.rows] = 0
        columns = shards_RL.split([x.shape[1] for x in packed], dim=1)
        first = 0
        for start, stop, row in self.pieces:
            for x, column in zip(packed, columns, strict=True):
                copy_into(column[row : row + stop - start], x[first : first + stop - start])
            first += stop - start
        return shards_RL


def sees(queries: TokenRanges, keys: TokenRanges, edges: tuple[int, ...]) -> bool:
    """Whether causal attention inside documents with these boundaries lets any of the queries see any of the keys."""
    for start, stop in queries:
        document = edges[bisect_right(edges, start) - 1]
        if any(first < stop and document < last for first, last in keys):
            return True
    return False
