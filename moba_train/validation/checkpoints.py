"""A checkpoint's own recipe, checked before anything acts on it: a checkpoint may come from elsewhere."""

from pathlib import Path

from moba_train.checkpoint.publish import find_checkpoint
from moba_train.checkpoint.recipe import SavedRun, saved_recipe, saved_stage
from moba_train.validation.foreign_paths import check_paths
from moba_train.validation.recipe import validate


def open_checkpoint(path: Path) -> SavedRun:
    """The checkpoint `path`, or the newest valid one of the run folder `path`, with its recipe and stage.

    Raises UserError when there is none, it is damaged, its recipe cannot work, or the recipe names files that it must
    not read (`check_paths`).
    """
    checkpoint = find_checkpoint(path)
    config = saved_recipe(checkpoint)
    validate(config.model_copy(update={"init_from": None}))  # where the first weights came from no longer matters
    check_paths(config, checkpoint)
    return SavedRun(checkpoint, config, saved_stage(checkpoint, config))
