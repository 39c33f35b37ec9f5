"""Saving a checkpoint of a distributed run in the background.

`save` returns at once; a thread of each rank copies the tensors to CPU memory, writes them with
torch.distributed.checkpoint (planned.py; with further threads where there is much) and publishes the result. The copies
are made while the next forward and backward pass run, and only the update of the weights waits for them
(`before_update`). The thread issues them, because a GPU's queue holds about a thousand, and issuing more blocks. The
threads use a gloo group of their own, because all NCCL collectives must be issued from one thread in one order, and
that thread is busy training.

Why not `dcp.async_save` with a pinned, asynchronous DefaultStager (torch 2.13)? It plans every save anew, which costs
the training thread 1.28 s a save on a CPU, against 0.50 s with one save plan (benchmarks/checkpoint_python.py); its
plan caching still makes and compares all local plans. Its staging stream does not wait for the training stream; the
host must wait for the copies before the update, where here the GPU's stream does; its memory is page-locked in the
first save. The writing is DCP's here too, and hashes, manifest and rename need a thread of ours in any case.
"""

import copy
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.checkpoint import manifest, publish
from moba_train.checkpoint.finite import FiniteCheck
from moba_train.checkpoint.planned import PlannedWriter
from moba_train.checkpoint.rank_group import RankGroup, SaveFailedError
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.threads import in_threads, threads_for
from moba_train.errors import CheckpointError, LaunchError, UserError
from moba_train.optim.gradients import local_part
from moba_train.parallel.offload import PageLockedMemory
from moba_train.parallel.world import broadcast

logger = logging.getLogger(__name__)

RANKS_APART = timedelta(minutes=30)
"""How long a rank that has written its part of a checkpoint waits for the others before the save counts as failed. Not
`parallel.timeout`, which limits steps: the slowest disk may take longer than that, and training does not wait."""

MOST_NAMED = 20
"""Tensors with NaN or infinite values that a meta names."""


@dataclass(frozen=True)
class Place:
    """A folder for checkpoints, which every rank must see, and which of them stay in it."""

    folder: Path
    retention: Retention
    key: str
    """Key of the recipe that chooses the folder."""


class Saved(NamedTuple):
    """A good save."""

    step: int
    seconds: float
    """In the background."""
    folder: Path
    """The one of the places that it was published in."""
    problem: str | None
    """Why it is not in the first place; None if it is."""
    not_finite: list[str]
    """Names of tensors that hold NaN or infinite values."""
    check_s: float
    """Time in which this rank looked for them."""


@dataclass(frozen=True)
class _Contents:
    """What one save writes, into whichever place."""

    step: int
    tensors: dict[str, Tensor]
    copies: dict[str, Tensor]
    meta: dict[str, Any]
    protect: publish.Accept


