"""What a wandb run already holds, remembered over restarts.

wandb's history can only be appended to, and the steps that a resumed run repeats are in it already. So a step is drawn
the first time it is trained, and what is trained again is counted, not drawn: every curve has each step once and never
goes back. (wandb's own rewinding works online only, and not on every server.) After a rollback steps count on, so
nothing is repeated.
"""

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SPIKE_COLUMNS = ("step", "tokens", "stage", "message")


@dataclass
class _Sent:
    rows: int = 0
    """Rows of wandb's history, its own step."""
    step: int = 0
    tokens: int = 0
    """Of the newest row."""
    last: dict[str, int] = field(default_factory=dict)
    """The newest step of each kind of record."""
    redone: int = 0
    """Steps trained again so far."""
    spikes: list[list[Any]] = field(default_factory=list)
    alerts: dict[str, float] = field(default_factory=dict)
    """When the last alert of each kind was sent, seconds since the epoch."""


class WandbHistory:
    """The state of one wandb run, in the file `path`, which is written at each `save`. One that cannot be read counts
    as none: steps may then be drawn twice."""

    spike_columns = list(_SPIKE_COLUMNS)

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sent = _read(path)
        self._before = dict(self.sent.last)
        self._reported = self.sent.redone

    def row(self, record: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """What to draw of a record with these values: they and their axes, or nothing if they are drawn already."""
        sent, kind, step = self.sent, record["kind"], record["step"]
        if step < sent.step or step <= self._before.get(kind, -1):
            sent.redone += kind == "metrics"
            return {}
        if not values:
            return {}
        if kind == "metrics" and sent.redone > self._reported:
            self._reported = sent.redone
            values = values | {"redone_steps": sent.redone}
        sent.step, sent.tokens, sent.last[kind] = step, record["tokens"], step
        return values | self._axes()

    def spike_row(self, record: dict[str, Any]) -> bool:
        """Add a spike to the table; False if it is there, seen again by a run that was resumed."""
        row = [record[column] for column in _SPIKE_COLUMNS]
        if row in self.sent.spikes:
            return False
        self.sent.spikes.append(row)
        return True

    def _axes(self) -> dict[str, int]:
        return {"step": self.sent.step, "tokens": self.sent.tokens}

    def at_newest(self, values: dict[str, Any]) -> dict[str, Any]:
        """These values beside the newest row, whatever step they come from."""
        return values | self._axes()

    def may_alert(self, kind: str, now: float, interval_s: float) -> bool:
        """Whether the last alert of this kind is long enough ago; if so, this one counts as sent."""
        # A clock that was put back must not silence alerts until it has caught up.
        if 0 <= now - self.sent.alerts.get(kind, -interval_s) < interval_s:
            return False
        self.sent.alerts[kind] = now
        return True

    def save(self) -> None:
        """Whole or not at all: a run may be killed at any moment."""
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
