"""Draws docs/sft-layers.svg from a result file of benchmarks/sft_layers.py.

    python -m benchmarks.sft_layers_plot benchmarks/results/sft-layers-h200.json docs/sft-layers.svg

Left: loss after fine-tuning by the layers with full attention, mean and standard error over the seeds, and each run as
a dot. Middle: the loss while fine-tuning. Right: gradient norm of each layer, mean over the steps.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.plotting import GREY, STYLE, plain, stamp

COLOURS = ["#d9480f", "#c2850c", "#2b8a3e", "#1098ad", "#1c7ed6", "#9c5fd1", "#797979"]
_NAMES = {"none": "MoBA everywhere", "all": "full everywhere"}


def draw(source: Path, plot: Path) -> None:
    """Draw the result file `source` as an SVG. Raises ValueError when it has no run with loss on the answers alone."""
    text = source.read_text()
    data = json.loads(text)
    rows = [row for row in data["results"]["summary"] if row["loss_on"] == "answers"]
    runs = [run for run in data["results"]["runs"] if run["loss_on"] == "answers"]
    if not rows:
        raise ValueError(f"{source} holds no run to draw; run python -m benchmarks.sft_layers")
    layers = data["settings"]["model"]["layers"]
    colours = {row["full_layers"]: colour for row, colour in zip(rows, COLOURS, strict=False)}
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
        _draw_losses(panels[0], rows, runs)
        for row in rows:
            full = row["full_layers"]
            curves = [run["curve"] for run in runs if run["full_layers"] == full]
            steps = [step for step, _, _ in curves[0]]
            means = [statistics.mean(curve[place][1] for curve in curves) for place in range(len(steps))]
            panels[1].plot(steps, means, color=colours[full], lw=1.6, label=_NAMES.get(full, f"{full} full"))
            panels[2].plot(range(layers), row["gradient_norm"], "o-", color=colours[full], lw=1.4, ms=3.5)
        panels[1].legend(frameon=False, labelcolor=GREY, fontsize=9)
        panels[1].set_title("held-out loss while fine-tuning", color=GREY, fontsize=10, loc="left")
        panels[1].set_xlabel("step", color=GREY)
        panels[2].set_title("gradient norm of each layer", color=GREY, fontsize=10, loc="left")
        panels[2].set_xlabel("layer", color=GREY)
        panels[2].set_yscale("log")
        for panel in panels:
            plain(panel)
        figure.savefig(plot, transparent=True, metadata={"Date": None, "Description": stamp(text)})
        plt.close(figure)


def _draw_losses(axes: Axes, rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    places = {row["full_layers"]: place for place, row in enumerate(rows)}
    axes.plot([places[run["full_layers"]] for run in runs], [run["loss"] for run in runs], ".", color=GREY, ms=4)
    errors = [row["loss_error"] or 0.0 for row in rows]
    means = [row["loss"] for row in rows]
    axes.errorbar(range(len(rows)), means, errors, fmt="o", color=COLOURS[0], capsize=4, lw=1.8)
    axes.set_xticks(range(len(rows)), [row["full_layers"] for row in rows])
    axes.set_xlabel("layers with full attention", color=GREY)
    axes.set_title("loss of the answers, nats per token", color=GREY, fontsize=10, loc="left")


def main() -> None:
    """Draw one result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("plot", type=Path)
    arguments = parser.parse_args()
    draw(arguments.json, arguments.plot)


if __name__ == "__main__":
    main()
