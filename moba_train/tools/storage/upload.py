"""`checkpoint.upload`: copies of a run's checkpoints at an address, made in the background by rank 0.

The ranks have written a checkpoint into a folder that all of them see, so one process can copy it. A copy has the form
of the checkpoint: a folder `step_00000100` whose manifest is written last, after every other file was read back and had
the manifest's hash. So a copy with a manifest is complete, and one without is resumed: files that are there already,
with the right hash, stay. `run.json` says which run the copies are of; `marks.json`, `evaluations.json` and
`metrics.jsonl` come with them.
"""

import json
import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from moba_train.checkpoint.files import in_threads
from moba_train.checkpoint.manifest import JSON_BYTES, MANIFEST, STEP_FOLDER, parse_object, read_manifest, read_meta
from moba_train.checkpoint.publish import hold, is_finite, is_good, published
from moba_train.checkpoint.retention import Marks
from moba_train.errors import CheckpointError, UserError
from moba_train.resolve.run import RunFolders
from moba_train.tools.storage.fetch import entries_of, fetch_newest, meta_of, small_files
from moba_train.tools.storage.remote import (
    THREADS,
    Address,
    AtAddress,
    RemoteFile,
    RemoteFolder,
    StorageError,
    complete_steps,
)

logger = logging.getLogger(__name__)

RUN = "run.json"

PAUSES_S = (1.0, 10.0, 30.0)
"""Pauses before the second and later attempts to copy a checkpoint; the next checkpoint begins with new ones."""


class UploadOptions(Address):
    """Copies of the run's checkpoints at an address, of this run alone. A run on a machine without them resumes from
    the newest."""

    keep_last: int = Field(2, ge=1, description="number of newest copies that are kept, and the newest good one")
    keep_every: int | None = Field(None, ge=1, description="copies at multiples of this step stay for ever")


