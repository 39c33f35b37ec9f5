"""Lengths of the samples of questions about a long text."""

from collections.abc import Iterator

from moba_train.config.evaluation import AnswersConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage


def stage_lengths(wanted: AnswersConfig, stage: Stage) -> list[int]:
    """The lengths that `stage` is evaluated with, ascending."""
    if wanted.lengths is None:
        return [length for length in (stage.seq_len // 4, stage.seq_len // 2, stage.seq_len) if length]
    lengths = sorted(set(wanted.lengths))
    return lengths if wanted.extrapolate else [length for length in lengths if length <= stage.seq_len]


def trained_length(config: RunConfig, stage: Stage) -> int:
    """The longest sequences that the model was trained on by the end of `stage`."""
    return max([stage.seq_len, *(other.seq_len for other in config.stages[: stage.index + 1])])


def length_problems(config: RunConfig, wanted: AnswersConfig, key: str) -> Iterator[str]:
    """No tokenizer, and lengths beyond the longest stage's."""
    if config.data.tokenizer is None:
        yield f"{key}: needs the model's tokenizer; set data.tokenizer"
    longest = max(stage.seq_len for stage in config.stages)
    for length in wanted.lengths or ():
        if length > longest and not wanted.extrapolate:
            yield (
                f"{key}.lengths: given {length}; allowed: at most {longest}, the longest seq_len that is trained, or "
                "any with extrapolate: true"
            )
