"""Inputs: which files are read, sharding without loss, and bad records by line."""

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools import documents, input_files
from data_tools.documents import BadRecord, Chunk, cut_shards, read_documents
from data_tools.input_files import TEXT_GLOBS, LeftOut, describe_suffixes, find_files
from data_tools.outputs import hash_fraction
from moba_train.errors import DataError, ForeignFileError
from tests.noting import noting


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
    assert "a/image.png" not in names(list(TEXT_GLOBS), [])
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
    files = find_files([str(folder)], TEXT_GLOBS, [])
    found = [document for shard in cut_shards(files) for document in read_documents(shard, "text")]
    assert [found[0], *found[2:]] == [b"one", *(b"%d" % n for n in range(5000)), b"text"]
    assert str(found[1]).startswith(f"{folder}/a.jsonl.{suffix}:2: key 'text' holds a number")

    damaged = folder / f"a.jsonl.{suffix}"
    damaged.write_bytes(b"no such format")
    (bad,) = read_documents(cut_shards([str(damaged)])[0], "text")
    assert str(bad).startswith(f"{damaged}:1: the file is damaged or incomplete (")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_what_follows_the_damage_in_a_compressed_file_is_a_bad_record(folder: Path, suffix: str) -> None:
    """A file that ends too early, as after an interrupted download, and one with a changed byte."""
    compress = gzip.compress if suffix == "gz" else pytest.importorskip("zstandard").compress
    draw = random.Random(0)
    texts = [f"{number} {draw.random()}" for number in range(20_000)]
    content = compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    middle = len(content) // 2
    for damaged in (content[:middle], content[:-1], content[:middle] + b"damage" + content[middle + 6 :]):
        *found, bad = read(folder / f"a.jsonl.{suffix}", damaged)
        assert found[:1000] == [text.encode() for text in texts[:1000]]
        assert isinstance(bad, BadRecord)
        assert 1000 < bad.line <= 20_001
        assert "damaged or incomplete" in bad.reason
        assert "the rest of it is skipped" in bad.reason


def test_a_byte_order_mark_is_no_text(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\xef\xbb\xbf")
    (shard,) = cut_shards([str(folder / "a.txt")])
    assert [*read_documents(shard, "text")] == ["caf\u00e9\ufeff".encode()]


def test_text_that_is_not_utf8_is_read_with_replacements_if_wanted(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"caf\xe9")
    (folder / "b.jsonl").write_bytes(
        b'{"text": "caf\xe9"}\n{"text": "half \\ud800."}\n{"text": "good \\ud83d\\ude00"}\n'
    )
    shards = cut_shards([str(folder / name) for name in ("a.txt", "b.jsonl")])
    strict = [found for shard in shards for found in read_documents(shard, "text")]
    bad = [str(found) for found in strict if isinstance(found, BadRecord)]
    assert len(bad) == 3
    assert all("--encoding-errors replace" in text for text in bad)
    found = [found for shard in shards for found in read_documents(shard, "text", encoding_errors="replace")]
    assert found == [text.encode() for text in ("caf\ufffd", "caf\ufffd", "half \ufffd.", "good \U0001f600")]
    assert strict[-1] == found[-1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": 17}', "key 'text' holds a number, but text is expected (--text-key): 17"),
        ('{"text": null}', "key 'text' holds null, but text is expected (--text-key): null"),
        ('{"text": ["a"]}', "key 'text' holds a list, but text is expected (--text-key): [\"a\"]"),
        ("{}", "no text under key 'text' (--text-key); found an empty object"),
    ],
)
def test_a_value_that_is_no_text_is_named(folder: Path, line: str, said: str) -> None:
    (bad,) = read(folder / "a.jsonl", line.encode())
    assert isinstance(bad, BadRecord)
    assert bad.reason == said


