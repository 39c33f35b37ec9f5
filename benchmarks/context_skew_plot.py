"""Draws docs/images/context-skew.svg, how long each rank attends with and without a sink, from a result of
`context_skew`.

    python -m benchmarks.context_skew_plot

It also prints the result as a Markdown table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.plotting import GREY, STYLE, plain, stamp
from benchmarks.record import markdown

RESULT = Path(__file__).parent / "results" / "context-skew-h200-x2.json"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "context-skew.svg"
SINK, UNIFORM = "#d9480f", "#1c7ed6"
"""Colours with a contrast of at least 3 to GitHub's white and to its dark background, as GREY."""


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


def draw(source: Path, plot: Path) -> None:
    """Plot, for each transport, how long each rank is busy with a sink and under uniform routing, and the step."""
    text = source.read_text()
    results = json.loads(text)["results"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.5, 1.2 + 1.7 * len(results)), 3.8), layout="constrained")
        axes = figure.add_subplot()
        for place, result in enumerate(results):
            for side, (routing, color) in enumerate((("sink", SINK), ("uniform", UNIFORM))):
                one = result[routing]
                ranks = len(one["busy_ms"])
                width = 0.4 / ranks
                first = place - 0.42 + 0.44 * side
                at = [first + width * rank for rank in range(ranks)]
                label = f"attention of each rank, {routing}" if place == 0 else None
                axes.bar(at, one["busy_ms"], 0.9 * width, align="edge", color=color, label=label)
                step = [one["ms"]["median"]] * 2
                label = "step" if place == side == 0 else None
                axes.plot([first, first + 0.4], step, color=GREY, lw=1.5, label=label)
                axes.annotate(
                    f"{one['busy_max_over_mean']:.2f}",
                    (first + 0.2, step[0]),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    color=GREY,
                )
        names = [f"{result['transport']}\n{result['layout']}" for result in results]
        axes.set_xticks(range(len(results)), names)
        axes.set_ylabel("ms, forward and backward", color=GREY)
        axes.set_title("numbers: attention of the busiest rank / mean", color=GREY, fontsize=10, loc="left")
        plain(axes)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)
        figure.legend(frameon=False, labelcolor=GREY, loc="outside upper left", ncols=3)
        metadata = {"Date": None, "Description": stamp(text)}
        figure.savefig(plot, format="svg", transparent=True, metadata=metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--output", type=Path, default=PLOT)
    arguments = parser.parse_args()
    draw(arguments.json, arguments.output)
    print(table(json.loads(arguments.json.read_text())["results"]))


if __name__ == "__main__":
    main()
