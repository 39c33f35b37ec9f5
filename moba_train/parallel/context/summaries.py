"""Summaries of all keys of a sequence, computed from the ranks' shards of keys.

Attention summarizes keys in units (blocks) of `LocalAttention.alignment` tokens, counted from the start of each
document. A unit may straddle shards; the rank of its first token owns it, receives its other keys and summarizes the
complete unit. Adding up the summaries of its parts would differ in the last bits, so near-ties would be selected
differently than on one device.

Shape suffixes: L rows of a shard, U tokens in a rank's own units, K key/value heads, D head width.
"""

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.call import AttentionCall
from moba_train.attention.protocol import Layout, TokenRange, TokenRanges
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.layout import SequenceLayout


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


def all_summaries(
    k_LKD: Tensor, call: AttentionCall, sequence: SequenceLayout, communicator: Communicator
) -> Tensor | None:
    """The result of `summarize` for all keys of the sequence, bit for bit, from each rank's shard of keys."""
    units = _owned_units(call.layout, sequence, call.attention.alignment)
    keys_UKD = _keys_of_own_units(k_LKD, units, sequence, communicator)
    summaries = call.part(None, units.ranges[communicator.rank]).summarize(keys_UKD)
    if summaries is not None:
        communicator.all_reduce(summaries)  # exact: each row is zero on all ranks but one
    return summaries


def _owned_units(layout: Layout, sequence: SequenceLayout, size: int) -> OwnedUnits:
    if size == 1:
        return OwnedUnits(sequence.ranges, ())
    return layout.cached(
        ("owned units", sequence, size), lambda: OwnedUnits.from_sequence(sequence, layout.edges, size)
    )


def _keys_of_own_units(
    k_LKD: Tensor, units: OwnedUnits, sequence: SequenceLayout, communicator: Communicator
) -> Tensor:
    """Keys [U, K, D] of this rank's own units."""
    rank = communicator.rank
    if not units.moves:
        return k_LKD[: sequence.tokens(rank)]

    held: dict[tuple[int, int], Tensor] = {}
    first = 0
    for start, stop in sequence.ranges[rank]:
        held[start, stop] = k_LKD[first : first + stop - start]
        first += stop - start

    def between(start: int, stop: int) -> Tensor:
        """Keys of the tokens [start, stop), which lie in one range of this rank."""
        first, rows = next((first, rows) for (first, last), rows in held.items() if first <= start and stop <= last)
        return rows[start - first : stop - first]

    sent = sorted((move for move in units.moves if move.source == rank), key=lambda m: (m.target, m.start))
    received = sorted((move for move in units.moves if move.target == rank), key=lambda m: (m.source, m.start))
    sent_rows = [0] * communicator.size
    received_rows = [0] * communicator.size
    for move in sent:
        sent_rows[move.target] += move.stop - move.start
    for move in received:
        received_rows[move.source] += move.stop - move.start
    message = torch.cat([k_LKD[:0], *(between(move.start, move.stop) for move in sent)])
    answer = communicator.all_to_all_uneven(message, sent_rows, received_rows)

    parts = {}
    for move in received:
        parts[move.start], answer = answer.tensor_split([move.stop - move.start])
    sent_stops = {move.start: move.stop for move in sent}  # only the head of a range is ever sent
    for start, stop in sequence.ranges[rank]:
        begin = sent_stops.get(start, start)
        if begin < stop:
            parts[begin] = between(begin, stop)
    return torch.cat([k_LKD[:0], *(parts[start] for start in sorted(parts))])
