"""RULER's tasks on a model: how much of the answers is found, by length of the context."""

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from moba_train.attention.protocol import TokenRange
from moba_train.config.base import MOST_SAMPLES, format_count
from moba_train.config.evaluation import AnswersConfig
from moba_train.config.explain import did_you_mean
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.errors import DataError
from moba_train.evals.answers import Question, encode_segments, generated_answers, predicted_answers, share
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationResult
from moba_train.evals.haystack import (
    Conversation,
    NaturalText,
    corpus_of,
    length_problems,
    open_tokenizer,
    stage_lengths,
    trained_length,
)
from moba_train.tools.ruler.ruler_tasks import TASKS, TaskText, found_share

TEACHER_FORCED, GENERATED = "teacher_forced", "generated"


class RulerConfig(AnswersConfig):
    """RULER's tasks (Hsieh et al. 2024, arXiv:2404.06654), made here without downloads. See docs/retrieval.md."""

    tasks: list[str] = Field(
        ["niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"],
        min_length=1,
        description="tasks by name; besides these, niah_single_2, niah_single_3, niah_multikey_2 and niah_multikey_3",
    )
    samples: int = Field(8, ge=1, le=MOST_SAMPLES, description="samples of each task and length")
    scoring: Literal["teacher_forced", "generated"] = Field(
        "teacher_forced",
        description="which answers the numbers are about; generated: RULER's own score, by greedy generation, which "
        "needs parallel.tp and pp 1; teacher_forced: the most likely tokens given the right ones before, in one "
        "forward pass",
    )


