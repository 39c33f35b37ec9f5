"""Checks of a recipe's evaluations, and of the exit criteria (`until`) of stages, which read the evaluations' numbers.

The only file of this folder that asks evaluations.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from moba_train.config.base import Section
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.explain import did_you_mean
from moba_train.config.schema import RunConfig, UntilConfig
from moba_train.data.indexed import corpus_file
from moba_train.errors import DataError
from moba_train.evals.evaluation import Evaluation, EvaluationSetting, name_of, with_full, without_full
from moba_train.evals.registry import EVALUATIONS, asked_evaluations, evaluation_of
from moba_train.optim.spec import stage_learning_rate
from moba_train.resolve.run import ResolvedRun


def evaluation_settings(run: ResolvedRun) -> tuple[EvaluationSetting, ...]:
    """Settings of the evaluations in each stage of the run."""
    lengths = [stage.seq_len for stage in run.stages]
    return tuple(
        EvaluationSetting(
            stage=stage,
            model=run.setup.shape,
            seed=run.seed,
            validation=tuple(run.data.validation),
            tokenizer=run.data.tokenizer,
            every=run.evaluation.every,
            sequences=run.evaluation.sequences,
            trained_length=max(lengths[: stage.index + 1]),
            longest_length=max(lengths),
            tp=run.parallel.tp,
            pp=run.parallel.pp,
        )
        for stage in run.stages
    )


def evaluation_problems(section: EvaluationConfig, settings: Sequence[EvaluationSetting]) -> Iterator[str]:
    """Problems of the evaluations that the recipe asks for, in any stage, each named by its key."""
    asked = asked_evaluations(section, settings[0].validation)
    yield from dict.fromkeys(
        problem
        for evaluation, options in asked.items()
        for setting in settings
        for problem in evaluation.problems(options, setting)
    )


def pipeline_evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Evaluations that the recipe's pipeline, of more than one rank, cannot run while it trains."""
    later = "which a pipeline cannot do; `moba-train eval` can, on the checkpoints"
    for evaluation, options in asked_evaluations(config.evaluation, config.data.validation).items():
        if (problem := evaluation.pipeline_problem(options)) is not None:
            yield f"{problem[0]} with parallel.pp {config.parallel.pp}, {later}; {problem[1]}"


def evaluated_sequences(section: EvaluationConfig, setting: EvaluationSetting) -> Mapping[str, int]:
    """Sequences of one forward pass of a rank, by the key of each evaluation that runs in the stage of `setting`."""
    stage = setting.stage
    asked = asked_evaluations(section, setting.validation) if stage.evaluate else ()
    return {evaluation.key: evaluation.sequences_per_pass(stage) for evaluation in asked}


def sample_problems(section: EvaluationConfig, settings: Sequence[EvaluationSetting]) -> Iterator[str]:
    """Samples of evaluations that cannot be made, in any stage: at its first evaluation they would end the run."""
    evaluated = [setting for setting in settings if setting.stage.evaluate]
    for setting in evaluated[:1]:
        for evaluation, options in asked_evaluations(section, setting.validation).items():
            yield from _first_sample_problem(evaluation, options, evaluated)


def _first_sample_problem(
    evaluation: type[Evaluation[Any]], options: Section | None, settings: Sequence[EvaluationSetting]
) -> Iterator[str]:
    for setting in settings:
        try:
            evaluation.check_samples(options, setting)
        except DataError as error:
            yield f"{error} (stage {setting.stage.name!r})"
            return


def evaluation_warnings(section: EvaluationConfig, settings: Sequence[EvaluationSetting]) -> Iterator[str]:
    """Evaluations that are configured but never run in training. No error: `moba-train eval` runs them afterwards."""
    validation = settings[0].validation
    asked = asked_evaluations(section, validation)
    evaluated = [setting for setting in settings if setting.stage.evaluate]
    if asked and not evaluated:
        yield (
            f"{', '.join(evaluation.key for evaluation in asked)}: given, but no stage evaluates, as "
            "stages[i].evaluate is false in all of them: the run has no evaluation; set it to true in a stage, or use "
            "`moba-train eval` afterwards"
        )
    if not asked and section != EvaluationConfig():
        yield "evaluation: given, but there is nothing to evaluate on; set data.validation, or remove the section"
    if not all(corpus_file(source.path, "idx").is_file() for source in validation):
        return  # `plan --no-data`: the corpora need not exist yet
    for evaluation, options in asked.items():
        for setting in evaluated:
            with suppress(DataError):  # of a damaged corpus, which is reported elsewhere
                if lacking := [*evaluation.data_problems(options, setting)]:
                    yield f"{evaluation.key}: in stage {setting.stage.name!r}, {'; '.join(lacking)}"


