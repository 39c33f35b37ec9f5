"""One corpus, or its documents of some lengths, as an endless stream of tokens, addressed by position."""

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moba_train.data.indexed import IndexedDataset
from moba_train.data.shuffle import permutation


class Extent(NamedTuple):
    """Tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int


class DocumentStream:
    """The documents of a corpus, in a new random order every epoch, one after the other without end.

    Epoch e is a permutation that depends on `seed`, the corpus' fingerprint, the range of lengths and e alone: neither
    on the place the corpus is stored at nor on what was read before.

    min_length    only documents of at least so many tokens are read
    below_length  and only those of fewer than so many; None: no limit
    """

    def __init__(
        self, dataset: IndexedDataset, seed: int, min_length: int = 0, below_length: int | None = None
    ) -> None:
        self.dataset = dataset
        self.fingerprint = dataset.fingerprint()
        self.entropy: tuple[int, ...] = (seed, int(self.fingerprint[:16], 16))
        """What every random choice about this stream is seeded with."""
        self._chosen: npt.NDArray[np.int64] | None = None
        self.documents, self.tokens = dataset.documents, dataset.tokens
        """How many documents and tokens an epoch has."""
        if min_length or below_length is not None:
            self.entropy += (min_length, below_length or 0)
            self._chosen = dataset.documents_of_length(min_length, below_length)
            self.documents = len(self._chosen)
            self.tokens = int(dataset.document_lengths[self._chosen].sum())
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Documents in the order of `epoch` [documents], and where each begins in it [documents + 1]."""
        order = permutation(self.documents, [*self.entropy, epoch])
        if self._chosen is not None:
            order = self._chosen[order]
        begins = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(self.dataset.document_lengths[order], out=begins[1:])
        return order, begins

    def window(self, offset: int, length: int) -> list[Extent]:
        """`length` tokens from token `offset` of the stream on, as the document pieces they are made of.

        The stream must have tokens. O(log documents) once the epoch's order is known.
        """
        pieces: list[Extent] = []
        while length > 0:
            epoch, within = divmod(offset, self.tokens)
            order, begins = self._epoch(epoch)
            place = int(np.searchsorted(begins, within, side="right")) - 1
            start = within - int(begins[place])
            count = min(length, int(begins[place + 1]) - within)
            pieces.append(Extent(int(order[place]), start, start + count))
            offset += count
            length -= count
        return pieces

    def documents_between(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The documents whose first token has a position in [begin, end), in order, int64 [n]; none is empty."""
        found = []
        for epoch in range(begin // self.tokens, -(-end // self.tokens)):
            order, begins = self._epoch(epoch)
            low, high = np.searchsorted(begins[:-1], (begin - epoch * self.tokens, end - epoch * self.tokens))
            documents = order[low:high]
            found.append(documents[self.dataset.document_lengths[documents] > 0])
        return np.concatenate(found)

    def next_begin(self, offset: int) -> int:
        """The first position >= `offset` at which a document begins."""
        (piece,) = self.window(offset, 1)
        return offset if piece.start == 0 else offset + int(self.dataset.document_lengths[piece.document]) - piece.start
