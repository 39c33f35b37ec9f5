"""Checkpoints that are fetched from an address into a run's folder: copies that uploads have made, or by
`checkpoint.resume_from` the one with which a new run begins: weights, optimizer and counters.

The latter is fetched where neither the run's folder nor its own uploads have a checkpoint, and becomes one of the
run's own.
"""

import logging
import threading
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
    STEP_FOLDER,
    FileEntry,
    parse_object,
    read_manifest,
    step_name,
)
from moba_train.checkpoint.publish import install, make_temporary_folder, published, remove
from moba_train.checkpoint.retention import EVALUATIONS, MARKS, Marks
from moba_train.errors import CheckpointError
from moba_train.output_files import write_new
from moba_train.resolve.run import RunFolders
from moba_train.tools.storage.remote import (
    THREADS,
    Address,
    AtAddress,
    RemoteFolder,
    StorageError,
    address_problem,
    complete_steps,
)

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


class ResumeFromOptions(Address):
    """Checkpoint with which a run begins that has none yet, here or in `upload`: a folder step_..., or the newest of
    another run's uploads or run folder."""


class ResumeFrom(AtAddress):
    """Fetches a checkpoint once. A `CheckpointStore` that copies none."""

    Options = ResumeFromOptions

    def __init__(self, options: ResumeFromOptions, folders: RunFolders) -> None:
        self._address = options.address
        self._folders = folders
        self._news: list[tuple[str, bool]] = []
        self._error: StorageError | None = None
        self._thread: threading.Thread | None = None
        """Begins with the first question for it, which comes once the uploads have looked for copies of the run. The
        process does not wait for it to end."""

    def copy(self, path: Path) -> None:
        """Does nothing: the address is only read."""

    def is_idle(self, wait_s: float) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._fetch, name="resume-from", daemon=True)
            self._thread.start()
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def news(self) -> list[tuple[str, bool]]:
        news = self._news
        self._news = []
        return news

    def _fetch(self) -> None:
        try:
            if any(map(published, self._folders.checkpoints)):
                return
            remote, steps = self._source()
            home = remote.address.removesuffix("/checkpoints")  # of a run folder, which has the metrics
            has_home = home != remote.address and address_problem(home) is None
            step = fetch_newest([remote, RemoteFolder(home)] if has_home else [remote], steps, self._folders)
            self._news = [(f"the checkpoint of step {step} was fetched from {remote.address}", True)]
        except Exception as error:  # a thread that died would be taken for one that has fetched
            text = str(error) if isinstance(error, CheckpointError | OSError) else repr(error)
            self._error = StorageError(f"checkpoint.resume_from: {text}")

    def _source(self) -> tuple[RemoteFolder, list[int]]:
        """The folder of the checkpoints, and the steps of those that are meant."""
        folder, _, name = self._address.rpartition("/")
        if (match := STEP_FOLDER.fullmatch(name)) and int(match[1]) in complete_steps(RemoteFolder(folder).files()):
            return RemoteFolder(folder), [int(match[1])]
        for address in (self._address, f"{self._address}/checkpoints"):  # uploads, or a run folder
            remote = RemoteFolder(address)
            if steps := complete_steps(remote.files()):
                return remote, [*steps]
        raise StorageError(f"{self._address}: there is no complete checkpoint")