class Upload(AtAddress):
    """Copies checkpoints to an address, one at a time. A `CheckpointStore`."""

    Options = UploadOptions

    def __init__(self, options: UploadOptions, folders: RunFolders) -> None:
        self._options = options
        self._folders = folders
        self._news: list[tuple[str, bool]] = []
        self._pending: list[tuple[Path, BinaryIO | None]] = []
        """Checkpoints to be copied, and what keeps retention from deleting them meanwhile."""
        self._busy = True
        self._fatal: UserError | None = None
        self._changed = threading.Condition()
        self._metas: dict[int, dict[str, Any]] = {}
        """Metas of the copies, by step, as far as they were read."""
        threading.Thread(target=self._work, name="checkpoint-upload", daemon=True).start()

    def copy(self, path: Path) -> None:
        with self._changed:
            for other, held in self._pending:
                if held is not None and not self._is_for_ever(other):
                    held.close()
            self._pending = [entry for entry in self._pending if self._is_for_ever(entry[0])]
            self._pending.append((path, hold(path)))
            self._changed.notify_all()

    def is_idle(self, wait_s: float) -> bool:
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._busy and not self._pending, wait_s)
            if self._fatal is not None:
                raise self._fatal
        return idle

    def news(self) -> list[tuple[str, bool]]:
        with self._changed:
            news = self._news
            self._news = []
        return news

    def _is_for_ever(self, path: Path) -> bool:
        every = self._options.keep_every
        return every is not None and _step(path) % every == 0

    def _work(self) -> None:
        """Runs in the background thread, until the process ends."""
        try:
            remote = RemoteFolder(self._options.address)
            self._fetch(remote)
        except UserError as error:
            self._fatal = error
        except Exception as error:  # a thread that died would leave the ranks waiting
            self._fatal = StorageError(f"checkpoint.upload: {self._options.address}: {error!r}")
        while self._fatal is None:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._pending))
                self._busy = True
                path, held = self._pending.pop(0)
            try:
                self._try_to_copy(remote, path)
            finally:
                if held is not None:
                    held.close()
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _tell(self, text: str, is_good: bool) -> None:
        with self._changed:
            self._news.append((text, is_good))
        if not is_good:
            logger.warning("%s", text)

    def _try_to_copy(self, remote: RemoteFolder, path: Path) -> None:
        """Copy a checkpoint, again after pauses where the store refuses or does not answer."""
        complete: set[str] = set()
        for pause in (*PAUSES_S, None):
            began = time.monotonic()
            try:
                size = self._copy(remote, path, complete)
            except Exception as error:
                text = str(error) if isinstance(error, UserError) else repr(error)
                if pause is None or isinstance(error, OtherRunError):
                    then = "the run goes on, and the next checkpoint is copied again"
                    self._tell(f"the checkpoint of step {_step(path)} was not uploaded: {text}; {then}", False)
                    return
                time.sleep(pause)
                continue
            if size:
                took = f"{size / 2**20:.1f} MiB in {time.monotonic() - began:.1f} s"
                self._tell(f"the checkpoint of step {_step(path)} is uploaded to {remote.address}: {took}", True)
            break
        try:
            self._remove_old(remote)
        except Exception as error:  # a thread that died would leave the ranks waiting
            self._tell(f"old copies of checkpoints could not be deleted: {error}", False)

    def _copy(self, remote: RemoteFolder, path: Path, complete: set[str]) -> int:
        """Copy a checkpoint. Returns its size in bytes, 0 where it is there, or is none to resume from.

        complete: names of files that were found to be as they should; the call adds to it
        """
        entries = read_manifest(path)
        meta = read_meta(path)
        if not is_finite(meta):
            return 0
        files = remote.files()
        _claim(remote, files, str(meta.get("progress", {}).get("run_id")))
        mark = f"{path.name}/{MANIFEST}"
        if mark in files:
            with suppress(CheckpointError):  # a damaged one is replaced
                if entries_of(remote, mark) == entries:
                    return 0
            remote.delete(mark)  # first: a copy that is being replaced is not complete

        def copy(name: str) -> None:
            there = files.get(f"{path.name}/{name}")
            as_it_should = there is not None and there.size == entries[name]["size"]
            if not as_it_should or remote.entry(f"{path.name}/{name}") != entries[name]:
                remote.put(path / name, f"{path.name}/{name}")
                if (found := remote.entry(f"{path.name}/{name}")) != entries[name]:
                    raise StorageError(f"{remote.address}/{path.name}/{name} is {found}, must be {entries[name]}")
            complete.add(name)

        in_threads(copy, [name for name in entries if name not in complete], THREADS)
        self._metas[_step(path)] = meta
        for small in small_files(self._folders):
            if small.is_file():
                remote.put(small, small.name)
        remote.write(mark, (path / MANIFEST).read_bytes())
        return sum(entry["size"] for entry in entries.values())

    def _remove_old(self, remote: RemoteFolder) -> None:
        """Delete the copies that retention does not keep, and what a killed start has left of older ones."""
        files = remote.files()
        steps = sorted(complete_steps(files))
        keep = set(steps[-self._options.keep_last :])
        every = self._options.keep_every
        keep |= {step for step in steps if every and step % every == 0}
        marks = Marks.read(self._folders.checkpoints[0])
        for step in reversed(steps):
            meta = self._meta(remote, step)
            if meta is not None and is_good(meta) and marks.reason(meta) is None:
                keep.add(step)
                break
        for folder in {name.partition("/")[0] for name in files}:
            match = STEP_FOLDER.fullmatch(folder)
            if match and steps and int(match[1]) not in keep and int(match[1]) < steps[-1]:
                names = [name for name in files if name.startswith(f"{folder}/")]
                remote.delete(*sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST}")))

    def _meta(self, remote: RemoteFolder, step: int) -> dict[str, Any] | None:
        """The meta of a copy; None where it is damaged."""
        if step not in self._metas and (meta := meta_of(remote, step)) is not None:
            self._metas[step] = meta
        return self._metas.get(step)

    def _fetch(self, remote: RemoteFolder) -> None:
        """Make the newest copy a checkpoint of the run's folder, unless that has one as new. Raises StorageError when
        none can be fetched and there is no checkpoint here, when the copies are those of another run, or for an address
        that is a folder of this run."""
        place = Path(remote.address.removeprefix("file://")).resolve()  # of an object store none that could be ours
        if place in {folder.resolve() for folder in (self._folders.run, *self._folders.checkpoints)}:
            raise StorageError(
                f"checkpoint.upload: given {remote.address}, a folder of this run; give an address elsewhere"
            )
        here = [path for folder in self._folders.checkpoints for path in published(folder)]
        newest, path = max(here, default=(-1, None))
        try:
            files = remote.files()
            steps = complete_steps(files)
            if path is not None and steps:
                _claim(remote, files, str(read_meta(path).get("progress", {}).get("run_id")))
            if RUN not in files:  # shows that the store can be written to
                remote.write(RUN, b"{}")
            if newer := [step for step in steps if step > newest]:
                step = fetch_newest([remote], newer, self._folders)
                self._tell(f"the checkpoint of step {step} was fetched from {remote.address}", True)
        except OtherRunError:
            raise
        except CheckpointError as error:
            if path is None:
                raise StorageError(f"checkpoint.upload: {error}") from None
            self._tell(f"checkpoint.upload: {error}; the run goes on from what is in its folder", False)


def _step(path: Path) -> int:
    match = STEP_FOLDER.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


class OtherRunError(StorageError):
    """The address is that of another run."""

    may_pass = False


def _claim(remote: RemoteFolder, files: dict[str, RemoteFile], run_id: str) -> None:
    """Note whose copies these are. Raises OtherRunError when there are some of another run."""
    found = remote.read(RUN, JSON_BYTES) if RUN in files else None
    noted = parse_object(Path(RUN), found).get("run_id") if found is not None else None
    owner = noted
    steps = complete_steps(files)
    if noted is None and steps:  # a folder that no upload has made, such as another run's own
        owner = ((meta_of(remote, max(steps)) or {}).get("progress") or {}).get("run_id")
    if owner not in (None, run_id) and steps:
        raise OtherRunError(
            f"checkpoint.upload: {remote.address} holds the checkpoints of run {owner}, and this is run {run_id}; give "
            "each run an address of its own"
        )
    if noted != run_id:
        remote.write(RUN, json.dumps({"run_id": run_id}).encode())
