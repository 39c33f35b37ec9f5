"""`moba-data tokenize`: the corpus decodes to the text, and its bytes do not depend on interruptions."""

import dataclasses
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sentencepiece
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.documents import cut_shards
from data_tools.input_files import find_files
from data_tools.outputs import empty_split
from data_tools.tokenize_corpus import Part, TokenizeOptions, TokenizeResult, make_part, tokenize_corpus
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError
from tests.data_tools.prose import prose

SUFFIXES = ("bin", "idx", "json")


def tokenize(folder: Path, output: Path, tokenizer: str, workers: int = 1, **changes: object) -> TokenizeResult:
    defaults: dict[str, object] = {"text_key": "text", "append_eos": True, "holdout": 0.0, "fail_on_error": False}
    options = TokenizeOptions(tokenizer, **(defaults | changes))  # type: ignore[arg-type]
    return tokenize_corpus(find_files([str(folder)], ["*"], []), str(output), options, workers)


def contents(output: Path) -> list[bytes]:
    return [Path(f"{output}.{suffix}").read_bytes() for suffix in SUFFIXES]


def test_documents_come_back_in_order_with_eos(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    texts = ["def f():\n    return 'ü'\n", "second, with  spaces ", "third"]
    (folder / "a.py").write_text(texts[0])
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[1:]))
    result = tokenize(folder, tmp_path / "out", tokenizer)
    corpus = result.corpora[str(tmp_path / "out")]
    model = sentencepiece.SentencePieceProcessor(tokenizer)
    documents = [corpus.document(index).tolist() for index in range(corpus.documents)]
    assert [document[-1] for document in documents] == [2, 2, 2]
    assert [model.decode(document[:-1]) for document in documents] == texts
    info = corpus.info
    assert info is not None
    assert (info["vocab_size"], info["eos_id"], info["tokenizer"]) == (320, 2, "tok.model")
    assert (info["documents"], info["tokens"]) == (3, corpus.tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input", "out.bin", "out.idx", "out.json"]

    plain = tokenize(folder, tmp_path / "plain", tokenizer, append_eos=False).corpora[str(tmp_path / "plain")]
    assert plain.tokens == corpus.tokens - 3

    begun = tokenize(folder, tmp_path / "begun", tokenizer, bos="<s>").corpora[str(tmp_path / "begun")]
    assert [begun.document(index).tolist() for index in range(3)] == [[1, *document] for document in documents]
    with pytest.raises(DataError, match=r"--bos .<begin>. is not a token of tok\.model"):
        tokenize(folder, tmp_path / "other", tokenizer, bos="<begin>")


def test_same_bytes_for_any_number_of_workers_and_after_a_kill(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    for number in range(24):
        (folder / f"{number:02d}.txt").write_text(prose(number, 150_000))
    (folder / "bad.txt").write_bytes(b"\xff")
    result = tokenize(folder, tmp_path / "whole", tokenizer, workers=2)
    whole = result.corpora[str(tmp_path / "whole")]
    assert result.parts > 10
    model = sentencepiece.SentencePieceProcessor(tokenizer)
    for number in (0, 11, 23):
        assert model.decode(whole.document(number, stop=99).tolist()) in prose(number, 1000)

    command = [sys.executable, "-m", "data_tools", "tokenize", "-i", str(folder), "-t", tokenizer, "--workers", "1"]
    command += ["-o", str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = tmp_path / "killed.parts"
    deadline = time.monotonic() + 60
    while not list(parts.glob("*.report")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = len(list(parts.glob("*.report")))
    assert finished > 0
    assert not Path(f"{tmp_path / 'killed'}.idx").exists()

    # The worker ends with its parent, or it might write into the parts of the next run.
    time.sleep(0.3)
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "parts were finished already" in again.stdout
    assert "bad.txt:1: 'utf-8' codec can't decode" in again.stderr
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not parts.exists()

    assert "already complete" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_parts_of_other_work_are_not_used(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    (folder / "a.txt").write_text("old text")
    parts = tmp_path / "out.parts"
    parts.mkdir()
    (parts / "work").write_text("another")
    (parts / "000000.report").write_text('{"size": 8, "tokens": 1, "bad": []}')
    result = tokenize(folder, tmp_path / "out", tokenizer)
    assert result.resumed_parts == 0
    assert result.corpora[str(tmp_path / "out")].tokens > 1


def test_a_corpus_of_other_text_is_not_overwritten(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    (folder / "a.txt").write_text("old text")
    tokenize(folder, tmp_path / "out", tokenizer)
    before = contents(tmp_path / "out")
    (folder / "a.txt").write_text("new text, longer")
    with pytest.raises(DataError, match=r"exists and was made from other input .*delete .*out\.idx"):
        tokenize(folder, tmp_path / "out", tokenizer)
    assert contents(tmp_path / "out") == before
    assert not (tmp_path / "out.parts").exists()


def test_two_runs_do_not_write_the_same_corpus(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    (folder / "a.txt").write_text("text")
    (tmp_path / "out.parts").mkdir()
    other = os.open(tmp_path / "out.parts", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(DataError, match=r"another process is making parts in .*out\.parts"):
        tokenize(folder, tmp_path / "out", tokenizer)
    os.close(other)
    assert tokenize(folder, tmp_path / "out", tokenizer).corpora


def test_bad_records_are_reported_or_fatal(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    path = folder / "a.jsonl"
    path.write_text('{"text": "good"}\n{"body": "no text"}\nnot json\n{"text": "good"}\n')
    result = tokenize(folder, tmp_path / "out", tokenizer)
    assert result.corpora[str(tmp_path / "out")].documents == 2
    assert [record.split(": ")[0] for record in result.bad] == [f"{path}:2", f"{path}:3"]
    assert (tmp_path / "out.skipped.txt").read_text().splitlines() == result.bad
    with pytest.raises(DataError, match=r"none of the 4 records can be read: .*key 'words'"):
        tokenize(folder, tmp_path / "none", tokenizer, text_key="words")
    with pytest.raises(DataError, match=r"a\.jsonl:2: no text under key 'text'"):
        tokenize(folder, tmp_path / "strict", tokenizer, fail_on_error=True)
    assert not (tmp_path / "strict.idx").exists()


def test_empty_texts_and_files_are_no_documents(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": ""}\n{"text": "good"}\n')
    (folder / "b.txt").write_text("")
    (folder / "c.txt.gz").write_bytes(gzip.compress(b""))
    result = tokenize(folder, tmp_path / "out", tokenizer, bos="<s>")
    assert (result.corpora[str(tmp_path / "out")].documents, result.empty, result.bad) == (1, 3, [])
    (folder / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="hold no document: 3 texts or files are empty"):
        tokenize(folder, tmp_path / "none", tokenizer)
    assert not (tmp_path / "none.idx").exists()


def test_a_damaged_archive_is_skipped_or_fatal(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 5000)[:-9])
    (shard,) = cut_shards([str(folder / "b.jsonl.gz")])
    options = TokenizeOptions(tokenizer, "text", append_eos=True, holdout=0.0, fail_on_error=False)
    report = make_part(Part(str(tmp_path / "skip"), shard, options))
    assert IndexedDataset(tmp_path / "skip").documents > 1000
    assert len(report.bad) == 1
    assert "b.jsonl.gz" in report.bad[0]
    with pytest.raises(DataError, match=r"b\.jsonl\.gz:\d+: the file is damaged .* --on-error skip"):
        make_part(Part(str(tmp_path / "strict"), shard, dataclasses.replace(options, fail_on_error=True)))
    assert not (tmp_path / "strict.idx").exists()


def test_holdout_depends_on_each_documents_content_alone(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    texts = [f"document number {number}" for number in range(300)]

    def split(lines: list[str], name: str) -> dict[str, set[str]]:
        (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
        corpora = tokenize(folder, tmp_path / name, tokenizer, holdout=0.2).corpora
        model = sentencepiece.SentencePieceProcessor(tokenizer)
        return {
            prefix.rsplit("-")[-1]: {model.decode(corpus.document(i).tolist()) for i in range(corpus.documents)}
            for prefix, corpus in corpora.items()
        }

    first = split(texts, "first")
    assert first["train"] | first["valid"] == set(texts)
    assert not first["train"] & first["valid"]
    assert len(first["valid"]) == pytest.approx(60, abs=25)
    more = split([*reversed(texts), "one more"], "more")
    assert more["valid"] - {"one more"} == first["valid"]
    assert isinstance(IndexedDataset(tmp_path / "first-valid").info, dict)


def test_a_holdout_that_leaves_a_corpus_empty_says_what_to_give(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    """Training refuses an empty corpus; all files that are in the way of the next try are named at once."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(20)))
    train, valid = (str(tmp_path / f"code-{split}") for split in ("train", "valid"))
    files = f"{train}.idx and {valid}.idx"

    def tokenize_with(holdout: str) -> tuple[int, str]:
        command = ["tokenize", "-i", str(folder), "-t", tokenizer, "-o", str(tmp_path / "code"), "--workers", "1"]
        done = CliRunner().invoke(app, [*command, "--holdout", holdout])
        _, mark, warning = " ".join(done.stderr.split()).partition("warning: ")
        return done.exit_code, mark + warning if done.exit_code == 0 else done.stderr

    few = (
        f"warning: {valid} is empty, and training refuses an empty corpus: --holdout 0.0001 has put all 20 documents "
        f"into {train}; delete {files}, and give a larger --holdout, such as 0.15, or more documents"
    )
    assert tokenize_with("0.0001") == tokenize_with("0.0001") == (0, few)
    code, error = tokenize_with("0.15")
    assert code == 2
    assert f"{train}, {valid} exist and were made from other input or with other options" in error
    assert f"delete {train}.idx, {valid}.idx or choose" in error
    os.remove(f"{train}.idx")
    os.remove(f"{valid}.idx")
    assert tokenize_with("0.15") == (0, "")


@pytest.mark.parametrize(
    ("train", "valid", "holdout", "said"),
    [
        (1, 0, 0.1, "c-valid is empty, and training refuses an empty corpus: --holdout 0.1 cannot divide a single one"),
        (0, 40, 0.99, "give a smaller --holdout, such as 0.93, or more conversations"),
        (2, 0, 0.5, "and give a larger --holdout, or more conversations"),
        (1, 1, 0.5, None),
    ],
)
def test_what_is_said_of_an_empty_split(train: int, valid: int, holdout: float, said: str | None) -> None:
    found = empty_split({"c-train": train, "c-valid": valid}, holdout, "conversations")
    assert found is None if said is None else said in str(found)
