"""Input files: the choice among those that the user names and those in folders, and opening them decompressed.

Files may come from elsewhere: one that decompresses to far more than its size, or is damaged, is read no further.
docs/reference/security.md has the limits.
"""

import contextlib
import fnmatch
import gzip
import importlib.util
import io
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data_tools.dataset_folders import METADATA, saved_files, select_split
from moba_train.errors import DataError, ForeignFileError, UserError
from moba_train.foreign_files import MIB, ROOTS, check_below, folder_roots, local_path, open_foreign

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
    """The rest of a file cannot be read. `str()` gives the reason."""

    line = 1
    """Line, row or record of the file at which reading stopped, as far as the reader knows."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the rest of it is skipped")


def expanded_limit(size: int) -> int:
    """Number of bytes that a compressed file of `size` bytes may hold."""
    return max(EXPANDED_BYTES, EXPANDED_RATIO * size)


def expands_too_far(limit: int) -> UnreadableRestError:
    """The error for a file that decompresses to more than `limit` bytes."""
    return UnreadableRestError(f"the file decompresses to more than {limit:,} bytes")


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading its bytes, decompressed. Reading raises UnreadableRestError in a damaged part."""
    with open_foreign(Path(path), None) as file:
        if not path.endswith(COMPRESSED):
            yield file
            return
        blocks = _gzip_blocks(file) if path.endswith(".gz") else _zstd_blocks(file)
        limit = expanded_limit(os.fstat(file.fileno()).st_size)
        yield io.BufferedReader(_Decompressed(blocks, limit), buffer_size=1 << 17)


class _Decompressed(io.RawIOBase):
    """Stream of the bytes in `blocks`. Raises UnreadableRestError beyond `limit` bytes."""

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


_SUFFIXES = (
    "txt md rst tex jsonl parquet arrow py pyi c h cc cpp hpp cu cuh java js ts go rs rb php pl lua scala kt swift cs "
    "hs ml jl r sh sql html css yaml yml toml json xml jsonl.gz jsonl.zst txt.gz txt.zst"
)
TEXT_GLOBS = tuple(f"*.{suffix}" for suffix in _SUFFIXES.split())
"""Files that are read from a folder by default."""

SHOWN_SUFFIXES = 8
"""Suffixes of left-out files that a message names."""
OPTIONAL_PACKAGES = {".parquet": "pyarrow", ".arrow": "pyarrow", ".zst": "zstandard"}
"""Packages that are needed to read files with these suffixes."""


@dataclass
class LeftOut:
    """Files in folders that `find_files` does not return, except those that an exclude names."""

    links: list[str] = field(default_factory=list)
    """Links that lead out of their folder."""
    suffixes: Counter[str] = field(default_factory=Counter)
    """Number of files that match no glob, by suffix; an empty suffix stands for none."""
    irregular: list[str] = field(default_factory=list)
    """Files that match a glob but are no regular files: pipes, devices and broken links."""


def find_files(
    inputs: Sequence[str],
    globs: Sequence[str],
    excludes: Sequence[str],
    left_out: LeftOut | None = None,
    split: str | None = None,
    option: str = "--input",
) -> list[str]:
    """Files among `inputs`, and files that match one of `globs` in the folders among them, in sorted order. An input
    may be an address such as `s3://...`, of which a copy is made.

    A glob matches a file's name or its path inside the folder; an exclude also matches any folder on that path. Links
    that lead out of a folder are left out, while an input itself may be a link to anywhere. `left_out` records what is
    left out. Of a folder with several splits (dataset_folders.py), `split` is read. Raises DataError when an input does
    not exist, nothing is found, a split is not clear, or a file needs a package that is missing; `option` is
    what gave the inputs.
    """
    files: list[str] = []
    left_out = LeftOut() if left_out is None else left_out
    for given in inputs:
        try:
            path = local_path(given)
        except UserError as error:
            raise DataError(f"{option}: {error}") from None
        given = str(path)
        if path.is_dir():
            roots = folder_roots(path)
            for name in select_split(given, sorted(_walk(given, globs, excludes, left_out)), split, option):
                file = os.path.join(given, name)
                (left_out.links if _leads_out(file, roots) else files).append(file)
        elif path.is_file():
            files.append(given)
        elif path.exists():
            raise DataError(f"{option} {given} is a pipe or a device; allowed: files and folders")
        else:
            raise DataError(f"{option} {given} does not exist")
    if not files:
        raise DataError(_nothing_found(inputs, globs, excludes, left_out))
    for suffix, package in OPTIONAL_PACKAGES.items():
        found = next((file for file in files if file.endswith(suffix)), None)
        if found and importlib.util.find_spec(package) is None:
            raise DataError(f"{found} needs {package}; run `pip install {package}` or give --exclude '*{suffix}'")
    return list(dict.fromkeys(files))


def _nothing_found(inputs: Sequence[str], globs: Sequence[str], excludes: Sequence[str], left_out: LeftOut) -> str:
    text = f"no file in {', '.join(inputs)} matches {' '.join(globs)}"
    if excludes:
        text += f" without matching --exclude {' '.join(excludes)}"
    if left_out.suffixes:
        text += f"; there are {describe_suffixes(left_out.suffixes)}"
    if left_out.links:
        text += f"; {len(left_out.links)} links lead out of the folder, which {ROOTS} may allow"
    return text


def describe_suffixes(suffixes: Counter[str]) -> str:
    """The number of files by suffix, the most frequent suffixes first."""
    named = suffixes.most_common(SHOWN_SUFFIXES)
    parts = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in named]
    if others := suffixes.total() - sum(count for _, count in named):
        parts.append(f"{others:,} of {len(suffixes) - len(named)} other suffixes")
    return ", ".join(parts)


def _leads_out(file: str, roots: Sequence[Path]) -> bool:
    if not os.path.islink(file):
        return False
    try:
        check_below(Path(file), roots)
    except ForeignFileError:
        return True
    return False


def _walk(folder: str, globs: Sequence[str], excludes: Sequence[str], left_out: LeftOut) -> Iterator[str]:
    """Paths, relative to `folder`, of the matching files in it. Excluded folders are not entered."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; make it readable or give --exclude")

    for where, folders, names in os.walk(folder, onerror=refuse):
        inside = os.path.relpath(where, folder)
        folders[:] = [name for name in folders if not _match(inside, name, excludes)]
        for name in saved_files(where, names) or names:
            if _match(inside, name, excludes) or name in METADATA:
                continue
            if not _match(inside, name, globs):
                left_out.suffixes[_suffix(name)] += 1
            elif os.path.isfile(os.path.join(where, name)):
                yield _join(inside, name)
            else:
                left_out.irregular.append(os.path.join(where, name))


def _suffix(name: str) -> str:
    """Suffix of a file name; for a compressed file also that of the file inside: .csv.gz."""
    path = Path(name)
    return "".join(path.suffixes[-2:]) if path.suffix in COMPRESSED else path.suffix


def _match(inside: str, name: str, patterns: Sequence[str]) -> bool:
    path = _join(inside, name)
    return any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _join(inside: str, name: str) -> str:
    return name if inside == "." else f"{inside}/{name}"
