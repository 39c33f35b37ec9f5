"""F16: what part of the gap between MoBA and full attention is inference, from the models of F2, F8 and F6.

A model that was trained with MoBA is behind one that was trained with full attention. Run with full attention, the same
weights make up for a part of it: that part is what the gate leaves out at inference, and the rest is what the weights
lack. The opposite exchange, MoBA in a model that full attention trained, is given beside it.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from benchmarks.plotting import FULL, MOBA
from experiments.comparison import mean_of
from experiments.figure import Figure, Finding, Result
from experiments.readings import validation_loss
from experiments.results import read_results
from experiments.third_cliff_findings import fine_tuned_alike
from experiments.trailing import pairs_of
from experiments.trained_with import LOSSES, evaluated
from experiments.versions import best_pairs, full_in_place, insertion_costs

_RESULTS = Path(__file__).parent / "results"
_CLIFFS = {"third-cliff": "MoBA 64/8", "third-cliff-smaller-blocks": "MoBA 32/16"}


class Exchange(NamedTuple):
    """Losses of a pair of models that differ in the attention they were trained with, nats."""

    full: float
    """Trained and run with full attention."""
    moba: float
    """Trained and run with MoBA."""
    moba_as_full: float
    """Trained with MoBA, run with full attention."""
    full_as_moba: float = math.nan
    """Trained with full attention, run with MoBA; NaN where that was not evaluated."""


class InferenceGap(Figure):
    """Part of MoBA's gap that is inference: what the same weights make up for when they run with full attention."""

    name = "inference"
    source = "trailing"
    title = "F16. What part of the gap is inference"

    def find(self, results: Sequence[Result]) -> Finding:
        """Means over pairs of models, with intervals over these."""
        rows = [
            [
                "models",
                "pairs",
                "gap",
                "run with full, the gap is",
                "inference",
                "share",
                "MoBA in full's weights costs",
            ]
        ]
        for label, pairs in exchanges(results).items():
            made = np.array(pairs)
            gap = made[:, 1] - made[:, 0]
            stays = made[:, 2] - made[:, 0]
            share = f"{100 * (1 - stays.mean() / gap.mean()):.0f} %"
            cells = [_mean_text(gap), _mean_text(stays), _mean_text(gap - stays), share]
            inserted = made[:, 3] - made[:, 0]
            rows.append([label, str(len(pairs)), *cells, _mean_text(inserted[np.isfinite(inserted)])])
        return Finding([], rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """The two parts of the gap of each group of models, in per cent of it."""
        axes = canvas.subplots()
        groups = exchanges(results)
        names = []
        for place, (label, pairs) in enumerate(groups.items()):
            full, moba, as_full, _ = np.array(pairs).mean(0)
            stays = 100 * float((as_full - full) / (moba - full))
            axes.barh(place, stays, 0.6, color=FULL)
            axes.barh(place, 100 - stays, 0.6, left=stays, color=MOBA)
            names.append(f"{label}: {moba - full:.2f} nats")
        axes.set_yticks(range(len(groups)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 100)
        axes.set_xlabel("MoBA above full attention, % of the gap")
        parts = {"its weights lack": FULL, "running with full attention makes up for": MOBA}
        handles = [Patch(color=colour, label=label) for label, colour in parts.items()]
        canvas.legend(handles=handles, loc="outside upper left", ncols=2)


def exchanges(results: Sequence[Result]) -> dict[str, list[Exchange]]:
    """Pairs of models by the losses that they are compared in; results: of F2. F8's and F6's are read from their
    files."""
    found = {}
    for loss, label in LOSSES.items():
        pairs = [
            Exchange(*(evaluated(pair[trained], loss, run) for trained, run in _RUNS)) for pair in pairs_of(results)
        ]
        found[f"F2, 32K, {label}"] = pairs
    found["F8, 8K, validation loss"] = list(_versions(read_results(_RESULTS / "versions.json")))
    for file, blocks in _CLIFFS.items():
        tuned = read_results(_RESULTS / f"{file}.json")
        found[f"F6, {blocks}, four masks"] = [Exchange(*losses) for losses in fine_tuned_alike(tuned)]
    return {label: pairs for label, pairs in found.items() if pairs}


_RUNS = (("full", "full"), ("moba", "moba"), ("moba", "full"), ("full", "moba"))
"""Trained with and run with, in the order of `Exchange`."""


def _versions(results: Sequence[Result]) -> Iterator[Exchange]:
    """v2 and full attention at their best rates; the model of one size had v2 inserted."""
    costs = insertion_costs(results)
    parents = {result["parent"] for result in results if result["name"] == "inserted-moba"}
    for full, moba in best_pairs(results, "moba"):
        change = full_in_place(moba)
        inserted = validation_loss(full) + costs["moba"][0] if full["name"] in parents else math.nan
        if change is not None:
            yield Exchange(validation_loss(full), validation_loss(moba), validation_loss(moba) + change, inserted)


def _mean_text(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> str:
    """Mean with its interval; a dash for none."""
    if len(values) < 2:
        return f"{values[0]:+.4f}" if len(values) else "–"
    return str(mean_of(values.tolist()))
