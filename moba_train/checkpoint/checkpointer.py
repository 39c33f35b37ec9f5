"""Saving a checkpoint of a distributed run in the background.

`save` returns at once; one thread per rank copies the tensors to CPU memory, writes them with
torch.distributed.checkpoint (planned.py) and publishes the result. The copies are made while the next forward and
backward pass run, and only the update of the weights waits for them (`before_update`). The thread issues them, because
a GPU's queue holds about a thousand, and issuing more blocks. The threads use a gloo group of their own, because all
NCCL collectives must be issued from one thread in one order, and that thread is busy training.

Why not `dcp.async_save` with a pinned, asynchronous DefaultStager (torch 2.13)? It plans every save anew, which costs
the training thread 1.28 s a save on a CPU, against 0.50 s with one save plan (benchmarks/checkpoint_python.py); its
plan caching still makes and compares all local plans. Its staging stream does not wait for the training stream; the
host must wait for the copies before the update, where here the GPU's stream does; its memory is page-locked in the
first save. The writing is DCP's here too, and hashes, manifest and rename need a thread of ours in any case.
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
from moba_train.checkpoint.rank_group import RankGroup, SaveFailedError
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import local_part
from moba_train.errors import CheckpointError

logger = logging.getLogger(__name__)

RANKS_APART = timedelta(minutes=30)
"""How long a rank that has written its part of a checkpoint waits for the others before the save counts as failed. Not
`parallel.timeout`, which limits steps: the slowest disk may take longer than that, and training does not wait."""


class Checkpointer:
    """Writes checkpoints into `folder`, which every rank must see, and keeps those that `retention` selects.

    Made on every rank once the default process group exists; `save`, `wait` and `close` are called on every rank. The
    copies take host memory of the size of a rank's shards, page-locked for tensors on a GPU, and kept from one save to
    the next.

    A save that fails on any rank fails on all: it is logged, its text is kept in `last_error` (None after a good save),
    the half-written folder is removed, and the run goes on with the checkpoints it had. `last_saved` holds the step of
    the last good save and the seconds that it took in the background.
    """

    def __init__(self, folder: Path, retention: Retention) -> None:
        self.folder = folder
        self.last_error: str | None = None
        self.last_saved: tuple[int, float] | None = None
        self._retention = retention
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: torch.cuda.Event | None = None
        self._copies_issued = threading.Event()
        self._copies_issued.set()
        self._ranks = RankGroup(dist.new_group(backend="gloo", timeout=RANKS_APART))
        self._writer = PlannedWriter(self._ranks)
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        try:
            self._ranks.broadcast_from_rank_0(lambda: publish.prepare(folder))
        except SaveFailedError as error:
            raise CheckpointError(f"{folder} cannot be used for checkpoints: {error}; change run_dir") from error

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
        The tensors must not change before `before_update` is called.
        """
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
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
        the first `save` does not have to: page-locking takes about a second for every few GB."""
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

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the running save, at most `timeout_s` seconds, and frees the copies."""
        self.wait(timeout_s)
        self._buffers = {}  # not cleared: a save that takes longer still reads the old dictionary

    def _stage(self, tensors: dict[str, Tensor], ready: torch.cuda.Event | None) -> dict[str, Tensor]:
        """CPU copies of this rank's shards as they were at `ready`."""
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
                for name, shard in shards.items():
                    buffers[name].copy_(shard, non_blocking=True)
                copied = self._copied = self._stream.record_event() if self._stream is not None else None
        finally:
            self._copies_issued.set()
        if copied is not None:
            copied.synchronize()
        return buffers

    def _buffer(self, name: str, shard: Tensor) -> Tensor:
        """Memory for a copy of `shard`; that of the last save, if its shape and dtype fit."""
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
            copies = self._ranks.on_every_rank(lambda: self._stage(tensors, ready))
            temporary = self._ranks.broadcast_from_rank_0(lambda: publish.make_temporary_folder(self.folder, step))
            self._writer.write(temporary, tensors, copies)
            hashes = self._ranks.gather_from_every_rank(lambda: self._finish_own_files(temporary, meta))
            files = {name: entry for own in hashes for name, entry in own.items()}
            self._ranks.broadcast_from_rank_0(lambda: self._publish(temporary, step, files, protect))
            self.last_error = None
            self.last_saved = step, time.perf_counter() - began
        except Exception as error:
            self.last_error = f"the checkpoint of step {step} was not saved: {error}"
            logger.error("%s; the run goes on with the checkpoints it has", self.last_error)
            if self._ranks.rank == 0 and temporary is not None and temporary.exists():
                publish.remove(temporary)

    def _finish_own_files(self, temporary: Path, meta: dict[str, Any]) -> dict[str, manifest.FileEntry]:
        """Size and hash of each file that this rank wrote; rank 0 also writes meta.json and hashes DCP's index."""
        own = list(temporary.glob(f"__{self._ranks.rank}_*.distcp"))
        if self._ranks.rank == 0:
            manifest.write_json(temporary / manifest.META, meta)
            own += [temporary / manifest.META, temporary / ".metadata"]
        return {path.name: manifest.hash_file(path) for path in own}

    def _publish(
        self, temporary: Path, step: int, files: dict[str, manifest.FileEntry], protect: publish.Accept
    ) -> None:
        publish.publish(temporary, step, files)
        try:
            self._retention.apply(self.folder, protect)
        except Exception as error:  # whatever it is, the checkpoint is there
            logger.warning("the checkpoint of step %d is saved, but old ones could not be removed: %s", step, error)
