"""Small files that are either as they were or as they shall be, whenever the process dies."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path`, on the disk too, or raise OSError and leave it as it was."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
