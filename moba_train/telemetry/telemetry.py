"""`Telemetry`: the reports of the trainer, handed to every sink as one record."""

import threading
import time
from typing import Any, Protocol

from moba_train.telemetry.outage import Outage

Record = dict[str, Any]
"""`time` (seconds since the epoch), `step`, `tokens` (consumed so far), `type` ("metrics", "alert" or the type of an
event), `stage`; then the metrics, or an event's `message` and fields, or an alert's `title`, `text` and `alert` (its
type)."""


class Sink(Protocol):
    """A destination of records. An exception loses that record in that sink, unless it is a DelayedError, and has no
    other effect."""

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
            self._write("warning", warning)
