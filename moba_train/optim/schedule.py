"""Learning rate as a pure function of the tokens consumed, so that resuming needs no scheduler state."""

import math

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


def stage_learning_rate(stage: Stage, run_schedule: ScheduleConfig, tokens: int, run_tokens: int) -> float:
    """Learning rate of the step of `stage` that brings the run to `tokens` consumed tokens out of `run_tokens`.

    A stage with a schedule of its own starts it anew and spans it over the stage; otherwise the run's schedule goes on.
    """
    if stage.schedule is None:
        return learning_rate(run_schedule, stage.lr, tokens, run_tokens)
    start = stage.first_token
    return learning_rate(stage.schedule, stage.lr, tokens - start, stage.end_token - start)
