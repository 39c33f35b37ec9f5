"""Which tokens of a corpus carry loss, and how much each counts.

Beside the corpus PREFIX stands the corpus PREFIX.loss (PREFIX.loss.bin, PREFIX.loss.idx) in the same format: for each
token of each document one byte, 1 when the token is to be predicted with loss, else 0. A corpus without one carries
loss everywhere; a corpus whose PREFIX.json says `"loss_mask": true` is refused without it.
"""

import functools
from typing import Literal

import numpy as np
import numpy.typing as npt

from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.errors import DataError

LossNorm = Literal["token", "sequence"]


def mask_prefix(prefix: str) -> str:
    """Prefix of the mask that belongs to corpus `prefix`."""
    return f"{prefix}.loss"


class LossWeights:
    """The weights of a corpus' tokens in the loss.

    norm  token: 1 for each token with loss; sequence: 1 / the document's number of such tokens, so that a document's
          weights, wherever it is cut, add up to 1

    Raises DataError when the mask is missing or does not fit the corpus.
    """

    def __init__(self, corpus: IndexedDataset, norm: LossNorm) -> None:
        self._corpus, self._norm = corpus, norm
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
                f"{prefix}.bin beside the corpus"
            )
        self._count = functools.lru_cache(maxsize=1024)(self._loss_tokens)

    @property
    def fingerprint(self) -> str:
        """To be added to the corpus' own: a run does not go on when a mask appears or vanishes."""
        return "" if self.mask is None else "+loss"

    def _loss_tokens(self, document: int) -> int:
        """Tokens of a document that carry loss. Nothing precedes the first, so that it cannot be predicted."""
        length = int(self._corpus.document_lengths[document])
        if self.mask is None:
            return max(length - 1, 0)
        return int(np.count_nonzero(self.mask.document(document)[1:]))

    def of(self, document: int, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Weights of predicting tokens [start, stop) of a document, float32 [stop - start]; 1 <= start."""
        if self.mask is None:
            weights = np.ones(stop - start, dtype=np.float32)
        else:
            weights = (self.mask.document(document, start, stop) != 0).astype(np.float32)
        if self._norm == "sequence" and weights.any():
            weights /= self._count(document)
        return weights
