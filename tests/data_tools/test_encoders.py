"""Fast engines give the ids of the tokenizer's own library for any text; unsupported requests are refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data_tools.encoders import SegmentedSentencepiece, load_encoder
from moba_train.errors import DataError
from moba_train.tools import text_tokenizer
from moba_train.tools.text_tokenizer import load_text_tokenizer
from tests.data_tools.prose import TEXT, prose

TEXTS = st.text(
    st.one_of(st.sampled_from(" \u2581\n\tabé1_.,«"), st.characters(exclude_categories=["Cs"])), max_size=60
)


def ids(found: list[np.ndarray]) -> list[list[int]]:
    return [text.tolist() for text in found]


@given(texts=st.lists(TEXTS, max_size=4))
def test_segments_are_sentencepieces_ids_for_any_text(tokenizer: str, texts: list[str]) -> None:
    encoder = load_encoder(tokenizer)
    assert encoder.engine == "segments"
    assert ids(encoder.encode(texts)) == ids(encoder.reference(texts))
    assert load_encoder(tokenizer, fast=False).engine == "sentencepiece"


def train(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    settings: dict[str, Any] = {"vocab_size": 320, "byte_fallback": True, "minloglevel": 2, "model_type": "bpe"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(prose(0, 20_000).split("\n")),
        model_prefix=str(folder / "m"),
        **settings | options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def test_a_leading_space_that_the_model_adds_is_kept(tmp_path: Path) -> None:
    """Llama's sentencepiece models add one."""
    model = train(tmp_path, normalization_rule_name="identity", remove_extra_whitespaces=False)
    segmented = SegmentedSentencepiece.from_processor(model, np.dtype("u2"))
    assert segmented is not None
    texts = ["", " ", "a", "  fox\n\n jumps  ", "\u2581 the, fox"]
    assert ids(segmented.encode(texts)) == [model.encode(text) for text in texts]


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"byte_fallback": False, "vocab_size": 60},
        {"model_type": "unigram", "vocab_size": 300},
        {"split_by_whitespace": False, "vocab_size": 420},
        {"user_defined_symbols": ["a b"]},
    ],
    ids=str,
)
def test_models_whose_segments_depend_on_each_other_are_left_to_sentencepiece(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    assert SegmentedSentencepiece.from_processor(train(tmp_path, **(plain | options)), np.dtype("u2")) is None


def test_the_cache_of_segments_is_bounded(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_tools.encoders.CACHED_SEGMENTS", 3)
    encoder = load_encoder(tokenizer)
    assert ids(encoder.encode([TEXT, TEXT])) == ids(encoder.reference([TEXT, TEXT]))


def test_the_library_encodes_where_an_engine_differs(tokenizer: str, caplog: pytest.LogCaptureFixture) -> None:
    exact = load_encoder(tokenizer)
    assert exact.checked([TEXT]) is exact
    wrong = replace(exact, engine="wrong", encode=lambda texts: [np.zeros(1) for _ in texts])
    assert wrong.checked([TEXT]).encode is exact.reference
    assert "engine wrong and the library of tok.model give different ids" in caplog.text


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level BPE with Llama 3's pre-tokenization."""
    package: ModuleType = pytest.importorskip("tokenizers")
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    before = package.pre_tokenizers
    model = package.Tokenizer(package.models.BPE())
    split = before.Split(package.Regex(pattern), "isolated")
    model.pre_tokenizer = before.Sequence([split, before.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.train_from_iterator(
        [prose(0, 5000)],
        package.trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<end>"], initial_alphabet=before.ByteLevel.alphabet(), show_progress=False
        ),
    )
    model.enable_truncation(7)
    folder = tmp_path_factory.mktemp("hf")
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return folder


@pytest.mark.parametrize("fast", [True, False])
def test_tokenizer_json_with_the_eos_token_of_its_folder(hugging_face: Path, fast: bool) -> None:
    encoder = load_encoder(str(hugging_face), fast)
    texts = [prose(1, 400), "", "naïve ünïcode 12345\n\n  x's"]
    assert (encoder.name, encoder.vocab_size, encoder.eos_id) == ("tokenizer.json", 300, 0)
    assert ids(encoder.encode(texts)) == ids(encoder.reference(texts))
    assert len(encoder.encode(texts)[0]) > 7
    assert encoder.encode(texts)[0].dtype == np.dtype("u2")
    with pytest.raises(DataError, match=r"--eos '</s>' is not a token of tokenizer.json"):
        load_encoder(str(hugging_face), fast, "</s>")


def test_conversations_and_prompts_are_not_truncated_by_a_tokenizer_json(hugging_face: Path) -> None:
    text = prose(1, 400)
    (expected,) = load_encoder(str(hugging_face)).encode([text])
    assert load_text_tokenizer(hugging_face).encode(text) == expected.tolist()
    with pytest.raises(DataError, match="tiktoken encodings work with `moba-data tokenize` only"):
        load_text_tokenizer("tiktoken:o200k_base")


def test_tiktoken_encodings_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken: ModuleType = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257}
    special = {"<|endoftext|>": 258}
    made = tiktoken.Encoding("tiny", pat_str=r"\s?\w+|\s+|\W", mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"tiny": made}.__getitem__)
    encoder = load_encoder("tiktoken:tiny")
    assert (encoder.vocab_size, encoder.eos_id) == (259, 258)
    texts = ["the then\n<|endoftext|>", ""]
    assert ids(encoder.encode(texts)) == ids(encoder.reference(texts)) == [made.encode_ordinary(t) for t in texts]
    with pytest.raises(DataError, match="tiktoken cannot load the encoding 'other'"):
        load_encoder("tiktoken:other")


def test_missing_packages_and_broken_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{")

    def absent(name: str) -> ModuleType:
        raise ImportError(name)

    with pytest.raises(DataError, match="not a readable sentencepiece model"):
        load_encoder(str(tmp_path / "tok.model"))
    monkeypatch.setattr(text_tokenizer, "find_spec", lambda _: None)
    monkeypatch.setattr("importlib.import_module", absent)
    for name, package in ((str(tmp_path), "tokenizers"), ("tiktoken:o200k_base", "tiktoken")):
        with pytest.raises(DataError, match=rf"needs the package {package}; run `pip install {package}`"):
            load_encoder(name)
