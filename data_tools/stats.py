"""Tables about corpora: document lengths, use by a recipe's stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from data_tools.outputs import check_output_file
from moba_train.config.stages import Stage
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loader import DataSpec, training_data
from moba_train.errors import DataError

QUANTILES = {"min": 0, "5 %": 5, "25 %": 25, "50 %": 50, "75 %": 75, "95 %": 95, "max": 100}


def summary_table(corpora: Sequence[IndexedDataset]) -> Table:
    """Table with a row for each corpus: documents, tokens, mean and quantiles of the document length."""
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
    """Upper bound, documents and tokens of each power-of-two range of lengths.

    The first range is [0, 1], the others are (bound / 2, bound]. All ranges between the shortest and the longest
    document are listed, also empty ones.
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


def draw_lengths(corpora: Sequence[IndexedDataset], path: str) -> None:
    """Draw the distribution of each corpus' tokens over document lengths as an HTML page.

    Raises DataError for a name that does not end in .html and a file that cannot be written, LaunchError if plotly is
    not installed.
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


@dataclass(frozen=True)
class SourceUse:
    """Use of one source in one stage."""

    stage: str
    source: str
    """Corpus, followed by the range of document lengths if there is one."""
    tokens: int
    """Tokens of its samples, padding included."""
    share: float
    """Fraction of the stage's tokens."""
    epochs: float
    """Times the stage reads the source, up to the end of the last group of samples that is shuffled together."""
    epochs_so_far: float
    """Times the run has read the source by the end of the stage."""
    padding: float
    """Fraction of padding in its samples."""


def blend_warnings(spec: DataSpec, stages: Sequence[Stage]) -> list[str]:
    """Sentences about the corpora of each of a run's stages."""
    return [
        f"stage {stage.name}: {warning}"
        for stage in stages
        for warning in training_data(spec, stage, {}).warnings(stage.batch_tokens)
    ]


def preview(spec: DataSpec, stages: Sequence[Stage]) -> list[SourceUse]:
    """Use of each source in each of a run's stages, exactly as training will read it. Raises DataError as `StageData`
    does."""
    starts: dict[str, int] = {}
    uses = []
    for stage in stages:
        sequences = stage.max_steps * stage.batch_sequences
        data = training_data(spec, stage, starts)
        after = data.starts_after(sequences)
        for index, (bucket, stream) in enumerate(zip(data.buckets, data.streams, strict=True)):
            samples = int(data.samples_per_bucket[index])
            name = data.stream_names[index]
            position = after[name]
            uses.append(
                SourceUse(
                    stage.name,
                    bucket.name,
                    samples * stage.seq_len,
                    samples / sequences,
                    (position - starts.get(name, 0)) / stream.tokens,
                    position / stream.tokens,
                    data.padding_fraction(index),
                )
            )
        starts = after
    return uses


def read_lengths_table(spec: DataSpec, stages: Sequence[Stage]) -> Table:
    """Table of the share of each stage's tokens by the length of their document. Raises as `preview` does."""
    counted = {stage.name: training_data(spec, stage, {}).tokens_by_length() for stage in stages}
    table = Table(title="tokens by document length")
    table.add_column("up to", justify="right")
    for name in counted:
        table.add_column(name, justify="right")
    for bound in sorted({int(bound) for tokens in counted.values() for bound in tokens}):
        shares = [tokens.get(str(bound), 0) / sum(tokens.values()) for tokens in counted.values()]
        table.add_row(f"{bound:,}", *(f"{share:.1%}" for share in shares))
    return table


def blend_table(uses: list[SourceUse]) -> Table:
    """Table with a row for each stage and source."""
    table = Table(title="what each stage reads")
    table.add_column("stage")
    table.add_column("source", overflow="fold")
    for column in ("tokens", "share", "epochs", "epochs so far", "padding"):
        table.add_column(column, justify="right")
    for use in uses:
        table.add_row(
            use.stage,
            use.source,
            f"{use.tokens:,}",
            f"{use.share:.2%}",
            f"{use.epochs:.2f}",
            f"{use.epochs_so_far:.2f}",
            f"{use.padding:.2%}",
        )
    return table
