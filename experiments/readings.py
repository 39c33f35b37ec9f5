"""What figures read in the results of arms: losses, by sequence and by position, and needles.

An arm's losses are those at the end of its last stage, with that stage's attention. Losses by sequence are empty in
older results, which do not have them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.estimate import config_of
from experiments.figure import Arm, Result
from moba_train.model.build import build_attention
from moba_train.resolve.run import resolve_unchecked

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


def trailing_documents(result: Result) -> Sequence[int]:
    """Number of the document that each sequence of `trailing_by_sequence` is a part of; empty in older results."""
    found: Sequence[int] = position_wise(result).get("documents", ())
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


def needle_in_history(result: Result) -> float:
    """Share of needles that are found, without those at the end of the text, which lie in the query's own block."""
    data = last_stage(result)["needle"]["needle_map"]
    inside = [place for place, depth in enumerate(data["depths"]) if depth < 100]
    passed = np.array(data["maps"][data["attention"]]["passed"])
    return float(passed[:, inside].mean())


def mean_keys(result: Result) -> float:
    """Keys that a query of the last stage attends to on average over its sequence and over the layers, its own
    included, where the sequence is one document."""
    run = resolve_unchecked(config_of(Arm(result["name"], result["seed"], result["recipe"])))
    stage = run.stages[-1]
    model = run.setup.spec.config
    pairs = [kind.pairs(model, [stage.seq_len]) for kind in build_attention(stage.attention, model.head_width)]
    return sum(pairs) / len(pairs) / stage.seq_len + 0.5


def keys_text(result: Result) -> str:
    """`mean_keys` as a cell of a table: `all` where a query sees all tokens before it."""
    keys = mean_keys(result)
    seq_len = result["recipe"]["stages"][-1]["seq_len"]
    return "all" if keys >= seq_len / 2 else f"{keys:,.0f}"
