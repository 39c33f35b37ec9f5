"""From a recipe to its data. A file of its own, because samples.py needs neither recipe nor torch."""

from collections.abc import Mapping

from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.fingerprint import Fingerprint
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import LossWeights
from moba_train.data.samples import StageData


def training_data(config: RunConfig, stage: Stage, starts: Mapping[str, int]) -> StageData:
    """The samples that `stage` of the recipe trains on, up to its latest possible end; `starts` as in `StageData`.

    Raises DataError as `StageData` does, and when no token of the stage's corpora carries loss.
    """
    data = StageData(
        stage.sources,
        stage.seq_len,
        stage.max_steps * stage.batch_sequences,
        config.seed,
        starts,
        config.model.vocab_size,
        config.data.packing,
        config.loss_norm,
    )
    data.check_loss()
    return data


def validation_fingerprints(config: RunConfig) -> dict[str, Fingerprint]:
    """Fingerprint of each corpus of `data.validation`, by path. Raises DataError when one is damaged."""
    paths = dict.fromkeys(source.path for source in config.data.validation)
    return {path: LossWeights(IndexedDataset(path), "token").fingerprint for path in paths}
