"""Weights & Biases, at arm's length: it may be missing, raise or hang, and training does not notice.

Everything that touches wandb runs in one daemon thread behind a bounded queue. A full queue drops records and counts
them; nothing is lost for good, since `metrics.jsonl` holds every record.
"""

import importlib
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from moba_train.config.run import WandbConfig
from moba_train.telemetry.numbers import numbers

QUEUE_SIZE = 1000
CLOSE_SECONDS = 30.0
ALERT_INTERVAL_SECONDS = 600.0
_SPIKE_COLUMNS = ["step", "tokens", "stage", "message"]

logger = logging.getLogger(__name__)


class WandbSink:
    """Sends records to the wandb run `run_id`, which is created or, after a resume, continued.

    Metrics are drawn over `step` or `tokens`. A spike also adds a row to the table `spikes`, and alerts are sent at
    most once in `ALERT_INTERVAL_SECONDS` for each kind. `dropped` counts the records that wandb did not take or that
    did not fit into the queue. `wait_s` limits how long `close` waits for wandb.
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
        self._spikes: list[list[Any]] = []
        self._alerted: dict[str, float] = {}
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
        """Sends what is queued and finishes the run, or gives up after the time limit."""
        deadline = time.monotonic() + self._wait_s
        try:
            self._queue.put(None, timeout=self._wait_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning("wandb did not finish within %g s and is left behind", self._wait_s)
        if self.dropped:
            logger.warning("wandb missed %d records; metrics.jsonl has them", self.dropped)

    def _work(self, config: WandbConfig, run_dir: Path, name: str, run_id: str, recipe: dict[str, Any]) -> None:
        """The thread: starts the run, sends records until None comes, finishes."""
        os.environ.setdefault("WANDB_CACHE_DIR", str(run_dir / "wandb" / "cache"))  # not into a home that may be full
        try:
            wandb = importlib.import_module("wandb")
            run = _start(wandb, config, run_dir, name, run_id, recipe)
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
                self._send(wandb, run, record)
            except Exception as error:
                if self.dropped == 0:
                    logger.warning("wandb refuses records: %r", error)
                self.dropped += 1
        try:
            run.finish()
        except Exception as error:
            logger.warning("wandb could not finish its run: %r", error)

    def _send(self, wandb: Any, run: Any, record: dict[str, Any]) -> None:
        axes = {"step": record["step"], "tokens": record["tokens"]}
        if record["kind"] == "alert":
            now, kind = time.monotonic(), record["alert"]
            if now - self._alerted.get(kind, -ALERT_INTERVAL_SECONDS) >= ALERT_INTERVAL_SECONDS:
                self._alerted[kind] = now
                run.alert(title=record["title"], text=record["text"])
            return
        values: dict[str, Any] = dict(numbers(record))
        if record["kind"] == "spike":
            self._spikes.append([record[column] for column in _SPIKE_COLUMNS])
            values["spikes"] = wandb.Table(columns=_SPIKE_COLUMNS, data=self._spikes)
        if values:
            run.log(values | axes)


def _start(wandb: Any, config: WandbConfig, run_dir: Path, name: str, run_id: str, recipe: dict[str, Any]) -> Any:
    if config.mode == "online" and wandb.api.api_key is None:
        # wandb.init would ask for it on the terminal.
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
        settings=wandb.Settings(silent=True),
    )
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="step")
    return run
