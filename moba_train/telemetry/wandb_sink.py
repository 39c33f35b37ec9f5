"""Weights & Biases, isolated from training: it may be missing, raise or hang without effect on the run.

Everything that touches wandb runs in one daemon thread behind a bounded queue. A full queue drops records and counts
them; nothing is lost, because `metrics.jsonl` holds every record.
"""

import contextlib
import importlib
import logging
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from moba_train.config.run import WandbConfig
from moba_train.telemetry.numbers import numbers
from moba_train.telemetry.wandb_history import WandbHistory

QUEUE_SIZE = 1000
CLOSE_SECONDS = 30.0
ALERT_INTERVAL_SECONDS = 600.0
_TITLE_LENGTH = 63
"""wandb requires alert titles to be shorter than 64 characters."""

logger = logging.getLogger(__name__)


class WandbSink:
    """Sends records to the wandb run `run_id`, which is created or, after a resume, continued.

    Metrics are drawn over `step` or `tokens`, each step once, also when a run is resumed (wandb_history.py);
    `redone_steps` counts the steps trained again. A spike also adds a row to the table `spikes`, a changed recipe one
    to `recipe_changes`. Alerts of each type are sent at most once per `ALERT_INTERVAL_SECONDS`. `dropped` counts the
    records that wandb refused, that did not fit into the queue, or that were still in it when `close` gave up. `wait_s`
    limits how long `close` waits for wandb, in seconds.
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
            own.mkdir(exist_ok=True)
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
        setup._singleton._connection._cleanup()  # type: ignore[union-attr]
