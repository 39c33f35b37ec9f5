"""Units of keys that straddle shards, and the summaries of all keys of a sequence.

Attention works in units (blocks) of `AttentionFacts.alignment` tokens, counted from the start of each document. A unit
may straddle shards: the rank of its first token owns it, receives the rows of its other tokens, and summarizes the
complete unit. Adding up the summaries of its parts would differ in the last bits, so near-ties would be selected
differently than on one device.

Shape suffixes: L rows of a shard, n tokens in it, U tokens in a rank's own units, K key/value heads, D head width.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from moba_train.attention.layout import Layout, TokenRange, TokenRanges, kept
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.transport.base import ShardedCall


@dataclass(frozen=True)
class UnitMove:
    """Tokens [start, stop) in the shard of rank `source` that continue a unit owned by rank `target`."""

    start: int
    stop: int
    source: int
    target: int


@dataclass(frozen=True)
class OwnedUnits:
    """The units that each rank owns, and the tokens that other ranks send to complete them."""

    ranges: tuple[TokenRanges, ...]
    """Token ranges of each rank's own units."""
    moves: tuple[UnitMove, ...]
    """Moves between all ranks, in ascending token order. Every rank knows all of them, and so all message sizes."""

    @classmethod
    def from_sequence(cls, sequence: SequenceLayout, edges: tuple[int, ...], size: int) -> "OwnedUnits":
        """The owners of units of `size` tokens in documents with the boundaries `edges`, for a complete sequence."""
        assert sequence.all_ranges is None
        held = sorted((start, stop, rank) for rank, ranges in enumerate(sequence.ranges) for start, stop in ranges)
        own: list[list[TokenRange]] = [[] for _ in sequence.ranges]
        moves = []
        for start, stop, rank in held:
            begin, end = _unit_of(start, edges, size)
            first = start
            if begin < start:
                first = min(end, stop)
                moves.append(UnitMove(start, first, rank, sequence.owner(begin)))
            if first < stop:
                own[rank].append(TokenRange(first, _unit_of(stop - 1, edges, size)[1]))
        return cls(tuple(map(tuple, own)), tuple(moves))


def _unit_of(token: int, edges: tuple[int, ...], size: int) -> tuple[int, int]:
    """The half-open range (start, stop) of the unit that a token belongs to."""
    document = bisect_right(edges, token) - 1
    begin = token - (token - edges[document]) % size
    return begin, min(begin + size, edges[document + 1])


@kept
def owned_units(layout: Layout, sequence: SequenceLayout, size: int) -> OwnedUnits:
    """The owners of units of `size` tokens."""
    if size == 1:
        return OwnedUnits(sequence.ranges, ())
    return OwnedUnits.from_sequence(sequence, layout.edges, size)


def rows_of_own_units(x_L: Tensor, units: OwnedUnits, sequence: SequenceLayout, communicator: Communicator) -> Tensor:
    """Rows [U, ...] of this rank's own units, in token order, from every rank's shard [L, ...]."""
    rank = communicator.rank
    if not units.moves:
        return x_L[: sequence.tokens(rank)]
    return _exchange(x_L, sequence.ranges[rank], units.ranges[rank], units.moves, communicator)


def rows_of_shard(x_U: Tensor, units: OwnedUnits, sequence: SequenceLayout, communicator: Communicator) -> Tensor:
    """The inverse of `rows_of_own_units`: rows [n, ...] of the tokens in this rank's shard, without padding."""
    rank = communicator.rank
    if not units.moves:
        return x_U
    back = [replace(move, source=move.target, target=move.source) for move in units.moves]
    return _exchange(x_U, units.ranges[rank], sequence.ranges[rank], back, communicator)


def _exchange(
    x: Tensor, held: TokenRanges, wanted: TokenRanges, moves: Sequence[UnitMove], communicator: Communicator
) -> Tensor:
    """Rows of the tokens `wanted`, in their order, from `x`, the rows of the tokens `held`, and from other ranks."""
    placed: list[tuple[int, int, Tensor]] = []
    first = 0
    for start, stop in held:
        placed.append((start, stop, x[first : first + stop - start]))
        first += stop - start

    def between(start: int, stop: int) -> Tensor:
        """Rows of the tokens [start, stop), which lie in one held range."""
        begin, rows = next((begin, rows) for begin, end, rows in placed if begin <= start and stop <= end)
        return rows[start - begin : stop - begin]

    sent_rows = [0] * communicator.size
    received_rows = [0] * communicator.size
    sent = sorted((move for move in moves if move.source == communicator.rank), key=lambda move: move.target)
    received = sorted((move for move in moves if move.target == communicator.rank), key=lambda move: move.source)
    for move in sent:
        sent_rows[move.target] += move.stop - move.start
    for move in received:
        received_rows[move.source] += move.stop - move.start
    leaving = torch.cat([x[:0], *(between(move.start, move.stop) for move in sent)])
    arriving = communicator.all_to_all_uneven(leaving, sent_rows, received_rows)

    parts = {}
    for move in received:
        parts[move.start], arriving = arriving.tensor_split([move.stop - move.start])
    for (start, stop), (begin, end) in product(held, wanted):
        if max(start, begin) < min(stop, end):
            parts[max(start, begin)] = between(max(start, begin), min(stop, end))
    return torch.cat([x[:0], *(parts[start] for start in sorted(parts))])


def all_summaries(k_LKD: Tensor, call: ShardedCall, communicator: Communicator) -> Tensor | None:
    """The result of `summarize` for all keys of the sequence, bit for bit, from each rank's shard of keys."""
    units = owned_units(call.layout, call.sequence, call.attention.facts.alignment)
    keys_UKD = rows_of_own_units(k_LKD, units, call.sequence, communicator)
    return summaries_of_own_units(keys_UKD, units, call, communicator)


def summaries_of_own_units(
    keys_UKD: Tensor, units: OwnedUnits, call: ShardedCall, communicator: Communicator
) -> Tensor | None:
    """The result of `summarize` for all keys of the sequence, from the keys of each rank's own units."""
    part = call.layout.part(None, units.ranges[communicator.rank])
    summaries = call.attention.summarize(keys_UKD, part)
    if summaries is not None:
        communicator.all_reduce(summaries)  # exact: each row is zero on all ranks but one
    return summaries
