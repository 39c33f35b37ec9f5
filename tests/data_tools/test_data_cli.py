"""The `moba-data` commands as a user runs them."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.corpus_writer import IndexedDatasetWriter
from tests.commands import run_app
from tests.data_tools.prose import prose

runner = CliRunner()


@pytest.mark.parametrize("command", [[], ["tokenize"], ["stats"]], ids=str)
def test_help_is_fast_and_loads_nothing_heavy(command: list[str]) -> None:
    """Measures processor time, which does not depend on other load; benchmarks/measured/data.md has the time on a quiet
    machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import sys; from data_tools.cli import app; app(sys.argv[1:], standalone_mode=False);"
        "print(sorted({'torch', 'numpy', 'sentencepiece', 'matplotlib'} & set(sys.modules)))"
    )
    run = [sys.executable, "-c", code, *command, "--help"]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout.endswith("[]\n")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_from_text_to_a_verified_corpus(folder: Path, tmp_path: Path) -> None:
    for number in range(4):
        (folder / f"{number}.txt").write_text(prose(number, 5000))
    model, prefix = str(tmp_path / "tok.model"), str(tmp_path / "corpus")
    for command in (
        ["train-tokenizer", "--input", str(folder), "--vocab-size", "300", "--output", model],
        ["tokenize", "--input", str(folder), "--tokenizer", model, "--output", prefix, "--workers", "1"],
        ["stats", prefix],
        ["verify", prefix],
    ):
        result = run_app(app, *command)
    assert "4 documents" in result.output
    assert "all ids below 300" in result.output


def test_user_errors_are_one_message_and_exit_code_2(tmp_path: Path) -> None:
    result = run_app(app, "verify", tmp_path / "nowhere", code=2)
    assert result.output.startswith("error: corpus ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("info", "options", "message"),
    [
        ({"vocab_size": 10}, [], "document 1 has token id 10 at offset 2"),
        ({"vocab_size": 11}, [], None),
        ({"vocab_size": 11}, ["--vocab-size", "8"], "document 1 has token id 9 at offset 1"),
        (None, [], None),
    ],
)
def test_verify_finds_ids_outside_the_vocabulary(
    tmp_path: Path, info: dict[str, int] | None, options: list[str], message: str | None
) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16, info) as writer:
        writer.add_document([1, 2])
        writer.add_document([0, 9, 10])
    result = run_app(app, "verify", tmp_path / "a", *options, code=2 if message else 0)
    assert (message or "good, 2 documents, 5 tokens") in result.output
    if info is None:
        assert "ids not checked" in result.output


def test_verify_compares_the_sidecars_counts(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([1])
    (tmp_path / "a.json").write_text('{"documents": 7}')
    assert "says 7 documents, but there are 1" in runner.invoke(app, ["verify", str(tmp_path / "a")]).output


def test_verify_finds_a_changed_byte(tmp_path: Path) -> None:
    """Even if the changed byte is still a valid token id."""
    with IndexedDatasetWriter(tmp_path / "a", np.uint16, {"vocab_size": 10}) as writer:
        writer.add_document([1, 2, 3])
    assert runner.invoke(app, ["verify", str(tmp_path / "a")]).exit_code == 0
    (tmp_path / "a.bin").write_bytes(b"\x01\x00\x04\x00\x03\x00")
    result = run_app(app, "verify", tmp_path / "a", code=2)
    assert "a.bin is not what was written" in result.output
