"""Draws docs/images/attention.svg, time against sequence length, from the attention benchmark's result file.

    python -m benchmarks.attention_plot

Points are measurements. Dense curves go on, dashed, by the exact law of their work, T^2. Dotted: the ideal time of each
MoBA setting (benchmarks/attention_cost.py).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.attention_cost import MATRIX_TFLOPS, MEMORY_GB_PER_MS, moba_cost
from benchmarks.attention_rows import Case, short
from benchmarks.attention_table import RESULT
from benchmarks.plotting import GREY, STYLE, plain, stamp

PLOT = Path(__file__).parent.parent / "docs" / "images" / "attention.svg"
LONGEST = 2**20
COLOURS = {
    "128/8": "#1c7ed6",
    "512/3": "#2b8a3e",
    "4096/12": "#9c5fd1",
    "dense, cuDNN": "#d9480f",
    "dense, FlashAttention-2": "#a8741a",
}
"""Colours with a contrast of at least 3 to GitHub's white and to its dark background, as GREY."""
DENSE = {"dense, cuDNN": "cudnn", "dense, FlashAttention-2": "flash2"}
FLOOR = f"ideal: work at {MATRIX_TFLOPS:.0f} TFLOP/s or traffic at {MEMORY_GB_PER_MS} TB/s, the longer"
TICKS_MS = {1: "1 ms", 10: "10 ms", 100: "100 ms", 1000: "1 s", 10_000: "10 s", 60_000: "1 min"}

Curve = list[tuple[int, float]]
"""(tokens, milliseconds), ascending."""


def measured(data: dict[str, Any]) -> dict[str, Curve]:
    """Median time of forward and backward in rows without options, by curve; curves without a point are left out."""
    curves: dict[str, dict[int, float]] = {label: {} for label in COLOURS}
    for result in data["results"]:
        case = Case.parse(result["row"])
        if not case.is_plain or "columns" not in result:
            continue
        for label, column in {f"{case.block_size}/{case.topk}": "auto", **DENSE}.items():
            found = result["columns"].get(column, {})
            if label in curves and "both_ms" in found:
                curves[label][case.tokens] = found["both_ms"]["median"]
    return {label: sorted(points.items()) for label, points in curves.items() if points}


def extrapolated(curve: Curve) -> Curve:
    """The curve of dense attention from its longest measured point on, by T^2."""
    tokens, ms = curve[-1]
    lengths = [tokens * 2**i for i in range(LONGEST.bit_length()) if tokens * 2**i <= LONGEST]
    return [(length, ms * (length / tokens) ** 2) for length in lengths]


def floor(setting: str, shortest: int) -> Curve:
    """Ideal time of forward and backward of one MoBA setting."""
    block_size, topk = map(int, setting.split("/"))
    lengths = [shortest * 2**i for i in range(LONGEST.bit_length()) if shortest * 2**i <= LONGEST]
    costs = [(length, moba_cost([length], block_size, topk)) for length in lengths]
    return [(length, cost.forward_floor_ms + cost.backward_floor_ms) for length, cost in costs]


def draw(source: Path, plot: Path) -> None:
    """Draw the result file `source` as an SVG. Raises ValueError when it has nothing to draw."""
    text = source.read_text()
    data = json.loads(text)
    curves = measured(data)
    if not curves:
        raise ValueError(f"{source} holds no row of {', '.join(COLOURS)} to draw; run python -m benchmarks.attention")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        for label, curve in curves.items():
            _draw_curve(axes, label, curve)
        _decorate(axes, data)
        figure.savefig(plot, transparent=True, metadata={"Date": None, "Description": stamp(text)})
        plt.close(figure)


def _draw_curve(axes: Axes, label: str, curve: Curve) -> None:
    colour = COLOURS[label]
    axes.plot(*zip(*curve, strict=True), "o-", color=colour, lw=1.8, ms=4.5)
    further = extrapolated(curve) if label in DENSE else floor(label, curve[0][0])
    axes.plot(*zip(*further, strict=True), "--" if label in DENSE else ":", color=colour, lw=1.2)
    end = further[-1] if label in DENSE else curve[-1]
    if label == "dense, FlashAttention-2":  # just above cuDNN's curve
        offset = (-6, 4)
        side = "right"
    else:
        offset = (7, -3)
        side = "left"
    name = label if label in DENSE else f"MoBA {label}"
    axes.annotate(name, end, offset, textcoords="offset points", color=colour, ha=side)


def _decorate(axes: Axes, data: dict[str, Any]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = [2**power for power in range(13, LONGEST.bit_length())]
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.set_yticks(list(TICKS_MS), list(TICKS_MS.values()))
    axes.minorticks_off()
    axes.set_xlim(2**12.8, LONGEST * 2**1.3)
    axes.set_xlabel("tokens in the sequence", color=GREY)
    axes.set_title(
        f"Attention forward + backward, selection included, one {data['device'].removeprefix('NVIDIA ')}\n"
        "32 query heads, 8 key/value heads of 128, bf16",
        color=GREY,
        fontsize=10,
        loc="left",
    )
    plain(axes)
    styles = [
        Line2D([], [], color=GREY, marker="o", ms=4.5, lw=1.8, label="measured"),
        Line2D([], [], color=GREY, ls="--", lw=1.2, label="not measured: continued by T²"),
        Line2D([], [], color=GREY, ls=":", lw=1.2, label=FLOOR),
    ]
    axes.legend(handles=styles, loc="upper left", frameon=False, labelcolor=GREY, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--output", type=Path, default=PLOT)
    arguments = parser.parse_args()
    draw(arguments.json, arguments.output)


if __name__ == "__main__":
    main()
