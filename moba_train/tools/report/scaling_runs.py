"""Finished runs as points of a scaling fit: their compute, their losses, and the group that they belong to."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from moba_train.config.base import SAVED
from moba_train.config.data import SourceConfig
from moba_train.config.explain import did_you_mean, explain
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.indexed import corpus_file
from moba_train.data.loader import DataSpec
from moba_train.errors import ForeignFileError, UserError
from moba_train.foreign_files import check_below, working_roots
from moba_train.memory.flops import Documents, real_flops, stage_documents
from moba_train.resolve.run import ResolvedRun, resolve_unchecked
from moba_train.tools.report.history import History, number, read_history

PFLOPS_DAY = 1e15 * 86400
"""FLOPs of one PFLOP/s-day, the unit of published fits."""
COMPUTES = ("6ND", "real")
"""Ways to count compute: 6 FLOPs for each parameter outside embeddings and each token; `memory.flops.real_flops`."""
Compute = Literal["6ND", "real"]

_ELSEWHERE = "one document per sequence: corpora are not below the working folder or $MOBA_TRAIN_DATA_ROOTS"
_SAME = ("data.train", "data.validation", "data.tokenizer", "model.vocab_size", "evaluation.sequences", "loss_norm")
"""Keys in which runs of one fit should be equal."""


@dataclass(frozen=True)
class ScalingRun:
    """One finished run."""

    folder: Path
    group: str
    parameters: int
    """Outside embedding and output projection, those of attention kinds included."""
    tokens: int
    compute: dict[str, float]
    """PFLOP/s-days of the complete run, by the ways of `COMPUTES`."""
    losses: dict[str, float]
    """Losses by metric, in nats per token."""
    documents: str
    """Origin of the document lengths that real FLOPs count."""
    config: RunConfig


def read_runs(
    folders: Sequence[Path],
    metrics: Sequence[str],
    group_by: str = "attention",
    last_steps: int = 100,
    data_roots: Sequence[Path] = (),
) -> list[ScalingRun]:
    """The runs in `folders`, in their order.

    metrics     `loss`: mean training loss of the last `last_steps` logged steps; any other: the number of that name of
                the last evaluation, which must be of the run's last step
    group_by    `attention`: the attention kinds of the stages; otherwise a key of the recipe, such as
                `attention.moba.topk`
    data_roots  folders, as resolved paths, whose corpora are read for the lengths of their documents, in addition to
                those below the working folder and $MOBA_TRAIN_DATA_ROOTS; others count one document per sequence

    Raises UserError for a folder that is no run, or given twice, an unfinished run, and a metric that it does not have.
    """
    known: set[Path] = set()
    for folder in folders:
        if folder.resolve() in known:
            raise UserError(f"{folder}: given twice; every run counts once")
        known.add(folder.resolve())
    return [_read_run(folder, metrics, group_by, last_steps, data_roots) for folder in folders]


def _read_run(
    folder: Path, metrics: Sequence[str], group_by: str, last_steps: int, data_roots: Sequence[Path]
) -> ScalingRun:
    history = read_history(folder)
    config = _config(history)
    run = resolve_unchecked(config)
    stages = run.after_exit(_exited_steps(history, run)).stages
    _check_finished(history, stages[-1])
    parameters = run.setup.spec.counts.without_embeddings
    tokens = stages[-1].end_token
    readable = _are_below([source for stage in stages for source in stage.sources], data_roots)
    flops, documents = _real_flops(run.setup.shape, run.samples, stages, readable)
    compute = {"6ND": 6.0 * parameters * tokens / PFLOPS_DAY, "real": flops / PFLOPS_DAY}
    losses = {metric: _loss(history, metric, stages[-1].end_step, last_steps) for metric in metrics}
    group = _kinds(stages) if group_by == "attention" else _value(folder, config, group_by)
    return ScalingRun(folder, group, parameters, tokens, compute, losses, documents, config)


def _config(history: History) -> RunConfig:
    if not history.recipe:
        raise UserError(f"{history.folder}: {history.notices[-1] if history.notices else 'config.yaml is empty'}")
    try:
        return RunConfig.model_validate(history.recipe, context=SAVED)
    except ValidationError as error:
        problems = "; ".join(explain(error, RunConfig))
        raise UserError(f"{history.folder / 'config.yaml'}: this version cannot read it: {problems}") from None


def _exited_steps(history: History, run: ResolvedRun) -> dict[str, int]:
    """Steps of the stages whose exit criterion was met, by name: they ended before their last possible step."""
    exited: dict[str, int] = {}
    met = history.exited()
    for stage in run.stages:
        if stage.name in met:
            exited[stage.name] = met[stage.name] - run.after_exit(exited).stages[stage.index].first_step
    return exited


def _check_finished(history: History, last: Stage) -> None:
    reached = max((int(record["step"]) for record in (*history.metrics, *history.events)), default=0)
    if reached < last.end_step:
        raise UserError(
            f"{history.folder}: unfinished: at step {reached} of {last.end_step}; only finished runs can be compared, "
            "because the loss depends on where the learning rate is in its schedule"
        )


def _real_flops(model: ModelConfig, samples: DataSpec, stages: Sequence[Stage], readable: bool) -> tuple[float, str]:
    """FLOPs of all stages, and the origin of the document lengths. readable: the corpora may be read."""
    total = 0.0
    sources = []
    if samples.long_conversations == "error":
        # A run that finished had none, or is from before the option, when they were split.
        samples = replace(samples, long_conversations="split")
    for stage in stages:
        documents = stage_documents(samples, stage) if readable else Documents((stage.seq_len,), from_corpora=False)
        flops = real_flops(model, stage.attention, documents.lengths) / documents.tokens
        total += flops * (stage.end_token - stage.first_token)
        sources.append(documents.source if readable else _ELSEWHERE)
    return total, "; ".join(dict.fromkeys(sources))


def _are_below(sources: Sequence[SourceConfig], further: Sequence[Path]) -> bool:
    """True if all these corpora are below the working folder, $MOBA_TRAIN_DATA_ROOTS or `further` folders: the recipe
    may come from elsewhere."""
    roots = [*working_roots(), *further]
    try:
        for source in sources:
            for end in ("idx", "bin"):
                check_below(Path(corpus_file(source.path, end)), roots)
    except ForeignFileError:
        return False
    return True


def _loss(history: History, metric: str, last_step: int, last_steps: int) -> float:
    """The run's value of `metric`."""
    if metric == "loss":
        losses = [value for value in history.column("loss").tolist()[-last_steps:] if math.isfinite(value)]
        value = float(np.mean(losses)) if losses else math.nan
    else:
        found = [event for event in history.events if math.isfinite(number(event, metric))]
        if not found:
            raise UserError(_no_metric(history, metric))
        if found[-1]["step"] < last_step:
            raise UserError(
                f"{history.folder}: its last {metric} is of step {found[-1]['step']}, the run ended at {last_step}"
            )
        value = number(found[-1], metric)
    if not 0 < value < math.inf:
        raise UserError(f"{history.folder}: {metric} is {value:g}; only positive losses can be fitted")
    return value


