"""Words and tables of a page: tiles, events, the resolved recipe, the environment."""

import datetime
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moba_train.config.base import format_count, format_duration
from moba_train.tools.report.history import History, number

_MOST_EVENTS = 500
_RECENT_STEPS = 100
_QUIET = ("checkpoint", "code", "alert")
"""Types of events that are left out of the table: routine, or a copy of another event."""


class Fact(NamedTuple):
    """A tile: a label, its value, and a remark below it."""

    label: str
    value: str
    detail: str = ""


class Event(NamedTuple):
    """A row of the table of events."""

    run: str
    when: str
    step: int
    type: str
    message: str


class Setting(NamedTuple):
    """A key with the value of every run."""

    key: str
    values: list[str]
    differs: bool


def facts(history: History, now: float) -> list[Fact]:
    """The tiles of a run."""
    found = [_progress(history, now), _loss(history)]
    found += filter(None, (_validation(history), _trailing(history), _speed(history), _utilisation(history)))
    return [*found, _time(history), _disturbances(history)]


def _progress(history: History, now: float) -> Fact:
    records = [*history.metrics[-1:], *history.events[-1:]]
    if not records:
        return Fact("progress", "no records")
    last = max(records, key=lambda record: (record["step"], record["time"]))
    planned = [number(event, "last_step") for event in history.of_type("stage", "resume") if "last_step" in event]
    of = f" / {planned[-1]:,.0f}" if planned and math.isfinite(planned[-1]) else ""
    tokens = f"{format_count(last['tokens'])} tokens"
    if (of and last["step"] >= planned[-1]) or last["step"] == history.exited().get(_name_of_last_stage(history)):
        return Fact("steps, finished", f"{last['step']:,}{of}", tokens)
    newest = max(record["time"] for record in records)
    return Fact(
        "steps so far", f"{last['step']:,}{of}", f"{tokens}; last record {format_duration(max(now - newest, 0))} ago"
    )


def _name_of_last_stage(history: History) -> str:
    stages = history.recipe.get("stages")
    last = stages[-1] if isinstance(stages, list) and stages else None
    return str(last.get("name")) if isinstance(last, dict) else ""


def _loss(history: History) -> Fact:
    losses = history.column("loss")
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return Fact("training loss", "none yet")
    recent = losses[-min(_RECENT_STEPS, max(1, len(losses) // 10)) :]
    return Fact("training loss", f"{np.median(recent):.4f}", f"median of the last {_count(len(recent), 'logged step')}")


def _validation(history: History) -> Fact | None:
    losses = [(number(event, "eval_loss"), event["step"]) for event in history.events]
    losses = [pair for pair in losses if math.isfinite(pair[0])]
    if not losses:
        return None
    best, step = min(losses)
    detail = "the best so far" if losses[-1][0] <= best else f"best {best:.4f} at step {step:,}"
    return Fact("validation loss", f"{losses[-1][0]:.4f}", detail)


def _trailing(history: History) -> Fact | None:
    found = [event for event in history.events if math.isfinite(number(event, "trailing_loss"))]
    if not found:
        return None
    gap = number(found[-1], "trailing_gap")
    against = f"{gap:+.4f} against full attention" if math.isfinite(gap) else "end of the context"
    return Fact("trailing loss", f"{number(found[-1], 'trailing_loss'):.4f}", against)


def _speed(history: History) -> Fact | None:
    rates = _last_stage(history, "tokens_per_s")
    if rates is None:
        return None
    pairs = zip(history.column("tokens_per_s"), history.column("tokens_per_s_per_device"), strict=True)
    devices = [round(rate / per_device) for rate, per_device in pairs if math.isfinite(rate) and per_device > 0]
    now = _count(devices[-1] if devices else 1, "device")
    return Fact("tokens/s", format_count(rates), f"{now}, median of the last stage")


def _utilisation(history: History) -> Fact | None:
    mfu = _last_stage(history, "mfu")
    dense = _last_stage(history, "mfu_dense")
    return Fact("MFU", f"{mfu:.1%}", f"{dense:.1%} by the dense formula" if dense else "") if mfu else None


def _last_stage(history: History, name: str) -> float | None:
    """Median of a number over the last stage."""
    stage = history.metrics[-1]["stage"] if history.metrics else ""
    values = np.array([number(record, name) for record in history.metrics if record["stage"] == stage])
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _time(history: History) -> Fact:
    records = [*history.metrics, *history.events]
    began = history.start
    ended = max((record["time"] for record in records), default=began)
    begin = datetime.datetime.fromtimestamp(began, datetime.UTC)
    return Fact("time", format_duration(ended - began), f"began {begin:%Y-%m-%d %H:%M} UTC")


def _disturbances(history: History) -> Fact:
    restarts = len(history.of_type("resume"))
    spikes = len(history.of_type("spike"))
    rollbacks = len(history.of_type("rollback"))
    return Fact("restarts", str(restarts), f"{_count(spikes, 'spike')}, {_count(rollbacks, 'rollback')}")


def events(histories: Sequence[History]) -> list[Event]:
    """Events of all runs, newest first."""
    rows = []
    for history in histories:
        for event in history.events:
            if event["type"] not in _QUIET:
                when = datetime.datetime.fromtimestamp(event["time"], datetime.UTC)
                shown = history.name, f"{when:%m-%d %H:%M:%S}", event["step"], event["type"]
                rows.append((event["time"], Event(*shown, str(event.get("message", "")))))
    rows.sort(key=lambda row: row[0], reverse=True)
    return [event for _, event in rows[:_MOST_EVENTS]]


def settings(recipes: Sequence[dict[str, Any]]) -> list[Setting]:
    """Every key of the recipes, in their order, with each run's value."""
    flat = [dict(_flat(recipe)) for recipe in recipes]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = ((key, [values.get(key, "") for values in flat]) for key in keys)
    return [Setting(key, values, len(set(values)) > 1) for key, values in rows]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{index}]")
    else:
        yield key, json.dumps(value, default=str) if not isinstance(value, str) else value


def environment(histories: Sequence[History]) -> list[Setting]:
    """Code and machine that each run recorded at its last start."""
    recorded = []
    for history in histories:
        code = history.of_type("code")
        machine = code[-1].get("machine") if code else None
        values = {"code": str(code[-1].get("message", ""))} if code else {}
        recorded.append(values | (machine if isinstance(machine, dict) else {}))
    return settings([values | {"run folder": str(h.folder)} for values, h in zip(recorded, histories, strict=True)])


def _count(number_of: int, what: str) -> str:
    return f"{number_of:,} {what}{'s' * (number_of != 1)}"
