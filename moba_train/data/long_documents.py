"""Samples that lie inside one long document, so that every token has its whole context, for loss by position."""

from collections.abc import Mapping, Sequence

import numpy as np

from moba_train.config.data import SourceConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.samples import Sample
from moba_train.data.stream import DocumentPart, permutation
from moba_train.errors import DataError


class LongDocumentSamples:
    """Up to `sequences` samples of `seq_len` tokens, each inside one document.

    A sample is followed by at least one more token of its document, so that each of its tokens has a label. A document
    gives as many samples as fit into it. A short one gives none, and neither does one outside its source's `min_length`
    and `below_length`. The choice depends only on the corpora, their ranges of lengths, `seq_len` and `seed`; corpora
    are pooled, their blend weights are ignored.

    `len()` is the number of samples; 0 if no document is long enough. Raises DataError for a damaged corpus.
    """

    def __init__(
        self, sources: Sequence[SourceConfig], seq_len: int, sequences: int, seed: int, vocab_size: int
    ) -> None:
        self.seq_len = seq_len
        self._vocab_size = vocab_size
        self._corpora = _corpora(sources)
        for dataset in self._corpora.values():
            dataset.check_vocabulary(vocab_size)
        places = _places(sources, self._corpora, seq_len)
        self._places = [places[index] for index in permutation(len(places), (seed, seq_len))[:sequences]]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def documents(self) -> list[int]:
        """Number of the document that each sample lies in, from 0 in the order of the samples."""
        numbers: dict[tuple[str, int], int] = {}
        return [numbers.setdefault((corpus, document), len(numbers)) for corpus, document, _ in self._places]

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
    """Number of samples of `seq_len` tokens in the documents of `sources`. Raises DataError for a damaged corpus."""
    return len(_places(sources, _corpora(sources), seq_len))


def _corpora(sources: Sequence[SourceConfig]) -> dict[str, IndexedDataset]:
    return {path: IndexedDataset(path) for path in dict.fromkeys(source.path for source in sources)}


def _places(
    sources: Sequence[SourceConfig], corpora: Mapping[str, IndexedDataset], seq_len: int
) -> list[tuple[str, int, int]]:
    """Path of the corpus, document and first token of every sample."""
    return [
        (path, document, start)
        for path, dataset in corpora.items()
        for document in _long_documents(dataset, [source for source in sources if source.path == path], seq_len)
        for start in range(0, int(dataset.document_lengths[document]) - seq_len, seq_len)
    ]


def _long_documents(dataset: IndexedDataset, sources: Sequence[SourceConfig], seq_len: int) -> list[int]:
    """Documents of more than `seq_len` tokens whose length lies in the range of one of the corpus' `sources`,
    ascending."""
    asked = [
        dataset.documents_of_length(max(source.min_length or 0, seq_len + 1), source.below_length) for source in sources
    ]
    return np.unique(np.concatenate(asked)).tolist()