def _no_metric(history: History, metric: str) -> str:
    names = {name for event in history.events for name in event if math.isfinite(number(event, name))}
    known = ["loss", *sorted(name for name in names if "loss" in name)]
    return f"{history.folder}: no evaluation gives {metric!r}{did_you_mean(metric, known)}; given: {', '.join(known)}"


def _kinds(stages: Sequence[Stage]) -> str:
    """The attention kinds of the stages: `moba`, `full+moba` where layers differ, `full, then moba` where stages do."""
    by_stage = ["+".join(sorted(set(stage.kinds))) for stage in stages]
    return ", then ".join(kinds for kinds, _ in groupby(by_stage))


def _value(folder: Path, config: RunConfig, key: str) -> str:
    """The value of a key of the recipe, as text."""
    value: Any = config.model_dump(mode="json")
    for name in key.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            known = list(value) if isinstance(value, dict) else []
            raise UserError(
                f"--group-by: given {key!r}, but the recipe of {folder} has no {name!r}"
                f"{did_you_mean(name, known)}; allowed: attention, or a key such as attention.moba.topk"
            )
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def comparison_warnings(runs: Sequence[ScalingRun]) -> Iterator[str]:
    """Differences of the recipes that make losses or computes hard to compare, a sentence each."""
    for key in _SAME:
        values = {_value(run.folder, run.config, key): run.folder for run in runs}
        if len(values) > 1:
            one, other = list(values.items())[:2]
            yield f"{key} differs: {one[0]} in {one[1]}, {other[0]} in {other[1]}; their losses may not be comparable"
    lengths = {run.config.stages[-1].seq_len: run.folder for run in runs}
    if len(lengths) > 1:
        yield f"the last stages have sequences of different lengths: {', '.join(map(str, sorted(lengths)))} tokens"
    for run in runs:
        if run.config.init_from is not None:
            yield f"{run.folder} began with the weights of {run.config.init_from}, whose compute is not counted"
    if len({run.documents for run in runs}) > 1:
        yield "real FLOPs count documents of corpora for some runs, one document per sequence where none were found"
