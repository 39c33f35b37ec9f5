"""What works but is hardly meant is said, with the keys to change; the run goes on."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceTrainer

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.checkpoint import manifest, publish
from moba_train.config.schema import RunConfig
from moba_train.resolve import warnings
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.text_tokenizer import load_text_tokenizer
from tests.resolved import check
from tests.small_recipe import Load

NEVER = ["stages.0.evaluate=false", "stages.1.evaluate=false"]
VALIDATION = "data.validation=[{path: v}]"


def recipe_warnings(config: RunConfig) -> list[str]:
    return warnings.recipe_warnings(resolve_unchecked(config))


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (NEVER, None),  # nothing is asked for
        ([VALIDATION, "evaluation.every=10", NEVER[0]], None),
        ([VALIDATION, "evaluation.position_wise={}", *NEVER], "data.validation, evaluation.position_wise: given, but"),
        (["evaluation.every=10"], "evaluation: given, but there is nothing to evaluate on; set data.validation"),
    ],
)
def test_evaluations_that_never_run_are_named(load: Load, overrides: list[str], warning: str | None) -> None:
    config = load(*overrides)
    check(config)
    assert [text[: len(warning or "")] for text in recipe_warnings(config)] == ([warning] if warning else [])


def test_a_batch_that_is_larger_than_its_stage_is_named_with_its_key(load: Load) -> None:
    """A unit too many, which a plan of the memory does not show."""
    whole = load("batch_tokens=1M", "stages.0.tokens=1048576")
    assert recipe_warnings(whole) == []
    config = load("batch_tokens=8192T", "stages.1.batch_tokens=64K")
    check(config)
    assert recipe_warnings(config) == [
        "batch_tokens: given 9,007,199,254,740,992, more than the 1,000,000 tokens of stage 'short': its one step "
        "trains on 9,007,199,254,740,992; lower it, or raise stages[0].tokens"
    ]
    (warning,) = recipe_warnings(load("stages.1.batch_tokens=2M"))
    assert warning.startswith("stages[1].batch_tokens: given 2,097,152, more than the 2,000,000 tokens of stage 'long'")


@pytest.mark.parametrize(
    ("overrides", "as_large_as"),
    [
        ([], None),
        (["model.intermediate_size=128"], "hidden_size and heads x head_dim"),
        (["model.intermediate_size=256", "model.head_dim=64"], "heads x head_dim"),
        (
            ["model.intermediate_size=128", "model.head_dim=64", "activation_checkpointing=selective"],
            "hidden_size and kv_heads x head_dim",
        ),
        (["model.intermediate_size=128", "activation_checkpointing=full"], None),
    ],
)
def test_sizes_by_which_checkpointing_confuses_products_are_named(
    load: Load, overrides: list[str], as_large_as: str | None
) -> None:
    config = load(*overrides)
    size = config.model.intermediate_size
    begin = f"model.intermediate_size: gives {size} columns, as large as {as_large_as}: activation checkpointing"
    assert [text[: len(begin)] for text in recipe_warnings(config)] == ([begin] if as_large_as else [])


def test_the_width_of_experts_is_named_as_theirs(load: Load) -> None:
    *_, text = recipe_warnings(load("model.moe={experts: 4, active: 2, intermediate_size: 64, shared: 2, layers: [0]}"))
    assert text.startswith(
        "model.moe.intermediate_size: gives 128 columns, as large as hidden_size and heads x head_dim"
    )


def write_corpora(folder: Path, **info: Any) -> None:
    """Corpora `a` and `b` of one document, whose sidecars say `info`."""
    for name in ("a", "b"):
        with IndexedDatasetWriter(folder / "corpora" / name, np.uint16, info) as writer:
            writer.add_document([1, 2, 3])


@pytest.mark.parametrize(("vocab_size", "silent"), [(32_000, True), (35_200, True), (35_201, False)])
def test_a_vocabulary_much_larger_than_the_tokenizers_is_named_with_its_cost(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, silent: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    config = load(f"model.vocab_size={vocab_size}")
    write_corpora(tmp_path)
    assert recipe_warnings(config) == []  # as Megatron's, which do not say what made them
    write_corpora(tmp_path, vocab_size=32_000)
    warning = (
        "model.vocab_size: given 35201, but the tokenizer has 32000 tokens: rows that no token uses take 819K of 9.8M "
        "parameters (embedding and output projection); set it to 32000, a multiple of 128"
    )
    assert recipe_warnings(config) == ([] if silent else [warning])


def test_the_vocabulary_of_a_small_model_is_that_of_data_tokenizer_and_may_be_padded(
    load: Load, tmp_path: Path
) -> None:
    model = tmp_path / "tok.model"
    with model.open("wb") as file:
        text = ["a few words that are enough for so small a vocabulary"]
        SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=file, vocab_size=64, hard_vocab_limit=False, minloglevel=2
        )
    size = load_text_tokenizer(model).vocab_size
    given = [f"data.tokenizer={model}", "model.tie_embeddings=true"]
    assert recipe_warnings(load(f"model.vocab_size={size + 1024}", *given)) == []
    (found,) = recipe_warnings(load(f"model.vocab_size={size + 1025}", *given))
    assert f"the tokenizer has {size} tokens: rows that no token uses take 131K of" in found
    assert "(embedding); set it to" in found
    (found,) = recipe_warnings(load(f"model.vocab_size={size + 1025}", "init_from=model", *given))
    assert found.endswith("it is that of init_from, whose tokenizer may be another one")


def test_weights_of_another_tokenizer_are_named(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error: one tokenizer may be written in two forms, of which the model's folder has one."""
    monkeypatch.chdir(tmp_path)
    for folder in ("corpora", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_bytes(b"one")
    write_corpora(tmp_path, tokenizer="tok.model", tokenizer_sha256=hashlib.sha256(b"one").hexdigest())
    config = load("init_from=model", "data={train: [{path: corpora/a}, {path: corpora/b}]}")
    assert recipe_warnings(config) == []
    (tmp_path / "model" / "tokenizer.json").write_bytes(b"another")
    (warning,) = recipe_warnings(config)
    assert warning.startswith(
        "init_from: model was trained with another tokenizer than tok.model, which made the corpus corpora/a "
        "(data.train[0])"
    )
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"one")
    assert recipe_warnings(config) == []


