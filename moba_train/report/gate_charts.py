"""Charts of the gate probes: what every layer's selection covers, how it decides, and how far back it looks."""

from collections.abc import Sequence

import numpy as np

from moba_train.report.chart import Chart, Shown, Trace, palette, text
from moba_train.report.history import Result, number

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
"""Key, title, note and statistics of each chart; evals/gate_statistics.py defines the statistics."""


def gate_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last gate probe of every run that found a choice: its statistics by layer, and the distances of the selected
    blocks."""
    latest = [(run, result) for run in runs for result in run.history.latest("gate_probe")[-1:]]
    probes = [(run, result) for run, result in latest if result.data["layers"]]
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
    """One statistic; several runs share a colour each, and tell the statistics apart by the dash."""
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
    """How far back the selected blocks lie, by layer; distances beyond the farthest are left out."""
    layers = result.data["layers"]
    shares = np.array([layer["distance_share"] for layer in layers], dtype=np.float64)
    farthest = int(np.flatnonzero((shares > 0).any(0)).max(initial=0)) + 1
    trace = {
        "type": "heatmap",
        "x": [text(distance) for distance in result.data["distances"][:farthest]],
        "y": [f"layer {layer['layer']:d}" for layer in layers],
        "z": shares[:, :farthest],
        "zmin": 0,
        "zmax": float(shares.max(initial=0.0)),
        "colorscale": [[0, "var(--card)"], [1, "var(--c1)"]],
        "hovertemplate": "%{y}, %{x} blocks back: %{z:.1%}<extra></extra>",
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0, "len": 1},
    }
    layout = {
        "hovermode": "closest",
        "xaxis": {"type": "category", "title": "blocks back", "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    title = run.titled("How far back the selected blocks lie")
    note = f"Share of each layer's selections, after step {result.step:,}."
    return Chart(f"gate-distance-{run.index}", title, note, [trace], layout, height=max(340, 110 + 20 * len(layers)))
