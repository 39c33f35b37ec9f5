"""One run at a time in a run folder."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from moba_train.errors import LaunchError
from moba_train.parallel.world import World, broadcast

LOCK = "lock"

WAIT_S = 30.0
"""How long to wait for the lock: the ranks of a run whose launcher was killed may need a moment to end."""

logger = logging.getLogger(__name__)


@contextmanager
def run_folder_lock(run_dir: Path, world: World, wait_s: float = WAIT_S) -> Iterator[None]:
    """Holds a lock on `run_dir`, which is created unless it exists. The system releases the lock when rank 0 ends, also
    by SIGKILL. Called on every rank.

    Raises LaunchError when another run still holds the lock after `wait_s` seconds, or when the folder cannot be
    written. It is a POSIX record lock: it keeps out other nodes only on file systems that pass it on to them (NFS 4,
    Lustre mounted with flock); where there are no locks at all, a warning says so and the run goes on.
    """
    lock: TextIO | None = None
    problem: str | None = None
    if world.is_main:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = (run_dir / LOCK).open("a+", encoding="utf-8")
            _acquire(lock, wait_s)
        except OSError as error:
            problem = f"run_dir {run_dir} cannot be used: {error}"
    problem = broadcast(problem)
    try:
        if problem is not None:
            raise LaunchError(problem)
        yield
    finally:
        if lock is not None:
            lock.close()


def _acquire(lock: TextIO, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                logger.warning("%s: no locks here (%s); never start two runs in this folder", lock.name, error)
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > deadline:
                lock.seek(0)
                holder = lock.read().strip() or "another run"
                raise OSError(f"{holder} trains in it; wait for it, end it, or set run_dir to a new folder") from None
        time.sleep(0.1)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