class Ruler(Evaluation):
    """Mean score of each task over the lengths, and of all tasks."""

    name = "ruler"
    Options = RulerConfig
    data_name = "ruler_scores"
    numbers = frozenset({"ruler", *(f"ruler_{task}" for task in TASKS)})

    def __init__(self, config: RunConfig, stage: Stage) -> None:
        wanted = self.options_in(config)
        assert isinstance(wanted, RulerConfig)
        self.every = wanted.every or config.evaluation.every
        self.compare_with_full = wanted.attention == "both"
        self._wanted = wanted
        self._tasks = list(dict.fromkeys(wanted.tasks))
        self._trained = trained_length(config, stage)
        self._texts = RulerTexts(config, wanted)
        self._lengths = stage_lengths(wanted, stage)
        if wanted.lengths is None:
            self._lengths = [
                length for length in self._lengths if all(self._texts.fits(task, length) for task in self._tasks)
            ]
        if not self._lengths:
            self.missing = f"{self.key}.lengths: none is at most seq_len {stage.seq_len} and holds every task"

    @classmethod
    def problems(cls, config: RunConfig) -> Iterator[str]:
        """Unknown tasks, no tokenizer or text, lengths that no stage has, and numbers of tasks that do not run."""
        wanted = cls.options_in(config)
        if not isinstance(wanted, RulerConfig):
            return
        yield from length_problems(config, wanted, cls.key)
        for task in wanted.tasks:
            if task not in TASKS:
                hint = did_you_mean(task, [*TASKS])
                yield f"{cls.key}.tasks: given {task!r}{hint}; allowed: {', '.join(TASKS)}"
        natural = [task for task in wanted.tasks if task in TASKS and TASKS[task].natural]
        if natural and corpus_of(config, wanted) is None:
            yield (
                f"{cls.key}.tasks: {', '.join(natural)} hide needles in natural text, but there is none; set "
                f"data.validation or {cls.key}.corpus, or leave these tasks out"
            )
        if wanted.scoring == GENERATED and config.parallel.tp > 1:
            yield (
                f"{cls.key}.scoring: given {GENERATED!r}, which parallel.tp {config.parallel.tp} cannot do; allowed: "
                f"{TEACHER_FORCED}"
            )
        for index, stage in enumerate(config.stages):
            for metric in stage.until.metrics if stage.until else ():
                task = metric.removeprefix("ruler_")
                if task in TASKS and task != metric and task not in wanted.tasks:
                    yield f"stages[{index}].until.metric: {metric} is not evaluated; add {task} to {cls.key}.tasks"

    @classmethod
    def pipeline_problem(cls, config: RunConfig) -> tuple[str, str] | None:
        """Generation."""
        wanted = cls.options_in(config)
        generates = isinstance(wanted, RulerConfig) and wanted.scoring == GENERATED
        return (f"{cls.key}.scoring: given {GENERATED!r}", f"set it to {TEACHER_FORCED}") if generates else None

    @classmethod
    def data_problems(cls, config: RunConfig, stage: Stage) -> Iterator[str]:
        """No length of the recipe's that the stage has."""
        wanted = cls.options_in(config)
        if isinstance(wanted, RulerConfig) and not stage_lengths(wanted, stage):
            yield f"{cls.key}.lengths has none of at most seq_len {stage.seq_len}; add one, or set extrapolate: true"

    @classmethod
    def check_samples(cls, config: RunConfig, stage: Stage) -> None:
        """Raises DataError for lengths that a task does not fit in, and for too little text around needles."""
        ruler = cls(config, stage)
        for task in ruler._tasks:
            for length in ruler._lengths:
                ruler._texts.check(task, length)

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`ruler` and `ruler_TASK` with the own attention."""
        wanted = self._wanted
        trained = context.trained_length or self._trained
        asked = {
            task: {length: self._texts.questions(task, length) for length in self._lengths} for task in self._tasks
        }
        scores = {name: self._scores(context, asked, name) for name in context.each_attention()}
        means = {name: self._means(found[wanted.scoring]) for name, found in scores.items()}
        numbers = means[context.own]
        message = f"ruler {numbers['ruler']:.3f} with {context.own} attention"
        if "full" in means and context.own != "full":
            message += f", {means['full']['ruler']:.3f} with full attention on the same weights"
        message += f" ({wanted.scoring})"
        data = {
            "attention": context.own,
            "scoring": wanted.scoring,
            "trained_length": trained,
            "lengths": self._lengths,
            "tasks": self._tasks,
            "samples": wanted.samples,
            "seed": wanted.seed,
            "scores": scores,
        }
        table = [line for name, found in scores.items() for line in self._table(name, found)]
        where = f"{wanted.samples} samples of each task and length, seed {wanted.seed}"
        table.append(f"{where}; trained on {trained} tokens")
        return EvaluationResult(numbers, message, [*table, message], data)

    def _scores(
        self, context: EvaluationContext, asked: Mapping[str, Mapping[int, list["Prompt"]]], name: str
    ) -> dict[str, dict[str, list[float]]]:
        """By scoring, then by task: a score for each length, with the model's present attention."""
        found: dict[str, dict[str, list[float]]] = {TEACHER_FORCED: {task: [] for task in asked}}
        if self._wanted.scoring == GENERATED:
            found[GENERATED] = {task: [] for task in asked}
        tokenizer = self._texts.tokenizer
        for task, by_length in asked.items():
            for length, prompts in by_length.items():
                what = f"{task}, {name}, {format_count(length, 1024)}"
                questions = [prompt.question for prompt in prompts]
                predicted = predicted_answers(context, questions, length, what, None)
                right = [share(q.right(tokens)) for q, tokens in zip(questions, predicted, strict=True)]
                found[TEACHER_FORCED][task].append(sum(right) / len(right))
                if GENERATED not in found:
                    continue
                most = TASKS[task].tokens_to_generate
                answers = generated_answers(context, questions, most, tokenizer, f"{what}, generated")
                shares = [
                    found_share(tokenizer.decode(answer), prompt.references)
                    for answer, prompt in zip(answers, prompts, strict=True)
                ]
                found[GENERATED][task].append(sum(shares) / len(shares))
        return found

    def _means(self, scores: Mapping[str, list[float]]) -> dict[str, float]:
        """The evaluation's numbers."""
        tasks = {f"ruler_{task}": sum(values) / len(values) for task, values in scores.items()}
        return {"ruler": sum(tasks.values()) / len(tasks), **tasks}

    def _table(self, name: str, scores: Mapping[str, Mapping[str, list[float]]]) -> Iterator[str]:
        """A line for each task, a column for each length."""
        for scoring, by_task in scores.items():
            columns = "".join(f"{format_count(length, 1024):>8}" for length in self._lengths)
            yield f"{f'{name}, {scoring}':<32}{columns}"
            for task, values in by_task.items():
                yield f"{task:<32}" + "".join(f"{value:>8.2f}" for value in values)


