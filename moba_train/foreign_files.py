"""The one place where files from elsewhere are opened: downloaded models, checkpoints of others, folders of texts.

Such a file is a regular file of limited size that lies, links followed, below a folder that is allowed. The open
descriptor is checked, so that a file that is exchanged after a check of its name is not read.
docs/reference/security.md lists what is from elsewhere, and all limits.
"""

import contextlib
import json
import os
import stat
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from moba_train.errors import ForeignFileError
from moba_train.registry import CHECKPOINT_STORES

ROOTS = "MOBA_TRAIN_DATA_ROOTS"
"""Environment variable with more folders that may be read, separated as in PATH."""

MIB = 1 << 20
JSON_BYTES = 16 * MIB
"""Largest config.json, tokenizer_config.json and the like; real ones have some kilobytes."""
INDEX_BYTES = 64 * MIB
"""Largest model.safetensors.index.json; that of DeepSeek-V3, with 92,000 tensors, has 9 MB."""
TOKENIZER_BYTES = 256 * MIB
"""Largest tokenizer file; the largest in use have about 35 MB."""

_KINDS = {stat.S_ISLNK: "a link", stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH: a folder need not be readable


def local_path(address: str) -> Path:
    """Path of a file or folder of this machine or, for an address such as `s3://...`, of its copy on this machine.
    Raises UserError when it cannot be copied."""
    stores = [*CHECKPOINT_STORES.usable().values()] if "://" in address else []
    return stores[0].local_copy(address) if stores else Path(address)


def working_roots() -> list[Path]:
    """Folders below which a checkpoint's own recipe may name files: the working folder, and those in $ROOTS."""
    return [Path.cwd().resolve(), *_extra_roots()]


def folder_roots(folder: Path) -> list[Path]:
    """Folders below which the files of `folder`, which the user named, may lie: itself, and those in $ROOTS.

    A snapshot in Hugging Face's cache consists of links to blobs beside it, so there the whole repository is allowed.
    """
    own = folder.resolve()
    cached = [
        parent.parent
        for parent in (own, *own.parents)
        if parent.name == "snapshots" and parent.parent.name.startswith(("models--", "datasets--"))
    ]
    return [own, *cached, *_extra_roots()]


def _extra_roots() -> list[Path]:
    return [Path(root).resolve() for root in os.environ.get(ROOTS, "").split(os.pathsep) if root]


def check_below(path: Path, roots: Sequence[Path]) -> Path:
    """Return where `path` leads, links followed, even to nothing. Raises ForeignFileError unless below a root."""
    try:
        real = Path(os.path.realpath(path))
    except (OSError, ValueError) as error:  # a null byte
        raise ForeignFileError(f"{str(path)!r}: no path of a file ({error})") from None
    if not any(real.is_relative_to(root) for root in roots):
        through = f"leads to {real}, " if real != path.absolute() else ""
        allowed = " and ".join(map(str, dict.fromkeys(roots)))
        folder = real if real.is_dir() else real.parent
        raise ForeignFileError(
            f"{path}: {through}outside of {allowed}; if you trust it, allow the folder: {ROOTS}={folder}"
        )
    return real


def open_foreign(
    path: Path, limit: int | None, roots: Sequence[Path] | None = None, links: bool = True
) -> BufferedReader:
    """Open a file from elsewhere for reading its bytes.

    limit  largest size in bytes; None: any
    roots  folders below which it must lie, links followed; None: anywhere, because the user named it
    links  whether the file itself may be a link

    Raises ForeignFileError when it may not be read, OSError when it cannot be.
    """
    try:
        status = os.stat(path, follow_symlinks=links)
    except ValueError as error:  # a null byte
        raise ForeignFileError(f"{str(path)!r}: no path of a file ({error})") from None
    _check(path, status, limit)  # before it is opened: opening some devices has effects
    # O_NONBLOCK: opening a named pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags) if roots is None else _open_below(check_below(path, roots), roots, flags)
    try:
        # Once more, of what was opened: by now the name may lead to another file.
        _check(path, os.fstat(descriptor), limit)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _open_below(real: Path, roots: Sequence[Path], flags: int) -> int:
    """Open `real`, which has no links in it, folder by folder from its root. A link put there since is an OSError."""
    root = next(root for root in roots if real.is_relative_to(root))
    *folders, name = real.relative_to(root).parts or (".",)
    with contextlib.ExitStack() as stack:
        where = os.open(root, _FOLDER)
        stack.callback(os.close, where)
        for folder in folders:
            where = os.open(folder, _FOLDER, dir_fd=where)
            stack.callback(os.close, where)
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=where)


def _check(path: Path, status: os.stat_result, limit: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS.items() if test(status.st_mode)), "a device")
        raise ForeignFileError(f"{path}: is {kind}; allowed: a regular file")
    if limit is not None and status.st_size > limit:
        raise ForeignFileError(f"{path}: has {status.st_size:,} bytes; allowed: {limit:,}")


def read_foreign(path: Path, limit: int, roots: Sequence[Path] | None = None, links: bool = True) -> bytes:
    """The bytes of a file from elsewhere; arguments and errors as of `open_foreign`."""
    with open_foreign(path, limit, roots, links) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:  # it grew, or belongs to /proc, where sizes are 0
        raise ForeignFileError(f"{path}: has more than {limit:,} bytes; allowed: {limit:,}")
    return content


def read_foreign_json(path: Path, limit: int = JSON_BYTES, roots: Sequence[Path] | None = None) -> Any:
    """The JSON value in a file from elsewhere. Raises ForeignFileError when it may not be read or is not JSON, OSError
    when it cannot be read."""
    content = read_foreign(path, limit, roots)
    try:
        return parse_json(content)
    except ValueError as error:
        raise ForeignFileError(f"{path}: {error}") from None


def parse_json(text: bytes | str) -> Any:
    """The JSON value in `text`. Raises ValueError when it is not JSON, or nested too deeply for Python's parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
