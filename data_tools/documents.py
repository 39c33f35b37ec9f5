"""Documents from files: JSON lines, parquet, and any other file as one document of text.

Inputs are cut into shards of whole documents, a pure function of the files, so that the same work can be done by any
number of processes, stopped and continued.
"""

import fnmatch
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moba_train.errors import DataError

_SUFFIXES = (
    "txt md rst tex jsonl parquet py pyi c h cc cpp hpp cu cuh java js ts go rs rb php pl lua scala kt swift cs hs "
    "ml jl r sh sql html css yaml yml toml json xml"
)
TEXT_GLOBS = tuple(f"*.{suffix}" for suffix in _SUFFIXES.split())
"""What is read from a folder unless globs are given."""

SHARD_BYTES = (256 << 10, 64 << 20)
SHARDS = 512


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, stop) of a file: the lines that begin there, or all of a file that is not JSON lines."""

    path: str
    start: int
    stop: int


Shard = tuple[Chunk, ...]


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def find_files(inputs: Sequence[str], globs: Sequence[str], excludes: Sequence[str]) -> list[str]:
    """The files among `inputs`, and in the folders among them the files that match one of `globs`, in sorted order.

    A glob matches a file's name or its path inside the folder; an exclude matches these, or any folder on the way.
    Raises DataError when an input does not exist, nothing is found, or parquet is found and pyarrow is not installed.
    """
    files: list[str] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            inside = (file.relative_to(path) for file in path.rglob("*") if _any_match(file.relative_to(path), globs))
            wanted = sorted(file for file in inside if not _any_match(file, excludes, *file.parts))
            files += [str(path / file) for file in wanted if (path / file).is_file()]
        elif path.is_file():
            files.append(given)
        else:
            raise DataError(f"input {given} does not exist; --input takes files and folders")
    if not files:
        raise DataError(f"no file under {', '.join(inputs)} matches --glob {' '.join(globs)}, --exclude considered")
    parquet = next((file for file in files if file.endswith(".parquet")), None)
    if parquet and importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"{parquet}: reading parquet needs pyarrow; run `pip install pyarrow` or --exclude '*.parquet'")
    return list(dict.fromkeys(files))


def _any_match(file: Path, patterns: Sequence[str], *parts: str) -> bool:
    names = (file.name, file.as_posix(), *parts)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def cut_shards(files: Sequence[str]) -> list[Shard]:
    """All of `files` in their order, cut into about `SHARDS` shards of similar size in bytes, within `SHARD_BYTES`."""
    sizes = [os.path.getsize(file) for file in files]
    limit = min(max(sum(sizes) // SHARDS, SHARD_BYTES[0]), SHARD_BYTES[1])
    shards: list[Shard] = []
    open_shard: list[Chunk] = []
    room = limit
    for file, size in zip(files, sizes, strict=True):
        step = limit if file.endswith(".jsonl") else max(size, 1)
        for start in range(0, size, step):
            chunk = Chunk(file, start, min(start + step, size))
            open_shard.append(chunk)
            room -= chunk.stop - chunk.start
            if room <= 0:
                shards.append(tuple(open_shard))
                open_shard, room = [], limit
    return [*shards, tuple(open_shard)] if open_shard else shards


def shard_bytes(shard: Shard) -> int:
    """Size of a shard in bytes."""
    return sum(chunk.stop - chunk.start for chunk in shard)


def read_documents(shard: Shard, text_key: str) -> Iterator[bytes | BadRecord]:
    """The documents of a shard in order, as UTF-8, with those that cannot be read in their places.

    `text_key` is the member of a JSON line, or the column of a parquet file, that holds the text. Raises DataError when
    a file cannot be read at all.
    """
    for chunk in shard:
        try:
            if chunk.path.endswith(".jsonl"):
                yield from _read_json_lines(chunk, text_key)
            elif chunk.path.endswith(".parquet"):
                yield from _read_parquet(chunk.path, text_key)
            else:
                yield _read_text(chunk.path)
        except OSError as error:
            raise DataError(f"cannot read {chunk.path}: {error.strerror or error}") from error


def _read_json_lines(chunk: Chunk, text_key: str) -> Iterator[bytes | BadRecord]:
    with open(chunk.path, "rb") as file:
        if chunk.start:
            # A line that begins before the chunk belongs to the one before.
            file.seek(chunk.start - 1)
            file.readline()
        at = file.tell()
        while at < chunk.stop and (line := file.readline()):
            if line.strip():
                try:
                    yield _text_of(line, text_key)
                except (ValueError, RecursionError) as error:
                    yield BadRecord(chunk.path, _line_number(chunk.path, at), str(error))
            at += len(line)


def _text_of(line: bytes, text_key: str) -> bytes:
    """The text of one JSON line. Raises ValueError (also json's and unicode's own) when there is none."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        found = f"keys {', '.join(map(repr, record)) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"no text under key {text_key!r} (--text-key); found {found}")
    return record[text_key].encode()


def _line_number(path: str, offset: int) -> int:
    """Number, from 1 on, of the line of `path` that holds byte `offset`."""
    line = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            line += block.count(b"\n")
            offset -= len(block)
    return line


def _read_text(path: str) -> bytes | BadRecord:
    content = Path(path).read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return BadRecord(path, content.count(b"\n", 0, error.start) + 1, str(error))
    return content


def _read_parquet(path: str, text_key: str) -> Iterator[bytes | BadRecord]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        if text_key not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path} has no column {text_key!r}; set --text-key to one of {names}")
        row = 0
        for batch in file.iter_batches(columns=[text_key]):
            for text in batch.column(0).to_pylist():
                row += 1
                if isinstance(text, str):
                    yield text.encode()
                else:
                    yield BadRecord(path, row, f"row without text in column {text_key!r}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def hash_fraction(document: bytes, purpose: str) -> float:
    """A number in [0, 1) that depends on the document's content alone; each `purpose` draws another one."""
    digest = hashlib.blake2b(document, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64