@dataclass(frozen=True)
class Prompt:
    """A question of a task, as tokens."""

    question: Question
    references: list[str]


class RulerTexts:
    """Makes the samples of a recipe: pure functions of task, length, number of the sample, and seed.

    Raises DataError without a tokenizer, for a damaged corpus, and for lengths that a task does not fit in.
    """

    def __init__(self, config: RunConfig, wanted: RulerConfig) -> None:
        self.tokenizer = open_tokenizer(config, wanted)
        self._wanted = wanted
        self._conversation = Conversation(config, wanted.chat, Ruler.key)
        prefix = corpus_of(config, wanted)
        self._natural: NaturalText | None = None
        self._words = functools.lru_cache(maxsize=1)(self._draw_words)
        if prefix is not None and any(TASKS[task].natural for task in wanted.tasks):
            key = f"{Ruler.key}.corpus" if wanted.corpus else "data.validation"
            self._natural = NaturalText(config, prefix, self.tokenizer, key)

    def fits(self, task: str, length: int) -> bool:
        """Whether the shortest sample of a task fits in `length` tokens."""
        return self._excess(task, length, 0, TASKS[task].least) <= 0

    def check(self, task: str, length: int) -> None:
        """Raises DataError where the shortest sample of a task does not fit in `length` tokens, or the corpus has too
        little text for it."""
        excess = self._excess(task, length, 0, TASKS[task].least)
        if excess > 0:
            raise DataError(
                f"{Ruler.key}.lengths: given {length}; the shortest sample of {task} has {length + excess} tokens, its "
                "answer included; give longer ones, or leave the task out"
            )

    def questions(self, task: str, length: int) -> list[Prompt]:
        """All samples of a task of at most `length` tokens. Raises DataError as `check` does."""
        self.check(task, length)
        size = self._size(task, length)
        return [self._prompt(task, length, index, size) for index in range(self._wanted.samples)]

    def _size(self, task: str, length: int) -> int:
        """The largest size whose first sample fits in `length` tokens."""
        fits = TASKS[task].least
        most = TASKS[task].most(length, self._words(task, length, 0))
        # Doubled first, so that no text is tried that is much longer than the sample.
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
        """Sample `index`, smaller than `size` where it would be too long."""
        least = TASKS[task].least
        while size > least and self._excess(task, length, index, size) > 0:
            size = max(least, size - max(1, size // 100))
        text = self._text(task, length, index, size)
        question = self._question(text)
        if len(question.tokens) > length:
            raise DataError(f"{Ruler.key}.lengths: given {length}, too short for sample {index} of {task}")
        return Prompt(question, text.references)

    def _excess(self, task: str, length: int, index: int, size: int) -> int:
        """Tokens of a sample beyond `length`, with room for its answer; at most 0: it fits."""
        question = self._question(self._text(task, length, index, size))
        answer = max(TASKS[task].tokens_to_generate, len(question.tokens) - question.prompt_length)
        return question.prompt_length + answer - length

    def _text(self, task: str, length: int, index: int, size: int) -> TaskText:
        rng = random.Random(f"{task} {self._wanted.seed} {length} {index}")
        return TASKS[task].text(size, length, rng, self._words(task, length, index))

    def _draw_words(self, task: str, length: int, index: int) -> list[str]:
        """Natural text for a sample, where its task has any."""
        rng = random.Random(f"text {task} {self._wanted.seed} {length} {index}")
        return self._natural.words(length, rng) if TASKS[task].natural and self._natural else []

    def _question(self, text: TaskText) -> Question:
        """The tokens of a sample. The answer is encoded with the end of its prompt, as it would go on there."""
        before, after = self._conversation.around(text.example + text.before, text.after, text.prefix)
        tokens = self.tokenizer.begin(before + text.context + after)
        _, *answer = encode_segments(self.tokenizer, [text.prefix, *(part for part, _ in text.answer)])
        prompt_length = len(tokens)
        answers = []
        for part, (_, counts) in zip(answer, text.answer, strict=True):
            if counts:
                answers.append(TokenRange(len(tokens), len(tokens) + len(part)))
            tokens += part
        return Question(tokens, prompt_length, answers, [])
