"""Weights & Biases, isolated from training: wandb may be missing, raise or hang without effect on the run.

Everything that touches wandb runs in one daemon thread behind a bounded queue. A full queue drops records and counts
them; nothing is lost, because `metrics.jsonl` holds every record.

wandb's history is append-only, and the steps that a resumed run repeats are already in it. A step is therefore drawn
the first time it is trained, so that every curve has each step once and never goes back. wandb's own rewinding works
online only, and not on every server. After a rollback, step numbers continue to rise, so nothing is repeated.
"""

import contextlib
import importlib
import json
import logging
import os
import queue
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moba_train.config.telemetry import WandbConfig
from moba_train.output_files import make_folder, write_atomically
from moba_train.telemetry.telemetry import SinkRun, numbers

logger = logging.getLogger(__name__)

_COLUMNS = ("step", "tokens", "stage", "message")
TABLES = {"spike": "spikes", "recipe": "recipe_changes"}
"""The table that has a row for each record of a type."""


@dataclass
class _Sent:
    rows: int = 0
    """Rows of wandb's history, which is its own step counter."""
    step: int = 0
    """Training step of the latest row."""
    tokens: int = 0
    """Consumed tokens of the latest row."""
    last: dict[str, int] = field(default_factory=dict)
    """Latest step of each record type."""
    tables: dict[str, list[list[Any]]] = field(default_factory=dict)
    """Rows of each table (`TABLES`)."""
    alerts: dict[str, float] = field(default_factory=dict)
    """Time of the last alert of each type, seconds since the epoch."""


