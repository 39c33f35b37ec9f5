"""A tokenizer.json from elsewhere cannot take the memory or the time of the machine, nor end a command without a
message."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import data_tools.cli
import moba_train.tools.cli
from moba_train.data.tokenizer import vocabulary_size
from moba_train.errors import DataError
from moba_train.tools import text_tokenizer
from moba_train.tools.text_tokenizer import load_text_tokenizer
from tests.tools.convert.hf_models import make_hf_model

pytest.importorskip("tokenizers")

PLAIN: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}
DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def characters(content: bytes) -> dict[str, Any]:
    """Normalizer with this map of characters, as sentencepiece models have one."""
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "rules that double the text": (
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 40}},
        "more than 200 MiB of memory",
    ),
    "a hole in the ids": (
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31}, "merges": []}},
        "has the token id 2147483648; allowed: below 16777216",
    ),
    "a hole in the added ids": (
        {
            "added_tokens": [
                {
                    "id": 2**31,
                    "content": "<x>",
                    "special": True,
                    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                }
            ]
        },
        "",
    ),
    "a map of characters that is garbage": ({"normalizer": characters(b"\xff" * 64)}, "ended its process"),
    "a map of characters that panics": (
        {"normalizer": characters((64).to_bytes(4, "little") + b"\xff" * 64)},
        "cannot encode a text: index out of bounds",
    ),
    "a search that panics": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
        "cannot encode a text: ",
    ),
    "a decoder that panics": (
        {"decoder": {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40}},
        "cannot decode tokens: index out of bounds",
    ),
    "no unknown token": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "absent"}},
        "cannot encode a text: ",
    ),
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(PLAIN | changes))
    return path


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_the_library_cannot_take_is_an_error_with_the_name_of_the_file(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, said = ATTACKS[attack]
    monkeypatch.setattr(text_tokenizer, "MEMORY", 200 << 20)
    path = written(tmp_path, **changes)

    def use() -> None:
        tokenizer = load_text_tokenizer(path)
        assert tokenizer.vocab_size <= 1 << 24
        assert tokenizer.encode("a" * 40 + "!") == [0] * 40
        tokenizer.decode([0])

    if said:
        with pytest.raises(DataError, match=f"{path}.*{said}"):
            use()
    else:
        use()
    assert capfd.readouterr() == ("", "")


def test_after_a_limit_the_next_text_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokenizer, "MEMORY", 200 << 20)
    tokenizer = load_text_tokenizer(written(tmp_path, normalizer={"type": "Sequence", "normalizers": [DOUBLED] * 40}))
    with pytest.raises(DataError, match="memory"):
        tokenizer.encode("a")
    assert tokenizer.encode("bb") == [1, 1]


def test_limits_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokenizer, "MEMORY", 200 << 20)
    split = {"type": "Split", "pattern": {"String": "b"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_text_tokenizer(written(tmp_path, pre_tokenizer=split))
    assert tokenizer.encode("ab" * (1 << 20)) == [0, 1] * (1 << 20)


def test_time_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokenizer, "SECONDS", 1)
    rules = [{"type": "Replace", "pattern": {"String": one}, "content": other} for one, other in ("ab", "ba")] * 500
    tokenizer = load_text_tokenizer(written(tmp_path, normalizer={"type": "Sequence", "normalizers": rules}))
    with pytest.raises(DataError, match=r"takes more than 1 s of processor time"):
        tokenizer.encode("a" * 50_000)


@pytest.mark.parametrize("command", ["sft", "tokenize", "hf-to-moba"])
def test_commands_end_with_the_error_and_exit_code_2(command: str, tmp_path: Path) -> None:
    panics = "a map of characters that is garbage" if command == "hf-to-moba" else "a map of characters that panics"
    out = str(tmp_path / "out")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages, "text": "aaaa"}))
    files = ["-i", str(tmp_path / "a.jsonl"), "-o", out, "-t", str(written(tmp_path, **ATTACKS[panics][0]))]
    if command == "hf-to-moba":
        make_hf_model("llama2", tmp_path)
        done = CliRunner().invoke(moba_train.tools.cli.app, ["convert", command, str(tmp_path), out])
    else:
        options = ["--no-append-eos", "--workers", "1"] if command == "tokenize" else []
        done = CliRunner().invoke(data_tools.cli.app, [command, *files, *options])
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert f"{tmp_path / 'tokenizer.json'}" in done.output


@given(
    vocabulary=st.dictionaries(st.text(max_size=3), st.integers(0, 99), max_size=5),
    added=st.dictionaries(st.text("xyz", min_size=1, max_size=3), st.integers(0, 99), max_size=3),
)
def test_the_size_of_the_vocabulary_needs_no_library(
    tmp_path_factory: pytest.TempPathFactory, vocabulary: dict[str, int], added: dict[str, int]
) -> None:
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
    library.add_special_tokens([f"<{text}>" for text in added])
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    library.save(str(path))
    assert vocabulary_size(path) == max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
