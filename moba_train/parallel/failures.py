"""Heartbeats and failure reports of all ranks, in a store that every rank can read: they name the rank that ended the
run, and its error.

The store, torchrun's, outlives the ranks. A rank whose torchrun dies is also killed.
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

from moba_train.errors import CommunicationError, UserError, named_ranks

GRACE_S = 5.0
"""Seconds that a rank that gives up waits for the reports of others: ranks that wait for the same one give up within
moments of each other."""

SAME_S = 1.0
"""Seconds that a rank waits for rank 0 to say the same error: the ranks that find one together do so in far less."""

_MOST_NAMED = 16
"""Ranks without a report that are described, at most."""

_POLL_S = 0.05
"""Pause between two requests for what has not come yet."""

_REPORTS = "moba_train/failures/reports"
_ACCOUNT = "moba_train/failures/account"
_FIRST_OWN_ERROR = "moba_train/failures/first_own_error"
_OF_RANK_0 = "moba_train/failures/of_rank_0"


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
    """True if that stack ends in a collective."""

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


@dataclass(frozen=True)
class _Report:
    """The end of one rank."""

    rank: int
    text: str
    waited: bool
    """True if it was waiting in a collective, so that another rank may be the cause."""
    code: int | None
    """Exit code of an error of the user's that is this rank's own."""

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def from_lines(lines: bytes) -> "list[_Report]":
        return [_Report(**json.loads(line)) for line in lines.splitlines()]


@dataclass(frozen=True)
class _Account:
    """The known facts about all ranks."""

    ended: dict[str, str]
    """Text of an error: the ranks that ended with it, in words. The first error, and all that are a rank's own."""
    silent: list[int]
    """Ranks without a report."""
    last_seen: list[str]
    """Sentences about the last heartbeats of the first silent ranks, one for each."""
    code: int | None
    """Exit code of an error of the user's, from the first rank that has one."""


