"""The files of a checkpoint, written, hashed and read by several threads of a rank.

One core writes, hashes and reads 1.0 to 1.4 GiB of a checkpoint a second, and a rank may have tens of GiB. The threads
of torch.distributed.checkpoint (DCP; `FileSystemWriter(thread_count=...)`) lose errors: where one of them fails, the
save goes on without its tensors.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
T = TypeVar("T")

PART_BYTES = 2**30
"""How much there is to do for each thread, on average at least."""
MOST_THREADS = 4
"""How many pay is not known; training goes on beside those that write."""


def threads_for(size: int) -> int:
    """How many threads of this rank work on `size` bytes: at most half of its share of the node's cores."""
    machine = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    share = min(usable, machine // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # ranks may be bound to cores of theirs
    return max(1, min(MOST_THREADS, share // 2, size // PART_BYTES))


def in_threads(action: Callable[[Item], T], items: Sequence[Item], threads: int) -> list[T]:
    """What `action` returns for each item, in their order, by so many threads.

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
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException:  # Ctrl-C, for which nobody waits
        pending.clear()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


def evenly(items: Sequence[Item], size_of: Callable[[Item], int]) -> list[list[Item]]:
    """`items` in their order, cut into a part of about equal size for each thread that works on them."""
    sizes = [size_of(item) for item in items]
    total, before = sum(sizes), 0
    parts: list[list[Item]] = [[] for _ in range(threads_for(total))]
    for item, size in zip(items, sizes, strict=True):
        middle = before + size / 2
        parts[int(len(parts) * middle / (total + 1))].append(item)
        before += size
    return [part for part in parts if part]
