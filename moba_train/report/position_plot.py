"""The plot of losses by position in the context: `position_wise.png`, drawn from `metrics.jsonl`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from moba_train.telemetry.jsonl import read_records

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
            _draw(axes, evaluation["bucket"], curve, f"{name}: {kind}", color=colour, ls="-" if own else "--")
    axes.set(xlabel="position in the context (tokens)", ylabel="loss (nats per token)", xlim=(0, None))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.5)
    axes.legend(framealpha=1, edgecolor="none")
    figure.savefig(path)
    plt.close(figure)
    return path


def _draw(axes: Axes, bucket: int, curve: dict[str, list[Any]], label: str, **style: Any) -> None:
    mean = np.array(curve["mean"], dtype=float)
    error = np.array(curve["standard_error"], dtype=float)
    middle = (np.arange(len(mean)) + 0.5) * bucket
    axes.plot(middle, mean, label=label, marker="o", ms=3, lw=1.4, **style)
    axes.fill_between(middle, mean - error, mean + error, alpha=0.15, lw=0, color=style["color"])
