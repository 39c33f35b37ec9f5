"""One run at a time in a run folder."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from moba_train.errors import LaunchError, UnusableFolderError
from moba_train.output_files import open_to_change
from moba_train.parallel.world import World, broadcast

LOCK = "lock"

WAIT_S = 30.0
"""Seconds to wait for the lock: the ranks of a run whose launcher was killed may need a moment to end."""

_POLL_S = 0.1

logger = logging.getLogger(__name__)


class RunLock:
    """The lock that rank 0 of this run holds on its folder; ranks that hold nothing have one too."""

    def __init__(self, run_dir: Path, file: TextIO | None = None, text: str = "", locks_work: bool = True) -> None:
        self._run_dir = run_dir
        self._file = file
        self._text = text
        self._locks_work = locks_work

    def check(self) -> None:
        """Raises LaunchError if the run folder is gone or belongs to another run by now, and OSError if that cannot be
        told. Does nothing on ranks other than 0.

        A lock belongs to a file, not to its name: in a folder that was removed and made again, a second run can hold
        its own lock.
        """
        if self._file is None:
            return
        path = self._run_dir / LOCK
        held = os.fstat(self._file.fileno())
        try:
            there = path.stat()
            same_file = (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)
            if same_file and self._locks_work:
                return
            # Where there are no locks, another run writes into the same file; where inode numbers change, another
            # number does not mean another file. In both cases the text tells whose it is.
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            raise LaunchError(
                f"run_dir {self._run_dir}: the folder of this run, or the file {LOCK} in it, is no longer there: "
                "removed, renamed, or on a volume that is not mounted any more. The run ends here and writes nothing "
                "more there; put the folder back to go on from its newest checkpoint"
            ) from None
        if text == self._text:
            if self._locks_work:  # closing any handle of a file gives up the locks that the process holds on it
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        raise LaunchError(
            f"run_dir {self._run_dir}: belongs to another run now ({text.strip() or 'it gives no name'}), because it "
            f"was removed, or moved away, and made again. This run ({self._text.strip()}) ends here and writes nothing "
            "more there; never start two runs with one run_dir"
        )

    def is_current(self) -> bool:
        """True if `check` passes."""
        try:
            self.check()
        except LaunchError:
            return False
        return True


@contextmanager
def run_folder_lock(run_dir: Path, world: World, wait_s: float = WAIT_S) -> Iterator[RunLock]:
    """Holds a lock on `run_dir`, which is created unless it exists. The system releases the lock when rank 0 ends, also
    by SIGKILL. Called on every rank.

    Raises LaunchError when another run still holds the lock after `wait_s` seconds, when the folder cannot be written,
    or when it has gone since an earlier attempt of this job trained in it. It is a POSIX record lock: it keeps out
    other nodes only on file systems that pass it on to them (NFS 4, Lustre mounted with flock); where there are no
    locks at all, a warning says so and the run goes on.
    """
    file: TextIO | None = None
    lock: RunLock | None = None
    deadline = time.monotonic() + wait_s
    try:
        while True:
            problem: str | None = None
            if world.is_main:
                try:
                    file = file or _open(run_dir, world.store)
                    lock = _acquired(run_dir, file)
                    if lock is None and time.monotonic() > deadline:
                        problem = _held_by_another(file)
                    if lock is not None and not lock.is_current():  # removed while this run waited for it
                        file.close()
                        file = lock = None
                except OSError as error:
                    problem = str(error)
            # Ranks never wait longer than this one broadcast, so parallel.timeout may be shorter than `wait_s`.
            decided, problem = broadcast((lock is not None or problem is not None, problem))
            if problem is not None:
                raise UnusableFolderError(f"run_dir {run_dir} cannot be used: {problem}")
            if decided:
                break
            time.sleep(_POLL_S)
        if lock is not None:
            _job_store(world.store).set(_locked_before(run_dir), "")
        yield lock or RunLock(run_dir)
    finally:
        if file is not None:
            with suppress(OSError):  # a name that a full disk did not take is written once more; the file is closed
                file.close()


def _job_store(store: dist.Store) -> dist.Store:
    """The store of all restart attempts, each of which has a prefix of its own in it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _locked_before(run_dir: Path) -> str:
    """Key that is set once an attempt of this job has had the lock."""
    return f"moba_train/run_folder/{run_dir.absolute()}"


def _open(run_dir: Path, store: dist.Store) -> TextIO:
    """The lock file, which is made unless it exists. Raises FileNotFoundError when an earlier attempt of this job has
    locked it: torchrun starts the ranks again after they have stopped because the folder was gone, and they must not
    begin afresh in a new one."""
    path = run_dir / LOCK
    if _job_store(store).check([_locked_before(run_dir)]) and not path.exists():
        raise FileNotFoundError(
            "this job trained in it before, and now it is gone; put it back to go on from its newest checkpoint, or "
            "start the command again to begin afresh"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return os.fdopen(open_to_change(path, os.O_RDWR | os.O_APPEND), "a+", encoding="utf-8")


def _acquired(run_dir: Path, file: TextIO) -> RunLock | None:
    """The lock on `file`, with the name of this process written into it; None while another run holds it."""
    locks_work = True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # POSIX leaves open which of the two says that another process holds the lock.
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        logger.warning("%s: no locks here (%s); never start two runs in this folder", run_dir, error)
        locks_work = False
    began = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = f"process {os.getpid()} on {socket.gethostname()}, since {began}\n"
    # Only now: before, the file names the run that holds the lock, for the message of those who wait.
    file.truncate(0)
    file.write(text)
    file.flush()
    return RunLock(run_dir, file, text, locks_work)


def _held_by_another(file: TextIO) -> str:
    file.seek(0)
    holder = file.read().strip() or "another run"
    return f"{holder} trains in it; wait for it, end it, or set run_dir to a new folder"
