"""The layout of a packed sequence over ranks: which rank holds which tokens. Needs no process group and no device.

Shape suffixes: T tokens of the packed sequence, L rows of a shard, R ranks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Self, get_args

import torch
from torch import Tensor

from moba_train.attention.layout import TokenRange, TokenRanges, join_ascending, joined_ranges
from moba_train.config.parallel import CPLayout


def contiguous(x: Tensor) -> Tensor:
    """A faster `x.contiguous()`, with the same result.

    torch copies a tensor with strided rows element by element: on an H200 at 1.7 TB/s in bfloat16. In words of 16
    bytes, the same bytes are copied at 4.2 TB/s, the memory's rate (benchmarks/LOG.md).
    """
    if x.is_contiguous():
        return x
    words = _words(x)
    return x.contiguous() if words is None else words.contiguous().view(x.dtype)


def copy_into(target: Tensor, x: Tensor) -> None:
    """A faster `target.copy_(x)` for equal shapes, with the same result."""
    words = (_words(target), _words(x)) if target.dtype == x.dtype else (None, None)
    if words[0] is None or words[1] is None:
        target.copy_(x)
    else:
        words[0].copy_(words[1])


def _words(x: Tensor) -> Tensor | None:
    """A view of `x` in 16-byte words along the last dimension; None if its shape or strides are not whole words."""
    # complex128 is the only dtype of torch with 16 bytes; it is copied, never computed with.
    count = torch.complex128.itemsize // x.element_size()
    if x.dim() == 0 or x.stride(-1) != 1:
        return None
    if any(number % count for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        return None
    return x.view(torch.complex128)


class PlacedRange(NamedTuple):
    """Tokens [start, stop) and the first of their rows in the concatenation of all shards."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True)
