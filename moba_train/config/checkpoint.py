"""The section `checkpoint`: when a run is saved, where, and which checkpoints stay."""

from pydantic import Field

from moba_train.config.base import OpenSection
from moba_train.registry import CHECKPOINT_STORES


class CheckpointConfig(OpenSection):
    """Interval, retention and fallback of checkpoints. The last one, the newest good one and the newest one without NaN
    or infinite values are always kept."""

    members = CHECKPOINT_STORES
    not_here = {"alert_after_failures": "gone: always 3"}

    every: int | None = Field(
        100,
        ge=1,
        description="optimizer steps between checkpoints; null: none is saved, not even the last, and nothing can be "
        "resumed: for measurements",
    )
    keep_last: int = Field(2, ge=1, description="number of newest checkpoints that are kept")
    keep_every: int | None = Field(None, ge=1, description="checkpoints at multiples of this step stay for ever")
    keep_best: int = Field(
        0,
        ge=0,
        description="number of checkpoints of lowest validation loss that are kept in each stage; `every` must then "
        "be a multiple of evaluation.every",
    )
    fallback_dir: str | None = Field(
        None,
        min_length=1,
        description="folder, best on another disk, that takes a checkpoint when the run folder does not; the run "
        "resumes from the newest of both. Every rank must see it: with several nodes, a local disk will not do",
    )
    max_failures: int | None = Field(
        None, ge=1, description="failed saves in a row after which the run ends; null: it continues; three are an alert"
    )
