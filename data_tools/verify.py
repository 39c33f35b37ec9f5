"""Checking every byte of a corpus."""

import hashlib

from data_tools.progress import ByteProgress
from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.data.loss_mask import LossWeights
from moba_train.errors import DataError

BLOCK_TOKENS = 8 << 20
"""Tokens that are read at a time."""


def verify_corpus(prefix: str, vocab_size: int | None) -> tuple[IndexedDataset, int | None]:
    """Check tables, counts, token ids and bytes of a corpus; returns it with the vocabulary size used for the check.

    The vocabulary size is `vocab_size` or else that of the sidecar; without either, only negative ids are found.
    Changed bytes are found if the sidecar has the SHA-256 of the files. A loss mask is checked with its corpus. Raises
    DataError at the first problem.
    """
    corpus = IndexedDataset(prefix)
    info = corpus.info or {}
    for name, found in (("documents", corpus.documents), ("tokens", corpus.tokens)):
        if info.get(name, found) != found:
            raise DataError(
                f"corpus {prefix}: {prefix}.json says {info[name]} {name}, but there are {found}; make the corpus again"
            )
    _ = corpus.fingerprint  # compares PREFIX.idx with the sidecar
    limit = info.get("vocab_size") if vocab_size is None else vocab_size
    digest = hashlib.sha256()
    with ByteProgress(f"verify {prefix}", corpus_file(prefix, "bin").stat().st_size) as progress:
        for begin, tokens in corpus.blocks(BLOCK_TOKENS):
            digest.update(tokens.data)
            if outside := corpus.first_outside(begin, tokens, limit):
                document, offset, token = outside
                raise DataError(
                    f"corpus {prefix}: document {document} has token id {token} at offset {offset}; "
                    f"allowed: {'0 or more' if limit is None else f'0 to {limit - 1}'}"
                )
            progress.advance(tokens.nbytes, len(tokens))
    if info.get("bin_sha256", digest.hexdigest()) != digest.hexdigest():
        raise DataError(
            f"corpus {prefix}: {corpus_file(prefix, 'bin')} is not what was written: its SHA-256 is "
            f"{digest.hexdigest()[:12]}..., {prefix}.json says {info['bin_sha256'][:12]}...; make the corpus again"
        )
    if mask := LossWeights(corpus, "token").mask:
        verify_corpus(mask.prefix, 2)
    return corpus, limit
