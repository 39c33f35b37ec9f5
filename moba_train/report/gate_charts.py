"""Charts of the gate probes: what every layer's selection covers and misses."""

import math
from collections.abc import Iterator, Sequence

from moba_train.report.chart import Chart, Shown, Trace, palette, text
from moba_train.report.history import Result, number


def gate_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last probes of every run by layer: shares (recall and the like) in one chart, other numbers in another.

    The data of an evaluation `gate_probes` has `layers`: for each probed layer its number `layer` and what was
    measured there, by name.
    """
    shares: list[Trace] = []
    others: list[Trace] = []
    for run in runs:
        for result in run.history.latest("gate_probes")[-1:]:
            for role, (name, layers, values) in enumerate(_measured(result), 1):
                within = all(0 <= value <= 1 for value in values if math.isfinite(value))
                label = run.called(text(name.replace("_", " ")))
                (shares if within else others).append(_line(run, label, layers, values, role))
    charts = []
    if shares:
        note = "Last probe, by layer: shares, such as that of full attention's probability inside the selected blocks."
        layout = {"xaxis": _LAYERS, "yaxis": {"title": "share", "range": [-0.02, 1.02], "tickformat": ".0%"}}
        charts.append(Chart("gate-shares", "Gate probes: shares", note, shares, layout))
    if others:
        layout = {"xaxis": _LAYERS, "yaxis": {"rangemode": "tozero"}}
        charts.append(Chart("gate-others", "Gate probes: other numbers", "Last probe, by layer.", others, layout))
    return charts


_LAYERS = {"title": "layer", "dtick": 1, "tickformat": "d"}


def _measured(result: Result) -> Iterator[tuple[str, list[float], list[float]]]:
    """(name, layers, values) of everything that was measured."""
    layers = result.data["layers"]
    names = dict.fromkeys(name for layer in layers for name in layer if math.isfinite(number(layer, name)))
    for name in names:
        if name != "layer":
            yield name, [number(layer, "layer") for layer in layers], [number(layer, name) for layer in layers]


def _line(run: Shown, label: str, layers: list[float], values: list[float], role: int) -> Trace:
    colour = palette(run.index + 1 if run.several else role)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label,
        "x": layers,
        "y": values,
        "line": {"color": colour, "width": 1.5},
        "marker": {"color": colour, "size": 6},
        "meta": {"run": run.index},
        "yhoverformat": ".4~g",
    }
