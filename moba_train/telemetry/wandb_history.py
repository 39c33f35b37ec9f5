"""The contents of a wandb run so far, remembered across restarts.

wandb's history is append-only, and the steps that a resumed run repeats are already in it. A step is therefore drawn
the first time it is trained; steps that are trained again are counted, not drawn, so that every curve has each step
once and never goes back. (wandb's own rewinding works online only, and not on every server.) After a rollback, step
numbers continue to rise, so nothing is repeated.
"""

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    redone: int = 0
    """Steps trained again so far."""
    spikes: list[list[Any]] = field(default_factory=list)
    """Rows of the table of spikes."""
    recipe_changes: list[list[Any]] = field(default_factory=list)
    """Rows of the table of changes of the recipe."""
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
        self._reported = self.sent.redone
        self._counted: int | None = None
        """Step up to which the steps of this start are counted as new or redone; None before its first record."""

    def row(self, record: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The row to draw for a record with these values: the values and their axes, or {} if already drawn."""
        sent = self.sent
        record_type = record["type"]
        step = record["step"]
        is_metrics = record_type == "metrics"
        if self._counted is None:
            self._counted = step - is_metrics
        trained = step - self._counted if is_metrics else 0
        self._counted += trained
        if step < sent.step or step <= self._before.get(record_type, -1):
            sent.redone += trained
            return {}
        if not values:
            return {}
        if is_metrics and sent.redone > self._reported:
            self._reported = sent.redone
            values = values | {"redone_steps": sent.redone}
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
        rows: list[list[Any]] = getattr(self.sent, name)
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
        """Whether the last alert of this type is at least `interval_s` seconds old; if so, this one counts as sent."""
        # A clock that was set back must not silence alerts until it has caught up.
        if 0 <= now - self.sent.alerts.get(alert_type, -interval_s) < interval_s:
            return False
        self.sent.alerts[alert_type] = now
        return True

    def save(self) -> None:
        """Write the file atomically: a run may be killed at any moment."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self.sent)), encoding="utf-8")
        temporary.replace(self._path)


def _read(path: Path) -> _Sent:
    if not path.exists():
        return _Sent()
    try:
        return _Sent(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be read (%s); steps that are trained again may be drawn twice", path, error)
        return _Sent()
