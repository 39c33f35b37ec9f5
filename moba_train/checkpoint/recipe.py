"""A run's checkpoints and its recipe: their folders, the recipe that training wrote into one, and the stage of it that
it was saved in."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from moba_train.checkpoint.manifest import read_meta
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.errors import CheckpointError


def checkpoint_folders(run_dir: str, fallback_dir: str | None) -> tuple[Path, ...]:
    """Folders of a run's checkpoints: in its own folder, and in the part of checkpoint.fallback_dir, if the recipe
    names one, that belongs to that folder."""
    own = Path(run_dir) / "checkpoints"
    if fallback_dir is None:
        return (own,)
    absolute = Path(os.path.abspath(run_dir))
    name = f"{absolute.name}-{hashlib.sha256(bytes(absolute)).hexdigest()[:8]}"
    return (own, Path(fallback_dir) / name)


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that saved `checkpoint`, else the folder that it lies in."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == "checkpoints" else folder


def trained_tokenizer(checkpoint: Path) -> str:
    """SHA-256 of the tokenizer that the run trained with; empty where its checkpoint names none."""
    progress = read_meta(checkpoint).get("progress")
    found = progress.get("tokenizer") if isinstance(progress, dict) else None
    return found if isinstance(found, str) else ""


def saved_recipe(checkpoint: Path) -> RunConfig:
    """The recipe of `checkpoint`, parsed but not validated against this machine. Raises CheckpointError when there is
    none."""
    text = read_meta(checkpoint).get("config")
    if not isinstance(text, str):
        raise CheckpointError(f"{checkpoint}: its meta.json holds no recipe; use a checkpoint that training wrote")
    return parse_config(text, f"{checkpoint} (its recipe)")


def saved_stage(checkpoint: Path, stages: Sequence[Stage]) -> Stage:
    """The stage, out of those of its recipe, that `checkpoint` was saved in. Raises CheckpointError when its meta names
    none."""
    progress = read_meta(checkpoint).get("progress")
    index = progress.get("stage") if isinstance(progress, dict) else None
    if type(index) is not int or not 0 <= index < len(stages):
        raise CheckpointError(
            f"{checkpoint}: its meta.json names stage {index!r}, its recipe has {len(stages)} stages; use another "
            "checkpoint of this run"
        )
    return stages[index]
