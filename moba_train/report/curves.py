"""Curves of a run: which of its steps are drawn, and the smoothed loss.

A page shows about 2,000 points of a curve; a run has up to millions of steps. The steps that are drawn keep the lowest
and highest loss and the highest gradient norm of every interval, so that no spike disappears.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from moba_train.report.history import Column, History

MOST_POINTS = 2400
"""Points of one curve, over all runs of a page."""
FEWEST_POINTS = 300
AXES = ("tokens", "step", "hours")
"""What progress can be measured in; hours are wall-clock time since the first record."""

Rows = npt.NDArray[np.int64]
Axes = dict[str, list[Any]]


def shown_rows(history: History, runs: int) -> Rows:
    """Indices of the steps that are drawn, where `runs` share a page."""
    count = len(history.metrics)
    most = max(FEWEST_POINTS, MOST_POINTS // runs)
    if count <= most:
        return np.arange(count)
    loss = history.column("loss")
    picks = (
        (np.nan_to_num(loss, nan=np.inf, posinf=np.inf, neginf=np.inf), np.argmin),
        (np.nan_to_num(loss, nan=-np.inf, posinf=-np.inf, neginf=-np.inf), np.argmax),
        (np.nan_to_num(history.column("grad_norm"), nan=-np.inf, posinf=-np.inf, neginf=-np.inf), np.argmax),
    )
    rows = {0, count - 1}
    for part in np.array_split(np.arange(count), most // 4):
        rows |= {int(part[0]), *(int(part[pick(values[part])]) for values, pick in picks)}
    return np.array(sorted(rows))


def axes(history: History, columns: dict[str, Column]) -> Axes:
    """Tokens, steps and hours of some points, from the columns `tokens`, `step` and `time`."""
    hours = (columns["time"] - history.start) / 3600
    return {"tokens": columns["tokens"].tolist(), "step": columns["step"].tolist(), "hours": hours.tolist()}


def place_columns(history: History) -> dict[str, Column]:
    """The columns that say where each logged step is."""
    return {name: history.column(name) for name in ("tokens", "step", "time")}


def smooth(values: Column, *columns: Column) -> list[Column]:
    """Medians of up to 100 intervals of at least 5 steps, of `values` and of each of `columns`.

    Unlike a moving average they neither lag behind a falling curve nor bend at a spike.
    """
    intervals = max(1, min(100, len(values) // 5))
    parts = [np.array_split(column, intervals) for column in (values, *columns)]
    return [np.array([np.median(part) for part in split]) for split in parts]


def value_at(history: History, step: float, name: str) -> float:
    """A number of the step that is nearest to `step`; NaN where there is none."""
    steps = history.column("step")
    values = history.column(name)
    known = np.isfinite(values)
    if not known.any():
        return float("nan")
    return float(values[known][np.abs(steps[known] - step).argmin()])
