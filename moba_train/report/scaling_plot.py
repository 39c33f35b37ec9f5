"""The plot of scaling fits: `scaling.png`."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from moba_train.report.scaling import GroupFit

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
