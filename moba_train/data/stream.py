"""One corpus, or a length bucket of it, as an endless stream of tokens in random order, addressed by position."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moba_train.data.indexed import IndexedDataset


def permutation(count: int, entropy: Sequence[int]) -> npt.NDArray[np.int64]:
    """Random order of 0 ... count - 1, int64 [count]: a pure function of the non-negative numbers `entropy`, equal with
    every version of numpy."""
    # Raw PCG64 output and SeedSequence never change between numpy versions; Generator.permutation may (NEP 19).
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(keys, kind="stable")


class DocumentPart(NamedTuple):
    """Tokens [start, stop) of one document of a corpus."""

    source: str
    """Prefix of the corpus."""
    document: int
    start: int
    stop: int


class DocumentStream:
    """The documents of a corpus, concatenated without end, in a new random order every epoch.

    The order of epoch e is a permutation that depends only on `seed`, the corpus' index, the range of lengths and e. It
    depends neither on the place of the corpus nor on earlier reads.

    min_length: tokens of the shortest document that is read
    below_length: only documents of fewer tokens are read; None: no limit
    most: tokens of a document that are read, from its beginning; None: all
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        seed: int,
        min_length: int = 0,
        below_length: int | None = None,
        most: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.lengths = dataset.document_lengths if most is None else np.minimum(dataset.document_lengths, most)
        """int64 [documents of the corpus]: tokens of each that are read."""
        # By content, not by path: a copy of the corpus elsewhere is read in the same order.
        self.entropy: tuple[int, ...] = (seed, int(dataset.fingerprint.index[:16], 16))
        """Seed of every random choice about this stream."""
        self._selected: npt.NDArray[np.int64] | None = None
        self.documents = dataset.documents
        """Documents in an epoch."""
        self.tokens = int(self.lengths.sum())
        """Tokens in an epoch."""
        if min_length or below_length is not None:
            self.entropy += (min_length, below_length or 0)
            self._selected = dataset.documents_of_length(min_length, below_length)
            self.documents = len(self._selected)
            self.tokens = int(self.lengths[self._selected].sum())
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Documents in the order of `epoch`, int64 [documents], and the position in the epoch at which each of them
        begins, int64 [documents + 1]."""
        order = permutation(self.documents, [*self.entropy, epoch])
        if self._selected is not None:
            order = self._selected[order]
        begins = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(self.lengths[order], out=begins[1:])
        return order, begins

    def parts(self, offset: int, length: int) -> list[DocumentPart]:
        """Document parts that make up tokens [offset, offset + length) of the stream.

        The stream must have tokens. O(log documents) once the epoch's order is known.
        """
        parts: list[DocumentPart] = []
        while length > 0:
            epoch, within = divmod(offset, self.tokens)
            order, begins = self._epoch(epoch)
            place = int(np.searchsorted(begins, within, side="right")) - 1
            start = within - int(begins[place])
            count = min(length, int(begins[place + 1]) - within)
            parts.append(DocumentPart(self.dataset.prefix, int(order[place]), start, start + count))
            offset += count
            length -= count
        return parts

    def documents_between(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Documents that begin at a position in [begin, end), in stream order, int64 [n]; empty ones are left out."""
        found = []
        for epoch in range(begin // self.tokens, -(-end // self.tokens)):
            order, begins = self._epoch(epoch)
            low, high = np.searchsorted(begins[:-1], (begin - epoch * self.tokens, end - epoch * self.tokens))
            documents = order[low:high]
            found.append(documents[self.lengths[documents] > 0])
        return np.concatenate(found)

    def next_begin(self, offset: int) -> int:
        """The first position >= `offset` at which a document begins."""
        (part,) = self.parts(offset, 1)
        return offset if part.start == 0 else offset + int(self.lengths[part.document]) - part.start
