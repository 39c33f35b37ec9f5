"""The recipe that training wrote into a checkpoint."""

from pathlib import Path

from moba_train.checkpoint.manifest import read_meta
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.errors import CheckpointError


def saved_recipe(checkpoint: Path) -> RunConfig:
    """The recipe of `checkpoint`, parsed but not validated against this machine. Raises CheckpointError without one."""
    text = read_meta(checkpoint).get("config")
    if not isinstance(text, str):
        raise CheckpointError(f"{checkpoint}: its meta.json holds no recipe; use a checkpoint that training wrote")
    return parse_config(text, f"{checkpoint} (its recipe)")
