"""Problems of a stage's exit criterion (`until`)."""

from collections.abc import Iterator

from moba_train.config.attention import merge_attention, resolve_layers
from moba_train.config.explain import did_you_mean
from moba_train.config.run import UntilConfig
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.config.stages import resolve_stages
from moba_train.errors import DataError
from moba_train.evals.evaluation import Evaluation, name_of
from moba_train.evals.registry import EVALUATIONS, evaluation_of
from moba_train.optim.spec import stage_learning_rate


def exit_problems(config: RunConfig) -> Iterator[str]:
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
        yield from _rate_problems(config, index, path)


def exit_data_problems(config: RunConfig) -> Iterator[str]:
    """Stages whose criterion could never be judged, because the corpora do not give its numbers."""
    for stage in resolve_stages(config):
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
    """What is wrong with the keys given; empty: nothing."""
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


def _rate_problems(config: RunConfig, index: int, path: str) -> Iterator[str]:
    stages = resolve_stages(config)
    stage = stages[index]
    if stage_learning_rate(stages, index, config.optim.schedule, stage.first_token + stage.planned_tokens) == 0:
        yield (
            f"{path}: beyond its tokens the stage would go on with the learning rate at their end, which is 0; set "
            "min_lr_ratio of its schedule, or kind: constant"
        )
