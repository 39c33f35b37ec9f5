"""One corpus as an endless stream of tokens, addressed by position."""

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moba_train.data.indexed import IndexedDataset
from moba_train.data.shuffle import permutation


class Piece(NamedTuple):
    """Consecutive tokens of one document."""

    document: int
    start: int
    """Index of the first token in its document."""
    tokens: npt.NDArray[Any]


class DocumentStream:
    """The documents of a corpus, in a new random order every epoch, one after the other without end.

    Epoch e is a permutation that depends on `seed`, the corpus' fingerprint and e alone: neither on the place the
    corpus is stored at nor on what was read before.
    """

    def __init__(self, dataset: IndexedDataset, seed: int) -> None:
        self.dataset = dataset
        self.fingerprint = dataset.fingerprint()
        self.entropy = (seed, int(self.fingerprint[:16], 16))
        """What every random choice about this stream is seeded with."""
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Documents in the order of `epoch` [documents], and where each begins in it [documents + 1]."""
        order = permutation(self.dataset.documents, [*self.entropy, epoch])
        begins = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(self.dataset.document_lengths[order], out=begins[1:])
        return order, begins

    def window(self, offset: int, length: int) -> list[Piece]:
        """`length` tokens from token `offset` of the stream on, as the document pieces they are made of.

        The corpus must have tokens. O(log documents) once the epoch's order is known.
        """
        pieces: list[Piece] = []
        while length > 0:
            epoch, within = divmod(offset, self.dataset.tokens)
            order, begins = self._epoch(epoch)
            place = int(np.searchsorted(begins, within, side="right")) - 1
            start = within - int(begins[place])
            count = min(length, int(begins[place + 1]) - within)
            document = int(order[place])
            pieces.append(Piece(document, start, self.dataset.document(document, start, start + count)))
            offset += count
            length -= count
        return pieces
