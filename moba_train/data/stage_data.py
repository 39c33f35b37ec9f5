"""From a recipe's stage to its samples. A file of its own, because samples.py needs neither recipe nor torch."""

from collections.abc import Mapping

from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.samples import StageData


def training_data(config: RunConfig, stage: Stage, starts: Mapping[str, int]) -> StageData:
    """The samples that `stage` of the recipe trains on, up to its latest possible end; `starts` as in `StageData`."""
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
