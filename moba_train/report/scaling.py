"""`moba-train fit-scaling`: the loss of finished runs as a power law of their compute, group by group."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moba_train.errors import UserError
from moba_train.report.scaling_fit import PowerLaw, ScalingFit, fit_power_law, percentile_interval
from moba_train.report.scaling_runs import ScalingRun, comparison_warnings
from moba_train.telemetry.atomic import write_atomically

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


def describe(report: ScalingReport) -> Iterator[str]:
    """Lines for the terminal."""
    confidence = f"{report.fits[0].confidence:.0%}"
    law = "L = c + a * C^b" if report.irreducible else "L = a * C^b"
    yield f"{law}, C in PFLOP/s-days, intervals of {confidence}"
    yield f"{'metric':<15}{'C':<6}{'group':<18}{'runs':>5}{'a':>27}{'b':>30}" + f"{'c':>27}" * report.irreducible
    for one in report.fits:
        cells = [_cell(one.number(lambda law: law.a), ".4g"), _cell(one.number(lambda law: law.b), ".4f")]
        line = f"{one.metric:<15}{one.compute:<6}{one.group:<18}{len(one.runs):>5}{cells[0]:>27}{cells[1]:>30}"
        yield line + (f"{_cell(one.number(lambda law: law.c), '.4g'):>27}" if report.irreducible else "")
    if any(one.compute == "real" for one in report.fits):
        sources = dict.fromkeys(run.documents for one in report.fits for run in one.runs)
        yield f"real FLOPs count {'; '.join(sources)}"
    for gap in report.gaps:
        yield (
            f"{gap.fit.metric} of {gap.fit.group} above {gap.reference.group} at {gap.fit.compute} "
            f"{gap.compute:.3g}: {_cell(gap.value, '+.4f')}"
        )
    yield from (f"warning: {warning}" for warning in report.warnings)


def _cell(value: Interval, digits: str) -> str:
    return f"{value[0]:{digits}} [{value[1]:{digits}}, {value[2]:{digits}}]"


def write_report(report: ScalingReport, folder: Path) -> list[Path]:
    """Write `scaling.json` and `scaling.png` into `folder`. Returns their paths."""
    from moba_train.report.scaling_plot import draw_scaling  # matplotlib is slow to import

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "scaling.json"
    write_atomically(target, json.dumps(report_json(report), indent=1) + "\n")
    return [target, draw_scaling(report.fits, folder / "scaling.png")]


def report_json(report: ScalingReport) -> dict[str, Any]:
    """The report as JSON values."""
    runs = {run.folder: run for fit in report.fits for run in fit.runs}
    return {
        "format": 1,
        "law": "c + a * C^b" if report.irreducible else "a * C^b",
        "unit": "PFLOP/s-days",
        "confidence": report.fits[0].confidence,
        "runs": [
            {
                "folder": str(run.folder),
                "group": run.group,
                "parameters": run.parameters,
                "tokens": run.tokens,
                "compute": run.compute,
                "losses": run.losses,
                "documents": run.documents,
            }
            for run in runs.values()
        ],
        "fits": [_fit_json(one, report.irreducible) for one in report.fits],
        "gaps": [
            {
                "metric": gap.fit.metric,
                "compute": gap.fit.compute,
                "group": gap.fit.group,
                "reference": gap.reference.group,
                "at": gap.compute,
                "gap": _interval_json(gap.value),
            }
            for gap in report.gaps
        ],
        "warnings": report.warnings,
    }


def _fit_json(one: GroupFit, irreducible: bool) -> dict[str, Any]:
    numbers: dict[str, Callable[[PowerLaw], Any]] = {"a": lambda law: law.a, "b": lambda law: law.b}
    if irreducible:
        numbers["c"] = lambda law: law.c
    return {
        "metric": one.metric,
        "compute": one.compute,
        "group": one.group,
        "runs": [str(run.folder) for run in one.runs],
        **{name: _interval_json(one.number(value)) for name, value in numbers.items()},
        "rms_error_of_log_loss": one.fit.error,
    }


def _interval_json(value: Interval) -> dict[str, float]:
    return {"value": value[0], "low": value[1], "high": value[2]}
