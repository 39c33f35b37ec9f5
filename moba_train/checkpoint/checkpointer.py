"""Saving a checkpoint of a distributed run in the background.

`save` returns at once; one thread per rank copies the tensors to CPU memory, writes them with
torch.distributed.checkpoint (planned.py) and publishes the result. The copies are made beside the next forward and
backward pass, and only the update of the weights has to wait for them (`before_update`). The thread asks for them,
because a GPU's queue takes about a thousand: who asks for more has to wait. The threads talk over a gloo group of their
own, because NCCL collectives must all be issued from one thread in one order, and that thread is busy training.
"""

import copy
import logging
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.checkpoint import manifest, publish
from moba_train.checkpoint.planned import PlannedWriter
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import local_part
from moba_train.checkpoint.together import SaveFailedError, Together
from moba_train.errors import CheckpointError

logger = logging.getLogger(__name__)

RANKS_APART = timedelta(minutes=30)
"""So long a rank that has written its part of a checkpoint waits for the others before the save counts as failed. Not
`parallel.timeout`, which is about steps: the slowest disk may take longer than that, and training does not wait."""


class Checkpointer:
    """Writes checkpoints into `folder`, which every rank must see, and keeps those that `retention` says.

    Construct it on every rank once the default process group exists; `save`, `wait` and `close` are called on every
    rank. The copies live in page-locked memory when the tensors are on a GPU and are kept from one save to the next:
    host memory of the size of a rank's shards.

    A save that fails on any rank fails on all: it is logged, its text is kept in `last_error` (None after a good save),
    the half-written folder is removed, and the run goes on with the checkpoints it had. `last_saved` is the step of the
    last good save and the seconds it took in the background.
    """

    def __init__(self, folder: Path, retention: Retention) -> None:
        self.folder = folder
        self.last_error: str | None = None
        self.last_saved: tuple[int, float] | None = None
        self._retention = retention
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: torch.cuda.Event | None = None
        self._asked_for_copies = threading.Event()
        self._asked_for_copies.set()
        self._together = Together(dist.new_group(backend="gloo", timeout=RANKS_APART))
        self._writer = PlannedWriter(self._together)
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        try:
            self._together.from_rank_0(lambda: publish.prepare(folder))
        except SaveFailedError as error:
            raise CheckpointError(f"{folder} cannot be used for checkpoints: {error}; change run_dir") from error

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        meta: dict[str, Any],
        protect: publish.Accept = publish.is_good,
    ) -> float:
        """Copies `tensors` (plain ones and DTensors, by name) and `meta` and writes them, in the background.

        `meta` is JSON-able and the one of rank 0 counts. A name that several ranks give holds the same value on all of
        them, or the shards of one DTensor. When it is published, old ones go, but not the newest whose meta `protect`
        agrees to. Waits first for the save before, if that still runs, and returns for how many seconds. The
        tensors must not change before `before_update` was called.
        """
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._asked_for_copies.clear()
        self._thread = threading.Thread(
            target=self._write,
            args=(step, tensors, ready, copy.deepcopy(meta), protect),
            name=f"checkpoint-{step}",
            daemon=True,
        )
        self._thread.start()
        return waited

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Plans and makes the memory for the copies now, so that the first `save` need not: page-locking takes about a
        second for every few GB. `tensors` are those that will be saved."""
        self._buffers = {name: self._buffer(name, local_part(tensor)) for name, tensor in tensors.items()}
        self._writer.plan(tensors, self._buffers)

    def before_update(self) -> None:
        """Waits until the copies of the last `save` are made; a GPU only makes them before what it is given from now
        on, and nobody waits here."""
        self._asked_for_copies.wait()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when no save is running, or after so many seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def close(self, timeout_s: float | None = None) -> None:
        """Finishes the running save, if it takes no longer than that, and lets go of the copies."""
        self.wait(timeout_s)
        self._buffers = {}  # not cleared: a save that takes longer still writes from it

    def _stage(self, tensors: dict[str, Tensor], ready: torch.cuda.Event | None) -> dict[str, Tensor]:
        """CPU copies of this rank's shards as they were at `ready`."""
        try:
            if self._stream is not None:
                # A thread is on GPU 0 to begin with. To come back there, if only from another stream, makes a context
                # there, and for seconds nobody else in the process can launch anything.
                torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                if ready is not None:
                    ready.wait()
                shards = {name: local_part(tensor) for name, tensor in tensors.items()}
                buffers = self._buffers = {name: self._buffer(name, shard) for name, shard in shards.items()}
                for name, shard in shards.items():
                    buffers[name].copy_(shard, non_blocking=True)
                copied = self._copied = self._stream.record_event() if self._stream is not None else None
        finally:
            self._asked_for_copies.set()
        if copied is not None:
            copied.synchronize()
        return buffers

    def _buffer(self, name: str, shard: Tensor) -> Tensor:
        """Memory for a copy of `shard`: what the last save used, if it fits."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shard.shape or buffer.dtype != shard.dtype:
            buffer = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
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
        temporary: Path | None = None
        try:
            copies = self._together.each(lambda: self._stage(tensors, ready))
            temporary = self._together.from_rank_0(lambda: publish.make_temporary_folder(self.folder, step))
            self._writer.write(temporary, tensors, copies)
            hashes = self._together.on_every_rank(lambda: self._finish_own_files(temporary, meta))
            files = {name: entry for own in hashes for name, entry in own.items()}
            self._together.from_rank_0(lambda: self._publish(temporary, step, files, protect))
            self.last_error, self.last_saved = None, (step, time.perf_counter() - began)
        except Exception as error:
            self.last_error = f"the checkpoint of step {step} was not saved: {error}"
            logger.error("%s; the run goes on with the checkpoints it has", self.last_error)
            if self._together.rank == 0 and temporary is not None and temporary.exists():
                publish.remove(temporary)

    def _finish_own_files(self, temporary: Path, meta: dict[str, Any]) -> dict[str, manifest.FileEntry]:
        """Hashes the files that this rank wrote; rank 0 adds meta.json and DCP's index."""
        own = list(temporary.glob(f"__{self._together.rank}_*.distcp"))
        if self._together.rank == 0:
            manifest.write_json(temporary / manifest.META, meta)
            own += [temporary / manifest.META, temporary / ".metadata"]
        return {path.name: manifest.hash_file(path) for path in own}

    def _publish(
        self, temporary: Path, step: int, files: dict[str, manifest.FileEntry], protect: publish.Accept
    ) -> None:
        publish.publish(temporary, step, files)
        try:
            self._retention.apply(self.folder, protect)
        except OSError as error:
            logger.warning("the checkpoint of step %d is saved, but an old one could not be removed: %s", step, error)
