"""The files of one source as JSON lines: text only, each content once, split by folder into training and validation."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection
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
"""Folders of this depth, such as drivers/net/ethernet/intel, are held out as a whole; files above them, by the folder
that they are in."""


@dataclass
class FileReport:
    """What was read of a source. Written last, it marks the files of the source as complete."""

    paths: dict[str, list[str]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    """By split, the path of the file in each line, inside the source."""
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """By split, size of the text."""
    digests: list[str] = field(default_factory=list)
    """Hashes of the contents, of both splits."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of files that were not taken, by reason."""


def files_of(folder: Path, source: str, split: str) -> Path:
    """The JSON lines of one split of a source."""
    return folder / f"{source}-{split}.jsonl"


def read_report(folder: Path, source: str) -> FileReport | None:
    """The report of a source whose files are complete, else None."""
    file = _report_file(folder, source)
    return FileReport(**json.loads(file.read_bytes())) if file.exists() else None


def gather_files(source: Source, folder: Path, holdout: float, earlier: Collection[str]) -> FileReport:
    """Write the files of a source as JSON lines with `text` into `folder`, one file of lines for each split.

    holdout  share of the folders that goes to validation, chosen by a hash of their paths
    earlier  digests of the files of other sources: equal files are left out

    A text begins with a line that names the file. Raises DataError when the source cannot be read.
    """
    report = FileReport()
    left_out: Counter[str] = Counter()
    seen = set(earlier)
    with ExitStack() as stack:
        outputs = {split: stack.enter_context(writing_file(files_of(folder, source.name, split))) for split in SPLITS}
        progress = stack.enter_context(ByteProgress(f"read {source.name}", max(source.total, 1)))
        for path, content, consumed in source.read():
            progress.advance(consumed)
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            text = _text(content)
            if reason := _reason(content, text, digest in seen):
                left_out[reason] += 1
                continue
            seen.add(digest)
            split = SPLITS[is_held_out(source.name, path, holdout)]
            line = f"=== {path} ===\n{text}" + ("" if content.endswith(b"\n") else "\n")
            outputs[split].write(json.dumps({"text": line}).encode() + b"\n")
            report.paths[split].append(path)
            report.bytes[split] += len(content)
            report.digests.append(digest)
    report.left_out = dict(left_out)
    replace_file(_report_file(folder, source.name), json.dumps(asdict(report)).encode())
    return report


def is_held_out(source: str, path: str, holdout: float) -> bool:
    """Whether a file goes to validation: with all others of its folder, and of folders below `HELD_OUT_DEPTH`."""
    folder = "/".join(path.split("/")[:-1][:HELD_OUT_DEPTH])
    return hash_fraction(f"{source}/{folder}".encode(), "held-out folder") < holdout


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
