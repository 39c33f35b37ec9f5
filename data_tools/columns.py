"""Rows of files with columns: parquet, and the .arrow files that Hugging Face's `save_to_disk` writes.

A file is read by its row groups (parquet) or record batches (arrow), so that several processes share it. Files may come
from elsewhere: the offsets in a record batch are checked before anything follows them, and what a file decompresses to
is limited. docs/reference/security.md has the limits.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
from pyarrow import ipc, parquet

from data_tools.documents import BadRecord, EncodingErrors, json_type, not_utf8, too_long
from data_tools.input_files import UnreadableRestError, expanded_limit, expands_too_far
from moba_train.errors import DataError
from moba_train.foreign_files import open_foreign

_BATCH_ROWS = 8
"""Rows that are decoded at a time: the rows of a dictionary-encoded column may all be one very long text."""
_AS_BYTES = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}


def read_texts(
    path: str, start: int, stop: int, text_key: str, limit: int, encoding_errors: EncodingErrors
) -> Iterator[bytes | BadRecord]:
    """Yield the texts in column `text_key`, as UTF-8, with unreadable ones in place.

    start, stop: bytes of the file. Row group i of n belongs to byte i * size // n, a record batch to its first byte.

    Raises DataError when there is no such column, UnreadableRestError where nothing more can be read.
    """
    taken = 0
    for row, batch, most in _batches(path, start, stop, text_key):
        for number, value in enumerate(batch.column(text_key), row):
            document = _cell_text(value, text_key, limit, encoding_errors)
            taken += len(document) if isinstance(document, bytes) else 0
            if taken > most:
                raise _at(number, expands_too_far(most))
            yield document if isinstance(document, bytes) else BadRecord(path, number, document)


def read_rows(path: str) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
    """Yield the number of each row, counted from 1, and its values as JSON has them, with unreadable rows in place.

    Keys that hold null are left out, inside of a value as well: in a column of objects, each has the keys of all.
    Bytes, such as those of images, stay bytes, which JSON lacks: nothing takes them for text.
    """
    taken = 0
    try:
        for row, batch, most in _batches(path, 0, os.path.getsize(path), None):
            taken += batch.nbytes
            if taken > most:
                raise _at(row, expands_too_far(most))
            for index in range(batch.num_rows):
                try:
                    yield row + index, _as_json(batch.slice(index, 1).to_pylist()[0])
                except (ValueError, OverflowError) as error:  # text that is not UTF-8, a time beyond Python's
                    yield row + index, BadRecord(path, row + index, str(error))
    except UnreadableRestError as error:
        yield error.line, BadRecord(path, error.line, str(error))


def _at(row: int, error: UnreadableRestError) -> UnreadableRestError:
    error.line = row
    return error


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, str | bytes | int | float) else str(value)


_Batches = Iterator[tuple[int, pyarrow.RecordBatch, int]]
"""Number of the first row of each batch, the batch, and the most bytes that all of them may hold."""


def _batches(path: str, start: int, stop: int, column: str | None) -> _Batches:
    """Batches that belong to bytes [start, stop). column: the only one that is read; None: all."""
    read = _parquet_batches if ".parquet" in Path(path).suffixes else _arrow_batches
    with open_foreign(Path(path), None) as stream:
        yield from read(path, stream, start, stop, column)


def _parquet_batches(path: str, stream: BinaryIO, start: int, stop: int, column: str | None) -> _Batches:
    row = 1
    size = os.fstat(stream.fileno()).st_size
    own = []
    try:
        file = parquet.ParquetFile(stream)
        _check_column(path, file.schema_arrow, column)
        groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
        own = [group for group in range(len(groups)) if start <= group * size // len(groups) < stop]
        most = expanded_limit(size * len(own) // max(len(groups), 1))
        row += sum(group.num_rows for group in groups[: own[0] if own else 0])
        if sum(_column_bytes(groups[group], column) for group in own) > most:
            raise _at(row, expands_too_far(most))
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=own, columns=column and [column]) if own else ():
            yield row, batch, most
            row += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the disk's; Arrow's own, of damaged data, has none
            raise
        if own or start == 0:  # a damaged table of row groups is reported once
            raise _at(row, UnreadableRestError(f"not a readable parquet file ({error})")) from error


def _column_bytes(group: Any, name: str | None) -> int:
    """Uncompressed bytes of a row group's columns, or of column `name`, as stated in the file."""
    columns = map(group.column, range(group.num_columns))
    return sum(
        column.total_uncompressed_size
        for column in columns
        if name is None or f"{column.path_in_schema}.".startswith(f"{name}.")  # a list has its items below it
    )


