"""The code a run was trained with.

The machine that a run trains on, for the event `code` of its history.

Progress in the terminal: one compact line per logged step, and a marked line per event.

TensorBoard events, if the recipe asks for them (`telemetry.tensorboard: true`).

From the recipe's `telemetry` section to the sinks it asks for.
"""

import datetime
import functools
import platform
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from moba_train import __version__
from moba_train.config.run import TelemetryConfig
from moba_train.errors import UserError
from moba_train.registry import TELEMETRY_SINKS
from moba_train.telemetry.jsonl import JsonlSink
from moba_train.telemetry.telemetry import Sink, SinkRun, Telemetry, numbers

_PACKAGE = Path(__file__).parents[1]
_GIT_SECONDS = 10.0


@functools.cache
def code_version() -> dict[str, Any]:
    """`version` of the package and, if its files are tracked in a git repository, `commit` and `dirty`: whether tracked
    files differ from that commit."""
    found: dict[str, Any] = {"version": __version__}
    # A copy that is installed inside another project's repository is not tracked there.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None or (commit := _git("rev-parse", "HEAD")) is None:
        return found
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return found | {"commit": commit, "dirty": changes != ""}


def describe(code: dict[str, Any]) -> str:
    """`code_version()` in words."""
    if "commit" not in code:
        return f"moba_train {code['version']}"
    return f"moba_train {code['version']}, commit {code['commit'][:12]}{' with changes' * code['dirty']}"


def _git(*arguments: str) -> str | None:
    """Output of git in the package's folder; None if git fails or is missing."""
    command = ["git", "-C", str(_PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_machine(device: torch.device, ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """Devices, ranks, host and versions, as JSON values."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
    }


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
        if left := self._time_left(step, record["time"]):
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
        if self._last is not None and step > self._last[0] and now > self._last[1]:
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


class TensorBoardSink:
    """Writes every number as a scalar over steps, and every event's message as text, to `folder`.

    Raises UserError if the package tensorboard is missing.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"telemetry.tensorboard is true, but the tensorboard package cannot be imported ({error}); "
                "`pip install tensorboard`, or set telemetry.tensorboard to false"
            ) from error
        # `purge_step` hides earlier events of the steps that a resumed run repeats.
        self._writer = SummaryWriter(str(folder), purge_step=0 if resumed_step is None else resumed_step + 1)

    @classmethod
    def open(cls, setting: object, run: SinkRun) -> "TensorBoardSink":
        """The sink of `telemetry.tensorboard: true`."""
        return cls(run.folder / "tensorboard", run.resumed_step)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        if "message" in record:
            self._writer.add_text(record["type"], record["message"], record["step"])

    def close(self) -> None:
        self._writer.close()


def make_telemetry(config: TelemetryConfig, run: SinkRun, repeated: Collection[str] = ()) -> Telemetry:
    """A `Telemetry` with the sinks that the recipe asks for. To be called on rank 0.

    `repeated`: types of records that are made again for `run.resumed_step` itself. Raises UserError if the package of a
    requested sink is missing.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonlSink(run.folder / "metrics.jsonl", run.resumed_step, repeated)]
    for name, sink in TELEMETRY_SINKS.items():
        setting = getattr(config, name, None)
        if setting and getattr(setting, "mode", "") != "disabled":
            sinks.append(sink.open(setting, run))
    return Telemetry(sinks)
