"""Input files: which files a command reads, among those that the user names and in folders."""

import fnmatch
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_tools.decompress import COMPRESSED
from moba_train.errors import DataError, ForeignFileError
from moba_train.foreign_files import ROOTS, check_below, folder_roots

_SUFFIXES = (
    "txt md rst tex jsonl parquet py pyi c h cc cpp hpp cu cuh java js ts go rs rb php pl lua scala kt swift cs hs "
    "ml jl r sh sql html css yaml yml toml json xml jsonl.gz jsonl.zst txt.gz txt.zst"
)
TEXT_GLOBS = tuple(f"*.{suffix}" for suffix in _SUFFIXES.split())
"""Files that are read from a folder by default."""

SHOWN_SUFFIXES = 8
"""Suffixes of left-out files that a message names."""
OPTIONAL_PACKAGES = {".parquet": "pyarrow", ".zst": "zstandard"}
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
    inputs: Sequence[str], globs: Sequence[str], excludes: Sequence[str], left_out: LeftOut | None = None
) -> list[str]:
    """Files among `inputs`, and files that match one of `globs` in the folders among them, in sorted order.

    A glob matches a file's name or its path inside the folder; an exclude also matches any folder on that path. Links
    that lead out of a folder are left out, while an input itself may be a link to anywhere. `left_out` records what is
    left out. Raises DataError when an input does not exist, nothing is found, or a file needs a package that is
    missing.
    """
    files: list[str] = []
    left_out = LeftOut() if left_out is None else left_out
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            roots = folder_roots(path)
            for name in sorted(_walk(given, globs, excludes, left_out)):
                file = os.path.join(given, name)
                (left_out.links if _leads_out(file, roots) else files).append(file)
        elif path.is_file():
            files.append(given)
        elif path.exists():
            raise DataError(f"--input {given} is a pipe or a device; allowed: files and folders")
        else:
            raise DataError(f"--input {given} does not exist")
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
        for name in names:
            if _match(inside, name, excludes):
                continue
            if not _match(inside, name, globs):
                left_out.suffixes[_suffix(name)] += 1
            elif os.path.isfile(os.path.join(where, name)):
                yield _join(inside, name)
            else:
                left_out.irregular.append(os.path.join(where, name))


def _suffix(name: str) -> str:
    """Suffix of a file name, with that of the file inside a compressed one: .csv.gz."""
    path = Path(name)
    return "".join(path.suffixes[-2:]) if path.suffix in COMPRESSED else path.suffix


def _match(inside: str, name: str, patterns: Sequence[str]) -> bool:
    path = _join(inside, name)
    return any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _join(inside: str, name: str) -> str:
    return name if inside == "." else f"{inside}/{name}"
