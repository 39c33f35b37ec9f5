"""Documents that repeat others, or share text with evaluations: those that go, and what the report says."""

import json
import os
import random
import tracemalloc
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from data_tools import filter_documents, tokenize_corpus
from data_tools.cli import app
from data_tools.contamination import EvaluationTexts
from data_tools.documents import SHARD_BYTES
from data_tools.duplicates import Repeat, check_similarity, digest, find_repeats, signature
from data_tools.word_hashes import _Hashes, word_hashes, words
from moba_train.errors import DataError
from tests.commands import run_app
from tests.noting import noting

pytest.importorskip("datasketch")
WORDS = [f"word{number}" for number in range(5000)]


def text(seed: int, words: int = 300) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def edited(original: str, changes: int, seed: int = 0) -> str:
    """The text with this number of its words replaced, each of which changes five runs of five words."""
    words = original.split()
    for place in random.Random(seed).sample(range(len(words)), changes):
        words[place] = f"new{place}"
    return " ".join(words)


def repeats(texts: Sequence[str], similarity: float, gone: Collection[int] = ()) -> dict[int, Repeat]:
    documents = [each.encode() for each in texts]
    digests = np.frombuffer(b"".join(map(digest, documents)), np.uint64).reshape(-1, 2)
    return find_repeats(digests, np.stack([*map(signature, documents)]), similarity, gone)


def test_the_first_copy_stays_and_what_goes_resembles_one_that_stays() -> None:
    near = edited(text(0), 2)
    found = repeats([text(0), text(1), near, text(1), near, f"{text(2)} end"], 0.8)
    assert {index: repeat.kept for index, repeat in found.items()} == {2: 0, 3: 1, 4: 0}
    assert found[3] == Repeat(1, None)
    assert found[2].similarity == pytest.approx(0.935, abs=0.08)
    assert found[4] == found[2]
    assert {*repeats([text(0), text(1), near, text(1), near], 1.0)} == {3, 4}
    # Each resembles the one before it, and none the first from some point on: some of the others stay as well.
    chain = [text(0)]
    for step in range(12):
        chain.append(edited(chain[-1], 8, step))
    gone = repeats(chain, 0.7)
    assert 3 < len(gone) < 12
    assert not {repeat.kept for repeat in gone.values()} & gone.keys()
    # What goes for another reason is no reason for others to go.
    assert repeats([text(0), near, text(0), near], 0.8, gone={0, 2}) == {3: Repeat(1, None)}


def test_nearly_all_near_duplicates_are_found_and_no_others() -> None:
    """With 300 words, 5 edits leave a similarity of about 0.85, and 20 one of 0.5."""
    originals = [text(seed) for seed in range(60)]
    assert len(repeats([*originals, *(edited(each, 5) for each in originals)], 0.8)) >= 50
    assert len(repeats([*originals, *(edited(each, 2) for each in originals)], 0.8)) == 60
    assert len(repeats([*originals, *(edited(each, 20) for each in originals)], 0.8)) == 0


def test_punctuation_and_case_make_no_difference_and_texts_without_words_are_compared_whole() -> None:
    shouted = ", ".join(text(0).upper().split())
    assert repeats([text(0), shouted, "!?", "?!", "!?", "...", "short one", "Short one."], 0.9) == {
        1: Repeat(0, 1.0),
        4: Repeat(2, None),
        7: Repeat(6, 1.0),
    }


def test_words_are_equal_in_every_encoding_and_none_is_broken_at_an_accent() -> None:
    def found(text: str) -> list[str]:
        return [word for piece in words(text) for word in piece]

    assert found("_Caf\u00e9_, don\u2019t: stra\u00dfe \ufb01ne") == found("cafe\u0301 don't STRASSE __ fine")
    assert found("\u0939\u093f\u0928\u094d\u0926\u0940 \u092d\u093e\u0937\u093e\u0964") == [
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\u092d\u093e\u0937\u093e",
    ]
    assert found("a\u6771\u4eac b") == ["a", "\u6771", "\u4eac", "b"]


def test_the_hashes_that_are_kept_take_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = _Hashes()
    monkeypatch.setattr(hashes, "most", 3)
    long = "0" * (hashes.longest + 1)
    assert len({hashes[word] for word in (*WORDS[:5], long, WORDS[0], long)}) == 6
    assert {*hashes} == {*WORDS[3:5], WORDS[0]}


