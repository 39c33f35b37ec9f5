"""Samples that a stage trains on, a rank's micro-batches of them, and a thread that prepares these ahead of time."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch

from moba_train.config.data import LongConversations, SourceConfig
from moba_train.config.stages import Stage
from moba_train.data.batch import Batch, collate
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import LossWeights
from moba_train.data.samples import StageData
from moba_train.data.sidecar import Fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSpec:
    """The way from corpora to samples, the same in all stages of a run: arguments of `StageData`."""

    seed: int
    """Seed of the order of documents and samples."""
    vocab_size: int
    """Rows of the model's embedding; larger token ids are refused."""
    packing: Literal["concat", "best_fit"]
    loss_norm: Literal["token", "sequence"]
    """Unit whose mean losses are averaged: tokens, or documents."""
    long_conversations: LongConversations


def training_data(spec: DataSpec, stage: Stage, starts: Mapping[str, int]) -> StageData:
    """The samples that `stage` trains on, up to its latest possible end; `starts` as in `StageData`.

    Raises DataError as `StageData` does, and when no token of the stage's corpora carries loss.
    """
    data = StageData(stage.sources, stage.seq_len, stage.max_steps * stage.batch_sequences, starts=starts, **vars(spec))
    data.check_loss()
    return data


def validation_fingerprints(validation: Sequence[SourceConfig]) -> dict[str, Fingerprint]:
    """Fingerprint of each corpus of held-out text, by path. Raises DataError when one is damaged."""
    paths = dict.fromkeys(source.path for source in validation)
    return {path: LossWeights(IndexedDataset(path), "token").fingerprint for path in paths}


STEPS_AHEAD = 2
"""Steps that wait prepared in the queue."""


def step_batches(
    data: StageData, first: int, batch_sequences: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[Batch]:
    """Micro-batches of data-parallel rank `dp_rank` for the optimizer step that consumes sequences
    [first, first + batch_sequences) of the stage.

    Read micro-batch by micro-batch, and rank by rank within each, the sequences are in order for any number of ranks
    and any micro-batch size. Raises ValueError when `batch_sequences` is not a multiple of dp_size * micro_batch_size.
    """
    per_pass = dp_size * micro_batch_size
    if batch_sequences % per_pass:
        raise ValueError(
            f"{batch_sequences} sequences per step are not a multiple of {dp_size} data-parallel ranks x "
            f"micro_batch_size {micro_batch_size}; change batch_tokens or micro_batch_size"
        )
    begin = first + dp_rank * micro_batch_size
    return [
        collate([data.sample(index) for index in range(start, start + micro_batch_size)])
        for start in range(begin, begin + batch_sequences, per_pass)
    ]


class Prefetcher:
    """Iterates over the micro-batches of steps [first_step, end_step), prepared on `device` by a background thread.

    `load(step)` makes a step's batches; its exceptions are raised by the iteration at that step. At most `STEPS_AHEAD`
    steps wait in the queue. Leaving it as a context manager stops the thread.
    """

    def __init__(
        self, load: Callable[[int], list[Batch]], first_step: int, end_step: int, device: torch.device | str
    ) -> None:
        self._load = load
        self._steps = range(first_step, end_step)
        self._awaited = iter(self._steps)
        self._device = device
        # A thread, not processes: reading and copying release Python's lock.
        self._ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(STEPS_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="data-prefetch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("%s: batches are prepared when they are needed, and training waits for them", error)

    def _prepared(self, step: int) -> list[Batch]:
        return [batch.to(self._device) for batch in self._load(step)]

    def _work(self) -> None:
        for step in self._steps:
            result: list[Batch] | BaseException
            try:
                result = self._prepared(step)
            # Whatever it is, it belongs to the step that is asked for, not to the thread.
            except BaseException as error:
                result = error
            self._ready.put(result)
            if self._closed.is_set() or isinstance(result, BaseException):
                return

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        step = next(self._awaited)
        if self._thread.ident is None:
            return self._prepared(step)
        result = self._ready.get()
        if isinstance(result, BaseException):
            self._awaited = iter(range(0))
            raise result
        return result

    def close(self) -> None:
        """Stop the thread; batches not yet taken are dropped."""
        self._closed.set()
        self._awaited = iter(range(0))
        # The thread may wait for a full queue, and puts at most one more step before it sees `_closed`.
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
