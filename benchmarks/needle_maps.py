"""Needle maps of a model with MoBA and with full attention, and how many heads select the needle's block.

    python -m benchmarks.pictures smollm2-needle --results RESULT.json --output PLOT.svg

The result file is that of `smollm2_retrieval`.
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from moba_train.config.base import format_count

TITLES = {"moba": "MoBA: depth of the needle, %", "full": "full attention: depth, %"}


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Share of needles found by length and depth, with each attention; share of heads by length and layer."""
    found = content["results"]["extended"]["needle"]
    lengths = [format_count(length, 1024) for length in found["lengths"]]
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    for axes, (attention, title) in zip(panels, TITLES.items(), strict=False):
        shares = np.array(found["maps"][attention]["passed"]).T
        axes.imshow(shares, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            colour = "white" if share > 0.6 else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=colour)
        axes.set_yticks(range(len(found["depths"])), [f"{depth:g}" for depth in found["depths"]])
        axes.set_ylabel(title)
    by_layer = np.array(found["maps"]["moba"]["selected"], dtype=float).T
    image = panels[2].imshow(np.ma.masked_invalid(by_layer), vmin=0, vmax=1, aspect="auto")
    panels[2].set_ylabel("layer: heads that select its block")
    for axes in panels:
        axes.grid(visible=False)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_xlabel("tokens")
    figure.colorbar(image, ax=panels[2], label="share")
