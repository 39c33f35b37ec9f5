"""The recipe that training wrote into a checkpoint, and the stage that it was saved in."""

from pathlib import Path
from typing import NamedTuple

from moba_train.checkpoint.manifest import read_meta
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.errors import CheckpointError


class SavedRun(NamedTuple):
    """A checkpoint with the recipe that it was saved with, and the stage that it was saved in.

    `validation.checkpoints.open_checkpoint` makes one that is safe to use.
    """

    path: Path
    config: RunConfig
    stage: Stage
    step: int = 0
    """Optimizer steps that the weights were trained for; 0 for an imported model."""
    tokens: int | None = None
    """Training tokens that these steps took; None for an imported model."""
    trained_seq_len: int = 0
    """Longest sequences of the recipe's stages up to this one, in tokens."""


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that saved `checkpoint`, else the folder that it lies in."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == "checkpoints" else folder


def saved_recipe(checkpoint: Path) -> RunConfig:
    """The recipe of `checkpoint`, parsed but not validated against this machine. Raises CheckpointError when there is
    none."""
    text = read_meta(checkpoint).get("config")
    if not isinstance(text, str):
        raise CheckpointError(f"{checkpoint}: its meta.json holds no recipe; use a checkpoint that training wrote")
    return parse_config(text, f"{checkpoint} (its recipe)")


def saved_stage(checkpoint: Path, config: RunConfig) -> Stage:
    """The stage of the recipe that `checkpoint` was saved in. Raises CheckpointError when its meta names none."""
    stages = resolve_stages(config)
    progress = read_meta(checkpoint).get("progress")
    index = progress.get("stage") if isinstance(progress, dict) else None
    if type(index) is not int or not 0 <= index < len(stages):
        raise CheckpointError(
            f"{checkpoint}: its meta.json names stage {index!r}, its recipe has {len(stages)} stages; use another "
            "checkpoint of this run"
        )
    return stages[index]
