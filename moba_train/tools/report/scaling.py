"""Power laws of the loss in the compute, L = c + a * C^b, with bootstrap intervals.

Least squares in the logarithm of the loss. Without `c` (Kaplan et al. 2020, arXiv:2001.08361; for MoBA Lu et al. 2025,
arXiv:2502.13189, section 3.1) that is a straight line in logarithms. With it, an irreducible loss (Hoffmann et al.
2022, arXiv:2203.15556), the law is fitted by Levenberg-Marquardt.

The bootstrap keeps the computes, which the experimenter has chosen, and draws the runs' deviations from the fit with
replacement. Each is divided by sqrt(1 - leverage) first: a fit to few runs goes close by every one of them, so that
intervals of the bare deviations would be too narrow (Davison and Hinkley 1997, section 6.2.3).

Groups of finished runs, such as those of one attention, are fitted one by one; the gap between two groups is that of
their laws.

Shape suffixes: n runs, R fits that are made together (bootstrap samples, or initial values), p parameters.
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
FEWEST_RUNS_IRREDUCIBLE = 5
"""Runs that a power law above an irreducible loss, three parameters, is fitted to."""
CONFIDENCE = 0.95
"""Share of the bootstrap's samples in the intervals of a report."""
_ITERATIONS = 100
_SHARES = (0.05, 0.3, 0.6, 0.8, 0.9, 0.97)
"""Initial irreducible losses, as shares of the lowest loss."""


@dataclass(frozen=True)
class PowerLaw:
    """L = c + a * C^b; arrays of any one shape, one element for each fit."""

    a: Array
    b: Array
    c: Array

    def __call__(self, compute: float) -> Array:
        """Loss at `compute`."""
        return self.c + self.a * compute**self.b


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


def fit_power_law(
    compute: npt.ArrayLike, loss: npt.ArrayLike, *, irreducible: bool = False, resamples: int = 2000, seed: int = 0
) -> ScalingFit:
    """Fit `loss` [n] over `compute` [n], both positive. Equal seeds give equal intervals.

    Raises UserError for too few runs, or too few of different compute.
    """
    x_n = np.log(np.asarray(compute, dtype=np.float64))
    y_n = np.log(np.asarray(loss, dtype=np.float64))
    _check(x_n, irreducible)
    middle = x_n.mean()
    x_n = x_n - middle  # a is then the loss among the runs, which is far better determined than the loss at C = 1
    parameters = _fit_irreducible(x_n, y_n[None], _initial(x_n, y_n)) if irreducible else _fit_line(x_n, y_n[None])
    fitted_n = _predict(x_n, parameters)[0]
    deviations_n = y_n - fitted_n
    scaled_n = deviations_n / np.sqrt(np.clip(1 - _leverages(x_n, parameters), 1e-6, None))
    draws = np.random.default_rng(seed).integers(len(x_n), size=(resamples, len(x_n)))
    drawn_Rn = fitted_n + (scaled_n - scaled_n.mean())[draws]
    start = np.repeat(parameters, resamples, axis=0)
    samples = _fit_irreducible(x_n, drawn_Rn, start[:, None]) if irreducible else _fit_line(x_n, drawn_Rn)
    law = _power_law(parameters, middle)
    best = PowerLaw(law.a[0], law.b[0], law.c[0])
    return ScalingFit(best, _power_law(samples, middle), len(x_n), float(np.sqrt(np.mean(deviations_n**2))))


def _check(x_n: Array, irreducible: bool) -> None:
    fewest = FEWEST_RUNS_IRREDUCIBLE if irreducible else FEWEST_RUNS
    what = "L = c + a * C^b" if irreducible else "L = a * C^b"
    if len(x_n) < fewest:
        raise UserError(f"{len(x_n)} runs given; allowed: at least {fewest} for {what}")
    # Computes that differ by rounding alone are one.
    different = 1 + int((np.diff(np.sort(x_n)) > 1e-6).sum())
    parameters = 3 if irreducible else 2
    if different < parameters:
        raise UserError(f"{different} different computes given; allowed: at least {parameters} for {what}")


def _power_law(parameters_Rp: Array, middle: float) -> PowerLaw:
    """The law of (log a at the middle, b, log c) as it is written."""
    log_a, b, log_c = parameters_Rp.T
    return PowerLaw(np.exp(log_a - b * middle), b, np.exp(log_c))


def _predict(x_n: Array, parameters_Rp: Array) -> Array:
    """log L, [R, n]."""
    log_a, b, log_c = parameters_Rp.T[..., None]
    return np.logaddexp(log_a + b * x_n, log_c)


