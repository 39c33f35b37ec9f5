"""The files of one source as JSON lines: text only, each content once; and the folders that are held out."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data_tools.corpus_sources import Source
from data_tools.holdout import hash_fraction
from data_tools.outputs import replace_file, writing_file
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
    """What was read of a source. Written last, it marks the files of the source as complete."""

    paths: list[str] = field(default_factory=list)
    """Path of the file in each line, inside the source."""
    sizes: list[int] = field(default_factory=list)
    """Its size in bytes."""
    digests: list[str] = field(default_factory=list)
    """Hash of its content."""
    held_out: list[bool] = field(default_factory=list)
    """Whether it belongs to validation."""
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
    """The report of a source whose files are complete, else None."""
    file = _report_file(folder, source)
    return FileReport(**json.loads(file.read_bytes())) if file.exists() else None


def gather_files(source: Source, folder: Path, holdout: float, earlier: Collection[str]) -> FileReport:
    """Write the files of a source as JSON lines with `text` into `folder`.

    holdout  share of the text that goes to validation
    earlier  digests of the files of other sources: equal files are left out

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
    """Whether each file goes to validation: folders in the order of a hash of their path, as long as they fit into the
    share `holdout` of the bytes."""
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
    """Why a file is not taken; None: it is."""
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
