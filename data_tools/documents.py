"""Documents from files: JSON lines, parquet and arrow (columns.py), and any other file as one text document; plain,
.gz or .zst.

The input is split into shards of similar size, each of which any process can read by itself. The shards are a pure
function of the files, so any number of processes can do the work, and it can be stopped and continued.

Files may come from elsewhere: a record that is too long is a bad record, a file that decompresses to far more than its
size is read no further, and neither is ever held in memory. docs/reference/security.md has the limits.
"""

import codecs
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from data_tools.dataset_folders import COLUMNS
from data_tools.input_files import COMPRESSED, UnreadableRestError, open_input
from moba_train.errors import DataError
from moba_train.foreign_files import MIB, parse_json

SHARD_BYTES = (256 << 10, 64 << 20)
"""Smallest and largest target size of a shard."""
SHARDS = 512
"""Target number of shards, as far as `SHARD_BYTES` allows."""


@dataclass(frozen=True)
class Chunk:
    """The lines of a JSON lines file that begin in bytes [start, stop), or the row groups or record batches of a file
    with columns that belong to these bytes; any other file is one chunk."""

    path: str
    start: int
    stop: int


Shard = tuple[Chunk, ...]


def cut_shards(files: Sequence[str]) -> list[Shard]:
    """Split `files`, in order, into about `SHARDS` shards of similar size in bytes, within the limits `SHARD_BYTES`."""
    sizes = [os.path.getsize(file) for file in files]
    limit = min(max(sum(sizes) // SHARDS, SHARD_BYTES[0]), SHARD_BYTES[1])
    shards: list[Shard] = []
    open_shard: list[Chunk] = []
    room = limit
    for file, size in zip(files, sizes, strict=True):
        # Other files cannot be read from the middle.
        step = limit if file.endswith((".jsonl", *COLUMNS)) else max(size, 1)
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


EncodingErrors = Literal["strict", "replace"]
"""Treatment of text that is not UTF-8: strict makes it a bad record, replace reads it with U+FFFD in these places."""

DOCUMENT_BYTES = 128 * MIB
"""Longest document or line, unless the caller gives another limit. Parsing JSON may take 20 times as much memory."""
OTHER_SIZE_ON_DISK = (*COMPRESSED, *COLUMNS)
"""Suffixes of files that may hold more or less text than they take on the disk."""
_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bytes: "bytes",
    bool: "true or false",
    type(None): "null",
}


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read, and the reason."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def json_type(value: Any) -> str:
    """Type of a JSON value in words."""
    return _JSON_TYPES.get(type(value), "a number")


def read_documents(
    shard: Shard, text_key: str, limit: int = DOCUMENT_BYTES, encoding_errors: EncodingErrors = "strict"
) -> Iterator[bytes | BadRecord]:
    """Yield the documents of a shard in order, as UTF-8, with unreadable ones in place as `BadRecord`.

    `text_key` is the key of a JSON line, or the column, that holds the text. Lines and documents of
    more than `limit` bytes are unreadable, and so is what follows in a file that is damaged or decompresses to too
    much. Raises DataError when a file as a whole cannot be read.
    """
    for chunk in shard:
        name = chunk.path.removesuffix(".gz").removesuffix(".zst")
        try:
            if name.endswith(".jsonl"):
                yield from _read_json_lines(chunk, text_key, limit, encoding_errors)
            elif name.endswith(COLUMNS):
                from data_tools.columns import read_texts  # needs pyarrow

                yield from read_texts(chunk.path, chunk.start, chunk.stop, text_key, limit, encoding_errors)
            else:
                yield _read_text(chunk.path, limit, encoding_errors)
        except UnreadableRestError as error:
            yield BadRecord(chunk.path, error.line, str(error))
        except OSError as error:
            raise DataError(f"cannot read {chunk.path}: {error.strerror or error}") from error


def read_lines(file: BinaryIO, limit: int) -> Iterator[tuple[bytes, int]]:
    """Yield each line of at most `limit` bytes with its length. A longer line is yielded as an empty one, with its true
    length."""
    while line := file.readline(limit + 1):
        if len(line) <= limit:
            yield line, len(line)
        else:
            yield b"", len(line) + (0 if line.endswith(b"\n") else _skip_line(file, math.inf))


def too_long(limit: int) -> str:
    """Reason why a line or document of more than `limit` bytes is not read."""
    return f"longer than {limit:,} bytes (moba-data tokenize --max-document-mib)"


def _skip_line(file: BinaryIO, most: float) -> int:
    """Read to the end of the line, or `most` bytes and a little more. Returns the number of bytes read."""
    skipped = 0
    while skipped < most and (part := file.readline(MIB)):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _read_json_lines(
    chunk: Chunk, text_key: str, limit: int, encoding_errors: EncodingErrors
) -> Iterator[bytes | BadRecord]:
    stop = math.inf if chunk.path.endswith(COMPRESSED) else chunk.stop
    with open_input(chunk.path) as file:
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
            except UnreadableRestError as error:
                error.line = number + 1
                raise
            if not length:
                return
            reason = too_long(limit) if length > limit else None
            if line.strip():
                try:
                    yield _parse_text(line, text_key, encoding_errors)
                except ValueError as error:
                    reason = str(error)
            if reason:
                first = first or _line_number(chunk.path, begin)
                yield BadRecord(chunk.path, first + number, reason)
            at += length
            number += 1


def _parse_text(line: bytes, text_key: str, encoding_errors: EncodingErrors) -> bytes:
    """Text of one JSON line, as UTF-8. Raises ValueError, or one of its subclasses, when there is none."""
    record = _parse_line(line, encoding_errors)
    if not isinstance(record, dict):
        raise ValueError(f"the line holds {json_type(record)}, not an object with a text under {text_key!r}")
    if text_key not in record:
        found = ", ".join(map(repr, record))[:200]
        raise ValueError(
            f"no text under key {text_key!r} (--text-key); found {f'keys {found}' if found else 'an empty object'}"
        )
    text = record[text_key]
    if not isinstance(text, str):
        found = json.dumps(text)[:60]
        raise ValueError(f"key {text_key!r} holds {json_type(text)}, but text is expected (--text-key): {found}")
    return _encode(text, encoding_errors)


def _parse_line(line: bytes, encoding_errors: EncodingErrors) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        try:
            line.decode()
        except UnicodeDecodeError as error:
            if encoding_errors == "strict":
                raise ValueError(not_utf8(error)) from None
            return parse_json(line.decode("utf-8-sig", "replace"))
        raise


def _encode(text: str, encoding_errors: EncodingErrors) -> bytes:
    """`text` as UTF-8. JSON can hold half of a surrogate pair, UTF-8 cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        if encoding_errors == "strict":
            raise ValueError(not_utf8(error)) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _line_number(path: str, offset: int) -> int:
    """Number of the line of the plain file `path` that holds byte `offset`, counted from 1."""
    line = 1
    with open_input(path) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            line += block.count(b"\n")
            offset -= len(block)
    return line


def _read_text(path: str, limit: int, encoding_errors: EncodingErrors) -> bytes | BadRecord:
    with open_input(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        return BadRecord(path, 1, too_long(limit))
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if encoding_errors == "replace":
            return content.decode(errors="replace").encode()
        return BadRecord(path, content.count(b"\n", 0, error.start) + 1, not_utf8(error))
    return content


def not_utf8(error: UnicodeError) -> str:
    """Reason why a text that is not UTF-8 is not read."""
    return f"{error}; --encoding-errors replace reads such text, with U+FFFD for bytes that are not UTF-8"
