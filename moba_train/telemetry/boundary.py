"""The change of the loss at the boundary between two stages."""

import statistics
from dataclasses import dataclass, field

from pydantic import ConfigDict, with_config

STEPS = 10
"""Optimizer steps that are averaged on each side of a boundary."""


@with_config(ConfigDict(extra="forbid"))
@dataclass
class Boundary:
    """Compares the last `STEPS` losses before a stage with the first `STEPS` of it.

    `observe` and `compare` return (mean before, mean after) once for each stage except the first, and None otherwise.
    """

    recent: list[float] = field(default_factory=list)
    """The latest losses of this stage, at most `STEPS`."""
    before: float | None = None
    """Mean of the latest losses of the previous stage, until the comparison is made."""

    def observe(self, loss: float) -> tuple[float, float] | None:
        """Record the loss of one more step."""
        self.recent = [*self.recent, loss][-STEPS:]
        return self.compare() if len(self.recent) == STEPS else None

    def compare(self) -> tuple[float, float] | None:
        """Compare with the losses there are; for a stage that ends before it has `STEPS` of them."""
        if self.before is None or not self.recent:
            return None
        before = self.before
        self.before = None
        return before, statistics.fmean(self.recent)

    def begin_stage(self) -> None:
        """Assign the losses that follow to the next stage."""
        if self.recent:
            self.before = statistics.fmean(self.recent)
            self.recent = []
