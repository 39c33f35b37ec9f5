"""A run's checkpoints and its recipe: where they lie, what recipe training wrote into one, and the stage of it that it
was saved in."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import saved_step
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.errors import CheckpointError
from moba_train.model.build import kind_prefix, kind_shapes


class SavedRun(NamedTuple):
    """A checkpoint with the recipe that it was saved with, and the stage that it was saved in.

    `validation.checkpoints.open_checkpoint` makes one that is safe to use.
    """

    path: Path
    config: RunConfig
    stage: Stage


class Training(NamedTuple):
    """Training that the weights of a checkpoint have had."""

    step: int
    """Optimizer steps; 0 for an imported model."""
    tokens: int | None
    """Training tokens of these steps; None for an imported model."""
    seq_len: int
    """Longest sequences of the stages so far, in tokens."""


def checkpoint_folders(config: RunConfig) -> list[Path]:
    """Folders of the run's checkpoints: in its own folder, and in the part of checkpoint.fallback_dir, if the recipe
    names one, that belongs to that folder."""
    folders = [Path(config.run_dir) / "checkpoints"]
    if config.checkpoint.fallback_dir is not None:
        run_dir = Path(os.path.abspath(config.run_dir))
        own = f"{run_dir.name}-{hashlib.sha256(bytes(run_dir)).hexdigest()[:8]}"
        folders.append(Path(config.checkpoint.fallback_dir) / own)
    return folders


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


def overridden_kinds(saved: SavedRun) -> list[str]:
    """Beginnings of the names of parameters that the checkpoint has of attention kinds, and that the recipe does not
    use any more since overrides were laid over it."""
    before = kind_shapes(saved_recipe(saved.path))
    return [kind_prefix(layer, kind) for layer, kind in before.keys() - kind_shapes(saved.config).keys()]


def saved_training(checkpoint: Path) -> Training:
    """Training that the weights of `checkpoint` have had, by its recipe and progress. Raises CheckpointError as
    `saved_stage`."""
    config = saved_recipe(checkpoint)
    meta = read_meta(checkpoint)
    index = saved_stage(checkpoint, config).index
    exited = meta["progress"].get("exited_steps")
    stages = resolve_stages(config, exited if isinstance(exited, dict) else None)[: index + 1]
    step = saved_step(meta) or 0
    return Training(step, stages[-1].tokens_after(step) if step else None, max(stage.seq_len for stage in stages))
