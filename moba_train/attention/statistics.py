"""Numbers that tell how a layer's attention behaves, for dumps of loss spikes and for probes.

Every kind says which it has (`AttentionKind.statistics`); watched.py collects them.
"""

import math
from collections.abc import Iterable, Mapping

SOFTMAX = {
    "max_lse": "largest log-sum-exp of a query's attention scores: at least its largest logit, at most that + ln(keys)"
}
"""What every attention that runs through an engine shows."""

KEY_SHARE = {"key_share": "keys attended to over keys before the query, its own included"}
"""What every attention that leaves keys out shows besides."""

SELECTION = KEY_SHARE | {
    "load_imbalance": "selections of the busiest block over the mean of the document's candidates; 1: even",
    "entropy": "of the selections over the candidates, relative to its maximum; 1: even, 0: all on one block",
    "first_block_share": "share of the queries that selected their document's first block, the attention sink",
    "distance": "how many blocks back the selected one lies, relative to the mean of the query's candidates",
}
"""What an attention that selects blocks shows besides (blocks/statistics.py)."""

STATES = {
    "state_norm": "Frobenius norm of a head's state",
    "max_state_norm": "the largest",
    "min_decay": "smallest factor that a state, or a channel of it, keeps from one token to the next",
    "max_decay": "the largest",
    "output_norm": "norm of a head's output before the output norm",
    "max_output_norm": "the largest",
}
"""What a kind with states shows (linear/statistics.py)."""


class Statistics:
    """Numbers by name, added up over calls, micro-batches and ranks.

    A name that begins with `max_` or `min_` is an extreme, any other a weighted mean. What is not a number stays so,
    whatever is added.
    """

    def __init__(self, values: Mapping[str, float] | None = None, weight: float = 1.0) -> None:
        """`weight`: of the means among the values, for example the queries that they are taken over."""
        self._values = dict(values or {})
        self.weights = dict.fromkeys(self._values, weight)
        """By name; those of extremes mean nothing."""

    def values(self) -> dict[str, float]:
        """By name."""
        return dict(self._values)

    def add(self, other: "Statistics") -> None:
        """Add what the other was taken over."""
        for name, value in other._values.items():
            if name not in self._values:
                self._values[name], self.weights[name] = value, other.weights[name]
                continue
            weights = self.weights[name], other.weights[name]
            self._values[name] = _joined(name, (self._values[name], value), weights)
            self.weights[name] = sum(weights)


def joined(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of all parts together."""
    found = Statistics()
    for part in parts:
        found.add(part)
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
