"""`Telemetry`: the trainer's reports, handed to every sink as records.

A sink that fails does not stop the run: the records that it did not take are counted, and reported at most once a
minute.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

REPORT_SECONDS = 60.0
"""Least time between two reports that the same sink fails."""

Record = dict[str, Any]
"""`time` (seconds since the epoch), `step`, `tokens` (consumed so far), `type` ("metrics", "alert" or the type of an
event), `stage`; then the metrics, numbers or lists of them, or an event's `message` and fields, or an alert's `title`,
`text` and `alert` (its type)."""
_HEAD = {"time", "step", "tokens", "type", "stage"}


def numbers(record: Record) -> dict[str, float]:
    """The record's metrics and numeric event fields, which can be drawn as curves."""
    return {name: value for name, value in record.items() if name not in _HEAD and isinstance(value, int | float)}


class DelayedError(Exception):
    """Raised by a sink that keeps the records it cannot pass on, and tries again with the next one.

    `pending` records are kept; `lost` records were given up so far, over the whole run, because too many were pending.
    """

    def __init__(self, cause: str, pending: int, lost: int) -> None:
        super().__init__(cause)
        self.pending = pending
        self.lost = lost


class Outage:
    """The failures of one sink, named in the log by its type."""

    def __init__(self, sink: object) -> None:
        self._name = type(sink).__name__
        self._failed = 0  # records that it did not take at once, since the last report that it works
        self._lost = 0  # those of them that it will never have
        self._lost_before = 0  # those of all the time before
        self._given_up = 0  # by the sink itself, `DelayedError.lost`
        self._announced = False  # it has been said that it fails, and not yet that it works
        self._next_report = 0.0

    def failed(self, error: Exception) -> None:
        """Counts a record that the sink did not take."""
        self._failed += 1
        if isinstance(error, DelayedError):
            self._lost += error.lost - self._given_up
            self._given_up = error.lost
        else:
            self._lost += 1
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report = now + REPORT_SECONDS
        self._announced = True
        if not isinstance(error, DelayedError):
            logger.warning("%s fails and has missed %d records: %r", self._name, self._lost, error)
            return
        kept = f"{error.pending} records are kept in memory until it works again, {self._lost} are lost"
        logger.warning("%s fails: %s; %s", self._name, error, kept)

    def works(self) -> dict[str, Any] | None:
        """Notes that the sink took a record. Returns the content of a warning event if it was reported to fail before.

        A failure too short to be reported is counted in the next report.
        """
        if not self._announced:
            return None
        counts = {"records_late": self._failed - self._lost, "records_lost": self._lost}
        message = f"{self._name} works again: {counts['records_late']} records came late, {self._lost} are lost"
        logger.warning("%s", message)
        self._lost_before += self._lost
        self._failed = 0
        self._lost = 0
        self._announced = False
        return {"message": message, **counts}

    def closed(self, error: Exception | None) -> None:
        """Reports the records that the sink has missed for good; `error` is that of closing it."""
        lost = self._lost_before + self._lost + (error.pending if isinstance(error, DelayedError) else 0)
        missed = f"; it has missed {lost} records in all" if lost else ""
        if error is not None:
            logger.error("%s could not be closed: %s%s", self._name, error, missed)
        elif lost:
            logger.warning("%s is closed%s", self._name, missed)


@dataclass(frozen=True)
class SinkRun:
    """The run that a sink is opened for."""

    folder: Path
    name: str
    id: str
    """Kept across restarts: wandb's id of the run."""
    resumed_step: int | None
    """Step of the checkpoint from which the run resumes; None at a fresh start."""
    total_steps: int
    """Expected last step."""
    recipe: Mapping[str, Any]
    """Every value of the recipe, and the version of the code, as JSON values; empty on other ranks than 0."""
    rank: int = 0


class Sink(Protocol):
    """A destination of records. An exception loses that record in that sink, unless it is a DelayedError, and has no
    other effect.

    A registered sink (entry point group `moba_train.telemetry_sinks`) has class methods that are given the value of its
    key in `telemetry`: `open(setting, run: SinkRun)`; and, if it likes, `problem(setting)`, the reason why it cannot be
    used on this machine (empty: it can), and `describe(setting)`, its words in the run's first lines. A sink of another
    package has its section of the recipe in its attribute `Options`. One with `on_every_rank = True` is opened on all
    ranks. One with a method `begin_step(step, stage)` is told when a step begins.
    """

    def write(self, record: Record) -> None:
        """Take one record. Called under a lock, also from another thread than the trainer's."""
        ...

    def close(self) -> None:
        """Flush and release what the sink holds."""
        ...


class Telemetry:
    """Hands records to sinks. Rank 0 has real sinks (`make_telemetry`), the other ranks use `Telemetry([])`.

    `stage` is the stage name in every record; the trainer sets it when a stage begins or is resumed. A sink that raises
    is reported, at most once a minute, and still receives later records: no sink can stop a run. When it works again,
    an event `warning` says how many records came late or are lost.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self.stage = ""
        self._sinks = [(sink, Outage(sink)) for sink in sinks]
        self._step = 0
        self._tokens = 0
        self._lock = threading.Lock()  # a stall is reported from another thread

    def begin_step(self, step: int) -> None:
        """Tell the sinks that ask for it that `step` begins."""
        for sink, _ in self._sinks:
            if hasattr(sink, "begin_step"):
                sink.begin_step(step, self.stage)

    def log(self, step: int, tokens: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step; `tokens` is the number consumed so far."""
        with self._lock:
            self._step = step
            self._tokens = tokens
            self._write("metrics", metrics)

    def event(self, step: int, tokens: int, event_type: str, message: str, **fields: Any) -> None:
        """Record an event: "stage", "checkpoint", "resume", "rollback", "spike", "stall", ... `fields` are JSON values;
        the numbers among them are drawn as metrics."""
        with self._lock:
            self._step = step
            self._tokens = tokens
            self._write(event_type, {"message": message, **fields})

    def stalled(self, text: str) -> None:
        """Record a stalled rank at the last reported step. This and `alert` are also called by threads that watch."""
        with self._lock:
            self._write("stall", {"message": text})
        self.alert("a rank stalls", text, "stall")

    def alert(self, title: str, text: str, alert_type: str) -> None:
        """Ask for a person's attention; sinks that notify people limit the rate per `alert_type`."""
        with self._lock:
            self._write("alert", {"title": title, "text": text, "alert": alert_type})

    def close(self) -> None:
        """Flush and close the sinks; takes a limited time even if one hangs."""
        for sink, outage in self._sinks:
            problem = None
            try:
                sink.close()
            except Exception as error:
                problem = error
            outage.closed(problem)

    def _write(self, record_type: str, content: dict[str, Any]) -> None:
        """Hand a record of the current step to every sink; then one for each that works again."""
        head = {"time": time.time(), "step": self._step, "tokens": self._tokens, "type": record_type}
        record = head | {"stage": self.stage} | content
        recovered = []
        for sink, outage in self._sinks:
            try:
                sink.write(record)
            except Exception as error:
                outage.failed(error)
            else:
                recovered.append(outage.works())
        for warning in filter(None, recovered):
            # Ends: `works` returns a warning once, until the sink fails again.
            self._write("warning", warning)
