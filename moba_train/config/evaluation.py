"""The section `evaluation`: measurements while a run trains, and their frequency."""

from typing import Any, Literal

from pydantic import Field

from moba_train.config.base import MOST_SAMPLES, Length, OpenSection, Section
from moba_train.registry import EVALUATIONS

EVERY: Any = Field(
    None, ge=1, description="optimizer steps between evaluations; null: evaluation.every; always at a stage's end"
)
ATTENTION: Any = Field("both", description="both: also full attention on the same weights, in stages with other layers")
"""Keys that most evaluations have."""


class PositionWiseConfig(Section):
    """Loss by position in the context, on samples of `seq_len` tokens that lie inside one validation document. The loss
    of the last bucket is the trailing loss. See docs/how-to/stages.md."""

    bucket: Length = Field(2048, description="tokens of the context that are averaged together; divides every seq_len")
    sequences: int = Field(
        32, ge=2, le=MOST_SAMPLES, description="samples; fewer if the documents do not give that many"
    )
    every: int | None = EVERY
    attention: Literal["own", "both"] = ATTENTION


class EvaluationConfig(OpenSection):
    """Mean token loss on `data.validation`, always on the same sequences, and other evaluations."""

    members = EVALUATIONS

    every: int = Field(100, ge=1, description="optimizer steps between evaluations")
    at_start: bool = Field(
        False,
        description="also evaluate before the first step of every stage, with its attention, RoPE and length: the "
        "baseline at step 0, and what a change of stage does before anything is trained",
    )
    sequences: int = Field(32, ge=1, le=MOST_SAMPLES, description="validation sequences of the stage's length")
    position_wise: PositionWiseConfig | None = Field(None, description="null: not evaluated")
