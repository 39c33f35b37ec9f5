"""The writer of Megatron's indexed dataset (moba_train/data/indexed.py, with the format), which streams."""

import contextlib
import hashlib
import json
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moba_train.data.indexed import COPY_BYTES, DTYPES, HEADER, MAGIC, IndexedDataset, TokenFile, corpus_file
from moba_train.errors import DataError
from moba_train.output_files import new_file


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Token dtype of a new corpus: uint16 for fewer than 65500 token ids (Megatron's bound), else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDatasetWriter:
    """Writes a corpus document by document; keeps 20 bytes per document in memory.

    A context manager: when the block ends normally, the files appear under their names, the index last, and replace a
    corpus of the same name; when it ends in an exception, nothing changes. With `info`, the sidecar is written too, and
    what was written is added to it.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike, info: dict[str, Any] | None = None) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._info = info
        self._lengths = array("i")
        self._offsets = array("q")
        self._table = array("q", [0])
        self._bytes = 0
        self._ids: tuple[int, int] | None = None
        self._digest = hashlib.sha256()
        corpus_file(prefix, "bin").parent.mkdir(parents=True, exist_ok=True)
        self._file = self._new("bin")

    def _temporary(self, suffix: str) -> Path:
        return corpus_file(self.prefix, f"{suffix}.tmp")

    def _new(self, suffix: str) -> BinaryIO:
        """Makes a temporary file, after removing the one that a killed process left."""
        self._temporary(suffix).unlink(missing_ok=True)
        return new_file(self._temporary(suffix))

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._table) - 1

    @property
    def tokens(self) -> int:
        """Tokens added so far."""
        return self._bytes // self.dtype.itemsize

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document of token ids [length], possibly empty. Raises DataError if an id is out of range."""
        ids = np.asarray(tokens)
        limits = np.iinfo(self.dtype)
        if ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max:
            raise DataError(
                f"corpus {self.prefix}: document {self.documents} has token ids {ids.min()}..{ids.max()}, "
                f"but its dtype {self.dtype} holds {limits.min}..{limits.max}"
            )
        self._lengths.append(len(ids))
        self._offsets.append(self._bytes)
        self._table.append(len(self._lengths))
        self._write(ids.astype(self.dtype, copy=False))

    def merge(self, prefix: str | Path) -> None:
        """Append all documents of another corpus. Raises DataError when its dtype differs."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(f"cannot merge {prefix} ({other.dtype}) into {self.prefix} ({self.dtype})")
        sequences = len(self._lengths)
        self._lengths.frombytes(other._lengths.tobytes())
        self._offsets.frombytes((other._offsets + self._bytes).tobytes())
        self._table.frombytes((other._table[1:] + sequences).tobytes())
        for _, tokens in other.blocks(COPY_BYTES // self.dtype.itemsize):
            self._write(tokens)

    def _write(self, tokens: npt.NDArray[Any]) -> None:
        content = tokens.tobytes()
        self._file.write(content)
        self._bytes += len(content)
        if self._info is not None and len(tokens):
            self._digest.update(content)
            low, high = int(tokens.min()), int(tokens.max())
            self._ids = (low, high) if self._ids is None else (min(low, self._ids[0]), max(high, self._ids[1]))

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            # After an error, closing may fail again, for example if the disk is full.
            with contextlib.suppress(OSError):
                self._file.close()
            for suffix in ("bin", "json", "idx"):
                self._temporary(suffix).unlink(missing_ok=True)

    def _publish(self) -> None:
        _flush_to_disk(self._file)
        with self._new("idx") as file:
            file.write(HEADER.pack(MAGIC, 1, self._code, len(self._lengths), len(self._table)))
            for table in (self._lengths, self._offsets, self._table):
                table.tofile(file)
            _flush_to_disk(file)
        if self._info is not None:
            info = self._info | self._written()
            with self._new("json") as file:
                file.write(json.dumps(info, indent=2).encode() + b"\n")
        # Readers open the index first, and without one there is no corpus: remove an old index before its tokens.
        corpus_file(self.prefix, "idx").unlink(missing_ok=True)
        self._temporary("bin").replace(corpus_file(self.prefix, "bin"))
        if self._info is None:
            corpus_file(self.prefix, "json").unlink(missing_ok=True)
        else:
            self._temporary("json").replace(corpus_file(self.prefix, "json"))
        self._temporary("idx").replace(corpus_file(self.prefix, "idx"))

    def _written(self) -> dict[str, Any]:
        """Entries of the sidecar about the files, which are still under their temporary names."""
        with self._temporary("idx").open("rb") as file:
            index = hashlib.file_digest(file, "sha256")
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            **({} if self._ids is None else dict(zip(("min_id", "max_id"), self._ids, strict=True))),
            "bin_sha256": self._digest.hexdigest(),
            "idx_sha256": index.hexdigest(),
            "sampled_sha256": TokenFile(self._temporary("bin"), self.dtype).sampled_sha256(),
        }


def _flush_to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