def test_files_that_are_left_out_are_counted_by_suffix(folder: Path) -> None:
    for name in ("a.txt", "b.png", "c.png", "Makefile", "d.csv.gz", "skip/e.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    (folder / "broken.txt").symlink_to("nowhere")
    left_out = LeftOut()
    assert len(find_files([str(folder)], TEXT_GLOBS, ["skip"], left_out)) == 1
    assert left_out.suffixes == {".png": 2, "": 1, ".csv.gz": 1}
    assert left_out.irregular == [str(folder / "broken.txt")]
    assert describe_suffixes(left_out.suffixes) == "2 .png, 1 without a suffix, 1 .csv.gz"
    with pytest.raises(DataError, match=r"matches \*\.pdf; there are 2 \.png"):
        find_files([str(folder)], ["*.pdf"], [])


def test_parquet_rows_are_documents(folder: Path) -> None:
    pyarrow: ModuleType = pytest.importorskip("pyarrow")
    parquet: ModuleType = pytest.importorskip("pyarrow.parquet")
    path = str(folder / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"]}), path)
    bad = BadRecord(path, 2, "row without text in column 'text'")
    assert list(read_documents(cut_shards([path])[0], "text")) == [b"one", bad, b"three"]
    with pytest.raises(DataError, match="no column 'body'; set --text-key to one of text"):
        list(read_documents(cut_shards([path])[0], "body"))
    text = pyarrow.table({"text": [" ".join(map(str, range(999)))]})
    parquet.write_table(text, path, compression="gzip", use_dictionary=False, write_statistics=False)
    content = bytearray(Path(path).read_bytes())
    content[200:260] = bytes(60)  # of the compressed text
    Path(path).write_bytes(content)
    (found,) = read_documents(cut_shards([path])[0], "text")
    assert isinstance(found, BadRecord)
    assert "not a readable parquet file" in found.reason, "as any damage, and not an error of the disk"


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
        assert bad[5] == "the line holds a list, not an object with a text under 'text'"
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


LIMIT = 1 << 20


def read(path: Path, content: bytes = b"") -> list[bytes | BadRecord]:
    """The documents of one file, none longer than `LIMIT`."""
    if content:
        path.write_bytes(content)
    return [found for shard in cut_shards([str(path)]) for found in read_documents(shard, "text", LIMIT)]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "txt", "txt.gz"])
