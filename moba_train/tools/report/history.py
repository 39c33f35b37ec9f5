"""A run folder as the report reads it: `metrics.jsonl`, the recipe and the files of `moba-train eval`.

The run may go on, may have crashed, or may come from elsewhere. What is missing, damaged or not readable becomes a
notice; only a folder without `metrics.jsonl` is an error.

A page shows about 2,000 points of a curve; a run has up to millions of steps. The steps that are drawn keep the lowest
and highest loss and the highest gradient norm of every interval, so that no spike disappears.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moba_train.config.load import parse_yaml
from moba_train.errors import UserError
from moba_train.foreign_files import folder_roots, open_foreign, read_foreign, read_foreign_json
from moba_train.telemetry.jsonl import left_out_lines, parse_record

Record = dict[str, Any]
Column = npt.NDArray[np.float64]

_RECIPE_BYTES = 1 << 22
_MOST_EVALUATIONS = 200
"""Newest evaluation files that are read."""
_LINE_BYTES = 1 << 24
"""Longest line of metrics.jsonl that is parsed."""
_YEAR_10000 = 253_402_300_800
"""The first time that Python cannot show, in seconds since 1970."""


@dataclass(frozen=True)
class Result:
    """Result of one evaluation at one step."""

    name: str
    step: int
    stage: str
    time: float
    data: dict[str, Any]
    source: str
    """File, or "training"."""


@dataclass
class History:
    """One run. `metrics` are its records of steps, `events` all others, both oldest first."""

    folder: Path
    name: str
    metrics: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    """Values of `config.yaml`; empty when it cannot be read."""
    results: list[Result] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    _columns: dict[str, Column] = field(default_factory=dict)

    def column(self, name: str) -> Column:
        """One number of every logged step; NaN where a step lacks it."""
        if name not in self._columns:
            self._columns[name] = np.array([number(record, name) for record in self.metrics])
        return self._columns[name]

    def has(self, name: str) -> bool:
        """True if any step has this number."""
        return bool(np.isfinite(self.column(name)).any())

    def of_type(self, *types: str) -> list[Record]:
        """The events of these types."""
        return [event for event in self.events if event["type"] in types]

    def exited(self) -> dict[str, int]:
        """The step at which each stage ended whose exit criterion was met, by name."""
        met = (event for event in self.of_type("stage_exit") if str(event.get("message")).startswith("criterion met"))
        return {event["stage"]: int(event["step"]) for event in met}

    def latest(self, name: str) -> list[Result]:
        """The last result of an evaluation in every stage, in the order of the stages."""
        last: dict[str, Result] = {}
        for result in self.results:
            if result.name == name:
                last.pop(result.stage, None)
                last[result.stage] = result
        return list(last.values())

    @property
    def stages(self) -> list[Record]:
        """The record that began each stage.

        A stage whose first steps were lost may have begun again with a changed recipe, at the same step: the last one
        counts. If that record is lost, the first `resume` record of the stage replaces it.
        """
        began: dict[str, Record] = {}
        for event in self.of_type("stage", "resume"):
            first = began.setdefault(event["stage"], event)
            if event["type"] == "stage" and event["step"] <= first["step"]:
                began[event["stage"]] = event
        return list(began.values())

    @property
    def start(self) -> float:
        """Time of the first record, seconds since the epoch."""
        return float(min((record["time"] for record in (*self.events[:1], *self.metrics[:1])), default=0.0))


def number(record: Record, name: str) -> float:
    """A number of a record, NaN where it has none."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def read_history(folder: Path) -> History:
    """Read a run folder. Raises UserError when it is none, or its metrics.jsonl cannot be opened."""
    source = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the run_dir of a run")
    if not source.is_file():
        raise UserError(f"{source}: no such file; give the run_dir of a run that has begun to train")
    history = History(folder, folder.resolve().name)
    try:
        _read_metrics(source, history)
    except OSError as error:
        raise UserError(f"{source}: {error.strerror or error}") from error
    _read_recipe(history)
    history.results += _training_results(history)
    history.results += _evaluation_files(history)
    history.results.sort(key=lambda result: (result.step, result.time))
    if isinstance(name := history.recipe.get("name"), str):
        history.name = name
    return history


