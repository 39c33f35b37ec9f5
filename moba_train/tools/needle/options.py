"""Sections of the evaluations that hide needles, and the keys that all evaluations with answers share."""

from typing import Annotated, Any, Literal

from pydantic import Field

from moba_train.config.base import MOST_SAMPLES, Length, Section
from moba_train.config.evaluation import ATTENTION, EVERY

CHAT: Any = Field(
    False, description="ask through the chat template in the folder of data.tokenizer, as a user's message"
)
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

    not_here = {
        "extrapolate": "gone: moba-train eval --seq-len evaluates longer than a stage",
        "corpus": "gone: text is that of data.validation; moba-train eval --data gives another",
        "seed": "gone: more `samples` ask further questions",
        "keys": "gone: RULER's niah_multikey hides needles that are not asked for",
        "haystack": "gone: RULER's niah_single hides needles in repeated sentences",
    }

    lengths: list[Length] | None = Field(
        None,
        min_length=1,
        description="tokens of a sample, its answer included; a stage leaves out those beyond its seq_len; null: a "
        "quarter, a half and all of it",
    )
    every: int | None = EVERY


class HiddenNeedles(AnswersConfig):
    """Keys of evaluations that hide sentences with a number each in a long text."""

    not_here = {**AnswersConfig.not_here, "chat": "gone: only needle, ruler and longtasks ask so"}

    depths: list[Annotated[float, Field(ge=0, le=100)]] = Field(
        [0, 25, 50, 75, 100],
        min_length=1,
        description="depth of the needle in % of the haystack; 0: its beginning, 100: its end",
    )
    samples: int = Field(4, ge=1, le=MOST_SAMPLES, description="samples of each length and depth")
    needles: int = Field(
        1, ge=1, le=32, description="needles that are asked for; the first is at the depth, others are anywhere"
    )


class NeedleConfig(HiddenNeedles):
    """Needle in a haystack: sentences with a number each are hidden in a long text, at each depth, and the model is
    asked for them. See docs/how-to/evaluate.md."""

    not_here = AnswersConfig.not_here

    attention: Literal["own", "both"] = ATTENTION
    chat: bool = CHAT
    generate: bool = Field(False, description="also answer by greedy generation, which needs parallel.tp and pp 1")
    answer: Literal["own", "full"] = ANSWER
