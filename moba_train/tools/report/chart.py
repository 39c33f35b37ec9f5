"""A chart of a page as data: traces and layout of plotly.js, with two additions that `assets/report.js` resolves.

- A colour is a CSS variable of the page, `var(--c1)`, so that charts follow the theme.
- A trace over the progress of a run has `axes` instead of `x`: the tokens, steps and hours of its points, or the name
  of such axes in the page's data. The reader switches between them.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moba_train.tools.report.history import Axes, Column, History, Result, Rows, axes, place_columns, shown_rows

Trace = dict[str, Any]

COLOURS = 8
_DIGITS = 7
_LONGEST_TEXT = 300
_LONGEST_LABEL = 48


@dataclass(frozen=True)
class Mark:
    """A vertical line: a stage begins."""

    axes: Axes
    label: str
    run: int


@dataclass(frozen=True)
class Chart:
    """One chart. `title` and `note`, the sentence or two below it, are plain text; texts in `traces` and `layout` went
    through `text`, because plotly reads some HTML."""

    key: str
    title: str
    note: str
    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    progress: bool = False
    """The x axis is the progress of the run, in the unit that the reader chooses."""
    wide: bool = False
    height: int = 340


@dataclass(frozen=True)
class Shown:
    """A run as a page shows it, alone or among others."""

    history: History
    index: int
    several: bool
    rows: Rows
    """The logged steps that are drawn."""

    @property
    def label(self) -> str:
        """The run's name for legends: safe inside plotly's texts, and short."""
        name = self.history.name
        return text(name if len(name) <= _LONGEST_LABEL else f"{name[: _LONGEST_LABEL - 1]}…")

    def colour(self, role: int) -> str:
        """Colour of a curve: one for each run if there are several, else one for each role, from 1."""
        return palette(self.index + 1 if self.several else role)

    def called(self, what: str) -> str:
        """Name of a curve in a legend; `what` is safe inside plotly's texts."""
        return f"{self.label}: {what}" if self.several else what

    def titled(self, what: str) -> str:
        """Title of a chart about this run alone, as plain text."""
        return f"{self.history.name}: {what}" if self.several else what

    def line(self, what: str, values: Column, role: int, **style: Any) -> Trace:
        """A curve over the drawn steps; `values` has a number for every logged step."""
        width = style.pop("width", 1.5)
        dash = style.pop("dash", "solid")
        return {
            "type": "scatter",
            "mode": "lines",
            "name": self.called(what),
            "axes": f"run-{self.index}",
            "y": values[self.rows],
            "line": {"color": self.colour(role), "width": width, "dash": dash},
            "meta": {"run": self.index},
            **style,
        }

    def points(self, what: str, records: Sequence[dict[str, Any]], values: Column, **style: Any) -> Trace:
        """Marks at the steps of some records."""
        return {
            "type": "scatter",
            "mode": "markers",
            "name": self.called(what),
            "axes": self.places(records),
            "y": values,
            "meta": {"run": self.index},
            **style,
        }

    def places(self, records: Sequence[dict[str, Any]]) -> Axes:
        """Tokens, steps and hours of these records."""
        columns = {name: np.array([float(record[name]) for record in records]) for name in ("tokens", "step", "time")}
        return axes(self.history, columns)

    def axes(self) -> Axes:
        """Tokens, steps and hours of the drawn steps."""
        return axes(self.history, {name: column[self.rows] for name, column in place_columns(self.history).items()})

    def stage_marks(self) -> list[Mark]:
        """A mark where each stage but the first begins; the first one's name stands at the left."""
        return [Mark(self.places([stage]), text(stage["stage"]), self.index) for stage in self.history.stages]


def band(x: Column, low: Column, high: Column, colour: str) -> Trace:
    """An area between two curves."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": np.concatenate([x, x[::-1]]),
        "y": np.concatenate([low, high[::-1]]),
        "fill": "toself",
        "fillcolor": colour,
        "opacity": 0.12,
        "line": {"width": 0},
        "showlegend": False,
        "hoverinfo": "skip",
    }


def heatmap(key: str, title: str, note: str, trace: Trace, layout: dict[str, Any], row: int = 34) -> Chart:
    """A map, the first row at the top, each `row` pixels high.

    trace: rows `z` with names `y`; shares from 0 to 1 unless it says otherwise. layout: what differs from that of
    categories.
    """
    bar = {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0, "len": 1}
    shares = {"type": "heatmap", "zmin": 0, "zmax": 1, "colorbar": bar}
    base = {
        "hovermode": "closest",
        "xaxis": {"type": "category", "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    merged = base | layout | {name: base[name] | layout.get(name, {}) for name in ("xaxis", "yaxis")}
    return Chart(key, title, note, [shares | trace], merged, height=max(340, 110 + row * len(trace["y"])))


def shown(histories: Sequence[History]) -> list[Shown]:
    """The runs of a page."""
    count = len(histories)
    return [Shown(history, index, count > 1, shown_rows(history, count)) for index, history in enumerate(histories)]


def last_results(runs: Sequence[Shown], name: str) -> list[tuple[Shown, Result]]:
    """The last result of an evaluation, with its run, of every run that has one."""
    return [(run, result) for run in runs for result in run.history.latest(name)[-1:]]


def palette(number: int) -> str:
    """A colour of the page, from 1."""
    return f"var(--c{(number - 1) % COLOURS + 1})"


def text(value: object) -> str:
    """A text of a run inside plotly's, which reads some HTML: escaped, and shortened."""
    plain = str(value)
    shortened = plain if len(plain) <= _LONGEST_TEXT else f"{plain[:_LONGEST_TEXT]} ..."
    return html.escape(shortened, quote=False)


def length_names(lengths: Sequence[int]) -> list[str]:
    """Lengths in tokens as recipes write them: 512, 8K."""
    return [f"{length // 1024}K" if length % 1024 == 0 else str(length) for length in lengths]


def wrapped(value: object, width: int = 70) -> str:
    """`text` in lines."""
    lines = [""]
    for word in str(value)[:_LONGEST_TEXT].split():
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def as_json(value: Any) -> Any:
    """`value` with arrays as lists, numbers of seven digits, and null for what is not finite."""
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return [as_json(inner) for inner in value.tolist()]
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.{_DIGITS}g}")
    return value
