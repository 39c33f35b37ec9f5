"""Checkpoints that are fetched from an address into a run's folder: copies that uploads have made, or a run's own."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from moba_train.checkpoint.files import in_threads
from moba_train.checkpoint.manifest import (
    JSON_BYTES,
    MANIFEST,
    META,
    FileEntry,
    parse_object,
    read_manifest,
    step_name,
)
from moba_train.checkpoint.publish import install, make_temporary_folder, remove
from moba_train.checkpoint.retention import EVALUATIONS, MARKS, Marks
from moba_train.errors import CheckpointError
from moba_train.output_files import write_new
from moba_train.resolve.run import RunFolders
from moba_train.tools.storage.remote import THREADS, RemoteFolder, StorageError

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


def small_files(folders: RunFolders) -> tuple[Path, ...]:
    """Files that come with checkpoints: marks, numbers of evaluations, metrics."""
    own = folders.checkpoints[0]
    return own / MARKS, own / EVALUATIONS, folders.run / METRICS


def fetch_newest(sources: Sequence[RemoteFolder], steps: Iterable[int], folders: RunFolders) -> int:
    """Make the newest of these checkpoints a checkpoint of the run's folder, one in doubt only where there is no other,
    with those of `small_files` that the run lacks. Returns its step. Raises CheckpointError when none can be used; the
    run's folder is then as it was.

    sources: the folder in which the checkpoints are complete, and others that may have small files
    """
    remote, own = sources[0], folders.checkpoints[0]
    wanted = [path for path in small_files(folders) if not path.exists()]
    small = make_temporary_folder(own, 0)
    try:
        for source, name in product(sources, [path.name for path in wanted]):
            if name in source.files(name):
                source.get(name, small / name)
        marks = Marks.read(own if (own / MARKS).exists() else small)
        metas = {step: meta_of(remote, step) for step in steps}
        usable = {step: meta is not None and marks.reason(meta) is None for step, meta in metas.items()}
        problems = []
        for step in sorted(usable, key=lambda step: (usable[step], step), reverse=True):
            try:
                _fetch(remote, step, own, [(small / path.name, path) for path in wanted])
                return step
            except (CheckpointError, OSError) as error:
                problems.append(f"  - step {step}: {error}")
                logger.warning("the copy of the checkpoint of step %d cannot be used: %s", step, error)
    finally:
        remove(small)
    raise StorageError("\n".join([f"no copy in {remote.address} can be used:", *problems]))


def meta_of(remote: RemoteFolder, step: int) -> dict[str, Any] | None:
    """The meta of a copy; None where it is damaged."""
    name = f"{step_name(step)}/{META}"
    with suppress(CheckpointError):
        return parse_object(Path(name), remote.read(name, JSON_BYTES) or b"")
    return None


def entries_of(remote: RemoteFolder, manifest: str) -> dict[str, FileEntry]:
    """The files of a copy, by name, as its manifest says. Raises CheckpointError when that is damaged."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / PurePosixPath(manifest).parent.name
        path.mkdir()
        write_new(path / MANIFEST, remote.read(manifest, JSON_BYTES) or b"")
        return read_manifest(path)


def _fetch(remote: RemoteFolder, step: int, folder: Path, small: Iterable[tuple[Path, Path]]) -> None:
    """Fetch a checkpoint, then move small files, those that there are, to their places: had they come before, a start
    that names another source would find them. Raises CheckpointError when the copy is damaged, OSError when there is no
    room for it here."""
    name = step_name(step)
    entries = entries_of(remote, f"{name}/{MANIFEST}")
    temporary = make_temporary_folder(folder, step)

    def get(file: str) -> None:
        if (found := remote.get(f"{name}/{file}", temporary / file)) != entries[file]:
            raise StorageError(f"{remote.address}/{name}/{file} is {found}, must be {entries[file]}")

    try:
        in_threads(get, [*entries], THREADS)
        for arrived, path in small:
            if arrived.exists() and not path.exists():
                arrived.replace(path)
        install(temporary, folder / name, step, entries)
    except BaseException:
        remove(temporary)
        raise