class SequenceLayout:
    """The tokens of a packed sequence that each rank holds.

    Every shard has the same number of rows: its tokens in ascending order, then padding. Shards are independent of
    documents, and their edges need not agree with the units (blocks) of any attention.
    """

    total: int
    """Tokens of the packed sequence."""
    rows: int
    """Rows of every shard, L."""
    ranges: tuple[TokenRanges, ...]
    """Token ranges of each rank."""
    placed_ranges: tuple[PlacedRange, ...] = field(init=False, repr=False, compare=False)
    """The tokens of all ranks in ascending order, adjacent ranges in adjacent rows merged."""
    _is_packed: bool = field(init=False, repr=False, compare=False)
    """True if the concatenation of all shards has the tokens in ascending order, with padding only at its end."""
    _total_tokens: int = field(init=False, repr=False, compare=False)
    """Number of tokens of all ranks."""

    @classmethod
    def split(cls, total: int, ranks: int, layout: CPLayout) -> Self:
        """Split a sequence of `total` tokens over `ranks` ranks.

        `contiguous`: rank r holds the r-th of R equal parts. `zigzag`: rank r holds the r-th of 2R equal parts and the
        r-th from the end, which balances work that grows with position. The last parts are short or empty when the
        number of parts does not divide `total`.

        Raises ValueError, naming the YAML key, for an unknown layout and for fewer tokens than ranks.
        """
        if layout not in get_args(CPLayout):
            raise ValueError(f"parallel.cp_layout: {layout!r} given, allowed: {', '.join(get_args(CPLayout))}")
        if not 1 <= ranks <= total:
            raise ValueError(
                f"parallel.cp: {ranks} given for a sequence of {total} tokens; every rank needs at least one token"
            )
        count = ranks if layout == "contiguous" else 2 * ranks
        size = -(-total // count)
        edges = [min(part * size, total) for part in range(count + 1)]
        parts = list(pairwise(edges))
        if layout == "contiguous":
            return cls(total, size, tuple(join_ascending([part]) for part in parts))
        return cls(total, 2 * size, tuple(join_ascending([parts[r], parts[-1 - r]]) for r in range(ranks)))

    @property
    def ranks(self) -> int:
        """Number of ranks, R."""
        return len(self.ranges)

    def tokens(self, rank: int) -> int:
        """Number of tokens in a rank's shard; its remaining rows are padding."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def ranges_of(self, rank: int) -> TokenRanges | None:
        """Token ranges of a rank, as `attention.protocol.Layout` takes them: None for the whole sequence."""
        return self._none_if_complete(self.ranges[rank])

    @property
    def all_ranges(self) -> TokenRanges | None:
        """Token ranges of all ranks, as `attention.protocol.Layout` takes them: None for the whole sequence."""
        return self._none_if_complete(_joined(self.ranges))

    def _none_if_complete(self, ranges: TokenRanges) -> TokenRanges | None:
        return None if ranges == (TokenRange(0, self.total),) else ranges

    def select_ranks(self, ranks: Sequence[int]) -> "SequenceLayout":
        """The layout with the shards of these ranks only, in this order."""
        return SequenceLayout(self.total, self.rows, tuple(self.ranges[rank] for rank in ranks))

    def merge_ranks(self, size: int) -> "SequenceLayout":
        """The layout with the shards of every `size` consecutive ranks merged into one, in ascending token order."""
        groups = [self.ranges[first : first + size] for first in range(0, self.ranks, size)]
        return SequenceLayout(self.total, self.rows * size, tuple(_joined(group) for group in groups))

    def __post_init__(self) -> None:
        # Set here and not when they are asked for: torch.compile takes no layer as a whole that changes an object.
        object.__setattr__(self, "placed_ranges", self._placed_ranges())
        object.__setattr__(self, "_is_packed", self._shards_ascend())
        object.__setattr__(self, "_total_tokens", sum(self.tokens(rank) for rank in range(self.ranks)))

    def _placed_ranges(self) -> tuple[PlacedRange, ...]:
        found = []
        for rank, ranges in enumerate(self.ranges):
            row = rank * self.rows
            for start, stop in ranges:
                found.append(PlacedRange(start, stop, row))
                row += stop - start
        merged: list[PlacedRange] = []
        for placed in _ascending(found):
            last = merged[-1] if merged else None
            if last and last.stop == placed.start and last.row + last.stop - last.start == placed.row:
                merged[-1] = last._replace(stop=placed.stop)
            else:
                merged.append(placed)
        return tuple(merged)

    def _shards_ascend(self) -> bool:
        first = 0
        for start, stop, row in self.placed_ranges:
            if row != first:
                return False
            first += stop - start
        return True

    def owner(self, token: int) -> int:
        """The rank that holds a token."""
        holds = (any(start <= token < stop for start, stop in ranges) for ranges in self.ranges)
        return next(rank for rank, found in enumerate(holds) if found)

    def local_rows(self, tokens: Tensor, rank: int) -> Tensor:
        """Rows of `tokens` in a rank's shard, -1 for tokens of other ranks. int64, in and out of the same shape."""
        rows = torch.full_like(tokens, -1)
        first = 0
        for start, stop in self.ranges[rank]:
            rows = torch.where((start <= tokens) & (tokens < stop), tokens - start + first, rows)
            first += stop - start
        return rows

    def shard(self, x_T: Tensor, rank: int, padding: float = 0) -> Tensor:
        """A rank's shard [L, ...] of a tensor over the whole sequence [T, ...]; rows after its tokens are `padding`."""
        rows = [x_T[start:stop] for start, stop in self.ranges[rank]]
        return torch.cat([*rows, x_T.new_full((self.rows - self.tokens(rank), *x_T.shape[1:]), padding)])

    def to_packed(self, shards_RL: Tensor) -> Tensor:
        """The tokens of all ranks in ascending order, from the concatenation of their shards [R * L, ...].

        A view when they are already in that order.
        """
        if self._is_packed:
            # Not copied: putting in order what is in order took hierarchical's transfers at 256K 512/8 from 17.4 to
            # 20.1 ms (four H200; no result file).
            return shards_RL[: self._total_tokens]
        return torch.cat([shards_RL[row : row + stop - start] for start, stop, row in self.placed_ranges])

    def copy_to_packed(self, shards_L: Sequence[Tensor]) -> Tensor:
        """`to_packed` of the ranks' shards in separate tensors [L, ...]; always a copy."""
        pieces: list[tuple[int, Tensor]] = []
        for ranges, shard_L in zip(self.ranges, shards_L, strict=True):
            first = 0
            for start, stop in ranges:
                pieces.append((start, shard_L[first : first + stop - start]))
                first += stop - start
        return torch.cat([rows for _, rows in sorted(pieces, key=lambda piece: piece[0])])

    def to_shards(self, *packed: Tensor) -> Tensor:
        """The inverse of `to_packed`, with zeros for padding; several tensors are concatenated along dimension 1.

        A single tensor that is already in the order of the shards, and needs no padding, is returned unchanged.
        """
        if len(packed) == 1 and self._is_packed and self._total_tokens == self.ranks * self.rows:
            return packed[0]
        width = sum(x.shape[1] for x in packed)
        shards_RL = packed[0].new_empty(self.ranks * self.rows, width, *packed[0].shape[2:])
        for rank in range(self.ranks):
            shards_RL[rank * self.rows + self.tokens(rank) : (rank + 1) * self.rows] = 0
        columns = shards_RL.split([x.shape[1] for x in packed], dim=1)
        first = 0
        for start, stop, row in self.placed_ranges:
            for x, column in zip(packed, columns, strict=True):
                copy_into(column[row : row + stop - start], x[first : first + stop - start])
            first += stop - start
        return shards_RL


def _ascending(placed: list[PlacedRange]) -> list[PlacedRange]:
    """Sorted, by comparisons alone: torch.compile cannot sort sizes that it traces as symbols."""
    found: list[PlacedRange] = []
    for one in placed:
        at = len(found)
        while at and found[at - 1].start > one.start:
            at -= 1
        found.insert(at, one)
    return found


def _joined(groups: tuple[TokenRanges, ...]) -> TokenRanges:
    """The tokens of several ranks as ascending ranges."""
    return joined_ranges([token_range for ranges in groups for token_range in ranges])


def sees(queries: TokenRanges, keys: TokenRanges, edges: tuple[int, ...]) -> bool:
    """True if any of the queries sees any of the keys under causal attention inside documents.

    `edges`: document boundaries, as `Layout.edges`.
    """
    for start, stop in queries:
        document = edges[bisect_right(edges, start) - 1]
        if any(first < stop and document < last for first, last in keys):
            return True
    return False
