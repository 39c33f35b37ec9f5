"""Checking a whole corpus, every token of it."""

import numpy as np

from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError


def verify_corpus(prefix: str, vocab_size: int | None) -> tuple[IndexedDataset, int | None]:
    """Check tables, counts and token ids of a corpus; gives it, and the vocabulary size its ids were checked against.

    That is `vocab_size`, or else the sidecar's; without either only negative ids are found. Raises DataError at the
    first thing that is wrong.
    """
    corpus = IndexedDataset(prefix)
    info = corpus.info or {}
    for name, found in (("documents", corpus.documents), ("tokens", corpus.tokens)):
        if info.get(name, found) != found:
            raise DataError(f"corpus {prefix}: {prefix}.json says {info[name]} {name}, but there are {found}")
    limit = info.get("vocab_size") if vocab_size is None else vocab_size
    for document in range(corpus.documents):
        tokens = corpus.document(document)
        bad = tokens < 0 if limit is None else (tokens < 0) | (tokens >= limit)
        if bad.any():
            offset = int(np.argmax(bad))
            raise DataError(
                f"corpus {prefix}: document {document} has token id {tokens[offset]} at offset {offset}; "
                f"ids must lie in [0, {'...' if limit is None else limit})"
            )
    return corpus, limit
