"""Detection of loss spikes, robust against the curve's own trend and against the spikes themselves.

The score is a one-sided robust z: how many robust standard deviations (1.4826 x MAD) a value lies above the median of
the last `window` values that were not flagged. The newest values of a falling curve lie below that median, so the trend
never alarms; a flagged value stays out of the window, so a spike does not widen the scale for the next one.

The score is taken on logarithms, because a gradient norm is roughly log-normal: on the norm itself, 5 of 20 simulated
clean runs of 5,000 steps raised a false alarm; on its logarithm none did.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from moba_train.errors import CheckpointError

WARM_UP = 16
"""Values that are collected before any is judged."""

SCALE_FLOOR = 0.01
"""Smallest standard deviation of the logarithm, that is 1 % of the value: the MAD of a flat curve is nearly 0, so that
every ripple would raise an alarm."""

TINY = 1e-12
"""Lower bound of a loss or gradient norm before its logarithm is taken: 0 has none."""

RECOVERY_SIGMA = 3.0
RECOVERY_STEPS = 50
"""A loss that stays above the pre-spike mean + 3 sigma for 50 steps has not recovered: ERROR."""

Level = Literal["ok", "warn", "error", "fatal"]


@dataclass(frozen=True)
class SpikeReport:
    """The verdict on one step. `z_loss` and `z_grad` are 0 during the warm-up and NaN when the value is not finite;
    `message` is empty at level ok."""

    level: Level
    z_loss: float
    z_grad: float
    message: str
    flagged: bool = False
    """Whether this step's own values are spikes; an error can also mean a loss that is too high for too long."""
    continues: bool = False
    """Whether the step before was flagged too."""


class SpikeDetector:
    """Watches loss and gradient norm, one value of each per step.

    Levels: `warn` when a value is more than `warn_sigma` robust standard deviations above its recent median; `error`
    once when the loss has then stayed above its pre-spike mean + 3 standard deviations for 50 steps, after which the
    detector starts over at the new level; `fatal` when a value is NaN or infinite.
    """

    def __init__(self, window: int, warn_sigma: float) -> None:
        self._warn_sigma = warn_sigma
        self._loss = _Window(window)
        self._grad = _Window(window)
        self._recovery_limit: float | None = None
        self._steps_above = 0
        self._last_flagged: int | None = None

    def observe(self, step: int, loss: float, grad_norm: float) -> SpikeReport:
        """Judge the values of `step` and, unless they are flagged, add them to the window."""
        continues = self._last_flagged is not None and self._last_flagged == step - 1
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._last_flagged = step
            message = f"step {step}: loss {loss}, gradient norm {grad_norm}"
            return SpikeReport("fatal", math.nan, math.nan, message, True, continues)

        z_loss, z_grad = self._loss.z_score(loss), self._grad.z_score(grad_norm)
        if z_loss > self._warn_sigma and self._recovery_limit is None:
            self._recovery_limit = self._loss.mean() + RECOVERY_SIGMA * self._loss.deviation()
        for window, value, z in ((self._loss, loss, z_loss), (self._grad, grad_norm, z_grad)):
            if z <= self._warn_sigma:
                window.values.append(value)

        flagged = [
            f"{name} {value:.4g} is {z:.1f} sigma above its recent median"
            for name, value, z in (("loss", loss, z_loss), ("gradient norm", grad_norm, z_grad))
            if z > self._warn_sigma
        ]
        if flagged:
            self._last_flagged = step
        level: Level = "warn" if flagged else "ok"
        message = f"step {step}: {', '.join(flagged)}" if flagged else ""
        if error := self._not_recovering(step, loss):
            level = "error"
            message = error
        return SpikeReport(level, z_loss, z_grad, message, bool(flagged), continues)

    def is_calm(self, step: int) -> bool:
        """Whether the loss has recovered from every spike and none of the last 50 steps up to `step` was flagged."""
        quiet = self._last_flagged is None or step - self._last_flagged >= RECOVERY_STEPS
        return quiet and self._recovery_limit is None

    def rebaseline(self) -> None:
        """Forget the past: for a switch of stage, where loss and gradient norm change for a good reason."""
        self._loss.values.clear()
        self._grad.values.clear()
        self._recovery_limit = None
        self._steps_above = 0

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values; a detector that loads it gives the same reports from here on."""
        return {
            "loss": list(self._loss.values),
            "grad_norm": list(self._grad.values),
            "recovery_limit": self._recovery_limit,
            "steps_above": self._steps_above,
            "last_flagged": self._last_flagged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another detector; of a longer window, its newest values. Raises CheckpointError where a
        key is missing or has a wrong type."""
        self.rebaseline()
        try:
            self._loss.values.extend(state["loss"])
            self._grad.values.extend(state["grad_norm"])
            self._recovery_limit = state["recovery_limit"]
            self._steps_above = state["steps_above"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's spike detector is not from this version: {error!r}") from None
        self._last_flagged = state.get("last_flagged")  # missing in older checkpoints

    def _not_recovering(self, step: int, loss: float) -> str | None:
        """The error text if the loss has been too high for too long since the last spike."""
        limit = self._recovery_limit
        if limit is None:
            return None
        if loss <= limit:
            self._recovery_limit = None
            self._steps_above = 0
            return None
        self._steps_above += 1
        if self._steps_above < RECOVERY_STEPS:
            return None
        self.rebaseline()
        return f"step {step}: loss {loss:.4g} has been above {limit:.4g} since a spike {RECOVERY_STEPS} steps ago"


@dataclass
class _Window:
    """The newest unflagged values of one curve."""

    size: int
    values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.size)

    def z_score(self, value: float) -> float:
        if len(self.values) < min(WARM_UP, self.size):
            return 0.0
        logs = [math.log(max(other, TINY)) for other in self.values]
        median = statistics.median(logs)
        mad = statistics.median(abs(other - median) for other in logs)
        return (math.log(max(value, TINY)) - median) / max(1.4826 * mad, SCALE_FLOOR)

    def mean(self) -> float:
        return statistics.fmean(self.values)

    def deviation(self) -> float:
        return statistics.pstdev(self.values)
