"""The files of one source: read as JSON lines, each content once, split by folder, and joined to long documents."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from data_tools.corpus_sources import Source
from data_tools.outputs import hash_fraction, replace_file, writing_file
from data_tools.progress import ByteProgress
from moba_train.foreign_files import MIB

SPLITS = ("train", "valid")
FILE_BYTES = 4 * MIB
"""Longest file: longer ones are tables that a program wrote."""
HELD_OUT_DEPTH = 4
"""Folders of this depth, such as drivers/net/ethernet/intel, are held out with all that is below them. Files above are
held out with the others of their folder."""


@dataclass
class FileReport:
    """Files of a source. The report is written last, and marks the files as complete."""

    paths: list[str] = field(default_factory=list)
    """Path inside the source of the file in each line."""
    sizes: list[int] = field(default_factory=list)
    """Size of each file in bytes."""
    digests: list[str] = field(default_factory=list)
    """Hash of each file's content."""
    held_out: list[bool] = field(default_factory=list)
    """For each file, True if it belongs to validation."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of files that were not taken, by reason."""

    def files(self, split: str) -> list[int]:
        """Lines of the files of a split, in ascending order."""
        return [file for file, held_out in enumerate(self.held_out) if held_out == (split == "valid")]

    def bytes(self, split: str) -> int:
        """Size of the files of a split."""
        return sum(self.sizes[file] for file in self.files(split))


def files_of(folder: Path, source: str) -> Path:
    """The JSON lines of a source."""
    return folder / f"{source}.jsonl"


def read_report(folder: Path, source: str) -> FileReport | None:
    """Report of a source whose files are complete; None for other sources."""
    file = _report_file(folder, source)
    return FileReport(**json.loads(file.read_bytes())) if file.exists() else None


def gather_files(source: Source, folder: Path, holdout: float, earlier: Collection[str]) -> FileReport:
    """Write the files of a source as JSON lines with `text` into `folder`.

    holdout: share of the text that goes to validation
    earlier: digests of the files of other sources; equal files are left out

    A text begins with a line that names the file. Raises DataError when the source cannot be read.
    """
    report = FileReport()
    left_out: Counter[str] = Counter()
    seen = set(earlier)
    with ExitStack() as stack:
        output = stack.enter_context(writing_file(files_of(folder, source.name)))
        progress = stack.enter_context(ByteProgress(f"read {source.name}", max(source.total, 1)))
        for path, content, consumed in source.read():
            progress.advance(consumed)
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            text = _text(content)
            if reason := _reason(content, text, digest in seen):
                left_out[reason] += 1
                continue
            seen.add(digest)
            line = f"=== {path} ===\n{text}" + ("" if content.endswith(b"\n") else "\n")
            output.write(json.dumps({"text": line}).encode() + b"\n")
            report.paths.append(path)
            report.sizes.append(len(content))
            report.digests.append(digest)
    report.held_out = hold_out(source.name, report.paths, report.sizes, holdout)
    report.left_out = dict(left_out)
    replace_file(_report_file(folder, source.name), json.dumps(asdict(report)).encode())
    return report


def hold_out(source: str, paths: Sequence[str], sizes: Sequence[int], holdout: float) -> list[bool]:
    """For each file, True if it goes to validation: folders in the order of a hash of their path, as long as they fit
    into the share `holdout` of the bytes."""
    folders = ["/".join(path.split("/")[:-1][:HELD_OUT_DEPTH]) for path in paths]
    of_folder: Counter[str] = Counter()
    for folder, size in zip(folders, sizes, strict=True):
        of_folder[folder] += size
    room = holdout * sum(sizes)
    held_out = set()
    for folder in sorted(of_folder, key=lambda name: hash_fraction(f"{source}/{name}".encode(), "held-out folder")):
        if of_folder[folder] <= room:
            room -= of_folder[folder]
            held_out.add(folder)
    return [folder in held_out for folder in folders]


def _reason(content: bytes, text: str | None, duplicate: bool) -> str | None:
    """Reason why a file is not taken; None if it is."""
    if not content.strip():
        return "empty"
    if len(content) > FILE_BYTES:
        return f"longer than {FILE_BYTES // MIB} MiB"
    if text is None:
        return "not UTF-8"
    return "duplicates" if duplicate else None


def _text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _report_file(folder: Path, source: str) -> Path:
    return folder / f"{source}.json"


class FilePart(NamedTuple):
    """Tokens [start, stop) of a file."""

    file: int
    start: int
    stop: int


Document = list[FilePart]


def group_files(paths: Sequence[str], lengths: Sequence[int], minimum: int, maximum: int) -> tuple[list[Document], int]:
    """Documents of `minimum` to `maximum` tokens, and the number of tokens that are in none of them.

    The documents are made of files with these paths and lengths in tokens, in the order of their paths, so that
    neighbours in the tree of folders stay together. A folder that fits is one document, with all that is below it. In a
    larger folder, neighbours are joined until they have `minimum` tokens. A file of more than `maximum` tokens is cut
    into equal parts. A file that is too short by itself and has no neighbour with room for it is left out.
    """
    keys = {file: _tree_order(path) for file, path in enumerate(paths)}
    groups = _group(sorted(keys, key=keys.__getitem__), keys, 0, lengths, minimum, maximum)
    documents: list[Document] = []
    left_out = 0
    for group in groups:
        total = sum(lengths[file] for file in group)
        if total < minimum:
            left_out += total
        elif total <= maximum:
            documents.append([FilePart(file, 0, lengths[file]) for file in group])
        else:
            documents += [[part] for file in group for part in _cut(file, lengths[file], maximum)]
    return documents, left_out


TreeKey = tuple[tuple[bool, str], ...]


def _tree_order(path: str) -> TreeKey:
    """Sort key that puts the files of a folder before its folders, each by name."""
    *folders, name = path.split("/")
    return (*((True, folder) for folder in folders), (False, name))


def _group(
    files: list[int], keys: dict[int, TreeKey], depth: int, lengths: Sequence[int], minimum: int, maximum: int
) -> list[list[int]]:
    """Groups of `files`, which lie in one folder of this depth and keep their order."""
    if len(files) == 1 or sum(lengths[file] for file in files) <= maximum:
        return [files] if files else []
    groups: list[list[int]] = []
    size = 0
    for _, members in itertools.groupby(files, key=lambda file: keys[file][depth]):
        for group in _group(list(members), keys, depth + 1, lengths, minimum, maximum):
            added = sum(lengths[file] for file in group)
            if groups and min(size, added) < minimum and size + added <= maximum:
                groups[-1] += group
                size += added
            else:
                groups.append(group)
                size = added
    return groups


def _cut(file: int, length: int, maximum: int) -> Iterator[FilePart]:
    """Equal parts of a file, up to a token, of at most `maximum` tokens."""
    parts = -(-length // maximum)
    for index in range(parts):
        yield FilePart(file, length * index // parts, length * (index + 1) // parts)
