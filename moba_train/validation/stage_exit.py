"""What cannot work about position-wise evaluation and about stages that wait for a gate."""

from collections.abc import Iterator

from moba_train.config.attention import merge_attention, resolve_layers
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.config.stages import resolve_stages
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.errors import DataError
from moba_train.optim.schedule import stage_learning_rate


def gate_problems(config: RunConfig) -> Iterator[str]:
    """Each problem of `evaluation.position_wise` and of the stages' `until`, named by its key. The recipe's attention
    and schedules must be sound."""
    wanted = config.evaluation.position_wise
    if wanted is not None:
        if not config.data.validation:
            yield "evaluation.position_wise: needs documents to evaluate on; set data.validation, or remove it"
        for index, stage in enumerate(config.stages):
            if stage.seq_len % wanted.bucket:
                yield (
                    f"evaluation.position_wise.bucket: given {wanted.bucket}, which does not divide "
                    f"stages[{index}].seq_len {stage.seq_len}"
                )
    for index, stage in enumerate(config.stages):
        yield from _gate_problems(config, stage, index)


def _gate_problems(config: RunConfig, stage: StageConfig, index: int) -> Iterator[str]:
    if stage.until is None:
        return
    path = f"stages[{index}].until"
    if config.evaluation.position_wise is None:
        yield f"{path}: the trailing loss is not evaluated; set evaluation.position_wise"
    if stage.until.max_tokens <= stage.tokens:
        yield f"{path}.max_tokens: given {stage.until.max_tokens}; allowed: more than the stage's tokens {stage.tokens}"
    where = f"{path}.trailing_loss_recovered"
    if stage.until.needs_full:
        layers = resolve_layers(merge_attention(config.attention, stage.attention), config.model.layers)
        if all(layer.kind == "full" for layer in layers):
            yield (
                f"{where}.reference: given 'full', but stage {stage.name!r} has no other than full layers, so there is "
                "nothing to recover; set attention, or reference: before"
            )
    elif index == 0 or config.stages[index - 1].seq_len != stage.seq_len:
        yield (
            f"{where}.reference: given 'before', but no stage before {stage.name!r} ends with its seq_len "
            f"{stage.seq_len}; insert one, or set reference: full"
        )
    stages = resolve_stages(config)
    resolved = stages[index]
    if stage_learning_rate(stages, index, config.optim.schedule, resolved.first_token + resolved.planned_tokens) == 0:
        yield (
            f"{path}: beyond its tokens the stage would go on with the learning rate at their end, which is 0; set "
            "min_lr_ratio of its schedule, or kind: constant"
        )


def gate_data_problems(config: RunConfig) -> Iterator[str]:
    """Stages whose gate could never be asked, because no validation document is long enough."""
    wanted = config.evaluation.position_wise
    for index, stage in enumerate(config.stages):
        if stage.until is None or wanted is None:
            continue
        try:
            found = LongDocumentSamples(config.data.validation, stage.seq_len, wanted.sequences, config.seed, 2)
        except DataError as error:
            yield f"data.validation: {error}"
            return
        if len(found) < 2:
            yield (
                f"stages[{index}].until: data.validation has {len(found)} stretches of {stage.seq_len} tokens inside "
                "one document, at least 2 are needed for the trailing loss; hold out longer documents"
            )
