"""Whether a run can go on from the tensors of a checkpoint with a recipe that has changed since it was saved.

Weights of the model itself cannot change, as `progress.check_resumable` sees to. Parameters of attention kinds can,
until a stage has begun that uses their kind in their layer: nothing has trained them. From then on they stay, however
often the recipe changes.

Whether a run that resumes reads the corpora that it was trained and evaluated on, wherever they are stored now.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

from moba_train.config.data import SourceConfig
from moba_train.config.explain import given
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages, used_kinds
from moba_train.data.loader import validation_fingerprints
from moba_train.data.samples import StageData
from moba_train.data.sidecar import Fingerprint
from moba_train.errors import CheckpointError, ConfigError, DataError, named_layers
from moba_train.model.build import describe_shapes, different_shapes, kind_prefix, kind_shapes
from moba_train.run.progress import Progress, check_resumable, check_tokenizer


def resumed_progress(config: RunConfig, meta: Mapping[str, Any], tokenizer: str, where: str) -> Progress:
    """The progress in the meta of the checkpoint `where`, from which the recipe goes on.

    tokenizer  its hash; empty: not compared

    Raises CheckpointError, naming the key, when the recipe cannot go on from there.
    """
    progress = Progress.from_meta(meta.get("progress"), len(config.stages))
    check_resumable(config, progress, where)
    check_tokenizer(tokenizer, progress, config, where)
    then = recipe_then(meta)
    progress.trained_kinds = trained_kinds(config, then, progress)
    if then is not None:
        check_tensors(config, then, progress, where)
    return progress


def recipe_then(meta: Mapping[str, Any]) -> RunConfig | None:
    """The recipe in the meta of a checkpoint; None where there is none that this version can read."""
    text = meta.get("config")
    with contextlib.suppress(ConfigError):
        if isinstance(text, str):
            config = parse_config(text, "the checkpoint's recipe")
            resolve_stages(config)
            return config
    return None


def trained_kinds(config: RunConfig, then: RunConfig | None, progress: Progress) -> list[tuple[int, str]]:
    """Layer and name of the attention kinds with parameters that stages up to the current one use, by this recipe, by
    the recipe `then`, or by an earlier one, as `progress` has noted."""
    recipes = [recipe for recipe in (config, then) if recipe is not None]
    used = (used_kinds(recipe, progress.stage) & kind_shapes(recipe).keys() for recipe in recipes)
    return sorted({*progress.trained_kinds, *chain.from_iterable(used)})


def check_tensors(config: RunConfig, then: RunConfig, progress: Progress, where: str) -> None:
    """Raises CheckpointError, naming the key, when the recipe cannot go on with the optimizer state, or with the
    trained parameters of attention kinds, of the checkpoint `where`, saved at `progress` with the recipe `then`."""
    anew = f"To begin with these weights all the same, set run_dir to a new folder and init_from: {where}"
    if then.optim.kind != config.optim.kind:
        raise CheckpointError(
            f"cannot resume from {where}: optim.kind was {given(then.optim.kind)} when it was saved and is "
            f"{given(config.optim.kind)} now, which keeps another state for each parameter; restore it. {anew}, with a "
            "fresh state"
        )
    before = kind_shapes(then)
    now = kind_shapes(config)
    changed: dict[tuple[str, str, str], list[int]] = {}
    for layer, kind in progress.trained_kinds:
        there, here = different_shapes(before.get((layer, kind), {}), now.get((layer, kind), {}))
        if there or here:
            changed.setdefault((kind, describe_shapes(there), describe_shapes(here)), []).append(layer)
    for (kind, there_text, here_text), layers in changed.items():
        index = _first_stage_with(kind, layers[0], then, config)
        reason = "stages that have begun keep their kinds with parameters"
        remedy = "restore the attention, or add a stage with another one"
        if index > progress.stage:
            reason = "a stage that has begun has trained them, by an earlier recipe of this run"
            remedy = "restore this stage's attention, or add a stage that uses the kind in these layers"
        raise CheckpointError(
            f"cannot resume from {where}: stages[{index}].attention: parameters of kind {kind!r} in "
            f"{named_layers(layers)} were {there_text} when it was saved and are {here_text} now; {reason}: {remedy}. "
            f"{anew}"
        )


def _first_stage_with(kind: str, layer: int, *recipes: RunConfig) -> int:
    """Index of the first stage that uses a kind in a layer, in any of the recipes, of which one has such a stage."""
    return min(
        index for recipe in recipes for index, stage in enumerate(resolve_stages(recipe)) if stage.kinds[layer] == kind
    )


def unused_parameters(config: RunConfig, then: RunConfig | None, progress: Progress) -> list[str]:
    """What the names of parameters begin with that attention kinds have in either recipe and that are not trained: the
    checkpoint may lack them, have more of them or have them in another shape."""
    known = set(kind_shapes(config))
    if then is not None:
        known |= set(kind_shapes(then))
    return [kind_prefix(layer, kind) for layer, kind in sorted(known - {*progress.trained_kinds})]


def new_parameters(config: RunConfig, then: RunConfig) -> dict[str, int]:
    """Number of parameters by attention kind that a checkpoint saved with the recipe `then` lacks, or has in another
    shape, and that so begin anew."""
    before = kind_shapes(then)
    sizes: Counter[str] = Counter()
    for (layer, kind), shapes in kind_shapes(config).items():
        _, new = different_shapes(before.get((layer, kind), {}), shapes)
        sizes[kind] += sum(prod(shape) for shape in new.values())
    return {kind: size for kind, size in sizes.items() if size}


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
    seen: Mapping[str, Fingerprint],
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
