"""The plot of a run: `loss.png`, drawn from `metrics.jsonl`.

The maps of needles found, by length and depth: `needle.png`, drawn from `metrics.jsonl`.

The plot of losses by position in the context: `position_wise.png`, drawn from `metrics.jsonl`.

The plots of a run, drawn when it ends.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import EngFormatter

from moba_train.config.base import format_count
from moba_train.errors import UserError
from moba_train.telemetry.jsonl import read_records
from moba_train.tools.report.history import smooth

matplotlib.use("Agg")

_RAW = "#9ecae1"
_SMOOTH = "#08519c"
_EVALUATION = "#e6550d"
_TRAILING = "#31a354"
_SPIKE = "#d62728"
_GREY = "#737373"


def plot_run(run_dir: Path) -> Path:
    """Draw training loss (each step, and smoothed), evaluation and trailing loss, stages, spikes and the learning rate
    over consumed tokens into `run_dir/loss.png`. Returns its path. Raises UserError if there is no loss to draw."""
    source = run_dir / "metrics.jsonl"
    records = read_records(source) if source.exists() else []
    training = [r for r in records if r["type"] == "metrics" and math.isfinite(r.get("loss", math.nan))]
    if not training:
        raise UserError(f"{source} holds no training loss to draw; give the run_dir of a run that has logged steps")

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(10, 6), dpi=150, sharex=True, height_ratios=[4, 1], layout="constrained"
    )
    _draw_losses(top, training, records)
    _draw_stages((top, bottom), training)
    bottom.plot([r["tokens"] for r in training], [r.get("lr", math.nan) for r in training], color=_GREY, lw=1.2)
    bottom.set(xlabel="consumed tokens", ylabel="learning rate", ylim=(0, None))
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    bottom.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.5)
        axes.margins(x=0.01)
    path = run_dir / "loss.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def _draw_losses(axes: Axes, training: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    tokens, losses = np.array([(r["tokens"], r["loss"]) for r in training], dtype=float).T
    axes.plot(tokens, losses, color=_RAW, lw=0.6, label="training loss, each step")
    smoothed, places = smooth(losses, tokens)
    axes.plot(places, smoothed, color=_SMOOTH, lw=1.6, label="training loss, smoothed")
    for name, label, colour in (
        ("eval_loss", "evaluation loss", _EVALUATION),
        ("trailing_loss", "trailing loss (end of the context)", _TRAILING),
    ):
        points = [(r["tokens"], r[name]) for r in records if math.isfinite(r.get(name, math.nan))]
        if points:
            axes.plot(*zip(*points, strict=True), "o", ms=4, color=colour, label=label)
    spikes = [r["tokens"] for r in records if r["type"] == "spike"]
    if spikes:
        heights = np.interp(spikes, tokens, losses)
        axes.plot(spikes, heights, "v", ms=7, mfc="none", mew=1.4, color=_SPIKE, label="spike")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(loc="upper right", framealpha=1, edgecolor="none")


def _draw_stages(panels: tuple[Axes, Axes], training: list[dict[str, Any]]) -> None:
    """Draw a line where a stage begins, with its name at the top of the first panel."""
    previous = None
    for record in training:
        if record["stage"] == previous:
            continue
        if previous is not None:
            for axes in panels:
                axes.axvline(record["tokens"], color=_GREY, lw=0.8, ls="--")
        panels[0].annotate(
            record["stage"],
            (record["tokens"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 2),
            textcoords="offset points",
            color=_GREY,
            fontsize=9,
        )
        previous = record["stage"]


matplotlib.use("Agg")

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


matplotlib.use("Agg")

_COLOURS = plt.get_cmap("viridis")


def plot_position_wise(run_dir: Path) -> Path | None:
    """Draw the last evaluation by position of every stage of a run into `run_dir/position_wise.png`. Returns its path,
    or None where there is nothing to draw."""
    source = run_dir / "metrics.jsonl"
    records = read_records(source) if source.exists() else []
    last = {record["stage"]: record["position_wise"] for record in records if record["type"] == "position_wise"}
    return draw_position_wise(last, run_dir / "position_wise.png") if last else None


def draw_position_wise(evaluations: Mapping[str, dict[str, Any]], path: Path) -> Path:
    """Draw evaluations (the `position_wise` field of their events), by name, into `path`: one colour for each, a solid
    line for its own attention, a dashed one for full attention on the same weights, a band of one standard error."""
    figure, axes = plt.subplots(figsize=(10, 5), dpi=150, layout="constrained")
    for index, (name, evaluation) in enumerate(evaluations.items()):
        colour = _COLOURS(0.85 * index / max(1, len(evaluations) - 1))
        for kind, curve in evaluation["curves"].items():
            own = kind == evaluation["attention"]
            _draw_curve(axes, evaluation["bucket"], curve, f"{name}: {kind}", color=colour, ls="-" if own else "--")
    axes.set(xlabel="position in the context (tokens)", ylabel="loss (nats per token)", xlim=(0, None))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.5)
    axes.legend(framealpha=1, edgecolor="none")
    figure.savefig(path)
    plt.close(figure)
    return path


def _draw_curve(axes: Axes, bucket: int, curve: dict[str, list[Any]], label: str, **style: Any) -> None:
    mean = np.array(curve["mean"], dtype=float)
    error = np.array(curve["standard_error"], dtype=float)
    middle = (np.arange(len(mean)) + 0.5) * bucket
    axes.plot(middle, mean, label=label, marker="o", ms=3, lw=1.4, **style)
    axes.fill_between(middle, mean - error, mean + error, alpha=0.15, lw=0, color=style["color"])
