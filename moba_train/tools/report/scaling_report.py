"""The plot of scaling fits: `scaling.png`.

What `moba-train fit-scaling` prints and writes: lines for the terminal, `scaling.json`, `scaling.png`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from moba_train.strict_json import to_json
from moba_train.telemetry.jsonl import write_atomically
from moba_train.tools.report.scaling import GroupFit, Interval, PowerLaw, ScalingReport

matplotlib.use("Agg")

_COLOURS = plt.get_cmap("tab10")


def draw_scaling(fits: Sequence[GroupFit], path: Path) -> Path:
    """Draw runs, fitted laws and their intervals into `path`, and return it: a row for each metric, a column for each
    compute, a colour for each group."""
    metrics = list(dict.fromkeys(one.metric for one in fits))
    computes = list(dict.fromkeys(one.compute for one in fits))
    groups = list(dict.fromkeys(one.group for one in fits))
    size = (6 * len(computes), 4.5 * len(metrics))
    figure, grid = plt.subplots(len(metrics), len(computes), figsize=size, dpi=150, squeeze=False, layout="constrained")
    for one in fits:
        axes = grid[metrics.index(one.metric)][computes.index(one.compute)]
        _draw(axes, one, _COLOURS(groups.index(one.group) % 10))
    for row, metric in zip(grid, metrics, strict=True):
        for axes, compute in zip(row, computes, strict=True):
            axes.set(xscale="log", yscale="log", xlabel=f"PFLOP/s-days ({compute})", ylabel=f"{metric}, nats per token")
            for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                formatted(ScalarFormatter(useOffset=False))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, lw=0.5, which="both")
            axes.legend(framealpha=1, edgecolor="none")
    figure.savefig(path)
    plt.close(figure)
    return path


def _draw(axes: Axes, one: GroupFit, colour: tuple[float, float, float, float]) -> None:
    compute, loss = np.array(one.points).T
    law = one.fit.law
    above = f"{float(law.c):.3f} + " if law.c else ""
    label = f"{one.group}: {above}{float(law.a):.3f} C^{float(law.b):.3f}"
    axes.plot(compute, loss, "o", ms=4, color=colour)
    line = np.geomspace(compute.min(), compute.max(), 50)
    values = np.array([one.loss_at(float(x)) for x in line])
    axes.plot(line, values[:, 0], color=colour, lw=1.4, label=label)
    axes.fill_between(line, values[:, 1], values[:, 2], color=colour, alpha=0.15, lw=0)


def describe(report: ScalingReport) -> Iterator[str]:
    """Lines for the terminal."""
    confidence = f"{report.fits[0].confidence:.0%}"
    law = "L = c + a * C^b" if report.irreducible else "L = a * C^b"
    yield f"{law}, C in PFLOP/s-days, intervals of {confidence}"
    yield f"{'metric':<15}{'C':<6}{'group':<18}{'runs':>5}{'a':>27}{'b':>30}" + f"{'c':>27}" * report.irreducible
    for one in report.fits:
        cells = [_cell(one.number(lambda law: law.a), ".4g"), _cell(one.number(lambda law: law.b), ".4f")]
        line = f"{one.metric:<15}{one.compute:<6}{one.group:<18}{len(one.runs):>5}{cells[0]:>27}{cells[1]:>30}"
        yield line + (f"{_cell(one.number(lambda law: law.c), '.4g'):>27}" if report.irreducible else "")
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
    """Write `scaling.json` and `scaling.png` into `folder`. Returns their paths."""

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "scaling.json"
    write_atomically(target, to_json(report_json(report), indent=1) + "\n")
    return [target, draw_scaling(report.fits, folder / "scaling.png")]


def report_json(report: ScalingReport) -> dict[str, Any]:
    """The report as JSON values."""
    runs = {run.folder: run for fit in report.fits for run in fit.runs}
    return {
        "format": 1,
        "law": "c + a * C^b" if report.irreducible else "a * C^b",
        "unit": "PFLOP/s-days",
        "confidence": report.fits[0].confidence,
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
        "fits": [_fit_json(one, report.irreducible) for one in report.fits],
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


def _fit_json(one: GroupFit, irreducible: bool) -> dict[str, Any]:
    numbers: dict[str, Callable[[PowerLaw], Any]] = {"a": lambda law: law.a, "b": lambda law: law.b}
    if irreducible:
        numbers["c"] = lambda law: law.c
    return {
        "metric": one.metric,
        "compute": one.compute,
        "group": one.group,
        "runs": [str(run.folder) for run in one.runs],
        **{name: _interval_json(one.number(value)) for name, value in numbers.items()},
        "rms_error_of_log_loss": one.fit.error,
    }


def _interval_json(value: Interval) -> dict[str, float]:
    return {"value": value[0], "low": value[1], "high": value[2]}
