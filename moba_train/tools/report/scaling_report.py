"""Output of `moba-train fit-scaling`: lines for the terminal, `scaling.json` and the page `scaling.html`."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from moba_train.output_files import write_atomically
from moba_train.strict_json import to_json
from moba_train.tools.report.chart import Chart, Trace, band, palette, text
from moba_train.tools.report.page import write_charts
from moba_train.tools.report.scaling import CONFIDENCE, GroupFit, Interval, ScalingReport
from moba_train.tools.report.sink import plotly_is_installed

_COMPUTES_ON_A_LINE = 50
"""Points of a fitted law and of its interval."""


def scaling_charts(fits: Sequence[GroupFit]) -> list[Chart]:
    """Charts of the runs, the fitted laws and their intervals: one for each metric and compute, a colour a group."""
    groups = list(dict.fromkeys(one.group for one in fits))
    charts: dict[tuple[str, str], Chart] = {}
    for one in fits:
        chart = charts.setdefault((one.metric, one.compute), _empty_chart(one))
        chart.traces.extend(_traces(one, palette(groups.index(one.group) + 1)))
    return list(charts.values())


def _empty_chart(one: GroupFit) -> Chart:
    layout = {
        "hovermode": "closest",
        "xaxis": {"type": "log", "title": f"PFLOP/s-days ({one.compute})"},
        "yaxis": {"type": "log", "title": f"{one.metric}, nats per token"},
    }
    note = f"Points: runs. Lines: fitted laws, with intervals of {CONFIDENCE:.0%}."
    return Chart(f"{one.metric}-{one.compute}", f"{one.metric} over {one.compute}", note, [], layout, height=440)


def _traces(one: GroupFit, colour: str) -> list[Trace]:
    """Interval, law and runs of one group."""
    compute, loss = np.array(one.points).T
    law = one.fit.law
    label = f"{text(one.group)}: {float(law.a):.3f} C^{float(law.b):.3f}"
    line = np.geomspace(compute.min(), compute.max(), _COMPUTES_ON_A_LINE)
    value, low, high = np.array([one.loss_at(float(x)) for x in line]).T
    curve = {"type": "scatter", "mode": "lines", "name": label, "x": line, "y": value, "line": {"color": colour}}
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": compute,
        "y": loss,
        "marker": {"color": colour, "size": 7},
        "text": [text(run.folder.name) for run in one.runs],
        "hovertemplate": "%{text}: %{y:.4f}<extra></extra>",
        "showlegend": False,
    }
    return [band(line, low, high, colour), curve, points]


def describe(report: ScalingReport) -> Iterator[str]:
    """Lines for the terminal."""
    yield f"L = a * C^b, C in PFLOP/s-days, intervals of {CONFIDENCE:.0%}"
    yield f"{'metric':<15}{'C':<6}{'group':<18}{'runs':>5}{'a':>27}{'b':>30}"
    for one in report.fits:
        cells = [_cell(one.number(attrgetter(name)), digits) for name, digits in (("a", ".4g"), ("b", ".4f"))]
        yield f"{one.metric:<15}{one.compute:<6}{one.group:<18}{len(one.runs):>5}{cells[0]:>27}{cells[1]:>30}"
    if any(one.compute == "real" for one in report.fits):
        sources = dict.fromkeys(run.documents for one in report.fits for run in one.runs)
        yield f"real FLOPs count {'; '.join(sources)}"
    for gap in report.gaps:
        yield (
            f"{gap.fit.metric} of {gap.fit.group} above {gap.reference.group} at {gap.fit.compute} "
            f"{gap.compute:.3g}: {_cell(gap.value, '+.4f')}"
        )
    yield from (f"warning: {warning}" for warning in report.warnings)


def _cell(value: Interval, digits: str) -> str:
    return f"{value[0]:{digits}} [{value[1]:{digits}}, {value[2]:{digits}}]"


def write_report(report: ScalingReport, folder: Path) -> list[Path]:
    """Write `scaling.json` and, if plotly is installed, `scaling.html` into `folder`. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "scaling.json"]
    write_atomically(written[0], to_json(report_json(report), indent=1) + "\n")
    if plotly_is_installed():
        written.append(folder / "scaling.html")
        write_charts("Scaling fits", scaling_charts(report.fits), written[1])
    return written


def report_json(report: ScalingReport) -> dict[str, Any]:
    """The report as JSON values."""
    runs = {run.folder: run for fit in report.fits for run in fit.runs}
    return {
        "format": 1,
        "law": "a * C^b",
        "unit": "PFLOP/s-days",
        "confidence": CONFIDENCE,
        "runs": [
            {
                "folder": str(run.folder),
                "group": run.group,
                "parameters": run.parameters,
                "tokens": run.tokens,
                "compute": run.compute,
                "losses": run.losses,
                "documents": run.documents,
            }
            for run in runs.values()
        ],
        "fits": [_fit_json(one) for one in report.fits],
        "gaps": [
            {
                "metric": gap.fit.metric,
                "compute": gap.fit.compute,
                "group": gap.fit.group,
                "reference": gap.reference.group,
                "at": gap.compute,
                "gap": _interval_json(gap.value),
            }
            for gap in report.gaps
        ],
        "warnings": report.warnings,
    }


def _fit_json(one: GroupFit) -> dict[str, Any]:
    return {
        "metric": one.metric,
        "compute": one.compute,
        "group": one.group,
        "runs": [str(run.folder) for run in one.runs],
        **{name: _interval_json(one.number(attrgetter(name))) for name in ("a", "b")},
        "rms_error_of_log_loss": one.fit.error,
    }


def _interval_json(value: Interval) -> dict[str, float]:
    return {"value": value[0], "low": value[1], "high": value[2]}
