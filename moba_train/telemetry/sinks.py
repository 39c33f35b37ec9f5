"""The sink for the terminal, and the `Telemetry` of a run from its recipe."""

import datetime
from collections.abc import Collection
from time import monotonic
from typing import Any

from rich.console import Console
from rich.text import Text

from moba_train.config.telemetry import TelemetryConfig
from moba_train.registry import TELEMETRY_SINKS
from moba_train.telemetry.jsonl import JsonlSink
from moba_train.telemetry.telemetry import Sink, SinkRun, Telemetry

_EVENT_STYLES = {
    "stage": "bold cyan",
    "resume": "bold cyan",
    "init_from": "bold cyan",
    "recipe": "bold yellow",
    "boundary": "bold cyan",
    "stage_exit": "bold cyan",
    "validation_loss": "bold green",
    "position_wise": "bold green",
    "checkpoint": "blue",
    "stop": "blue",
    "stop_time": "blue",
    "spike": "bold red",
    "fault": "bold red",
    "warning": "bold yellow",
    "alert": "bold red",
}


class ConsoleSink:
    """Coloured lines in a terminal, plain ones elsewhere (under torchrun, in a log file).

    `total_steps` is the expected last step of the run; a record with `last_step`, where a stage begins or the run
    resumes, may correct it, because a stage may end early. The time left assumes the recent pace, which includes
    evaluation and saving.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._last: tuple[int, float] | None = None
        self._seconds_per_step: float | None = None
        self._last_message: str | None = None
        """Message of the record before, if that was an event: an alert that repeats it is not printed."""

    @classmethod
    def open(cls, setting: object, run: SinkRun) -> "ConsoleSink":
        """The sink of `telemetry.console: true`."""
        return cls(run.total_steps)

    def write(self, record: dict[str, Any]) -> None:
        self._total_steps = record.get("last_step", self._total_steps)
        if record["type"] == "metrics":
            self._console.print(self._metrics(record))
        elif record["type"] != "alert" or not record["text"].startswith(self._last_message or "\0"):
            self._console.print(self._event(record))
        self._last_message = record.get("message")

    def close(self) -> None:
        """Does nothing: every line is written immediately."""

    def _metrics(self, record: dict[str, Any]) -> Text:
        step = record["step"]
        cells = [f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}", record["stage"]]
        cells += [
            f"{label} {record[key]:{form}}"
            for key, label, form in (("loss", "loss", ".4f"), ("grad_norm", "grad", ".3f"), ("lr", "lr", ".2e"))
            if key in record
        ]
        if "tokens_per_s" in record:
            cells.append(f"{_short(record['tokens_per_s'])} tok/s")
        if left := self._time_left(step, monotonic()):
            cells.append(f"left {left}")
        line = Text("  ".join(cells))
        line.stylize("dim", 0, len(cells[0]))
        return line

    def _event(self, record: dict[str, Any]) -> Text:
        event = record["type"]
        message = f"{record['title']}: {record['text']}" if event == "alert" else record["message"]
        style = _EVENT_STYLES.get(event, "bold")
        mark = "==" if event == "stage" else "--"
        return Text(f"{mark} {event} at step {record['step']}: {message}", style=style)

    def _time_left(self, step: int, now: float) -> str | None:
        if self._last is not None and step > self._last[0]:
            pace = (now - self._last[1]) / (step - self._last[0])
            old = self._seconds_per_step
            self._seconds_per_step = pace if old is None else 0.9 * old + 0.1 * pace
        self._last = step, now
        if self._seconds_per_step is None:
            return None
        return str(datetime.timedelta(seconds=round(self._seconds_per_step * (self._total_steps - step))))


def _short(value: float) -> str:
    """Three-digit form with a suffix: 12345.6 becomes "12.3K"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def make_telemetry(config: TelemetryConfig, run: SinkRun, repeated: Collection[str] = ()) -> Telemetry:
    """A `Telemetry` with the sinks that the recipe asks for on this rank.

    `repeated`: types of records that are made again for `run.resumed_step` itself.
    """
    if run.rank:
        on_every_rank = [entry for entry in config.asked_for() if getattr(entry[1], "on_every_rank", False)]
        return Telemetry([sink.open(setting, run) for _, sink, setting in on_every_rank])
    run.folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonlSink(run.folder / "metrics.jsonl", run.resumed_step, repeated)]
    sinks += [sink.open(setting, run) for _, sink, setting in config.asked_for()]
    return Telemetry(sinks)


def describe_sinks(config: TelemetryConfig) -> str:
    """The places of a run's records, and the sinks that are off, on one line."""
    asked = config.asked_for()
    on = [sink.describe(setting) if hasattr(sink, "describe") else name for name, sink, setting in asked]
    off = sorted({*TELEMETRY_SINKS} - {name for name, _, _ in asked})
    return ", ".join(["metrics.jsonl", *on]) + (f"; off: {', '.join(off)}" if off else "")
