"""Documents from files: JSON lines, parquet, and any other file as one text document; plain, .gz or .zst.

The input is split into shards of whole documents. The shards are a pure function of the files, so any number of
processes can do the work, and it can be stopped and continued.

Files may come from elsewhere: a record that is too long is a bad record, a file that decompresses to far more than its
size is read no further, and neither is ever held in memory. docs/security.md has the limits.
"""

import contextlib
import fnmatch
import gzip
import hashlib
import importlib.util
import io
import math
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moba_train.errors import DataError, ForeignFileError
from moba_train.foreign_files import MIB, ROOTS, check_below, folder_roots, open_foreign, parse_json

_SUFFIXES = (
    "txt md rst tex jsonl parquet py pyi c h cc cpp hpp cu cuh java js ts go rs rb php pl lua scala kt swift cs hs "
    "ml jl r sh sql html css yaml yml toml json xml jsonl.gz jsonl.zst txt.gz txt.zst"
)
TEXT_GLOBS = tuple(f"*.{suffix}" for suffix in _SUFFIXES.split())
"""Files that are read from a folder by default."""

COMPRESSED = (".gz", ".zst")
OPTIONAL_PACKAGES = {".parquet": "pyarrow", ".zst": "zstandard"}
"""Packages that are needed to read files with these suffixes."""

DOCUMENT_BYTES = 128 * MIB
"""Longest document or line, unless the caller gives a limit. Parsing JSON may take 20 times as much memory."""
EXPANDED_BYTES = 256 * MIB
EXPANDED_RATIO = 200
"""A file may decompress to the larger of these: bytes, or this number of times its size. Text shrinks to a tenth."""
_PARQUET_ROWS = 8
"""Rows that are decoded at a time: the rows of a dictionary-encoded column may all be one very long text."""

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


def find_files(
    inputs: Sequence[str], globs: Sequence[str], excludes: Sequence[str], outside: list[str] | None = None
) -> list[str]:
    """Files among `inputs`, and files that match one of `globs` in the folders among them, in sorted order.

    A glob matches a file's name or its path inside the folder; an exclude also matches any folder on that path. Links
    that lead out of a folder are left out, and appended to `outside`; an input itself may be a link to anywhere.
    Raises DataError when an input does not exist, nothing is found, or a file needs a package that is missing.
    """
    files: list[str] = []
    links: list[str] = [] if outside is None else outside
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            roots = folder_roots(path)
            for name in sorted(_walk(given, globs, excludes)):
                file = os.path.join(given, name)
                (links if _leads_out(file, roots) else files).append(file)
        elif path.is_file():
            files.append(given)
        elif path.exists():
            raise DataError(f"input {given} is a pipe or a device; --input takes files and folders")
        else:
            raise DataError(f"input {given} does not exist; --input takes files and folders")
    if not files:
        left_out = f" and none of {' '.join(excludes)}" if excludes else ""
        left_out += f"; {len(links)} links lead out of the folder, which {ROOTS} may allow" if links else ""
        raise DataError(f"no file under {', '.join(inputs)} matches {' '.join(globs)}{left_out}")
    for suffix, package in OPTIONAL_PACKAGES.items():
        found = next((file for file in files if file.endswith(suffix)), None)
        if found and importlib.util.find_spec(package) is None:
            raise DataError(f"{found} needs {package}; run `pip install {package}` or give --exclude '*{suffix}'")
    return list(dict.fromkeys(files))


def _leads_out(file: str, roots: Sequence[Path]) -> bool:
    if not os.path.islink(file):
        return False
    try:
        check_below(Path(file), roots)
    except ForeignFileError:
        return True
    return False


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


def read_documents(shard: Shard, text_key: str, limit: int = DOCUMENT_BYTES) -> Iterator[bytes | BadRecord]:
    """Yield the documents of a shard in order, as UTF-8, with unreadable ones in place as `BadRecord`.

    `text_key` is the key of a JSON line, or the column of a parquet file, that holds the text. Lines and documents of
    more than `limit` bytes are unreadable, and so is what follows in a file that decompresses to too much. Raises
    DataError when a file as a whole cannot be read.
    """
    for chunk in shard:
        name = chunk.path.removesuffix(".gz").removesuffix(".zst")
        try:
            if name.endswith(".jsonl"):
                yield from _read_json_lines(chunk, text_key, limit)
            elif name.endswith(".parquet"):
                yield from _read_parquet(chunk.path, text_key, limit)
            else:
                yield _read_text(chunk.path, limit)
        except _ExpansionError as error:
            yield BadRecord(chunk.path, error.line, str(error))
        except OSError as error:
            raise DataError(f"cannot read {chunk.path}: {error.strerror or error}") from error
        except _damage_errors() as error:
            raise DataError(f"{chunk.path} is damaged or incomplete: {error}") from error


def _damage_errors() -> tuple[type[Exception], ...]:
    """Exceptions of decompression besides OSError; those of zstandard if it is loaded."""
    zstandard = sys.modules.get("zstandard")
    return (EOFError, zlib.error, *([zstandard.ZstdError] if zstandard else []))


