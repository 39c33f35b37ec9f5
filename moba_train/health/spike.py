"""Detection of loss spikes, robust against the curve's own trend and against the spikes themselves.

The score is a one-sided robust z: how many robust standard deviations (1.4826 x MAD) a value lies above the median of
the last `window` values that were not flagged. The newest values of a falling curve lie below that median, so the trend
never alarms; a flagged value stays out of the window, so a spike does not widen the scale for the next one.

The score is taken on logarithms, because a gradient norm is roughly log-normal: on the norm itself, 5 of 20 simulated
clean runs of 5,000 steps raised a false alarm; on its logarithm none did. At 6 sigma, 20,000 steps of synthetic curves
with Gaussian noise raise no alarm (benchmarks/results/spike-alarms.json).

After a switch of stage the window is empty. Until it has enough values, the statistics of the stage before stand in,
widened by more than a sound switch moves loss and gradient norm. At the beginning of a run nothing can stand in.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from moba_train.errors import CheckpointError

WARM_UP = 16
"""Values that are collected before any is judged."""

WIDER_LOSS = 10.0
"""Nats per token by which a switch of stage may raise the loss: another length, attention or batch raised it by 0.5 at
most, data that share nothing with those before (random tokens after a model has learned its corpus) by 6."""

WIDER_GRAD = 50.0
"""Factor by which a switch of stage may raise the gradient norm. In the same trials: 5 for a sixteenth of the batch, 11
for other data, 16 for both."""

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
    """The verdict on one step. `z_loss` and `z_grad` are NaN when the value is not finite, and 0 during the warm-up,
    unless a value is beyond the widened level of the stage before. `message` is empty at level ok."""

    level: Level
    z_loss: float
    z_grad: float
    message: str
    flagged: bool = False
    """True if this step's values are spikes; an error can also mean a loss that is too high for too long."""
    continues: bool = False
    """True if the step before was also flagged."""


