"""Checks of a run that goes on from a checkpoint with a recipe that has changed since.

Weights of the model itself cannot change, as `progress.check_resumable` sees to. Parameters of attention kinds can,
until a stage has begun that uses their kind in their layer: nothing has trained them. From then on they stay, however
often the recipe changes. Corpora must be those that the run was trained and evaluated on, in whatever folder they are
now.
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.data import SourceConfig
from moba_train.config.explain import given
from moba_train.config.load import parse_config
from moba_train.config.stages import Stage, used_kinds
from moba_train.data.loader import validation_fingerprints
from moba_train.data.samples import StageData
from moba_train.data.sidecar import Fingerprint
from moba_train.errors import CheckpointError, ConfigError, DataError, named_layers
from moba_train.model.spec import ModelSpec, describe_shapes, different_shapes, kind_prefix
from moba_train.resolve.run import ResolvedRun, resolve_unchecked
from moba_train.run.progress import Progress, check_resumable, check_tokenizer


def resumed_progress(run: ResolvedRun, meta: Mapping[str, Any], tokenizer: str, where: str) -> Progress:
    """The progress in the meta of the checkpoint `where`, from which the recipe goes on.

    tokenizer  its hash; empty: not compared

    Raises CheckpointError, naming the key, when the recipe cannot go on from there.
    """
    progress = Progress.from_meta(meta.get("progress"), len(run.stages))
    check_resumable(run, progress, where)
    check_tokenizer(tokenizer, run.data.tokenizer, progress, where)
    then = run_then(meta)
    progress.note_data(trained_kinds(progress, *((run, then) if then is not None else (run,))), {}, {})
    if then is not None:
        check_tensors(run, then, progress, where)
        if then.folders.run != run.folders.run and _source(then) != _source(run):
            # Another run's, with which this one begins: the same new name at each start until it saves one of its own.
            progress.run_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{progress.run_id} {run.folders.run}").hex[:8]
    return progress


def _source(run: ResolvedRun) -> str:
    """Address of the checkpoint of another run that the run begins with, or an empty text."""
    return next((str(setting.address) for name, _, setting in run.checkpoint.asked_for() if name == "resume_from"), "")


def run_then(meta: Mapping[str, Any]) -> ResolvedRun | None:
    """The run of the recipe in the meta of a checkpoint; None where there is none that this version can read."""
    text = meta.get("config")
    # A recipe of a later or much earlier version: the run goes on, and only what the progress holds is compared.
    with contextlib.suppress(ConfigError):
        if isinstance(text, str):
            return resolve_unchecked(parse_config(text, "the checkpoint's recipe"))
    return None


def trained_kinds(progress: Progress, *runs: ResolvedRun) -> list[tuple[int, str]]:
    """Layer and name of the attention kinds with parameters that stages up to the current one use, by the recipes of
    these runs, or by an earlier one, as `progress` has noted."""
    found = {*progress.trained_kinds}
    for run in runs:
        found |= used_kinds(run.stages[: progress.stage + 1]) & run.setup.spec.kind_shapes.keys()
    return sorted(found)


def check_tensors(run: ResolvedRun, then: ResolvedRun, progress: Progress, where: str) -> None:
    """Raises CheckpointError, naming the key, when the recipe cannot go on with the optimizer state, or with the
    trained parameters of attention kinds, of the checkpoint `where`, saved at `progress` with the recipe of `then`."""
    again = f"To begin with these weights all the same, set run_dir to a new folder and init_from: {where}"
    if then.optim.kind != run.optim.kind:
        raise CheckpointError(
            f"cannot resume from {where}: optim.kind was {given(then.optim.kind)} when it was saved and is "
            f"{given(run.optim.kind)} now, which keeps another state for each parameter; restore it. {again}, with a "
            "fresh state"
        )
    if then.setup.spec.adapters != run.setup.spec.adapters:
        was, now_is = (" ".join(map(str, one.setup.spec.adapters or ["null"])) for one in (then, run))
        raise CheckpointError(
            f"cannot resume from {where}: adapters was {was} when it was saved and is {now_is} now; restore it"
        )
    before = then.setup.spec.kind_shapes
    now = run.setup.spec.kind_shapes
    changed: dict[tuple[str, str, str], list[int]] = {}
    for layer, kind in progress.trained_kinds:
        there, here = different_shapes(before.get((layer, kind), {}), now.get((layer, kind), {}))
        if there or here:
            changed.setdefault((kind, describe_shapes(there), describe_shapes(here)), []).append(layer)
    for (kind, there_text, here_text), layers in changed.items():
        stages = (*then.stages, *run.stages)
        index = min(stage.index for stage in stages if stage.kinds[layers[0]] == kind)
        reason = "stages that have begun keep their kinds with parameters"
        remedy = "restore the attention, or add a stage with another one"
        if index > progress.stage:
            reason = "a stage that has begun has trained them, by an earlier recipe of this run"
            remedy = "restore this stage's attention, or add a stage that uses the kind in these layers"
        raise CheckpointError(
            f"cannot resume from {where}: stages[{index}].attention: parameters of kind {kind!r} in "
            f"{named_layers(layers)} were {there_text} when it was saved and are {here_text} now; {reason}: {remedy}. "
            f"{again}"
        )


def unused_parameters(spec: ModelSpec, then: ModelSpec | None, progress: Progress) -> list[str]:
    """Beginnings of the names of parameters that attention kinds have in either model and that are not trained: the
    checkpoint may lack them, have more of them or have them in another shape."""
    known = set(spec.kind_shapes)
    if then is not None:
        known |= set(then.kind_shapes)
    return [kind_prefix(layer, kind) for layer, kind in sorted(known - {*progress.trained_kinds})]


def check_corpora(
    stage: Stage, data: StageData, validation: Sequence[SourceConfig], progress: Progress
) -> dict[str, Fingerprint]:
    """Compare the corpora of `stage` (opened as `data`) and of evaluation with those that `progress` has seen. Returns
    their fingerprints, by path.

    A source that was saved is compared with the one at the same place of the same list then, whatever their paths: a
    corpus may have moved. Any other source is compared with the corpus that its path named before, if it did.

    Raises DataError, naming the key, both paths and the difference.
    """
    plan = progress.data_plan  # empty at the first start
    saved_stages = plan["stages"] if plan else []
    saved_train = saved_stages[stage.index]["train"] if stage.index < len(saved_stages) else []
    saved_validation = plan["data"]["validation"] if plan else []
    found = validation_fingerprints(validation)
    seen = progress.fingerprints
    _compare(stage.key("train"), saved_train, stage.sources, data.fingerprints, seen)
    _compare("data.validation", saved_validation, validation, found, seen)
    return data.fingerprints | found


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
