"""Saving a checkpoint of a distributed run in the background.

`save` returns at once. A thread of each rank copies the tensors to CPU memory (staging.py), writes them (writer.py;
with further threads where there is much) and publishes the result (publisher.py). The threads use a gloo group of their
own, because all NCCL collectives must be issued from one thread in one order, and that thread is busy training.

Why not `torch.distributed.checkpoint.async_save` with a pinned, asynchronous DefaultStager (torch 2.13)? It makes a new
plan for every save, which costs the training thread 0.40 s a save on a CPU, against 0.01 s with one save plan
(benchmarks/results/checkpoint-python-cpu.json); its plan caching still makes and compares all local plans. Its staging
stream does not wait for the training stream; the host must wait for the copies before the update, where here the GPU's
stream does; its memory is page-locked in the first save. Its index is a pickle. Its safetensors storage
(HuggingFaceStorageWriter) has none, but it holds all that a rank writes in memory once more, keeps one of several parts
of a tensor that a rank writes, and infers shapes from what it finds, so that a tensor whose end is missing is only
shorter.
"""

import copy
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.checkpoint import publish
from moba_train.checkpoint.manifest import FileEntry, step_name
from moba_train.checkpoint.process_group import SaveFailedError, SaveGroup
from moba_train.checkpoint.publisher import Place, Publisher
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.staging import Stager
from moba_train.checkpoint.writer import ShardWriter, write_meta
from moba_train.errors import CheckpointError, LaunchError, UserError
from moba_train.parallel.world import broadcast

logger = logging.getLogger(__name__)

RANKS_APART = timedelta(minutes=30)
"""Time for which a rank that has written its part of a checkpoint waits for the others, before the save counts as
failed. Not `parallel.timeout`, which limits steps: the slowest disk may take longer, and training does not wait."""

MOST_NAMED = 20
"""Tensors with NaN or infinite values that a meta names."""


class Saved(NamedTuple):
    """A good save."""

    step: int
    seconds: float
    """Seconds in the background."""
    folder: Path
    """The one of the places that it was published in."""
    problem: str | None
    """Reason that it is not in the first place; None if it is."""
    not_finite: list[str]
    """Names of tensors that hold NaN or infinite values."""
    check_s: float
    """Time in which this rank looked for them."""


