"""`moba-data stats`: every length is counted once, and the effective sparsity is that of the counted pairs."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.stats import effective_sparsity, length_histogram
from tests.commands import run_app


def test_histogram_counts_every_document_and_token_once() -> None:
    assert length_histogram(np.array([4, 5, 8, 9, 4])) == [(4, 2, 8), (8, 2, 13), (16, 1, 9)]
    assert length_histogram(np.array([0, 1])) == [(1, 2, 1)]
    assert length_histogram(np.array([], dtype=np.int64)) == []


def pairs(length: int, block: int, topk: int) -> tuple[float, float]:
    """Query-key pairs of MoBA and of full attention, one by one; a token and itself are half a pair."""
    moba = sum(query % block + 0.5 + min(query // block, topk - 1) * block for query in range(length))
    return moba, sum(query + 0.5 for query in range(length))


def test_effective_sparsity_is_that_of_the_pairs_counted_one_by_one() -> None:
    """Blocks of 4, topk 2: documents of up to 8 tokens are dense. One of 30 is cut at 20 when training is."""
    lengths = np.array([8, 3, 30, 9, 0])
    found = effective_sparsity(lengths, 4, 2)
    counted = np.array([pairs(int(length), 4, 2) for length in lengths]).sum(axis=0)
    assert found.attended == pytest.approx(counted[0] / counted[1])
    assert found.dense_documents == 2 / 4
    assert found.dense_tokens == 11 / 50
    cut = np.array([pairs(length, 4, 2) for length in (8, 3, 20, 10, 9)]).sum(axis=0)
    assert effective_sparsity(lengths, 4, 2, seq_len=20).attended == pytest.approx(cut[0] / cut[1])
    assert effective_sparsity(np.array([8, 3]), 4, 2).attended == 1.0


def test_stats_prints_tables_and_draws_the_plot(tmp_path: Path) -> None:
    for name, lengths in (("a", [3, 9, 2]), ("empty", [])):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for length in lengths:
                writer.add_document([1] * length)
    prefixes = [str(tmp_path / "a"), str(tmp_path / "empty")]
    options = ["--block-size", "4", "--topk", "1", "--plot", str(tmp_path / "a.html")]
    narrow = {"COLUMNS": "40"}  # of a terminal; this is a pipe
    result = CliRunner(env=narrow).invoke(app, ["stats", *prefixes, *options])
    assert result.exit_code == 0, result.output
    assert "documents <= 4" in result.output
    assert "35.7%" in result.output  # 5 of 14 tokens are in documents of up to 4
    assert "a (3 documents)" in (tmp_path / "a.html").read_text()
    refused = run_app(app, "stats", prefixes[0], "--plot", tmp_path / "a.svg", code=2)
    assert "must end in .html" in refused.stderr


def test_lengths_are_written_as_in_recipes(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([1] * 9)
    command = ["stats", str(tmp_path / "a"), "--topk", "1", "--block-size"]
    assert "documents <= 4,096" in CliRunner().invoke(app, [*command, "4K"]).output
    for wrong in ("4Q", "0", "-4K"):
        refused = run_app(app, *command, wrong, code=2)
        assert "--block-size" in refused.output
