"""A checkpoint's own recipe, checked before anything acts on it: a checkpoint may come from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

from moba_train.checkpoint.manifest import check_sizes
from moba_train.checkpoint.publish import find_checkpoint
from moba_train.checkpoint.recipe import SavedRun, saved_recipe, saved_stage
from moba_train.config.load import with_overrides
from moba_train.config.schema import RunConfig
from moba_train.config.shadowed import shadowed_overrides
from moba_train.config.stages import resolve_stages
from moba_train.errors import CheckpointError, ConfigError
from moba_train.planning.parameters import count_parameters
from moba_train.validation.foreign_paths import check_paths
from moba_train.validation.recipe import validate
from moba_train.validation.saved_paths import SavedPaths


def open_checkpoint(path: Path) -> SavedRun:
    """The checkpoint `path`, or the newest valid one of the run folder `path`, with its recipe and stage.

    Raises UserError when there is none, it is damaged, its recipe cannot work, describes a model that the checkpoint
    cannot hold, or names files that it must not read (`check_paths`).
    """
    saved = read_checkpoint(path)
    check_paths(saved.config, saved.path)
    return saved


def open_for_generation(
    path: Path, tokenizer: Path | None = None, overrides: Sequence[str] = ()
) -> tuple[SavedRun, list[Path]]:
    """`open_checkpoint` for a command that is started in any folder: with the recipe's tokenizer where `SavedPaths`
    finds it, and the folders below which that may lie. `tokenizer`: one that the user names in its place; `overrides`
    win over the recipe.

    Raises UserError as `open_checkpoint`, for overrides that cannot work, and when there is no tokenizer.
    """
    saved = read_checkpoint(path)
    if overrides:
        config = with_overrides(saved.config, overrides)
        if problems := shadowed_overrides(config, overrides, [saved.stage.index]):
            raise ConfigError(problems)
        validate(config.model_copy(update={"init_from": None}), allow_idle=True, training=False)
        saved = saved._replace(config=config, stage=resolve_stages(config)[saved.stage.index])
    paths = SavedPaths(saved.config, saved.path)
    if tokenizer is None:
        paths.check_tokenizer()
    config = paths.located()
    unread = config.data.model_copy(update={"validation": []} | ({"tokenizer": None} if tokenizer else {}))
    without = {"data": unread, "evaluation": config.evaluation.with_corpora(lambda path: None)}
    check_paths(config.model_copy(update=without), saved.path, paths.roots)
    return saved._replace(config=config), paths.roots


def read_checkpoint(path: Path) -> SavedRun:
    """`open_checkpoint`, without a look at the files that the recipe names."""
    checkpoint = find_checkpoint(path)
    config = saved_recipe(checkpoint)
    # Where the first weights came from no longer matters, and what changes nothing did no harm in training.
    validate(config.model_copy(update={"init_from": None}), allow_idle=True)
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
