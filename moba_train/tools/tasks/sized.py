"""Tasks whose texts are made in any size, and the largest samples of them that a length allows."""

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from moba_train.attention.layout import TokenRange
from moba_train.config.base import MOST_SAMPLES
from moba_train.config.evaluation import ATTENTION
from moba_train.errors import DataError
from moba_train.evals.evaluation import EvaluationSetting
from moba_train.tools.needle.answers import Question, encode_segments
from moba_train.tools.needle.haystack import Conversation, NaturalText, corpus_of, open_tokenizer
from moba_train.tools.needle.options import ANSWER, CHAT, AnswersConfig
from moba_train.tools.tasks.metrics import found_share


class TasksConfig(AnswersConfig):
    """Keys of evaluations by tasks."""

    attention: Literal["own", "both"] = ATTENTION
    chat: bool = CHAT
    tasks: list[str]
    samples: int = Field(8, ge=1, le=MOST_SAMPLES, description="samples of each task and length")
    scoring: Literal["teacher_forced", "generated"]
    answer: Literal["own", "full"] = ANSWER


@dataclass(frozen=True)
class Prompt:
    """A question of a task, as tokens, and the score of an answer in words."""

    question: Question
    references: list[str]
    most_tokens: int
    """Tokens of a generated answer, at most."""
    score: Callable[[str, Sequence[str]], float]
    """Score, 0 to 1, of a generated answer by the references."""


@dataclass(frozen=True)
class TaskText:
    """A question of a task."""

    before: str
    """The task, up to the context."""
    context: str
    after: str
    """The question."""
    prefix: str
    """Beginning of the answer, in the prompt."""
    answer: list[tuple[str, bool]]
    """Parts of the answer, each with True if it is one of the references; the others only separate them."""
    example: str = ""
    """A question with its answer that precedes the task."""

    @property
    def references(self) -> list[str]:
        """Texts that the answer must contain."""
        return [text.strip() for text, counts in self.answer if counts]


class SizedTask(ABC):
    """One task. `size` counts what its context is made of: sentences, words or needles."""

    tokens_to_generate: int
    """Limit of the answer's tokens, which are part of the length."""

    @property
    def natural(self) -> bool:
        """True if its context is text of a corpus."""
        return False

    @property
    @abstractmethod
    def least(self) -> int:
        """The smallest `size`."""

    @abstractmethod
    def text(self, size: int, length: int, rng: random.Random, words: Sequence[str]) -> TaskText:
        """A question whose context has this size, for samples of `length` tokens; `words`: of natural text."""

    def most(self, length: int, words: Sequence[str]) -> int:
        """The largest `size`."""
        return len(words) if self.natural else length

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Score, 0 to 1, of a generated answer: RULER's."""
        return found_share(answer, references)


class SizedTexts:
    """Samples of `tasks`, as large as their length allows: pure functions of task, length and number of the sample.

    key: that of the section `options`

    Raises DataError without a tokenizer, for a damaged corpus, and for lengths that a task does not fit in.
    """

    def __init__(
        self, options: TasksConfig, setting: EvaluationSetting, key: str, tasks: Mapping[str, SizedTask]
    ) -> None:
        self.tokenizer = open_tokenizer(setting, options.chat)
        self._options = options
        self._key = key
        self._made = tasks
        self._conversation = Conversation(setting, options.chat, key)
        self._words = functools.lru_cache(maxsize=1)(self._draw_words)
        natural = any(tasks[task].natural for task in options.tasks if task in tasks)
        prefix = corpus_of(setting)
        self._natural = NaturalText(prefix, self.tokenizer) if natural and prefix is not None else None

    def excess(self, task: str, length: int) -> int:
        """Number of tokens of the shortest sample of a task beyond `length`, 0 or less if it fits. Raises DataError
        when the corpus has too little text for it."""
        return self._excess(task, length, 0, self._made[task].least)

    def check(self, task: str, length: int) -> None:
        """Raise DataError as `excess`, and when the shortest sample of a task does not fit in `length` tokens."""
        if (excess := self.excess(task, length)) > 0:
            raise DataError(
                f"{self._key}.lengths: given {length}; the shortest sample of {task} has {length + excess} tokens, its "
                "answer included; give longer ones, or leave the task out"
            )

    def questions(self, task: str, length: int) -> list[Prompt]:
        """All samples of a task, of at most `length` tokens each. Raises DataError as `check` does."""
        self.check(task, length)
        size = self._size(task, length)
        return [self._prompt(task, length, index, size) for index in range(self._options.samples)]

    def _size(self, task: str, length: int) -> int:
        """The largest size whose first sample fits in `length` tokens."""
        fits = self._made[task].least
        most = self._made[task].most(length, self._words(task, length, 0))
        # Doubled first, so that no text is encoded that is much longer than the sample.
        too_large = min(2 * fits, most + 1)
        while too_large <= most and self._excess(task, length, 0, too_large) <= 0:
            fits = too_large
            too_large = min(2 * fits, most + 1)
        while too_large - fits > max(1, fits // 200):
            size = (fits + too_large) // 2
            if self._excess(task, length, 0, size) > 0:
                too_large = size
            else:
                fits = size
        return fits

    def _prompt(self, task: str, length: int, index: int, size: int) -> Prompt:
        """Sample `index`, smaller than `size` if it would be too long."""
        least = self._made[task].least
        while size > least and self._excess(task, length, index, size) > 0:
            size = max(least, size - max(1, size // 100))
        text = self._text(task, length, index, size)
        question = self.encode(text)
        if len(question.tokens) > length:
            raise DataError(f"{self._key}.lengths: given {length}, too short for sample {index} of {task}")
        made = self._made[task]
        return Prompt(question, text.references, made.tokens_to_generate, made.score)

    def _excess(self, task: str, length: int, index: int, size: int) -> int:
        """Number of tokens of a sample beyond `length`, with room for its answer; 0 or less if it fits."""
        question = self.encode(self._text(task, length, index, size))
        answer = max(self._made[task].tokens_to_generate, len(question.tokens) - question.prompt_length)
        return question.prompt_length + answer - length

    def _text(self, task: str, length: int, index: int, size: int) -> TaskText:
        rng = random.Random(f"{task} 0 {length} {index}")
        return self._made[task].text(size, length, rng, self._words(task, length, index))

    def _draw_words(self, task: str, length: int, index: int) -> list[str]:
        """Natural text for a sample; empty if its task has none."""
        rng = random.Random(f"text {task} 0 {length} {index}")
        return self._natural.words(length, rng) if self._made[task].natural and self._natural else []

    def encode(self, text: TaskText) -> Question:
        """Tokens of a sample. The answer is encoded as it continues the end of its prompt."""
        space = "" if text.prefix[:1].isspace() else " "
        before, after = self._conversation.around(text.example + text.before, text.after, space + text.prefix)
        tokens = self.tokenizer.begin(before + text.context + after)
        context = self.tokenizer.begin(before + text.context)  # its last token may hold a part of the question
        text_length = next(
            (at for at, both in enumerate(zip(context, tokens, strict=False)) if both[0] != both[1]),
            min(len(context), len(tokens)),
        )
        _, *answer = encode_segments(self.tokenizer, [text.prefix, *(part for part, _ in text.answer)])
        prompt_length = len(tokens)
        answers = []
        for part, (_, counts) in zip(answer, text.answer, strict=True):
            if counts:
                answers.append(TokenRange(len(tokens), len(tokens) + len(part)))
            tokens += part
        return Question(tokens, prompt_length, answers, [], text_length)
