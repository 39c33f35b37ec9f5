"""The exit criterion of a stage (`until` in its recipe): whether the evaluations' numbers allow it to end."""

from collections.abc import Mapping
from typing import NamedTuple

from moba_train.config.run import UntilConfig
from moba_train.config.stages import Stage
from moba_train.errors import CheckpointError


class Verdict(NamedTuple):
    """Whether a criterion is met, and the comparison in words."""

    met: bool
    message: str


class StageExit:
    """Judges the exit criterion of one stage; for a stage without `until` there is nothing to judge."""

    def __init__(self, stage: Stage, trailing_loss_before: float | None) -> None:
        """`trailing_loss_before`: at the end of the stage before, None where it was not evaluated.

        Raises CheckpointError when the criterion refers to it and it is None.
        """
        self._stage = stage
        self._trailing_loss_before = trailing_loss_before
        recovered = stage.until.trailing_loss_recovered if stage.until else None
        if recovered is not None and recovered.reference == "before" and trailing_loss_before is None:
            raise CheckpointError(
                f"stages[{stage.index}].until.trailing_loss_recovered.reference: given 'before', but the stage before "
                "was trained without evaluation.position_wise; set reference: full"
            )

    def judge(self, step: int, numbers: Mapping[str, float]) -> Verdict | None:
        """The verdict on the `numbers` that were evaluated after `step`, by name.

        None where there is nothing to judge: without a criterion, before the stage's `tokens` are consumed, or when a
        number of the criterion was not evaluated at this step.
        """
        until = self._stage.until
        if until is None or step < self._stage.planned_end_step or not set(until.metrics) <= numbers.keys():
            return None
        verdict = judge(until, numbers, self._trailing_loss_before)
        if not verdict.met and step == self._stage.end_step:
            return Verdict(False, f"{verdict.message}; the stage ends all the same, at its max_tokens")
        return verdict


def judge(until: UntilConfig, numbers: Mapping[str, float], trailing_loss_before: float | None) -> Verdict:
    """Compare the numbers that `until.metrics` names with their bound. A number that is NaN never meets it."""
    if until.trailing_loss_recovered is not None:
        tolerance = until.trailing_loss_recovered.tolerance
        if until.trailing_loss_recovered.reference == "full":
            reference = numbers["trailing_loss_full"]
            words = "with full attention on the same weights"
        else:
            assert trailing_loss_before is not None
            reference = trailing_loss_before
            words = "at the end of the stage before"
        trailing = numbers["trailing_loss"]
        met = trailing <= reference + tolerance
        comparison = f"trailing loss {trailing:.4f}, {reference:.4f} {words}, tolerance {tolerance:g}"
    else:
        assert until.metric is not None
        value = numbers[until.metric]
        if until.at_most is not None:
            met, bound = value <= until.at_most, f"at most {until.at_most:g}"
        else:
            assert until.at_least is not None
            met, bound = value >= until.at_least, f"at least {until.at_least:g}"
        comparison = f"{until.metric} {value:.4f}, wanted: {bound}"
    return Verdict(met, f"criterion {'met' if met else 'not met'}: {comparison}")
