"""The step that the loss makes where one stage gives way to the next."""

import statistics
from dataclasses import dataclass, field

from pydantic import ConfigDict, with_config

STEPS = 10
"""So many optimizer steps are averaged on either side."""


@with_config(ConfigDict(extra="forbid"))
@dataclass
class Boundary:
    """Compares the last `STEPS` losses before a stage with its first ones.

    `observe` and `compare` give (mean before, mean after) once for each stage but the first, None at all other times.
    """

    recent: list[float] = field(default_factory=list)
    """The newest losses of this stage, at most `STEPS`."""
    before: float | None = None
    """Mean of the newest losses of the stage before, until the comparison is made."""

    def observe(self, loss: float) -> tuple[float, float] | None:
        """Take the loss of one more step."""
        self.recent = [*self.recent, loss][-STEPS:]
        return self.compare() if len(self.recent) == STEPS else None

    def compare(self) -> tuple[float, float] | None:
        """Compare with as many losses as there are: for a stage that ends before it has `STEPS` of them."""
        if self.before is None or not self.recent:
            return None
        before, self.before = self.before, None
        return before, statistics.fmean(self.recent)

    def begin_stage(self) -> None:
        """The losses that follow belong to the next stage."""
        if self.recent:
            self.before, self.recent = statistics.fmean(self.recent), []