def _fit_line(x_n: Array, y_Rn: Array) -> Array:
    """(log a, b, -inf) of each row of `y_Rn`, [R, 3]."""
    b_R = (y_Rn * x_n).sum(1) / (x_n**2).sum()
    return np.stack([y_Rn.mean(1), b_R, np.full_like(b_R, -np.inf)], axis=1)


def _initial(x_n: Array, y_n: Array) -> Array:
    """Initial values for one set of runs: lines through the losses above several irreducible ones, [1, S, 3]."""
    lowest = y_n.min()
    found = []
    for share in _SHARES:
        above_1n = np.log(np.exp(y_n) - share * np.exp(lowest))[None]
        (line_p,) = _fit_line(x_n, above_1n)
        found.append([line_p[0], line_p[1], lowest + np.log(share)])
    return np.array([found])


def _fit_irreducible(x_n: Array, y_Rn: Array, initial_RSp: Array) -> Array:
    """(log a, b, log c) of each row of `y_Rn`, [R, 3]: the best of what the S initial values lead to."""
    fits, starts, _ = initial_RSp.shape
    y_Nn = np.repeat(y_Rn, starts, axis=0)
    parameters_Np, squares_N = _levenberg_marquardt(x_n, y_Nn, initial_RSp.reshape(-1, 3))
    best_R = squares_N.reshape(fits, starts).argmin(1)
    return parameters_Np.reshape(fits, starts, 3)[np.arange(fits), best_R]


def _levenberg_marquardt(x_n: Array, y_Nn: Array, parameters_Np: Array) -> tuple[Array, Array]:
    """Parameters [N, 3] and sums of squares [N] of N independent fits."""
    highest_N = y_Nn.min(1)  # c is below every loss, and where it is far below it makes no difference
    damping_N = np.full(len(y_Nn), 1e-3)
    squares_N = ((y_Nn - _predict(x_n, parameters_Np)) ** 2).sum(1)
    for _ in range(_ITERATIONS):
        jacobian_Nnp = _jacobian(x_n, parameters_Np)
        deviations_Nn = y_Nn - _predict(x_n, parameters_Np)
        normal_Npp = np.einsum("inp,inq->ipq", jacobian_Nnp, jacobian_Nnp)
        gradient_Np = np.einsum("inp,in->ip", jacobian_Nnp, deviations_Nn)
        diagonal_Np = np.einsum("ipp->ip", normal_Npp)
        damped_Npp = normal_Npp + np.eye(3) * (damping_N[:, None] * diagonal_Np + 1e-12)[:, None]
        tried_Np = parameters_Np + np.linalg.solve(damped_Npp, gradient_Np[..., None])[..., 0]
        tried_Np[:, 2] = np.clip(tried_Np[:, 2], highest_N - 20, highest_N)
        tried_N = ((y_Nn - _predict(x_n, tried_Np)) ** 2).sum(1)
        better_N = tried_N < squares_N
        parameters_Np = np.where(better_N[:, None], tried_Np, parameters_Np)
        squares_N = np.where(better_N, tried_N, squares_N)
        damping_N = np.clip(np.where(better_N, damping_N / 3, damping_N * 4), 1e-12, 1e12)
    return parameters_Np, squares_N


def _jacobian(x_n: Array, parameters_Rp: Array) -> Array:
    """Derivatives of `_predict` by the parameters, [R, n, 3]."""
    log_a, b, _ = parameters_Rp.T[..., None]
    share_Rn = np.exp(log_a + b * x_n - _predict(x_n, parameters_Rp))  # of the power law in the loss
    return np.stack([share_Rn, share_Rn * x_n, 1 - share_Rn], axis=-1)


def _leverages(x_n: Array, parameters_1p: Array) -> Array:
    """Share of each run's deviation that the fit follows, [n]; they add up to the number of parameters."""
    (jacobian_np,) = _jacobian(x_n, parameters_1p)
    return np.einsum("np,pn->n", jacobian_np, np.linalg.pinv(jacobian_np))


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
    irreducible: bool


def fit_runs(
    runs: Sequence[ScalingRun],
    metrics: Sequence[str],
    computes: Sequence[str],
    *,
    irreducible: bool = False,
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
                    fit = fit_power_law(*points, irreducible=irreducible, resamples=resamples, seed=index)
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
    return ScalingReport(fits, gaps, warnings, irreducible)


def _counted(runs: Sequence[ScalingRun]) -> str:
    groups = [run.group for run in runs]
    return ", ".join(f"{group} ({groups.count(group)})" for group in dict.fromkeys(groups))
