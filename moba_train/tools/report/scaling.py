"""Power laws of the loss in the compute, L = a * C^b, with bootstrap intervals.

Straight lines in logarithms, by least squares (Kaplan et al. 2020, arXiv:2001.08361; for MoBA Lu et al. 2025,
arXiv:2502.13189, section 3.1).

The bootstrap keeps the computes, which the experimenter has chosen, and draws the runs' deviations from the fit with
replacement. Each is divided by sqrt(1 - leverage) first: a fit to few runs goes close by every one of them, so that
intervals of the bare deviations would be too narrow (Davison and Hinkley 1997, section 6.2.3).

Groups of finished runs, such as those of one attention, are fitted one by one; the gap between two groups is that of
their laws.

Shape suffixes: n runs, R fits that are made together (bootstrap samples).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moba_train.errors import UserError
from moba_train.tools.report.scaling_runs import ScalingRun, comparison_warnings

Array = npt.NDArray[np.float64]
FEWEST_RUNS = 3
"""Runs that a line is fitted to: two determine it, and leave nothing to estimate its error from."""
CONFIDENCE = 0.95
"""Share of the bootstrap's samples in the intervals of a report."""


@dataclass(frozen=True)
class PowerLaw:
    """L = a * C^b; arrays of any one shape, one element for each fit."""

    a: Array
    b: Array

    def __call__(self, compute: float | Array) -> Array:
        """Loss at `compute`."""
        return self.a * compute**self.b


@dataclass(frozen=True)
class ScalingFit:
    """A power law fitted to runs, and to the samples of their bootstrap."""

    law: PowerLaw
    """Its arrays are of shape []."""
    samples: PowerLaw
    """Its arrays are of shape [R]."""
    runs: int
    error: float
    """Root mean square of the runs' deviations from the law, in the logarithm of the loss."""

    def interval(self, value: Callable[[PowerLaw], Array], confidence: float) -> tuple[float, float]:
        """Percentile interval of a number of the law."""
        return percentile_interval(value(self.samples), confidence)


def percentile_interval(samples: Array, confidence: float) -> tuple[float, float]:
    """The percentiles of `samples` between which the share `confidence` of them lies."""
    low, high = np.percentile(samples, [50 * (1 - confidence), 50 * (1 + confidence)])
    return float(low), float(high)


def fit_power_law(compute: npt.ArrayLike, loss: npt.ArrayLike, *, resamples: int = 2000, seed: int = 0) -> ScalingFit:
    """Fit `loss` [n] over `compute` [n], both positive. Equal seeds give equal intervals.

    Raises UserError for too few runs, and where all have one compute.
    """
    x_n = np.log(np.asarray(compute, dtype=np.float64))
    y_n = np.log(np.asarray(loss, dtype=np.float64))
    if len(x_n) < FEWEST_RUNS:
        raise UserError(f"{len(x_n)} runs given; allowed: at least {FEWEST_RUNS} for L = a * C^b")
    if np.ptp(x_n) <= 1e-6:  # computes that differ by rounding alone are one
        raise UserError("1 compute given; allowed: at least 2 different ones for L = a * C^b")
    law = _line(x_n, y_n[None])
    fitted_n = np.log(law(np.exp(x_n)))
    deviations_n = y_n - fitted_n
    centred_n = x_n - x_n.mean()
    leverages_n = 1 / len(x_n) + centred_n**2 / (centred_n**2).sum()
    scaled_n = deviations_n / np.sqrt(np.clip(1 - leverages_n, 1e-6, None))
    draws = np.random.default_rng(seed).integers(len(x_n), size=(resamples, len(x_n)))
    samples = _line(x_n, fitted_n + (scaled_n - scaled_n.mean())[draws])
    return ScalingFit(PowerLaw(law.a[0], law.b[0]), samples, len(x_n), float(np.sqrt(np.mean(deviations_n**2))))


