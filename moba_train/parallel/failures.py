"""Which rank ended the run, and in what: every rank that gives up says so where the others can read it. And a rank
whose launcher is gone ends as well."""

import ctypes
import os
import signal
import sys
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

from moba_train.errors import CommunicationError

GRACE_S = 5.0
"""Ranks that wait for the same one give up within moments of each other; so long an answer is waited for."""


class RollCall:
    """The reports of ranks that had to give up, kept in a store that outlives them (torchrun's)."""

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
        return "\n".join(lines)

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
