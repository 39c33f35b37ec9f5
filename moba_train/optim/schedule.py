"""Learning rate as a pure function of the tokens consumed, so that resuming needs no scheduler state."""

import math
from collections.abc import Sequence

from moba_train.config.optim import ScheduleConfig
from moba_train.config.stages import Stage


def learning_rate(schedule: ScheduleConfig, peak: float, tokens: int, span: int) -> float:
    """Learning rate of the step that brings the schedule's own consumed tokens to `tokens`, out of `span`."""
    if tokens < schedule.warmup_tokens:
        return peak * tokens / schedule.warmup_tokens
    low = schedule.min_lr_ratio
    done = min(1.0, (tokens - schedule.warmup_tokens) / max(1, span - schedule.warmup_tokens))
    match schedule.kind:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - (1.0 - low) * done
        case "cosine":
            factor = low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * done))
        case "wsd":  # warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)
            left = max(0, span - tokens)
            factor = low + (1.0 - low) * min(1.0, left / max(1, schedule.decay_tokens))
    return peak * factor


def stage_learning_rate(stages: Sequence[Stage], index: int, run_schedule: ScheduleConfig, tokens: int) -> float:
    """Learning rate of the step of stage `index` that brings the run to `tokens` consumed tokens.

    A stage with a schedule of its own starts it anew and spans it over the stage; otherwise the run's schedule goes on.
    Schedules count planned tokens: while a stage goes on beyond its `tokens` (`until`), their time stands still, so the
    rate stays what it is at the end of the stage's `tokens`, and later stages have the rates of a run without `until`.
    """
    stage = stages[index]
    last = stages[-1]
    own_tokens = min(tokens - stage.first_token, stage.planned_tokens)
    if stage.schedule is not None:
        return learning_rate(stage.schedule, stage.lr, own_tokens, stage.planned_tokens)
    span = last.planned_first_token + last.planned_tokens
    return learning_rate(run_schedule, stage.lr, stage.planned_first_token + own_tokens, span)
