"""Sections of the evaluations that hide needles, and the keys that all evaluations with answers share."""

from typing import Annotated, Any, Literal

from pydantic import Field

from moba_train.config.base import MOST_SAMPLES, Length, Section
from moba_train.config.evaluation import ATTENTION, EVERY, EvaluationConfig

ANSWER: Any = Field(
    "own",
    description="full: also as in the MoBA paper: the text is read with the layers' own attention, question and answer "
    "with full attention, which needs parallel.pp 1; own: only as `attention` says",
)


class NamesFiles(Section):
    """Keys of an evaluation that may name files, in addition to corpora."""

    def named_files(self) -> list[str]:
        """Paths of the files."""
        return []


class AnswersConfig(NamesFiles):
    """Keys of evaluations that ask questions about a long text."""

    lengths: list[Length] | None = Field(
        None,
        min_length=1,
        description="tokens of a sample, its answer included; null: a quarter, a half and all of the stage's seq_len",
    )
    extrapolate: bool = Field(
        False, description="true: also lengths beyond a stage's seq_len; false: a stage leaves out longer ones"
    )
    corpus: str | None = Field(
        None,
        min_length=1,
        description="prefix of the tokenised corpus that natural text comes from; null: the first of data.validation",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the samples, which are the same at every evaluation")
    every: int | None = EVERY
    attention: Literal["own", "both"] = ATTENTION
    chat: bool = Field(
        False, description="ask through the chat template in the folder of data.tokenizer, as a user's message"
    )


def asking(evaluation: EvaluationConfig) -> dict[str, AnswersConfig]:
    """The sections that ask questions about a long text, by name."""
    return {name: section for name, section in evaluation if isinstance(section, AnswersConfig)}


class HiddenNeedles(AnswersConfig):
    """Keys of evaluations that hide sentences with a number each in a long text."""

    depths: list[Annotated[float, Field(ge=0, le=100)]] = Field(
        [0, 25, 50, 75, 100],
        min_length=1,
        description="depth of the needle in % of the haystack; 0: its beginning, 100: its end",
    )
    samples: int = Field(4, ge=1, le=MOST_SAMPLES, description="samples of each length and depth")
    needles: int = Field(
        1, ge=1, le=32, description="needles that are asked for; the first is at the depth, others are anywhere"
    )
    keys: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="needles in the haystack, including those that are not asked for; null: as many as `needles`",
    )
    haystack: Literal["natural", "synthetic"] = Field(
        "natural", description="natural: text of `corpus`; synthetic: RULER's few sentences, repeated"
    )


class NeedleConfig(HiddenNeedles):
    """Needle in a haystack: sentences with a number each are hidden in a long text, at each depth, and the model is
    asked for them. See docs/how-to/evaluate.md."""

    generate: bool = Field(False, description="also answer by greedy generation, which needs parallel.tp and pp 1")
    answer: Literal["own", "full"] = ANSWER
