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

from moba_train.attention.protocol import Layout, LocalAttention, Runs
from moba_train.parallel.context.comm import Communicator
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

    runs: tuple[Runs, ...]
    """Tokens of each rank's own units."""
    moves: tuple[Move, ...]
    """Ascending; the same on every rank, so that all know all message sizes."""

    @classmethod
    def of(cls, sequence: SequenceLayout, edges: tuple[int, ...], size: int) -> "WholeUnits":
        """Units of `size` tokens in documents with these boundaries; all ranks together hold the whole sequence."""
        assert sequence.together is None
        held = sorted((start, stop, rank) for rank, runs in enumerate(sequence.runs) for start, stop in runs)
        own: list[list[tuple[int, int]]] = [[] for _ in sequence.runs]
        moves = []
        for start, stop, rank in held:
            begin, end = _unit_of(start, edges, size)
            first = start
            if begin < start:
                first = min(end, stop)
                moves.append(Move(start, first, rank, sequence.owner(begin)))
            if first < stop:
                own[rank].append((first, _unit_of(stop - 1, edges, size)[1]))
        return cls(tuple(map(tuple, own)), tuple(moves))


def _unit_of(token: int, edges: tuple[int, ...], size: int) -> tuple[int, int]:
    """The unit of a token: (its first token, one past its last)."""
    document = bisect_right(edges, token) - 1
    begin = token - (token - edges[document]) % size
    return begin, min(begin + size, edges[document + 1])


def all_summaries(
    k_LKD: Tensor, attention: LocalAttention, layout: Layout, sequence: SequenceLayout, communicator: Communicator
) -> Tensor | None:
    """What `attention.summarize` gives for all keys of the sequence, bit for bit, from each rank's shard of keys."""
    units = _whole_units(layout, sequence, attention.alignment)
    keys_UKD = _keys_of_own_units(k_LKD, units, sequence, communicator)
    summaries = attention.summarize(keys_UKD, layout.part(None, units.runs[communicator.rank]))
    if summaries is not None:
        communicator.all_reduce(summaries)  # exact: each row is zero on all ranks but one
    return summaries


def _whole_units(layout: Layout, sequence: SequenceLayout, size: int) -> WholeUnits:
    if size == 1:
        return WholeUnits(sequence.runs, ())
    key = ("whole units", sequence, size)
    if key not in layout.cache:
        layout.cache[key] = WholeUnits.of(sequence, layout.edges, size)
    units = layout.cache[key]
    assert isinstance(units, WholeUnits)
    return units


def _keys_of_own_units(
    k_LKD: Tensor, units: WholeUnits, sequence: SequenceLayout, communicator: Communicator
) -> Tensor:
    """Keys [U, K, D] of the tokens in `units.runs` of this rank."""
    rank = communicator.rank
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
    sent_rows, received_rows = [0] * communicator.size, [0] * communicator.size
    for move in sent:
        sent_rows[move.target] += move.stop - move.start
    for move in received:
        received_rows[move.source] += move.stop - move.start
    message = torch.cat([k_LKD[:0], *(between(move.start, move.stop) for move in sent)])
    answer = communicator.all_to_all_uneven(message, sent_rows, received_rows)

    parts = {}
    for move in received:
        parts[move.start], answer = answer.tensor_split([move.stop - move.start])
    ends_of_heads = {move.start: move.stop for move in sent}
    for start, stop in sequence.runs[rank]:
        begin = ends_of_heads.get(start, start)
        if begin < stop:
            parts[begin] = between(begin, stop)
    return torch.cat([k_LKD[:0], *(parts[start] for start in sorted(parts))])
