"""Megatron's indexed dataset, which `data_tools/corpus_writer.py` writes.

A corpus is a pair of files. `PREFIX.bin` holds the raw tokens; `PREFIX.idx`, little-endian, locates them:

    9 bytes   b"MMIDIDX\0\0"
    u64       version, 1
    u8        dtype code of the tokens, see `DTYPES`
    u64       S, sequences
    u64       D + 1, entries of the document table
    int32[S]  tokens in each sequence
    int64[S]  byte offset of each sequence in PREFIX.bin
    int64[D+1]  first sequence of each document; the first entry is 0, the last S
    int8[S]   modes, optional and ignored

`PREFIX.json`, the sidecar, is written only by our own tools; see data/sidecar.py.

Tokens are not mapped into memory: reading a page of a mapped file that has been truncated kills the process with
SIGBUS, while `pread` returns fewer bytes, which become an error with the name of the file.
"""

import functools
import hashlib
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moba_train.data.sidecar import Fingerprint, read_sidecar
from moba_train.errors import DataError, UnreadableDataError

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
            # pread has no shared position, so threads need no lock.
            found = os.pread(self._file, wanted, at)
            # One call reads 2 GiB at most.
            while len(found) < wanted and (more := os.pread(self._file, wanted - len(found), at + len(found))):
                found += more
        except OSError as error:
            raise UnreadableDataError(f"cannot read {self.path} at byte {at}: {error.strerror}") from error
        if len(found) < wanted:
            raise self._truncated()
        return np.frombuffer(found, self.dtype)

    def check_size(self) -> None:
        """Raise DataError when the file has been truncated since it was opened."""
        if os.fstat(self._file).st_size < self.size:
            raise self._truncated()

    def _truncated(self) -> DataError:
        size = os.fstat(self._file).st_size
        return DataError(
            f"{self.path} has {size} bytes, but had {self.size} when it was opened: it was truncated while in use; "
            "restore it and run the same command again"
        )

    def blocks(self, tokens: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield all tokens in order, in blocks of up to `tokens`, each with the position of its first token."""
        for first in range(0, len(self), tokens):
            yield first, self.read(first, min(tokens, len(self) - first))

    def sampled_blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield `SAMPLED_BLOCKS` blocks at even distances, the first and the last block among them, each with the
        position of its first token. The positions depend on the size of the file only."""
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


MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
COPY_BYTES = 16 << 20
"""Bytes read at a time when corpora are merged or searched."""


def corpus_file(prefix: str | Path, suffix: str) -> Path:
    """File of corpus `prefix` with this suffix ("bin", "idx" or "json"). The prefix may contain dots."""
    return Path(f"{prefix}.{suffix}")


class IndexedDataset:
    """A corpus on disk. Opening it checks every size and table, and sampled tokens against the sidecar if there is one;
    tokens are read on demand.

    Raises DataError when the pair is missing, truncated or inconsistent. The message names the file and the first bad
    byte.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._idx = corpus_file(prefix, "idx")
        self._bin = corpus_file(prefix, "bin")
        try:
            self._read_index()
            self._open_tokens()
            self.info = read_sidecar(corpus_file(prefix, "json"))
        except OSError as error:
            raise UnreadableDataError(
                f"corpus {self.prefix}: cannot read {error.filename}: {error.strerror}; "
                "a corpus prefix is the file names without .bin/.idx"
            ) from error
        ends = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        self.document_lengths: npt.NDArray[np.int64] = ends[self._table[1:]] - ends[self._table[:-1]]
        """int64 [documents]: tokens in each document; may be 0."""
        self.documents = len(self.document_lengths)
        """Number of documents."""
        self.tokens = int(self.document_lengths.sum())
        """Number of tokens in all documents."""
        self._sampled_sha256 = self._tokens.sampled_sha256()
        self._check_written("bin", "sampled_sha256", self._sampled_sha256)

    def _read_index(self) -> None:
        size = self._idx.stat().st_size
        if size < HEADER.size:
            raise self._broken(self._idx, size, f"the file ends inside its {HEADER.size}-byte header")
        with self._idx.open("rb") as file:
            magic, version, code, sequences, entries = HEADER.unpack(file.read(HEADER.size))
        if magic != MAGIC:
            raise self._broken(self._idx, 0, f"it begins with {magic!r}, an indexed dataset with {MAGIC!r}")
        if version != 1:
            raise self._broken(self._idx, 9, f"version {version}; only version 1 is known")
        if code not in DTYPES or DTYPES[code].kind == "f":
            known = ", ".join(f"{code} {dtype}" for code, dtype in DTYPES.items() if dtype.kind != "f")
            raise self._broken(self._idx, 17, f"dtype code {code}; token ids are one of {known}")
        if entries < 1:
            raise self._broken(self._idx, 26, "the document table has no entry; it needs one more than documents")
        self.dtype = DTYPES[code]

        offsets_at = HEADER.size + 4 * sequences
        table_at = offsets_at + 8 * sequences
        end = table_at + 8 * entries
        if size not in (end, end + sequences):
            raise self._broken(
                self._idx,
                min(size, end),
                f"{size} bytes, but the header announces {sequences} sequences and {entries - 1} documents, "
                f"which take {end} bytes, or {end + sequences} with modes",
            )
        # Mapped, unlike the tokens, because all ranks of a node share it: 20 bytes a document, and opening 10 million
        # documents takes 0.8 s (benchmarks/results/index-memory.json). `document` checks the size of the file first.
        index = np.memmap(self._idx, dtype=np.uint8, mode="r").view(np.ndarray)
        self._index_file = TokenFile(self._idx, index.dtype)
        self._lengths: npt.NDArray[np.int32] = index[HEADER.size : offsets_at].view("<i4")
        self._offsets: npt.NDArray[np.int64] = index[offsets_at:table_at].view("<i8")
        self._table: npt.NDArray[np.int64] = index[table_at:end].view("<i8")

        self._check(self._lengths >= 0, HEADER.size, 4, "a sequence has a negative length")
        possible = (self._offsets >= 0) & (self._offsets < 1 << 62)
        self._check(possible, offsets_at, 8, "a sequence has an impossible offset")
        self._check(self._offsets % self.dtype.itemsize == 0, offsets_at, 8, "an offset falls between two tokens")
        self._check(self._offsets[1:] >= self._offsets[:-1], offsets_at + 8, 8, "the sequence offsets decrease")
        self._check(self._table[:1] == 0, table_at, 8, "the document table does not begin with 0")
        self._check(self._table[1:] >= self._table[:-1], table_at + 8, 8, "the document table decreases")
        self._check(self._table[-1:] == sequences, end - 8, 8, f"the document table does not end with {sequences}")

    def _open_tokens(self) -> None:
        self._tokens = TokenFile(self._bin, self.dtype)
        size = self._tokens.size
        ends = self._offsets + np.multiply(self._lengths, self.dtype.itemsize, dtype=np.int64)
        expected = int(ends.max(initial=0))
        if size != expected:
            raise self._broken(
                self._bin,
                min(size, expected),
                f"{size} bytes, but {self._idx} describes {expected}; the two files do not belong together "
                "or one of them is incomplete",
            )

    def _check(self, good: npt.NDArray[np.bool_], first_byte: int, itemsize: int, problem: str) -> None:
        if not good.all():
            raise self._broken(self._idx, first_byte + itemsize * int(np.argmin(good)), problem)

    def _broken(self, file: Path, byte: int, problem: str) -> DataError:
        return DataError(f"corpus {self.prefix}: {file} is damaged at byte {byte}: {problem}; make the corpus again")

    def _check_written(self, suffix: str, key: str, found: str) -> None:
        """Raise DataError when the sidecar has another hash than the one found."""
        written = (self.info or {}).get(key, found)
        if written != found:
            raise DataError(
                f"corpus {self.prefix}: {corpus_file(self.prefix, suffix)} is not what was written: its {key} is "
                f"{found[:12]}..., {self.prefix}.json says {written[:12]}...; restore the file or make the corpus again"
            )

    def document(self, index: int, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Tokens [start, stop) of document `index`, read-only, in the corpus' own dtype.

        Raises IndexError when the document or the range does not exist, DataError when the tokens cannot be read.
        """
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}")
        length = int(self.document_lengths[index])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"tokens {start}:{stop} of a document of {length}")
        # Reading a mapped page behind the end of a truncated file kills the process (SIGBUS), without a message.
        self._index_file.check_size()
        first, end = self._table[index : index + 2].tolist()
        if end == first + 1:  # as in most corpora; this is twice as fast as the loop below
            return self._tokens.read(self._first_token(first) + start, stop - start)
        found = []
        before = 0
        for sequence in range(first, end):
            tokens = int(self._lengths[sequence])
            low = max(start - before, 0)
            high = min(stop - before, tokens)
            if low < high:
                found.append(self._tokens.read(self._first_token(sequence) + low, high - low))
            before += tokens
        return np.concatenate(found) if found else np.empty(0, self.dtype)

    def _first_token(self, sequence: int) -> int:
        return int(self._offsets[sequence]) // self.dtype.itemsize

    def blocks(self, tokens: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield blocks of up to `tokens` tokens of PREFIX.bin, in order, each with the position of its first token."""
        return self._tokens.blocks(tokens)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError when the corpus was made for a larger vocabulary, or has a token outside [0, vocab_size).

        Reads the sampled blocks, and every token if the sidecar records a token outside.
        """
        info = self.info or {}
        made_for = info.get("vocab_size", 0)
        if made_for > vocab_size:
            raise DataError(
                f"corpus {self.prefix} was tokenized with a vocabulary of {made_for}, but model.vocab_size is "
                f"{vocab_size}; make it with the model's tokenizer, or set model.vocab_size of a new one to {made_for}"
            )
        recorded = info.get("min_id", 0) < 0 or info.get("max_id", 0) >= vocab_size
        for begin, tokens in self.blocks(COPY_BYTES) if recorded else self._tokens.sampled_blocks():
            if found := self.first_outside(begin, tokens, vocab_size):
                document, offset, token = found
                raise vocabulary_error(self.prefix, document, offset, token, vocab_size)

    def first_outside(
        self, begin: int, tokens: npt.NDArray[Any], vocab_size: int | None
    ) -> tuple[int, int, int] | None:
        """Document, offset in it and id of the first of `tokens` outside [0, vocab_size); None if there is none.

        The tokens are those at position `begin` of PREFIX.bin. None as `vocab_size`: ids are unlimited.
        """
        bad = outside(tokens, vocab_size)
        for place in np.flatnonzero(bad):
            if found := self.document_at(begin + int(place)):
                return *found, int(tokens[place])
        return None

    def document_at(self, position: int) -> tuple[int, int] | None:
        """The document that holds token `position` of PREFIX.bin, and the offset in it; None if there is none."""
        sequence = int(np.searchsorted(self._offsets, position * self.dtype.itemsize, side="right")) - 1
        within = position - int(self._offsets[sequence]) // self.dtype.itemsize if sequence >= 0 else 0
        if sequence < 0 or within >= self._lengths[sequence]:
            return None
        document = int(np.searchsorted(self._table, sequence, side="right")) - 1
        return document, int(self._lengths[self._table[document] : sequence].sum()) + within

    def documents_of_length(self, minimum: int, below: int | None) -> npt.NDArray[np.int64]:
        """Documents with at least `minimum` and fewer than `below` tokens (None: no limit), int64 [n], ascending."""
        wanted = self.document_lengths >= minimum
        if below is not None:
            wanted &= self.document_lengths < below
        return np.flatnonzero(wanted)

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the documents, without a mask. Raises DataError when PREFIX.idx is not what the sidecar says.

        Its `index` changes when the length or order of documents changes, but not when a token is replaced by another.
        """
        with self._idx.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        self._check_written("idx", "idx_sha256", digest.hexdigest())
        digest.update(struct.pack("<Q", self._tokens.size))
        return Fingerprint(digest.hexdigest(), self._sampled_sha256, (self.info or {}).get("bin_sha256"))


def outside(tokens: npt.NDArray[Any], vocab_size: int | None) -> npt.NDArray[np.bool_]:
    """Mask of the `tokens` that lie outside [0, vocab_size), bool; None: ids are unlimited."""
    return tokens < 0 if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)


def vocabulary_error(prefix: str, document: int, offset: int, token: int, vocab_size: int) -> DataError:
    """Error for a token of a corpus that has no row in the model's embedding."""
    return DataError(
        f"corpus {prefix}: document {document} has token id {token} at offset {offset}, but model.vocab_size is "
        f"{vocab_size}; set model.vocab_size to the size of the tokenizer that made the corpus"
    )
