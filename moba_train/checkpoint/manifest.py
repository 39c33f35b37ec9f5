"""The manifest and meta of a checkpoint, read as untrusted input, and its files compared with the manifest.

`manifest.json` names every file of the checkpoint with its size and SHA-256. Names are plain file names: a name that
leads out of the folder is refused before the file system is asked, and so is a file that is a symbolic link. Files that
the manifest does not name (`.DS_Store`, `.nfs...`) are never read and never count.
"""

import hashlib
import re
import reprlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from moba_train.checkpoint.files import (
    NOT_REGULAR,
    UnreadableError,
    is_missing,
    open_regular,
    read_file,
    threads_for,
    try_all,
)
from moba_train.errors import CheckpointError
from moba_train.output_files import write_new
from moba_train.strict_json import from_json, to_json

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
META = "meta.json"

JSON_BYTES = 8 << 20
"""Largest manifest or meta: the manifest of 50,000 files has 7 MB."""
JSON_VALUES = 1_000_000
"""Most values in a manifest or meta: an empty list takes 2 bytes of text and 64 of memory."""
JSON_DEPTH = 100
"""Deepest nesting in a manifest or meta; code that walks through one calls itself at every level."""

STEP_FOLDER = re.compile(r"step_(\d{8,})")
_PLAIN_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,255}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OTHER_ONE = "use another checkpoint of this run"


class FileEntry(TypedDict):
    """The manifest's entry for one file: `size` in bytes, `sha256` in hex."""

    size: int
    sha256: str


