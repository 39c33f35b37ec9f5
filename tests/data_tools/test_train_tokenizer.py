"""The tokenizer restores every text, and equal files always make the same tokenizer."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data_tools import train_tokenizer as module
from data_tools.train_tokenizer import train_tokenizer
from moba_train.errors import DataError, UserError
from tests.data_tools.prose import prose


def test_control_ids(tokenizer: str) -> None:
    model = sentencepiece.SentencePieceProcessor(tokenizer)
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (0, 1, 2, 3)
    assert model.vocab_size() == 320


# U+2581 is sentencepiece's own mark for a space.
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_any_text_comes_back(tokenizer: str, text: str) -> None:
    model = sentencepiece.SentencePieceProcessor(tokenizer)
    for given_text in (text, f"  def f():\r\n\t\treturn {text}  "):
        assert model.decode(model.encode(given_text)) == given_text


def test_same_text_makes_the_same_model(folder: Path) -> None:
    (folder / "a.txt").write_text(prose(1, 30_000))
    (folder / "moved.txt").write_text(prose(1, 30_000))
    for name, output in (("a", "1"), ("a", "2"), ("moved", "3")):
        train_tokenizer([str(folder / f"{name}.txt")], folder / f"{output}.model", 330, "text")
    models = [(folder / f"{output}.model").read_bytes() for output in "123"]
    assert models[0] == models[1] == models[2]
    train_tokenizer([str(folder / "moved.txt")], folder / "1.model", 330, "text")
    with pytest.raises(DataError, match=r"1.model exists and was trained .* with another --vocab-size"):
        train_tokenizer([str(folder / "a.txt")], folder / "1.model", 331, "text")
    assert (folder / "1.model").read_bytes() == models[0]


@pytest.mark.parametrize(
    ("text", "vocab_size", "message"),
    [
        ("hello world\n", 4096, r"--vocab-size 4096 is too large for this text; give at most 2\d\d"),
        ("hello world\n", 100, r"--vocab-size 100 is too small .*; give at least 26\d"),
        (b"\xff\xfe", 300, "there is no text to train on"),
    ],
)
def test_impossible_vocabulary_sizes_are_explained(
    folder: Path, text: str | bytes, vocab_size: int, message: str
) -> None:
    (folder / "a.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        train_tokenizer([str(folder / "a.txt")], folder / "tok.model", vocab_size, "text")
    assert not (folder / "tok.model").exists()


def test_unreadable_input_is_named(folder: Path) -> None:
    (folder / "a.txt").write_text("x")
    (folder / "gone.txt").write_text(prose(1, 5000))
    files = [str(folder / "a.txt"), str(folder / "gone.txt")]
    (folder / "gone.txt").unlink()
    (folder / "gone.txt").mkdir()
    with pytest.raises(UserError, match=r"gone.txt: is a folder; allowed: a regular file"):
        train_tokenizer(files, folder / "tok.model", 300, "text")


def test_a_compressed_file_gives_a_sample_as_large_as_the_plain_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size on the disk says little about its text, and the trainer keeps the sample in memory."""
    content = "".join(json.dumps({"text": prose(seed, 2000)}) + "\n" for seed in range(100)).encode()
    (folder / "a.jsonl").write_bytes(content)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(module, "SAMPLE_BYTES", len(content) // 4)
    given: list[int] = []

    def train(sentence_iterator: Iterator[str], model_writer: Any, **options: Any) -> None:
        given.append(sum(len(line) for line in sentence_iterator))

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", train)
    for name in ("a.jsonl", "b.jsonl.gz"):
        train_tokenizer([str(folder / name)], folder / "tok.model", 300, "text")
        (folder / "tok.model").unlink()
    assert 0 < given[0] < 0.5 * len(content)
    assert given[1] == pytest.approx(given[0], rel=0.2)
