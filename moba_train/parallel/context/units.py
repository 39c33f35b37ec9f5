"""Units of an attention that straddle shards, made whole by their owners.

A unit is `LocalAttention.alignment` tokens, counted from each document's start; its owner is the rank of its first
token. Summaries would differ in their last bits if parts of a unit were summarised apart and added, and near-ties would
then be chosen otherwise than on one device.

Shape suffixes: L rows of a shard, U tokens in whole units, K key/value heads, D head width.
"""

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.call import AttentionCall
from moba_train.attention.protocol import Layout, TokenRange, TokenRanges
from moba_train.parallel.context.comm import Peers
from moba_train.parallel.context.layout import SequenceLayout


@dataclass(frozen=True)
class Move:
    """Tokens [start, stop), held by `source`, continue a unit of `target`."""

    start: int
    stop: int
    source: int
    target: int


@dataclass(frozen=True)
class WholeUnits:
    """The units each rank owns, and what must move for their owners to have them whole."""

    runs: tuple[TokenRanges, ...]
    """Tokens of each rank's own units."""
    moves: tuple[Move, ...]
    """Ascending; the same on every rank, so that all know all message sizes."""

    @classmethod
    def of(cls, sequence: SequenceLayout, edges: tuple[int, ...], size: int) -> "WholeUnits":
        """Units of `size` tokens in documents with these boundaries; all ranks together hold the whole sequence."""
        assert sequence.together is None
        held = sorted((start, stop, rank) for rank, runs in enumerate(sequence.runs) for start, stop in runs)
        own: list[list[TokenRange]] = [[] for _ in sequence.runs]
        moves = []
        for start, stop, rank in held:
            begin, end = _unit_of(start, edges, size)
            first = start
            if begin < start:
                first = min(end, stop)
                moves.append(Move(start, first, rank, sequence.owner(begin)))
            if first < stop:
                own[rank].append(TokenRange(first, _unit_of(stop - 1, edges, size)[1]))
        return cls(tuple(map(tuple, own)), tuple(moves))


def _unit_of(token: int, edges: tuple[int, ...], size: int) -> tuple[int, int]:
    """The unit of a token: (its first token, one past its last)."""
    document = bisect_right(edges, token) - 1
    begin = token - (token - edges[document]) % size
    return begin, min(begin + size, edges[document + 1])


def all_summaries(k_LKD: Tensor, call: AttentionCall, sequence: SequenceLayout, peers: Peers) -> Tensor | None:
    """What `summarize` gives for all keys of the sequence, bit for bit, from each rank's shard of keys."""
    units = _whole_units(call.layout, sequence, call.attention.alignment)
    keys_UKD = _keys_of_own_units(k_LKD, units, sequence, peers)
    summaries = call.part(None, units.runs[peers.rank]).summarize(keys_UKD)
    if summaries is not None:
        peers.sum(summaries)  # exact: each row is zero on all ranks but one
    return summaries


def _whole_units(layout: Layout, sequence: SequenceLayout, size: int) -> WholeUnits:
    if size == 1:
        return WholeUnits(sequence.runs, ())
    return layout.cached(("whole units", sequence, size), lambda: WholeUnits.of(sequence, layout.edges, size))


def _keys_of_own_units(k_LKD: Tensor, units: WholeUnits, sequence: SequenceLayout, peers: Peers) -> Tensor:
    """Keys [U, K, D] of the tokens in `units.runs` of this rank."""
    rank = peers.rank
    if not units.moves:
        return k_LKD[: sequence.tokens(rank)]

    held: dict[tuple[int, int], Tensor] = {}
    first = 0
    for start, stop in sequence.runs[rank]:
        held[start, stop] = k_LKD[first : first + stop - start]
        first += stop - start

    def between(start: int, stop: int) -> Tensor:
        """The rows of tokens [start, stop), which lie in one run of this rank."""
        rows, run = next((rows, run) for run, rows in held.items() if run[0] <= start and stop <= run[1])
        return rows[start - run[0] : stop - run[0]]

    sent = sorted((move for move in units.moves if move.source == rank), key=lambda m: (m.target, m.start))
    received = sorted((move for move in units.moves if move.target == rank), key=lambda m: (m.source, m.start))
    sent_rows, received_rows = [0] * peers.size, [0] * peers.size
    for move in sent:
        sent_rows[move.target] += move.stop - move.start
    for move in received:
        received_rows[move.source] += move.stop - move.start
    message = torch.cat([k_LKD[:0], *(between(move.start, move.stop) for move in sent)])
    answer = peers.all_to_all_uneven(message, sent_rows, received_rows)

    parts = {}
    for move in received:
        parts[move.start], answer = answer.tensor_split([move.stop - move.start])
    ends_of_heads = {move.start: move.stop for move in sent}
    for start, stop in sequence.runs[rank]:
        begin = ends_of_heads.get(start, start)
        if begin < stop:
            parts[begin] = between(begin, stop)
    return torch.cat([k_LKD[:0], *(parts[start] for start in sorted(parts))])
