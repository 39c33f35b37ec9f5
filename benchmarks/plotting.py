"""The common style of the plots in the docs: readable on a light and on a dark page."""

import hashlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes

GREY = "#797979"
"""Has a contrast of at least 3 to GitHub's white and to its dark background."""
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "moba", "font.family": "sans-serif", "font.size": 10}
"""Settings for `rc_context`, with which equal results give equal bytes."""


def stamp(text: str) -> str:
    """Description of the result file that a plot was drawn from, kept in the plot's metadata."""
    return f"drawn from results with sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def plain(axes: Axes) -> None:
    """Give the axes grey ticks, a faint grid, and no frame at the top and on the right."""
    axes.tick_params(colors=GREY, length=3, which="both")
    axes.grid(color=GREY, alpha=0.3, lw=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)


def powers_of_two(axes: Axes) -> None:
    """A logarithmic x axis with powers of 2, written out."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def titled(axes: Axes, title: str, label: str = "") -> None:
    """`plain` axes with a title above their left edge, and a label for x."""
    axes.set_title(title, color=GREY, fontsize=10, loc="left")
    axes.set_xlabel(label, color=GREY)
    plain(axes)
