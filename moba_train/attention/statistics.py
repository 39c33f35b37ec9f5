"""Numbers that tell how a layer's attention behaves, for dumps of loss spikes and for probes.

Every kind says which it has (`AttentionKind.statistics`); `observer.StatisticsObserver` collects them.
"""

import math
from collections.abc import Iterable, Mapping

SOFTMAX = {
    "max_lse": "largest log-sum-exp of a query's attention scores: at least its largest logit, at most that + ln(keys)"
}
"""Statistics of every attention that runs through an engine, by name, with their meaning."""


class Statistics:
    """Numbers by name. One that begins with `max_` or `min_` is an extreme, any other a weighted mean."""

    def __init__(self, values: Mapping[str, float] | None = None, weight: float = 1.0) -> None:
        """`weight`: of the means among the values, for example the queries that they are taken over."""
        self.values = dict(values or {})
        self.weights = dict.fromkeys(self.values, weight)
        """Weights of the means by name; those of extremes mean nothing."""


def joined(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of all parts together. NaN stays NaN, whatever is added."""
    found = Statistics()
    for part in parts:
        for name, value in part.values.items():
            if name not in found.values:
                found.values[name] = value
                found.weights[name] = part.weights[name]
                continue
            weights = found.weights[name], part.weights[name]
            found.values[name] = _joined(name, (found.values[name], value), weights)
            found.weights[name] = sum(weights)
    return found


def _joined(name: str, values: tuple[float, float], weights: tuple[float, float]) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    if name.startswith("max_"):
        return max(values)
    if name.startswith("min_"):
        return min(values)
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else values[0]
