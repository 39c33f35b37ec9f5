"""`moba-data show`: documents as text, with lengths, and the part that carries loss."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.show import parse_documents
from moba_train.data.tokenizer import tokenizer_hash
from moba_train.errors import DataError
from moba_train.tools.text_tokenizer import load_tokenizer
from tests.commands import run_app

TEXTS = ["first text", "second", "third", "the fourth", "last"]


@pytest.fixture
def corpus(tmp_path: Path, tokenizer: str) -> str:
    """A corpus of `TEXTS`, each ended by </s>, with its tokenizer beside it."""
    model = load_tokenizer(tokenizer)
    info = {"vocab_size": model.vocab_size, "tokenizer": "tok.model", "tokenizer_sha256": model.sha256}
    with IndexedDatasetWriter(tmp_path / "c", np.uint16, info) as writer:
        for text in TEXTS:
            writer.add_document([*model.encode(text), 2])
    (tmp_path / "tok.model").write_bytes(Path(tokenizer).read_bytes())
    return str(tmp_path / "c")


def show(*arguments: str) -> str:
    return run_app(app, "show", *arguments).output


def test_documents_are_shown_with_their_lengths_by_the_tokenizer_beside_the_corpus(corpus: str) -> None:
    printed = show(corpus, "--documents", "0,2:4")
    shown = [line for line in printed.splitlines() if not line.startswith("---")]
    assert shown == ["first text</s>", "third</s>", "the fourth</s>"]
    tokens = len(load_tokenizer(Path(corpus).parent / "tok.model").encode("third")) + 1
    assert f"--- document 2 of 5: {tokens} tokens ---" in printed
    assert "document 3 of 5" not in show(corpus), "the first three by default"
    short = show(corpus, "--documents", "0", "--tokens", "2")
    assert "--- the first 2 of " in short
    assert "text</s>" not in short


def test_lengths_are_written_as_in_recipes(corpus: str) -> None:
    assert "document 2 of 5" in show(corpus, "--tokens", "4K")
    for wrong in ("4Q", "0", "-4K"):
        assert "--tokens" in run_app(app, "show", corpus, "--tokens", wrong, code=2).output


def test_text_with_loss_is_marked(corpus: str, tokenizer: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    output = str(tmp_path / "chat")
    command = ["sft", "-i", str(tmp_path / "chat.jsonl"), "-t", tokenizer, "-o", output]
    assert CliRunner().invoke(app, command).exit_code == 0
    printed = show(output)
    assert "[[This.<|im_end|>]]" in printed
    assert " with loss ---" in printed


def test_another_tokenizer_is_named(corpus: str, tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "c.json").write_text(
        json.dumps(json.loads((tmp_path / "c.json").read_text()) | {"tokenizer_sha256": "0"})
    )
    done = run_app(app, "show", corpus, code=2)
    assert "was made with tok.model, which is not beside it; give --tokenizer" in done.output
    assert f"warning: {tokenizer} did not make this corpus" in show(corpus, "--tokenizer", tokenizer)
    (tmp_path / "c.json").unlink()
    assert "does not say which tokenizer made it" in CliRunner().invoke(app, ["show", corpus]).output
    with IndexedDatasetWriter(corpus, np.uint16) as writer:
        writer.add_document([1, 2, 999])
    done = run_app(app, "show", corpus, "-t", tokenizer, code=2)
    assert "document 0 has token id 999 at offset 2, but the tokenizer has 320 ids" in done.output
    assert tokenizer_hash(tokenizer)


def test_documents_are_numbers_and_ranges() -> None:
    assert parse_documents("0, 5,10:12", 12) == [0, 5, 10, 11]
    assert parse_documents(":2,4:", 6) == [0, 1, 4, 5]
    for wrong, said in (
        ("a", "'a' is neither"),
        ("", "'' is neither"),
        ("12", "no 12 in"),
        ("3:2", "no 3:2 in"),
        ("-1", "no -1"),
    ):
        with pytest.raises(DataError, match=said):
            parse_documents(wrong, 12)
