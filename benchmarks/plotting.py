"""The style of all figures: width, fonts, colours, direct labels, bands over seeds, and how a figure is saved.

Figures have a white background of their own, so that they can be read on a dark page as well.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
except ModuleNotFoundError:
    print("error: pictures and experiments need matplotlib; type: pip install -e '.[figures]'", file=sys.stderr)
    sys.exit(2)
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moba_train.config.base import format_count

INK = "#333333"
GREY = "#767676"
BLUE, GREEN, PURPLE = "#0072b2", "#009e73", "#cc79a7"
FULL, MOBA, TORCHTITAN = GREY, "#d55e00", "#000000"
"""Each method has one colour in every figure. All come from Okabe and Ito's palette, which colour-blind readers can
distinguish (https://jfly.uni-koeln.de/color), as far as they have a contrast of at least 3 to white."""
COLOURS = {"full": FULL, "moba": MOBA}
"""By the names of attention kinds."""
NAMES = {"full": "full attention", "moba": "MoBA"}

WIDTH = 7.0
"""Inches, about 670 pixels: a figure is shown as large as it is drawn."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moba",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.edgecolor": "white",
    "legend.handlelength": 1.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "image.cmap": "Blues",
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
}
"""Settings for `rc_context`, with which equal results give equal bytes."""


def stamp(text: str) -> str:
    """Description of the result files that a figure was drawn from, kept in the figure's metadata."""
    return f"drawn from results with sha256 {hashlib.sha256(text.encode()).hexdigest()}"


@contextmanager
def saved(plot: Path, text: str, height: float) -> Iterator[Figure]:
    """A figure `height` inches high to draw on, which is then saved as an SVG.

    text: the result files that it is drawn from, joined
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        plot.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(plot, format="svg", metadata={"Date": None, "Description": stamp(text)})


def name(axes: Axes, text: str, point: tuple[float, float], colour: str, offset: tuple[float, float] = (6, 0)) -> None:
    """Write the name of a line beside one of its points, `offset` in points away: on the right, on the left, or above
    or below where only the height differs."""
    side = "left" if offset[0] > 0 else "right" if offset[0] < 0 else "center"
    axes.annotate(text, point, offset, textcoords="offset points", color=colour, ha=side, va="center")


def band(axes: Axes, x: Sequence[float] | np.ndarray, curves: Any, colour: str, label: str = "", **style: Any) -> None:
    """Mean of the curves of several seeds as a line, and the range between them as a band.

    curves: an array or sequences, [seeds, places]
    """
    values = np.array(curves, dtype=float)
    axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)
    axes.plot(x, values.mean(0), color=colour, label=label, **style)


def spread(
    axes: Axes,
    values: Sequence[float],
    place: float,
    colour: str,
    *,
    upright: bool = False,
    width: float = 8,
    **dot: Any,
) -> None:
    """Mean of the values of several seeds as a dot, and the range between them as a band `width` points wide, at a
    `place` of the y axis; `upright`: of the x axis."""
    for found, style in (
        ([min(values), max(values)], {"alpha": 0.2, "lw": width, "solid_capstyle": "butt"}),
        ([float(np.mean(values))], {"marker": "o", "ls": "", **dot}),
    ):
        places = [place] * len(found)
        axes.plot(*((places, found) if upright else (found, places)), color=colour, **style)


def zero_line(axes: Axes) -> None:
    """A line at 0, where what is compared is equal."""
    axes.axhline(0, color=INK, lw=0.8)


def powers_of_two(axes: Axes, values: Sequence[int]) -> None:
    """A logarithmic x axis with ticks at `values`, written with K and M."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [format_count(value, 1024) for value in values])
    axes.minorticks_off()
