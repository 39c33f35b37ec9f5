"""Files that are missing, and corpora that do not fit the recipe or each other, are named before the run begins."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.resolve.data import tokenizer_problems
from tests.resolve.refusals import problems
from tests.resolved import check
from tests.small_recipe import Load


def test_looking_for_files_leaves_the_other_problems_their_path(load: Load) -> None:
    found = problems(load("attention.default=mobba"), check_files=True)
    assert any(text.startswith("attention.default: 'mobba' is not") for text in found)


def test_missing_files_are_named_with_their_key(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    for name in ("a.bin", "a.idx", "b.bin"):
        (tmp_path / "corpora" / name).touch()
    with IndexedDatasetWriter(tmp_path / "corpora" / "a", np.uint16) as writer:
        writer.add_document([1, 2])
    config = load("data.tokenizer=tok.model", "stages.1.train=[{path: late}]", "data.validation=[{path: corpora/a}]")
    check(config)
    found = problems(config, check_files=True)
    assert [text.split(":")[0] for text in found] == ["data.train[1].path", "stages[1].train[0].path", "data.tokenizer"]
    assert "no file corpora/b.idx" in found[0]
    assert "late.bin and late.idx" in found[1]


def corpus(path: Path, tokenizer: str, content: bytes) -> None:
    info = {"tokenizer": tokenizer, "tokenizer_sha256": hashlib.sha256(content).hexdigest(), "vocab_size": 9}
    with IndexedDatasetWriter(path, np.uint16, info) as writer:
        writer.add_document([1, 2, 3])


def test_corpora_of_different_tokenizers_are_refused_and_both_are_named(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "one", "tok.model", b"one")
    corpus(tmp_path / "same", "moved.model", b"one")
    corpus(tmp_path / "other", "other.json", b"other")
    with IndexedDatasetWriter(tmp_path / "megatron", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    fits = "data.train=[{path: one}, {path: same}, {path: megatron}]"
    check(load(fits), check_files=True)
    mixed = load(fits, "stages.1.train=[{path: one}, {path: other}]")
    (found,) = problems(mixed, check_files=True)
    assert found.startswith(
        "stages[1].train[1].path: the corpus other was made with the tokenizer other.json (SHA-256 "
    )
    assert "but the corpus one with tok.model (SHA-256 " in found


def test_a_corpus_of_another_tokenizer_than_the_recipes_is_refused(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "one", "tok.model", b"one")
    (tmp_path / "tok.model").write_bytes(b"one")
    config = load("data={train: [{path: one}], tokenizer: tok.model}")
    assert list(tokenizer_problems(config.data, config.stages)) == []
    for name, content in (("tokenizer.json", b"the same in another form"), ("tokenizer.model", b"one")):
        (tmp_path / name).write_bytes(content)  # an export of a run that was trained with `one`
    alone = load("data={train: [{path: one}], tokenizer: tokenizer.json}")
    assert list(tokenizer_problems(alone.data, alone.stages)) == []
    (tmp_path / "tok.model").write_bytes(b"trained again")
    (found,) = tokenizer_problems(config.data, config.stages)
    assert "data.train[0].path: the corpus one was made with the tokenizer tok.model" in found
    assert "but data.tokenizer is tok.model" in found


def test_a_corpus_without_tokens_is_named(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, documents in (("good", [[1, 2, 3]]), ("empty", [])):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for document in documents:
                writer.add_document(document)
    found = problems(load("data={train: [{path: good}], validation: [{path: empty}]}"), check_files=True)
    assert found == ["data.validation[0].path: the corpus empty has no tokens; give another one"]


@pytest.mark.parametrize(
    ("key", "sources", "said"),
    [
        (
            "data.validation",
            "[{path: good}, {path: good}]",
            "corpus good is named twice in one blend; name it once and",
        ),
        ("stages.1.train", "[{path: good, min_length: 100}]", "corpus good has no tokens in documents of at least 100"),
        ("data.train", "[{path: good, below_length: 2}]", "corpus good has no tokens in documents of 0 to 1 tokens;"),
    ],
)
def test_a_blend_that_cannot_be_read_is_named_before_the_first_stage_begins(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, sources: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with IndexedDatasetWriter(tmp_path / "good", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    own = "stages.1.train" if key == "data.train" else "data.train"
    config = load(f"{own}=[{{path: good}}]", "data.validation=[{path: good}]", f"{key}={sources}")
    (found,) = problems(config, check_files=True)
    assert found.startswith(f"{key.replace('.1.', '[1].')}: {said}")


def test_a_bad_corpus_of_a_later_stage_is_named_before_the_first_begins(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, token in (("good", 1), ("bad", 60_000)):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document([token] * 9)
    config = load("data.train=[{path: good}]", "stages.1.train=[{path: bad}]", "data.validation=[]")
    (found,) = problems(config, check_files=True)
    assert found.startswith("stages[1].train[0].path: corpus bad: document 0 has token id 60000 at offset 0")
    assert f"model.vocab_size is {config.model.vocab_size}" in found


def test_files_and_dangling_links_in_the_place_of_folders_are_named_with_their_key(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("gone")
    for name in ("a.bin", "a.idx", "b.bin", "b.idx", "file"):
        (tmp_path / name).touch()
    folders = {"run_dir=file": "run_dir: given 'file', which is a file; allowed: a folder"}
    below = f"{tmp_path}/file/deep/down"
    folders[f"checkpoint.fallback_dir={below}"] = f"'{below}', which lies below the file {tmp_path}/file; allowed"
    folders["run_dir=link"] = "run_dir: given 'link', which is a link to 'gone', which is missing; allowed: a folder"
    folders["run_dir=link/run"] = f"which lies below the link {tmp_path}/link to 'gone', which is missing; allowed"
    for override, expected in folders.items():
        found = problems(load(override), check_files=True)
        assert any(expected in text for text in found), found
    found = problems(load("run_dir=new/folder", f"checkpoint.fallback_dir={tmp_path}"), check_files=True)
    assert not any("allowed: a folder" in text for text in found)
