"""What `moba-train eval` is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class EvaluationOptions:
    """What to evaluate; None leaves it to the recipe."""

    attention: Literal["full", "own", "both"] = "both"
    tasks: tuple[str, ...] | None = None
    """Names of evaluations, whether the recipe has them or not; None: those that it has."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, laid over the checkpoint's recipe."""
    data: tuple[str, ...] = ()
    """Corpora in place of `data.validation`."""
    seq_len: int | None = None
    """Tokens of a sequence, in place of the stage's."""
    cp: int | None = None
    """Ranks that share a sequence; None: as many as in the checkpoint's stage, or one rank for each sequence where that
    does not divide the ranks."""
    output: Path | None = None
    """Folder for `evaluation.json` and plots; the result is written beside the checkpoint in any case."""

    def to_json(self) -> dict[str, Any]:
        """The options that bear on the numbers, as JSON values."""
        return {
            "attention": self.attention,
            "tasks": list(self.tasks) if self.tasks is not None else None,
            "data": list(self.data) or None,
            "seq_len": self.seq_len,
            "cp": self.cp,
            "overrides": list(self.overrides),
        }
