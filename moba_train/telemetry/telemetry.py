"""`Telemetry`: what the trainer reports, given to every sink as one and the same record."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

Record = dict[str, Any]
"""`time` (seconds since the epoch), `step`, `tokens` (consumed so far), `kind` ("metrics", "alert" or an event's kind),
`stage`, and then the metrics, or `message` and the event's fields, or an alert's `title`, `text` and `alert`."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where records go. An exception costs that record in that sink, nothing else."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Telemetry:
    """Hands records to sinks. Rank 0 has real ones (`make_telemetry`), the others `Telemetry([])`.

    `stage` is the name that every record carries; the trainer sets it when a stage begins or is resumed. A sink that
    raises is reported once and goes on being tried: no sink can stop a run.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self.stage = ""
        self._sinks = sinks
        self._step = 0
        self._tokens = 0
        self._reported: set[Sink] = set()
        self._lock = threading.Lock()  # a stall is reported by another thread

    def log(self, step: int, tokens: int, metrics: dict[str, float]) -> None:
        """The metrics of a step; `tokens` is the number consumed so far."""
        self._write(step, tokens, "metrics", metrics)

    def event(self, step: int, tokens: int, kind: str, message: str, **fields: Any) -> None:
        """Something that happened: "stage", "checkpoint", "resume", "rollback", "spike", "stall", ... Numbers among
        the JSON-able `fields` are drawn as metrics."""
        self._write(step, tokens, kind, {"message": message, **fields})

    def stalled(self, text: str) -> None:
        """A rank stalls, at the step last reported; unlike the rest, called from another thread than the trainer's."""
        self.event(self._step, self._tokens, "stall", text)
        self.alert("a rank stalls", text, "stall")

    def alert(self, title: str, text: str, kind: str) -> None:
        """Something that a person should look at; sent out at most once in a while for each `kind`."""
        self._write(self._step, self._tokens, "alert", {"title": title, "text": text, "alert": kind})

    def close(self) -> None:
        """Flushes and closes the sinks; takes a limited time even if one hangs."""
        for sink in self._sinks:
            self._guarded(sink, sink.close)

    def _write(self, step: int, tokens: int, kind: str, content: dict[str, Any]) -> None:
        with self._lock:
            self._step, self._tokens = step, tokens
            head = {"time": time.time(), "step": step, "tokens": tokens, "kind": kind, "stage": self.stage}
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
