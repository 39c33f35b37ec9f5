"""The one place where files are made and changed.

The folder that a file is written into may come from elsewhere, or be shared: under the name of the file there may be a
link to one of yours, which would be overwritten, or a named pipe, which would block for ever. So a file is made under a
name that could not be foreseen, by O_EXCL and O_NOFOLLOW, and then renamed, which replaces a link instead of following
it. What grows in its place (a log, a lock) is opened only where it is a regular file.
"""

import errno
import os
import re
import secrets
from pathlib import Path
from typing import BinaryIO

from moba_train.foreign_files import check_below, folder_roots

_MADE = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\.tmp-.+-[0-9a-f]{8}")


def new_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Makes a file and opens it for writing. Raises OSError, FileExistsError when there is anything of its name."""
    return os.fdopen(os.open(path, _MADE | os.O_EXCL | os.O_WRONLY, 0o666), "wb", buffering)


def write_new(path: Path, content: str | bytes) -> None:
    """Makes a file with this content, on the disk too. Raises as `new_file`.

    Characters that UTF-8 does not have, such as those of a file name in another encoding, are written as `\\udc80`.
    """
    text = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with new_file(path) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the content of `path`, on the disk too, or raises OSError and leaves it as it was."""
    temporary = temporary_path(path)
    try:
        write_new(temporary, content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The new name is in the folder, which has to be on the disk as well.
    sync_folder(path.parent)


def temporary_path(path: Path) -> Path:
    """A name for a file or folder that is to be renamed to `path`, with random digits in it."""
    return path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")


def remove_leftovers(folder: Path) -> None:
    """Removes files that a killed process left under temporary names. To be called only while no other run writes."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def open_to_change(path: Path, flags: int) -> int:
    """Descriptor of a regular file that is changed in its place, and made unless it is there. Raises OSError when it is
    a link, a named pipe or anything else. flags: of os.open."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "is not a regular file; move it away", str(path))
    return os.open(path, flags | _MADE | os.O_NONBLOCK, 0o666)


def make_folder(path: Path) -> None:
    """Makes a folder, unless it is there. Raises ForeignFileError when it leads out of the folder around it, unless
    that is allowed ($MOBA_TRAIN_DATA_ROOTS)."""
    check_below(path, folder_roots(path.parent))
    path.mkdir(parents=True, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
