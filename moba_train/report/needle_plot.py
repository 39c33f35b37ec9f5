"""The maps of needles found, by length and depth: `needle.png`, drawn from `metrics.jsonl`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from moba_train.config.quantities import format_count
from moba_train.telemetry.jsonl import read_records

COLOURS = LinearSegmentedColormap.from_list("needle", ["#F0496E", "#EBB839", "#0CD79F"])
"""From not found to found."""


def plot_needle(run_dir: Path) -> Path | None:
    """Draw the last needle map of every stage of a run into `run_dir/needle.png`. Returns its path, or None where there
    is nothing to draw."""
    source = run_dir / "metrics.jsonl"
    records = read_records(source) if source.exists() else []
    last = {record["stage"]: record["needle_map"] for record in records if record["type"] == "needle"}
    return draw_needle(last, run_dir / "needle.png") if last else None


def draw_needle(evaluations: Mapping[str, dict[str, Any]], path: Path) -> Path:
    """Draw evaluations (the data of their results), by name, into `path`: a row for each, with a map for each attention
    and, where layers select blocks, how many of their heads select the needle's."""
    rows = [_panels(name, evaluation) for name, evaluation in evaluations.items()]
    columns = max(map(len, rows))
    figure, grid = plt.subplots(
        len(rows), columns, figsize=(4.6 * columns, 3.4 * len(rows)), dpi=150, layout="constrained", squeeze=False
    )
    for line, panels in zip(grid, rows, strict=True):
        for axes, panel in zip(line, [*panels, *[None] * (columns - len(panels))], strict=True):
            if panel is None:
                axes.set_visible(False)
            else:
                _draw(axes, *panel)
    shades = plt.cm.ScalarMappable(cmap=COLOURS)
    shades.set_clim(0, 1)
    figure.colorbar(shades, ax=grid, label="share of samples, or heads", shrink=0.8)
    figure.savefig(path)
    plt.close(figure)
    return path


Panel = tuple[str, Sequence[Sequence[float | None]], str, Sequence[str], dict[str, Any]]
"""Title, values by column, label of the rows, their names, and the evaluation."""


def _panels(name: str, evaluation: dict[str, Any]) -> list[Panel]:
    depths = [f"{depth:g}" for depth in evaluation["depths"]]
    panels: list[Panel] = []
    for kind, found in evaluation["maps"].items():
        title = f"{name}: {kind}, {evaluation['samples']} per cell, seed {evaluation['seed']}"
        panels.append((title, found["passed"], "depth (%)", depths, evaluation))
    for kind, found in evaluation["maps"].items():
        selected = found["selected"]
        if any(value is not None for column in selected for value in column):
            layers = [str(layer) for layer in range(len(selected[0]))]
            panels.append((f"{name}: {kind}, heads that select the needle", selected, "layer", layers, evaluation))
    return panels


def _draw(
    axes: Axes,
    title: str,
    columns: Sequence[Sequence[float | None]],
    label: str,
    names: Sequence[str],
    evaluation: dict[str, Any],
) -> None:
    """One map: depth 0, or layer 0, at the top. Cells without a value stay grey."""
    values = np.array(columns, dtype=float).T
    axes.set_facecolor("#d9d9d9")
    axes.imshow(values, cmap=COLOURS, vmin=0, vmax=1, aspect="auto", origin="upper")
    lengths = evaluation["lengths"]
    axes.set_xticks(range(len(lengths)), [format_count(length, 1024) for length in lengths])
    step = -(-len(names) // 16)
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.set_title(title, fontsize="small")
    axes.set(xlabel="tokens", ylabel=label)
    if len(names) * len(lengths) <= 100:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="x-small")
    # Between the last length that was trained and the first beyond it.
    edge = sum(length <= evaluation["trained_length"] for length in lengths) - 0.5
    axes.axvline(edge, color="black", lw=1.5, ls="--")
    trained = format_count(evaluation["trained_length"], 1024)
    axes.annotate(
        f"trained: {trained}",
        (edge, 1),
        (-3, -9),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right",
        fontsize="x-small",
    )
