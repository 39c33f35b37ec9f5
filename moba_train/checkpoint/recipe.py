"""The recipe that training wrote into a checkpoint, and how far it had come."""

from pathlib import Path

from moba_train.checkpoint.manifest import read_meta
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.errors import CheckpointError
from moba_train.progress import Progress


def saved_recipe(checkpoint: Path) -> RunConfig:
    """The recipe of `checkpoint`, parsed but not validated against this machine. Raises CheckpointError without one."""
    text = read_meta(checkpoint).get("config")
    if not isinstance(text, str):
        raise CheckpointError(f"{checkpoint}: its meta.json holds no recipe; use a checkpoint that training wrote")
    return parse_config(text, f"{checkpoint} (its recipe)")


def saved_stage(checkpoint: Path, config: RunConfig) -> Stage:
    """The stage of the recipe that `checkpoint` was saved in. Raises CheckpointError as `Progress.from_meta` does."""
    stages = resolve_stages(config)
    return stages[Progress.from_meta(read_meta(checkpoint).get("progress"), len(stages)).stage]
