"""Checks of a recipe's evaluations, and of the exit criteria (`until`) of stages, which read the evaluations' numbers.

The only file of this folder that asks evaluations.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from moba_train.config.attention import merge_attention, resolve_layers
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.explain import did_you_mean
from moba_train.config.schema import RunConfig, StageConfig, UntilConfig
from moba_train.config.stages import Stage
from moba_train.data.indexed import corpus_file
from moba_train.errors import DataError
from moba_train.evals.evaluation import Evaluation, EvaluationSetting, name_of
from moba_train.evals.registry import EVALUATIONS, enabled_evaluations, evaluation_of
from moba_train.optim.spec import stage_learning_rate


def evaluation_settings(config: RunConfig, stages: Sequence[Stage]) -> tuple[EvaluationSetting, ...]:
    """The setting of evaluations in each of the stages, which are all stages of the recipe or the first ones."""
    lengths = [stage.seq_len for stage in stages]
    recipe_attention = resolve_layers(config.attention, config.model.layers)
    return tuple(
        EvaluationSetting(
            stage=stage,
            model=config.model,
            seed=config.seed,
            validation=tuple(config.data.validation),
            tokenizer=config.data.tokenizer,
            every=config.evaluation.every,
            sequences=config.evaluation.sequences,
            trained_length=max(lengths[: stage.index + 1]),
            longest_length=max(lengths),
            recipe_attention=recipe_attention,
            tp=config.parallel.tp,
            pp=config.parallel.pp,
        )
        for stage in stages
    )


def evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Problems of each evaluation that the recipe asks for, named by their keys."""
    for evaluation in enabled_evaluations(config):
        yield from evaluation.problems(config)


def pipeline_evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Evaluations that a pipeline cannot run while it trains. `parallel.pp` is above 1."""
    later = "which a pipeline cannot do; `moba-train eval` can, on the checkpoints"
    for evaluation in enabled_evaluations(config):
        if (problem := evaluation.pipeline_problem(config)) is not None:
            yield f"{problem[0]} with parallel.pp {config.parallel.pp}, {later}; {problem[1]}"


def evaluated_sequences(config: RunConfig, stage: Stage) -> Mapping[str, int]:
    """Sequences of one forward pass of a rank, by the key of each evaluation that runs in `stage`."""
    asked = enabled_evaluations(config) if stage.evaluate else ()
    return {evaluation.key: evaluation.sequences_per_pass(stage) for evaluation in asked}


def sample_problems(config: RunConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Samples of evaluations that cannot be made, in any stage: at its first evaluation they would end the run."""
    for evaluation in enabled_evaluations(config):
        for stage in stages:
            try:
                if stage.evaluate:
                    evaluation.check_samples(config, stage)
            except DataError as error:
                yield f"{error} (stage {stage.name!r})"
                break


def evaluation_warnings(config: RunConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Evaluations that are configured but never run in training. No error: `moba-train eval` runs them afterwards."""
    enabled = enabled_evaluations(config)
    asked = ", ".join(evaluation.key for evaluation in enabled)
    if asked and not any(stage.evaluate for stage in stages):
        yield (
            f"{asked}: given, but no stage evaluates, as stages[i].evaluate is false in all of them: the run has no "
            "evaluation; set it to true in a stage, or use `moba-train eval` afterwards"
        )
    if not asked and config.evaluation != EvaluationConfig():
        yield "evaluation: given, but there is nothing to evaluate on; set data.validation, or remove the section"
    if not all(corpus_file(source.path, "idx").is_file() for source in config.data.validation):
        return  # `plan --no-data`: the corpora need not exist yet
    for evaluation in enabled:
        for stage in stages:
            with suppress(DataError):  # of a damaged corpus, which is reported elsewhere
                if stage.evaluate and (lacking := [*evaluation.data_problems(config, stage)]):
                    yield f"{evaluation.key}: in stage {stage.name!r}, {'; '.join(lacking)}"


def exit_problems(config: RunConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Each problem of the stages' `until`, named by its key. The recipe's attention and schedules must be sound."""
    for index, stage in enumerate(config.stages):
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
        yield from _metric_problems(config, stage, until, path)
        if until.max_tokens <= stage.tokens:
            yield f"{path}.max_tokens: given {until.max_tokens}; allowed: more than the stage's tokens {stage.tokens}"
        recovered = until.trailing_loss_recovered
        before = config.stages[index - 1] if index > 0 else None
        comparable = before is not None and before.evaluate and before.seq_len == stage.seq_len
        if recovered is not None and recovered.reference == "before" and not comparable:
            yield (
                f"{path}.trailing_loss_recovered.reference: given 'before', but no stage before {stage.name!r} is "
                f"evaluated with its seq_len {stage.seq_len}; insert one, or set reference: full"
            )
        yield from _rate_problems(config, stages, index, path)


def exit_data_problems(config: RunConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Stages whose criterion could never be judged, because the corpora do not give its numbers."""
    for stage in stages:
        if stage.until is None:
            continue
        wanted = dict.fromkeys(map(evaluation_of, stage.until.metrics))
        for evaluation in wanted:
            if evaluation is None or not evaluation.enabled(config):
                continue
            try:
                for problem in evaluation.data_problems(config, stage):
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


def _metric_problems(config: RunConfig, stage: StageConfig, until: UntilConfig, path: str) -> Iterator[str]:
    """Numbers that no evaluation gives, or none in this stage."""
    layers = resolve_layers(merge_attention(config.attention, stage.attention), config.model.layers)
    missing: dict[type[Evaluation], str] = {}
    for metric in until.metrics:
        evaluation = evaluation_of(metric)
        if evaluation is None:
            known = sorted(
                {name for other in EVALUATIONS.values() for name in other.numbers | other.numbers_against_full}
            )
            hint = did_you_mean(metric, known)
            yield f"{path}.metric: given {metric!r}, which no evaluation gives{hint}; allowed: {', '.join(known)}"
            continue
        if not evaluation.enabled(config):
            missing.setdefault(evaluation, metric)
        if metric in evaluation.numbers_against_full and name_of(layers) == "full":
            nothing = f"but stage {stage.name!r} has no other than full layers, so there is nothing to"
            if until.trailing_loss_recovered is not None:
                yield (
                    f"{path}.trailing_loss_recovered.reference: given 'full', {nothing} recover; set attention, or "
                    "reference: before"
                )
            else:
                yield f"{path}.metric: given {metric!r}, {nothing} compare with full attention; set attention"
    for evaluation, metric in missing.items():
        yield f"{path}: {metric} is not evaluated; set {evaluation.key}"


def _rate_problems(config: RunConfig, stages: Sequence[Stage], index: int, path: str) -> Iterator[str]:
    stage = stages[index]
    if stage_learning_rate(stages, index, config.optim.schedule, stage.first_token + stage.planned_tokens) == 0:
        yield (
            f"{path}: beyond its tokens the stage would go on with the learning rate at their end, which is 0; set "
            "min_lr_ratio of its schedule, or kind: constant"
        )