def step_name(step: int) -> str:
    """The folder name of a step; names sort like steps."""
    return f"step_{step:08d}"


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of one file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` and fsyncs the file. Raises CheckpointError when it would be too large to be read again."""
    text = to_json(content, indent=1).encode()
    if problem := _size_problem(text):
        raise CheckpointError(f"{path}: cannot be written: {problem}")
    write_new(path, text)


def read_meta(path: Path) -> dict[str, Any]:
    """The meta (a JSON object) that checkpoint `path` was saved with, read only after its bytes agree with the
    manifest. Raises CheckpointError when meta or manifest is damaged, UnreadableError when it could not be read."""
    return _parse_small(path / META, read_verified(path, META, read_manifest(path), JSON_BYTES))


def read_verified(path: Path, name: str, files: Mapping[str, FileEntry], limit: int) -> bytes:
    """The file `name` of checkpoint `path`, at most `limit` bytes, compared with its entry in the manifest, `files`.

    Raises CheckpointError when it is damaged, UnreadableError when it could not be read.
    """
    if name not in files:
        raise CheckpointError(f"checkpoint {path} is damaged: its manifest has no {name}; {_OTHER_ONE}")
    entry = files[name]
    if entry["size"] > limit:
        raise CheckpointError(f"{path / name}: {entry['size']} bytes, at most {limit} are read; {_OTHER_ONE}")
    content = read_file(path / name, limit)
    if len(content) != entry["size"]:
        _raise_problems(path, {name: _other_size(len(content), entry)}, {})
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        _raise_problems(path, {name: _OTHER_HASH}, {})
    return content


def read_manifest(path: Path) -> dict[str, FileEntry]:
    """The files of checkpoint `path`, by name. Raises CheckpointError when its manifest is missing, damaged or of
    another format or of another step than the folder's name, UnreadableError when it could not be read."""
    file = path / MANIFEST
    manifest = _parse_small(file, read_file(file, JSON_BYTES))
    found = manifest.get("format_version")
    if type(found) is not int or found != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version is {reprlib.repr(found)}, this version of moba_train reads {FORMAT_VERSION}"
        )
    step = manifest.get("step")
    named = STEP_FOLDER.fullmatch(path.name)
    if named and type(step) is int and step != int(named[1]):  # a copy: under a later name it would win for ever
        raise CheckpointError(
            f"{path}: its name says step {int(named[1])}, its {file.name} says step {step}; rename it to "
            f"{step_name(step)}, or delete it"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise CheckpointError(f"{file}: `files` must map each file name to its size and sha256")
    for name in files:
        if not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f"{file}: names the file {reprlib.repr(name)}; allowed: plain names (letters, digits, . _ -) in the "
                "same folder"
            )
    return files


def check_sizes(path: Path, rank: int = 0, ranks: int = 1) -> dict[str, FileEntry]:
    """Compares the size of every file with the manifest, which is returned. With `ranks` > 1, only every `ranks`-th
    file is looked at, beginning with number `rank`.

    Raises CheckpointError naming all files that differ, UnreadableError when a file could not be looked at.
    """
    files = read_manifest(path)
    _raise_problems(path, *_size_problems(path, _own_part(files, rank, ranks)))
    return files


def verify_checkpoint(path: Path, rank: int = 0, ranks: int = 1) -> dict[str, FileEntry]:
    """Reads every byte and compares with the manifest, which is returned. With `ranks` > 1, only every `ranks`-th file
    is looked at and read, beginning with number `rank`.

    Raises CheckpointError naming each damaged or missing file, UnreadableError when none of them is damaged but some
    could not be read.
    """
    files = read_manifest(path)
    own = _own_part(files, rank, ranks)
    damaged, unread = _size_problems(path, own)
    readable = own.keys() - damaged.keys() - unread.keys()
    threads = threads_for(sum(files[name]["size"] for name in readable))
    hashes, errors = try_all(readable, lambda name: _sha256_of(path / name), threads)
    damaged |= {name: _OTHER_HASH for name, digest in hashes.items() if digest != files[name]["sha256"]}
    _raise_problems(path, damaged, unread | {name: str(error) for name, error in errors.items()})
    return files


def size_problems(path: Path, files: Mapping[str, FileEntry]) -> dict[str, str]:
    """Files that are missing, have another size, are not regular files or could not be looked at: the problem by file
    name."""
    damaged, unread = _size_problems(path, files)
    return damaged | unread


def listed(problems: dict[str, str]) -> str:
    """Problems by file name, the first 20 of them, as one line of text."""
    shown = [f"{name}: {problem}" for name, problem in problems.items()][:20]
    more = len(problems) - len(shown)
    return "; ".join(shown + [f"and {more} more"] * (more > 0))


_OTHER_HASH = "its SHA-256 is not the manifest's"


def _other_size(size: int, entry: FileEntry) -> str:
    return f"{size} bytes, the manifest says {entry['size']}"


def _own_part(files: Mapping[str, FileEntry], rank: int, ranks: int) -> dict[str, FileEntry]:
    return {name: files[name] for name in sorted(files)[rank::ranks]}


def _size_problems(path: Path, files: Mapping[str, FileEntry]) -> tuple[dict[str, str], dict[str, str]]:
    """Problems of damaged or missing files, and of those that could not be looked at, by file name."""
    damaged = {}
    unread = {}
    # lstat: a link's target may lie outside the checkpoint.
    found, errors = try_all(files, lambda name: (path / name).lstat())
    for name, status in found.items():
        if not stat.S_ISREG(status.st_mode):
            damaged[name] = NOT_REGULAR
        elif status.st_size != files[name]["size"]:
            damaged[name] = _other_size(status.st_size, files[name])
    for name, error in errors.items():
        if is_missing(path / name, error):
            damaged[name] = "missing"
        else:
            unread[name] = str(error)
    return damaged, unread


def _sha256_of(path: Path) -> str:
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_entry(entry: Any) -> bool:
    match entry:
        case {"size": int(size), "sha256": str(sha256)} if len(entry) == 2 and not isinstance(size, bool):
            return 0 <= size < 1 << 63 and bool(_SHA256.fullmatch(sha256))
    return False


def _raise_problems(path: Path, damaged: dict[str, str], unread: dict[str, str]) -> None:
    if damaged:
        raise CheckpointError(f"checkpoint {path} is damaged: {listed(damaged | unread)}; {_OTHER_ONE}")
    if unread:
        raise UnreadableError.from_problem(path, listed(unread))


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object that `text`, the content of `path`, holds. Raises CheckpointError when there is none."""
    try:
        content = from_json(text.decode())
    except RecursionError:
        raise CheckpointError(f"{path}: {_TOO_DEEP}; {_OTHER_ONE}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); {_OTHER_ONE}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {type(content).__name__}, must hold a JSON object")
    return content


def _parse_small(path: Path, text: bytes) -> dict[str, Any]:
    """`parse_object` for a manifest or meta. Raises CheckpointError also when it would take much memory or many calls
    to hold and walk through it."""
    if problem := _size_problem(text):
        raise CheckpointError(f"{path}: {problem}; {_OTHER_ONE}")
    content = parse_object(path, text)
    # Level by level instead of recursively: the check must survive what it looks for.
    level: list[Any] = [content]
    for _ in range(JSON_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise CheckpointError(f"{path}: {_TOO_DEEP}; {_OTHER_ONE}")
    return content


_TOO_DEEP = f"is nested more than {JSON_DEPTH} levels deep"


def _size_problem(text: bytes) -> str | None:
    if len(text) > JSON_BYTES:
        return f"{len(text)} bytes of JSON, at most {JSON_BYTES} are read"
    if sum(map(text.count, (b",", b"[", b"{"))) > JSON_VALUES:
        return f"more than {JSON_VALUES} values of JSON"
    return None
