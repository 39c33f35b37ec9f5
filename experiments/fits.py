"""Losses of MoBA and full attention over compute: pairs, power laws and trends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.comparison import CONFIDENCE, POWER, Cell, Estimate, t_quantile
from experiments.figure import Result
from experiments.readings import Losses
from moba_train.tools.report.scaling import FEWEST_RUNS, ScalingFit, fit_power_law, percentile_interval

AXES = {"6ND": "6ND", "real": "real FLOPs"}
"""Ways to count compute: key in results, label."""


def attention_and_size(name: str) -> tuple[str, str]:
    """Attention and size of an arm called `moba-10m`."""
    attention, _, size = name.rpartition("-")
    return attention, size


def paired(
    results: Sequence[Result], value: Callable[[Result], float], by_sequence: Callable[[Result], Losses]
) -> list[Cell]:
    """A cell for each result, by attention, in blocks of one size and one seed."""
    cells = []
    for result in results:
        attention, size = attention_and_size(result["name"])
        cells.append(Cell(attention, f"{size}, seed {result['seed']}", value(result), by_sequence(result)))
    return cells


@dataclass(frozen=True)
class Fits:
    """Power laws of the loss over compute, by attention."""

    axis: str
    by_attention: dict[str, ScalingFit]

    def slopes(self) -> Estimate:
        """How far MoBA's exponent is above full attention's."""
        moba, full = (self.by_attention[name] for name in ("moba", "full"))
        return _bootstrapped(float(moba.law.b - full.law.b), moba.samples.b - full.samples.b)

    def gap(self, compute: float, tokens: float = 1.0) -> Estimate:
        """Gap of MoBA's law above full attention's, in per cent, at this compute of full attention and `tokens`
        times as much of MoBA."""
        moba, full = (self.by_attention[name] for name in ("moba", "full"))
        value, samples = (
            100 * (ours(tokens * compute) / theirs(compute) - 1)
            for ours, theirs in ((moba.law, full.law), (moba.samples, full.samples))
        )
        return _bootstrapped(float(value), samples)

    def to_json(self) -> dict[str, Any]:
        """Parameters with their intervals."""
        return {
            name: {
                key: [float(getattr(fit.law, key)), *percentile_interval(getattr(fit.samples, key), CONFIDENCE)]
                for key in ("a", "b")
            }
            for name, fit in self.by_attention.items()
        }

    def rows(self) -> list[list[str]]:
        """A line of a table for each attention."""
        found = []
        for name, numbers in self.to_json().items():
            cells = [f"{value:.4g} [{low:.4g}, {high:.4g}]" for value, low, high in numbers.values()]
            found.append([f"{name} over {AXES[self.axis]}", *cells])
        return found


def fit(results: Sequence[Result], value: Callable[[Result], float], axis: str) -> Fits | None:
    """Laws of both attentions; None where one has runs of fewer than three sizes.

    Models of one size and seed read the same text, so that their losses deviate together. Where every run has its
    partner, a sample of the bootstrap draws the same runs of both attentions.
    """
    runs = {name: _by_size_and_seed(results, name) for name in ("full", "moba")}
    if any(len({size for size, _ in own}) < FEWEST_RUNS for own in runs.values()):
        return None
    in_pairs = runs["full"].keys() == runs["moba"].keys()
    found = {}
    for index, (name, own) in enumerate(runs.items()):
        ordered = [own[key] for key in sorted(own)]
        compute = [result["compute"][axis] for result in ordered]
        found[name] = fit_power_law(compute, list(map(value, ordered)), seed=0 if in_pairs else index)
    return Fits(axis, found)


def _by_size_and_seed(results: Sequence[Result], attention: str) -> dict[tuple[str, int], Result]:
    found = {}
    for result in results:
        own, size = attention_and_size(result["name"])
        if own == attention:
            found[size, result["seed"]] = result
    return found


def _bootstrapped(value: float, samples: npt.NDArray[np.float64]) -> Estimate:
    low, high = percentile_interval(samples, CONFIDENCE)
    normal = 10**6
    power = (t_quantile((1 + CONFIDENCE) / 2, normal) + t_quantile(POWER, normal)) * float(samples.std())
    return Estimate(value, low, high, power)


def trend(results: Sequence[Result], value: Callable[[Result], float]) -> Estimate | None:
    """Slope of the gap between MoBA and full attention over the logarithm (base 10) of 6ND, by least squares over
    pairs of one size and seed; None with fewer than three pairs or one size."""
    by_block: dict[tuple[str, int], dict[str, Result]] = {}
    for result in results:
        attention, size = attention_and_size(result["name"])
        by_block.setdefault((size, result["seed"]), {})[attention] = result
    pairs = [pair for pair in by_block.values() if {"moba", "full"} <= pair.keys()]
    x = np.log10([pair["full"]["compute"]["6ND"] for pair in pairs])
    y = np.array([value(pair["moba"]) - value(pair["full"]) for pair in pairs])
    if len(pairs) < 3 or np.ptp(x) < 1e-6:
        return None
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    freedom = len(pairs) - 2
    residuals = y - y.mean() - slope * centred
    error = float(np.sqrt(residuals @ residuals / freedom / (centred @ centred)))
    half = error * t_quantile((1 + CONFIDENCE) / 2, freedom)
    return Estimate(slope, slope - half, slope + half, half + error * t_quantile(POWER, freedom))
