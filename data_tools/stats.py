"""How long the documents of a corpus are, as tables."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.table import Table

from moba_train.data.indexed import IndexedDataset

QUANTILES = {"min": 0, "5 %": 5, "25 %": 25, "50 %": 50, "75 %": 75, "95 %": 95, "max": 100}


def summary_table(corpora: Sequence[IndexedDataset]) -> Table:
    """One row per corpus: documents, tokens, mean and quantiles of the document length."""
    table = Table(title="document lengths in tokens")
    table.add_column("corpus", overflow="fold")
    for column in ("documents", "tokens", "mean", *QUANTILES):
        table.add_column(column, justify="right")
    for corpus in corpora:
        lengths = corpus.document_lengths
        row = [f"{corpus.documents:,}", f"{corpus.tokens:,}"]
        if corpus.documents:
            row.append(f"{lengths.mean():,.1f}")
            row += [f"{value:,.0f}" for value in np.percentile(lengths, list(QUANTILES.values()))]
        table.add_row(corpus.prefix, *row)
    return table


def length_histogram(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(upper bound, documents, tokens) of each power-of-two range of lengths that documents fall in.

    The first range is [0, 1], the others are (bound / 2, bound]; ranges between the shortest and longest document are
    listed even when empty.
    """
    if not len(lengths):
        return []
    exponent = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    documents = np.bincount(exponent)
    tokens = np.zeros(len(documents), dtype=np.int64)
    np.add.at(tokens, exponent, lengths)
    return [(1 << power, int(documents[power]), int(tokens[power])) for power in range(exponent.min(), len(documents))]


def histogram_table(corpus: IndexedDataset) -> Table:
    """How documents and tokens are spread over document lengths, with a bar for the tokens."""
    table = Table(title=f"{corpus.prefix}: documents by length")
    for column in ("up to", "documents", "tokens", "share of tokens"):
        table.add_column(column, justify="right")
    table.add_column("")
    for bound, documents, tokens in length_histogram(corpus.document_lengths):
        share = tokens / max(corpus.tokens, 1)
        table.add_row(f"{bound:,}", f"{documents:,}", f"{tokens:,}", f"{share:.1%}", "█" * round(30 * share))
    return table
