"""Which rank ended the run, and in what: every rank says where it is, and why it gives up, where others can read it.

Both are kept in a store that outlives the ranks (torchrun's). And a rank whose launcher is gone ends as well.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from moba_train.errors import CommunicationError

GRACE_S = 5.0
"""Ranks that wait for the same one give up within moments of each other; so long an answer is waited for."""

_MOST_NAMED = 16
"""Of the ranks that do not answer."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life: where a rank was when it gave it."""

    count: int
    """Beats given so far."""
    entered: int
    """Phases entered so far. All ranks go through the same ones, so the rank with the least is behind."""
    phase: str
    step: int
    age_s: float
    """In this phase."""
    limit_s: float
    """Of the phase: longer is a stall."""
    stack: str
    """Of the main thread, once half of that has gone by."""
    waits: bool
    """Whether that stack ends in a collective."""

    def publish(self, store: dist.Store, rank: int) -> None:
        """Publish it as the newest of `rank`."""
        store.set(_beat_key(rank), json.dumps(asdict(self)))

    @staticmethod
    def latest(store: dist.Store, rank: int) -> "Heartbeat | None":
        """None where the rank has given none yet."""
        return Heartbeat(**json.loads(store.get(_beat_key(rank)))) if store.check([_beat_key(rank)]) else None


def _beat_key(rank: int) -> str:
    return f"moba_train/beat/{rank}"


class FailureReports:
    """The reports of ranks that had to give up."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout

    def give_up(self, error: BaseException) -> str:
        """Report `error` as this rank's end. Returns what is known of the others: who ended earlier and of what else,
        and, if this rank was waiting for them, who does not answer."""
        mine = _summary(error)
        try:
            earlier = self._reports()
            self._store.set(self._key(self._rank), mine)
            deadline = time.monotonic() + (GRACE_S if was_waiting(error) else 0)
            while len(reports := self._reports()) < self._size and time.monotonic() < deadline:
                time.sleep(0.1)
        except (RuntimeError, OSError) as unreachable:
            return f"rank {self._rank} of {self._size} ended; the others cannot be asked: {unreachable}"
        silent = [rank for rank in range(self._size) if rank not in reports]
        lines = []
        if operation := _collective(error):
            limit = self._timeout.total_seconds()
            lines.append(f"rank {self._rank} gave up in {operation} (parallel.timeout is {limit:g} s)")
        lines += [f"rank {rank} ended before: {text}" for rank, text in earlier.items() if text != mine]
        if silent and was_waiting(error):
            who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            lines.append(f"no answer from {who}: dead, stalled, or still waiting; the rank to look at is among them")
            lines += [text for rank in silent[:_MOST_NAMED] if (text := self._last_seen(rank))]
        return "\n".join(lines)

    def _last_seen(self, rank: int) -> str:
        try:
            beat = Heartbeat.latest(self._store, rank)
        except (RuntimeError, OSError):
            return ""
        return f"rank {rank} was last seen in {beat.phase!r} after step {beat.step}" if beat else ""

    def _reports(self) -> dict[int, str]:
        ranks = (rank for rank in range(self._size) if self._store.check([self._key(rank)]))
        return {rank: self._store.get(self._key(rank)).decode() for rank in ranks}

    def _key(self, rank: int) -> str:
        return f"moba_train/gave_up/{rank}"


def end_with_launcher() -> None:
    """Has Linux kill this rank when the torchrun that started it dies, be it by SIGKILL: nobody would end it otherwise,
    and it would train on beside the run that is started in its place."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def was_waiting(error: BaseException) -> bool:
    """Whether it was a collective that failed, and so perhaps another rank's fault."""
    return isinstance(error, CommunicationError) or _collective(error) is not None


def _summary(error: BaseException) -> str:
    operation = _collective(error)
    return f"{type(error).__name__}{f' in {operation}' if operation else ''}: {str(error)[:1000]}"


def _collective(error: BaseException) -> str | None:
    """The function of torch.distributed that was called, if any."""
    for frame in traceback.extract_tb(error.__traceback__):
        if "torch/distributed/" in frame.filename and frame.name not in ("wrapper", "_fn"):
            return frame.name
    return None