def test_a_long_document_takes_the_memory_of_its_words() -> None:
    long = text(0, 50_000)
    tracemalloc.start()
    one = signature(long.encode())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20  # its runs under all permutations at once, and their minimum: 75 MB
    assert (one == signature(edited(long, 1000).encode())).mean() == pytest.approx(0.83, abs=0.1)
    assert len(word_hashes(long)) == 50_000


@pytest.mark.parametrize("similarity", [0.3, 0.97, 1.5])
def test_thresholds_without_bands_are_refused(similarity: float) -> None:
    with pytest.raises(DataError, match=rf"--duplicates: given {similarity:g}; allowed: 0.5 to 0.95 .* or 1"):
        check_similarity(similarity)


def test_near_duplicates_without_the_package_are_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_tools.duplicates.find_spec", lambda name: None)
    check_similarity(1)
    with pytest.raises(DataError, match="pip install 'datasketch>=2'"):
        check_similarity(0.8)


def test_thirteen_words_are_contamination_and_twelve_are_not(tmp_path: Path) -> None:
    question, short, words = text(0, 40).split(), text(1, 9), text(2, 100)
    tasks = [{"nested": [{"question": " ".join(question)}]}, {"question": short, "choices": ["a b", "c"]}, {"q": "a b"}]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    (tmp_path / "plain.txt").write_text(text(3, 50))
    found = EvaluationTexts([str(tmp_path / "tasks.jsonl"), str(tmp_path / "plain.txt")])
    assert [*map(str, found.records)] == [f"{tmp_path}/tasks.jsonl:{n}" for n in (1, 2, 3)] + [
        f"{tmp_path}/plain.txt:1"
    ]
    assert found.too_short == {f"{tmp_path}/tasks.jsonl": 1, f"{tmp_path}/plain.txt": 0}

    def owners(document: str) -> list[int]:
        return sorted({int(owner) for run in found.shared(document.encode()) for owner in found.owners(int(run))})

    run = [word.title() for word in question[20:33]]
    assert owners(f"{words}\n{', '.join(run)}!\n{words}") == [0]
    assert owners(f"{words} {' '.join(run[:12])} {words}") == []
    assert owners(f"{words} {short} {words}") == [1]
    assert owners(f"{words} {short[:-3]} {words}") == []
    assert owners(f"{words} {text(3, 50)}") == [3]
    assert owners("a b") == []
    (run_hash,) = found.shared(f"{words} {' '.join(run)}".encode())
    assert found.run_words(int(run_hash)) == " ".join(question[20:33])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": "b c"}\n', r"tasks\.jsonl has no text of at least 8 words"),
        ('{"a": "b c"}\n{oops\n', r"tasks\.jsonl:\d: is not JSON"),
    ],
)
def test_evaluations_that_cannot_be_checked_are_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(DataError, match=f"--evaluations .*{said}"):
        EvaluationTexts([str(tmp_path / "tasks.jsonl")])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts are worked on in this process. Returns the files of the parts that are scanned."""
    scanned: list[str] = []

    def in_turn(work: Callable[[Any], Any], parts: Sequence[Any], workers: int) -> Iterator[Any]:
        return map(work, parts)

    for module in (filter_documents, tokenize_corpus):
        monkeypatch.setattr(module, "in_processes", in_turn)
    note = noting(lambda part: scanned.append(part.prefix[-6:]), filter_documents.scan_part)
    monkeypatch.setattr(filter_documents, "scan_part", note)
    filter_documents._cached_evaluations.cache_clear()
    return scanned


def test_the_corpus_is_that_of_the_documents_that_stay(
    folder: Path, tokenizer: str, tmp_path: Path, here: list[str]
) -> None:
    """In several parts. A second start after an interruption scans only what is left."""
    question = text(999, 30)
    texts = [text(seed, 3000) for seed in range(30)]
    leaked = f"{text(100)} {question} {text(101)}"
    added = {4: texts[0], 11: edited(texts[1], 20), 17: leaked, 25: edited(leaked, 1)}
    texts[26] = f"{text(100)} {text(101)}"  # without the question, it stays
    all_texts = [added.get(number, each) for number, each in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in all_texts))
    (folder / "b.jsonl").write_text("{bad\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"q": question}) + "\n")
    assert (folder / "a.jsonl").stat().st_size > 2 * SHARD_BYTES[0]

    def tokenize(output: str, *more: str, path: str = "") -> str:
        command = ["tokenize", "-i", path or str(folder), "-t", tokenizer, "-o", str(tmp_path / output), *more]
        return run_app(app, *command).output

    check = ("--duplicates", "0.8", "--evaluations", str(tmp_path / "tasks.jsonl"))
    printed = tokenize("out", *check, "--contaminated", "drop")
    assert "left out of 30 documents: 1 identical and 1 near duplicates" in printed
    assert "tasks.jsonl: 1 of 1 records share text with 2 documents; 0 are too short to check" in printed
    assert "documents with text of evaluations: 2, left out" in printed
    assert len(here) > 2
    stay = [each for number, each in enumerate(all_texts) if number not in added]
    (tmp_path / "stay.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in stay))
    tokenize("stay", path=str(tmp_path / "stay.jsonl"))
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "stay.bin").read_bytes()
    report = json.loads((tmp_path / "out.filter.json").read_text())
    assert (report["documents"], report["kept"]) == (30, 26)
    near, same = report["duplicates"]["examples"]
    assert near["kept"] == {"file": f"{folder}/a.jsonl", "begins": texts[1][:120]}
    assert (same["similarity"], same["removed"]["begins"]) == ("identical", texts[0][:120])
    example, _ = report["contamination"]["examples"]
    assert example["evaluation"] == f"{tmp_path}/tasks.jsonl:1"
    assert example["words"] in question

    scanned = len(here)
    assert "already complete" in tokenize("out", *check, "--contaminated", "drop")
    assert len(here) == scanned

    # A corpus that exists is compared with evaluations without being made again.
    tokenize("all")
    made = (tmp_path / "all.bin").stat().st_mtime_ns
    (tmp_path / "other.txt").write_text(text(998, 30))
    assert "documents with text of evaluations: 0, kept" in tokenize("all", check[2], str(tmp_path / "other.txt"))
    printed = tokenize("all", *check[2:])
    assert "already complete" in printed
    assert "documents with text of evaluations: 2, kept" in printed
    assert (tmp_path / "all.bin").stat().st_mtime_ns == made

    parts = tmp_path / "again.parts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filter_documents, "find_repeats", lambda *_: 1 / 0)
        command = ["tokenize", "-i", str(folder), "-t", tokenizer, "-o", str(tmp_path / "again")]
        assert CliRunner().invoke(app, [*command, *check, "--contaminated", "drop"]).exit_code
    assert (parts / "000000.scan").exists()
    here.clear()
    tokenize("again", *check, "--contaminated", "drop")
    assert here == []
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "out.bin").read_bytes()
    assert not parts.exists()


def test_nothing_that_stays_and_options_that_do_nothing_are_refused(
    folder: Path, tokenizer: str, tmp_path: Path, here: list[str]
) -> None:
    (folder / "a.txt").write_text(text(0))
    command = ["tokenize", "-i", str(folder), "-t", tokenizer, "-o", str(tmp_path / "out"), "--contaminated", "drop"]
    assert "--contaminated drop: given without --evaluations" in CliRunner().invoke(app, command).output
    result = run_app(app, *command, "--evaluations", folder / "a.txt", code=2)
    assert "none of the 1 documents stays: all share text with --evaluations" in " ".join(result.output.split())
    assert not (tmp_path / "out.idx").exists()
    result = CliRunner().invoke(app, [*command, "--evaluations", str(tmp_path / "nowhere")])
    assert "--evaluations" in result.output
    assert "nowhere does not exist" in " ".join(result.output.split())
    (folder / "a.txt").write_bytes(b"\xff")
    result = CliRunner().invoke(app, [*command[:-2], "--duplicates", "1"])
    assert "none of the 1 records can be read" in " ".join(result.output.split())


def test_files_whose_names_are_not_utf8_are_named_in_the_report(
    folder: Path, tokenizer: str, tmp_path: Path, here: list[str]
) -> None:
    for name in (b"a\xff.txt", b"b\xff.txt"):
        (folder / os.fsdecode(name)).write_text(text(0))
    command = ["tokenize", "-i", str(folder), "-t", tokenizer, "-o", str(tmp_path / "out"), "--duplicates", "1"]
    run_app(app, *command)
    (example,) = json.loads((tmp_path / "out.filter.json").read_bytes())["duplicates"]["examples"]
    assert example["removed"]["file"] == str(folder / os.fsdecode(b"b\xff.txt"))
