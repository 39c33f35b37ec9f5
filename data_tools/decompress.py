"""Opening input files, decompressed: .gz, .zst, and plain ones.

Files may come from elsewhere: one that decompresses to far more than its size, or is damaged, is read no further.
docs/security.md has the limits.
"""

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from moba_train.foreign_files import MIB, open_foreign

COMPRESSED = (".gz", ".zst")
"""Suffixes of compressed files."""
EXPANDED_BYTES = 256 * MIB
EXPANDED_RATIO = 200
"""A file may decompress to the larger of these: bytes, or this number of times its size. Text shrinks to a tenth."""
_BLOCK_BYTES = 1 << 17
"""Bytes that are decompressed at a time."""
_ZSTD_BYTES = 1 << 10
"""Bytes of a .zst file that are decompressed at a time: they become 32 MiB at most."""


class UnreadableRestError(Exception):
    """What follows in a file cannot be read. `str()` says why."""

    line = 1
    """Line, row or record of the file at which reading stopped, as far as the reader knows."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the rest of it is skipped")


def expanded_limit(size: int) -> int:
    """Bytes that a compressed file of `size` bytes may hold."""
    return max(EXPANDED_BYTES, EXPANDED_RATIO * size)


def expands_too_far(limit: int) -> UnreadableRestError:
    """The error for a file that decompresses to more than `limit` bytes."""
    return UnreadableRestError(f"the file decompresses to more than {limit:,} bytes")


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading its bytes, decompressed. Reading raises UnreadableRestError where the file is damaged."""
    with open_foreign(Path(path), None) as file:
        if not path.endswith(COMPRESSED):
            yield file
            return
        blocks = _gzip_blocks(file) if path.endswith(".gz") else _zstd_blocks(file)
        limit = expanded_limit(os.fstat(file.fileno()).st_size)
        yield io.BufferedReader(_Decompressed(blocks, limit), buffer_size=1 << 17)


class _Decompressed(io.RawIOBase):
    """The bytes of `blocks` as a stream. Raises UnreadableRestError beyond `limit` bytes."""

    def __init__(self, blocks: Iterator[bytes], limit: int) -> None:
        self._blocks = blocks
        self._block = b""
        self._at = 0
        self._limit = self._left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._at == len(self._block):
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._block = block
            self._at = 0
            self._left -= len(block)
            if self._left < 0:
                raise expands_too_far(self._limit)
        count = min(len(buffer), len(self._block) - self._at)
        buffer[:count] = self._block[self._at : self._at + count]
        self._at += count
        return count


def _gzip_blocks(file: BinaryIO) -> Iterator[bytes]:
    source = gzip.GzipFile(fileobj=file)
    try:
        while block := source.read1(_BLOCK_BYTES):
            yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(error) from error


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Decompressed blocks of all frames; tools that compress in parallel write several."""
    import zstandard

    # zstandard's stream reader takes the end of the file for the end of the data, even in the middle of a frame.
    frame = None
    try:
        while block := file.read(_ZSTD_BYTES):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(block)
                block = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise _damaged(error) from error
    if frame is not None:
        raise _damaged("the file ends inside a frame")


def _damaged(why: object) -> UnreadableRestError:
    return UnreadableRestError(f"the file is damaged or incomplete ({why})")
