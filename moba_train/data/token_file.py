"""The tokens of a corpus, `PREFIX.bin`, read so that a file that shrinks or cannot be read ends in an error.

Nothing is mapped into memory: reading a page of a mapped file that has been truncated kills the process with SIGBUS,
while `pread` returns fewer bytes.
"""

import hashlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moba_train.errors import DataError

SAMPLED_BLOCKS = 64
SAMPLED_BYTES = 4096
"""Bytes of a sampled block. A file of at most `SAMPLED_BLOCKS` times as many is sampled completely."""


class TokenFile:
    """Tokens of one dtype, addressed by position. The file stays open as long as the object lives.

    Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.dtype = dtype
        self._itemsize = dtype.itemsize
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size
        """Bytes of the file when it was opened."""

    def __len__(self) -> int:
        return self.size // self.dtype.itemsize

    def read(self, first: int, count: int) -> npt.NDArray[Any]:
        """Tokens [first, first + count), read-only. Raises DataError when the file ends before, or cannot be read."""
        at = first * self._itemsize
        wanted = count * self._itemsize
        try:
            found = os.pread(self._file, wanted, at)
            # One call reads 2 GiB at most.
            while len(found) < wanted and (more := os.pread(self._file, wanted - len(found), at + len(found))):
                found += more
        except OSError as error:
            raise DataError(f"cannot read {self.path} at byte {at}: {error.strerror}") from error
        if len(found) < wanted:
            raise self._truncated()
        return np.frombuffer(found, self.dtype)

    def check_size(self) -> None:
        """Raises DataError when the file has been truncated since it was opened."""
        if os.fstat(self._file).st_size < self.size:
            raise self._truncated()

    def _truncated(self) -> DataError:
        size = os.fstat(self._file).st_size
        return DataError(
            f"{self.path} has {size} bytes, but had {self.size} when it was opened: it was truncated while in use; "
            "restore it and run the same command again"
        )

    def blocks(self, tokens: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """All tokens in order, in blocks of up to `tokens`, each with the position of its first token."""
        for first in range(0, len(self), tokens):
            yield first, self.read(first, min(tokens, len(self) - first))

    def sampled_blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """`SAMPLED_BLOCKS` blocks at even distances, the first and the last block among them, each with the position of
        its first token. Their places depend on the size of the file only."""
        block = SAMPLED_BYTES // self.dtype.itemsize
        if len(self) <= SAMPLED_BLOCKS * block:
            yield from self.blocks(block)
            return
        for index in range(SAMPLED_BLOCKS):
            first = index * (len(self) - block) // (SAMPLED_BLOCKS - 1)
            yield first, self.read(first, block)

    def sampled_sha256(self) -> str:
        """SHA-256 of the size of the file and its sampled blocks, in hexadecimal. Reads 256 KiB at most."""
        digest = hashlib.sha256(self.size.to_bytes(8, "little"))
        for _, tokens in self.sampled_blocks():
            digest.update(tokens.tobytes())
        return digest.hexdigest()