class SpikeDetector:
    """Watches loss and gradient norm, one value of each per step.

    Levels: `warn` when a value is more than `warn_sigma` robust standard deviations above its recent median; `error`
    once when the loss has then stayed above its pre-spike mean + 3 standard deviations for 50 steps, after which the
    detector starts over at the new level; `fatal` when a value is NaN or infinite.
    """

    def __init__(self, window: int, warn_sigma: float) -> None:
        self._warn_sigma = warn_sigma
        self._loss = _Window(window, added=WIDER_LOSS)
        self._grad = _Window(window, factor=WIDER_GRAD)
        self._recovery_limit: float | None = None
        self._steps_above = 0
        self._last_flagged: int | None = None

    def observe(self, step: int, loss: float, grad_norm: float) -> SpikeReport:
        """Judge the values of `step` and, unless they are flagged, add them to the window."""
        continues = self._last_flagged is not None and self._last_flagged == step - 1
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._last_flagged = step
            message = f"step {step}: loss {loss:.6g}, gradient norm {grad_norm:.6g}"
            return SpikeReport("fatal", math.nan, math.nan, message, True, continues)

        z_loss, z_grad = self._loss.z_score(loss), self._grad.z_score(grad_norm)
        if z_loss > self._warn_sigma and self._recovery_limit is None:
            # Fixed at the spike: a limit that followed the loss would rise with it.
            self._recovery_limit = self._loss.recovery_limit()
        flagged = [
            f"{name} {value:.4g} is {z:.1f} sigma above {window.reference}"
            for name, window, value, z in (
                ("loss", self._loss, loss, z_loss),
                ("gradient norm", self._grad, grad_norm, z_grad),
            )
            if z > self._warn_sigma
        ]
        for window, value, z in ((self._loss, loss, z_loss), (self._grad, grad_norm, z_grad)):
            if z <= self._warn_sigma:
                window.values.append(value)

        if flagged:
            self._last_flagged = step
        level: Level = "warn" if flagged else "ok"
        message = f"step {step}: {', '.join(flagged)}" if flagged else ""
        if error := self._not_recovering(step, loss):
            level = "error"
            message = error
        return SpikeReport(level, z_loss, z_grad, message, bool(flagged), continues)

    def is_calm(self, step: int) -> bool:
        """True if the loss has recovered from every spike and none of the last 50 steps up to `step` was flagged."""
        quiet = self._last_flagged is None or step - self._last_flagged >= RECOVERY_STEPS
        return quiet and self._recovery_limit is None

    def rebaseline(self) -> None:
        """Start over at a switch of stage, which changes loss and gradient norm for a good reason. The statistics so
        far stand in, widened, until there are new ones."""
        for window in (self._loss, self._grad):
            window.before = window.summary() or window.before
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values; a detector that loads it gives the same reports from here on."""
        return {
            "loss": list(self._loss.values),
            "grad_norm": list(self._grad.values),
            "recovery_limit": self._recovery_limit,
            "steps_above": self._steps_above,
            "last_flagged": self._last_flagged,
            "loss_before": self._loss.before,
            "grad_norm_before": self._grad.before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another detector; of a longer window, its newest values. Raises CheckpointError when a key
        is missing or has a wrong type."""
        self._clear()
        try:
            self._loss.values.extend(state["loss"])
            self._grad.values.extend(state["grad_norm"])
            self._recovery_limit = state["recovery_limit"]
            self._steps_above = state["steps_above"]
            self._last_flagged = state["last_flagged"]
            self._loss.before = _statistics_from(state["loss_before"])
            self._grad.before = _statistics_from(state["grad_norm_before"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's spike detector is not from this version: {error!r}") from None

    def _clear(self) -> None:
        self._loss.values.clear()
        self._grad.values.clear()
        self._recovery_limit = None
        self._steps_above = 0

    def _not_recovering(self, step: int, loss: float) -> str | None:
        """Error text if the loss has been too high for too long since the last spike."""
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
        self._clear()
        self._loss.before = self._grad.before = None  # this level is the new one, however far above the old one it is
        return f"step {step}: loss {loss:.4g} has been above {limit:.4g} since a spike {RECOVERY_STEPS} steps ago"


Statistics = tuple[float, float]
"""Median and robust standard deviation of the logarithms of a window."""


@dataclass
class _Window:
    """The newest unflagged values of one curve."""

    size: int
    factor: float = 1.0
    added: float = 0.0
    """During the warm-up of a stage, a value may be up to `factor` x the median of the stage before + `added`."""
    before: Statistics | None = None
    """Statistics of the stage before; None in the first one."""
    values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.size)

    @property
    def reference(self) -> str:
        """Level that the score is counted from, for messages."""
        return (
            "its recent median" if self._warm() else f"{self._ceiling():.4g}, the most that a switch of stage explains"
        )

    def z_score(self, value: float) -> float:
        log = math.log(max(value, TINY))
        if own := self.summary():
            median, deviation = own
            return (log - median) / deviation
        if self.before is None:
            return 0.0
        return max(0.0, (log - math.log(self._ceiling())) / self.before[1])

    def summary(self) -> Statistics | None:
        """Statistics of the values; None while there are too few."""
        if not self._warm():
            return None
        logs = [math.log(max(other, TINY)) for other in self.values]
        median = statistics.median(logs)
        mad = statistics.median(abs(other - median) for other in logs)
        # Of a normal distribution the MAD is the standard deviation / 1.4826.
        return median, max(1.4826 * mad, SCALE_FLOOR)

    def recovery_limit(self) -> float:
        """Level below which a spike counts as over."""
        if self._warm():
            return statistics.fmean(self.values) + RECOVERY_SIGMA * statistics.pstdev(self.values)
        return self._ceiling()

    def _warm(self) -> bool:
        return len(self.values) >= min(WARM_UP, self.size)

    def _ceiling(self) -> float:
        """Largest value that a switch of stage explains."""
        assert self.before is not None
        return self.factor * math.exp(self.before[0]) + self.added


def _statistics_from(saved: Any) -> Statistics | None:
    """A window's `before` as a checkpoint holds it: a list of two finite numbers, or None. Raises CheckpointError
    when it is neither."""
    if saved is None:
        return None
    try:
        median, deviation = map(float, saved)
    except (TypeError, ValueError):
        median = deviation = math.nan
    # exp of more than 709 overflows in float64.
    if not (abs(median) < 700 and 0 < deviation < math.inf):
        raise CheckpointError(f"the checkpoint's spike detector holds {saved!r} as statistics of the stage before")
    return median, deviation
