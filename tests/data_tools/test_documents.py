"""Inputs: which files are read, sharding without loss, and bad records by line."""

import gzip
import json
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools import documents
from data_tools.documents import BadRecord, Chunk, cut_shards, find_files, hash_fraction, read_documents
from moba_train.errors import DataError


def test_folders_are_read_sorted_by_glob_without_excludes(folder: Path) -> None:
    for name in (
        "b.py",
        "a/z.py",
        "a/y.txt",
        "a/image.png",
        "site-packages/p.py",
        "a/site-packages/q.py",
        "c/gen_x.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")

    def names(globs: list[str], excludes: list[str]) -> list[str]:
        return [Path(file).relative_to(folder).as_posix() for file in find_files([str(folder)], globs, excludes)]

    assert names(["*.py"], ["site-packages", "gen_*"]) == ["a/z.py", "b.py"]
    assert names(["a/*"], ["a/site-packages/*"]) == ["a/image.png", "a/y.txt", "a/z.py"]
    assert "a/image.png" not in names(list(documents.TEXT_GLOBS), [])
    # A file given by its path is read whatever its suffix.
    assert find_files([str(folder / "a/image.png")], ["*.py"], []) == [str(folder / "a/image.png")]


def test_missing_and_unmatched_inputs_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_files([str(folder / "nowhere")], ["*"], [])
    with pytest.raises(DataError, match=r"matches \*\.py"):
        find_files([str(folder)], ["*.py"], [])


def test_parquet_without_pyarrow_is_refused_with_a_hint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.parquet").write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        find_files([str(folder)], ["*"], [])


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_are_read_as_what_is_in_them(folder: Path, suffix: str) -> None:
    compress = gzip.compress if suffix == "gz" else pytest.importorskip("zstandard").compress
    lines = b'{"text": "one"}\n{"text": 2}\n' + b"".join(b'{"text": "%d"}\n' % n for n in range(5000))
    (folder / f"a.jsonl.{suffix}").write_bytes(compress(lines))
    (folder / f"b.txt.{suffix}").write_bytes(compress(b"text"))
    files = find_files([str(folder)], documents.TEXT_GLOBS, [])
    found = [document for shard in cut_shards(files) for document in read_documents(shard, "text")]
    assert [found[0], *found[2:]] == [b"one", *(b"%d" % n for n in range(5000)), b"text"]
    assert str(found[1]).startswith(f"{folder}/a.jsonl.{suffix}:2: no text under key")

    damaged = folder / f"a.jsonl.{suffix}"
    damaged.write_bytes(b"no such format")
    with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix}"):
        list(read_documents(cut_shards([str(damaged)])[0], "text"))


def test_parquet_rows_are_documents(folder: Path) -> None:
    pyarrow: ModuleType = pytest.importorskip("pyarrow")
    parquet: ModuleType = pytest.importorskip("pyarrow.parquet")
    path = str(folder / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"]}), path)
    bad = BadRecord(path, 2, "row without text in column 'text'")
    assert list(read_documents(cut_shards([path])[0], "text")) == [b"one", bad, b"three"]
    with pytest.raises(DataError, match="no column 'body'; set --text-key to one of text"):
        list(read_documents(cut_shards([path])[0], "body"))


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=20),
    step=st.integers(1, 50),
    last_newline=st.booleans(),
)
def test_json_lines_are_read_once_wherever_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], step: int, last_newline: bool
) -> None:
    path = tmp_path_factory.mktemp("input") / "a.jsonl"
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    content = lines.encode() + b"\n" * last_newline
    path.write_bytes(content)
    chunks = [Chunk(str(path), at, min(at + step, len(content))) for at in range(0, len(content), step)]
    got = [document for chunk in chunks for document in read_documents((chunk,), "text")]
    assert got == [text.encode() for text in texts]


def test_shards_hold_all_bytes_in_order(folder: Path) -> None:
    sizes = {"a.txt": 300_000, "b.jsonl": 700_000, "c.txt": 0, "d.txt": 10, "e.txt": 10}
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)
    shards = cut_shards([str(folder / name) for name in sizes])
    chunks = [chunk for shard in shards for chunk in shard]
    assert [Path(chunk.path).name for chunk in chunks] == ["a.txt", *["b.jsonl"] * 3, "d.txt", "e.txt"]
    assert sum(chunk.stop - chunk.start for chunk in chunks) == sum(sizes.values())
    assert len(shards) == 4


def test_bad_records_name_file_line_and_reason(folder: Path) -> None:
    path = folder / "a.jsonl"
    lines = [b'{"text": "good"}', b"{oops", b"", b'{"body": 1}', b"[1]", b'{"text": "\xff"}', b'{"text": "\\ud800"}']
    path.write_bytes(b"\n".join([*lines, b'{"text": "last"}']))
    # When reading starts in the middle of the file, line numbers still count from its beginning.
    for start, good in ((0, 2), (20, 1)):
        chunk = Chunk(str(path), start, path.stat().st_size)
        found = list(read_documents((chunk,), "text"))
        bad = {record.line: record.reason for record in found if isinstance(record, BadRecord)}
        assert len(found) - len(bad) == good
        assert list(bad) == [line for line in (2, 4, 5, 6, 7) if start == 0 or line > 2]
        assert bad[4] == "no text under key 'text' (--text-key); found keys 'body'"
        assert bad[5].endswith("found list")
        assert "can't decode byte 0xff" in bad[6]
        assert "surrogates not allowed" in bad[7]


def test_undecodable_text_files_name_the_line(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"one\ntwo\n\xe9\n")
    (record,) = read_documents(cut_shards([str(folder / "a.txt")])[0], "text")
    assert str(record).startswith(f"{folder / 'a.txt'}:3: 'utf-8' codec can't decode byte 0xe9")


def test_hash_fraction_is_uniform_and_fixed() -> None:
    fractions = [hash_fraction(b"%d" % number, "holdout") for number in range(2000)]
    assert sum(fraction < 0.25 for fraction in fractions) / 2000 == pytest.approx(0.25, abs=0.04)
    # A new version of this package must not move documents from training to validation.
    assert hash_fraction(b"a", "holdout") == pytest.approx(0.055776611622499375, rel=1e-12)
    assert hash_fraction(b"a", "holdout") != hash_fraction(b"a", "tokenizer")
