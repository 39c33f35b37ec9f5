"""Time of attention against sequence length, from a result file of `attention`.

    python -m benchmarks.pictures attention

Points are measurements. Dense curves go on, dashed, by the exact law of their work, T^2. Dotted: the ideal time of each
MoBA setting (benchmarks/attention_cost.py).
"""

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.attention_cost import MATRIX_TFLOPS, MEMORY_GB_PER_MS, moba_cost
from benchmarks.attention_rows import Case
from benchmarks.plotting import FULL, INK, MOBA, name, powers_of_two

LONGEST = 2**20
NAMES = {
    "128/8": "MoBA, 8 blocks of 128",
    "512/3": "MoBA, 3 blocks of 512",
    "4096/12": "MoBA, 12 blocks of 4096",
    "dense, cuDNN": "full, cuDNN",
    "dense, FlashAttention-2": "full, FlashAttention-2",
}
"""Each curve's words in the picture."""
DENSE = {"dense, cuDNN": "cudnn", "dense, FlashAttention-2": "flash2"}
FLOOR = f"ideal ({MATRIX_TFLOPS:.0f} TFLOP/s, {MEMORY_GB_PER_MS} TB/s)"
TICKS_MS = {1: "1 ms", 10: "10 ms", 100: "100 ms", 1000: "1 s", 10_000: "10 s", 60_000: "1 min"}

Curve = list[tuple[int, float]]
"""(tokens, milliseconds), ascending."""


def measured(data: dict[str, Any]) -> dict[str, Curve]:
    """Median time of forward and backward in rows without options, by curve; curves without a point are left out."""
    curves: dict[str, dict[int, float]] = {label: {} for label in NAMES}
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


def floor(setting: str, lengths: Iterable[int]) -> Curve:
    """Ideal time of forward and backward of one MoBA setting."""
    block_size, topk = map(int, setting.split("/"))
    costs = [(length, moba_cost([length], block_size, topk)) for length in lengths]
    return [(length, cost.forward_floor_ms + cost.backward_floor_ms) for length, cost in costs]


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Draw the curves of a result file. Raises ValueError when it has none."""
    curves = measured(content)
    if not curves:
        raise ValueError(f"the results hold no row of {', '.join(NAMES)} to draw; run python -m benchmarks.attention")
    axes = figure.subplots()
    for label, curve in curves.items():
        _draw_curve(axes, label, curve)
    powers_of_two(axes, [2**power for power in range(13, LONGEST.bit_length())])
    axes.set_yscale("log")
    axes.set_yticks(list(TICKS_MS), list(TICKS_MS.values()))
    axes.minorticks_off()
    axes.set_xlabel("tokens in the sequence")
    axes.set_ylabel("forward and backward on one H200")
    styles = [
        Line2D([], [], color=INK, marker="o", label="measured"),
        Line2D([], [], color=INK, ls="--", lw=1.2, label="not measured: continued by T²"),
        Line2D([], [], color=INK, ls=":", lw=1.2, label=FLOOR),
    ]
    axes.legend(handles=styles, loc="upper left")


def _draw_curve(axes: Axes, label: str, curve: Curve) -> None:
    colour = FULL if label in DENSE else MOBA
    axes.plot(*zip(*curve, strict=True), "o-", color=colour)
    further = extrapolated(curve) if label in DENSE else floor(label, dict(curve))
    axes.plot(*zip(*further, strict=True), "--" if label in DENSE else ":", color=colour, lw=1.2)
    end = further[-1] if label in DENSE else curve[-1]
    name(axes, NAMES[label], end, colour, (6, {"dense, FlashAttention-2": 3, "512/3": -14}.get(label, -3)))