class WandbHistory:
    """The state of one wandb run, stored in the file `path` at each `save`.

    A file that cannot be read is treated as missing: steps may then be drawn twice.
    """

    columns = list(_COLUMNS)

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sent = _read(path)
        self._before = dict(self.sent.last)

    def row(self, record: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The row to draw for a record with these values: the values and their axes, or {} if already drawn."""
        sent = self.sent
        record_type = record["type"]
        step = record["step"]
        if not values or step < sent.step or step <= self._before.get(record_type, -1):
            return {}
        sent.step = step
        sent.tokens = record["tokens"]
        sent.last[record_type] = step
        return values | self._axes()

    def add_to_table(self, record: dict[str, Any]) -> dict[str, list[list[Any]]]:
        """All rows of the table that this record adds a row to, by the table's name; {} when there is no such table, or
        the row is already there because a resumed run reported it again."""
        name = TABLES.get(record["type"])
        if name is None:
            return {}
        rows = self.sent.tables.setdefault(name, [])
        row = [record[column] for column in _COLUMNS]
        if row in rows:
            return {}
        rows.append(row)
        return {name: rows}

    def _axes(self) -> dict[str, int]:
        return {"step": self.sent.step, "tokens": self.sent.tokens}

    def at_latest(self, values: dict[str, Any]) -> dict[str, Any]:
        """These values on the axes of the latest row, whatever step they come from."""
        return values | self._axes()

    def may_alert(self, alert_type: str, now: float, interval_s: float) -> bool:
        """True if the last alert of this type is at least `interval_s` seconds old; if so, this one counts as sent."""
        # A clock that was set back must not silence alerts until it has caught up.
        if 0 <= now - self.sent.alerts.get(alert_type, -interval_s) < interval_s:
            return False
        self.sent.alerts[alert_type] = now
        return True

    def save(self) -> None:
        """Write the file atomically: a run may be killed at any moment."""
        write_atomically(self._path, json.dumps(asdict(self.sent)))


def _read(path: Path) -> _Sent:
    if not path.exists():
        return _Sent()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "redone" in found:  # of the version before, with a key for each table
            found.pop("redone")
            found["tables"] = {name: found.pop(name) for name in TABLES.values() if name in found}
        return _Sent(**found)
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be read (%s); steps that are trained again may be drawn twice", path, error)
        return _Sent()


QUEUE_SIZE = 1000
CLOSE_SECONDS = 30.0
ALERT_INTERVAL_SECONDS = 600.0
_TITLE_LENGTH = 63
"""wandb requires alert titles to be shorter than 64 characters."""


class WandbSink:
    """Sends records to the wandb run `run_id`, which is created or, after a resume, continued.

    Metrics are drawn over `step` or `tokens`, each step once, also when a run is resumed (`WandbHistory`). A spike also
    adds a row to the table `spikes`, a changed recipe one to `recipe_changes`. Alerts of each type are sent at most
    once per `ALERT_INTERVAL_SECONDS`. `dropped` counts the records that wandb refused, that did not fit into the queue,
    or that were still in it when `close` gave up. `wait_s` limits how long `close` waits for wandb, in seconds.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        name: str,
        run_id: str,
        recipe: dict[str, Any],
        wait_s: float = CLOSE_SECONDS,
    ) -> None:
        self.dropped = 0
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE_SIZE)
        self._wait_s = wait_s
        self._thread = threading.Thread(
            target=self._work, args=(config, run_dir, name, run_id, recipe), name="wandb", daemon=True
        )
        self._thread.start()

    @classmethod
    def problem(cls, setting: WandbConfig) -> str:
        """Reason why wandb cannot be used here, with the remedy; empty: it can."""
        if find_spec("wandb") is not None:
            return ""
        given = f"given mode {setting.mode!r}, but the package wandb is not installed"
        return f"{given}; pip install wandb, or set telemetry.wandb.mode=disabled"

    @classmethod
    def describe(cls, setting: WandbConfig) -> str:
        """Name and mode, for the run's first lines."""
        return f"wandb {setting.mode}"

    @classmethod
    def open(cls, setting: WandbConfig, run: SinkRun) -> "WandbSink":
        """The sink of `telemetry.wandb`."""
        return cls(setting, run.folder, run.name, run.id, dict(run.recipe))

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Send the queued records and finish the run, or give up after the time limit."""
        deadline = time.monotonic() + self._wait_s
        try:
            self._queue.put(None, timeout=self._wait_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning("wandb did not finish within %g s and is left behind", self._wait_s)
            with self._queue.mutex:
                self.dropped += sum(record is not None for record in self._queue.queue)
            _exit_without_waiting()
        if self.dropped:
            logger.warning("wandb missed %d records; metrics.jsonl has them", self.dropped)

    def _work(self, config: WandbConfig, run_dir: Path, name: str, run_id: str, recipe: dict[str, Any]) -> None:
        """Body of the thread: start the run, send records until None arrives, finish the run."""
        own = run_dir / "wandb"
        os.environ.setdefault("WANDB_CACHE_DIR", str(own / "cache"))  # not into a home that may be full
        try:
            wandb = importlib.import_module("wandb")
            run = _start(wandb, config, run_dir, name, run_id, recipe)
            make_folder(own)
            history = WandbHistory(own / f"history-{run_id}.json")
        except Exception as error:
            logger.warning(
                "wandb is not available and the run goes on without it: %s. "
                "metrics.jsonl has all metrics; `telemetry.wandb.mode: disabled` silences this.",
                error,
            )
            while self._queue.get() is not None:
                self.dropped += 1
            return
        while (record := self._queue.get()) is not None:
            try:
                _send(wandb, run, history, record)
            except Exception as error:
                if self.dropped == 0:
                    logger.warning("wandb refuses records: %r", error)
                self.dropped += 1
        try:
            run.finish()
        except Exception as error:
            logger.warning("wandb could not finish its run: %r", error)


def _send(wandb: Any, run: Any, history: WandbHistory, record: dict[str, Any]) -> None:
    if record["type"] == "alert":
        if history.may_alert(record["alert"], time.time(), ALERT_INTERVAL_SECONDS):
            run.alert(title=record["title"][:_TITLE_LENGTH], text=record["text"])
            history.save()
        return
    row = history.row(record, numbers(record))
    for name, rows in history.add_to_table(record).items():
        row = history.at_latest(row | {name: wandb.Table(columns=history.columns, data=rows)})
    if row:
        # wandb's own step counts rows, so that it also rises across restarts; without `commit`, a killed run would lose
        # its last row.
        history.sent.rows = max(history.sent.rows, run.step)
        run.log(row, step=history.sent.rows, commit=True)
        history.sent.rows += 1
    history.save()


def _start(wandb: Any, config: WandbConfig, run_dir: Path, name: str, run_id: str, recipe: dict[str, Any]) -> Any:
    if config.mode == "online" and wandb.api.api_key is None:
        # wandb.init would prompt for the key in the terminal.
        raise RuntimeError("no API key: run `wandb login`, set WANDB_API_KEY, or set telemetry.wandb.mode to offline")
    run = wandb.init(
        mode=config.mode,
        project=config.project,
        entity=config.entity,
        tags=config.tags,
        name=name,
        id=run_id,
        resume="allow",
        dir=str(run_dir),
        config=recipe,
        allow_val_change=True,  # a resumed run may have another recipe
        # If wandb wrapped the console, printing would hang together with wandb.
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="step")
    return run


def _exit_without_waiting() -> None:
    """Remove the exit hook with which a hanging wandb would keep the finished process from exiting."""
    setup = sys.modules.get("wandb.sdk.wandb_setup")
    with contextlib.suppress(Exception):  # not a public part of wandb
        setup._singleton._connection._cleanup()  # type: ignore[union-attr]  # errors are suppressed