class Checkpointer:
    """Writes checkpoints into `folder`, which every rank must see, and keeps those that `retention` selects.

    Made on every rank once the default process group exists; `save`, `wait` and `close` are called on every rank. The
    copies take host memory of the size of a rank's shards, page-locked for tensors on a GPU, and kept from one save to
    the next.

    A save that fails on any rank fails on all, and its half-written folder is removed. It is then written into the
    `fallback`, if there is one. Where that fails too, the error is logged, its text is kept in `last_error` (None after
    a good save), `failed_saves` counts it (in a row), and the run goes on with the checkpoints it had. A save in which
    a rank does not answer within RANKS_APART fails, too, and the next one begins with new connections.

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
    ) -> None:
        self.last_error: str | None = None
        self.errors: list[str] = []
        """What `last_error` has been, oldest first: a save may fail before anyone has read how the one before ended."""
        self.saves: list[Saved] = []
        """The good saves, oldest first: the next may end before anyone has read how this one did."""
        self.failed_saves = 0
        self.fatal: UserError | None = None
        self._places = [Place(folder, retention, "run_dir"), *([fallback] if fallback is not None else [])]
        self._check_lock = check_lock
        self._max_failures = max_failures
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: torch.cuda.Event | None = None
        self._copies_issued = threading.Event()
        self._copies_issued.set()
        self._ranks = RankGroup(_new_group())
        self._writer = PlannedWriter(self._ranks)
        self._memory = PageLockedMemory()
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        for place in self._places:
            self._prepare(place)

    @property
    def last_saved(self) -> Saved | None:
        """The last good save; None before the first."""
        return self.saves[-1] if self.saves else None

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        meta: dict[str, Any],
        protect: publish.Accept = publish.is_good,
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
        self._ranks.reconnect(_new_group)
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._copies_issued.clear()
        self._thread = threading.Thread(
            target=self._write,
            args=(step, tensors, ready, copy.deepcopy(meta), protect),
            name=f"checkpoint-{step}",
            daemon=True,
        )
        self._thread.start()
        return waited

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Makes the save plan and allocates the memory for the copies of `tensors`, those that will be saved, so that
        the first `save` does not have to: page-locking takes about a second for every five GB."""
        self._buffers = {name: self._buffer(name, local_part(tensor)) for name, tensor in tensors.items()}
        self._writer.plan(tensors, self._buffers)

    def before_update(self) -> None:
        """Orders the copies of the last `save` before the update: on a CPU, waits until they are made; on a GPU, waits
        until they are issued, and the current stream waits for them."""
        self._copies_issued.wait()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until no save is running, at most `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def remove_old(self, protect: publish.Accept) -> None:
        """Removes old checkpoints once more, by what became known since the last save; after `wait`."""
        place = self._places[0]
        if self._ranks.rank == 0 and self.last_saved is not None and self.last_saved.folder == place.folder:
            self._remove_old(place, self.last_saved.step, protect)

    def raise_fatal(self) -> None:
        """Raises the error that must end the run, if rank 0 has one. Called after `wait`, on all ranks together: all of
        them raise it, or none."""
        self.fatal, self.failed_saves, self.last_error = broadcast((self.fatal, self.failed_saves, self.last_error))
        if self.fatal is not None:
            raise self.fatal

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the running save, at most `timeout_s` seconds, and frees the copies."""
        self.wait(timeout_s)
        self._buffers = {}  # not cleared: a save that takes longer still reads the old dictionary

    def _prepare(self, place: Place) -> None:
        """Makes the folder, unless there is one, and makes sure that every rank sees what rank 0 writes into it. Where
        rank 0 cannot write into the first place, that is a warning if there is a fallback."""

        def first_folder() -> Path:
            publish.prepare(place.folder)
            return publish.make_temporary_folder(place.folder, 0)

        probe: Path | None = None
        try:
            probe = self._ranks.broadcast_from_rank_0(first_folder)
            self._ranks.on_every_rank(lambda: _check_visible(probe, place))
            self._ranks.broadcast_from_rank_0(lambda: publish.remove(probe))
        except SaveFailedError as error:
            text = f"{place.folder} cannot be used for checkpoints: {error}"
            if probe is not None or place is self._places[-1]:
                raise CheckpointError(f"{text}; change {place.key}") from error
            if self._ranks.rank == 0:
                logger.warning("%s; those that it does not take go to %s", text, self._places[-1].key)

    def _stage(
        self, tensors: dict[str, Tensor], ready: torch.cuda.Event | None
    ) -> tuple[dict[str, Tensor], list[str], float]:
        """CPU copies of this rank's shards as they were at `ready`, the names of those that are not finite, and the
        seconds that looking for them took."""
        try:
            if self._stream is not None:
                # A new thread's current device is GPU 0. Leaving a stream context returns to it, which creates a
                # context on GPU 0, and for seconds no other thread of the process can launch anything.
                torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                if ready is not None:
                    ready.wait()
                shards = {name: local_part(tensor) for name, tensor in tensors.items()}
                buffers = self._buffers = {name: self._buffer(name, shard) for name, shard in shards.items()}
                check = FiniteCheck(shards)
                for name, shard in shards.items():
                    buffers[name].copy_(shard, non_blocking=True)
                copied = self._copied = self._stream.record_event() if self._stream is not None else None
        finally:
            self._copies_issued.set()
        if copied is not None:
            copied.synchronize()
        return buffers, *check.result(buffers)

    def _buffer(self, name: str, shard: Tensor) -> Tensor:
        """Memory for a copy of `shard`; that of the last save, if its shape and dtype fit."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shard.shape or buffer.dtype != shard.dtype:
            buffer = self._memory.empty_like(shard)
        return buffer

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

        def stage() -> tuple[list[str], float]:
            own, not_finite, check_s = self._stage(tensors, ready)
            copies.update(own)
            return not_finite[:MOST_NAMED], check_s

        try:
            checks = self._ranks.gather_from_every_rank(stage)
            not_finite = list(dict.fromkeys(name for names, _ in checks for name in names))
            if not_finite:
                meta |= {"good": False, "not_finite": not_finite[:MOST_NAMED]}
            contents = _Contents(step, tensors, copies, meta, protect)
            folder, problem = self._write_where_it_works(contents)
            check_s = checks[self._ranks.rank][1]
            self.last_error = None
            self.failed_saves = 0
            self.saves.append(Saved(step, time.perf_counter() - began, folder, problem, not_finite, check_s))
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
        if self.fatal is None:
            self._log_failure(step, error)

    def _log_failure(self, step: int, error: Exception) -> None:
        """Logs the errors of all ranks on rank 0, and on the others their own: the log would grow with the square of
        the number of ranks."""
        own = error.own if isinstance(error, SaveFailedError) and self._ranks.rank != 0 else str(error)
        if own is not None:
            logger.error("%s; the run goes on with the checkpoints it has", _not_saved(step, own))

    def _write_where_it_works(self, contents: _Contents) -> tuple[Path, str | None]:
        """Publishes a checkpoint in the first place that takes it. Returns the folder and what went wrong in the places
        before."""
        problems: list[str] = []
        own: list[str] = []
        for place in self._places:
            try:
                self._write_to(place, contents)
                return place.folder, "; ".join(problems) or None
            except SaveFailedError as error:
                problems.append(f"{place.folder}: {error}")
                own += [f"{place.folder}: {error.own}"] if error.own is not None else []
        raise SaveFailedError("; ".join(problems), "; ".join(own) or None)

    def _write_to(self, place: Place, contents: _Contents) -> None:
        temporary: Path | None = None
        try:
            temporary = self._ranks.broadcast_from_rank_0(lambda: self._begin_in(place, contents.step))
            self._ranks.on_every_rank(lambda: _check_visible(temporary, place))
            self._writer.write(temporary, contents.tensors, contents.copies)
            hashes = self._ranks.gather_from_every_rank(lambda: self._finish_own_files(temporary, contents.meta))
            files = {name: entry for own in hashes for name, entry in own.items()}
            self._publish_on_rank_0(place, temporary, contents, files)
        except Exception:
            if self._ranks.rank == 0 and temporary is not None and os.path.exists(temporary):
                publish.remove(temporary)
            raise

    def _begin_in(self, place: Place, step: int) -> Path:
        self._check_owner(place)
        return publish.make_temporary_folder(place.folder, step)

    def _check_owner(self, place: Place) -> None:
        """Raises LaunchError when the run folder is not this run's any more. A run folder that does not answer is a
        reason to use the fallback, and none to stay away from it."""
        try:
            self._check_lock()
        except OSError:
            if place is self._places[0]:
                raise

    def _finish_own_files(self, temporary: Path, meta: dict[str, Any]) -> dict[str, manifest.FileEntry]:
        """Size and hash of each file that this rank wrote; rank 0 also writes meta.json and hashes DCP's index."""
        own = list(temporary.glob(f"__{self._ranks.rank}_*.distcp"))
        if self._ranks.rank == 0:
            manifest.write_json(temporary / manifest.META, meta)
            own += [temporary / manifest.META, temporary / ".metadata"]
        entries = in_threads(manifest.hash_file, own, threads_for(sum(path.stat().st_size for path in own)))
        return dict(zip((path.name for path in own), entries, strict=True))

    def _publish_on_rank_0(
        self, place: Place, temporary: Path, contents: _Contents, files: dict[str, manifest.FileEntry]
    ) -> None:
        """Publishes on rank 0 and tells the other ranks. On rank 0 the save is good from then on, also where the ranks
        lose contact before they know."""
        published = False

        def publish_here() -> None:
            nonlocal published
            self._publish(place, temporary, contents, files)
            published = True

        try:
            self._ranks.broadcast_from_rank_0(publish_here)
        except Exception as error:
            if not published:
                raise
            text = "the checkpoint of step %d is complete, but the ranks lost contact before all of them knew: %s"
            logger.warning(text, contents.step, error)

    def _publish(
        self, place: Place, temporary: Path, contents: _Contents, files: dict[str, manifest.FileEntry]
    ) -> None:
        self._check_owner(place)
        publish.publish(temporary, contents.step, files)
        self._remove_old(place, contents.step, contents.protect)

    def _remove_old(self, place: Place, step: int, protect: publish.Accept) -> None:
        try:
            self._check_owner(place)
            place.retention.apply(place.folder, protect, marked_in=self._places[0].folder)
        except LaunchError:
            raise
        except Exception as error:  # whatever it is, the checkpoint is there
            logger.warning("the checkpoint of step %d is saved, but old ones could not be removed: %s", step, error)


def _new_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=RANKS_APART)


def _not_saved(step: int, problem: object) -> str:
    return f"the checkpoint of step {step} was not saved: {problem}"


def _check_visible(path: Path, place: Place) -> None:
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}, which rank 0 has made, is not there on this rank's node; {place.key} must be on a file system "
            "that all nodes share"
        )
