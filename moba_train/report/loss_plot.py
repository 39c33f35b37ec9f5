"""The plot of a run: `loss.png`, drawn from `metrics.jsonl`."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from moba_train.errors import UserError
from moba_train.report.curves import smooth
from moba_train.telemetry.jsonl import read_records

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