class Checkpointer:
    """Writes checkpoints into `folder`, which every rank must see, and keeps those that `retention` selects.

    Made on every rank once the default process group exists; `save`, `wait` and `close` are called on every rank. The
    copies take host memory of the size of a rank's shards, page-locked for tensors on a GPU, and kept from one save to
    the next.

    A save that fails on any rank fails on all, and its half-written folder is removed. It is then written into the
    `fallback`, if there is one. If that also fails, the error is logged, its text is kept in `last_error` (None after a
    good save), `failed_saves` counts it (in a row), and the run goes on with the checkpoints it had. A save in which a
    rank does not answer within RANKS_APART also fails, and the next one begins with new connections.

    `check_lock` is called on rank 0 before anything is written, published or removed. It raises LaunchError when the
    folder is not this run's any more, and OSError when that cannot be told. After a LaunchError, or `max_failures`
    failed saves in a row, `fatal` holds the error that must end the run; `save` and `raise_fatal` raise it.

    Ranks may see the same save end differently: where the last collective of a save, after rank 0 has published it,
    fails on another rank, that rank counts a failure and the others a good save. So `last_error`, `failed_saves` and
    `fatal` are a rank's own view until `save` or `raise_fatal` replaces them by that of rank 0, the one that publishes.

    A checkpoint with NaN or infinite values is saved with `good` false and the names of (some of) the tensors that hold
    them as `not_finite` in its meta.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        *,
        fallback: Place | None = None,
        check_lock: Callable[[], None] = lambda: None,
        max_failures: int | None = None,
        saved: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """saved: called on every rank, in the background, with the path of each good checkpoint"""
        self.last_error: str | None = None
        self.errors: list[str] = []
        """Texts that `last_error` has had and that wait for their report, oldest first: saves may fail before it."""
        self.saves: list[Saved] = []
        """The good saves, oldest first: the next may end before anyone has read how this one did."""
        self.failed_saves = 0
        self.fatal: UserError | None = None
        self._max_failures = max_failures
        self._saved = saved
        self._group = SaveGroup(_new_group())
        self._stager = Stager()
        self._writer = ShardWriter(self._group)
        places = [Place(folder, retention, "run_dir"), *([fallback] if fallback is not None else [])]
        self._publisher = Publisher(places, self._group, check_lock)
        self._thread: threading.Thread | None = None

    @property
    def last_saved(self) -> Saved | None:
        """The last good save; None before the first."""
        return self.saves[-1] if self.saves else None

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], protect: publish.Accept = publish.is_good
    ) -> float:
        """Copies and writes `tensors` (plain tensors and DTensors, by name) and `meta`, in the background.

        `meta` must be JSON values; rank 0's is written. A name that several ranks give holds the same value on all of
        them, or the shards of one DTensor. Once the checkpoint is published, old ones are removed, except the newest
        whose meta `protect` accepts. Waits first for a save that still runs, and returns the seconds that this took.
        The tensors must not change before `before_update` is called. Raises `fatal`.
        """
        began = time.perf_counter()
        self.wait()
        self.raise_fatal()
        waited = time.perf_counter() - began
        # In the training thread, whose default group is the one way to agree on it.
        self._group.reconnect(_new_group)
        # Meta is copied, as the progress goes on while the thread writes; tensors are protected by `before_update`.
        what = (step, tensors, self._stager.begin(), copy.deepcopy(meta), protect)
        # A process that ends by an error must not wait for a disk that hangs; `close` waits as long as is right.
        self._thread = threading.Thread(target=self._write, args=what, name=f"checkpoint-{step}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the other ranks have started theirs, and wait for this one
            logger.warning("%s: training waits until the checkpoint of step %d is written", error, step)
            self._thread = None
            self._write(*what)
        return waited

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Makes the save plan and allocates the memory for the copies of `tensors`, those that will be saved, so that
        the first `save` does not have to: page-locking takes about a second for every five GB."""
        self._writer.plan(tensors, self._stager.reserve(tensors))

    def before_update(self) -> None:
        """Orders the copies of the last `save` before the update: on a CPU, waits until they are made; on a GPU, waits
        until they are issued, and the current stream waits for them."""
        self._stager.before_update()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until no save is running, at most `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def remove_old(self, protect: publish.Accept) -> None:
        """Removes old checkpoints once more, by what became known since the last save; after `wait`."""
        if self.last_saved is not None:
            self._publisher.remove_old(self.last_saved.step, self.last_saved.folder, protect)

    def raise_fatal(self) -> None:
        """Raises the error that must end the run, if rank 0 has one. Called after `wait`, on all ranks together: all of
        them raise it, or none."""
        self.fatal, self.failed_saves, self.last_error = broadcast((self.fatal, self.failed_saves, self.last_error))
        if self.fatal is not None:
            raise self.fatal

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the running save, at most `timeout_s` seconds, and frees the copies."""
        self.wait(timeout_s)
        self._stager.free()

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        ready: torch.cuda.Event | None,
        meta: dict[str, Any],
        protect: publish.Accept,
    ) -> None:
        """Runs in the background thread."""
        began = time.perf_counter()
        copies: dict[str, Tensor] = {}
        check_s = 0.0

        def stage() -> list[str]:
            nonlocal check_s
            own, not_finite, check_s = self._stager.stage(tensors, ready)
            copies.update(own)
            return not_finite[:MOST_NAMED]

        def union(names: list[list[str]]) -> list[str]:
            return list(dict.fromkeys(name for of_rank in names for name in of_rank))

        def write(folder: Path) -> dict[str, FileEntry]:
            return self._writer.write(folder, copies) | (write_meta(folder, meta) if self._group.rank == 0 else {})

        try:
            not_finite = self._group.agree(stage, union)
            if not_finite:
                meta |= {"good": False, "not_finite": not_finite[:MOST_NAMED]}
            self._writer.plan(tensors, copies)
            folder, problem = self._publisher.publish(step, write, protect)
            self.last_error = None
            self.failed_saves = 0
            self.saves.append(Saved(step, time.perf_counter() - began, folder, problem, not_finite, check_s))
            self._saved(folder / step_name(step))
        except Exception as error:
            self._count_failure(step, error)

    def _count_failure(self, step: int, error: Exception) -> None:
        self.failed_saves += 1
        self.last_error = _not_saved(step, error)
        self.errors.append(self.last_error)
        if isinstance(error, LaunchError):
            self.fatal = error
        elif self.failed_saves == self._max_failures:
            self.fatal = CheckpointError(
                f"{self.failed_saves} saves in a row have failed, as many as checkpoint.max_failures allows. The last "
                f"one: {self.last_error}; remove the cause and run the same command again"
            )
        # Those of all ranks on rank 0, on the others their own: else the log would grow with the square of the ranks.
        own = error.own if isinstance(error, SaveFailedError) and self._group.rank != 0 else str(error)
        if self.fatal is None and own is not None:
            logger.error("%s; the run goes on with the checkpoints it has", _not_saved(step, own))


def _new_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=RANKS_APART)


def _not_saved(step: int, problem: object) -> str:
    return f"the checkpoint of step {step} was not saved: {problem}"
