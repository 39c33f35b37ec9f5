"""The loss of finished runs as a power law of their compute, group by group, and the gaps between groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moba_train.errors import UserError
from moba_train.report.scaling_fit import PowerLaw, ScalingFit, fit_power_law, percentile_interval
from moba_train.report.scaling_runs import ScalingRun, comparison_warnings

FEW_RUNS = 8
"""Below this number of runs, percentile intervals are clearly too narrow (docs/evaluation.md has the coverage)."""
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
    confidence: float

    @property
    def points(self) -> list[tuple[float, float]]:
        """(compute, loss) of each run."""
        return [(run.compute[self.compute], run.losses[self.metric]) for run in self.runs]

    def number(self, value: Callable[[PowerLaw], Any]) -> Interval:
        """A number of the law with its interval."""
        return float(value(self.fit.law)), *self.fit.interval(value, self.confidence)

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
        """In PFLOP/s-days."""
        return min(max(point[0] for point in one.points) for one in (self.fit, self.reference))

    @property
    def value(self) -> Interval:
        """Loss of the group minus that of the reference, in nats per token."""
        compute = self.compute
        one, other = self.fit.fit, self.reference.fit
        low, high = percentile_interval(one.samples(compute) - other.samples(compute), self.fit.confidence)
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
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
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
                    fit = fit_power_law(*points, irreducible=irreducible, resamples=resamples, seed=seed + index)
                except UserError as error:
                    raise UserError(f"group {group}: {error}; groups: {_counted(runs)}") from None
                found.append(GroupFit(metric, compute, group, members, fit, confidence))
            fits += found
            reference = next((one for one in found if one.group == "full"), found[0])
            gaps += [Gap(one, reference) for one in found if one is not reference]
    warnings = list(comparison_warnings(runs))
    few = [group for group in groups if sum(run.group == group for run in runs) < FEW_RUNS]
    if few:
        warnings.append(
            f"fewer than {FEW_RUNS} runs in {', '.join(few)}: intervals are too narrow, see docs/evaluation.md"
        )
    return ScalingReport(fits, gaps, warnings, irreducible)


def _counted(runs: Sequence[ScalingRun]) -> str:
    groups = [run.group for run in runs]
    return ", ".join(f"{group} ({groups.count(group)})" for group in dict.fromkeys(groups))
