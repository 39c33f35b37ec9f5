"""Which rank ended the run, and why: heartbeats and failure reports of all ranks, in a store that every rank can read.

The store, torchrun's, outlives the ranks. A rank whose torchrun dies is killed, too.
"""

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from moba_train.errors import CommunicationError, UserError

GRACE_S = 5.0
"""How long a rank that gives up waits for the reports of others: ranks that wait for the same one give up within
moments of each other."""

SAME_S = 1.0
"""How long a rank waits for rank 0 to say the same error: the ranks that find one together do so in far less."""

_MOST_NAMED = 16
"""How many of the ranks without a report are described."""


@dataclass(frozen=True)
class Heartbeat:
    """A rank's sign of life: the phase of training that it is in."""

    count: int
    """Heartbeats of this rank so far."""
    entered: int
    """Phases entered so far. All ranks enter the same phases, so the rank with the lowest number is behind."""
    phase: str
    step: int
    """Optimizer steps completed."""
    age_s: float
    """Seconds since the phase was entered."""
    limit_s: float
    """Seconds after which the phase counts as stalled."""
    stack: str
    """Stack of the main thread, once half of `limit_s` has passed; empty before."""
    waits: bool
    """Whether that stack ends in a collective."""

    def publish(self, store: dist.Store, rank: int) -> None:
        """Store this as the latest heartbeat of `rank`."""
        store.set(_heartbeat_key(rank), json.dumps(asdict(self)))

    @staticmethod
    def latest(store: dist.Store, rank: int) -> "Heartbeat | None":
        """The latest heartbeat of `rank`; None before the first."""
        key = _heartbeat_key(rank)
        return Heartbeat(**json.loads(store.get(key))) if store.check([key]) else None


def _heartbeat_key(rank: int) -> str:
    return f"moba_train/heartbeat/{rank}"


class FailureReports:
    """The errors of ranks that gave up, each readable by all ranks."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout

    def report(self, error: BaseException) -> str:
        """Reports that `error` ends this rank. Returns what is known about the others: ranks that ended earlier with
        another error and, if this rank was waiting in a collective, ranks that have not reported."""
        mine = _summary(error)
        try:
            earlier = self._reports()
            if isinstance(error, UserError) and not was_waiting(error):
                self._store.set(self._code_key(self._rank), str(error.exit_code))
            self._store.set(self._key(self._rank), mine)
            deadline = time.monotonic() + (GRACE_S if was_waiting(error) else 0)
            while len(reports := self._reports()) < self._size and time.monotonic() < deadline:
                time.sleep(0.1)
        except (RuntimeError, OSError) as unreachable:
            return f"rank {self._rank} of {self._size} ended; the other ranks' reports cannot be read: {unreachable}"
        silent = [rank for rank in range(self._size) if rank not in reports]
        lines = []
        if operation := _collective(error):
            limit = self._timeout.total_seconds()
            lines.append(f"rank {self._rank} gave up in {operation} (parallel.timeout is {limit:g} s)")
        lines += [f"rank {rank} ended before: {text}" for rank, text in earlier.items() if text != mine]
        if silent and was_waiting(error):
            ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            lines.append(f"no answer from {ranks}: dead, stalled, or still waiting; the rank to look at is among them")
            lines += [text for rank in silent[:_MOST_NAMED] if (text := self._last_seen(rank))]
        return "\n".join(lines)

    def is_said_elsewhere(self, error: UserError) -> bool:
        """Whether another rank says `error`, which this rank has reported: rank 0 if it comes to the same, else the
        first rank to ask."""
        mine = _summary(error)
        deadline = time.monotonic() + SAME_S
        try:
            while self._rank != 0 and not self._store.check([self._key(0)]) and time.monotonic() < deadline:
                time.sleep(0.02)
            if self._rank != 0 and self._reports().get(0) == mine:
                return True
            digest = hashlib.sha256(mine.encode()).hexdigest()
            return self._store.add(f"moba_train/said/{digest}", 1) > 1
        except (RuntimeError, OSError):
            return False

    def code_of_others(self) -> int | None:
        """Exit code of a rank that ended with an error of the user's which is its own; None if there is none."""
        try:
            codes = (self._store.get(self._code_key(rank)) for rank in range(self._size) if self._has_code(rank))
            return next((int(code) for code in codes), None)
        except (RuntimeError, OSError):
            return None

    def _has_code(self, rank: int) -> bool:
        return self._store.check([self._code_key(rank)])

    def _last_seen(self, rank: int) -> str:
        try:
            last = Heartbeat.latest(self._store, rank)
        except (RuntimeError, OSError):
            return ""
        return f"rank {rank} was last seen in {last.phase!r} after step {last.step}" if last else ""

    def _reports(self) -> dict[int, str]:
        ranks = (rank for rank in range(self._size) if self._store.check([self._key(rank)]))
        return {rank: self._store.get(self._key(rank)).decode() for rank in ranks}

    def _key(self, rank: int) -> str:
        return f"moba_train/gave_up/{rank}"

    def _code_key(self, rank: int) -> str:
        return f"moba_train/exit_code/{rank}"


def end_with_launcher() -> None:
    """Ask Linux to kill this rank if torchrun dies. Otherwise it would go on training next to the run that is started
    next."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def was_waiting(error: BaseException) -> bool:
    """Whether `error` comes from a collective, so that another rank may be its cause."""
    return isinstance(error, CommunicationError) or _collective(error) is not None


def _summary(error: BaseException) -> str:
    operation = _collective(error)
    return f"{type(error).__name__}{f' in {operation}' if operation else ''}: {str(error)[:1000]}"


def _collective(error: BaseException) -> str | None:
    """The function of torch.distributed that raised `error`; None if it was raised elsewhere: torch.distributed calls
    the model, too, whose errors are its own."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and (frames[-1].name in ("wrapper", "_fn") or frames[-1].filename.endswith("torch/_ops.py")):
        frames.pop()
    if not frames or "torch/distributed/" not in frames[-1].filename or isinstance(error, torch.OutOfMemoryError):
        return None
    return frames[-1].name
