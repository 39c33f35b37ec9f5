"""The samples of a recipe's stage. Apart from samples.py, which needs neither recipe nor torch."""

from collections.abc import Mapping

from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.samples import StageData


def training_data(config: RunConfig, stage: Stage, starts: Mapping[str, int]) -> StageData:
    """What `stage` of the recipe is trained on, to its latest possible end; `starts` as in `StageData`."""
    return StageData(
        stage.sources,
        stage.seq_len,
        stage.max_steps * stage.batch_sequences,
        config.seed,
        starts,
        config.model.vocab_size,
        config.data.packing,
        config.loss_norm,
    )
