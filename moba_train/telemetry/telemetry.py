"""`Telemetry`: the reports of the trainer, handed to every sink as one record."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

Record = dict[str, Any]
"""`time` (seconds since the epoch), `step`, `tokens` (consumed so far), `type` ("metrics", "alert" or the type of an
event), `stage`; then the metrics, or an event's `message` and fields, or an alert's `title`, `text` and `alert` (its
type)."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A destination of records. An exception loses that record in that sink, and has no other effect."""

    def write(self, record: Record) -> None:
        """Take one record. Called under a lock, also from another thread than the trainer's."""
        ...

    def close(self) -> None:
        """Flush and release what the sink holds."""
        ...


class Telemetry:
    """Hands records to sinks. Rank 0 has real sinks (`make_telemetry`), the other ranks use `Telemetry([])`.

    `stage` is the stage name in every record; the trainer sets it when a stage begins or is resumed. A sink that raises
    is reported once and still receives later records: no sink can stop a run.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self.stage = ""
        self._sinks = sinks
        self._step = 0
        self._tokens = 0
        self._reported: set[Sink] = set()
        self._lock = threading.Lock()  # a stall is reported from another thread

    def log(self, step: int, tokens: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step; `tokens` is the number consumed so far."""
        self._write(step, tokens, "metrics", metrics)

    def event(self, step: int, tokens: int, event_type: str, message: str, **fields: Any) -> None:
        """Record an event: "stage", "checkpoint", "resume", "rollback", "spike", "stall", ... `fields` are JSON values;
        the numbers among them are drawn as metrics."""
        self._write(step, tokens, event_type, {"message": message, **fields})

    def stalled(self, text: str) -> None:
        """Record a stalled rank at the last reported step. The only method that another thread than the trainer's
        calls."""
        self.event(self._step, self._tokens, "stall", text)
        self.alert("a rank stalls", text, "stall")

    def alert(self, title: str, text: str, alert_type: str) -> None:
        """Ask for a person's attention; sinks that notify people limit the rate per `alert_type`."""
        self._write(self._step, self._tokens, "alert", {"title": title, "text": text, "alert": alert_type})

    def close(self) -> None:
        """Flush and close the sinks; takes a limited time even if one hangs."""
        for sink in self._sinks:
            self._guarded(sink, sink.close)

    def _write(self, step: int, tokens: int, record_type: str, content: dict[str, Any]) -> None:
        with self._lock:
            self._step = step
            self._tokens = tokens
            head = {"time": time.time(), "step": step, "tokens": tokens, "type": record_type, "stage": self.stage}
            record = head | content
            for sink in self._sinks:
                self._guarded(sink, sink.write, record)

    def _guarded(self, sink: Sink, action: Callable[..., None], *arguments: Record) -> None:
        try:
            action(*arguments)
        except Exception as error:
            if sink not in self._reported:
                self._reported.add(sink)
                logger.warning("%s fails and may miss records: %r", type(sink).__name__, error)
