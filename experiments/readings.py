"""What figures read in the results of arms: losses, by sequence and by position, and needles.

An arm's losses are those at the end of its last stage, with that stage's attention. Losses by sequence are empty in
older results, which do not have them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.figure import Result

Losses = Sequence[float | None]
"""A loss for each sequence of an evaluation; None for a sequence without loss tokens."""


def last_stage(result: Result) -> Mapping[str, Any]:
    """The evaluations at the end of the last stage, by name."""
    stages: dict[str, Any] = result["stages"]
    return stages[list(stages)[-1]]


def validation_loss(result: Result) -> float:
    """Validation loss."""
    return float(last_stage(result)["validation_loss"]["eval_loss"])


def validation_by_sequence(result: Result) -> Losses:
    """Validation loss of each sequence."""
    data = last_stage(result)["validation_loss"].get("validation_loss", {})
    found: dict[str, Losses] = data.get("by_sequence", {})
    return next(iter(found.values()), [])  # training evaluates with the stage's own attention alone


def trailing_loss(result: Result) -> float:
    """Loss of the last bucket of the context."""
    return float(last_stage(result)["position_wise"]["trailing_loss"])


def trailing_by_sequence(result: Result) -> Losses:
    """Trailing loss of each sequence."""
    return own_trailing_by_sequence(position_wise(result))


def own_trailing_by_sequence(data: Mapping[str, Any]) -> Losses:
    """Trailing loss of each sequence, with the attention that the evaluation `data` is about."""
    found: Losses = data["curves"][data["attention"]].get("trailing_by_sequence", [])
    return found


def position_wise(result: Result) -> Mapping[str, Any]:
    """Everything that the evaluation by position measured: `bucket`, `curves` by attention, `attention`."""
    data: Mapping[str, Any] = last_stage(result)["position_wise"]["position_wise"]
    return data


def loss_by_position(result: Result) -> npt.NDArray[np.float64]:
    """Loss of each bucket of the context."""
    data = position_wise(result)
    return np.array(data["curves"][data["attention"]]["mean"])


def bucket_middles(result: Result) -> npt.NDArray[np.float64]:
    """Position in the middle of each bucket of the context, tokens."""
    buckets = len(loss_by_position(result))
    return float(position_wise(result)["bucket"]) * np.arange(0.5, buckets, dtype=np.float64)


def needle(result: Result) -> float:
    """Share of needles that are found."""
    return float(last_stage(result)["needle"]["needle"])
