"""Packing a stream of documents into samples of `seq_len` tokens: concatenated and chopped, or by best fit.

With either packer, sample `ordinal` is a pure function of the stream, the position `start` where reading begins, and
`ordinal`. No document is kept in memory, and document lengths only for a few groups of samples.
"""

import bisect
import functools
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moba_train.data.best_fit import Packing, best_fit, split_documents
from moba_train.data.shuffle import permutation
from moba_train.data.stream import DocumentPart, DocumentStream

SHUFFLE_GROUP = 4096
"""Consecutive samples of concatenated documents that are shuffled together."""
PACKING_GROUP = 512
"""Best-fit packing takes documents worth this many samples at a time. The emptiest sample of a group is half empty on
average, so larger groups pad less; smaller groups are packed sooner."""


class Packer(Protocol):
    """The samples of one stream."""

    def parts(self, ordinal: int) -> list[DocumentPart]:
        """The document parts of sample `ordinal`, at most `seq_len` tokens in total."""

    def position_after(self, count: int) -> int:
        """The stream position to continue from once the first `count` samples are consumed; nothing is read twice."""

    def padding_fraction(self, count: int) -> float:
        """Fraction of padding in the first `count` samples and in those shuffled together with them."""


class ConcatPacker:
    """Chops the stream into samples of `seq_len` tokens, regardless of where documents end.

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
        """The document parts of sample `ordinal`, exactly `seq_len` tokens in total."""
        group, place = divmod(ordinal, SHUFFLE_GROUP)
        return self._stream.parts(self._start + int(self._order(group)[place]) * self._seq_len, self._seq_len)

    def position_after(self, count: int) -> int:
        """The end of the group that sample `count - 1` lies in: unread samples of that group are skipped."""
        groups = -(-count // SHUFFLE_GROUP)
        return self._start + min(groups * SHUFFLE_GROUP, self._count) * self._seq_len

    def padding_fraction(self, count: int) -> float:
        """Always 0: concatenation fills every sample."""
        return 0.0


class BestFitPacker:
    """Packs whole documents into samples. Only documents longer than `seq_len` are split, into full samples and a rest.

    Group g holds the documents that begin in the g-th interval of the stream. An interval is as long as `PACKING_GROUP`
    samples, or an epoch if that is shorter. The samples of a group are shuffled. The group of a sample is known once
    the groups before it are packed, so a resumed stage first packs the lengths of the documents it has consumed.
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
        """Document, start and stop of each part, int64 [parts]; how they are packed; and the order in which the group's
        samples are read, int64 [samples]."""
        begin = self._start + group * self._interval
        documents = self._stream.documents_between(begin, begin + self._interval)
        lengths = self._stream.dataset.document_lengths[documents]
        index, start = split_documents(lengths, self._seq_len)
        stop = np.minimum(start + self._seq_len, lengths[index])
        packing = best_fit(stop - start, self._seq_len)
        order = permutation(packing.bins, (*self._stream.entropy, self._start, group, self._seq_len))
        return [documents[index], start, stop], packing, order

    def _find(self, ordinal: int) -> tuple[int, int]:
        """The group that holds sample `ordinal`, and the sample's place in it."""
        while not self._ends or self._ends[-1] <= ordinal:
            (_, start, stop), packing, _ = self._group(len(self._ends))
            self._ends.append((self._ends[-1] if self._ends else 0) + packing.bins)
            self._tokens.append((self._tokens[-1] if self._tokens else 0) + int((stop - start).sum()))
        group = bisect.bisect_right(self._ends, ordinal)
        return group, ordinal - (self._ends[group - 1] if group else 0)

    def parts(self, ordinal: int) -> list[DocumentPart]:
        """The document parts of sample `ordinal`; the caller pads what they leave of `seq_len`."""
        group, place = self._find(ordinal)
        columns, packing, order = self._group(group)
        items = packing.items(int(order[place]))
        rows = zip(*(column[items].tolist() for column in columns), strict=True)
        return [DocumentPart(self._stream.dataset.prefix, *row) for row in rows]

    def position_after(self, count: int) -> int:
        """The end of the group that sample `count - 1` lies in: unread documents of that group are skipped."""
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
