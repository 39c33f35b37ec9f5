"""Distribution of the document lengths of a corpus, as tables and as a plot, and the sparsity of MoBA on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from data_tools.outputs import check_output_file
from moba_train.attention.moba.moba_kind import attended_pairs
from moba_train.data.indexed import IndexedDataset
from moba_train.data.packers import split_documents
from moba_train.errors import DataError

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
    """Distribution of documents and tokens over document lengths, with a bar for the tokens."""
    table = Table(title=f"{corpus.prefix}: documents by length")
    for column in ("up to", "documents", "tokens", "share of tokens"):
        table.add_column(column, justify="right")
    table.add_column("")
    for bound, documents, tokens in length_histogram(corpus.document_lengths):
        share = tokens / max(corpus.tokens, 1)
        table.add_row(f"{bound:,}", f"{documents:,}", f"{tokens:,}", f"{share:.1%}", "█" * round(30 * share))
    return table


@dataclass(frozen=True)
class Sparsity:
    """Sparsity of MoBA relative to full attention on documents of given lengths."""

    dense_documents: float
    """Fraction of the documents that fit into topk blocks: for them MoBA equals full attention."""
    dense_tokens: float
    """Fraction of the tokens that lie in such documents."""
    attended: float
    """Query-key pairs that MoBA computes, as a fraction of those of full attention within documents."""


def effective_sparsity(
    lengths: npt.NDArray[np.int64], block_size: int, topk: int, seq_len: int | None = None
) -> Sparsity:
    """Sparsity of MoBA on documents of these lengths; as in training, documents longer than `seq_len` are split."""
    if seq_len is not None:
        document, start = split_documents(lengths, seq_len)
        lengths = np.minimum(lengths[document] - start, seq_len)
    values, counts = np.unique(lengths[lengths > 0], return_counts=True)
    if not len(values):
        return Sparsity(0.0, 0.0, 0.0)
    dense = values <= block_size * topk
    pairs = counts * np.array([attended_pairs(int(value), block_size, topk) for value in values])
    full = counts * values**2 / 2
    return Sparsity(
        float(counts[dense].sum() / counts.sum()),
        float((counts * values)[dense].sum() / (counts * values).sum()),
        float(pairs.sum() / full.sum()),
    )


def sparsity_table(corpora: Sequence[IndexedDataset], block_size: int, topk: int, seq_len: int | None = None) -> Table:
    """One row per corpus: the fraction that is dense in any case, and the sparsity of MoBA."""
    split_at = f", documents split at {seq_len:,}" if seq_len else ""
    table = Table(title=f"MoBA with blocks of {block_size:,} and topk {topk}{split_at}")
    table.add_column("corpus", overflow="fold")
    for column in (f"documents <= {block_size * topk:,}", "tokens in them", "pairs computed", "effective sparsity"):
        table.add_column(column, justify="right")
    for corpus in corpora:
        found = effective_sparsity(corpus.document_lengths, block_size, topk, seq_len)
        shares = (found.dense_documents, found.dense_tokens, found.attended, 1 - found.attended)
        table.add_row(corpus.prefix, *(f"{share:.1%}" for share in shares))
    return table


def draw_lengths(corpora: Sequence[IndexedDataset], path: str) -> None:
    """Draw the distribution of each corpus' tokens over document lengths as an HTML page.

    Raises DataError for a name that does not end in .html and a file that cannot be written, LaunchError where plotly
    is not installed.
    """
    if Path(path).suffix != ".html":
        raise DataError(f"--plot {path}: the name must end in .html")
    check_output_file(path, "--plot")
    from moba_train.tools.report.chart import Chart, palette, text
    from moba_train.tools.report.page import write_charts

    traces = []
    for index, corpus in enumerate(corpora, 1):
        rows = length_histogram(corpus.document_lengths)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": text(f"{corpus.prefix} ({corpus.documents:,} documents)"),
                "x": [bound for bound, _, _ in rows],
                "y": [tokens / max(corpus.tokens, 1) for _, _, tokens in rows],
                "line": {"color": palette(index), "shape": "hvh"},
            }
        )
    layout = {
        "xaxis": {"type": "log", "dtick": math.log10(2), "title": "document length, tokens (up to)"},
        "yaxis": {"tickformat": ".0%", "rangemode": "tozero", "title": "share of the corpus' tokens"},
    }
    write_charts("Document lengths", [Chart("lengths", "Tokens by document length", "", traces, layout)], Path(path))
