"""Charts of evaluations: gate probes, loss by position, needle maps, tasks, RULER's and lm-eval's among them, and the
costs of sparse attention."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moba_train.tools.report.chart import Chart, Shown, Trace, band, heatmap, last_results, length_names, palette, text
from moba_train.tools.report.history import Column, Result, number

_GROUPS = (
    (
        "gate-covers",
        "What the gates cover",
        "Shares: of full attention's probability, of the best blocks, of queries at the first block, of blocks unused.",
        ("mass_recall", "block_recall", "first_block_share", "never_selected"),
    ),
    (
        "gate-decides",
        "How the gates decide",
        "Entropies relative to their maximum; diversity 1: no two heads alike; output error against full attention.",
        ("mass_entropy", "gate_entropy", "head_diversity", "output_error"),
    ),
    (
        "gate-margin",
        "Margin and load of the gates",
        "Margin in units of attention's logits; load of the busiest block over the mean.",
        ("margin", "load_imbalance"),
    ),
)
"""Key, title, note and statistics of each chart; mechanisms/probes/gate_statistics.py defines the statistics."""


def gate_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last gate probe of every run that found a choice: its statistics by layer, and the distances of the selected
    blocks."""
    probes = [(run, result) for run, result in last_results(runs, "gate_probe") if result.data["layers"]]
    charts = []
    for key, title, note, names in _GROUPS:
        traces = [
            _by_layer(run, result, name, role)
            for run, result in probes
            for role, name in enumerate(names, 1)
            if any(name in layer for layer in result.data["layers"])
        ]
        if traces:
            layout = {"xaxis": {"title": "layer", "dtick": 1, "tickformat": "d"}, "yaxis": {"rangemode": "tozero"}}
            charts.append(Chart(key, title, note, traces, layout))
    return [*charts, *(_distances(run, result) for run, result in probes)]


def _by_layer(run: Shown, result: Result, name: str, role: int) -> Trace:
    """One statistic over the layers; of several runs, each has a colour, and each statistic a dash."""
    layers = result.data["layers"]
    colour = palette(run.index + 1 if run.several else role)
    dash = ("solid", "dash", "dot", "dashdot")[role - 1] if run.several else "solid"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": run.called(name.replace("_", " ")),
        "x": [number(layer, "layer") for layer in layers],
        "y": [number(layer, name) for layer in layers],
        "line": {"color": colour, "width": 1.5, "dash": dash},
        "marker": {"color": colour, "size": 6},
        "meta": {"run": run.index},
        "yhoverformat": ".3f",
    }


def _distances(run: Shown, result: Result) -> Chart:
    """Distances of the selected blocks by layer; those beyond the farthest are left out."""
    layers = result.data["layers"]
    shares = np.array([layer["distance_share"] for layer in layers], dtype=np.float64)
    farthest = int(np.flatnonzero((shares > 0).any(0)).max(initial=0)) + 1
    trace = {
        "x": [text(distance) for distance in result.data["distances"][:farthest]],
        "y": [f"layer {layer['layer']:d}" for layer in layers],
        "z": shares[:, :farthest],
        "zmax": float(shares.max(initial=0.0)),
        "colorscale": [[0, "var(--card)"], [1, "var(--c1)"]],
        "hovertemplate": "%{y}, %{x} blocks back: %{z:.1%}<extra></extra>",
    }
    title = run.titled("How far back the selected blocks lie")
    note = f"Share of each layer's selections, after step {result.step:,}."
    return heatmap(f"gate-distance-{run.index}", title, note, trace, {"xaxis": {"title": "blocks back"}}, row=20)


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
    """Gain of full attention on the same weights, by position."""
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
    line = {"color": "var(--muted)", "width": 1}
    zero = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": line}
    layout = _layout("difference") | {"shapes": [zero]}
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
    area = band(line["x"], mean - error, mean + error, colour)
    return [area | {"name": f"{label}, standard error", "meta": {"run": run.index}}, line]


def _column(values: Sequence[float | None]) -> Column:
    return np.array(values, dtype=np.float64)


def _layout(y: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": "position in the context (tokens)", "rangemode": "tozero", "exponentformat": "SI"},
        "yaxis": {"title": y},
    }


_SCALE = [[0, "#F0496E"], [0.5, "#EBB839"], [1, "#0CD79F"]]
_BY_TASKS = {"ruler": "RULER", "longtasks": "Long tasks"}
"""Titles of evaluations by tasks."""
_NO_SHARES = {"bits_per_byte", "brier_score", "byte_perplexity", "perplexity", "ter", "word_perplexity"}
"""Metrics of lm-eval of which less is better; they may also be below 1."""