class _ExpansionError(Exception):
    """A file decompresses to more than it may."""

    line = 1
    """Where in the file, as far as the reader knows."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the file decompresses to more than {limit:,} bytes; the rest of it is skipped")


class _Decompressed(io.RawIOBase):
    """The stream `source` up to `limit` bytes. Raises _ExpansionError beyond."""

    def __init__(self, source: Any, limit: int) -> None:
        self._source = source
        self._limit = self._left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._source.read(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise _ExpansionError(self._limit)
        buffer[: len(content)] = content
        return len(content)


def _expanded_limit(size: int) -> int:
    """Bytes that a compressed file of `size` bytes may hold."""
    return max(EXPANDED_BYTES, EXPANDED_RATIO * size)


@contextlib.contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading its bytes, decompressed."""
    with open_foreign(Path(path), None) as file:
        if not path.endswith(COMPRESSED):
            yield file
            return
        if path.endswith(".gz"):
            source: Any = gzip.GzipFile(fileobj=file)
        else:
            import zstandard

            source = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        limit = _expanded_limit(os.fstat(file.fileno()).st_size)
        yield io.BufferedReader(_Decompressed(source, limit), buffer_size=1 << 17)


def read_lines(file: BinaryIO, limit: int) -> Iterator[tuple[bytes, int]]:
    """Yield each line of at most `limit` bytes, and its length; a longer line is empty, but has its length."""
    while line := file.readline(limit + 1):
        if len(line) <= limit:
            yield line, len(line)
        else:
            yield b"", len(line) + (0 if line.endswith(b"\n") else _skip_line(file, math.inf))


def too_long(limit: int) -> str:
    """Why a longer line or document is not read."""
    return f"longer than {limit:,} bytes (moba-data tokenize --max-document-mib)"


def _skip_line(file: BinaryIO, most: float) -> int:
    """Read to the end of the line, or `most` bytes and a little more. Returns the number of bytes read."""
    skipped = 0
    while skipped < most and (part := file.readline(MIB)):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _read_json_lines(chunk: Chunk, text_key: str, limit: int) -> Iterator[bytes | BadRecord]:
    stop = math.inf if chunk.path.endswith(COMPRESSED) else chunk.stop
    with _open(chunk.path) as file:
        at = 0
        if chunk.start:
            # A line that begins before this chunk belongs to the previous chunk.
            at = file.seek(chunk.start - 1)
            at += _skip_line(file, stop - at)
        if at >= stop:
            return
        first = None if chunk.start else 1  # counted when the first bad record asks for it
        begin = at
        lines = read_lines(file, limit)
        number = 0
        while at < stop:
            try:
                line, length = next(lines, (b"", 0))
            except _ExpansionError as error:
                error.line = number + 1
                raise
            if not length:
                return
            reason = too_long(limit) if length > limit else None
            if line.strip():
                try:
                    yield _parse_text(line, text_key)
                except ValueError as error:
                    reason = str(error)
            if reason:
                first = first or _line_number(chunk.path, begin)
                yield BadRecord(chunk.path, first + number, reason)
            at += length
            number += 1


def _parse_text(line: bytes, text_key: str) -> bytes:
    """Text of one JSON line, as UTF-8. Raises ValueError, or one of its subclasses, when there is none."""
    record = parse_json(line)
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        found = f"keys {', '.join(map(repr, record)) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"no text under key {text_key!r} (--text-key); found {found[:200]}")
    return record[text_key].encode()


def _line_number(path: str, offset: int) -> int:
    """Number of the line of the plain file `path` that holds byte `offset`, counted from 1."""
    line = 1
    with _open(path) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            line += block.count(b"\n")
            offset -= len(block)
    return line


def _read_text(path: str, limit: int) -> bytes | BadRecord:
    with _open(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        return BadRecord(path, 1, too_long(limit))
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return BadRecord(path, content.count(b"\n", 0, error.start) + 1, str(error))
    return content


def _read_parquet(path: str, text_key: str, limit: int) -> Iterator[bytes | BadRecord]:
    import pyarrow
    from pyarrow import parquet

    with open_foreign(Path(path), None) as stream:
        most = left = _expanded_limit(os.fstat(stream.fileno()).st_size)
        try:
            file = parquet.ParquetFile(stream)
            if text_key not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)[:1000]
                raise DataError(f"{path} has no column {text_key!r}; set --text-key to one of {names}")
            if _column_bytes(file.metadata, text_key) > most:
                raise _ExpansionError(most)
            row = 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_key]):
                for value in batch.column(0):
                    row += 1
                    document = _cell_text(value, text_key, limit)
                    left -= len(document) if isinstance(document, bytes) else 0
                    if left < 0:
                        error = _ExpansionError(most)
                        error.line = row
                        raise error
                    yield document if isinstance(document, bytes) else BadRecord(path, row, document)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _cell_text(value: Any, text_key: str, limit: int) -> bytes | str:
    """Text of a cell, as UTF-8; why there is none, if there is none."""
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return str(error)
    if not isinstance(text, str):
        return f"row without text in column {text_key!r}"
    encoded = text.encode()
    return encoded if len(encoded) <= limit else too_long(limit)


def _column_bytes(metadata: Any, name: str) -> int:
    """Uncompressed bytes of column `name`, as the file says."""
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    columns = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == name)


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