def test_a_record_of_any_length_is_a_bad_record_in_bounded_memory(folder: Path, suffix: str) -> None:
    huge = b'{"text": "' + b"x" * 60 * LIMIT + b'"}\n'
    content = b'{"text": "a"}\n' + huge + b'{"text": "b"}\n' if "jsonl" in suffix else huge
    path = folder / f"a.{suffix}"
    path.write_bytes(gzip.compress(content, 1) if suffix.endswith("gz") else content)
    del content, huge
    tracemalloc.start()
    found = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bad = [record for record in found if isinstance(record, BadRecord)]
    assert [record.line for record in bad] == [2 if "jsonl" in suffix else 1]
    assert "longer than 1,048,576 bytes" in bad[0].reason
    assert [record for record in found if record not in bad] == ([b"a", b"b"] if "jsonl" in suffix else [])
    assert peak < 8 * LIMIT


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "txt.gz"])
def test_a_decompression_bomb_is_read_no_further(folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short records, and one line."""
    monkeypatch.setattr(input_files, "EXPANDED_BYTES", LIMIT)
    compress = gzip.compress if suffix.endswith("gz") else pytest.importorskip("zstandard").compress
    for content in (b'{"text": "a"}\n' * (1 << 18), b" " * (1 << 24)):
        bomb = read(folder / f"a.{suffix}", compress(content))[-1]
        assert isinstance(bomb, BadRecord)
        most = max(LIMIT, input_files.EXPANDED_RATIO * (folder / f"a.{suffix}").stat().st_size)
        assert bomb.reason in (
            f"the file decompresses to more than {most:,} bytes; the rest of it is skipped",
            documents.too_long(LIMIT),  # seen before: one document
        )


def test_the_rows_of_a_parquet_bomb_are_read_no_further(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group that says how large it becomes, and a text in a dictionary that all rows refer to."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = folder / "a.parquet"
    long = "x" * 90_000
    parquet.write_table(pyarrow.table({"text": [long, "y"]}), path, compression="zstd")
    assert read(path) == [long.encode(), b"y"]
    monkeypatch.setattr(input_files, "EXPANDED_BYTES", 1 << 16)
    monkeypatch.setattr(input_files, "EXPANDED_RATIO", 1)
    assert [str(record) for record in read(path)] == [
        f"{path}:1: the file decompresses to more than 65,536 bytes; the rest of it is skipped"
    ]
    monkeypatch.setattr(input_files, "EXPANDED_BYTES", LIMIT)
    parquet.write_table(pyarrow.table({"text": [long] * 500}), path, compression="zstd")
    *rows, bomb = read(path)
    assert rows == [long.encode()] * 11
    assert isinstance(bomb, BadRecord)
    assert bomb.line == 12


def test_a_long_row_and_text_that_is_not_utf8_are_bad_records(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    broken = pyarrow.array([b"\xff"]).cast(pyarrow.binary()).view(pyarrow.string())
    texts = pyarrow.chunked_array([["good", "x" * (LIMIT + 1)], broken, ["also"]])
    parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
    found = read(folder / "a.parquet")
    assert [found[0], found[3]] == [b"good", b"also"]
    assert "longer than" in str(found[1])
    assert "a.parquet:3: 'utf-8' codec" in str(found[2])


def test_all_frames_of_a_zst_file_are_read(folder: Path) -> None:
    """Tools that compress in parallel write several."""
    zstandard = pytest.importorskip("zstandard")
    frames = zstandard.compress(b'{"text": "a"}\n') + zstandard.compress(b'{"text": "b"}\n')
    assert read(folder / "a.jsonl.zst", frames) == [b"a", b"b"]


def test_nested_json_is_a_bad_record_and_bad_records_take_linear_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(documents, "open_input", noting(opened.append, documents.open_input))
    found = read(folder / "a.jsonl.gz", gzip.compress(b"[" * 100_000 + b"\n" + b"no\n" * 1000))
    assert "a.jsonl.gz:1: JSON is nested too deeply" in str(found[0])
    assert [record.line for record in found if isinstance(record, BadRecord)] == list(range(1, 1002))
    assert len(opened) == 1


def test_links_that_lead_out_of_a_folder_are_left_out_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOBA_TRAIN_DATA_ROOTS", raising=False)
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "own.txt").write_text("own")
    (folder / "inside.txt").symlink_to("own.txt")
    for name, target in (("out", "../secret.txt"), ("absolute", folder.parent / "secret.txt"), ("twice", "out.txt")):
        (folder / f"{name}.txt").symlink_to(target)
    left_out = LeftOut()
    found = find_files([str(folder)], ["*"], [], left_out)
    assert [Path(file).name for file in found] == ["inside.txt", "own.txt"]
    assert [Path(file).name for file in left_out.links] == ["absolute.txt", "out.txt", "twice.txt"]
    assert find_files([str(folder / "out.txt")], ["*"], []) == [str(folder / "out.txt")], "the user named it"
    with pytest.raises(DataError, match="1 links lead out of the folder, which MOBA_TRAIN_DATA_ROOTS may allow"):
        find_files([str(folder)], ["out.txt"], [])
    monkeypatch.setenv("MOBA_TRAIN_DATA_ROOTS", str(folder.parent))
    assert len(find_files([str(folder)], ["*"], [])) == 5


def test_a_snapshot_of_a_cached_data_set_may_link_to_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOBA_TRAIN_DATA_ROOTS", raising=False)
    repository = tmp_path / "datasets--owner--name"
    snapshot = repository / "snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs/abc").write_text("text")
    (snapshot / "a.txt").symlink_to("../../blobs/abc")
    assert find_files([str(snapshot)], ["*"], []) == [str(snapshot / "a.txt")]


def test_pipes_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(DataError, match="is a pipe or a device"):
        find_files([str(folder / "pipe.txt")], ["*"], [])
    with pytest.raises(ForeignFileError, match="is a named pipe; allowed: a regular file"):
        list(read_documents((Chunk(str(folder / "pipe.txt"), 0, 1),), "text"))