def needle_maps(runs: Sequence[Shown]) -> list[Chart]:
    """The last needle evaluation of every run: a map for each attention, length by depth."""
    charts = []
    for run, result in last_results(runs, "needle"):
        for name, found in result.data["maps"].items():
            charts.append(_needle_map(run, result, name, found["passed"], ""))
            if "generated" in found:
                charts.append(_needle_map(run, result, name, found["generated"], ", generated"))
    return charts


def _needle_map(run: Shown, result: Result, attention: str, by_length: list[list[float]], how: str) -> Chart:
    data = result.data
    depths = [f"{depth:g} %" for depth in data["depths"]]
    title = run.titled(f"Needle, {attention} attention{how}")
    keys = data.get("keys", data["needles"])  # earlier versions also hid needles that they did not ask for
    several = f"{data['needles']} of {keys} needles, " if keys > data["needles"] else ""
    several = f"{keys} needles, " if not several and keys > 1 else several
    note = (
        f"Share of samples with every token right, after step {result.step:,}: {several}{data['samples']} samples per "
        f"cell{_former_conditions(data)}."
    )
    layout = _trained_mark(data["lengths"], data["trained_length"]) | {"yaxis": {"title": "depth"}}
    key = f"needle-{run.index}-{len(how)}-{_safe(attention)}"
    return _share_map(key, title, note, _rows(by_length), length_names(data["lengths"]), depths, layout)


def _former_conditions(data: dict[str, Any]) -> str:
    """Conditions of an earlier version's questions that are gone, for a note; empty if there are none."""
    seed = f", seed {data['seed']}" if data.get("seed") else ""
    return f"{seed}, {data['haystack']} haystack" if data.get("haystack", "natural") != "natural" else seed


def selected_blocks(runs: Sequence[Shown]) -> list[Chart]:
    """Share of the heads of each layer whose queries selected the needle's block for their answer."""
    charts = []
    note = "Share of heads that select the needle's block when they answer; layers that see all are left out."
    for run, result in last_results(runs, "needle"):
        attention = result.data["attention"]
        rows = [*enumerate(_rows(result.data["maps"][attention]["selected"]))]
        shown = {f"layer {layer}": row for layer, row in rows if any(share is not None for share in row)}
        if shown:
            title = run.titled(f"Heads that look at the needle, {attention}")
            lengths = length_names(result.data["lengths"])
            charts.append(_share_map(f"selected-{run.index}", title, note, [*shown.values()], lengths, [*shown], {}))
    return charts


def task_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last evaluations by tasks of every run: scores by task and length, for each attention and way of scoring."""
    return [
        _tasks(run, result, attention, scoring, by_task)
        for name in _BY_TASKS
        for run, result in last_results(runs, name)
        for attention, by_scoring in result.data["scores"].items()
        for scoring, by_task in by_scoring.items()
    ]


def lm_eval_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last results of `moba-train lm-eval` of every run: shares by task and metric, for each attention."""
    charts = []
    for run, result in last_results(runs, "lm_eval"):
        scores = result.data["scores"]
        shares = {
            f"{task}, {metric}": [by_task[task][metric] for by_task in scores.values()]
            for task, values in next(iter(scores.values())).items()
            for metric, value in values.items()
            if "_stderr" not in metric and metric.split(",")[0] not in _NO_SHARES and 0 <= value <= 1
        }
        if shares:
            key, title = f"lm-eval-{run.index}", run.titled("lm-eval")
            note = f"After step {result.step:,}, by the package lm-eval; further numbers are in {result.source}."
            names = [*map(text, shares)]
            layout = {"xaxis": {"title": "attention"}}
            charts.append(_share_map(key, title, note, [*shares.values()], [*scores], names, layout))
    return charts


def _tasks(run: Shown, result: Result, attention: str, scoring: str, by_task: dict[str, list[float]]) -> Chart:
    data = result.data
    title = run.titled(f"{_BY_TASKS[result.name]}, {attention} attention, {scoring.replace('_', ' ')}")
    note = f"After step {result.step:,}: {data['samples']} samples of each task and length"
    note += f"{_former_conditions(data)}."
    key = f"{result.name}-{run.index}-{_safe(attention)}-{_safe(scoring)}"
    layout = _trained_mark(data["lengths"], data["trained_length"])
    return _share_map(
        key, title, note, [*by_task.values()], length_names(data["lengths"]), [*map(text, by_task)], layout
    )