def test_nothing_is_said_of_corpora_that_need_not_exist_yet(load: Load) -> None:
    """`plan --no-data`."""
    assert recipe_warnings(load(VALIDATION, "evaluation.position_wise.bucket=1K")) == []


def test_the_tokenizer_of_an_imported_model_lies_in_its_run_folder(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint has no tokenizer's hash, as nothing was trained."""
    monkeypatch.chdir(tmp_path)
    for folder in ("corpora", "imported/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    temporary = publish.make_temporary_folder(tmp_path / "imported" / "checkpoints", 0)
    manifest.write_json(temporary / manifest.META, {"good": True, "progress": {"step": 0, "stage": 0}})
    publish.publish(temporary, 0, {manifest.META: manifest.hash_file(temporary / manifest.META)})
    write_corpora(tmp_path, tokenizer="tok.model", tokenizer_sha256=hashlib.sha256(b"one").hexdigest())
    config = load("init_from=imported", "data={train: [{path: corpora/a}]}")
    for content, warned in ((b"one", False), (b"another", True)):
        (tmp_path / "imported" / "tokenizer.json").write_bytes(content)
        assert any("another tokenizer" in warning for warning in recipe_warnings(config)) == warned


def test_an_evaluation_for_which_no_document_is_long_enough_is_named_at_the_start(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be missed when the first evaluation is due, after days of training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    write_corpora(tmp_path)
    data = "data={train: [{path: corpora/a}], validation: [{path: corpora/b}]}"
    config = load(data, "evaluation.position_wise.bucket=1K", "stages.1.evaluate=false")
    (warning,) = [text for text in recipe_warnings(config) if text.startswith("evaluation.position_wise")]
    assert warning.startswith(
        "evaluation.position_wise: in stage 'short', data.validation has 0 samples of 2048 tokens"
    )


@pytest.mark.parametrize(
    ("validation", "named"),
    [
        ("[{path: other}]", False),
        ("[{path: corpora/a}]", True),
        ("[{path: corpora/c, min_length: 64}]", False),
        ("[{path: corpora/c, min_length: 63}]", True),
    ],
)
def test_a_validation_corpus_that_is_trained_on_is_named(load: Load, validation: str, named: bool) -> None:
    config = load(f"data.validation={validation}", "stages.1.train=[{path: corpora/c, below_length: 64}]")
    found = [warning for warning in recipe_warnings(config) if "is trained on as well" in warning]
    assert len(found) == named
    assert all(warning.startswith("data.validation[0]: the corpus corpora/") for warning in found)


@pytest.mark.parametrize(("documents", "warned"), [(7, True), (8, False)])
def test_a_validation_corpus_shorter_than_what_is_evaluated_is_named_with_its_tokens(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: int, warned: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with IndexedDatasetWriter(tmp_path / "v", np.uint16) as writer:
        for _ in range(documents):
            writer.add_document([1] * 4096)
    config = load(VALIDATION, "evaluation.sequences=4", "stages.0.evaluate=false")
    assert [warning.split(": text")[0] for warning in recipe_warnings(config)] == [
        "evaluation.sequences: given 4, which in stage 'long' take 32,768 tokens of v, which has 28,672"
    ] * warned