class FailureReports:
    """The errors of ranks that gave up.

    Every rank adds its own to one list. Of the ranks that waited in a collective, the first reads the list and writes
    down an account for the others: if all ranks read all reports, the store's work would grow with the square of the
    number of ranks. A rank makes a few requests, and one every 50 ms while it waits, however many ranks there are.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self.code_of_others: int | None = None
        """Exit code of a rank that ended with an error of the user's which is its own, if this rank was waiting and has
        reported; None if there is none."""

    def report(self, error: BaseException) -> str:
        """Reports that `error` ends this rank. Returns what is known about the others: ranks that ended with another
        error and, if this rank was waiting in a collective, ranks that have not reported. The first such error, and if
        this rank was waiting, all that did not come from waiting."""
        waited = was_waiting(error)
        code = error.exit_code if isinstance(error, UserError) and not waited else None
        mine = _Report(self._rank, _summary(error), waited, code)
        try:
            self._store.append(_REPORTS, mine.to_line())  # type: ignore[attr-defined]  # not in torch's stubs
            if self._rank == 0:
                self._store.set(_OF_RANK_0, _digest(mine.text))
            # A rank that fails by itself does not wait for the reports: the others are still in a collective until its
            # timeout.
            account = self._account() if waited else self._first_own_error(mine)
        except (RuntimeError, OSError) as unreachable:
            return f"rank {self._rank} of {self._size} ended; the other ranks' reports cannot be read: {unreachable}"
        self.code_of_others = account.code
        lines = []
        if operation := _collective(error):
            limit = self._timeout.total_seconds()
            lines.append(f"rank {self._rank} gave up in {operation} (parallel.timeout is {limit:g} s)")
        lines += [f"{ranks} ended before: {text}" for text, ranks in account.ended.items() if text != mine.text]
        if account.silent:
            ranks = named_ranks(account.silent)
            lines.append(f"no answer from {ranks}: dead, stalled, or still waiting; the rank to look at is among them")
        return "\n".join([*lines, *account.last_seen])

    def is_said_elsewhere(self, error: UserError) -> bool:
        """True if another rank says `error`, which this rank has reported: rank 0 if it comes to the same, else the
        first rank to ask."""
        digest = _digest(_summary(error))
        try:
            if self._rank != 0 and self._appears(_OF_RANK_0, SAME_S) and self._store.get(_OF_RANK_0).decode() == digest:
                return True
            return self._store.add(f"moba_train/said/{digest}", 1) > 1
        except (RuntimeError, OSError):
            return False

    def _account(self) -> _Account:
        """The account of the first rank that waited. A rank that it did not wait for, or that waits for it in
        vain, reads the reports itself."""
        if self._store.add("moba_train/waiting_ranks", 1) == 1:
            account = self._read_account(GRACE_S)
            self._store.set(_ACCOUNT, json.dumps(asdict(account)))
            return account
        if self._appears(_ACCOUNT, 2 * GRACE_S):
            account = _Account(**json.loads(self._store.get(_ACCOUNT)))
            if self._rank not in account.silent:
                return account
        return self._read_account(0)

    def _read_account(self, grace_s: float) -> _Account:
        deadline = time.monotonic() + grace_s
        while len(reports := _Report.from_lines(self._store.get(_REPORTS))) < self._size:
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        ended: dict[str, list[int]] = {}
        for number, report in enumerate(reports):
            if number == 0 or not report.waited:
                ended.setdefault(report.text, []).append(report.rank)
        silent = sorted({*range(self._size)} - {report.rank for report in reports})
        return _Account(
            ended={text: named_ranks(ranks) for text, ranks in ended.items()},
            silent=silent,
            last_seen=[text for rank in silent[:_MOST_NAMED] if (text := self._last_seen(rank))],
            code=next((report.code for report in reports if report.code is not None), None),
        )

    def _first_own_error(self, mine: _Report) -> _Account:
        """The first error that did not come from waiting, which may be `mine`."""
        # compare_set is atomic, so that all ranks name the same first error.
        (first,) = _Report.from_lines(self._store.compare_set(_FIRST_OWN_ERROR, "", mine.to_line()))
        return _Account({first.text: named_ranks([first.rank])}, silent=[], last_seen=[], code=None)

    def _appears(self, key: str, seconds: float) -> bool:
        """True if the store has `key` within this number of seconds. Asks again and again, because torch writes
        warnings about a `wait` that ends in vain."""
        deadline = time.monotonic() + seconds
        while not (found := self._store.check([key])) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _last_seen(self, rank: int) -> str:
        try:
            last = Heartbeat.latest(self._store, rank)
        except (RuntimeError, OSError):
            return ""
        return f"rank {rank} was last seen in {last.phase!r} after step {last.step}" if last else ""


def end_with_launcher() -> None:
    """Ask Linux to kill this rank if torchrun dies. Otherwise it would go on training next to the run that is started
    next."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal = 1
        # SIGKILL: a rank in a CUDA call or a collective would not come to handle SIGTERM.
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def was_waiting(error: BaseException) -> bool:
    """True if `error` comes from a collective, so that another rank may be its cause."""
    return isinstance(error, CommunicationError) or _collective(error) is not None


def _summary(error: BaseException) -> str:
    operation = _collective(error)
    return f"{type(error).__name__}{f' in {operation}' if operation else ''}: {str(error)[:1000]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _collective(error: BaseException) -> str | None:
    """The function of torch.distributed that raised `error`; None if it was raised elsewhere: torch.distributed also
    calls the model, whose errors are not torch.distributed's."""
    frames = traceback.extract_tb(error.__traceback__)
    # torch wraps its collectives, in `wrapper` for logging and `_fn` for dynamo: the frame below has the name that
    # users know.
    while frames and (frames[-1].name in ("wrapper", "_fn") or frames[-1].filename.endswith("torch/_ops.py")):
        frames.pop()
    if not frames or "torch/distributed/" not in frames[-1].filename or isinstance(error, torch.OutOfMemoryError):
        return None
    return frames[-1].name