def exit_problems(config: RunConfig, settings: Sequence[EvaluationSetting]) -> Iterator[str]:
    """Problems of the stages' `until`, each named by its key. The recipe's attention and schedules must be sound.

    settings: one for each stage of the recipe
    """
    stages = config.stages
    resolved = [setting.stage for setting in settings]
    for index, stage in enumerate(stages):
        until = stage.until
        if until is None:
            continue
        path = f"stages[{index}].until"
        if problem := _form_problem(until):
            yield f"{path}{problem}"
            continue
        if not stage.evaluate:
            yield f"{path}: needs the stage's evaluations; given evaluate: false, allowed: true"
            continue
        yield from _metric_problems(config.evaluation, settings[index], until, path)
        if until.max_tokens <= stage.tokens:
            yield f"{path}.max_tokens: given {until.max_tokens}; allowed: more than the stage's tokens {stage.tokens}"
        recovered = until.trailing_loss_recovered
        before = stages[index - 1] if index > 0 else None
        comparable = before is not None and before.evaluate and before.seq_len == stage.seq_len
        if recovered is not None and recovered.reference == "before" and not comparable:
            yield (
                f"{path}.trailing_loss_recovered.reference: given 'before', but no stage before {stage.name!r} is "
                f"evaluated with its seq_len {stage.seq_len}; insert one, or set reference: full"
            )
        planned_end = resolved[index].first_token + resolved[index].planned_tokens
        if stage_learning_rate(resolved, index, config.optim.schedule, planned_end) == 0:
            yield (
                f"{path}: beyond its tokens the stage would go on with the learning rate at their end, which is 0; set "
                "min_lr_ratio of its schedule, or kind: constant"
            )


def exit_data_problems(section: EvaluationConfig, settings: Sequence[EvaluationSetting]) -> Iterator[str]:
    """Stages whose criterion could never be judged, because the corpora do not give its numbers."""
    for setting in settings:
        stage = setting.stage
        if stage.until is None:
            continue
        asked = asked_evaluations(section, setting.validation)
        for evaluation in dict.fromkeys(map(evaluation_of, stage.until.metrics)):
            if evaluation not in asked:
                continue
            try:
                for problem in evaluation.data_problems(asked[evaluation], setting):
                    yield f"stages[{stage.index}].until: {problem}"
            except DataError as error:
                yield f"data.validation: {error}"
                return


def _form_problem(until: UntilConfig) -> str:
    """Problem of the keys given, as text that follows the section's key; empty: none."""
    bounds = [key for key in ("at_most", "at_least") if getattr(until, key) is not None]
    if until.trailing_loss_recovered is not None:
        extra = [key for key in ("metric", "at_most", "at_least") if getattr(until, key) is not None]
        return f": given trailing_loss_recovered and {', '.join(extra)}; allowed: one criterion" if extra else ""
    if until.metric is None:
        return ": no criterion given; allowed: trailing_loss_recovered, or metric with at_most or at_least"
    if len(bounds) != 1:
        given = " and ".join(bounds) or "no bound"
        return f": given metric with {given}; allowed: metric with either at_most or at_least"
    return ""


def _metric_problems(
    section: EvaluationConfig, setting: EvaluationSetting, until: UntilConfig, path: str
) -> Iterator[str]:
    """Numbers that no evaluation gives, or none in this stage."""
    stage = setting.stage
    asked = asked_evaluations(section, setting.validation)
    missing: dict[type[Evaluation[Any]], str] = {}
    for metric in until.metrics:
        evaluation = evaluation_of(metric)
        if evaluation is None:
            known = sorted(
                {name for other in EVALUATIONS.usable().values() for name in other.numbers | other.numbers_against_full}
            )
            hint = did_you_mean(metric, known)
            yield f"{path}.metric: given {metric!r}, which no evaluation gives{hint}; allowed: {', '.join(known)}"
            continue
        if evaluation not in asked:
            missing.setdefault(evaluation, metric)
        if metric in evaluation.numbers_against_full and len(with_full(stage.attention)) == 1:
            why = f"all layers of stage {stage.name!r} have full attention"
            if name_of(stage.attention) != "full":
                why = without_full(stage.attention) or f"full attention would change no layer of stage {stage.name!r}"
            nothing = f"but {why}, so there is nothing to"
            if until.trailing_loss_recovered is not None:
                yield (
                    f"{path}.trailing_loss_recovered.reference: given 'full', {nothing} recover; set attention, or "
                    "reference: before"
                )
            else:
                yield f"{path}.metric: given {metric!r}, {nothing} compare with full attention; set attention"
    for evaluation, metric in missing.items():
        yield f"{path}: {metric} is not evaluated; set {evaluation.key}"
