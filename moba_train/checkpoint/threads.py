"""The files of a checkpoint, written, hashed and read by several threads of a rank.

One core hashes about 1.3 GiB/s, and torch.distributed.checkpoint (DCP) writes and reads less with one, far below what
memory and fast disks take. DCP's own threads (`FileSystemWriter(thread_count=...)`) lose errors: where one of them
meets a full disk, the save goes on without its tensors.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
T = TypeVar("T")

PART_BYTES = 2**30
"""The least that a thread is started for, and the least size of a file where a rank writes several."""
MOST_THREADS = 4
"""While they write, they hold Python's lock for up to a tenth of the time each, and training waits for it."""


def threads_for(size: int) -> int:
    """How many threads of this rank work on `size` bytes: at most half of its share of the node's cores, as training
    may go on meanwhile."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // 2
    return max(1, min(MOST_THREADS, share, size // PART_BYTES))


def in_threads(action: Callable[[Item], T], items: Sequence[Item], threads: int) -> list[T]:
    """What `action` returns for each item, in their order, by so many threads with the current GPU of this one. An
    error is raised once all threads have ended; items that none has begun are left out then."""
    if min(threads, len(items)) <= 1:
        return [action(item) for item in items]
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    with ThreadPoolExecutor(threads, initializer=lambda: None if gpu is None else torch.cuda.set_device(gpu)) as pool:
        return list(pool.map(action, items))


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
