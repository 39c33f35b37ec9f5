"""Saving a checkpoint of a distributed run in the background.

`save` copies the tensors to CPU memory and returns; one thread per rank then writes them with
torch.distributed.checkpoint and publishes the result. The threads talk over a gloo group of their own, because NCCL
collectives must all be issued from one thread in one order, and that thread is busy training.
"""

import copy
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from moba_train.checkpoint import publish
from moba_train.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Checkpointer:
    """Writes checkpoints into `folder`, which every rank must see, and keeps the `keep_last` newest and the multiples
    of `keep_every` steps.

    Construct it on every rank once the default process group exists; `save`, `wait` and `close` are called on every
    rank. The copies live in page-locked memory when the tensors are on a GPU and are kept from one save to the next:
    host memory of the size of a rank's shards.

    A save that fails on any rank fails on all: it is logged, its text is kept in `last_error` (None after a good save),
    the half-written folder is removed, and the run goes on with the checkpoints it had. `last_stall_s` is the time in
    seconds for which the last `save` held up its caller.
    """

    def __init__(self, folder: Path, keep_last: int, keep_every: int | None) -> None:
        self.folder = folder
        self.last_error: str | None = None
        self.last_stall_s = 0.0
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._group = dist.new_group(backend="gloo")
        self._rank = dist.get_rank()
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        try:
            self._on_rank_0(self._prepare_folder)
        except _SaveFailedError as error:
            raise CheckpointError(f"{folder} cannot be used for checkpoints: {error}; change run_dir") from error

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Copies `tensors` (plain ones and DTensors, by name) and `meta` and writes them in the background.

        `meta` is JSON-able and the one of rank 0 counts. A name that several ranks give holds the same value on all of
        them, or the shards of one DTensor. Waits first for the save before, if that still runs.
        """
        start = time.perf_counter()
        self.wait()
        planner = _StagedSavePlanner(self._stage(tensors))
        # The live tensors go along for their shapes and placements only: no value of theirs is read in the thread.
        self._thread = threading.Thread(
            target=self._write,
            args=(step, tensors, planner, copy.deepcopy(meta)),
            name=f"checkpoint-{step}",
            daemon=True,
        )
        self._thread.start()
        self.last_stall_s = time.perf_counter() - start

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when no save is running, or after so many seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def close(self, timeout_s: float | None = None) -> None:
        """Finishes the running save, if it takes no longer than that, and frees the copies."""
        self.wait(timeout_s)
        self._buffers.clear()

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        publish.clean_up(self.folder)

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """CPU copies of this rank's shards."""
        staged = {}
        for name, tensor in tensors.items():
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            staged[name] = buffer.copy_(local, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._buffers = staged
        return staged

    def _write(self, step: int, tensors: dict[str, Tensor], planner: dcp.SavePlanner, meta: dict[str, Any]) -> None:
        """Runs in the background thread."""
        temporary = publish.temporary_folder(self.folder, step)
        try:
            self._on_rank_0(lambda: _make_empty(temporary))
            writer = dcp.FileSystemWriter(temporary)
            try:
                dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self._group)
            except CheckpointException as error:  # raised on every rank if on one
                causes = [f"rank {rank}: {cause!r}" for rank, (cause, _) in error.failures.items()]
                raise _SaveFailedError("; ".join(causes)) from None
            hashes = self._on_every_rank(lambda: self._finish_own_files(temporary, meta))
            files = {name: entry for own in hashes for name, entry in own.items()}
            self._on_rank_0(lambda: self._publish(step, files))
            self.last_error = None
        except Exception as error:
            self.last_error = f"the checkpoint of step {step} was not saved: {error}"
            logger.error("%s; the run goes on with the checkpoints it has", self.last_error)
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def _finish_own_files(self, temporary: Path, meta: dict[str, Any]) -> dict[str, publish.FileEntry]:
        """Hashes the files that this rank wrote; rank 0 adds meta.json and DCP's index."""
        own = list(temporary.glob(f"__{self._rank}_*.distcp"))
        if self._rank == 0:
            publish.write_json(temporary / publish.META, meta)
            own += [temporary / publish.META, temporary / ".metadata"]
        return {path.name: publish.hash_file(path) for path in own}

    def _publish(self, step: int, files: dict[str, publish.FileEntry]) -> None:
        publish.publish(self.folder, step, files)
        try:
            publish.apply_retention(self.folder, self._keep_last, self._keep_every)
        except OSError as error:
            logger.warning("the checkpoint of step %d is saved, but an old one could not be removed: %s", step, error)

    def _on_rank_0(self, action: Callable[[], object]) -> None:
        self._on_every_rank(lambda: action() if self._rank == 0 else None)

    def _on_every_rank(self, action: Callable[[], T]) -> list[T]:
        """Runs `action` and returns every rank's result. An error on any rank is raised on all, and none is left
        waiting in a collective."""
        outcome: tuple[T | None, str | None]
        try:
            outcome = action(), None
        except Exception as error:
            outcome = None, f"rank {self._rank}: {error!r}"
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(outcomes, outcome, group=self._group)
        if errors := [error for _, error in outcomes if error is not None]:
            raise _SaveFailedError("; ".join(errors))
        return [result for result, _ in outcomes]


class _SaveFailedError(Exception):
    """A step of a save failed on at least one rank."""


class _StagedSavePlanner(dcp.DefaultSavePlanner):
    """Plans from the live tensors' shapes and placements, writes the staged copies."""

    def __init__(self, staged: dict[str, Tensor]) -> None:
        super().__init__()
        self._staged = staged

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._staged[index.fqn]


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
