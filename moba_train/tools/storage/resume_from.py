"""`checkpoint.resume_from`: a checkpoint at an address with which a new run begins: weights, optimizer and counters.

It is fetched where neither the run's folder nor its own uploads have a checkpoint, and becomes one of the run's own.
"""

import threading
from pathlib import Path

from moba_train.checkpoint.manifest import STEP_FOLDER
from moba_train.checkpoint.publish import published
from moba_train.errors import CheckpointError
from moba_train.resolve.run import RunFolders
from moba_train.tools.storage.fetch import fetch_newest
from moba_train.tools.storage.remote import (
    Address,
    RemoteFolder,
    StorageError,
    address_problem,
    complete_steps,
    local_copy,
    missing_package,
)


class ResumeFromOptions(Address):
    """Checkpoint with which a run begins that has none yet, here or in `upload`: a folder step_..., or the newest of
    another run's uploads or run folder."""


class ResumeFrom:
    """Fetches a checkpoint once. A `CheckpointStore` that copies none."""

    Options = ResumeFromOptions
    local_copy = staticmethod(local_copy)

    @classmethod
    def problem(cls, options: ResumeFromOptions) -> str:
        """Reason why the address cannot be used here, with the remedy; empty: it can."""
        return missing_package(options.address)

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
