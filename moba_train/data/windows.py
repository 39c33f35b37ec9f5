"""Cutting a stream of documents into samples of `seq_len` tokens: concatenated and chopped, or packed by best fit.

Either way sample `ordinal` is a pure function of the stream, the position `start` it is read from, and its number; no
document is held in memory, and of their lengths no more than those of a few groups.
"""

import bisect
import functools
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moba_train.data.packing import Packing, best_fit, cut
from moba_train.data.shuffle import permutation
from moba_train.data.stream import DocumentStream, Extent

SHUFFLED_WINDOWS = 4096
PACKED_WINDOWS = 512
"""Samples' worth of documents that are packed together. The emptiest sample of a group is half empty on average, so
that more of them pad less; fewer are packed sooner."""


class Windows(Protocol):
    """The samples of one stream."""

    def extents(self, ordinal: int) -> list[Extent]:
        """The document pieces of sample `ordinal`, at most `seq_len` tokens in all."""

    def position_after(self, count: int) -> int:
        """Where in the stream to go on once the first `count` samples are consumed: nothing is read twice."""

    def padding_fraction(self, count: int) -> float:
        """Share of the first `count` samples, and of those shuffled together with them, that is no document's."""


class ConcatenatedWindows:
    """Every `seq_len` tokens of the stream are a sample, wherever documents end.

    Windows are shuffled in groups of `SHUFFLED_WINDOWS`, because the windows of a long document would otherwise fill
    whole batches; the last of the `count` windows form as short a group as they must, so that a stage as a whole reads
    the stream without a gap.
    """

    def __init__(self, stream: DocumentStream, start: int, seq_len: int, count: int) -> None:
        self._stream, self._start, self._seq_len, self._count = stream, start, seq_len, count
        self._order = functools.lru_cache(maxsize=4)(self._shuffle)

    def _shuffle(self, group: int) -> npt.NDArray[np.int64]:
        first = group * SHUFFLED_WINDOWS
        count = min(SHUFFLED_WINDOWS, self._count - first)
        return first + permutation(count, (*self._stream.entropy, self._start, group))

    def extents(self, ordinal: int) -> list[Extent]:
        """The `seq_len` tokens of sample `ordinal`."""
        group, place = divmod(ordinal, SHUFFLED_WINDOWS)
        return self._stream.window(self._start + int(self._order(group)[place]) * self._seq_len, self._seq_len)

    def position_after(self, count: int) -> int:
        """In the middle of a stage the end of the group being read: some of its windows may go unread."""
        groups = -(-count // SHUFFLED_WINDOWS)
        return self._start + min(groups * SHUFFLED_WINDOWS, self._count) * self._seq_len

    def padding_fraction(self, count: int) -> float:
        """0: windows are full."""
        return 0.0


class BestFitWindows:
    """Whole documents packed into samples; only those longer than `seq_len` are cut, into full samples and a rest.

    Group g is made of the documents that begin in the g-th stretch of the stream, as long as `PACKED_WINDOWS` samples
    (or an epoch, if that is shorter); its samples are shuffled. Which group a sample lies in is known once the groups
    before it are counted, so that a resumed stage first packs the lengths of what it consumed before.
    """

    def __init__(self, stream: DocumentStream, start: int, seq_len: int) -> None:
        self._stream, self._start, self._seq_len = stream, start, seq_len
        self._stretch = min(PACKED_WINDOWS * seq_len, max(stream.tokens, seq_len))
        self._ends: list[int] = []
        self._tokens: list[int] = []
        self._group = functools.lru_cache(maxsize=3)(self._pack)

    def _pack(self, group: int) -> tuple[list[npt.NDArray[np.int64]], Packing, npt.NDArray[np.int64]]:
        """Document, start and stop of each piece [pieces], their packing, and the order its samples are read in."""
        begin = self._start + group * self._stretch
        documents = self._stream.documents_between(begin, begin + self._stretch)
        lengths = self._stream.dataset.document_lengths[documents]
        piece, first = cut(lengths, self._seq_len)
        stop = np.minimum(first + self._seq_len, lengths[piece])
        packing = best_fit(stop - first, self._seq_len)
        order = permutation(packing.bins, (*self._stream.entropy, self._start, group, self._seq_len))
        return [documents[piece], first, stop], packing, order

    def _find(self, ordinal: int) -> tuple[int, int]:
        """The group that sample `ordinal` lies in, and its place there."""
        while not self._ends or self._ends[-1] <= ordinal:
            (_, first, stop), packing, _ = self._group(len(self._ends))
            self._ends.append((self._ends[-1] if self._ends else 0) + packing.bins)
            self._tokens.append((self._tokens[-1] if self._tokens else 0) + int((stop - first).sum()))
        group = bisect.bisect_right(self._ends, ordinal)
        return group, ordinal - (self._ends[group - 1] if group else 0)

    def extents(self, ordinal: int) -> list[Extent]:
        """The pieces of sample `ordinal`; what they leave of `seq_len` is to be padded."""
        group, place = self._find(ordinal)
        pieces, packing, order = self._group(group)
        chosen = packing.items(int(order[place]))
        return [Extent(*piece) for piece in zip(*(column[chosen].tolist() for column in pieces), strict=True)]

    def position_after(self, count: int) -> int:
        """The end of the group being read: some of its documents may go unread."""
        if not count:
            return self._start
        group, _ = self._find(count - 1)
        return self._stream.next_begin(self._start + (group + 1) * self._stretch)

    def padding_fraction(self, count: int) -> float:
        """Of the groups that the samples lie in."""
        if not count:
            return 0.0
        group, _ = self._find(count - 1)
        return 1 - self._tokens[group] / (self._ends[group] * self._seq_len)
