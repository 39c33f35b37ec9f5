"""Documents from files: JSON lines, parquet, and any other file as one text document; plain, .gz or .zst.

The input is split into shards of whole documents. The shards are a pure function of the files, so any number of
processes can do the work, and it can be stopped and continued.
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
"""Files that are read from a folder by default."""

COMPRESSED = (".gz", ".zst")
OPTIONAL_PACKAGES = {".parquet": "pyarrow", ".zst": "zstandard"}
"""Packages that are needed to read files with these suffixes."""

SHARD_BYTES = (256 << 10, 64 << 20)
"""Smallest and largest target size of a shard."""
SHARDS = 512
"""Target number of shards, as far as `SHARD_BYTES` allows."""


@dataclass(frozen=True)
class Chunk:
    """The lines of a JSON lines file that begin in bytes [start, stop); any other file is one chunk."""

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
    """Files among `inputs`, and files that match one of `globs` in the folders among them, in sorted order.

    A glob matches a file's name or its path inside the folder; an exclude also matches any folder on that path.
    Raises DataError when an input does not exist, nothing is found, or a file needs a package that is missing.
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
            raise DataError(f"{found} needs {package}; run `pip install {package}` or give --exclude '*{suffix}'")
    return list(dict.fromkeys(files))


def _walk(folder: str, globs: Sequence[str], excludes: Sequence[str]) -> Iterator[str]:
    """Paths, relative to `folder`, of the matching files in it. Excluded folders are not entered."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; make it readable or give --exclude")

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
    """Split `files`, in order, into about `SHARDS` shards of similar size in bytes, within the limits `SHARD_BYTES`."""
    sizes = [os.path.getsize(file) for file in files]
    limit = min(max(sum(sizes) // SHARDS, SHARD_BYTES[0]), SHARD_BYTES[1])
    shards: list[Shard] = []
    open_shard: list[Chunk] = []
    room = limit
    for file, size in zip(files, sizes, strict=True):
        # Only plain JSON lines can be read from the middle of a file.
        step = limit if file.endswith(".jsonl") else max(size, 1)
        for start in range(0, size, step):
            chunk = Chunk(file, start, min(start + step, size))
            open_shard.append(chunk)
            room -= chunk.stop - chunk.start
            if room <= 0:
                shards.append(tuple(open_shard))
                open_shard = []
                room = limit
    return [*shards, tuple(open_shard)] if open_shard else shards


def shard_bytes(shard: Shard) -> int:
    """Size of a shard in bytes."""
    return sum(chunk.stop - chunk.start for chunk in shard)


def read_documents(shard: Shard, text_key: str) -> Iterator[bytes | BadRecord]:
    """Yield the documents of a shard in order, as UTF-8, with unreadable ones in place as `BadRecord`.

    `text_key` is the key of a JSON line, or the column of a parquet file, that holds the text. Raises DataError when a
    file as a whole cannot be read.
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
    """Exceptions of decompression besides OSError; those of zstandard if it is loaded."""
    zstandard = sys.modules.get("zstandard")
    return (EOFError, zlib.error, *([zstandard.ZstdError] if zstandard else []))


def _open(path: str) -> Any:
    """Open a file for reading its bytes, decompressed."""
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
            # A line that begins before this chunk belongs to the previous chunk.
            file.seek(chunk.start - 1)
            file.readline()
        at = file.tell() if chunk.start else 0
        while at < stop and (line := file.readline()):
            if line.strip():
                try:
                    yield _parse_text(line, text_key)
                except (ValueError, RecursionError) as error:
                    yield BadRecord(chunk.path, _line_number(chunk.path, at), str(error))
            at += len(line)


def _parse_text(line: bytes, text_key: str) -> bytes:
    """Text of one JSON line, as UTF-8. Raises ValueError, or one of its subclasses, when there is none."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        found = f"keys {', '.join(map(repr, record)) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"no text under key {text_key!r} (--text-key); found {found}")
    return record[text_key].encode()


def _line_number(path: str, offset: int) -> int:
    """Number of the line of `path` that holds byte `offset`, counted from 1."""
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
    """Suffixes of the names of the corpora that this `holdout` makes."""
    return ("-train", "-valid") if holdout else ("",)


def choose_split(document: bytes, holdout: float) -> int:
    """Index, among the `splits`, of the corpus that a document belongs to; depends only on its content."""
    return int(holdout > 0 and hash_fraction(document, "holdout") < holdout)


def hash_fraction(document: bytes, purpose: str) -> float:
    """A number in [0, 1) that depends only on the document's content and on `purpose`."""
    digest = hashlib.blake2b(document, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64
