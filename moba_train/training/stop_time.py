"""How long an orderly stop takes, by what this start of the run has measured.

A signal may come right after a step has begun, while the checkpoint before is still being written. The stop then takes
the rest of that step, the rest of that save, the last save, and some seconds to close logs. The launcher gives its
ranks several times as long before it kills them (`limit_s`); schedulers need the number from the user, so the run
reports it.
"""

import math

from moba_train.training.stop import StopRequest, allow_to_stop

CLOSING_S = 30
"""Plots, and at most 30 s that wandb is waited for (telemetry/wandb_sink.py)."""
ROUNDED_TO_S = 30
SAFETY = 3
"""The launcher kills ranks that take this many times as long as measured. When a whole cluster is told to stop, all
runs save at once; and killing one too early loses its work, while killing a hanging one late loses nothing."""
AFTER_TIMEOUT_S = 60
"""A run whose ranks hang ends by itself when `parallel.timeout` is over, and reports which rank it was; it is not
killed before."""
UNMEASURED_S = 3600
"""The launcher's limit until a step of the stage and a save are measured: a first step may compile for minutes."""


class StopTime:
    """The longest step of the current stage, the longest batch of its evaluations, and the longest save so far."""

    def __init__(self, request: StopRequest, timeout_s: float) -> None:
        """`request` and the launcher are told; `timeout_s`: limit of the collectives."""
        self._request = request
        self._timeout_s = timeout_s
        self._step_s: float | None = None
        self._first = True
        self._save_s: float | None = None
        self._reported = 0
        self._tell()

    def begin_stage(self) -> None:
        """Forget the steps: those of another stage take another time."""
        self._step_s = None
        self._first = True
        self._reported = 0
        self._tell()

    def step_took(self, seconds: float) -> None:
        """Record a step; the first one of a stage does not count, because it may have compiled."""
        if not self._first:
            self._step_s = max(seconds, self._step_s or 0.0)
        self._first = False

    def batch_took(self, seconds: float) -> None:
        """Record the batch of an evaluation, which must end before the run can stop, as a step must."""
        if self._step_s is not None:
            self._step_s = max(seconds, self._step_s)

    def save_took(self, seconds: float) -> None:
        """Record a save."""
        self._save_s = max(seconds, self._save_s or 0.0)

    @property
    def seconds(self) -> int | None:
        """Seconds that an orderly stop takes at most, rounded up; None until a step and a save are measured."""
        if self._step_s is None or self._save_s is None:
            return None
        return math.ceil((self._step_s + 2 * self._save_s + CLOSING_S) / ROUNDED_TO_S) * ROUNDED_TO_S

    @property
    def limit_s(self) -> float:
        """Seconds after which ranks that were told to stop may be killed."""
        if self.seconds is None:
            return UNMEASURED_S
        return max(SAFETY * self.seconds, self._timeout_s + AFTER_TIMEOUT_S)

    def news(self) -> str | None:
        """The time in words where it is known and has become longer since the last call, or in another stage."""
        if self.seconds is None or self.seconds <= self._reported:
            return None
        self._reported = self.seconds
        self._tell()
        return (
            f"stopping in order takes up to {self.seconds} s (a step {self._step_s:.1f} s, a save "
            f"{self._save_s:.1f} s): a scheduler must allow as much between SIGTERM and SIGKILL, Slurm by "
            f"--signal=B:USR1@{self.seconds}"
        )

    def _tell(self) -> None:
        self._request.takes_s = self.seconds
        allow_to_stop(self.limit_s)