def _share_map(
    key: str, title: str, note: str, rows: list[list[Any]], columns: list[str], names: list[str], layout: dict[str, Any]
) -> Chart:
    """Shares from 0 to 1, written into their cells; the first row is at the top."""
    trace = {
        "x": columns,
        "y": names,
        "z": rows,
        "colorscale": _SCALE,
        "xgap": 2,
        "ygap": 2,
        "texttemplate": "%{z:.0%}" if len(columns) <= 12 else "",
        "textfont": {"color": "#10151f", "size": 12},
        "hovertemplate": "%{y}, %{x}: %{z:.1%}<extra></extra>",
    }
    return heatmap(key, title, note, trace, {"xaxis": {"title": "tokens"}} | layout)


def _rows(by_length: list[list[Any]]) -> list[list[Any]]:
    """[lengths, rows] as [rows, lengths]."""
    return [list(row) for row in zip(*by_length, strict=True)]


def _trained_mark(lengths: Sequence[int], trained: int) -> dict[str, Any]:
    """A line behind the longest length that was trained, if there are longer ones."""
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
        "text": f"trained: {length_names([trained])[0]}",
        "showarrow": False,
        "font": {"size": 11},
    }
    shape = {"type": "line", "x0": place, "x1": place, "yref": "paper", "y0": 0, "y1": 1, "line": line}
    return {"shapes": [shape], "annotations": [label]}


def _safe(name: str) -> str:
    """`name` as a part of an element's id."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


_ERRORS = {
    "budget": "budget: the ideal selection against full attention",
    "selector": "selector: MoBA's gate against the ideal selection",
    "weights": "weights: against weights trained with full attention",
}


def oracle_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last result of every run: errors in trailing loss, and in each share of right answers, as bars."""
    return [chart for run, result in last_results(runs, "oracle") for chart in _charts(run, result)]


def _charts(run: Shown, result: Result) -> list[Chart]:
    budgets = result.data["budgets"]
    weights = result.data["weights"]
    labels = [text(budget["label"]) for budget in budgets]
    losses = {name: [budget["loss"].get(name) for budget in budgets] for name in _ERRORS}
    if weights is not None:
        losses["weights"] = [weights["loss"]] * len(budgets)
    means = {name: [pair and pair[0] for pair in pairs] for name, pairs in losses.items()}
    errors = {name: [pair and pair[1] for pair in pairs] for name, pairs in losses.items()}
    sequences = result.data["sequences"]
    length = result.data["seq_len"]
    note = (
        f"Trailing loss at {length:,} tokens, {sequences} sequences; whiskers: one standard error of paired sequences."
    )
    charts = [_bars(run, "loss", "What sparse attention costs", note, labels, means, errors)]
    for share in budgets[0]["scores"]:
        lost = {name: [budget["scores"][share].get(name) for budget in budgets] for name in _ERRORS}
        if weights is not None:
            lost["weights"] = [weights["scores"].get(share)] * len(budgets)
        full = result.data["attentions"]["full"]["scores"][share]
        note = f"Share of right answers that each error costs; full attention gives {full:.2f}."
        charts.append(
            _bars(run, share.replace(" ", "-"), f"What it costs in answers, {share}", note, labels, lost, None)
        )
    return charts


def _bars(
    run: Shown,
    key: str,
    title: str,
    note: str,
    labels: list[str],
    values: dict[str, list[Any]],
    errors: dict[str, list[Any]] | None,
) -> Chart:
    """A bar for each budget and error; errors that were not measured have none."""
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": run.called(_ERRORS[name]),
            "x": labels,
            "y": values[name],
            "marker": {"color": palette(role)},
            "meta": {"run": run.index},
            "yhoverformat": "+.4f",
            **({"error_y": {"type": "data", "array": errors[name], "thickness": 1}} if errors is not None else {}),
        }
        for role, name in enumerate(_ERRORS, 1)
        if any(value is not None for value in values[name])
    ]
    unit = "nats per token" if errors is not None else "share of answers lost"
    layout = {"barmode": "group", "xaxis": {"type": "category"}, "yaxis": {"title": unit}}
    return Chart(f"oracle-{run.index}-{text(key)}", run.titled(title), note, traces, layout, wide=True)
