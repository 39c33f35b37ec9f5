"""Diagrams that explain MoBA: how a query chooses its blocks, which blocks are attended to, and the kernels.

python -m benchmarks.pictures moba-selection moba-pattern moba-kernels
"""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.plotting import BLUE, FULL, GREEN, GREY, INK, MOBA

Point = tuple[float, float]
"""Units of a sheet: x, or width; y, or height."""

SCORES = (0.3, 2.1, -0.7, 1.4)
"""Gate scores of the earlier blocks in the diagram of the selection."""
BLOCKS = 12
QUERIES = 8
"""Queries of a block in the diagram of the patterns, each of which makes its own choice."""
SELECTED = {2: 0, 3: 0, 4: 0, 5: 1, 6: 0, 7: 2}
"""Earlier block that a query of the diagram of the kernels selects; the first two have none."""


def sheet(figure: Figure, width: float, height: float) -> Axes:
    """Axes without ticks, `width` by `height` units, with y downwards."""
    axes = figure.subplots()
    axes.axis("off")
    axes.set_xlim(-0.2, width + 0.2)
    axes.set_ylim(height, 0)
    return axes


def write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text that begins at a point, centred in height."""
    axes.text(x, y, text, **{"va": "center", **style})


def cell(axes: Axes, corner: Point, size: Point, colour: str, shade: float, edge: str = "#cccccc") -> None:
    """A rectangle with a tint, from 0 to 1. corner: upper left"""
    fill = to_rgba(colour, shade)
    axes.add_patch(Rectangle(corner, *size, facecolor=fill, edgecolor=edge, lw=0.8, clip_on=False))


def box(axes: Axes, corner: Point, size: Point, text: str, colour: str) -> None:
    """A cell with text in its middle."""
    cell(axes, corner, size, colour, 0.15, colour)
    write(axes, corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center")


def arrow(axes: Axes, start: Point, end: Point, colour: str = GREY) -> None:
    """An arrow between two points."""
    style = {"arrowstyle": "->", "color": colour, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)


def draw_selection(figure: Figure) -> None:
    """From keys to the output of one query: mean keys, gate scores, the selected blocks, one softmax."""
    axes = sheet(figure, 100, 52)
    best = sorted(range(len(SCORES)), key=lambda block: SCORES[block])[-2:]
    steps = ("keys", "mean key", "gate: q · mean key", "attend, topk 3", "merge")
    for y, text in zip((5, 14.5, 24, 34.5, 47), steps, strict=True):
        write(axes, 0, y, text)
    for block in range(5):
        left, middle = 19 + 16 * block, 26 + 16 * block
        own = block == len(SCORES)
        colour = GREEN if own else MOBA if block in best else GREY
        write(axes, middle, 0, "own block" if own else f"block {block}", ha="center", color=colour)
        for key in range(4):
            after = own and key > 2
            box(axes, (left + 3.5 * key, 2.5), (3.5, 5), "", "#cccccc" if after else colour)
            if own and key == 2:
                write(axes, left + 3.5 * key + 1.75, 5, "q", ha="center", weight="bold")
        if own:
            write(axes, middle, 19.5, "always selected,\nno score needed;\nkeys up to q", ha="center", color=colour)
        else:
            arrow(axes, (middle, 8), (middle, 11.5))
            box(axes, (middle - 1.75, 12), (3.5, 5), "", colour)
            arrow(axes, (middle, 17.5), (middle, 21.5))
            write(axes, middle, 24, f"{SCORES[block]:.1f}", ha="center", color=colour, weight="bold")
        if not own and block not in best:
            write(axes, middle, 34.5, "not read", ha="center", color=colour)
            continue
        arrow(axes, (middle, 26.5), (middle, 31.5), colour)
        box(axes, (left, 32), (14, 5), "out, lse", colour)
        arrow(axes, (middle, 37.5), (58 + 12 * (middle / 58 - 1), 43.5), colour)
    box(axes, (38, 44), (40, 6), "online softmax: output of q", INK)


def draw_patterns(figure: Figure) -> None:
    """Causal grids of query blocks and key blocks: full attention, MoBA, and a sliding window."""
    full = np.tril(np.ones((BLOCKS, BLOCKS)))
    window = full - np.tril(full, -3)
    panels = figure.subplots(1, 3, sharey=True)
    shown = (("full attention", full, FULL), ("MoBA, topk 3", _chosen(), MOBA), ("sliding window", window, BLUE))
    for axes, (text, shares, colour) in zip(panels, shown, strict=True):
        for query, key in np.argwhere(full):
            cell(axes, (key, query), (1, 1), colour, shares[query, key])
        axes.set_xlim(0, BLOCKS)
        axes.set_ylim(BLOCKS, 0)
        axes.set_aspect("equal")
        axes.grid(visible=False)
        axes.set_xticks(np.arange(0.5, BLOCKS, 2), range(0, BLOCKS, 2))
        axes.set_yticks(np.arange(0.5, BLOCKS, 2), range(0, BLOCKS, 2))
        axes.set_xlabel("key block")
        words = f"{text}\n{shares.sum():.0f} of {full.sum():.0f}\nblock pairs"
        write(axes, BLOCKS, 0.2, words, ha="right", va="top", color=colour)
    panels[0].set_ylabel("query block")


def _chosen() -> np.ndarray:
    """Share of a block's queries that attend to each key block: always to their own, and to the two earlier ones whose
    score is highest. Scores are random, and similar for neighbouring queries."""
    random = np.random.default_rng(4)
    shares = np.eye(BLOCKS)
    for block in range(1, BLOCKS):
        scores = 2 * random.standard_normal(block) + random.standard_normal((QUERIES, block))
        for best in np.argsort(-scores, axis=1)[:, :2]:
            shares[block, best] += 1 / QUERIES
    return shares


def draw_kernels(figure: Figure) -> None:
    """The pipeline of the kernels by an example of four blocks of two tokens with topk 2, and the backward pass."""
    axes = sheet(figure, 100, 62)
    steps = (
        (0, "1 Select", "gate: q · mean key of\neach block, best topk - 1"),
        (33, "2 Invert", "counting sort: the queries\nthat selected each block"),
        (60, "3 Attend", "rows of one list, all heads\nof a group, × a block's keys"),
        (86, "4 Combine", "online softmax,\nfixed order"),
    )
    for x, title, text in steps:
        write(axes, x, 1, title, weight="bold")
        write(axes, x, 5.2, text, fontsize=8)
    for query in range(8):
        y = 11 + 3.2 * query
        write(axes, 3, y + 1.6, f"q{query}", ha="right")
        for block in range(query // 2 + 1):
            colour = GREEN if block == query // 2 else BLUE if block == SELECTED.get(query) else GREY
            cell(axes, (4 + 3.2 * block, y), (3.2, 3.2), colour, 0 if colour == GREY else 0.4)
    for block in range(4):
        write(axes, 5.6 + 3.2 * block, 9.6, str(block), ha="center")
    write(axes, 18.5, 17.5, "selected", color=BLUE)
    write(axes, 18.5, 24.5, "own block,\ncausal", color=GREEN)
    arrow(axes, (27, 20.5), (32, 20.5))
    for block in range(4):
        rows = [query for query, selected in SELECTED.items() if selected == block]
        write(axes, 33, 13 + 6 * block, f"block {block}", color=BLUE)
        for place, query in enumerate(rows):
            box(axes, (40 + 3.8 * place, 11.2 + 6 * block), (3.8, 3.6), f"q{query}", MOBA)
        if not rows:
            write(axes, 41, 13 + 6 * block, "not selected")
    arrow(axes, (54, 20.5), (59, 20.5))
    for place, query in enumerate(query for query, selected in SELECTED.items() if selected == 0):
        box(axes, (60, 11 + 3.6 * place), (6, 3.6), f"q{query}", MOBA)
    write(axes, 68, 18.2, "×", ha="center")
    box(axes, (70, 11), (10, 14.4), "k, v of\nblock 0", BLUE)
    write(axes, 60, 29.5, "partial (out, lse) of each row;\nown blocks: causal, no lists", fontsize=8)
    arrow(axes, (81, 18.2), (85, 18.2))
    box(axes, (86, 11), (14, 4), "q4: block 2", GREEN)
    write(axes, 93, 16.8, "+", ha="center")
    box(axes, (86, 18.5), (14, 4), "q4: block 0", BLUE)
    arrow(axes, (93, 23), (93, 26.5))
    box(axes, (86, 27), (14, 4), "out, lse of q4", INK)
    _draw_backward(axes)


def _draw_backward(axes: Axes) -> None:
    axes.plot([0, 100], [39, 39], color="#cccccc", lw=0.8)
    write(axes, 0, 42, "Backward: the same lists, no atomics", weight="bold")
    write(axes, 48, 42, "delta = sum(out · do) of each row; do: gradient of out", fontsize=8)
    for x, title in ((0, "dk, dv: keys stay, rows pass"), (60, "dq: row tiles again")):
        write(axes, x, 46, title)
    box(axes, (0, 48.5), (10, 12), "k, v of\nblock 0", BLUE)
    for place, query in enumerate((2, 3, 4, 6)):
        box(axes, (13 + 10 * place, 48.5), (10, 4), f"q, do {query}", MOBA)
    arrow(axes, (53, 54), (13, 54))
    equations = "p = exp(q kᵀ - lse), ds = p (do vᵀ - delta)\ndv += pᵀ do, dk += dsᵀ q; own rows as well"
    write(axes, 13, 58.5, equations, fontsize=8)
    for place, query in enumerate((2, 3, 4, 6)):
        box(axes, (60, 48.5 + 3 * place), (8, 3), f"q, do {query}", MOBA)
    write(axes, 69.2, 54.5, "×", ha="center")
    box(axes, (70.5, 48.5), (8, 12), "k, v of\nblock 0", BLUE)
    arrow(axes, (79, 54.5), (81.6, 54.5))
    box(axes, (82, 48.5), (18, 4), "partial dq = ds k", BLUE)
    arrow(axes, (91, 53), (91, 56))
    box(axes, (82, 56.5), (18, 4), "dq: own + partials", INK)