def _line(x_n: Array, y_Rn: Array) -> PowerLaw:
    """The laws, of shape [R], whose logarithms are nearest to the rows of `y_Rn`."""
    middle = x_n.mean()
    b_R = y_Rn @ (x_n - middle) / ((x_n - middle) ** 2).sum()
    return PowerLaw(np.exp(y_Rn.mean(1) - b_R * middle), b_R)


FEW_RUNS = 8
"""Below this number of runs, percentile intervals are clearly too narrow (docs/how-to/evaluate.md has the coverage)."""
Interval = tuple[float, float, float]
"""Value, and the ends of its interval."""


@dataclass(frozen=True)
class GroupFit:
    """The fit of one metric over one compute for the runs of one group."""

    metric: str
    compute: str
    group: str
    runs: tuple[ScalingRun, ...]
    fit: ScalingFit

    @property
    def points(self) -> list[tuple[float, float]]:
        """(compute, loss) of each run."""
        return [(run.compute[self.compute], run.losses[self.metric]) for run in self.runs]

    def number(self, value: Callable[[PowerLaw], Any]) -> Interval:
        """A number of the law with its interval."""
        return float(value(self.fit.law)), *self.fit.interval(value, CONFIDENCE)

    def loss_at(self, compute: float) -> Interval:
        """Loss of the law at a compute, with its interval."""
        return self.number(lambda law: law(compute))


@dataclass(frozen=True)
class Gap:
    """Difference of two groups' laws at the largest compute that both reach."""

    fit: GroupFit
    reference: GroupFit

    @property
    def compute(self) -> float:
        """Largest compute that the runs of both laws reach, in PFLOP/s-days."""
        return min(max(point[0] for point in one.points) for one in (self.fit, self.reference))

    @property
    def value(self) -> Interval:
        """Loss of the group minus that of the reference, in nats per token."""
        compute = self.compute
        one, other = self.fit.fit, self.reference.fit
        low, high = percentile_interval(one.samples(compute) - other.samples(compute), CONFIDENCE)
        return float(one.law(compute) - other.law(compute)), low, high


@dataclass(frozen=True)
class ScalingReport:
    """All fits, gaps and warnings."""

    fits: list[GroupFit]
    gaps: list[Gap]
    warnings: list[str]


def fit_runs(
    runs: Sequence[ScalingRun],
    metrics: Sequence[str],
    computes: Sequence[str],
    *,
    resamples: int = 2000,
) -> ScalingReport:
    """Fit every metric over every compute, for each group of runs. Raises UserError for a group with too few runs."""
    groups = list(dict.fromkeys(run.group for run in runs))
    fits = []
    gaps = []
    for metric in metrics:
        for compute in computes:
            found = []
            for index, group in enumerate(groups):
                members = tuple(run for run in runs if run.group == group)
                points = [run.compute[compute] for run in members], [run.losses[metric] for run in members]
                try:
                    # Groups are independent: with equal draws their errors would cancel in the gap.
                    fit = fit_power_law(*points, resamples=resamples, seed=index)
                except UserError as error:
                    raise UserError(f"group {group}: {error}; groups: {_counted(runs)}") from None
                found.append(GroupFit(metric, compute, group, members, fit))
            fits += found
            reference = next((one for one in found if one.group == "full"), found[0])
            gaps += [Gap(one, reference) for one in found if one is not reference]
    warnings = list(comparison_warnings(runs))
    few = [group for group in groups if sum(run.group == group for run in runs) < FEW_RUNS]
    if few:
        warnings.append(
            f"fewer than {FEW_RUNS} runs in {', '.join(few)}: intervals are too narrow, see docs/how-to/evaluate.md"
        )
    return ScalingReport(fits, gaps, warnings)


def _counted(runs: Sequence[ScalingRun]) -> str:
    groups = [run.group for run in runs]
    return ", ".join(f"{group} ({groups.count(group)})" for group in dict.fromkeys(groups))
