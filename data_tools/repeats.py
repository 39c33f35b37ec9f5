"""How far back text repeats itself: what a model that copies gains from a longer context, without a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from moba_train.config.base import format_count
from moba_train.data.indexed import IndexedDataset

DISTANCES = (512, 2048, 8192, 32768, 131072)
"""Upper bounds of the ranges of distances, in tokens."""
MOST_TOKENS = 16 << 20
"""Tokens that tables are made from, of larger corpora."""


def repeat_shares(corpus: IndexedDataset, length: int, most_tokens: int) -> npt.NDArray[np.float64]:
    """Shares of the tokens that repeat an earlier place of their document, by the distance to the nearest such place:
    [ranges of `DISTANCES`, and beyond the last]. A token repeats a place where the same `length` tokens end.

    Reads documents that are spread evenly over the corpus, with about `most_tokens` tokens. A hash of 64 bits stands
    for the tokens.
    """
    step = max(1, -(-corpus.tokens // most_tokens))
    counts = np.zeros(len(DISTANCES) + 1, np.int64)
    tokens = 0
    for document in range(0, corpus.documents, step):
        distances = nearest_repeats(corpus.document(document), length)
        counts += np.bincount(np.searchsorted(DISTANCES, distances), minlength=len(counts))
        tokens += int(corpus.document_lengths[document])
    return counts / max(tokens, 1)


def nearest_repeats(tokens: npt.NDArray[Any], length: int) -> npt.NDArray[np.int64]:
    """Distance from the end of each run of `length` tokens to the nearest earlier end of the same run; of those that
    occur earlier, in any order."""
    if len(tokens) <= length:
        return np.empty(0, np.int64)
    hashes = np.zeros(len(tokens) - length + 1, np.uint64)
    for offset in range(length):  # a polynomial in an odd number, modulo 2^64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[offset : offset + len(hashes)].astype(np.uint64) + 1
    order = np.argsort(hashes, kind="stable")
    same = hashes[order[1:]] == hashes[order[:-1]]
    return (order[1:] - order[:-1])[same]


def repeats_table(corpora: Sequence[IndexedDataset], length: int) -> Table:
    """One row per corpus: `repeat_shares`."""
    table = Table(title=f"tokens that end a run of {length} tokens which occurred before in the document, by distance")
    table.add_column("corpus", overflow="fold")
    for bound in DISTANCES:
        table.add_column(f"<= {format_count(bound, 1024)}", justify="right")
    table.add_column("farther", justify="right")
    for corpus in corpora:
        table.add_row(corpus.prefix, *(f"{share:.2%}" for share in repeat_shares(corpus, length, MOST_TOKENS)))
    return table
