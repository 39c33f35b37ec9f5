"""The manifest and meta of a checkpoint, read as untrusted input.

`manifest.json` names every file of the checkpoint with its size and SHA-256. Names are plain file names: a name that
leads out of the folder is refused before the file system is asked, and so is a file that is a symbolic link.
"""

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, TypedDict

from moba_train.errors import CheckpointError
from moba_train.foreign_files import open_foreign

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
META = "meta.json"

_PLAIN_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,255}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileEntry(TypedDict):
    """The manifest's entry for one file: `size` in bytes, `sha256` in hex."""

    size: int
    sha256: str


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of one file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` and fsyncs the file."""
    with path.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError when there is none."""
    try:
        with open_foreign(path, None, links=False) as stream:
            content = json.loads(stream.read())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use another checkpoint of this run") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {type(content).__name__}, must hold a JSON object")
    return content


def read_meta(path: Path) -> dict[str, Any]:
    """The meta (a JSON object) that the checkpoint was saved with. Raises CheckpointError when it cannot be read."""
    return read_json(path / META)


def read_manifest(path: Path) -> dict[str, FileEntry]:
    """The files of checkpoint `path`, by name. Raises CheckpointError when its manifest is missing or damaged."""
    file = path / MANIFEST
    manifest = read_json(file)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version is {manifest.get('format_version')!r}, "
            f"this version of moba_train reads {FORMAT_VERSION}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise CheckpointError(f"{file}: `files` must map each file name to its size and sha256")
    for name in files:
        if not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f"{file}: names the file {name!r}; allowed: plain names (letters, digits, . _ -) in the same folder"
            )
    return files


def check_sizes(path: Path) -> dict[str, FileEntry]:
    """Compares the size of every file with the manifest, which is returned. Raises CheckpointError naming all
    files that differ."""
    files = read_manifest(path)
    _raise_if_damaged(path, size_problems(path, files))
    return files


def verify_checkpoint(path: Path, rank: int = 0, ranks: int = 1) -> dict[str, FileEntry]:
    """Reads every byte and compares with the manifest, which is returned. Raises CheckpointError naming each damaged,
    missing or extra file. With `ranks` > 1, only every `ranks`-th file is read, beginning with number `rank`."""
    files = read_manifest(path)
    problems = size_problems(path, files)
    for name in sorted(files.keys() - problems.keys())[rank::ranks]:
        try:
            if hash_file(path / name)["sha256"] != files[name]["sha256"]:
                problems[name] = "its SHA-256 is not the manifest's"
        except OSError as error:
            problems[name] = f"cannot be read ({error})"
    for name in sorted({entry.name for entry in path.iterdir()} - files.keys() - {MANIFEST}):
        problems[name] = "extra file, not in the manifest"
    _raise_if_damaged(path, problems)
    return files


def size_problems(path: Path, files: dict[str, FileEntry]) -> dict[str, str]:
    """Files that are missing, have another size, or are not regular files: the problem by file name."""
    problems = {}
    for name, entry in files.items():
        try:
            status = (path / name).lstat()
        except OSError:
            problems[name] = "missing"
            continue
        if not stat.S_ISREG(status.st_mode):
            problems[name] = "not a regular file; links and folders have no place in a checkpoint"
        elif status.st_size != entry["size"]:
            problems[name] = f"{status.st_size} bytes, the manifest says {entry['size']}"
    return problems


def listed(problems: dict[str, str]) -> str:
    """Problems by file name, as one line of text."""
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
        return False
    size, sha256 = entry["size"], entry["sha256"]
    return type(size) is int and size >= 0 and isinstance(sha256, str) and bool(_SHA256.fullmatch(sha256))


def _raise_if_damaged(path: Path, problems: dict[str, str]) -> None:
    if problems:
        raise CheckpointError(f"checkpoint {path} is damaged: {listed(problems)}; use another checkpoint of this run")
