"""Outputs: names that are refused, files that appear complete or not at all, corpora that are not overwritten, and the
choice of the documents that are held out.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.errors import DataError
from moba_train.output_files import new_file


def splits(holdout: float) -> tuple[str, ...]:
    """Suffixes of the names of the corpora that this `holdout` makes."""
    return ("-train", "-valid") if holdout else ("",)


def choose_split(document: bytes, holdout: float) -> int:
    """Index among the `splits` of the corpus that a document belongs to. Depends only on its content."""
    return int(holdout > 0 and hash_fraction(document, "holdout") < holdout)


def empty_split(documents: Mapping[str, int], holdout: float, name: str = "documents") -> str | None:
    """Sentence about the corpus that `holdout` has left empty, with another value to try; None if both have documents,
    and without a holdout.

    documents: number of documents by prefix, of the corpora of `splits`
    name: of the documents, in the sentence
    """
    if not holdout or all(documents.values()) or not any(documents.values()):
        return None
    empty, other = sorted(documents, key=lambda prefix: documents[prefix])
    total = documents[other]
    said = f"{empty} is empty, and training refuses an empty corpus: --holdout {holdout:g}"
    if total == 1:
        return (
            f"{said} cannot divide a single one of the {name}; give more of them, or make a corpus of other text for "
            "validation, without --holdout"
        )
    is_valid = empty == [*documents][1]
    share = holdout if is_valid else 1 - holdout
    wanted = max(3 / total, 2 * share)  # the corpus stays empty with a probability of exp(-3), 5 %, at most
    example = f" such as {wanted if is_valid else 1 - wanted:.2g}," if wanted <= 0.5 else ""
    return (
        f"{said} has put all {total:,} {name} into {other}; delete "
        f"{' and '.join(f'{prefix}.idx' for prefix in documents)}, and give a {'larger' if is_valid else 'smaller'} "
        f"--holdout,{example} or more {name}"
    )


def hash_fraction(document: bytes, purpose: str) -> float:
    """A number in [0, 1) that depends only on the document's content and on `purpose`."""
    digest = hashlib.blake2b(document, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


_REMEDIES = {
    errno.ENOSPC: "free space there, or give another --output, and run the command again",
    errno.EDQUOT: "free space in your quota, or give another --output, and run the command again",
    errno.EACCES: "make it writable, or give another --output",
    errno.EPERM: "make it writable, or give another --output",
    errno.EROFS: "give an --output on another file system",
}


def check_output_file(output: str | Path, option: str = "--output") -> None:
    """Raise DataError when no file can be written as `output`, so that this is known before the work is done."""
    given = str(output)
    if not given or given.endswith("/"):
        raise DataError(f"{option} {given!r} is not the name of a file; give one in that folder, {given}NAME")
    if os.path.isdir(given):
        raise DataError(f"{option} {given} is a folder; give the name of a file, such as {given}/NAME")
    _check_folder(Path(given).parent, option, given)


def corpus_prefixes(output: str, holdout: float) -> list[str]:
    """Prefixes of the corpora that `output` becomes. Raises DataError when they cannot be written."""
    if not output or output.endswith("/"):
        raise DataError(
            f"--output {output!r} is not the name of a corpus, which is its file names without .bin/.idx; for "
            f"example {output}corpus"
        )
    _check_folder(Path(output).parent, "--output", output)
    prefixes = [f"{output}{split}" for split in splits(holdout)]
    for file in (corpus_file(prefix, suffix) for prefix in prefixes for suffix in ("bin", "idx", "json")):
        if file.is_dir():
            raise DataError(f"--output {output} cannot be written: {file} is a folder; give another name")
    return prefixes


def _check_folder(folder: Path, option: str, given: str) -> None:
    """Raise DataError when `folder` neither is a folder that can be written to nor can be created."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise DataError(f"{option} {given} cannot be written: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(f"{option} {given} cannot be written: no permission to write into {existing.absolute()}")


@contextlib.contextmanager
def write_errors(output: str | Path) -> Iterator[None]:
    """Turn an OSError in the block, which writes `output`, into a DataError with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = f"; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
        raise DataError(f"cannot write {error.filename or output}: {error.strerror or error}{remedy}") from error


@contextlib.contextmanager
def writing_file(output: str | Path) -> Iterator[BinaryIO]:
    """Open a file that appears as `output`, replacing one of that name, when the block ends without an exception.

    Raises DataError when it cannot be written.
    """
    path = Path(output)
    temporary = path.with_name(f"{path.name}.tmp")
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            with new_file(temporary) as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def replace_file(output: str | Path, content: bytes) -> None:
    """Write `content` as `output`, completely or not at all. Raises DataError when it cannot be written."""
    with writing_file(output) as stream:
        stream.write(content)


def skipped_file(output: str | Path) -> str:
    """File in the folder of `output` that lists the records that were skipped."""
    return f"{output}.skipped.txt"


def list_skipped(output: str | Path, bad: Sequence[object]) -> None:
    """Write the skipped records, one "file:line: reason" per line, into `skipped_file`; without any, delete it."""
    if bad:
        replace_file(skipped_file(output), "".join(f"{record}\n" for record in bad).encode(errors="backslashreplace"))
    else:
        Path(skipped_file(output)).unlink(missing_ok=True)


def already_made(works: Mapping[str, str]) -> bool:
    """True if all corpora exist and were made by these `works`: the `work` of each sidecar, by prefix.

    Raises DataError, naming all of them, when some were made by other work: they are never overwritten.
    """
    there = [prefix for prefix in works if corpus_file(prefix, "idx").exists()]
    other = [prefix for prefix in there if (IndexedDataset(prefix).info or {}).get("work") != works[prefix]]
    if other:
        names = ", ".join(other)
        exists = f"corpus {names} exists and was" if len(other) == 1 else f"corpora {names} exist and were"
        files = ", ".join(f"{prefix}.idx" for prefix in other)
        raise DataError(
            f"{exists} made from other input or with other options; delete {files} or choose another --output"
        )
    return len(there) == len(works)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder of parts of an output, lock it against other processes, and remove it if it is empty in the end.

    Raises DataError when another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            # The operating system releases the lock however this process ends.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is making parts in {folder}; wait for it or choose another --output"
            ) from error
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
        os.close(handle)
