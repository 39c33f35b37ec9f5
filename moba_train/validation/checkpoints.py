"""A checkpoint's own recipe, checked before anything acts on it: a checkpoint may come from elsewhere."""

from pathlib import Path

from moba_train.checkpoint.manifest import check_sizes
from moba_train.checkpoint.publish import find_checkpoint
from moba_train.checkpoint.recipe import SavedRun, saved_recipe, saved_stage
from moba_train.config.schema import RunConfig
from moba_train.errors import CheckpointError
from moba_train.planning.parameters import count_parameters
from moba_train.validation.foreign_paths import check_paths
from moba_train.validation.recipe import validate


def open_checkpoint(path: Path) -> SavedRun:
    """The checkpoint `path`, or the newest valid one of the run folder `path`, with its recipe and stage.

    Raises UserError when there is none, it is damaged, its recipe cannot work, describes a model that the checkpoint
    cannot hold, or names files that it must not read (`check_paths`).
    """
    checkpoint = find_checkpoint(path)
    config = saved_recipe(checkpoint)
    # Where the first weights came from no longer matters, and what changes nothing did no harm in training.
    validate(config.model_copy(update={"init_from": None}), allow_idle=True)
    check_paths(config, checkpoint)
    _check_size(config, checkpoint)
    return SavedRun(checkpoint, config, saved_stage(checkpoint, config))


def _check_size(config: RunConfig, checkpoint: Path) -> None:
    """Raises CheckpointError when the files are too small for the recipe's model, before memory for it is taken."""
    parameters = count_parameters(config.model).total
    size = sum(entry["size"] for entry in check_sizes(checkpoint).values())
    if size < 4 * parameters:  # checkpoints hold float32
        raise CheckpointError(
            f"checkpoint {checkpoint}: the parameters of its recipe's model have {4 * parameters:,} bytes, but its "
            f"files have {size:,}; use another checkpoint of this run"
        )
