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
            weight = part.weights[name]
            if name in found.values:
                value = _joined(name, (found.values[name], value), (found.weights[name], weight))
                weight += found.weights[name]
            found.values[name] = value
            found.weights[name] = weight
    return found


def _joined(name: str, values: tuple[float, float], weights: tuple[float, float]) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    if extreme := {"max_": max, "min_": min}.get(name[:4]):
        return extreme(values)
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else values[0]
