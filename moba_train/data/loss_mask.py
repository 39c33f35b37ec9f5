"""Loss masks: the tokens of a corpus that carry loss, and their weights.

The mask of corpus PREFIX is a second corpus, PREFIX.loss (PREFIX.loss.bin, PREFIX.loss.idx), in the same format. It has
one byte for each token of each document: 0 if it is predicted without loss, 1 with loss, 1 + p with p percent of the
weight (`byte_of_weight`). Without a mask every token carries loss, but a corpus whose PREFIX.json says
`"loss_mask": true` is refused without its mask.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np
import numpy.typing as npt

from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.data.sidecar import Fingerprint
from moba_train.errors import DataError

LossNorm = Literal["token", "sequence"]


_WEIGHTS = np.ones(256, dtype=np.float32)
_WEIGHTS[0] = 0
_WEIGHTS[2:101] = np.arange(1, 100) / 100
"""Weight that each byte of a mask stands for."""


def byte_of_weight(weight: float) -> int:
    """Byte of a mask for a token's weight, 0 to 1, to the nearest percent; no weight above 0 becomes 0."""
    return round(weight) if weight in (0, 1) else 1 + min(max(round(100 * weight), 1), 99)


def mask_prefix(prefix: str) -> str:
    """Prefix of the mask of corpus `prefix`."""
    return f"{prefix}.loss"


class LossWeights:
    """Weights of a corpus' tokens in the loss.

    norm: "token" for the weights of the mask; "sequence" for these / (their sum over the document), so that those of a
        document add up to 1, even if it is split
    most: tokens of a document that are read, from its beginning; None: all

    Raises DataError when the mask is missing or does not fit the corpus.
    """

    def __init__(self, corpus: IndexedDataset, norm: LossNorm, most: int | None = None) -> None:
        self._corpus = corpus
        self._norm = norm
        self._labels = slice(1, None if most is None else most + 1)
        self.mask: IndexedDataset | None = None
        prefix = mask_prefix(corpus.prefix)
        if corpus_file(prefix, "idx").exists():
            self.mask = IndexedDataset(prefix)
            if not np.array_equal(self.mask.document_lengths, corpus.document_lengths):
                raise DataError(
                    f"loss mask {prefix} has documents of other lengths than corpus {corpus.prefix}; make both again"
                )
        elif (corpus.info or {}).get("loss_mask"):
            raise DataError(
                f"corpus {corpus.prefix} was made with a loss mask, but {prefix}.idx is missing; put it and "
                f"{prefix}.bin next to the corpus"
            )
        self._sum = functools.lru_cache(maxsize=1024)(self._weight_sum)

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the corpus with its mask."""
        mask = None if self.mask is None else self.mask.fingerprint
        return dataclasses.replace(self._corpus.fingerprint, mask=mask)

    def carries_loss(self, min_length: int, below_length: int | None) -> bool:
        """True if any token of the documents of this range of lengths carries loss. Reads masks up to the first one."""
        # A document of one token has no token with a predecessor.
        documents = self._corpus.documents_of_length(max(min_length, 2), below_length)
        if self.mask is None:
            return len(documents) > 0
        if (self.mask.info or {}).get("max_id") == 0:
            return False
        return any(self._weight_sum(int(document)) for document in documents)

    def _weight_sum(self, document: int) -> float:
        """Sum of the weights of a document's tokens. The first token has none: nothing precedes it."""
        length = int(self._corpus.document_lengths[document])
        if self.mask is None:
            return max(length - 1, 0)
        return float(_WEIGHTS[self.mask.document(document)[self._labels]].sum(dtype=np.float64))

    def long_conversations(self, min_length: int, below_length: int | None, seq_len: int) -> str:
        """Number of conversations among the documents of this range of lengths that are longer than `seq_len` tokens,
        in words; empty if none is, or the corpus has no mask and thus no conversations."""
        if self.mask is None:
            return ""
        long = self._corpus.documents_of_length(max(min_length, seq_len + 1), below_length)
        if not len(long):
            return ""
        every = len(self._corpus.documents_of_length(min_length, below_length))
        return (
            f"{len(long):,} of {every:,} conversations of {self._corpus.prefix} are longer than the {seq_len:,} tokens "
            f"of a sample, the longest has {int(self._corpus.document_lengths[long].max()):,}"
        )

    def slice(self, document: int, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Loss weights of tokens [start, stop) of a document as labels, float32 [stop - start]; start >= 1."""
        if self.mask is None:
            weights = np.ones(stop - start, dtype=np.float32)
        else:
            weights = _WEIGHTS[self.mask.document(document, start, stop)]
        if self._norm == "sequence" and weights.any():
            weights /= self._sum(document)
        return weights