def _read_metrics(source: Path, history: History) -> None:
    """Read the records; lines that are none are counted."""
    damaged: list[int] = []
    line_number = 0
    incomplete = False
    with open_foreign(source, None, folder_roots(source.parent)) as lines:
        while line := lines.readline(_LINE_BYTES):
            line_number += 1
            record = _sound(parse_record(line))
            if record is None:
                incomplete = not line.endswith(b"\n")
                damaged += [line_number] * (not incomplete and bool(line.strip()))
            elif record["type"] == "metrics":
                history.metrics.append(record)
            else:
                history.events.append(record)
    if damaged:
        history.notices.append(f"metrics.jsonl: {left_out_lines(damaged)}")
    if incomplete:
        history.notices.append("the last line of metrics.jsonl is incomplete: the run is writing it, or was killed")
    if not history.metrics:
        history.notices.append("metrics.jsonl holds no training step yet")


def _sound(record: Record | None) -> Record | None:
    """The record if the fields that every record has are of the right types."""
    if record is None or not isinstance(record["type"], str):
        return None
    record.setdefault("stage", "")
    numbers = all(math.isfinite(number(record, name)) for name in ("step", "tokens", "time"))
    sound = numbers and 0 <= record["time"] < _YEAR_10000 and isinstance(record["stage"], str)
    return record if sound else None


def _read_recipe(history: History) -> None:
    path = history.folder / "config.yaml"
    try:
        text = read_foreign(path, _RECIPE_BYTES, folder_roots(history.folder)).decode("utf-8")
        recipe = parse_yaml(text, "config.yaml")
    except FileNotFoundError:
        history.notices.append("there is no config.yaml: data mix and resolved recipe are missing")
    except (OSError, ValueError, UserError) as error:
        history.notices.append(f"config.yaml cannot be read: {error}")
    else:
        if isinstance(recipe, dict):
            history.recipe = recipe
        else:
            history.notices.append("config.yaml is not a recipe")


def _training_results(history: History) -> Iterator[Result]:
    """The evaluations that ran while the run trained: events with data under a name that begins with their type, such
    as the `needle_map` of `needle`."""
    for event in history.events:
        kind = event["type"]
        found = [value for name, value in event.items() if name.startswith(kind) and isinstance(value, dict)]
        if found and kind not in ("code", "recipe"):
            yield Result(kind, event["step"], event["stage"], event["time"], found[0], "training")


def _evaluation_files(history: History) -> Iterator[Result]:
    """The results of `moba-train eval`, from its files in the run folder."""
    roots = folder_roots(history.folder)
    paths = sorted((history.folder / "evaluations").glob("*.json"))
    if len(paths) > _MOST_EVALUATIONS:
        history.notices.append(f"{len(paths) - _MOST_EVALUATIONS} older files in evaluations are left out")
    for path in paths[-_MOST_EVALUATIONS:]:
        try:
            content = read_foreign_json(path, roots=roots)
            yield from file_results(content, path.name)
        except (OSError, UserError, TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            history.notices.append(f"evaluations/{path.name} cannot be read: {error!r}")


def file_results(content: dict[str, Any], source: str) -> Iterator[Result]:
    """The results in the content of a file of `moba-train eval`. Raises what a wrong content raises."""
    for name in content["tasks"]:
        data = content[name]
        if not isinstance(data, dict):
            raise TypeError(f"{name} holds no results")
        yield Result(
            str(name),
            int(content["step"]),
            str(content["stage"]),
            float(content["time"]),
            data,
            source,
        )


MOST_POINTS = 2400
"""Points of one curve, over all runs of a page."""
FEWEST_POINTS = 300

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
    """Tokens, steps and hours since the first record of some points, from their columns `tokens`, `step`, `time`."""
    hours = (columns["time"] - history.start) / 3600
    return {"tokens": columns["tokens"].tolist(), "step": columns["step"].tolist(), "hours": hours.tolist()}


def place_columns(history: History) -> dict[str, Column]:
    """Tokens, step and time of each logged step."""
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
