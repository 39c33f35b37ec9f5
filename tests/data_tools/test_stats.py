"""`moba-data stats`: every length is counted once."""

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.stats import length_histogram
from tests.commands import run_app


def test_histogram_counts_every_document_and_token_once() -> None:
    assert length_histogram(np.array([4, 5, 8, 9, 4])) == [(4, 2, 8), (8, 2, 13), (16, 1, 9)]
    assert length_histogram(np.array([0, 1])) == [(1, 2, 1)]
    assert length_histogram(np.array([], dtype=np.int64)) == []


def test_stats_prints_tables_and_draws_the_plot(tmp_path: Path) -> None:
    for name, lengths in (("a", [3, 9, 2]), ("empty", [])):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for length in lengths:
                writer.add_document([1] * length)
    prefixes = [str(tmp_path / "a"), str(tmp_path / "empty")]
    narrow = {"COLUMNS": "40"}  # of a terminal; this is a pipe
    result = CliRunner(env=narrow).invoke(app, ["stats", *prefixes, "--plot", str(tmp_path / "a.html")])
    assert result.exit_code == 0, result.output
    assert "64.3%" in result.output  # 9 of 14 tokens are in a document of 9 to 16
    assert "a (3 documents)" in (tmp_path / "a.html").read_text()
    refused = run_app(app, "stats", prefixes[0], "--plot", tmp_path / "a.svg", code=2)
    assert "must end in .html" in refused.stderr
