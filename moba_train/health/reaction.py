"""The reaction of a run to a spike: apply the step, skip it, roll back to a good checkpoint, or stop.

Skipping is the cheapest reaction: the gradients of a flagged step are dropped before they reach the weights. A rollback
at the first flagged step would only compute the same weights again, so it is for what skipping cannot repair: weights
that are damaged already.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from moba_train.checkpoint.publish import Accept, is_good, saved_step
from moba_train.config.run import SpikeConfig
from moba_train.health.spike import SpikeReport

BUDGET_STEPS = 1000
"""Steps over which skips and rollbacks are counted: a budget for the whole run would end every long run."""

Action = Literal["apply", "skip", "rollback", "stop"]


@dataclass(frozen=True)
class Reaction:
    """What to do with a step, and the text about it for the log."""

    action: Action
    message: str


def react(
    config: SpikeConfig, report: SpikeReport, step: int, skipped: list[int], rollbacks: list[list[int]]
) -> Reaction:
    """The reaction to the report of `step`, given the steps `skipped` so far and the `rollbacks` [[from, to], ...].

    Depends only on numbers that are equal on all ranks, so that all ranks decide the same.
    """
    skips = sum(old > step - BUDGET_STEPS for old in skipped)
    returns = sum(old > step - BUDGET_STEPS for old, _ in rollbacks)
    skips_help = report.flagged and skips < config.max_skips
    skip = Reaction("skip", f"step not applied ({skips + 1} of max_skips {config.max_skips} in {BUDGET_STEPS} steps)")
    match config.reaction:
        case "log" if report.level == "fatal":
            return Reaction("stop", "health.spike.reaction is log, which ends the run here")
        case "skip_step" if skips_help:
            return skip
        case "skip_step" if report.flagged:
            spent = f"{skips} steps skipped in {BUDGET_STEPS}, as many as health.spike.max_skips allows"
            return Reaction("stop", spent)
        case "rollback" if report.level == "warn" and skips_help:
            return skip
        case "rollback" if report.level != "ok" and returns < config.max_rollbacks:
            return Reaction("rollback", f"rollback {returns + 1} of max_rollbacks {config.max_rollbacks}")
        case "rollback" if report.level != "ok":
            spent = (
                f"{returns} rollbacks in the last {BUDGET_STEPS} steps, as many as health.spike.max_rollbacks allows"
            )
            return Reaction("stop", spent)
    return Reaction("apply", "")


def good_before(step: int, flagged: Collection[int], rollbacks: Collection[list[int]]) -> Accept:
    """Accepts the meta of a checkpoint from before `step` that was saved while the detector was calm.

    The step after it must not be among the `flagged` ones: weights that the next step finds broken were saved broken.
    And it must not lie among the steps that one of the `rollbacks` [[from, to], ...] has undone. A meta that names no
    step (a checkpoint from elsewhere) is not accepted.
    """

    def accept(meta: dict[str, Any]) -> bool:
        saved = saved_step(meta)
        if saved is None:
            return False
        undone = any(back_to < saved < back_from for back_from, back_to in rollbacks)
        return is_good(meta) and saved < step and saved + 1 not in flagged and not undone

    return accept
