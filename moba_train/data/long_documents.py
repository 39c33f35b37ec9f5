"""Samples that lie inside one long document, so that every token has its whole context: for loss by position."""

from collections.abc import Sequence

import numpy as np

from moba_train.config.data import SourceConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.samples import Sample
from moba_train.data.shuffle import permutation
from moba_train.data.stream import DocumentPart
from moba_train.errors import DataError


class LongDocumentSamples:
    """Up to `sequences` samples of `seq_len` tokens, each inside one document.

    A sample is followed by at least one more token of its document, so that each of its tokens has a label. A document
    gives as many samples as fit into it, a short one gives none. The choice depends only on the corpora, `seq_len` and
    `seed`; corpora are pooled, their blend weights are ignored.

    `len()` is the number of samples; 0 if no document is long enough. Raises DataError for a damaged corpus.
    """

    def __init__(
        self, sources: Sequence[SourceConfig], seq_len: int, sequences: int, seed: int, vocab_size: int
    ) -> None:
        self.seq_len = seq_len
        self._vocab_size = vocab_size
        self._corpora = _corpora(sources)
        for corpus in self._corpora:
            corpus.check_vocabulary(vocab_size)
        places = _places(self._corpora, seq_len)
        self._places = [places[index] for index in permutation(len(places), (seed, seq_len))[:sequences]]

    def __len__(self) -> int:
        return len(self._places)

    def sample(self, index: int) -> Sample:
        """Sample `index`, a single document part. Raises DataError when a token id is not below the vocabulary size."""
        corpus, document, start = self._places[index]
        dataset = self._corpora[corpus]
        stop = start + self.seq_len
        tokens = dataset.document(document, start, stop + 1).astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise DataError(
                f"corpus {dataset.prefix}: document {document} has token ids {tokens.min()}..{tokens.max()}, but "
                f"model.vocab_size is {self._vocab_size}; use the tokenizer that the model was trained with"
            )
        return Sample(
            tokens=tokens[:-1],
            labels=tokens[1:],
            loss_weight=np.ones(self.seq_len, dtype=np.float32),
            lengths=[self.seq_len],
            parts=[DocumentPart(dataset.prefix, document, start, stop)],
        )


def count_samples(sources: Sequence[SourceConfig], seq_len: int) -> int:
    """How many samples of `seq_len` tokens the documents of `sources` give. Raises DataError for a damaged corpus."""
    return len(_places(_corpora(sources), seq_len))


def _corpora(sources: Sequence[SourceConfig]) -> list[IndexedDataset]:
    return [IndexedDataset(path) for path in dict.fromkeys(source.path for source in sources)]


def _places(corpora: Sequence[IndexedDataset], seq_len: int) -> list[tuple[int, int, int]]:
    """Corpus, document and first token of every sample."""
    return [
        (corpus, document, start)
        for corpus, dataset in enumerate(corpora)
        for document in np.flatnonzero(dataset.document_lengths > seq_len).tolist()
        for start in range(0, int(dataset.document_lengths[document]) - seq_len, seq_len)
    ]
