"""Documents from files: JSON lines, parquet, and any other file as one document of text; plain, .gz or .zst.

Inputs are cut into shards of whole documents, a pure function of the files, so that the same work can be done by any
number of processes, stopped and continued.
"""

import fnmatch
import gzip
import hashlib
import importlib.util
import io
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moba_train.errors import DataError

_SUFFIXES = (
    "txt md rst tex jsonl parquet py pyi c h cc cpp hpp cu cuh java js ts go rs rb php pl lua scala kt swift cs hs "
    "ml jl r sh sql html css yaml yml toml json xml jsonl.gz jsonl.zst txt.gz txt.zst"
)
TEXT_GLOBS = tuple(f"*.{suffix}" for suffix in _SUFFIXES.split())
"""What is read from a folder unless globs are given."""

COMPRESSED = (".gz", ".zst")
OPTIONAL_PACKAGES = {".parquet": "pyarrow", ".zst": "zstandard"}
"""Packages that files ending in these need."""

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
    Raises DataError when an input does not exist, nothing is found, or a package is missing that a file needs.
    """
    files: list[str] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            files += [os.path.join(given, name) for name in sorted(_walk(given, globs, excludes))]
        elif path.is_file():
            files.append(given)
        else:
            raise DataError(f"input {given} does not exist; --input takes files and folders")
    if not files:
        left_out = f" and none of {' '.join(excludes)}" if excludes else ""
        raise DataError(f"no file under {', '.join(inputs)} matches {' '.join(globs)}{left_out}")
    for suffix, package in OPTIONAL_PACKAGES.items():
        found = next((file for file in files if file.endswith(suffix)), None)
        if found and importlib.util.find_spec(package) is None:
            raise DataError(f"{found}: this needs {package}; run `pip install {package}` or --exclude '*{suffix}'")
    return list(dict.fromkeys(files))


def _walk(folder: str, globs: Sequence[str], excludes: Sequence[str]) -> Iterator[str]:
    """Paths, inside `folder`, of the files wanted from it. Excluded folders are not entered."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; mend this, or give --exclude")

    for where, folders, names in os.walk(folder, onerror=refuse):
        inside = os.path.relpath(where, folder)
        folders[:] = [name for name in folders if not _match(inside, name, excludes)]
        for name in names:
            wanted = _match(inside, name, globs) and not _match(inside, name, excludes)
            if wanted and os.path.isfile(os.path.join(where, name)):
                yield _join(inside, name)


def _match(inside: str, name: str, patterns: Sequence[str]) -> bool:
    path = _join(inside, name)
    return any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _join(inside: str, name: str) -> str:
    return name if inside == "." else f"{inside}/{name}"


def cut_shards(files: Sequence[str]) -> list[Shard]:
    """All of `files` in their order, cut into about `SHARDS` shards of similar size in bytes, within `SHARD_BYTES`."""
    sizes = [os.path.getsize(file) for file in files]
    limit = min(max(sum(sizes) // SHARDS, SHARD_BYTES[0]), SHARD_BYTES[1])
    shards: list[Shard] = []
    open_shard: list[Chunk] = []
    room = limit
    for file, size in zip(files, sizes, strict=True):
        # Only plain lines can be found from the middle of a file on.
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
        name = chunk.path.removesuffix(".gz").removesuffix(".zst")
        try:
            if name.endswith(".jsonl"):
                yield from _read_json_lines(chunk, text_key)
            elif name.endswith(".parquet"):
                yield from _read_parquet(chunk.path, text_key)
            else:
                yield _read_text(chunk.path)
        except OSError as error:
            raise DataError(f"cannot read {chunk.path}: {error.strerror or error}") from error
        except _damage_errors() as error:
            raise DataError(f"{chunk.path} is damaged or incomplete: {error}") from error


def _damage_errors() -> tuple[type[Exception], ...]:
    """What decompressing raises, besides OSError; zstandard's where it is in use."""
    zstandard = sys.modules.get("zstandard")
    return (EOFError, zlib.error, *([zstandard.ZstdError] if zstandard else []))


def _open(path: str) -> Any:
    """The (decompressed) bytes of a file, as a binary file."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        import zstandard

        return io.BufferedReader(zstandard.open(path, "rb"))
    return open(path, "rb")


def _read_json_lines(chunk: Chunk, text_key: str) -> Iterator[bytes | BadRecord]:
    stop = math.inf if chunk.path.endswith(COMPRESSED) else chunk.stop
    with _open(chunk.path) as file:
        if chunk.start:
            # A line that begins before the chunk belongs to the one before.
            file.seek(chunk.start - 1)
            file.readline()
        at = file.tell() if chunk.start else 0
        while at < stop and (line := file.readline()):
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
    with _open(path) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            line += block.count(b"\n")
            offset -= len(block)
    return line


def _read_text(path: str) -> bytes | BadRecord:
    with _open(path) as file:
        content: bytes = file.read()
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


def splits(holdout: float) -> tuple[str, ...]:
    """What the names of the corpora made with this `holdout` end in."""
    return ("-train", "-valid") if holdout else ("",)


def split_of(document: bytes, holdout: float) -> int:
    """Which of the `splits` a document belongs to, by its content."""
    return int(holdout > 0 and hash_fraction(document, "holdout") < holdout)


def hash_fraction(document: bytes, purpose: str) -> float:
    """A number in [0, 1) that depends on the document's content alone; each `purpose` draws another one."""
    digest = hashlib.blake2b(document, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64
