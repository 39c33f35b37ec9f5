"""Charts of the loss by position in the context."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moba_train.report.chart import Chart, Shown, Trace, palette, text
from moba_train.report.curves import Column
from moba_train.report.history import Result


def position_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Loss by position at the last evaluation of every stage, with its own attention and with full attention."""
    traces: list[Trace] = []
    for run, result, colour in _evaluations(runs):
        for kind, curve in result.data["curves"].items():
            own = kind == result.data["attention"]
            traces += _curve(run, result, _label(run, result, kind), curve, colour, "solid" if own else "dash")
    if not traces:
        return []
    note = "Last evaluation of each stage. Dashed: full attention on the same weights. Bands: one standard error."
    return [Chart("position-wise", "Loss by position", note, traces, _layout("loss"), height=380)]


def gap_chart(runs: Sequence[Shown]) -> list[Chart]:
    """What full attention on the same weights would gain, by position."""
    traces: list[Trace] = []
    for run, result, colour in _evaluations(runs):
        own = result.data["attention"]
        curves = result.data["curves"]
        if own != "full" and "full" in curves:
            gap = _column(curves[own]["mean"]) - _column(curves["full"]["mean"])
            label = _label(run, result, f"{own} - full")
            traces.append(_line(run, result, label, gap, colour, "solid") | {"yhoverformat": "+.4f"})
    if not traces:
        return []
    note = "Loss with the stage's attention minus loss with full attention, same weights. Above 0: full is better."
    layout = _layout("difference") | {"shapes": [_zero()]}
    return [Chart("position-gap", "Gap to full attention by position", note, traces, layout, height=380)]


def _evaluations(runs: Sequence[Shown]) -> Iterator[tuple[Shown, Result, str]]:
    """(run, evaluation, colour): a colour for each stage, or for each run, of which the last stage counts."""
    for run in runs:
        latest = run.history.latest("position_wise")
        for role, result in enumerate(latest[-1:] if run.several else latest, 1):
            yield run, result, palette(run.index + 1 if run.several else role)


def _label(run: Shown, result: Result, kind: str) -> str:
    return run.called(f"{text(result.stage)}, {text(kind)} (step {result.step})")


def _line(run: Shown, result: Result, label: str, values: Column, colour: str, dash: str) -> Trace:
    middle = (np.arange(len(values)) + 0.5) * float(result.data["bucket"])
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label,
        "x": middle,
        "y": values,
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"size": 5, "color": colour},
        "meta": {"run": run.index},
        "yhoverformat": ".4f",
    }


def _curve(run: Shown, result: Result, label: str, curve: dict[str, Any], colour: str, dash: str) -> list[Trace]:
    """The curve, over its band of one standard error."""
    mean = _column(curve["mean"])
    error = np.nan_to_num(_column(curve["standard_error"]))
    line = _line(run, result, label, mean, colour, dash)
    band = {
        "type": "scatter",
        "mode": "lines",
        "name": f"{label}, standard error",
        "x": np.concatenate([line["x"], line["x"][::-1]]),
        "y": np.concatenate([mean + error, (mean - error)[::-1]]),
        "fill": "toself",
        "fillcolor": colour,
        "opacity": 0.12,
        "line": {"width": 0},
        "showlegend": False,
        "hoverinfo": "skip",
        "meta": {"run": run.index},
    }
    return [band, line]


def _column(values: Sequence[float | None]) -> Column:
    return np.array(values, dtype=np.float64)


def _layout(y: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": "position in the context (tokens)", "rangemode": "tozero", "exponentformat": "SI"},
        "yaxis": {"title": y},
    }


def _zero() -> dict[str, Any]:
    line = {"color": "var(--muted)", "width": 1}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": line}