def _arrow_batches(path: str, stream: BinaryIO, start: int, stop: int, column: str | None) -> _Batches:
    """Batches of the stream format. They are parts of the mapped file, so a large one takes no memory."""
    row = 1
    place = 0
    size = os.fstat(stream.fileno()).st_size
    most = expanded_limit(size)  # nothing is compressed, but rows may share text, and U+FFFD takes three bytes
    if stream.read(6) == b"ARROW1":
        raise DataError(f"{path} has Arrow's file format (Feather); allowed: its stream format, or parquet")
    try:
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        source = pyarrow.BufferReader(pyarrow.py_buffer(content))
        messages = ipc.MessageReader.open_stream(source)
        schema = ipc.read_schema(messages.read_next_message())
        _check_column(path, schema, column)
        while (place := source.tell()) < min(stop, size):
            message = messages.read_next_message()
            if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
                kind = "compressed record" if message.type == "record batch" else message.type
                raise DataError(f"{path} holds {kind} batches, which are not read; write it as parquet")
            batch = ipc.read_record_batch(message, schema)
            if place >= start:
                batch = batch.select([column]) if column else batch
                for values in batch.columns:
                    # Text that is not UTF-8 is a matter of its row; wrong offsets would lead out of the file.
                    as_bytes = _AS_BYTES.get(values.type)
                    (values.cast(as_bytes) if as_bytes else values).validate(full=True)
                for first in range(0, batch.num_rows, _BATCH_ROWS):
                    yield row + first, batch.slice(first, _BATCH_ROWS), most
            row += batch.num_rows
    except StopIteration:
        return
    except (pyarrow.ArrowException, OSError) as error:
        if place >= start:  # otherwise it is reported with an earlier part
            raise _at(row, UnreadableRestError(f"the file is damaged or incomplete ({error})")) from error


def _is_compressed(message: bytes) -> bool:
    """True if the buffers of a record batch are compressed: field 3 of table RecordBatch, which is field 2 of table
    Message, both of FlatBuffers (format/Message.fbs of Apache Arrow)."""

    def field(table: int, index: int) -> int:
        """Place of a field of a table, 0 if the table lacks it."""
        fields = table - struct.unpack_from("<i", message, table)[0]
        if 4 + 2 * index >= struct.unpack_from("<H", message, fields)[0]:
            return 0
        offset = struct.unpack_from("<H", message, fields + 4 + 2 * index)[0]
        return table + offset if offset else 0

    header = field(struct.unpack_from("<I", message)[0], 2)
    return bool(field(header + struct.unpack_from("<I", message, header)[0], 3))


def _check_column(path: str, schema: pyarrow.Schema, column: str | None) -> None:
    if column is not None and schema.names.count(column) != 1:
        names = ", ".join(schema.names)[:1000]
        raise DataError(f"{path} has no column {column!r}; set --text-key to one of {names}")


def _cell_text(value: Any, text_key: str, limit: int, encoding_errors: EncodingErrors) -> bytes | str:
    """Text of a cell, as UTF-8, or the reason why there is none."""
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        if encoding_errors == "strict":
            return not_utf8(error)
        text = getattr(value, "value", value).as_buffer().to_pybytes().decode(errors="replace")
    if text is None:
        return f"row without text in column {text_key!r}"
    if not isinstance(text, str):
        return f"column {text_key!r} holds {json_type(text)}, but text is expected (--text-key)"
    encoded = text.encode()
    return encoded if len(encoded) <= limit else too_long(limit)
