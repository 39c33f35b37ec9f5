"""Charts of answers: needle maps, the blocks that were selected for them, RULER's tasks, lm-eval's tasks."""

from collections.abc import Sequence
from typing import Any

from moba_train.report.chart import Chart, Shown, text
from moba_train.report.history import Result

_SCALE = [[0, "#F0496E"], [0.5, "#EBB839"], [1, "#0CD79F"]]
_NO_SHARES = {"bits_per_byte", "brier_score", "byte_perplexity", "perplexity", "ter", "word_perplexity"}
"""Metrics of lm-eval of which less is better; they may be below 1, too."""
_CELL = 34
"""Height of a row, in pixels."""


def needle_maps(runs: Sequence[Shown]) -> list[Chart]:
    """The last needle evaluation of every run: a map for each attention, length by depth."""
    charts = []
    for run in runs:
        for result in run.history.latest("needle")[-1:]:
            for name, found in result.data["maps"].items():
                charts.append(_needle_map(run, result, name, found["passed"], ""))
                if "generated" in found:
                    charts.append(_needle_map(run, result, name, found["generated"], ", generated"))
    return charts


def _needle_map(run: Shown, result: Result, attention: str, by_length: list[list[float]], how: str) -> Chart:
    data = result.data
    depths = [f"{depth:g} %" for depth in data["depths"]]
    title = run.titled(f"Needle, {attention} attention{how}")
    several = f"{data['needles']} of {data['keys']} needles, " if data["keys"] > 1 else ""
    note = (
        f"Share of samples with every token right, after step {result.step:,}: {several}{data['samples']} samples per "
        f"cell, seed {data['seed']}, {data['haystack']} haystack."
    )
    layout = _trained_mark(data["lengths"], data["trained_length"]) | {"yaxis": {"title": "depth"}}
    key = f"needle-{run.index}-{len(how)}-{_safe(attention)}"
    return _heatmap(key, title, note, _rows(by_length), _lengths(data["lengths"]), depths, layout)


def selected_blocks(runs: Sequence[Shown]) -> list[Chart]:
    """In how many heads of each layer the answer's queries have selected the needle's block."""
    charts = []
    for run in runs:
        for result in run.history.latest("needle")[-1:]:
            attention = result.data["attention"]
            layers = list(enumerate(_rows(result.data["maps"][attention]["selected"])))
            rows = [(layer, row) for layer, row in layers if any(share is not None for share in row)]
            if rows:
                note = (
                    "Share of heads that select the needle's block when they answer; layers that see all are left out."
                )
                title = run.titled(f"Heads that look at the needle, {attention}")
                names = [f"layer {layer}" for layer, _ in rows]
                values = [row for _, row in rows]
                lengths = _lengths(result.data["lengths"])
                charts.append(_heatmap(f"selected-{run.index}", title, note, values, lengths, names, {}))
    return charts


def ruler_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last RULER evaluation of every run: scores by task and length, for each attention and way of scoring."""
    return [
        _ruler(run, result, attention, scoring, by_task)
        for run in runs
        for result in run.history.latest("ruler")[-1:]
        for attention, by_scoring in result.data["scores"].items()
        for scoring, by_task in by_scoring.items()
    ]


def lm_eval_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last results of `moba-train lm-eval` of every run: shares by task and metric, for each attention."""
    charts = []
    for run in runs:
        for result in run.history.latest("lm_eval")[-1:]:
            scores = result.data["scores"]
            shares = {
                f"{task}, {metric}": [by_task[task][metric] for by_task in scores.values()]
                for task, values in next(iter(scores.values())).items()
                for metric, value in values.items()
                if "_stderr" not in metric and metric.split(",")[0] not in _NO_SHARES and 0 <= value <= 1
            }
            if shares:
                names = [text(name) for name in shares]
                note = f"After step {result.step:,}, by the package lm-eval; further numbers are in {result.source}."
                layout = {"xaxis": {"title": "attention"}}
                charts.append(
                    _heatmap(
                        f"lm-eval-{run.index}",
                        run.titled("lm-eval"),
                        note,
                        [*shares.values()],
                        [*scores],
                        names,
                        layout,
                    )
                )
    return charts


def _ruler(run: Shown, result: Result, attention: str, scoring: str, by_task: dict[str, list[float]]) -> Chart:
    data = result.data
    title = run.titled(f"RULER, {attention} attention, {scoring.replace('_', ' ')}")
    note = f"After step {result.step:,}: {data['samples']} samples of each task and length, seed {data['seed']}."
    key = f"ruler-{run.index}-{_safe(attention)}-{_safe(scoring)}"
    layout = _trained_mark(data["lengths"], data["trained_length"])
    return _heatmap(key, title, note, [*by_task.values()], _lengths(data["lengths"]), [*map(text, by_task)], layout)


def _heatmap(
    key: str, title: str, note: str, rows: list[list[Any]], columns: list[str], names: list[str], layout: dict[str, Any]
) -> Chart:
    """Shares from 0 to 1; the first row is at the top."""
    trace = {
        "type": "heatmap",
        "x": columns,
        "y": names,
        "z": rows,
        "zmin": 0,
        "zmax": 1,
        "colorscale": _SCALE,
        "xgap": 2,
        "ygap": 2,
        "texttemplate": "%{z:.0%}" if len(columns) <= 12 else "",
        "textfont": {"color": "#10151f", "size": 12},
        "hovertemplate": "%{y}, %{x}: %{z:.1%}<extra></extra>",
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0, "len": 1},
    }
    base = {
        "hovermode": "closest",
        "xaxis": {"type": "category", "title": "tokens", "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    merged = base | layout | {name: base[name] | layout.get(name, {}) for name in ("xaxis", "yaxis")}
    return Chart(key, title, note, [trace], merged, height=max(240, 110 + _CELL * len(names)))


def _rows(by_length: list[list[Any]]) -> list[list[Any]]:
    """[lengths, rows] as [rows, lengths]."""
    return [list(row) for row in zip(*by_length, strict=True)]


def _lengths(lengths: Sequence[int]) -> list[str]:
    return [f"{length // 1024}K" if length % 1024 == 0 else str(length) for length in lengths]


def _trained_mark(lengths: Sequence[int], trained: int) -> dict[str, Any]:
    """A line behind the longest length that was trained, where there are longer ones."""
    inside = sum(length <= trained for length in lengths)
    if inside in (0, len(lengths)):
        return {}
    place = inside - 0.5
    line = {"color": "var(--ink)", "width": 2, "dash": "dash"}
    label = {
        "x": place,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "text": f"trained: {_lengths([trained])[0]}",
        "showarrow": False,
        "font": {"size": 11},
    }
    shape = {"type": "line", "x0": place, "x1": place, "yref": "paper", "y0": 0, "y1": 1, "line": line}
    return {"shapes": [shape], "annotations": [label]}


def _safe(name: str) -> str:
    """`name` as a part of an element's id."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
