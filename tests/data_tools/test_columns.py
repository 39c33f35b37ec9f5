"""Parquet and Hugging Face folders as inputs: every row once, in order, of the split that is asked for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_tools import input_files
from data_tools.conversations import read_records
from data_tools.documents import BadRecord, Chunk, cut_shards, read_documents
from data_tools.input_files import TEXT_GLOBS, find_files
from moba_train.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SAVED = Path(__file__).parents[1] / "fixtures" / "saved_dataset"
TEXTS = [f"text {number} " * (1 + number % 7) for number in range(100)]


def write(path: Path, columns: dict[str, Any], rows: int = 10, compression: str | None = None) -> str:
    """A .parquet or .arrow file with this number of rows in each row group or record batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=rows)
    else:
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema, options=options) as to:
            to.write_table(table, max_chunksize=rows)
    return str(path)


def read(path: str) -> list[bytes | BadRecord]:
    return [found for shard in cut_shards([path]) for found in read_documents(shard, "text")]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("step", [1, 100, 777, 10**6])
def test_rows_are_read_once_wherever_the_file_is_cut(folder: Path, suffix: str, step: int) -> None:
    path = folder / f"a.{suffix}"
    write(path, {"n": range(100), "text": [*TEXTS[:50], None, *TEXTS[51:]]}, rows=7)
    size = path.stat().st_size
    chunks = [Chunk(str(path), at, min(at + step, size)) for at in range(0, size, max(step, size // 40))]
    if step < size // 40:
        chunks = [Chunk(str(path), at, at + size // 40) for at in range(0, size, size // 40)]
    found = [document for chunk in chunks for document in read_documents((chunk,), "text")]
    assert found.pop(50) == BadRecord(str(path), 51, "row without text in column 'text'")
    assert found == [text.encode() for text in (*TEXTS[:50], *TEXTS[51:])]


def test_a_saved_data_set_is_read_in_its_order_without_what_is_cached_in_it(folder: Path) -> None:
    """The fixture is a DatasetDict of the first 30 texts that datasets 5.2 has filtered and written (save_to_disk)."""
    shutil.copytree(SAVED, folder / "both")
    write(folder / "both" / "train" / "cache-0123.arrow", {"text": ["cached"]})
    files = find_files([str(folder / "both" / "train")], TEXT_GLOBS, [])
    assert len(files) == 3
    found = [document for file in files for document in read(file)]
    assert found == [text.encode() for text in TEXTS[:30] if len(text) < 40]
    with pytest.raises(DataError, match=r"both has the splits held_out, train; give --split"):
        find_files([str(folder / "both")], TEXT_GLOBS, [])
    (file,) = find_files([str(folder / "both")], TEXT_GLOBS, [], split="held_out")
    assert read(file) == [TEXTS[5].encode()]

    (folder / "both" / "train" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow is missing, which state\.json lists"):
        find_files([str(folder / "both")], TEXT_GLOBS, [], split="train")


@pytest.mark.parametrize(
    "names",
    [
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
        ["data/test-00000-of-00001-5b1a.parquet", "data/train-00000-of-00001-b21d8ab8a1bcd2b6.parquet"],
        ["default/train/0000.parquet", "default/train/0001.parquet", "default/validation/0000.parquet"],
        ["train.jsonl", "test.jsonl", "README.md"],
    ],
)
def test_the_splits_of_a_hub_folder_are_not_mixed(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "dataset_infos.json").write_text("{}")
    with pytest.raises(DataError, match=r"has the splits (test, train|train, validation); give --split"):
        find_files([str(folder)], TEXT_GLOBS, [])
    with pytest.raises(DataError, match=r"--split dev: --input .* has "):
        find_files([str(folder)], TEXT_GLOBS, [], split="dev")
    found = [str(Path(file).relative_to(folder)) for file in find_files([str(folder)], TEXT_GLOBS, [], split="train")]
    assert found == [name for name in names if "train" in name]


def test_folders_of_code_have_no_splits(folder: Path) -> None:
    for name in ("test/cases.json", "dev/settings.json", "train/model.py", "test.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    assert len(find_files([str(folder)], TEXT_GLOBS, [])) == 4
    with pytest.raises(DataError, match="has no splits"):
        find_files([str(folder)], TEXT_GLOBS, [], split="train")


def test_arrow_files_that_are_damaged_or_of_another_kind_are_refused_by_name(folder: Path) -> None:
    path = write(folder / "a.arrow", {"text": TEXTS})
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])
    *good, bad = read(path)
    assert good == [text.encode() for text in TEXTS[: len(good)]]
    assert str(bad).startswith(f"{path}:{len(good) + 1}: the file is damaged or incomplete (")
    with pytest.raises(DataError, match=r"no column 'body'; set --text-key to one of text"):
        list(read_documents(cut_shards([path])[0], "body"))
    with pytest.raises(DataError, match=r"holds compressed record batches, .*write it as parquet"):
        read(write(folder / "b.arrow", {"text": TEXTS}, compression="zstd"))
    offsets = b"\0\0\0\0\7\0\0\0"
    content = Path(write(folder / "c.arrow", {"text": ["7 bytes"]})).read_bytes()
    before, _, after = content.rpartition(offsets)
    (folder / "c.arrow").write_bytes(before + b"\0\0\0\0\xff\xff\xff\x0f" + after)
    (bad,) = read(str(folder / "c.arrow"))
    assert "damaged or incomplete" in str(bad)
    (folder / "feather.arrow").write_bytes(b"ARROW1\0\0")
    with pytest.raises(DataError, match="Arrow's file format"):
        read(str(folder / "feather.arrow"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_conversations_are_those_of_the_same_json_lines(folder: Path, suffix: str) -> None:
    """Columns give each object the keys of all others: a null there is a key that the object does not have."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"depth": 3}}}
    records = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [other]}], "tools": "[]"},
        {"messages": [{"role": "nobody", "content": "q"}]},
    ]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    path = write(folder / f"a.{suffix}", pyarrow.Table.from_pylist(records))
    of_columns = [found for _, found in read_records(path)]
    of_lines = [found for _, found in read_records(str(folder / "a.jsonl"))]
    assert of_columns[:3] == of_lines[:3]
    assert isinstance(of_columns[3], BadRecord)
    assert of_columns[3].line == 4


def test_text_in_another_encoding_is_read_to_the_end_though_each_byte_becomes_three(folder: Path) -> None:
    latin = pyarrow.array([b"\xe9" * 500] * 100, pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(latin), latin.buffers())
    (shard,) = cut_shards([write(folder / "a.arrow", {"text": column})])
    assert [*read_documents(shard, "text", encoding_errors="replace")] == ["\ufffd".encode() * 500] * 100


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_bytes_are_not_taken_for_text_and_what_python_cannot_hold_is_a_bad_record(folder: Path, suffix: str) -> None:
    """A column of images next to the messages does no harm."""
    path = write(folder / f"a.{suffix}", {"text": [b"a"], "prompt": [b"q"], "completion": ["a"], "image": [b"\xff"]})
    (cell,) = read(path)
    assert str(cell).endswith("column 'text' holds bytes, but text is expected (--text-key)")
    ((_, found),) = read_records(path)
    assert str(found) == f"{path}:1: 'prompt' must be text, not bytes"
    late = pyarrow.array([2**60], pyarrow.timestamp("us"))
    path = write(folder / f"c.{suffix}", {"prompt": ["q"], "completion": ["a"], "time": late})
    ((_, found),) = read_records(path)
    assert isinstance(found, BadRecord)
    path = write(folder / f"b.{suffix}", {"prompt": ["q"], "completion": ["a"], "image": [b"\xff"]})
    ((_, found),) = read_records(path)
    assert not isinstance(found, BadRecord)


def test_a_bomb_of_nested_values_is_read_no_further(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "EXPANDED_BYTES", 1 << 16)
    monkeypatch.setattr(input_files, "EXPANDED_RATIO", 1)
    path = folder / "a.parquet"
    table = pyarrow.table({"text": [["x" * 40_000] * 100]})
    parquet.write_table(table, path, use_dictionary=False, compression="zstd")
    (bad,) = read(str(path))
    assert "decompresses to more than 65,536 bytes" in str(bad)


def test_the_rows_of_a_bomb_of_conversations_are_read_no_further(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "EXPANDED_BYTES", 1 << 16)
    monkeypatch.setattr(input_files, "EXPANDED_RATIO", 1)
    path = write(folder / "a.parquet", {"prompt": ["x" * 40_000] * 100, "completion": ["y"] * 100}, rows=100)
    ((line, bad),) = read_records(path)
    assert (line, str(bad)) == (
        1,
        f"{path}:1: the file decompresses to more than 65,536 bytes; the rest of it is skipped",
    )
