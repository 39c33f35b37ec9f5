"""Packing a stream of documents into samples of `seq_len` tokens: concatenated and chopped, or by best fit.

With either packer, sample `ordinal` is a pure function of the stream, the position `start` where reading begins, and
`ordinal`. No document is kept in memory, and document lengths only for a few groups of samples.

Best fit packs whole documents, longest first, each into the sample that it leaves the least room in
(best-fit-decreasing bin packing; Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830).
"""

import bisect
import functools
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from moba_train.data.stream import DocumentPart, DocumentStream, permutation


class Packing(NamedTuple):
    """Assignment of items to bins."""

    order: npt.NDArray[np.int64]
    """int64 [items]: item indices bin by bin, ascending within each bin."""
    begins: npt.NDArray[np.int64]
    """int64 [bins + 1]: offset of each bin in `order`; the last entry is the number of items."""

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.begins) - 1

    def items(self, bin_index: int) -> npt.NDArray[np.int64]:
        """Item indices of one bin, int64 [n]."""
        return self.order[self.begins[bin_index] : self.begins[bin_index + 1]]


def best_fit(lengths: npt.ArrayLike, capacity: int) -> Packing:
    """Pack items of these lengths, int [items], into bins of `capacity` by best-fit-decreasing.

    A pure function of its arguments; items of equal length are placed in their order. Finding the tightest bin takes
    O(log capacity). Raises ValueError when a length
    is not in [1, capacity]; longer documents are split by `split_documents` first.
    """
    length = np.asarray(lengths, dtype=np.int64)
    if length.size and not 1 <= length.min() <= length.max() <= capacity:
        raise ValueError(f"lengths are {length.min()}..{length.max()}; a bin of {capacity} takes 1..{capacity}")
    by_length = np.argsort(-length, kind="stable")
    values, counts = np.unique(length, return_counts=True)
    bins_with: dict[int, list[int]] = {}
    capacities = _IntegerSet(capacity + 1)
    run_bins: list[int] = []
    run_lengths: list[int] = []
    bins = 0
    for value, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            room = capacities.first_from(value)
            if room is None:
                room = capacity
                chosen = bins
                bins += 1
            else:
                same_room = bins_with[room]
                chosen = same_room.pop()
                if not same_room:
                    capacities.discard(room)
            # The rest of the tightest bin is tighter still, so the next items of this length also go there.
            placed = min(count, room // value)
            run_bins.append(chosen)
            run_lengths.append(placed)
            count -= placed
            if left := room - placed * value:
                bins_with.setdefault(left, []).append(chosen)
                capacities.add(left)
    item_bins = np.empty(len(length), dtype=np.int64)
    item_bins[by_length] = np.repeat(np.array(run_bins, dtype=np.int64), run_lengths)
    begins = np.zeros(bins + 1, dtype=np.int64)
    np.cumsum(np.bincount(item_bins, minlength=bins), out=begins[1:])
    return Packing(np.argsort(item_bins, kind="stable"), begins)


def split_documents(lengths: npt.ArrayLike, capacity: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Document and first token of each part of at most `capacity` tokens that documents of these lengths are split
    into.

    Both are int64 [parts], in document order. A document longer than `capacity` becomes full parts and a rest; an empty
    one becomes no part.
    """
    parts = -(-np.asarray(lengths, dtype=np.int64) // capacity)
    document = np.repeat(np.arange(len(parts)), parts)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    return document, (np.arange(len(document)) - first) * capacity


class _IntegerSet:
    """A set of integers in [0, size) that finds the next larger member in O(log size).

    Level 0 has one bit per integer, in words of 64 bits; each level above has one bit per nonzero word of the level
    below.
    """

    def __init__(self, size: int) -> None:
        self._levels: list[list[int]] = []
        while not self._levels or size > 1:
            size = -(-size // 64)
            self._levels.append([0] * size)

    def add(self, value: int) -> None:
        for level in self._levels:
            level[value >> 6] |= 1 << (value & 63)
            value >>= 6

    def discard(self, value: int) -> None:
        for level in self._levels:
            level[value >> 6] &= ~(1 << (value & 63))
            value >>= 6
            if level[value]:
                return

    def first_from(self, value: int) -> int | None:
        """The smallest member >= `value`, or None."""
        for depth, level in enumerate(self._levels):
            word = value >> 6
            if word < len(level) and (rest := level[word] >> (value & 63)):
                value += _lowest_bit(rest)
                for below in reversed(self._levels[:depth]):
                    value = value << 6 | _lowest_bit(below[value])
                return value
            value = word + 1
        return None


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


SHUFFLE_GROUP = 4096
"""Consecutive samples of concatenated documents that are shuffled together."""
PACKING_GROUP = 512
"""Best-fit packing takes documents worth this many samples at a time. The emptiest sample of a group is half empty on
average, so larger groups pad less; smaller groups are packed sooner. With this size, Python files are padded by 0.19 %
at 2,048 tokens and by 0.10 % at 131,072 (benchmarks/results/packing.json)."""


class Packer(Protocol):
    """Interface to the samples of one stream."""

    def parts(self, ordinal: int) -> list[DocumentPart]:
        """Document parts of sample `ordinal`, at most `seq_len` tokens in total."""

    def position_after(self, count: int) -> int:
        """Stream position to continue from once the first `count` samples are consumed; nothing is read twice."""

    def padding_fraction(self, count: int) -> float:
        """Fraction of padding in the first `count` samples and in those shuffled together with them."""


class ConcatPacker:
    """Chops the stream into samples of `seq_len` tokens, regardless of the ends of documents.

    Of documents that would fit into a sample, it splits 35 % at 2,048 tokens and 3.5 % at 131,072
    (benchmarks/results/packing.json, Python files).

    Samples are shuffled in groups of `SHUFFLE_GROUP`, because one long document would otherwise fill whole batches. The
    last group is cut short at `count` samples, so that a complete stage reads the stream without a gap.
    """

    def __init__(self, stream: DocumentStream, start: int, seq_len: int, count: int) -> None:
        self._stream = stream
        self._start = start
        self._seq_len = seq_len
        self._count = count
        self._order = functools.lru_cache(maxsize=4)(self._shuffle)

    def _shuffle(self, group: int) -> npt.NDArray[np.int64]:
        first = group * SHUFFLE_GROUP
        count = min(SHUFFLE_GROUP, self._count - first)
        return first + permutation(count, (*self._stream.entropy, self._start, group))

    def parts(self, ordinal: int) -> list[DocumentPart]:
        """Document parts of sample `ordinal`, exactly `seq_len` tokens in total."""
        group, place = divmod(ordinal, SHUFFLE_GROUP)
        return self._stream.parts(self._start + int(self._order(group)[place]) * self._seq_len, self._seq_len)

    def position_after(self, count: int) -> int:
        """End of the group that sample `count - 1` lies in: unread samples of that group are skipped."""
        groups = -(-count // SHUFFLE_GROUP)
        return self._start + min(groups * SHUFFLE_GROUP, self._count) * self._seq_len

    def padding_fraction(self, count: int) -> float:
        """0, because concatenation fills every sample."""
        return 0.0


class BestFitPacker:
    """Packs whole documents into samples. Only documents longer than `seq_len` are split, into full samples and a rest.

    Group g holds the documents that begin in the g-th interval of the stream. An interval is as long as `PACKING_GROUP`
    samples, or an epoch if that is shorter. The samples of a group are shuffled. The group of a sample is known once
    the groups before it are packed, so a resumed stage first packs the lengths of the documents it has consumed, which
    takes 4 to 12 microseconds a document (benchmarks/results/packing.json).
    """

    def __init__(self, stream: DocumentStream, start: int, seq_len: int) -> None:
        self._stream = stream
        self._start = start
        self._seq_len = seq_len
        self._interval = min(PACKING_GROUP * seq_len, max(stream.tokens, seq_len))
        self._ends: list[int] = []
        self._tokens: list[int] = []
        self._group = functools.lru_cache(maxsize=3)(self._pack)

    def _pack(self, group: int) -> tuple[list[npt.NDArray[np.int64]], Packing, npt.NDArray[np.int64]]:
        """Document, start and stop of each part, int64 [parts]; their packing; and the order in which the group's
        samples are read, int64 [samples]."""
        begin = self._start + group * self._interval
        documents = self._stream.documents_between(begin, begin + self._interval)
        lengths = self._stream.lengths[documents]
        index, start = split_documents(lengths, self._seq_len)
        stop = np.minimum(start + self._seq_len, lengths[index])
        packing = best_fit(stop - start, self._seq_len)
        order = permutation(packing.bins, (*self._stream.entropy, self._start, group, self._seq_len))
        return [documents[index], start, stop], packing, order

    def _find(self, ordinal: int) -> tuple[int, int]:
        """Group that holds sample `ordinal`, and the sample's index in it."""
        while not self._ends or self._ends[-1] <= ordinal:
            (_, start, stop), packing, _ = self._group(len(self._ends))
            self._ends.append((self._ends[-1] if self._ends else 0) + packing.bins)
            self._tokens.append((self._tokens[-1] if self._tokens else 0) + int((stop - start).sum()))
        group = bisect.bisect_right(self._ends, ordinal)
        return group, ordinal - (self._ends[group - 1] if group else 0)

    def parts(self, ordinal: int) -> list[DocumentPart]:
        """Document parts of sample `ordinal`; the caller pads the rest of `seq_len`."""
        group, place = self._find(ordinal)
        columns, packing, order = self._group(group)
        items = packing.items(int(order[place]))
        rows = zip(*(column[items].tolist() for column in columns), strict=True)
        return [DocumentPart(self._stream.dataset.prefix, *row) for row in rows]

    def position_after(self, count: int) -> int:
        """End of the group that sample `count - 1` lies in: unread documents of that group are skipped."""
        if not count:
            return self._start
        group, _ = self._find(count - 1)
        return self._stream.next_begin(self._start + (group + 1) * self._interval)

    def padding_fraction(self, count: int) -> float:
        """Fraction of padding in all groups up to the one that sample `count - 1` lies in."""
        if not count:
            return 0.0
        group, _ = self._find(count - 1)
        return 1 - self._tokens[group] / (self._ends[group] * self._seq_len)
