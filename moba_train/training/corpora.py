"""Whether a run that resumes reads the corpora that it was trained and evaluated on, wherever they are stored now."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.data import SourceConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.fingerprint import Fingerprint
from moba_train.data.samples import StageData
from moba_train.data.stage_data import validation_fingerprints
from moba_train.errors import DataError
from moba_train.training.progress import Progress


def check_corpora(config: RunConfig, stage: Stage, data: StageData, progress: Progress) -> None:
    """Compare the corpora of `stage` (opened as `data`) and of evaluation with those that `progress` has seen, and
    record their fingerprints there.

    A source that was saved is compared with the one at the same place of the same list then, whatever their paths: a
    corpus may have moved. Any other source is compared with the corpus that its path named before, if it did.

    Raises DataError, naming the key, both paths and what differs.
    """
    saved_stages = progress.data_plan.get("stages", [])
    saved_train = saved_stages[stage.index]["train"] if stage.index < len(saved_stages) else []
    saved_validation = progress.data_plan.get("data", {}).get("validation") or []
    train_key = f"stages[{stage.index}].train" if config.stages[stage.index].train else "data.train"
    validation = validation_fingerprints(config)
    seen = progress.fingerprints
    _compare(train_key, saved_train, stage.sources, data.fingerprints, seen)
    _compare("data.validation", saved_validation, config.data.validation, validation, seen)
    seen |= data.fingerprints | validation


def _compare(
    key: str,
    saved: Sequence[dict[str, Any]],
    sources: Sequence[SourceConfig],
    found: Mapping[str, Fingerprint],
    seen: Mapping[str, Fingerprint | str],
) -> None:
    """saved: the sources of this list in the checkpoint, [] if it has none; found, seen: fingerprints by path, now and
    then."""
    for index, source in enumerate(sources):
        path_then = str(saved[index].get("path")) if index < len(saved) else source.path
        if path_then not in seen:
            continue
        difference = found[source.path].difference(seen[path_then])
        if difference is None:
            continue
        if path_then == source.path:
            what = f"corpus {source.path} has changed since the checkpoint was saved: {difference}; restore the corpus"
        else:
            what = (
                f"given {source.path}, which holds another corpus than {path_then} did when the checkpoint was saved: "
                f"{difference}; name the place where that corpus is now"
            )
        raise DataError(f"{key}[{index}].path: {what}, or start a new run with another run_dir")
