"""Files of a checkpoint, read from a file system that may fail for a moment and from people who may be hostile, by the
threads of a rank.

A network file system may return an error (EIO, ESTALE, even ENOENT) that is gone a moment later. What fails is tried
again, and what keeps failing raises UnreadableError: a file that could not be read is not a damaged file. Only regular
files are opened: a link would lead out of the checkpoint, and a FIFO would block for ever.

One core writes, hashes and reads 1 to 3 GiB of a checkpoint a second, and a rank may have tens of GiB: hence threads.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Self, TypeVar

from moba_train.errors import CheckpointError, ForeignFileError
from moba_train.foreign_files import open_foreign

Item = TypeVar("Item")
K = TypeVar("K")
T = TypeVar("T")

RETRY_DELAYS_S = (0.1, 0.3, 0.6)
"""Pauses before the second and later attempts to read: four attempts within a second."""

NOT_REGULAR = "not a regular file; links and folders have no place in a checkpoint"

PART_BYTES = 2**30
"""Least work of a thread, on average."""
# One H200, 4 GiB in memory: four threads write 2.85 GiB/s (one 0.79), verify 3.26 (0.97), read 4.96 (2.37)
# (benchmarks/results/checkpoint-threads-h200.json).
MOST_THREADS = 4
"""Most threads of a rank. More were not tried; training goes on beside those that write."""


class UnreadableError(CheckpointError):
    """A checkpoint could not be read, which does not mean that it is damaged."""

    may_pass = True

    @classmethod
    def from_problem(cls, path: Path, problem: object) -> Self:
        """The error for a file or folder that could not be read because of `problem`."""
        return cls(
            f"{path} could not be read ({problem}; {len(RETRY_DELAYS_S) + 1} attempts). It is not known to be damaged "
            "and stays where it is. Check the disk or the mount and run the same command again; to use an older "
            "checkpoint instead, move this one away"
        )


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading. Raises CheckpointError when it is anything else."""
    try:
        return open_foreign(path, None, links=False)
    except ForeignFileError as error:
        raise CheckpointError(f"{path}: {NOT_REGULAR}") from error


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a regular file. Raises CheckpointError when it is missing or larger than `limit` bytes,
    UnreadableError when it could not be read."""

    def read() -> bytes:
        with open_regular(path) as stream:
            return stream.read(min(os.fstat(stream.fileno()).st_size, limit) + 1)

    try:
        content = retried(read)
    except OSError as error:
        if is_missing(path, error):
            raise CheckpointError(f"{path}: missing; use another checkpoint of this run") from error
        raise UnreadableError.from_problem(path, error) from error
    if len(content) > limit:
        raise CheckpointError(f"{path}: too large, more than {limit} bytes; use another checkpoint of this run")
    return content


def is_missing(path: Path, error: OSError) -> bool:
    """True if a file whose reading ended in `error` does not exist: its folder can be read and does not list it."""
    if not isinstance(error, FileNotFoundError):
        return False
    try:
        return path.name not in retried(lambda: os.listdir(path.parent))
    except OSError:
        return False


def try_all(keys: Iterable[K], action: Callable[[K], T], threads: int = 1) -> tuple[dict[K, T], dict[K, OSError]]:
    """Calls `action` with each key, in this many threads, and again with those for which it raised an OSError. Returns
    the results, and the last errors of the others. All keys share the pauses, so a hundred failing files take no longer
    than one."""

    def attempt(key: K) -> OSError | None:
        try:
            results[key] = action(key)
        except OSError as error:
            return error
        return None

    results: dict[K, T] = {}
    errors: dict[K, OSError] = {}
    pending = list(keys)
    for delay in (0.0, *RETRY_DELAYS_S):
        if errors:
            time.sleep(delay)
        outcomes = zip(pending, in_threads(attempt, pending, threads), strict=True)
        errors = {key: error for key, error in outcomes if error is not None}
        if not errors:
            break
        pending = list(errors)
    return results, errors


def retried(action: Callable[[], T]) -> T:
    """The result of `action`, tried again when it raises an OSError. Raises the OSError of the last attempt."""
    results, errors = try_all([None], lambda _: action())
    for error in errors.values():
        raise error
    return results[None]


def threads_for(size: int) -> int:
    """Number of threads of this rank for `size` bytes: at most half of its share of the node's cores."""
    machine = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    # Half of it is used: training goes on beside a save.
    share = min(usable, machine // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # ranks may be bound to cores of theirs
    return max(1, min(MOST_THREADS, share // 2, size // PART_BYTES))


def in_threads(action: Callable[[Item], T], items: Sequence[Item], threads: int) -> list[T]:
    """Call `action` with each item in this many threads, and return the results in the order of the items.

    After an error no further item is begun; it is raised, the first in time, once all threads have ended. They do not
    keep a process from ending, whatever they wait for.
    """
    if min(threads, len(items)) <= 1:
        return [action(item) for item in items]
    pending = deque(enumerate(items))
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while pending and not errors:
            try:
                number, item = pending.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = action(item)
            except BaseException as error:
                errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(items)))]
    try:
        with suppress(RuntimeError):  # no further thread can be started: those that run do the work, or this one
            for worker in workers:
                worker.start()
        if workers[0].ident is None:
            work()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
    except BaseException:  # Ctrl-C, which no thread waits for
        pending.clear()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


def evenly(items: Sequence[Item], size_of: Callable[[Item], int]) -> list[list[Item]]:
    """`items` in their order, cut into a part of about equal size for each thread that works on them."""
    sizes = [size_of(item) for item in items]
    total = sum(sizes)
    before = 0
    parts: list[list[Item]] = [[] for _ in range(threads_for(total))]
    for item, size in zip(items, sizes, strict=True):
        middle = before + size / 2
        parts[int(len(parts) * middle / (total + 1))].append(item)
        before += size
    return [part for part in parts if part]
