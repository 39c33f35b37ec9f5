"""Times for which each rank attends with and without a sink, from a result of `context_skew`: picture and table.

python -m benchmarks.pictures context-skew
python -m benchmarks.context_skew_plot [RESULT]   # prints the table
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.plotting import BLUE, INK, PURPLE, name
from benchmarks.record import markdown

RESULT = Path(__file__).parent / "results" / "context-skew-h200-x2.json"
COLOURS = {"sink": PURPLE, "uniform": BLUE}


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table, a row for each transport and layout."""
    rows = [
        [
            "transport",
            "layout",
            "sink, ms",
            "uniform, ms",
            "sink / uniform",
            "busy with a sink",
            "busy, uniform",
            "peak with a sink, GiB",
        ]
    ]
    for result in results:
        sink, uniform = result["sink"], result["uniform"]
        rows.append(
            [
                result["transport"],
                result["layout"],
                f"{sink['ms']['median']:.1f}",
                f"{uniform['ms']['median']:.1f}",
                f"{result['sink_over_uniform']:.2f}",
                f"{sink['busy_max_over_mean']:.2f}",
                f"{uniform['busy_max_over_mean']:.2f}",
                " / ".join(f"{peak:.1f}" for peak in sink["peak_gib"]),
            ]
        )
    return markdown(rows)


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Points at each rank's attention with a sink and under uniform routing, for each transport; a line at the time of
    the whole step. The numbers are the attention of the busiest rank over the mean."""
    results = content["results"]
    axes = figure.subplots()
    for place, result in enumerate(results):
        for side, (routing, colour) in enumerate(COLOURS.items()):
            one = result[routing]
            first = place - 0.38 + 0.4 * side
            at = np.linspace(first, first + 0.36, 2 * len(one["busy_ms"]) + 1)[1::2]
            label = f"attention of each rank, {routing} routing" if place == 0 else None
            axes.plot(at, one["busy_ms"], "o", color=colour, label=label)
            step = one["ms"]["median"]
            axes.plot([first, first + 0.36], [step] * 2, color=INK, label="whole step" if place == side == 0 else None)
            name(axes, f"{one['busy_max_over_mean']:.2f}", (first + 0.18, step), INK, (0, 7))
    axes.set_xticks(range(len(results)), [f"{result['transport']}\n{result['layout']}" for result in results])
    axes.set_ylabel("ms, forward and backward")
    axes.grid(visible=False, axis="x")
    axes.set_yscale("log")
    axes.margins(y=0.12)
    figure.legend(loc="outside upper left", ncols=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT)
    print(table(json.loads(parser.parse_args().result.read_text())["results"]))


if __name__ == "__main__":
    main()
